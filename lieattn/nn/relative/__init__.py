"""Functions ``function(graph, x) -> terms`` of the relative element, through which layers depend on the geometry."""

from lieattn.nn.relative._affine import AffineMap, AffinePositions, AxisKeys, FourierFeatures, RelativePositionTable
from lieattn.nn.relative._base import RelativeFunction, SumOfTerms, graph_attention
from lieattn.nn.relative._edge_networks import AngleFeatures, EdgeNetwork, keep_variance
from lieattn.nn.relative._kernels import ConvolutionKernel, NetworkKernel, RankKernel, TableKernel
from lieattn.nn.relative._pair_scores import (
    CombinedScore,
    FeaturePart,
    Kernel,
    LocationPart,
    PerHeadMLP,
    RelativePositionScore,
    pair_score,
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
    rotary_terms,
)

__all__ = [
    "AffineMap",
    "AffinePositions",
    "AngleFeatures",
    "AxisKeys",
    "CombinedScore",
    "ConvolutionKernel",
    "CoordinateEncoding",
    "CoordinateNetwork",
    "EdgeNetwork",
    "FeaturePart",
    "FiberEncoding",
    "FourierFeatures",
    "Kernel",
    "LocationPart",
    "MLPEncoding",
    "NetworkKernel",
    "PerHeadMLP",
    "PositionalValues",
    "RankKernel",
    "RelativeFunction",
    "RelativePositionScore",
    "RelativePositionTable",
    "RotaryEncoding",
    "RotaryPhases",
    "SumOfTerms",
    "TableEncoding",
    "TableKernel",
    "graph_attention",
    "keep_variance",
    "pair_score",
    "rotary_terms",
]
