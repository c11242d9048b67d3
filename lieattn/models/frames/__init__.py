"""Networks on frames: one frame of a neighbor for each frame of a point, and group-tied maps between them."""

from lieattn.models.frames._directions import DirectionConvNet, DirectionOptions
from lieattn.models.frames._framewise import FramewiseOptions, FramewiseTransformer

__all__ = [
    "DirectionConvNet",
    "DirectionOptions",
    "FramewiseOptions",
    "FramewiseTransformer",
]
