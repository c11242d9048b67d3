"""Networks on lifts to Lie groups."""

from lieattn.models.lie._finite_se2 import FiniteSE2Transformer
from lieattn.models.lie._network import AttentionOptions, ConvolutionOptions, Lifting, PairCoordinates, Readout
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
    "image_points",
]
