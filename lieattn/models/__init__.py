"""The published networks, assembled from ``lieattn.nn``: one paper a file."""

from lieattn.models._attentive_all_cnn import AttentiveAllCNN
from lieattn.models._attentive_densenet import AttentiveDenseBlock, AttentiveDenseNet, AttentiveTransition
from lieattn.models._attentive_network import AttentionKind, AttentiveNetwork
from lieattn.models._attentive_resnet import AttentiveResidualBlock, AttentiveResNet
from lieattn.models._gsa_geometry import GSAGeometry
from lieattn.models._lie_coordinates import published_distance, published_pairs
from lieattn.models._lifted_field import LiftedField
from lieattn.models._published_attentive import published_accuracy, published_inputs
from lieattn.models._published_gsa import published_table
from lieattn.models._published_lie import published_kernel
from lieattn.models._residual_blocks import BottleneckBlock
from lieattn.models.affine_self_conv import BottleneckResNet
from lieattn.models.attentive_gcnn import AttentiveCNN, published_attentive_cnn
from lieattn.models.energy_forces import EnergyAndForce, EnergyForces
from lieattn.models.field_model import FieldModel
from lieattn.models.finite_se2 import FiniteSE2Transformer
from lieattn.models.framewise_transformer import FramewiseTransformer
from lieattn.models.gsa_net import GSANet
from lieattn.models.hamiltonian import EnergyDrift, HamiltonianDynamics, Trajectory, energy_drift
from lieattn.models.lie_conv import LieConvGeometry, LieResNet, image_points
from lieattn.models.lie_transformer import LieTransformer

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
    "BottleneckBlock",
    "BottleneckResNet",
    "EnergyAndForce",
    "EnergyDrift",
    "EnergyForces",
    "FieldModel",
    "FiniteSE2Transformer",
    "FramewiseTransformer",
    "GSAGeometry",
    "GSANet",
    "HamiltonianDynamics",
    "LieConvGeometry",
    "LieResNet",
    "LieTransformer",
    "LiftedField",
    "Trajectory",
    "energy_drift",
    "image_points",
    "published_accuracy",
    "published_attentive_cnn",
    "published_distance",
    "published_inputs",
    "published_kernel",
    "published_pairs",
    "published_table",
]
