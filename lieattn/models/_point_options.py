"""Options that networks of points share: outputs, and the distance at which neighbors count nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from lieattn._checks import check_length, check_neighborhood
from lieattn.geometry import Neighborhood, PointClouds
from lieattn.nn import CloudPool

Pool = Literal["mean", "sum", "max", "none"]
OutputKind = Literal["invariant", "vector"]


@dataclass(frozen=True)
class PointOutputs:
    """How numbers or vectors of the points become outputs; a value.

    Attributes
    ----------
    kind
        ``"invariant"`` numbers, or ``"vector"`` outputs.
    pool
        ``"mean"``, ``"sum"`` or ``"max"`` over the points of each cloud, the last for numbers only; ``"none"`` for
        outputs at the points.
    """

    kind: OutputKind = "invariant"
    pool: Pool = "mean"

    def __post_init__(self) -> None:
        for argument, option, allowed in (("kind", self.kind, OutputKind), ("pool", self.pool, Pool)):
            if option not in get_args(allowed):
                raise ValueError(f"{argument}: expected one of {get_args(allowed)}, got {option!r}")
        if self.kind == "vector" and self.pool == "max":
            raise ValueError("pool: vectors have no maximum that turns along; expected 'mean', 'sum' or 'none'")

    def __call__(self, values: Tensor, clouds: PointClouds) -> Tensor:
        """``[points, out_channels]`` or ``[points, out_channels, dim]`` to outputs; one vector loses its axis."""
        if self.kind == "vector" and values.shape[1] == 1:
            values = values[:, 0]
        if self.pool == "none":
            return values
        pooled: Tensor = CloudPool(self.pool)(values, clouds)
        return pooled


def cutoff_of(neighborhood: Neighborhood, cutoff: float | None) -> float:
    """Distance at which neighbors count nothing: the one given, or the neighborhood's own length.

    Raises
    ------
    TypeError, ValueError
        If it is no length, or there is none.
    """
    check_neighborhood(neighborhood)
    found = neighborhood.length if cutoff is None else cutoff
    if found is None:
        raise ValueError(f"cutoff: {neighborhood} has no length of its own; give the distance at which it ends")
    check_length("cutoff", found)
    return float(found)
