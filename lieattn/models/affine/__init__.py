"""Affine Self Convolution: bottleneck residual networks on images."""

from lieattn.models.affine._blocks import BottleneckBlock
from lieattn.models.affine._network import AffineSelfConvNet

__all__ = ["AffineSelfConvNet", "BottleneckBlock"]
