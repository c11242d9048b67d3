"""Functions ``function(graph, x) -> terms`` of the relative element, through which layers depend on the geometry."""

from lieattn.nn.relative._affine import FourierFeatures, RelativePositionTable
from lieattn.nn.relative._base import RelativeFunction, graph_attention
from lieattn.nn.relative._edge_networks import AngleFeatures, EdgeNetwork
from lieattn.nn.relative._kernels import BumpKernel, ConvolutionKernel, NetworkKernel, TableKernel
from lieattn.nn.relative._pair_scores import (
    CombinedScore,
    Kernel,
    PerHeadMLP,
)
from lieattn.nn.relative._positional import (
    CoordinateEncoding,
    CoordinateNetwork,
    FiberEncoding,
    MLPEncoding,
    PositionalValues,
    RotaryEncoding,
    RotaryPhases,
    TableEncoding,
)

__all__ = [
    "AngleFeatures",
    "BumpKernel",
    "CombinedScore",
    "ConvolutionKernel",
    "CoordinateEncoding",
    "CoordinateNetwork",
    "EdgeNetwork",
    "FiberEncoding",
    "FourierFeatures",
    "Kernel",
    "MLPEncoding",
    "NetworkKernel",
    "PerHeadMLP",
    "PositionalValues",
    "RelativeFunction",
    "RelativePositionTable",
    "RotaryEncoding",
    "RotaryPhases",
    "TableEncoding",
    "TableKernel",
    "graph_attention",
]
