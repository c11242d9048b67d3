"""Models of steerable features, on e3nn, to compare regular-representation models with.

All have the interface of :class:`lieattn.models.FramewiseTransformer`: invariant features ``data.x``, vector inputs
by name, and outputs for each cloud or point that are numbers or vectors. They are equivariant to E(3), reflections
included, for every rotation and not only those of a finite group.
"""

from lieattn.models.irreps._networks import (
    DistanceTransformer,
    PointOptions,
    RadialOptions,
    SE3Transformer,
    TensorFieldNetwork,
)

__all__ = ["DistanceTransformer", "PointOptions", "RadialOptions", "SE3Transformer", "TensorFieldNetwork"]
