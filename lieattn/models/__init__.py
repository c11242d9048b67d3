"""Networks built from ``lieattn.nn``; each family has a folder."""

from lieattn.models._base.captured import Captured
from lieattn.models._base.inputs import CloudInputs, SortedDistances, Species, VectorEmbedding
from lieattn.models._base.network import EquivariantModule, GroupField, Network, Wrapper
from lieattn.models._base.rescaled import Rescaled
from lieattn.models._base.symmetry import Symmetry
from lieattn.models._base.transfer import transfer_weights
from lieattn.models._base.wrappers import Ensemble, FieldModel, Preprocessed, Spread
from lieattn.models.affine import AffineNet, AffineSelfConvNet, BottleneckBlock
from lieattn.models.attentive import (
    AttentionKind,
    AttentiveAllCNN,
    AttentiveCNN,
    AttentiveDenseBlock,
    AttentiveDenseNet,
    AttentiveNet,
    AttentiveNetwork,
    AttentiveResidualBlock,
    AttentiveResNet,
    AttentiveTransition,
)
from lieattn.models.dynamics import (
    EnergyAndForce,
    EnergyDrift,
    EnergyForces,
    EnergyForceStress,
    HamiltonianDynamics,
    Trajectory,
    energy_drift,
)
from lieattn.models.frames import (
    DirectionConvNet,
    DirectionOptions,
    FramewiseOptions,
    FramewiseTransformer,
    ImageOptions,
    ImageTransformer,
)
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
    image_points,
)
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
