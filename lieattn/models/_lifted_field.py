"""Fields over the frames of points: what models of the group give, and how vectors enter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lieattn.geometry import LiftedElements, PointClouds
from lieattn.models._point_inputs import vectors
from lieattn.nn import RelativeGraph, lift_field
from lieattn.reps import Vector


class LiftedField(NamedTuple):
    """A field over the frames of points, with what it takes to project it back to them.

    Attributes
    ----------
    field
        ``[points, fiber, channels]``.
    clouds
        The points.
    frames
        Linear parts of the frames: ``[fiber, dim, dim]``, or ``[points, fiber, dim, dim]``.
    """

    field: Tensor
    clouds: PointClouds
    frames: Tensor


class VectorEmbedding(nn.Module):
    """Linear map of the components of vectors in the frames.

    **Equivariance.** If points, frames and vectors turn together, the components stay with the frames.

    Parameters
    ----------
    names
        Attributes of the data with vectors ``[points, dim]``; without any there are no weights.
    dim
        Dimension of the space.
    channels
        Channels of the field.
    """

    def __init__(self, names: Sequence[str], dim: int, channels: int) -> None:
        super().__init__()
        self.names = tuple(names)
        self.linear = nn.Linear(dim * len(self.names), channels, bias=False) if self.names else None

    def forward(self, data: Any, graph: RelativeGraph) -> Tensor | None:
        """``[points, fiber, channels]``, None without names; raises TypeError if the graph has no frames."""
        if self.linear is None:
            return None
        if not isinstance(graph, LiftedElements):
            raise TypeError(f"graph: expected lifted elements, whose frames see vectors, got {type(graph).__name__}")
        arrows = vectors(data, self.names, graph).unbind(dim=1)
        seen = [lift_field(arrow, graph, Vector(arrow.shape[1])) for arrow in arrows]
        embedded: Tensor = self.linear(torch.cat(seen, dim=-1))
        return embedded
