"""Kernels of convolutions: functions of the relative element, as tables or as networks."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import (
    check_arguments,
    check_count,
    check_counts,
    check_features,
    check_graph,
    check_is,
    check_length,
    check_positive,
    check_tensor,
    kind,
)
from lieattn.geometry import LiftedGraph, pixel_positions
from lieattn.groups import FiniteGroup, check_group
from lieattn.nn.relative._base import (
    RelativeFunction,
    check_coordinates,
    check_lifted_to,
    graph_attention,
    measured,
    rows_of_table,
    seen_offsets,
)
from lieattn.nn.relative._edge_networks import edge_kernels
from lieattn.ops import Activation, RelativeTerms, bessel_functions, smooth_lengths, smooth_window
from lieattn.ops import activation as activation_named

_NEAR = 0.1  # share of the cutoff below which directions of edges fade
_MOST_TYPES = 512  # with more types than this, a table is contracted edge by edge
Form = Literal["full", "separable"]


class ConvolutionKernel(RelativeFunction):
    """A kernel ψ_oc(u) of the relative element u = (h_a⁻¹(x_j - x_i), h_a⁻¹ h_b).

    For ``lifting`` the input has no frames, and u is the displacement alone.

    **Equivariance.** That of :class:`RelativeFunction`.
    """

    relative: Tensor
    group: FiniteGroup

    def __init__(self, group: FiniteGroup, in_channels: int, out_channels: int, *, lifting: bool = False) -> None:
        check_arguments(ConvolutionKernel.__init__, locals())
        super().__init__()
        check_counts(in_channels=in_channels, out_channels=out_channels)
        self.group, self.lifting = group, lifting
        self.poses = 1 if lifting else group.order
        self.in_channels, self.out_channels = in_channels, out_channels
        relative = torch.zeros(group.order, 1, dtype=torch.int64) if lifting else group.relative_index.clone()
        self.register_buffer("relative", relative, persistent=False)

    @abc.abstractmethod
    def values(self, graph: LiftedGraph) -> Tensor:
        """Values ``[rows, fiber, frames, out, in]`` for each row, frame h_a, and relative frame h_a⁻¹ h_b."""

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Terms with ``psi`` ``[rows, fiber, frames, out, in]``, the input frame h_b itself on the third axis.

        A head for each output channel sees all input channels, whose sum is the convolution: :meth:`convolve` gives the
        same with less work.
        """
        check_lifted_to(graph, None if self.lifting else self.group, "kernel")
        values = self.values(graph)
        if not self.lifting:
            index = graph.relative.pair_index[None, :, :, None, None]
            values = values.gather(2, index.expand(len(values), -1, -1, *values.shape[3:]))
        return RelativeTerms(psi=values, row=graph.relative.row)

    def convolve(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Σ_j Σ_b Σ_c ψ_oc(u) x_c(j, b): ``[points, frames, in]`` to ``[points, fiber, out]``."""
        check_features(x, next(self.parameters()))
        check_graph(graph, LiftedGraph, x)
        if x.ndim != 3 or len(x) != graph.num_points:
            raise ValueError(f"x: expected [points={graph.num_points}, frames, channels], got {tuple(x.shape)}")
        psi = cast(Tensor, measured(self(graph), graph, "none").psi)
        values = psi.permute(0, 2, 4, 1, 3).flatten(3).flatten(1, 2)
        source, target, row = graph.neighbors.source, graph.neighbors.target, graph.relative.row
        kind = torch.arange(len(source), device=graph.device) if row is None else row
        if len(values) > _MOST_TYPES:
            messages = (x.flatten(1)[source, None] @ values[kind])[:, 0]
        else:
            # Edges of one type share a matrix.
            order = kind.argsort(stable=True)
            counts = torch.bincount(kind, minlength=len(values)).tolist()
            sources = source[order].split(counts)
            messages = torch.cat([x.flatten(1)[own] @ value for own, value in zip(sources, values, strict=True)])
            target = target[order]
        out = messages.new_zeros(len(x), messages.shape[1]).index_add(0, target, messages)
        return out.unflatten(1, (graph.fiber, self.out_channels))


class TableKernel(ConvolutionKernel):
    """A trainable value for every displacement that the frames can see: for grids, where displacements repeat.

    The table has a row for each distinct h⁻¹ o, o one of the ``offsets`` ``[offsets, dim]`` that occur and h in H, the
    offsets first; ``tolerance`` is how far a displacement may be from its row, in the units of the points. Values start
    uniform in ±init_scale / sqrt(in_channels · offsets), as on grids. The rest is as in :class:`ConvolutionKernel`.
    """

    rows: Tensor

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        offsets: Tensor,
        *,
        lifting: bool = False,
        tolerance: float = 1e-3,
        init_scale: float = 1.0,
    ) -> None:
        check_arguments(TableKernel.__init__, locals())
        check_positive(init_scale=init_scale)
        super().__init__(group, in_channels, out_channels, lifting=lifting)
        check_length("tolerance", tolerance)
        self.register_buffer("rows", seen_offsets(offsets, group, tolerance), persistent=False)
        self.tolerance = tolerance
        bound = init_scale / math.sqrt(in_channels * len(offsets))
        weight = torch.empty(out_channels, in_channels, self.poses, len(self.rows)).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)

    @classmethod
    def square(cls, group: FiniteGroup, in_channels: int, out_channels: int, size: int, **options: Any) -> Self:
        """Table for size x size (x size) pixels; its weight is that of :class:`GridGroupConvolution`, flattened."""
        check_count("size", size)
        check_group("group", group)
        offsets = pixel_positions(*[size] * group.dim, dtype=torch.float64)
        return cls(group, in_channels, out_channels, offsets, **options)

    def values(self, graph: LiftedGraph) -> Tensor:
        return self.weight.permute(3, 2, 0, 1)[rows_of_table(graph, self.rows, self.tolerance)]


class NetworkKernel(ConvolutionKernel):
    r"""A small network of the relative element: for point clouds, where nothing repeats.

    Its hidden units are :math:`\phi_m = \sin(\langle w_m, u \rangle + b_m)`, with u the coordinates of
    h_a⁻¹(x_j - x_i) / length and the entries of the matrix h_a⁻¹ h_b, never an angle. They give

    * ``"full"``: :math:`\psi_{oc}(v, q) = \sum_m A_{moc} \phi_m(v, q)`;
    * ``"separable"``: :math:`\psi_{oc}(v, q) = \big( \sum_m B_{om} \phi_m(v) \big) A_{oc}(q)`, which costs as many
      times less as there are input channels.

    Parameters
    ----------
    group, in_channels, out_channels, lifting
        See :class:`ConvolutionKernel`.
    form, hidden
        ``"full"`` or ``"separable"``, and the number of hidden units.
    frequency
        Scale of the first layer's weights at the start: how rough the kernel is, in radians per ``graph.length``.
    window
        Whether to multiply by (1 - |v|²)² for |v| < 1 and 0 beyond: the output does not jump where a point enters.
    init_scale
        Scale of the values at the start.
    """

    matrices: Tensor

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        *,
        lifting: bool = False,
        form: Form = "full",
        hidden: int = 16,
        frequency: float = 3.0,
        window: bool = False,
        init_scale: float = 1.0,
    ) -> None:
        check_arguments(NetworkKernel.__init__, locals())
        check_positive(frequency=frequency, init_scale=init_scale)
        super().__init__(group, in_channels, out_channels, lifting=lifting)
        check_count("hidden", hidden)
        check_length("frequency", frequency)
        self.form, self.window = form, window
        self.position = nn.Linear(group.dim, hidden)
        nn.init.normal_(self.position.weight, std=frequency)
        nn.init.uniform_(self.position.bias, -math.pi, math.pi)
        joint = form == "full" and not lifting
        self.frame = nn.Linear(group.dim**2, hidden, bias=False) if joint else None
        bound = init_scale / math.sqrt(in_channels)
        if form == "full":
            bound *= math.sqrt(6 / hidden)
            self.mix = nn.Parameter(bound * (2 * torch.rand(hidden, out_channels, in_channels) - 1))
        else:
            self.depth = nn.Parameter(math.sqrt(6 / hidden) * (2 * torch.rand(hidden, out_channels) - 1))
            self.mix = nn.Parameter(bound * (2 * torch.rand(self.poses, out_channels, in_channels) - 1))
        matrices = group.elements.to(torch.get_default_dtype()).flatten(-2)
        self.register_buffer("matrices", matrices, persistent=False)

    def features(self, graph: LiftedGraph) -> Tensor:
        """Hidden units ``[rows, fiber, frames, hidden]``; of the displacement alone ``[rows, fiber, 1, hidden]``."""
        check_graph(graph, LiftedGraph, self.matrices, "the weights")
        v = graph.relative.positions.to(self.position.weight.dtype)
        level = self.position(v)[:, :, None]
        if self.frame is not None:
            level = level + self.frame(self.matrices)
        units = torch.sin(level)
        if self.window:
            units = units * (1 - v.square().sum(-1)).clamp(min=0).square()[:, :, None, None]
        return units

    def values(self, graph: LiftedGraph) -> Tensor:
        units = self.features(graph)
        if self.form == "full":
            return torch.einsum("tabm,moc->taboc", units, self.mix)
        return torch.einsum("tam,mo,boc->taboc", units[:, :, 0], self.depth, self.mix)

    def convolve(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        check_features(x, self.mix, self.in_channels)
        units = self.features(graph)
        if self.form == "full":
            if units.shape[2] > 1:  # input frames on the third axis in place of relative ones
                index = self.relative[None, :, :, None].expand(len(units), -1, -1, units.shape[-1])
                units = units.gather(2, index)
            value = x[:, :, None].expand(-1, -1, units.shape[-1], -1)
            summed = self._sweep(value, units[..., None], graph, "query_sum" if self.lifting else "joint")
            return torch.einsum("pamc,moc->pao", summed, self.mix)
        mixed = torch.einsum("pbc,aboc->pao", x, self.mix[self.relative])
        if self.lifting:
            mixed = mixed[:, :1]
        psi = (units @ self.depth)[:, :, :, None]
        return self._sweep(mixed[:, :, None], psi, graph, "query_sum" if self.lifting else "framewise")[:, :, 0]

    def _sweep(
        self, value: Tensor, psi: Tensor, graph: LiftedGraph, pattern: Literal["joint", "framewise", "query_sum"]
    ) -> Tensor:
        terms = RelativeTerms(psi=psi, row=graph.relative.row)
        return graph_attention(None, None, value, graph, pattern=pattern, normalize="none", terms=terms)[0]


class RankKernel(RelativeFunction):
    """The network of LieConv that makes ``rank`` numbers of the ``coordinates`` of a relative element.

    Three linear maps with ``hidden`` units between them, each followed by the activation.
    """

    patterns = ("joint",)

    def __init__(self, coordinates: int, rank: int = 16, hidden: int = 32, activation: Activation = "silu") -> None:
        check_arguments(RankKernel.__init__, locals())
        super().__init__()
        check_counts(coordinates=coordinates, rank=rank, hidden=hidden)
        self.linear1 = nn.Linear(coordinates, hidden)
        self.linear2 = nn.Linear(hidden, hidden)
        self.linear3 = nn.Linear(hidden, rank)
        self.activation: Activation = activation

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Terms with ``displacement_bias`` ``[rows, fiber, fiber, rank]``, one head for each number."""
        check_graph(graph, LiftedGraph, self.linear1.weight, "the weights")
        numbers = graph.relative.coordinates.to(self.linear1.weight.dtype)
        check_coordinates(numbers, self.linear1.in_features)
        act = activation_named("activation", self.activation)
        for linear in (self.linear1, self.linear2, self.linear3):
            numbers = act(linear(numbers))
        return RelativeTerms(displacement_bias=numbers, row=graph.relative.row)


class EdgeNetwork(RelativeFunction):
    r"""A network of what each frame sees of each neighbor of its point.

    .. math::
        \psi_{ija} = w(r_{ij}) \, \phi\big( h_{ia}^{-1} e_{ij},\; h_{ia}^{-1} v_i,\; h_{ia}^{-1} v_j,\;
        R(r_{ij}),\; s_i,\; s_j \big)

    with the distance r, Bessel functions R and a window w that vanishes smoothly at the cutoff, features s and
    vectors v of the points, a network φ with two layers, and directions
    :math:`e = (x_j - x_i) / \sqrt{r^2 + (0.1\,\text{cutoff})^2}`, which fade where points coincide.

    **Equivariance.** ψ stays with the frames where these and all vectors turn together.

    Parameters
    ----------
    dim, in_channels, in_vectors
        Dimension of space, invariant features and vectors of each point; there may be none.
    cutoff
        Distance at which neighbors count nothing, in the unit of the positions.
    basis, hidden
        Number of Bessel functions, and units of both layers of φ.
    window
        Power of w(r) = (1 - r² / cutoff²)^window, which has one continuous derivative less.
    in_edges
        Invariant features of the edges, which φ sees besides.
    """

    dim: int

    def __init__(
        self,
        dim: int,
        in_channels: int,
        *,
        cutoff: float,
        in_vectors: int = 0,
        basis: int = 8,
        hidden: int = 16,
        window: int = 4,
        in_edges: int = 0,
    ) -> None:
        check_arguments(EdgeNetwork.__init__, locals())
        super().__init__()
        check_counts(dim=dim, basis=basis, hidden=hidden, window=window)
        check_counts(0, in_channels=in_channels, in_vectors=in_vectors, in_edges=in_edges)
        check_length("cutoff", cutoff)
        self.dim, self.in_edges = dim, in_edges
        self.cutoff, self.basis, self.window = float(cutoff), basis, window
        self.in_channels, self.in_vectors = in_channels, in_vectors
        self.radial = nn.Linear(basis, hidden)
        self.own, self.other = (nn.Linear(in_channels, hidden, bias=False) if in_channels else None for _ in range(2))
        self.arrows = nn.Linear(dim * (1 + 2 * in_vectors), hidden, bias=False)
        self.hidden = nn.Linear(hidden, hidden)
        # Features are often sparse (types of atoms), so their weights start larger than those of distances.
        for linear, factor in ((self.radial, 1.0), (self.own, 2.0), (self.other, 2.0), (self.arrows, 1.0)):
            if linear is not None:
                keep_variance(linear, factor)
        keep_variance(self.hidden, math.sqrt(2))
        self.pairs = nn.Linear(in_edges, hidden, bias=False) if in_edges else None
        if self.pairs is not None:
            keep_variance(self.pairs)

    def forward(
        self,
        graph: LiftedGraph,
        x: Tensor | None = None,
        vectors: Tensor | None = None,
        edges: Tensor | None = None,
    ) -> RelativeTerms:
        """Terms with ``psi`` ``[edges, fiber, 1, 1, hidden]``, over the root of 1 + the windows at the target.

        Features ``x`` are ``[points, in_channels]``, ``vectors`` ``[points, in_vectors, dim]`` and ``edges``
        ``[edges, in_edges]``; None for none.
        """
        seen, invariants, weight = self._seen(graph, x, vectors, edges)
        y = F.silu(self.arrows(seen) + invariants[:, None])
        signals = F.silu(self.hidden(y)) * weight[:, None, None]
        return RelativeTerms(psi=signals[:, :, None, None])

    def kernels(
        self,
        maps: Sequence[nn.Linear],
        graph: LiftedGraph,
        x: Tensor | None = None,
        vectors: Tensor | None = None,
        edges: Tensor | None = None,
    ) -> list[Tensor]:
        """What linear maps without bias make of ψ, ``[edges, fiber, channels]`` for each, without storing ψ itself."""
        if not isinstance(maps, list | tuple):
            raise TypeError(f"maps: expected a list or tuple of linear maps, got {kind(maps)}")
        for index, linear in enumerate(maps):
            given = isinstance(linear, nn.Linear) and linear.bias is None
            if not given or linear.in_features != self.hidden.out_features:
                raise ValueError(
                    f"maps: expected linear maps of {self.hidden.out_features} channels without bias, "
                    f"got maps[{index}] = {linear}"
                )
        inputs = self._seen(graph, x, vectors, edges)
        second = self.hidden.weight, self.hidden.bias
        return list(edge_kernels(*inputs, self.arrows.weight, second, [linear.weight for linear in maps]))

    def _seen(
        self, graph: LiftedGraph, x: Tensor | None, vectors: Tensor | None, pairs: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What frames see of edges ``[edges, fiber, inputs]``, the rest of the first layer, and the share of edges."""
        check_is("graph", graph, LiftedGraph)
        points = graph.num_points
        x = graph.pos.new_zeros(points, 0) if x is None else x
        vectors = graph.pos.new_zeros(points, 0, self.dim) if vectors is None else vectors
        pairs = graph.pos.new_zeros(graph.neighbors.num_edges, 0) if pairs is None else pairs
        expected = {
            "pos": (graph.pos, (points, self.dim)),
            "x": (x, (points, self.in_channels)),
            "vectors": (vectors, (points, self.in_vectors, self.dim)),
            "edges": (pairs, (graph.neighbors.num_edges, self.in_edges)),
        }
        for argument, (value, shape) in expected.items():
            check_tensor(argument, value, "a floating tensor")
            if value.shape != shape:
                raise ValueError(f"{argument}: expected {shape}, got {tuple(value.shape)}")
        target, source = graph.neighbors.target, graph.neighbors.source
        directions, length, share = edge_geometry(graph, self.cutoff, self.window)
        around = torch.cat([directions[:, None], vectors[target], vectors[source]], dim=1)
        invariants = self.radial(bessel_functions(length, self.basis))
        if self.own is not None and self.other is not None:
            invariants = invariants + self.own(x)[target] + self.other(x)[source]
        if self.pairs is not None:
            invariants = invariants + self.pairs(pairs)
        return self._components(graph, around, target), invariants, share

    def _components(self, graph: LiftedGraph, vectors: Tensor, points: Tensor) -> Tensor:
        """What fibers over points see of vectors ``[n, count, dim]``: ``[n, fiber, numbers]``."""
        return graph.seen_in_frames(vectors, points).flatten(-2)


class AngleFeatures(nn.Module):
    r"""Invariants of the angles between neighbors, for points and for edges.

    With e, R and w of :class:`EdgeNetwork`, degrees l = 1 and 2, and features s of the points,

    .. math::
        A^l_{ikm} = \sum_{jj'} \phi_k(ij)\, \phi_m(ij')\, P_l(e_{ij}, e_{ij'}), \qquad
        B^l_{ijk} = \sum_{j'} \phi_k(ij')\, P_l(e_{ij}, e_{ij'}), \qquad
        \phi(ij) = \frac{w(r_{ij})\, (V R(r_{ij}) + c) \odot W s_j}{\sqrt{1 + \sum_j w(r_{ij})}}

    and B at both ends of an edge, for each degree other functions φ. The products P are
    :math:`P_1(e, e') = \langle e, e' \rangle` and
    :math:`P_2(e, e') = (d \langle e, e' \rangle^2 - |e|^2 |e'|^2) / (d - 1)`, in space the Legendre polynomials of
    the cosine. All is made of the moments of e and of e ⊗ e without its trace, so the cost is linear in the number of
    edges; A are products of two sums over neighbors, as symmetry functions are (Behler and Parrinello 2007).

    **Equivariance.** Invariant to all rotations and reflections, whatever the frames.

    Parameters
    ----------
    dim, in_channels, cutoff, basis, window
        See :class:`EdgeNetwork`; there must be features.
    count
        How many functions φ there are.
    """

    upper: Tensor

    def __init__(
        self, dim: int, in_channels: int, count: int, *, cutoff: float, basis: int = 8, window: int = 4
    ) -> None:
        check_arguments(AngleFeatures.__init__, locals())
        super().__init__()
        check_counts(dim=dim, in_channels=in_channels, count=count, basis=basis, window=window)
        check_length("cutoff", cutoff)
        self.dim, self.cutoff, self.window, self.count = dim, float(cutoff), window, count
        self.radial = nn.Linear(basis, 2 * count)
        self.other = nn.Linear(in_channels, 2 * count, bias=False)
        nn.init.normal_(self.radial.weight, std=basis**-0.5)
        # Features are often sparse, such as types of atoms.
        nn.init.normal_(self.other.weight)
        self.register_buffer("upper", torch.triu_indices(count, count), persistent=False)
        self.of_points, self.of_edges = count * (count + 1), 4 * count

    def forward(self, graph: LiftedGraph, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features of points ``[points, of_points]`` and of edges ``[edges, of_edges]``, of ``x`` ``[points, in]``."""
        check_graph(graph, LiftedGraph, x)
        check_features(x, self.other.weight, self.other.in_features)
        neighbors = graph.neighbors
        target, source = neighbors.target, neighbors.source
        directions, length, weight = edge_geometry(graph, self.cutoff, self.window)
        radial = self.radial(bessel_functions(length, self.radial.in_features))
        functions = (radial * self.other(x)[source] * weight[:, None]).unflatten(1, (2, self.count))
        length_squared = directions.square().sum(dim=1)
        # P_2 is the product of e ⊗ e without their trace.
        trace = torch.eye(self.dim, dtype=directions.dtype, device=directions.device) / self.dim
        squares = directions[:, :, None] * directions[:, None] - length_squared[:, None, None] * trace
        squares = squares.flatten(1) * math.sqrt(self.dim / max(1, self.dim - 1))
        points, edges = [], []
        for power, arrows in enumerate((directions, squares)):
            moments = neighbors.sum_to_targets(arrows[:, :, None] * functions[:, power, None])
            gram = moments.mT @ moments
            points.append(gram[:, self.upper[0], self.upper[1]])
            edges += [(arrows[:, :, None] * moments[end]).sum(dim=1) for end in (target, source)]
        return torch.cat(points, dim=1), torch.cat(edges, dim=1)


def edge_geometry(graph: LiftedGraph, cutoff: float, power: int) -> tuple[Tensor, Tensor, Tensor]:
    """Directions that fade where points coincide, lengths over the cutoff, and windows over the roots of their sums.

    ``[edges, dim]`` and twice ``[edges]``; the windows of loops are 0.
    """
    neighbors = graph.neighbors
    edges = neighbors.displacements(graph.pos) / cutoff
    length = smooth_lengths(edges)
    window = smooth_window(length, power) * ~neighbors.is_loop
    norm = (1 + window.new_zeros(graph.num_points).index_add(0, neighbors.target, window)).rsqrt()
    directions = edges / (length.square() + _NEAR**2).sqrt()[:, None]
    return directions, length, window * norm[neighbors.target]


def keep_variance(linear: nn.Linear, factor: float = 1.0) -> None:
    """Draw weights anew so that signals keep their size through the swish, times a factor."""
    check_arguments(keep_variance, locals())
    check_positive(factor=factor)
    nn.init.normal_(linear.weight, std=factor * math.sqrt(2 / linear.in_features))
