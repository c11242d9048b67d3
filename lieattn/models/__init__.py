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
from lieattn.models.gsa import Dropouts, GSAGeometry, GSANet, GSAOptions, GSAReadout, Stages
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
from lieattn.models.published import published_table

__all__ = [
    "AffineSelfConvNet",
    "AttentionOptions",
    "BottleneckBlock",
    "ConvolutionOptions",
    "Dropouts",
    "EnergyAndForce",
    "EnergyDrift",
    "EnergyForces",
    "EquivariantModule",
    "FieldModel",
    "FiniteSE2Transformer",
    "FramewiseOptions",
    "FramewiseTransformer",
    "GSAGeometry",
    "GSANet",
    "GSAOptions",
    "GSAReadout",
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
    "Stages",
    "Symmetry",
    "Trajectory",
    "VectorEmbedding",
    "Wrapper",
    "energy_drift",
    "image_points",
    "published_table",
]
