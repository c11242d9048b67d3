"""Functions of the relative element: all that a layer ever sees of the geometry, ``function(graph, x) -> terms``."""

from lieattn.nn.relative._affine import (
    AffineMap,
    AffinePositions,
    AxisKeys,
    FourierFeatures,
    RelativePositionTable,
)
from lieattn.nn.relative._base import RelativeFunction, SumOfTerms
from lieattn.nn.relative._edges import EdgeNetwork, keep_variance
from lieattn.nn.relative._kernels import ConvolutionKernel, NetworkKernel, RankKernel, TableKernel
from lieattn.nn.relative._pair_scores import (
    CombinedScore,
    FeaturePart,
    Kernel,
    LocationPart,
    RelativePositionScore,
    pair_score,
)
from lieattn.nn.relative._per_head import PerHeadMLP
from lieattn.nn.relative._positional import (
    CoordinateEncoding,
    CoordinateNetwork,
    FiberEncoding,
    MLPEncoding,
    PositionalValues,
    TableEncoding,
)
from lieattn.nn.relative._rotary import RotaryEncoding, RotaryPhases, rotary_terms

__all__ = [
    "AffineMap",
    "AffinePositions",
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
    "keep_variance",
    "pair_score",
    "rotary_terms",
]
