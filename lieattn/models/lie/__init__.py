"""LieTransformer, LieConv, and the finite SE(2) variant: networks of coordinates of relative elements."""

from lieattn.models.lie._finite_se2 import FiniteSE2Transformer
from lieattn.models.lie._network import (
    AttentionOptions,
    ConvolutionOptions,
    Lifting,
    PairCoordinates,
    Readout,
    SortedDistances,
    Species,
)
from lieattn.models.lie._networks import LieConvGeometry, LieConvNet, LieTransformer, image_points

__all__ = [
    "AttentionOptions",
    "ConvolutionOptions",
    "FiniteSE2Transformer",
    "LieConvGeometry",
    "LieConvNet",
    "LieTransformer",
    "Lifting",
    "PairCoordinates",
    "Readout",
    "SortedDistances",
    "Species",
    "image_points",
]
