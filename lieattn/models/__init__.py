"""The published networks and ours, assembled from ``lieattn.nn``: a folder for each family."""

from lieattn.models._field_model import FieldModel
from lieattn.models._network import EquivariantModule, GroupField, Network, Symmetry, VectorEmbedding, Wrapper
from lieattn.models.affine import AffineSelfConvNet, BottleneckBlock
from lieattn.models.dynamics import (
    EnergyAndForce,
    EnergyDrift,
    EnergyForces,
    HamiltonianDynamics,
    Trajectory,
    energy_drift,
)
from lieattn.models.framewise import FramewiseOptions, FramewiseTransformer
from lieattn.models.lie import (
    AttentionOptions,
    ConvolutionOptions,
    FiniteSE2Transformer,
    LieConvGeometry,
    LieConvNet,
    LieTransformer,
    Lifting,
    PairCoordinates,
    Readout,
    SortedDistances,
    Species,
    image_points,
)

__all__ = [
    "AffineSelfConvNet",
    "AttentionOptions",
    "BottleneckBlock",
    "ConvolutionOptions",
    "EnergyAndForce",
    "EnergyDrift",
    "EnergyForces",
    "EquivariantModule",
    "FieldModel",
    "FiniteSE2Transformer",
    "FramewiseOptions",
    "FramewiseTransformer",
    "GroupField",
    "HamiltonianDynamics",
    "LieConvGeometry",
    "LieConvNet",
    "LieTransformer",
    "Lifting",
    "Network",
    "PairCoordinates",
    "Readout",
    "SortedDistances",
    "Species",
    "Symmetry",
    "Trajectory",
    "VectorEmbedding",
    "Wrapper",
    "energy_drift",
    "image_points",
]
