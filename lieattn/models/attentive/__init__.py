"""Attentive group convolutional networks on images (Romero, Bekkers, Tomczak, Hoogendoorn, ICML 2020)."""

from lieattn.models.attentive._network import AttentionKind, AttentiveNetwork
from lieattn.models.attentive._networks import (
    AttentiveAllCNN,
    AttentiveCNN,
    AttentiveDenseBlock,
    AttentiveDenseNet,
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
