"""Attentive group convolutional networks on images (Romero, Bekkers, Tomczak, Hoogendoorn, ICML 2020)."""

from lieattn.models.attentive._dense import AttentiveDenseBlock, AttentiveDenseNet, AttentiveTransition
from lieattn.models.attentive._network import AttentionKind, AttentiveNetwork
from lieattn.models.attentive._plain import AttentiveAllCNN, AttentiveCNN
from lieattn.models.attentive._residual import AttentiveResidualBlock, AttentiveResNet

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
