"""Attentive group convolutional networks on grids of pixels or voxels."""

from lieattn.models.attentive._deep import (
    AttentiveDenseBlock,
    AttentiveDenseNet,
    AttentiveResidualBlock,
    AttentiveResNet,
    AttentiveTransition,
)
from lieattn.models.attentive._networks import AttentionKind, AttentiveAllCNN, AttentiveCNN, AttentiveNetwork

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
