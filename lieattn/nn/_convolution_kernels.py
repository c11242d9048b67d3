"""Kernels of group convolution on point clouds: functions of the relative element, as tables or as networks."""

from __future__ import annotations

import abc
import math
from typing import Literal, Self, get_args

import torch
from torch import Tensor, nn

from lieattn._checks import check_count, check_length
from lieattn.geometry import LiftedGraph, pixel_positions
from lieattn.groups import FiniteGroup, check_group
from lieattn.ops import RelativeTerms, group_attention

_MOST_TYPES = 512  # with more types than this, a table is contracted edge by edge
Form = Literal["full", "separable"]


class ConvolutionKernel(nn.Module, abc.ABC):
    """A kernel ψ_oc(u) of the relative element u = (h_a⁻¹(x_j - x_i), h_a⁻¹ h_b): ``kernel(graph) -> Tensor``.

    **Equivariance.** It sees relative elements only, so its values do not change when points and frames are moved
    together by an element of R^d ⋊ H.

    Parameters
    ----------
    group
        H.
    in_channels, out_channels
        Channels per pose.
    lifting
        Whether the input has no poses: then u is the displacement alone.
    """

    relative: Tensor

    def __init__(self, group: FiniteGroup, in_channels: int, out_channels: int, *, lifting: bool = False) -> None:
        super().__init__()
        check_group("group", group)
        check_count("in_channels", in_channels)
        check_count("out_channels", out_channels)
        self.group, self.lifting = group, lifting
        self.in_channels, self.out_channels = in_channels, out_channels
        relative = torch.zeros(group.order, 1, dtype=torch.int64) if lifting else group.relative_index.clone()
        self.register_buffer("relative", relative, persistent=False)

    @property
    def poses(self) -> int:
        """Number of input poses: 1 for lifting."""
        return self.relative.shape[1]

    @abc.abstractmethod
    def forward(self, graph: LiftedGraph) -> Tensor:
        """Values ``[types, order, poses, out, in]`` for each displacement, frame h_a, and relative pose h_a⁻¹ h_b."""

    def between_poses(self, graph: LiftedGraph) -> Tensor:
        """Values ``[types, order, poses, out, in]`` with the input pose h_b itself on the third axis."""
        index = self.relative[None, :, :, None, None].expand(graph.num_types, -1, -1, *self._channels())
        return self(graph).gather(2, index)

    def convolve(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Σ_j Σ_b Σ_c ψ_oc(u) x_c(j, b): ``[points, poses, in]`` to ``[points, order, out]``."""
        values = self.between_poses(graph).permute(0, 2, 4, 1, 3).flatten(3).flatten(1, 2)
        source, target, kind = graph.neighbors.source, graph.neighbors.target, _kinds(graph)
        if graph.num_types > _MOST_TYPES:
            messages = (x.flatten(1)[source, None] @ values[kind])[:, 0]
        else:
            # Edges of one type share a matrix.
            order = kind.argsort(stable=True)
            counts = torch.bincount(kind, minlength=graph.num_types).tolist()
            sources = source[order].split(counts)
            messages = torch.cat([x.flatten(1)[own] @ value for own, value in zip(sources, values, strict=True)])
            target = target[order]
        out = messages.new_zeros(len(x), messages.shape[1]).index_add(0, target, messages)
        return out.unflatten(1, (self.group.order, self.out_channels))

    def responses(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Σ_j ψ_oc(u) x_c(j, b) before the sums over b and c: ``[points, order, poses, out, in]``."""
        values = self.between_poses(graph)
        source, target, kind = graph.neighbors.source, graph.neighbors.target, _kinds(graph)
        if graph.num_types * graph.num_points <= 4 * max(graph.neighbors.num_edges, 1):
            place = target * graph.num_types + kind
            patches = x.new_zeros(graph.num_points * graph.num_types, *x.shape[1:]).index_add(0, place, x[source])
            patches = patches.unflatten(0, (graph.num_points, graph.num_types))
            return torch.einsum("ptbc,taboc->paboc", patches, values)
        messages = values[kind] * x[source][:, None, :, None]
        return messages.new_zeros(len(x), *messages.shape[1:]).index_add(0, target, messages)

    def _channels(self) -> tuple[int, int]:
        return self.out_channels, self.in_channels


class TableKernel(ConvolutionKernel):
    """A trainable value for every displacement that the frames can see: for grids, where displacements repeat.

    The table has a row for each distinct h⁻¹ o, o one of the offsets and h in H, the offsets first: it is equivariant
    for every H, also where h⁻¹ o is not on the grid.

    Parameters
    ----------
    group, in_channels, out_channels, lifting
        See :class:`ConvolutionKernel`.
    offsets
        ``[offsets, dim]`` displacements x_j - x_i that occur, in the units of the points.
    tolerance
        How far a displacement may be from its row, in the units of the points.
    spread
        Values start uniform in ±spread / sqrt(in_channels · offsets), as on grids.
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
        spread: float = 1.0,
    ) -> None:
        super().__init__(group, in_channels, out_channels, lifting=lifting)
        check_length("tolerance", tolerance)
        if offsets.ndim != 2 or offsets.shape[1] != group.dim or len(offsets) == 0:
            raise ValueError(f"offsets: expected [offsets, {group.dim}], at least one, got {tuple(offsets.shape)}")
        if not torch.isfinite(offsets).all():
            raise ValueError(f"offsets: expected finite displacements, got {offsets.tolist()}")
        offsets = offsets.to(torch.float64)
        inverses = group.elements[group.inverse_index]
        seen = torch.cat([offsets, torch.einsum("aij,oj->aoi", inverses, offsets).flatten(0, 1)])
        first = (torch.cdist(seen, seen) < tolerance).to(torch.int8).argmax(dim=1)
        self.register_buffer("rows", seen[first == torch.arange(len(seen))], persistent=False)
        self.tolerance = tolerance
        bound = spread / math.sqrt(in_channels * len(offsets))
        weight = torch.empty(out_channels, in_channels, self.poses, len(self.rows)).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)

    @classmethod
    def square(
        cls,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        size: int,
        *,
        lifting: bool = False,
        spread: float = 1.0,
    ) -> Self:
        """Table for size x size pixels around a point, whose values are those of a grid kernel, row by row.

        ``table.weight`` ``[out, in, poses, size²]`` is the flattened weight of :class:`GridGroupConvolution`.
        """
        check_count("size", size)
        offsets = pixel_positions(size, size, dtype=torch.float64)
        return cls(group, in_channels, out_channels, offsets, lifting=lifting, spread=spread)

    def forward(self, graph: LiftedGraph) -> Tensor:
        """Values; raises ValueError for a displacement that has no row."""
        _check_graph(graph, self.group)
        seen = graph.relative_positions.detach().to(self.rows.dtype) * graph.scale
        distance, row = torch.cdist(seen.flatten(0, 1), self.rows).min(dim=-1)
        if len(distance) and distance.max() > self.tolerance:
            stray = seen.flatten(0, 1)[distance.argmax()].tolist()
            raise ValueError(f"graph: displacement {stray} is not among the {len(self.rows)} rows of the table")
        return self.weight.permute(3, 2, 0, 1)[row].unflatten(0, seen.shape[:2])


class NetworkKernel(ConvolutionKernel):
    r"""A small network of the relative element: for point clouds, where nothing repeats.

    Its hidden units are :math:`\phi_m = \sin(\langle w_m, u \rangle + b_m)`, with u the coordinates of
    h_a⁻¹(x_j - x_i) / scale and the entries of the matrix h_a⁻¹ h_b, never an angle. They give

    * ``"full"``: :math:`\psi_{oc}(v, q) = \sum_m A_{moc} \phi_m(v, q)`;
    * ``"separable"``: :math:`\psi_{oc}(v, q) = \big( \sum_m B_{om} \phi_m(v) \big) A_{oc}(q)`, with one kernel of the
      displacement an output channel, which costs as many times less as there are input channels.

    Both are convolutions by group attention without scores: ψ multiplies the values.

    Parameters
    ----------
    group, in_channels, out_channels, lifting
        See :class:`ConvolutionKernel`.
    form
        ``"full"`` or ``"separable"``.
    hidden
        Hidden units.
    frequency
        Scale of the first layer's weights at the start: how rough the kernel is, in radians per ``graph.scale``.
    window
        Whether to multiply by (1 - |v|²)² for |v| < 1 and 0 beyond, so that the output does not jump where a point
        enters the neighborhood; for neighborhoods whose scale is their radius.
    spread
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
        spread: float = 1.0,
    ) -> None:
        super().__init__(group, in_channels, out_channels, lifting=lifting)
        if form not in get_args(Form):
            raise ValueError(f"form: expected one of {get_args(Form)}, got {form!r}")
        check_count("hidden", hidden)
        check_length("frequency", frequency)
        self.form, self.window = form, window
        self.position = nn.Linear(group.dim, hidden)
        nn.init.normal_(self.position.weight, std=frequency)
        nn.init.uniform_(self.position.bias, -math.pi, math.pi)
        joint = form == "full" and not lifting
        self.frame = nn.Linear(group.dim**2, hidden, bias=False) if joint else None
        bound = spread / math.sqrt(in_channels)
        if form == "full":
            self.mix = nn.Parameter(
                bound * math.sqrt(6 / hidden) * (2 * torch.rand(hidden, out_channels, in_channels) - 1)
            )
        else:
            self.depth = nn.Parameter(math.sqrt(6 / hidden) * (2 * torch.rand(hidden, out_channels) - 1))
            self.mix = nn.Parameter(bound * (2 * torch.rand(self.poses, out_channels, in_channels) - 1))
        matrices = group.elements.to(torch.get_default_dtype()).flatten(-2)
        self.register_buffer("matrices", matrices, persistent=False)

    def features(self, graph: LiftedGraph) -> Tensor:
        """Hidden units ``[types, order, poses, hidden]``; of the displacement alone ``[types, order, 1, hidden]``."""
        _check_graph(graph, self.group)
        v = graph.relative_positions.to(self.position.weight.dtype)
        level = self.position(v)[:, :, None]
        if self.frame is not None:
            level = level + self.frame(self.matrices)
        units = torch.sin(level)
        if self.window:
            units = units * (1 - v.square().sum(-1)).clamp(min=0).square()[:, :, None, None]
        return units

    def forward(self, graph: LiftedGraph) -> Tensor:
        """Values for every displacement, frame and relative pose."""
        units = self.features(graph)
        if self.form == "full":
            return torch.einsum("tabm,moc->taboc", units, self.mix)
        return torch.einsum("tam,mo,boc->taboc", units[:, :, 0], self.depth, self.mix)

    def convolve(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Evaluate through the operator, see :meth:`ConvolutionKernel.convolve`."""
        units = self.features(graph)
        if self.form == "full":
            units = self._between(units)
            value = x[:, :, None].expand(-1, -1, units.shape[-1], -1)
            summed = self._sweep(value, units[..., None], graph, "query_sum" if self.lifting else "joint")
            return torch.einsum("pamc,moc->pao", summed, self.mix)
        mixed = torch.einsum("pbc,aboc->pao", x, self.mix[self.relative])
        if self.lifting:
            mixed = mixed[:, :1]
        psi = (units @ self.depth)[:, :, :, None]
        return self._sweep(mixed[:, :, None], psi, graph, "query_sum" if self.lifting else "framewise")[:, :, 0]

    def responses(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Evaluate through the operator, see :meth:`ConvolutionKernel.responses`."""
        units = self.features(graph)
        if self.form == "separable":
            units = units @ self.depth
        psi = self._between(units).expand(-1, -1, self.poses, -1).flatten(2)[:, :, None, :, None]
        heads = units.shape[-1]
        value = x[:, :, None].expand(-1, -1, heads, -1).flatten(1, 2)[:, None]
        summed = self._sweep(value, psi, graph, "query_sum").unflatten(2, (self.poses, heads))
        if self.form == "full":
            return torch.einsum("pabmc,moc->paboc", summed, self.mix)
        return summed * self.mix[self.relative]

    def _between(self, units: Tensor) -> Tensor:
        """Relative poses on the third axis replaced by input poses, where there are any."""
        if units.shape[2] == 1:
            return units
        index = self.relative[None, :, :, None].expand(len(units), -1, -1, units.shape[-1])
        return units.gather(2, index)

    def _sweep(
        self, value: Tensor, psi: Tensor, graph: LiftedGraph, pattern: Literal["joint", "framewise", "query_sum"]
    ) -> Tensor:
        out, _ = group_attention(
            None,
            None,
            value,
            graph.neighbors,
            pattern=pattern,
            normalize="none",
            terms=RelativeTerms(psi=psi, row=graph.displacement_index),
        )
        return out


def _uniform(bound: float, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def _kinds(graph: LiftedGraph) -> Tensor:
    if graph.displacement_index is not None:
        return graph.displacement_index
    return torch.arange(graph.num_types, device=graph.device)


def _check_graph(graph: LiftedGraph, group: FiniteGroup) -> None:
    if graph.group != group:
        raise ValueError(f"graph: is lifted to {graph.group.name}, this kernel is for {group.name}")
