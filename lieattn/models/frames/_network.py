"""The base of networks on the frames of a finite group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lieattn._core.autocast import without_autocast
from lieattn._core.checks import check_arguments, check_counts
from lieattn.geometry import (
    AllPairs,
    FiniteFrames,
    LiftedGraph,
    Neighborhood,
    PointClouds,
    PrincipalFrames,
    lift,
    natural_space,
)
from lieattn.groups import FiniteGroup
from lieattn.models._base.inputs import PointInputs, read_inputs, vectors
from lieattn.models._base.network import Network, cutoff_of
from lieattn.models._base.pair_inputs import with_pair_features
from lieattn.models._base.poses import check_geometry, posed, refuse_lattices
from lieattn.nn import LiftingConvolution
from lieattn.nn.relative import AngleFeatures, EdgeNetwork


@dataclass(frozen=True)
class FrameOptions:
    """Options of all networks on frames.

    Attributes
    ----------
    mlp_ratio, dropout
        Ratio of the hidden channels of a block to its channels; dropout probability after both branches of a block.
    cutoff
        Distance at which neighbors have no influence; the length of the neighborhood if absent.
    basis, hidden, window
        Sizes of the :class:`lieattn.nn.relative.EdgeNetwork` of the neighborhood, which all blocks share.
    angles
        Number of functions of the :class:`lieattn.nn.relative.AngleFeatures` of the neighborhood, 0 for none. They are
        invariant to all rotations, including those for which the frames are not exact.
    random_poses
        Whether each cloud gets a random pose in place of its principal axes in training. Without random poses the
        network overfits to the orientation of the training clouds in their principal axes. In evaluation the principal
        axes are used in both cases.
    edge_channels
        Number of features ``data.edge_attr`` ``[pairs, edge_channels]`` of the pairs (source, target) in
        ``data.edge_index``, such as one-hot types of bonds. Neighbors that are not among these pairs have zeros, and
        pairs that are not neighbors, or are beyond the cutoff, have no influence.
    """

    mlp_ratio: int = 4
    dropout: float = 0.0
    cutoff: float | None = None
    basis: int = 8
    hidden: int = 16
    window: int = 4
    angles: int = 0
    random_poses: bool = False
    edge_channels: int = 0

    def __post_init__(self) -> None:
        check_arguments(type(self), vars(self))
        check_counts(mlp_ratio=self.mlp_ratio)
        check_counts(0, angles=self.angles, edge_channels=self.edge_channels)


class FrameNetwork(Network):
    """Base class of networks whose points carry one frame for each element of a finite group, in a pose of the cloud.

    Inputs are embedded by ``embed_features``, ``embed_vectors`` (``seen`` components of vectors in a frame) and
    ``embed_angles``. With a neighborhood, ``edges``, the result of ``edge_network``, computes the units of each edge
    once for all blocks, and ``lifting`` sums them over the neighbors.
    """

    angles: AngleFeatures | None
    embed_angles: nn.Linear | None
    edges: EdgeNetwork | None
    lifting: LiftingConvolution | None

    def __init__(
        self,
        frames: FiniteFrames,
        in_channels: PointInputs,
        neighborhood: Neighborhood | None,
        options: FrameOptions,
        edge_network: Callable[..., EdgeNetwork],
        *,
        channels: int,
        vector_inputs: Sequence[str],
        seen: int,
    ) -> None:
        super().__init__()
        self.inputs, self.in_channels, self.cloud_inputs = read_inputs(in_channels)
        self.frames, self.group, dim = frames, frames.group, frames.group.dim
        self.space, self.neighborhood = natural_space(frames, dim), neighborhood
        check_geometry(self.space, frames, neighborhood or AllPairs())
        self.random_poses = options.random_poses and isinstance(frames.pose, PrincipalFrames)
        self.vector_inputs, self.edge_channels = tuple(vector_inputs), options.edge_channels
        self.embed_features = nn.Linear(self.in_channels, channels)
        self.embed_vectors = nn.Linear(seen, channels, bias=False) if seen else None
        self.angles = self.embed_angles = self.edges = self.lifting = None
        if neighborhood is not None:
            cutoff = cutoff_of(neighborhood, options.cutoff, "options.cutoff")
            sizes: dict[str, Any] = {"cutoff": cutoff, "basis": options.basis, "window": options.window}
            if options.angles:
                self.angles = AngleFeatures(dim, self.in_channels, options.angles, **sizes)
                self.embed_angles = nn.Linear(self.angles.of_points, channels)
            sizes |= {"in_vectors": len(self.vector_inputs), "hidden": options.hidden}
            sizes["in_edges"] = self.edge_channels + (0 if self.angles is None else self.angles.of_edges)
            self.edges = edge_network(self.in_channels, **sizes)
            self.lifting = LiftingConvolution(self.edges.units, channels)

    def tied_to(self) -> dict[str, str]:
        """Return descriptions of the group and geometry, and of the cutoff and window of the edges."""
        edges = {} if self.edges is None else {"cutoff": f"{self.edges.cutoff:g}", "window": f"{self.edges.window}"}
        return {**super().tied_to(), **edges}

    def _lifted(self, clouds: PointClouds, data: Any, neighborhood: Neighborhood, **given: Any) -> LiftedGraph:
        """Lift clouds with the frames of this pass, random ones in training if there are any.

        ValueError is raised for periodic clouds if the pose is given by principal axes.
        """
        refuse_lattices(clouds, self.frames)
        frames, generator = posed(self.frames, self.random_poses, self.training)
        if self.vector_inputs:
            given["vectors"] = vectors(data, self.vector_inputs, clouds)
        with without_autocast(clouds.device):
            return lift(clouds, frames, neighborhood, self.space, generator=generator, **given)

    def _pair_features(self, data: Any, graph: LiftedGraph, invariants: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return embedded angles ``[points, 1, channels]``, and features ``[edges, *]`` of edges; None if absent."""
        around = pairs = None
        if self.angles is not None and self.embed_angles is not None:
            with without_autocast(graph.device):
                of_points, pairs = self.angles(invariants, graph)
            around = self.embed_angles(of_points)[:, None]
        return around, with_pair_features(pairs, data, self.edge_channels, graph)


def in_frames(frames: FiniteGroup | FiniteFrames | PrincipalFrames, of_axes: FiniteGroup) -> FiniteFrames:
    """Return the frames of a group, or those of the group ``of_axes`` in the pose of principal axes."""
    if isinstance(frames, PrincipalFrames):
        return FiniteFrames(of_axes, frames)
    return FiniteFrames(frames) if isinstance(frames, FiniteGroup) else frames
