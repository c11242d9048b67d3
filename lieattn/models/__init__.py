"""Networks of the papers and of this library, built from ``lieattn.nn``; each family has a file or a folder."""

from lieattn.models._captured import Captured
from lieattn.models._ensemble import Ensemble, Spread
from lieattn.models._field_model import FieldModel
from lieattn.models._inputs import CloudInputs, SortedDistances, Species, VectorEmbedding
from lieattn.models._network import EquivariantModule, GroupField, Network, Symmetry
from lieattn.models._preprocessed import Preprocessed
from lieattn.models._rescaled import Rescaled
from lieattn.models._transfer import transfer_weights
from lieattn.models._wrapper import Wrapper
from lieattn.models.affine import AffineSelfConvNet, BottleneckBlock
from lieattn.models.attentive import (
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
from lieattn.models.directions import DirectionConvNet, DirectionOptions
from lieattn.models.dynamics import (
    EnergyDrift,
    HamiltonianDynamics,
    Trajectory,
    energy_drift,
)
from lieattn.models.forces import EnergyAndForce, EnergyForces, EnergyForceStress
from lieattn.models.framewise import FramewiseOptions, FramewiseTransformer
from lieattn.models.gsa import Dropouts, GSAGeometry, GSANet, GSAOptions, GSAReadout, Stages
from lieattn.models.lie._finite_se2 import FiniteSE2Transformer
from lieattn.models.lie._network import AttentionOptions, ConvolutionOptions, Lifting, PairCoordinates, Readout
from lieattn.models.lie._networks import LieConvGeometry, LieConvNet, LieTransformer, image_points
from lieattn.models.published import published_accuracy, published_attentive_cnn, published_inputs, published_table

__all__ = [
    "AffineSelfConvNet",
    "AttentionKind",
    "AttentionOptions",
    "AttentiveAllCNN",
    "AttentiveCNN",
    "AttentiveDenseBlock",
    "AttentiveDenseNet",
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
