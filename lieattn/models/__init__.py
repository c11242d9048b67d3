"""Networks built from ``lieattn.nn``; each family has a folder."""

from lieattn.models._base.captured import Captured
from lieattn.models._base.inputs import CloudInputs, SortedDistances, Species, VectorEmbedding
from lieattn.models._base.network import EquivariantModule, GroupField, Network, Wrapper
from lieattn.models._base.rescaled import Rescaled
from lieattn.models._base.symmetry import Symmetry
from lieattn.models._base.transfer import transfer_weights
from lieattn.models._base.wrappers import Ensemble, FieldModel, Preprocessed, Spread
from lieattn.models.affine._network import AffineNet, AffineSelfConvNet, BottleneckBlock
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
from lieattn.models.dynamics._forces import EnergyAndForce, EnergyForces, EnergyForceStress
from lieattn.models.dynamics._trajectories import EnergyDrift, HamiltonianDynamics, Trajectory, energy_drift
from lieattn.models.frames._directions import DirectionConvNet, DirectionOptions
from lieattn.models.frames._framewise import FramewiseOptions, FramewiseTransformer
from lieattn.models.frames._images import ImageOptions, ImageTransformer
from lieattn.models.gsa._network import GSANet
from lieattn.models.gsa._options import Dropouts, GSAGeometry, GSAOptions, GSAReadout, Stages
from lieattn.models.lie._finite_se2 import FiniteSE2Transformer
from lieattn.models.lie._network import AttentionOptions, ConvolutionOptions, Lifting, PairCoordinates, Readout
from lieattn.models.lie._networks import LieConvGeometry, LieConvNet, LieTransformer, image_points
from lieattn.models.published import published_accuracy, published_attentive_cnn, published_inputs, published_table

__all__ = [
    "AffineNet",
    "AffineSelfConvNet",
    "AttentionKind",
    "AttentionOptions",
    "AttentiveAllCNN",
    "AttentiveCNN",
    "AttentiveDenseBlock",
    "AttentiveDenseNet",
    "AttentiveNet",
    "AttentiveNetwork",
    "AttentiveResNet",
    "AttentiveResidualBlock",
    "AttentiveTransition",
    "BottleneckBlock",
    "Captured",
    "CloudInputs",
    "ConvolutionOptions",
    "DirectionConvNet",
    "DirectionOptions",
    "Dropouts",
    "EnergyAndForce",
    "EnergyDrift",
    "EnergyForceStress",
    "EnergyForces",
    "Ensemble",
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
    "ImageOptions",
    "ImageTransformer",
    "LieConvGeometry",
    "LieConvNet",
    "LieTransformer",
    "Lifting",
    "Network",
    "PairCoordinates",
    "Preprocessed",
    "Readout",
    "Rescaled",
    "SortedDistances",
    "Species",
    "Spread",
    "Stages",
    "Symmetry",
    "Trajectory",
    "VectorEmbedding",
    "Wrapper",
    "energy_drift",
    "image_points",
    "published_accuracy",
    "published_attentive_cnn",
    "published_inputs",
    "published_table",
    "transfer_weights",
]
