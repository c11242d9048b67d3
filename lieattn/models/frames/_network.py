"""The base of networks on the frames of a finite group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_counts, check_size, may_read_values
from lieattn._core.contexts import without_autocast
from lieattn.geometry import (
    FiniteFrames,
    LiftedGraph,
    Neighborhood,
    PointClouds,
    PrincipalFrames,
    SampledFrames,
    lift,
)
from lieattn.groups import FiniteGroup
from lieattn.models._base.inputs import PointInputs, VectorInputs, attribute, lifted_fields
from lieattn.models._base.lifted import LiftedNetwork, new_generator
from lieattn.models._base.network import PointOutputs, cutoff_of
from lieattn.models._base.symmetry import Symmetry, jumps_of_frames, jumps_of_neighbors, of_squares
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


class FrameNetwork(LiftedNetwork):
    """Base class of networks whose points carry one frame for each element of a finite group, in a pose of the cloud.

    Features, components of the input fields in the frames, and angles are embedded. A vector has ``along`` components,
    by default as many as in space, and ``seen`` further numbers are embedded with them. With a neighborhood, ``edges``,
    the result of ``edge_network``, computes the units of each edge once for all blocks, and ``lifting`` sums them.
    """

    attention: str = "none"
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
        vector_inputs: VectorInputs,
        seen: int = 0,
        along: int | None = None,
    ) -> None:
        super().__init__(frames, in_channels, neighborhood, None, vector_inputs)
        self.group, dim = frames.group, frames.group.dim
        self.random_poses = options.random_poses and isinstance(frames.pose, PrincipalFrames)
        self.edge_channels = options.edge_channels
        self.embed_features = nn.Linear(self.in_channels, channels)
        seen += len(self.vector_inputs) * (dim if along is None else along)
        seen += sum(rep.dim for rep in self.field_inputs.values())
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
            self.tied = {"cutoff": f"{self.edges.cutoff:g}", "window": f"{self.edges.window}"}

    @property
    def symmetry(self) -> Symmetry:
        window = self._window if self.attention != "neighborhood" else None
        found = of_squares(Symmetry.of_frames(self.space, self.frames), self.neighborhood, window)
        return found.seeing(self.vector_inputs)

    @property
    def jumps(self) -> tuple[str, ...]:
        own = jumps_of_neighbors(self.neighborhood) if self.attention == "neighborhood" else ()
        found = (*jumps_of_neighbors(self.neighborhood, self._window), *jumps_of_frames(self.frames), *own)
        return tuple(dict.fromkeys(found))

    @property
    def _window(self) -> float | None:
        return None if self.edges is None else self.edges.cutoff

    def _lifted(self, clouds: PointClouds, data: Any, neighborhood: Neighborhood, **given: Any) -> LiftedGraph:
        """Lift clouds with the frames of this pass, random ones in training if there are any.

        ValueError is raised for periodic clouds if the pose is given by principal axes.
        """
        frames = self.frames
        if clouds.cell is not None and isinstance(frames.pose, PrincipalFrames):
            advice = "use the frames of a finite group alone, such as octahedral()"
            raise ValueError(f"data.cell: periodic clouds have no center, and so no principal axes; {advice}")
        if self.random_poses and self.training:
            frames = FiniteFrames(self.group, SampledFrames(1, per="cloud"))
        generator = new_generator() if self.training and isinstance(frames.pose, SampledFrames) else None
        seen = self.seen_vectors(data, clouds)
        with without_autocast(clouds.device):
            return lift(clouds, frames, neighborhood, self.space, generator=generator, vectors=seen, **given)

    def _other_fields(self, data: Any, graph: LiftedGraph) -> list[Tensor]:
        """Return the components ``[points, fiber, *]`` of the input fields that are no vectors, in a list if any."""
        return [lifted_fields(data, self.field_inputs, graph)] if self.field_inputs else []

    def _on_edges(
        self, data: Any, graph: LiftedGraph, invariants: Tensor, directed: Tensor
    ) -> tuple[Tensor | None, LiftedGraph]:
        """Return embedded angles ``[points, 1, channels]``, if any, and a graph with the inputs of the edge network."""
        graph, around, pairs = graph.carrying(terms=cast(EdgeNetwork, self.edges).geometry(graph)), None, None
        if self.angles is not None and self.embed_angles is not None:
            with without_autocast(graph.device):
                of_points, pairs = self.angles(invariants, graph)
            around = self.embed_angles(of_points)[:, None]
        pairs = with_pair_features(pairs, data, self.edge_channels, graph)
        return around, graph.carrying(vectors=directed, edge_features=pairs)


class FrameHead(nn.Sequential):
    """Base class of the heads: two layers with an activation between, and the pooling of their outputs."""

    def __init__(self, hidden: nn.Module, last: nn.Linear, out_channels: int, outputs: PointOutputs) -> None:
        super().__init__(hidden, nn.GELU(), last)
        self.out_channels, self.outputs, self.kind = out_channels, outputs, outputs.kind


def with_pair_features(edges: Tensor | None, data: Any, channels: int, graph: LiftedGraph) -> Tensor | None:
    """Append the features of pairs to features ``[edges, *]`` of the edges of a graph; None if there are neither.

    They are those of ``data.edge_attr`` ``[pairs, channels]`` for the same source and target in ``data.edge_index``
    ``[2, pairs]``, and 0 for all other edges. ValueError is raised for other shapes, for points that do not exist, if a
    pair occurs twice, and for periodic clouds, where a pair has several images.
    """
    if not channels:
        return edges
    own = _features_of_edges(data, channels, graph)
    return own if edges is None else torch.cat([edges, own.to(edges)], dim=1)


def _features_of_edges(data: Any, channels: int, graph: LiftedGraph) -> Tensor:
    index, value = attribute(data, "edge_index"), attribute(data, "edge_attr")
    neighbors, points = graph.neighbors, graph.num_points
    if index.ndim != 2 or len(index) != 2 or index.dtype != torch.int64:
        raise ValueError(f"data.edge_index: expected int64 [2, pairs], got {index.dtype} {tuple(index.shape)}")
    shapes = [(index.shape[1], channels), *([(index.shape[1],)] if channels == 1 else [])]
    if value.shape not in shapes or value.is_complex():
        got = f"{value.dtype} {tuple(value.shape)}"
        raise ValueError(f"data.edge_attr: expected features [pairs={index.shape[1]}, {channels}], got {got}")
    if neighbors.shift is not None:
        raise ValueError("data.edge_attr: expected clouds that are not periodic, where each pair has several images")
    value = value.to(graph.pos).reshape(-1, channels)
    given, order = (index[1] * points + index[0]).sort()
    if may_read_values(value):
        check_size("data.edge_attr", value)
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < points:
            found = f"{int(index.min())} .. {int(index.max())}"
            raise ValueError(f"data.edge_index: expected points from 0 to {points - 1}, got {found}")
        if (twice := (given[1:] == given[:-1]).nonzero()).numel():
            source, target = index[:, order[int(twice[0])]].tolist()
            raise ValueError(f"data.edge_index: expected different pairs, got ({source}, {target}) twice")
    if len(value) == 0:
        return value.new_zeros(neighbors.num_edges, channels)
    wanted = neighbors.target * points + neighbors.source
    if torch.compiler.is_exporting():  # ONNX has no binary search
        return (wanted[:, None] == given).to(value) @ value[order]
    place = torch.searchsorted(given, wanted).clamp(max=len(given) - 1)
    return torch.where((given[place] == wanted)[:, None], value[order[place]], 0)


def in_frames(
    frames: FiniteGroup | FiniteFrames | PrincipalFrames, of_axes: Callable[[bool], FiniteGroup]
) -> FiniteFrames:
    """Return the frames of a group, or those of ``of_axes(improper)`` in the pose of principal axes."""
    if isinstance(frames, PrincipalFrames):
        return FiniteFrames(of_axes(bool(frames.improper)), frames)
    return FiniteFrames(frames) if isinstance(frames, FiniteGroup) else frames
