"""Affine Self Convolution: bottleneck residual networks on images."""

from lieattn.models.affine._network import AffineSelfConvNet, BottleneckBlock

__all__ = ["AffineSelfConvNet", "BottleneckBlock"]
