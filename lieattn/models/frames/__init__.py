"""Networks on frames: one frame of a neighbor for each frame of a point, and group-tied maps between them."""

from lieattn.models.frames._directions import DirectionConvNet, DirectionOptions
from lieattn.models.frames._framewise import FramewiseOptions, FramewiseTransformer
from lieattn.models.frames._network import FrameOptions

__all__ = [
    "DirectionConvNet",
    "DirectionOptions",
    "FrameOptions",
    "FramewiseOptions",
    "FramewiseTransformer",
]
