"""Networks with affine self convolution."""

from lieattn.models.affine._clouds import AffineNet
from lieattn.models.affine._network import AffineSelfConvNet, BottleneckBlock

__all__ = [
    "AffineNet",
    "AffineSelfConvNet",
    "BottleneckBlock",
]
