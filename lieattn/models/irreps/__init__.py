"""Networks on irreps of SO(3) to compare regular representations with."""

from lieattn.models.irreps._networks import (
    DistanceTransformer,
    PointOptions,
    RadialOptions,
    SE3Transformer,
    TensorFieldNetwork,
)

__all__ = [
    "DistanceTransformer",
    "PointOptions",
    "RadialOptions",
    "SE3Transformer",
    "TensorFieldNetwork",
]
