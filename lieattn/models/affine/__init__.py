"""Networks with affine self convolution on grids of pixels."""

from lieattn.models.affine._network import AffineSelfConvNet, BottleneckBlock

__all__ = [
    "AffineSelfConvNet",
    "BottleneckBlock",
]
