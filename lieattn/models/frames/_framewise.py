"""The framewise transformer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_counts, check_length
from lieattn._core.contexts import as_without_autocast, without_autocast
from lieattn.geometry import (
    AllPairs,
    FiniteFrames,
    LiftedGraph,
    Neighborhood,
    PrincipalFrames,
    find_neighbors,
    point_clouds,
    sign_group,
)
from lieattn.groups import FiniteGroup
from lieattn.models._base.inputs import PointInputs, VectorInputs, features, in_precision_of_weights, vectors
from lieattn.models._base.network import GroupField, OutputKind, PointOutputs
from lieattn.models.frames._network import FrameHead, FrameNetwork, FrameOptions, in_frames
from lieattn.nn import FiberNorm, FramewiseBlock, GroupLinear, Pooling, project_field
from lieattn.nn.relative import EdgeNetwork, RotaryPhases
from lieattn.ops import RelativeTerms
from lieattn.reps import Vector

Attention = Literal["cloud", "neighborhood", "none"]
Head = Literal["pooled", "frames"]


@dataclass(frozen=True)
class FramewiseOptions(FrameOptions):
    """Options of :class:`FramewiseTransformer`: those of all networks on frames, of which the first are for its blocks.

    ``dropout`` is also the probability for the attention weights, see :class:`lieattn.nn.FramewiseBlock`.

    Attributes
    ----------
    mlp_ratio, dropout, cutoff, basis, hidden, window, angles, random_poses, edge_channels
        See :class:`FrameOptions`.
    positions
        Whether the embedding depends on positions relative to the mean of the cloud, divided by the length. Without
        it, networks learn faster on molecules and other data where neighborhoods contain more information. If absent,
        it is true for ``attention="cloud"`` and false otherwise.
    attention
        Keys of the attention: all points of the ``"cloud"``; the points of the ``"neighborhood"``, including periodic
        images; or ``"none"`` for messages of the neighborhood without attention, a separable group convolution (as in
        PONITA), whose training steps take two thirds of the time.
    head
        Head of invariant outputs: ``"pooled"``, a network on the mean over the frames, or ``"frames"``, a network whose
        hidden layer is evaluated in each frame before the mean. The head of vectors always uses all frames.
    """

    positions: bool | None = None
    attention: Attention = "cloud"
    head: Head = "pooled"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions and self.attention != "cloud":
            found = f"attention={self.attention!r}"
            raise ValueError(f"positions: expected False with {found}, which does not see the whole cloud")


class FramewiseGeometry(NamedTuple):
    """Geometry of a batch, see :meth:`FramewiseTransformer.geometry`."""

    graph: LiftedGraph  # graph of the attention: all pairs of each cloud, or neighborhoods
    positions: Tensor  # [points | images, fiber, dim], see LiftedGraph.frame_positions
    local: LiftedGraph | None  # the same points with their neighborhoods, for messages; None without neighborhood

    def at(self, pos: Tensor, deformation: Tensor | None = None) -> FramewiseGeometry:
        """Return the same neighbor lists and frames at new positions, see :meth:`lieattn.geometry.LiftedGraph.at`."""
        graph = self.graph.at(pos, deformation)
        local = None if self.local is None else self.local.at(pos, deformation)
        return FramewiseGeometry(graph, graph.frame_positions(), local)


class FramewiseTransformer(FrameNetwork):
    """A transformer on clouds, equivariant to R^d ⋊ H and cheaper than an ordinary transformer of the same width.

    Points carry fields ``[points, fiber, channels]``, so the width is |H| · channels. Each frame attends separately,
    with rotary encodings whose frequencies rotate with the frame. All linear maps are group-tied over the fiber and
    evaluated in the Fourier basis of H, which makes them cheaper than dense maps. H is any finite group of matrices,
    such as C_n and D_n in the plane and the groups of the Platonic solids in space.

    **Equivariance.** When R^d ⋊ H acts on the positions and the vector inputs, invariant outputs do not change, vector
    outputs rotate, and :meth:`field` is translated by H. With principal axes as frames, this holds for all rigid
    motions; with a sampled pose, it holds for rigid motions on average.

    **Periodic clouds.** With ``FramewiseOptions(attention="neighborhood")``, points attend to the neighbors and
    periodic images within a ``Radius`` in place of the whole cloud. With this option, or with ``attention="none"``,
    the network accepts crystals with ``data.cell`` and ``data.pbc``. It does not depend on the choice of the cell,
    except that sums over the points are proportional to its size. A lattice has neither a center nor principal axes, so
    the frames are those of H, as they are or in a sampled pose.

    Parameters
    ----------
    frames
        H; or ``FiniteFrames(H, pose)``, the frames of H relative to a pose of each cloud. The pose can be
        ``PrincipalFrames()``, for groups that contain the sign changes of the axes, such as T, O and I, or
        ``SampledFrames(1, per="cloud")``. In three dimensions ``PrincipalFrames()`` alone means principal axes with the
        group of sign changes, of order 4 (8 with ``improper=True``).
    in_channels
        Number of invariant features ``data.x``, or an object that computes features, see
        :class:`lieattn.models.CloudInputs`.
    out_channels
        Number of outputs, numbers or vectors, for each cloud or point.
    channels, layers, heads
        Channels per frame, which must be a multiple of 2 heads if there is attention (otherwise ValueError); number of
        blocks; number of heads in each frame.
    neighborhood
        Neighbors whose distances and directions are inputs of a :class:`lieattn.nn.LiftingConvolution` before the
        blocks and of :class:`lieattn.nn.FrameMessages` in each block; None for neither of these. With
        ``FramewiseOptions(attention="neighborhood")`` they are also the keys of the attention.
    vector_inputs
        Names of input fields, as for :class:`lieattn.models.VectorEmbedding`, such as ``("vel",)``. Their components
        in the frames are inputs of the embedding.
    length
        Length, in the unit of the positions, over which rotary phases initially change by about one radian.
    kind
        ``"invariant"`` numbers, or ``"vector"`` outputs: the mean over the frames of h_a w(x, a), where w is a vector
        in the coordinates of the frame.
    pool
        ``"mean"``, ``"sum"`` or ``"max"`` over the points of each cloud, or ``"none"`` for outputs at the points.
    options
        Further options.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.geometry import PrincipalFrames, Radius
    >>> from lieattn.models import FramewiseTransformer
    >>> network = FramewiseTransformer(PrincipalFrames(), 2, 1, channels=16, neighborhood=Radius(3.0))
    >>> network(Data(x=torch.randn(9, 2), pos=torch.randn(9, 3))).shape
    torch.Size([1, 1])
    >>> network.symmetry.name
    'SE(3)'
    """

    def __init__(
        self,
        frames: FiniteGroup | FiniteFrames | PrincipalFrames,
        in_channels: PointInputs,
        out_channels: int,
        *,
        channels: int = 32,
        layers: int = 4,
        heads: int = 1,
        neighborhood: Neighborhood | None = None,
        vector_inputs: VectorInputs = (),
        length: float = 1.0,
        kind: OutputKind = "invariant",
        pool: Pooling = "mean",
        options: FramewiseOptions | None = None,
    ) -> None:
        check_arguments(FramewiseTransformer.__init__, locals())
        options = options or FramewiseOptions()
        check_counts(out_channels=out_channels, channels=channels, layers=layers, heads=heads)
        check_length("length", length)
        chosen = in_frames(frames, lambda improper: sign_group(3, improper=improper))
        if options.random_poses and not isinstance(chosen.pose, PrincipalFrames):
            raise ValueError(
                f"random_poses: needs principal axes, which random poses replace in training, got {chosen}; use "
                "PrincipalFrames() or FiniteFrames(group, PrincipalFrames()), or turn the data with RandomRotatePoints"
            )
        for option in ("attention", "angles", "edge_channels"):
            if neighborhood is None and getattr(options, option) not in ("cloud", 0):
                found = f"{option}={getattr(options, option)!r}"
                raise ValueError(
                    f"neighborhood: expected a neighborhood such as Radius(5.0), which {found} needs, got None"
                )
        group = chosen.group
        positions = options.attention == "cloud" if options.positions is None else options.positions
        sizes: dict[str, Any] = {"channels": channels, "vector_inputs": vector_inputs}
        edge_network = partial(EdgeNetwork, group.dim)
        super().__init__(chosen, in_channels, neighborhood, options, edge_network, seen=group.dim * positions, **sizes)
        self.length, self.attention, self.positions = length, options.attention, positions
        self.tied = {**self.tied, "attention": self.attention, "length": repr(float(length))}
        attends = options.attention != "none"
        self.phases = RotaryPhases(group.dim, heads, channels // heads) if attends else None
        block: dict[str, Any] = {"heads": heads, "mlp_ratio": options.mlp_ratio, "dropout": options.dropout}
        block |= {"messages": None if neighborhood is None else options.hidden, "attention": attends}
        self.blocks = nn.ModuleList(FramewiseBlock(group, channels, **block) for _ in range(layers))
        self.norm = FiberNorm(channels)
        outputs = PointOutputs(kind, pool)
        self.head = FramewiseHead(
            channels, out_channels, group.dim, outputs, group if options.head == "frames" else None
        )
        self.has_kinks = pool == "max"

    @in_precision_of_weights
    def geometry(self, data: Any) -> FramewiseGeometry:
        """Lift the clouds.

        Raises
        ------
        ValueError
            If the positions do not have the dimension of the group, or clouds are periodic and points attend to whole
            clouds or the frames are principal axes.
        """
        clouds = point_clouds(data)
        if clouds.cell is not None and self.attention == "cloud":
            advice = "use a Radius as neighborhood and FramewiseOptions(attention='neighborhood')"
            raise ValueError(f"data.cell: attention over whole clouds does not see periodic images; {advice}")
        if clouds.pos.shape[1] != self.group.dim:
            got = tuple(clouds.pos.shape)
            raise ValueError(
                f"data.pos: {self.group.name} acts on {self.group.dim} coordinates, got {got}; use frames of a group "
                f"in {got[1]} dimensions, such as FiniteFrames(sign_group({got[1]}), PrincipalFrames())"
            )
        far, local = self.attention == "cloud", None
        attended = AllPairs() if far or self.neighborhood is None else self.neighborhood
        graph = self._lifted(clouds, data, attended, length=self.length)
        with without_autocast(clouds.device):
            if self.neighborhood is not None:
                neighbors = find_neighbors(clouds, self.neighborhood) if far else graph.neighbors
                # Messages have their own window.
                local = graph.with_relative(replace(graph.relative, neighbors=neighbors, cutoff=None))
            return FramewiseGeometry(graph, graph.frame_positions(), local)

    @in_precision_of_weights
    def field(self, data: Any, geometry: FramewiseGeometry | None = None) -> GroupField:
        graph, positions, local = self.geometry(data) if geometry is None else geometry
        invariants, directed = features(data, self.inputs, graph), vectors(data, self.vector_inputs, graph)
        x = self.embed_features(invariants)[:, None].expand(-1, graph.fiber, -1)
        if self.embed_vectors is not None:
            with without_autocast(graph.device):
                seen = [graph.seen_in_frames(directed).flatten(-2), *self._other_fields(data, graph)]
            x = x + self.embed_vectors(torch.cat([positions, *seen] if self.positions else seen, dim=-1))
        terms = None if self.phases is None else RelativeTerms(rotary=self.phases(positions), rotary_values=True)
        graphs = [graph.carrying(terms=terms)] * len(self.blocks)
        if local is not None and self.edges is not None and self.lifting is not None:
            # One edge network for all frames, and one matrix product for the kernels of all blocks.
            blocks: Any = self.blocks
            maps = [self.lifting.output, *(block.messages.kernel for block in blocks)]
            around, local = self._on_edges(data, local, invariants, directed)
            x = x if around is None else x + around
            lifted, *kernels = self.edges.kernels(maps, local, invariants)
            graphs = [graphs[0].carrying(local=local.carrying(terms=kernel)) for kernel in kernels]
            x = x + local.neighbors.sum_to_targets(lifted)
        for block, own in zip(self.blocks, graphs, strict=True):
            x = self._through(block, x, own)
        return GroupField(self.norm(x), graph)


class FramewiseHead(FrameHead):
    """A network with one hidden layer, on the mean over the frames for invariants, and in each frame for vectors.

    If a ``group`` is given, the hidden layer is tied over its elements, and invariants are read from its mean over the
    frames, or from its maximum, which has kinks.
    """

    def __init__(
        self,
        channels: int,
        out_channels: int,
        dim: int,
        outputs: PointOutputs,
        group: FiniteGroup | None = None,
        reduction: Literal["mean", "max"] = "mean",
    ) -> None:
        width = out_channels if outputs.kind == "invariant" else out_channels * dim
        first = nn.Linear(channels, 2 * channels) if group is None else GroupLinear(group, channels, 2 * channels)
        super().__init__(first, nn.Linear(2 * channels, width), out_channels, outputs)
        self.dim, self.sees_frames, self.reduction = dim, group is not None, reduction

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:  # type: ignore[override]
        """Map a field ``[points, fiber, channels]`` to ``[clouds | points, out_channels]``, vectors with ``dim``."""
        hidden, act, last = self
        if self.kind == "invariant":
            if not self.sees_frames:
                return self.outputs(as_without_autocast(super().forward, x.mean(dim=1), last), graph)
            units = act(hidden(x))
            reduced = units.amax(dim=1) if self.reduction == "max" else units.mean(dim=1)
            return self.outputs(as_without_autocast(last, reduced, last), graph)
        values = project_field(super().forward(x), graph, self.out_channels * Vector(self.dim))
        return self.outputs(values.unflatten(1, (self.out_channels, self.dim)), graph)
