"""The framewise transformer: attention within every frame, frames mixed by group-tied linear maps."""

from lieattn.models.framewise._transformer import FramewiseGeometry, FramewiseOptions, FramewiseTransformer

__all__ = ["FramewiseGeometry", "FramewiseOptions", "FramewiseTransformer"]
