"""Layers: parameters around the operator, ``layer(x, graph) -> x`` on fields ``[points, fiber, channels]``."""

from lieattn.nn._affine_self_conv import (
    AffineSelfConvolution,
    FiberAffine,
    LiftingAffineSelfConvolution,
    SimpleAffineSelfConvolution,
    StandAloneSelfAttention,
)
from lieattn.nn._affine_tables import OffsetTable, SmoothDisplacements
from lieattn.nn._attention import GroupSelfAttention, LiftingSelfAttention
from lieattn.nn._attentive_clouds import AttentiveGroupConvolution, InputAttention, PoseAttention
from lieattn.nn._attentive_convolution import GridAttentiveConvolution, GridAttentiveLifting
from lieattn.nn._attentive_gates import GridInputAttention, GridPoseAttention
from lieattn.nn._block import PreNormBlock
from lieattn.nn._convolution_kernels import ConvolutionKernel, NetworkKernel, TableKernel
from lieattn.nn._fiber_fourier import FiberToIrreps, IrrepsToFiber, band_limit, fiber_linear, irreps_linear
from lieattn.nn._fields import Frames, lift_field, project_field
from lieattn.nn._framewise import FiberNorm, FramewiseAttention, FramewiseBlock
from lieattn.nn._grid_convolution import GridGroupConvolution, GridLiftingConvolution
from lieattn.nn._grid_fields import act_on_grid, from_grid, grid_images, to_grid
from lieattn.nn._grid_kernels import published_measure
from lieattn.nn._grid_norm import GridBatchNorm, GridSpatialPool
from lieattn.nn._group_convolution import GroupConvolution
from lieattn.nn._heads import DipoleHead, FieldHead, PolarizabilityHead, PseudovectorHead, VectorHead
from lieattn.nn._lie_attention import Kernel, LieSelfAttention
from lieattn.nn._lie_block import BlockNorm, LieBlock, PointBatchNorm
from lieattn.nn._lie_convolution import AttentiveConvolution, KernelNetwork, LieBottleneck, LieConvolution
from lieattn.nn._lie_scores import (
    CombinedScore,
    ContentScore,
    FeaturePart,
    LieScore,
    LocationPart,
    LocationScore,
    RelativePositionScore,
    SumScore,
)
from lieattn.nn._lifting_convolution import EdgeNetwork, FrameEdges, FrameMessages, LiftingConvolution
from lieattn.nn._linear import GroupLinear
from lieattn.nn._location import HeadNetwork, PairGraph, RelativeGraph, pair_coordinates
from lieattn.nn._norm import CloudNorm
from lieattn.nn._pool import CloudPool, FiberPool, GridPool, pooled_positions
from lieattn.nn._positional import (
    CoordinateEncoding,
    CoordinateNetwork,
    FiberEncoding,
    KeyEncoding,
    MLPEncoding,
    PositionalEncoding,
    RotaryEncoding,
    TableEncoding,
)
from lieattn.nn._radial import bessel_functions, keep_variance, smooth_lengths, smooth_window
from lieattn.nn._rotary import RotaryPhases
from lieattn.nn._squeeze_excite import GroupSqueezeExcite

__all__ = [
    "AffineSelfConvolution",
    "AttentiveConvolution",
    "AttentiveGroupConvolution",
    "BlockNorm",
    "CloudNorm",
    "CloudPool",
    "CombinedScore",
    "ContentScore",
    "ConvolutionKernel",
    "CoordinateEncoding",
    "CoordinateNetwork",
    "DipoleHead",
    "EdgeNetwork",
    "FeaturePart",
    "FiberAffine",
    "FiberEncoding",
    "FiberNorm",
    "FiberPool",
    "FiberToIrreps",
    "FieldHead",
    "FrameEdges",
    "FrameMessages",
    "Frames",
    "FramewiseAttention",
    "FramewiseBlock",
    "GridAttentiveConvolution",
    "GridAttentiveLifting",
    "GridBatchNorm",
    "GridGroupConvolution",
    "GridInputAttention",
    "GridLiftingConvolution",
    "GridPool",
    "GridPoseAttention",
    "GridSpatialPool",
    "GroupConvolution",
    "GroupLinear",
    "GroupSelfAttention",
    "GroupSqueezeExcite",
    "HeadNetwork",
    "InputAttention",
    "IrrepsToFiber",
    "Kernel",
    "KernelNetwork",
    "KeyEncoding",
    "LieBlock",
    "LieBottleneck",
    "LieConvolution",
    "LieScore",
    "LieSelfAttention",
    "LiftingAffineSelfConvolution",
    "LiftingConvolution",
    "LiftingSelfAttention",
    "LocationPart",
    "LocationScore",
    "MLPEncoding",
    "NetworkKernel",
    "OffsetTable",
    "PairGraph",
    "PointBatchNorm",
    "PolarizabilityHead",
    "PoseAttention",
    "PositionalEncoding",
    "PreNormBlock",
    "PseudovectorHead",
    "RelativeGraph",
    "RelativePositionScore",
    "RotaryEncoding",
    "RotaryPhases",
    "SimpleAffineSelfConvolution",
    "SmoothDisplacements",
    "StandAloneSelfAttention",
    "SumScore",
    "TableEncoding",
    "TableKernel",
    "VectorHead",
    "act_on_grid",
    "band_limit",
    "bessel_functions",
    "fiber_linear",
    "from_grid",
    "grid_images",
    "irreps_linear",
    "keep_variance",
    "lift_field",
    "pair_coordinates",
    "pooled_positions",
    "project_field",
    "published_measure",
    "smooth_lengths",
    "smooth_window",
    "to_grid",
]
