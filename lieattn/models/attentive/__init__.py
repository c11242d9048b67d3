"""Attentive group convolutional networks on grids of pixels or voxels."""

from lieattn.models.attentive._densenet import AttentiveDenseBlock, AttentiveDenseNet, AttentiveTransition
from lieattn.models.attentive._networks import AttentionKind, AttentiveAllCNN, AttentiveCNN, AttentiveNetwork
from lieattn.models.attentive._resnet import AttentiveResidualBlock, AttentiveResNet

__all__ = [
    "AttentionKind",
    "AttentiveAllCNN",
    "AttentiveCNN",
    "AttentiveDenseBlock",
    "AttentiveDenseNet",
    "AttentiveNetwork",
    "AttentiveResNet",
    "AttentiveResidualBlock",
    "AttentiveTransition",
]
