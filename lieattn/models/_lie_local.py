"""What frames see of the neighbors of their point, before the blocks of LieTransformer."""

from __future__ import annotations

from torch import Tensor, nn

from lieattn.geometry import LiftedElements
from lieattn.models._lie_graph import check_distances
from lieattn.nn import EdgeNetwork, LiftingConvolution, RelativeGraph
from lieattn.spaces import HomogeneousSpace


class LocalLifting(nn.Module):
    """A lifting convolution over the neighbors of lifted points.

    **Equivariance.** The field stays with the elements where these, points and vectors move together.

    Parameters
    ----------
    space
        Euclidean, of a group that preserves distances.
    in_channels, in_vectors
        Invariant features and vectors of each point.
    channels, hidden, cutoff
        See :class:`lieattn.nn.LiftingConvolution` and :class:`lieattn.nn.EdgeNetwork`.
    """

    def __init__(
        self, space: HomogeneousSpace, in_channels: int, in_vectors: int, channels: int, hidden: int, cutoff: float
    ) -> None:
        super().__init__()
        check_distances("lifting", space)
        self.edges = EdgeNetwork(space.group.dim, in_channels, cutoff=cutoff, in_vectors=in_vectors, hidden=hidden)
        self.convolution = LiftingConvolution(hidden, channels)

    def forward(self, x: Tensor, vectors: Tensor, graph: LiftedElements) -> Tensor:
        """Field ``[points, fiber, channels]`` of features ``[points, in_channels]`` and vectors."""
        field: Tensor = self.convolution(self.edges(graph.pos, graph.neighbors, graph.frames, x, vectors))
        return field


def lifted(graph: RelativeGraph) -> LiftedElements:
    """The graph, if it has frames; TypeError otherwise."""
    if not isinstance(graph, LiftedElements):
        raise TypeError(f"graph: expected lifted elements, which have frames, got {type(graph).__name__}")
    return graph
