"""Attentive group convolutional networks."""

from lieattn.models.attentive._deep import (
    AttentiveDenseBlock,
    AttentiveDenseNet,
    AttentiveResidualBlock,
    AttentiveResNet,
    AttentiveTransition,
)
from lieattn.models.attentive._networks import (
    AttentionKind,
    AttentiveAllCNN,
    AttentiveCNN,
    AttentiveNet,
    AttentiveNetwork,
)

__all__ = [
    "AttentionKind",
    "AttentiveAllCNN",
    "AttentiveCNN",
    "AttentiveDenseBlock",
    "AttentiveDenseNet",
    "AttentiveNet",
    "AttentiveNetwork",
    "AttentiveResNet",
    "AttentiveResidualBlock",
    "AttentiveTransition",
]
