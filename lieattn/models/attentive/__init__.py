"""Attentive group convolutional networks on grids of pixels or voxels."""

from lieattn.models.attentive._networks import (
    AttentionKind,
    AttentiveAllCNN,
    AttentiveCNN,
    AttentiveDenseBlock,
    AttentiveDenseNet,
    AttentiveNetwork,
    AttentiveResidualBlock,
    AttentiveResNet,
    AttentiveTransition,
)

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
