"""Networks with affine self convolution."""

from lieattn.models.affine._network import AffineNet, AffineSelfConvNet, BottleneckBlock

__all__ = [
    "AffineNet",
    "AffineSelfConvNet",
    "BottleneckBlock",
]
