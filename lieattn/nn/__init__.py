"""Layers: modules ``layer(x, graph) -> x`` on fields ``[points, fiber, channels]``, with parameters for the operator.

Functions of the relative element, which serve as encodings and kernels of the layers, are in
:mod:`lieattn.nn.relative`.
"""

from lieattn.nn._affine_attention import (
    AffineSelfConvolution,
    LiftingAffineSelfConvolution,
    SimpleAffineSelfConvolution,
    StandAloneSelfAttention,
)
from lieattn.nn._attention import GroupAttention
from lieattn.nn._attentive_convolution import AttentiveGroupConvolution
from lieattn.nn._blocks import BlockNorm, FramewiseBlock, LieBlock, LieBottleneck, PreNormBlock
from lieattn.nn._convolution import (
    AttentiveConvolution,
    FrameMessages,
    GroupConvolution,
    LieConvolution,
    LiftingConvolution,
)
from lieattn.nn._fields import lift_field, project_field
from lieattn.nn._grid import GridGroupConvolution, GridLiftingConvolution, act_on_grid, from_grid, grid_images, to_grid
from lieattn.nn._grid_attention import (
    GridAttentiveConvolution,
    GridAttentiveLifting,
    GridInputAttention,
    GridPoseAttention,
)
from lieattn.nn._heads import (
    DipoleHead,
    FieldHead,
    Heads,
    InvariantHead,
    PolarizabilityHead,
    Pooling,
    RotationHead,
    VectorHead,
)
from lieattn.nn._linear import (
    FiberToIrreps,
    GroupLinear,
    IrrepsToFiber,
    ZonalLinear,
)
from lieattn.nn._paper_attention import FramewiseAttention, GroupSelfAttention, LieSelfAttention, LiftingSelfAttention
from lieattn.nn._statistics import (
    CloudNorm,
    CloudPool,
    FiberNorm,
    FiberPool,
    FieldBatchNorm,
    GridPool,
    GridSpatialPool,
    GroupSqueezeExcite,
    Inexact,
    PointBatchNorm,
)

__all__ = [
    "AffineSelfConvolution",
    "AttentiveConvolution",
    "AttentiveGroupConvolution",
    "BlockNorm",
    "CloudNorm",
    "CloudPool",
    "DipoleHead",
    "FiberNorm",
    "FiberPool",
    "FiberToIrreps",
    "FieldBatchNorm",
    "FieldHead",
    "FrameMessages",
    "FramewiseAttention",
    "FramewiseBlock",
    "GridAttentiveConvolution",
    "GridAttentiveLifting",
    "GridGroupConvolution",
    "GridInputAttention",
    "GridLiftingConvolution",
    "GridPool",
    "GridPoseAttention",
    "GridSpatialPool",
    "GroupAttention",
    "GroupConvolution",
    "GroupLinear",
    "GroupSelfAttention",
    "GroupSqueezeExcite",
    "Heads",
    "Inexact",
    "InvariantHead",
    "IrrepsToFiber",
    "LieBlock",
    "LieBottleneck",
    "LieConvolution",
    "LieSelfAttention",
    "LiftingAffineSelfConvolution",
    "LiftingConvolution",
    "LiftingSelfAttention",
    "PointBatchNorm",
    "PolarizabilityHead",
    "Pooling",
    "PreNormBlock",
    "RotationHead",
    "SimpleAffineSelfConvolution",
    "StandAloneSelfAttention",
    "VectorHead",
    "ZonalLinear",
    "act_on_grid",
    "from_grid",
    "grid_images",
    "lift_field",
    "project_field",
    "to_grid",
]
