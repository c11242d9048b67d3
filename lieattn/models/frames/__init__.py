"""Networks on the frames of a finite group."""

from lieattn.models.frames._directions import DirectionConvNet, DirectionOptions
from lieattn.models.frames._framewise import FramewiseOptions, FramewiseTransformer
from lieattn.models.frames._images import ImageGeometry, ImageOptions, ImageTransformer
from lieattn.models.frames._network import FrameOptions

__all__ = [
    "DirectionConvNet",
    "DirectionOptions",
    "FrameOptions",
    "FramewiseOptions",
    "FramewiseTransformer",
    "ImageGeometry",
    "ImageOptions",
    "ImageTransformer",
]
