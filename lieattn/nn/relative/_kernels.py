"""Kernels of convolutions: tables or networks of the relative element."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any, Literal, Self, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import (
    check_arguments,
    check_count,
    check_counts,
    check_features,
    check_field,
    check_graph,
    check_length,
    check_positive,
    weight_of,
)
from lieattn._core.contexts import without_autocast
from lieattn._core.numerics import ExactConstants, sums
from lieattn.geometry import LiftedGraph, pixel_positions
from lieattn.groups import FiniteGroup, check_group
from lieattn.nn.relative._base import (
    RelativeFunction,
    check_lifted_to,
    graph_attention,
    measured,
    networks_of_coordinates,
    rows_of_table,
    seen_offsets,
)
from lieattn.ops import Activation, RelativeTerms

_MOST_TYPES = 512  # with more types than this, a table is contracted edge by edge
Form = Literal["full", "separable"]


class ConvolutionKernel(RelativeFunction):
    """Base class of kernels ψ_oc(u) of the relative element u = (h_a⁻¹(x_j - x_i), h_a⁻¹ h_b).

    **Equivariance.** That of :class:`RelativeFunction`.

    Parameters
    ----------
    group, in_channels, out_channels
        Finite group H, and channels per frame of the input and output of the convolution.
    lifting
        Whether the input has no frames, so that u is the displacement only.
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
    def values(self, graph: LiftedGraph) -> Float[Tensor, "rows fiber frames outputs inputs"]:
        """Return values ``[rows, fiber, frames, out, in]`` for each row, frame h_a, and relative frame h_a⁻¹ h_b."""

    def separated(self, graph: LiftedGraph, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return k ``[rows, fiber, out]`` and Σ_b A(h_a⁻¹ h_b) x(j, b), if ψ_oc(v, q) = k_o(v) A_oc(q), otherwise None.

        The second factor is ``[points, frames, out]``, and the first one a convolution within its frames and channels.
        """
        return None

    def factors(self, graph: LiftedGraph) -> tuple[Tensor, Tensor] | None:
        """Return units of the edges and matrices whose product is ψ, or None if it is no such product.

        They are ``[rows, fiber, units]`` and ``[fiber, frames, units, out, in]``, see
        :func:`lieattn.ops.attentive_sums`.
        """
        return None

    def of_outputs(self, graph: LiftedGraph) -> Callable[[slice], Tensor]:
        """Return the ``psi`` of :meth:`forward` as a function of some output channels."""
        values = self.values(graph)
        if not self.lifting:
            index = graph.relative.pair_index[None, :, :, None, None]
            values = values.gather(2, index.expand(len(values), -1, -1, *values.shape[3:]))
        return lambda own: values[..., own, :]

    def terms_of(self, graph: LiftedGraph) -> Callable[[slice], RelativeTerms]:
        """Return the terms of :meth:`forward` as a function of some output channels."""
        check_lifted_to(graph, None if self.lifting else self.group, "kernel")
        psi, row = self.of_outputs(graph), graph.relative.row
        return lambda own: RelativeTerms(psi=psi(own), row=row)

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Return terms with ``psi`` ``[rows, fiber, frames, out, in]``, where the third axis is the input frame h_b.

        There is a head for each output channel, with all input channels, whose sum is the convolution.
        :meth:`convolve` computes the same result faster.
        """
        return self.terms_of(graph)(slice(None))

    def convolve(
        self, x: Float[Tensor, "points frames inputs"], graph: LiftedGraph
    ) -> Float[Tensor, "points fiber outputs"]:
        """Compute Σ_j Σ_b Σ_c ψ_oc(u) x_c(j, b), from ``[points, frames, in]`` to ``[points, fiber, out]``.

        ValueError is raised for other shapes and, without ``lifting``, for graphs of another group.
        """
        self._check(x, graph)
        if (parts := self.separated(graph, x)) is not None:
            within, mixed = (part[:, :, None, None] for part in parts)
            return to_targets(within, mixed, graph)[:, :, 0, 0]
        psi = cast(Tensor, measured(self(graph), graph, "none", x.dtype).psi)
        values = psi.permute(0, 2, 4, 1, 3).flatten(3).flatten(1, 2)
        source, target, row = graph.neighbors.source, graph.neighbors.target, graph.relative.row
        kind = torch.arange(len(source), device=graph.device) if row is None else row
        if len(values) > _MOST_TYPES:
            messages = (x.flatten(1)[source, None] @ values[kind])[:, 0]
        else:
            # Edges with the same row share a matrix.
            order = kind.argsort(stable=True)
            counts = torch.bincount(kind, minlength=len(values)).tolist()
            sources = source[order].split(counts)
            messages = torch.cat([x.flatten(1)[own] @ value for own, value in zip(sources, values, strict=True)])
            target = target[order]
        out = sums(messages, target, len(x))
        return out.unflatten(1, (graph.fiber, self.out_channels))

    def _check(self, x: Tensor, graph: LiftedGraph) -> None:
        """Raise TypeError or ValueError unless a field and a graph fit the kernel."""
        check_features(x, next(self.parameters()))
        check_graph(graph, LiftedGraph, x)
        check_lifted_to(graph, None if self.lifting else self.group, "kernel")
        check_field(x, graph, self.in_channels, self.poses)


def to_targets(psi: Tensor, x: Tensor, graph: LiftedGraph) -> Tensor:
    """Return Σ_j ψ(u) x(j) ``[points, fiber, frames, *, *]`` for ψ ``[rows, fiber, frames, *, *]``, entry by entry."""
    sizes = torch.broadcast_shapes(psi.shape[1:], x.shape[1:])
    # Pairs of frames are the fiber of the operator.
    value = x.expand(-1, *sizes).flatten(1, 2)
    terms = RelativeTerms(psi=psi.expand(-1, *sizes[:2], -1, -1).flatten(1, 2)[:, :, None], row=graph.relative.row)
    summed, _ = graph_attention(None, None, value, graph, pattern="framewise", normalize="none", terms=terms)
    return summed.unflatten(1, sizes[:2])


class TableKernel(ExactConstants, ConvolutionKernel):
    """A trainable value for every displacement in the frames, for grids, where displacements repeat.

    **Equivariance.** That of :class:`RelativeFunction`.

    Parameters
    ----------
    group, in_channels, out_channels, lifting
        See :class:`ConvolutionKernel`.
    offsets
        Displacements x_j - x_i ``[offsets, dim]`` that occur in graphs, in the units of the points. The table has a row
        for each distinct h⁻¹ o with o an offset and h in H; the offsets themselves are first.
    tolerance
        Largest distance of a displacement from its row, in the units of the points; otherwise ValueError.
    init_scale
        Initial values are uniform in ±init_scale / sqrt(in_channels · offsets), as on grids.
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
        self.register_constant("rows", seen_offsets(offsets, group, tolerance))
        self.tolerance = tolerance
        bound = init_scale / math.sqrt(in_channels * len(offsets))
        weight = torch.empty(out_channels, in_channels, self.poses, len(self.rows)).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)

    @classmethod
    def square(cls, group: FiniteGroup, in_channels: int, out_channels: int, size: int, **options: Any) -> Self:
        """Return a table for size x size (x size) pixels; its weight is that of ``GridGroupConvolution``, flattened."""
        check_count("size", size)
        check_group("group", group)
        offsets = pixel_positions(*[size] * group.dim, dtype=torch.float64)
        return cls(group, in_channels, out_channels, offsets, **options)

    def values(self, graph: LiftedGraph) -> Tensor:
        return self.weight.permute(3, 2, 0, 1)[rows_of_table(graph, self.rows, self.tolerance)]


class NetworkKernel(ExactConstants, ConvolutionKernel):
    r"""A small network of the relative element, for point clouds, where displacements do not repeat.

    The hidden units are :math:`\phi_m = \sin(\langle w_m, u \rangle + b_m)`, where u consists of the coordinates of
    v = h_a⁻¹(x_j - x_i) / length and the entries of the matrix q = h_a⁻¹ h_b; angles are not used. The kernel is

    * ``"full"``: :math:`\psi_{oc}(v, q) = \sum_m A_{moc} \phi_m(v, q)`;
    * ``"separable"``: :math:`\psi_{oc}(v, q) = \big( \sum_m B_{om} \phi_m(v) \big) A_{oc}(q)`, whose cost is less by
      the number of input channels.

    **Equivariance.** That of :class:`RelativeFunction`.

    Parameters
    ----------
    group, in_channels, out_channels, lifting
        See :class:`ConvolutionKernel`.
    form, hidden
        ``"full"`` or ``"separable"``, and the number of hidden units.
    frequency
        Initial scale of the weights of the first layer, in radians per ``graph.length``. Larger values give rougher
        kernels.
    window
        Whether to multiply by (1 - |v|²)² for |v| < 1 and by 0 otherwise, so that the output is continuous when points
        enter a neighborhood of radius ``graph.length``.
    init_scale
        Initial scale of the values.
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
        self.register_constant("matrices", group.elements.flatten(-2))

    def features(self, graph: LiftedGraph) -> Float[Tensor, "rows fiber frames hidden"]:
        """Return the hidden units ``[rows, fiber, frames, hidden]``; without frames as input, ``frames`` is 1."""
        level, pose = self._levels(graph)
        return self._within(torch.sin(level[:, :, None] + pose), graph)

    def factors(self, graph: LiftedGraph) -> tuple[Tensor, Tensor] | None:
        if self.form == "separable":
            return None
        level, pose = self._levels(graph)
        units, mix = torch.cat([level.sin(), level.cos()], dim=-1), self.mix
        turn = torch.cat([pose.cos(), pose.sin()], dim=-1)[self.relative]  # sin(a + b) = sin a cos b + cos a sin b
        return self._within(units, graph), turn[..., None, None] * torch.cat([mix, mix])

    def _levels(self, graph: LiftedGraph) -> tuple[Tensor, Tensor]:
        """Return the two summands in the sines, of displacements ``[rows, fiber, hidden]`` and ``[frames, hidden]``."""
        check_graph(graph, LiftedGraph, self.matrices, "the weights")
        v = graph.relative.positions.to(self.position.weight.dtype)
        with without_autocast(graph.device):  # it would round positions
            level = self.position(v)
            pose = level.new_zeros(1, level.shape[-1]) if self.frame is None else self.frame(self.matrices.to(v.dtype))
        return level, pose

    def _within(self, units: Tensor, graph: LiftedGraph) -> Tensor:
        """Multiply ``[rows, fiber, *]`` by the window, if there is one."""
        if not self.window:
            return units
        v = graph.relative.positions.to(units.dtype)
        window = (1 - v.square().sum(-1)).clamp(min=0).square()
        return units * window.view(*window.shape, *[1] * (units.ndim - 2))

    def separated(self, graph: LiftedGraph, x: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.form == "full":
            return None
        outs = self.relative[:1] if self.lifting else self.relative
        return self.features(graph)[:, :, 0] @ self.depth, torch.einsum("pbc,aboc->pao", x, self.mix[outs])

    def values(self, graph: LiftedGraph) -> Tensor:
        units = self.features(graph)
        if self.form == "full":
            return torch.einsum("tabm,moc->taboc", units, self.mix)
        return torch.einsum("tam,mo,boc->taboc", units[:, :, 0], self.depth, self.mix)

    def of_outputs(self, graph: LiftedGraph) -> Callable[[slice], Tensor]:
        if self.form == "separable":
            return super().of_outputs(graph)
        units = self._at_frames(self.features(graph))
        sizes, flat = units.shape[:2], units.permute(2, 3, 0, 1).flatten(2)

        def of_outputs(own: slice) -> Tensor:
            mix = self.mix[:, own]
            # Frames of the output are innermost, as in the kernel. Torch's matmul would copy to another order.
            found = torch.bmm(mix.permute(2, 1, 0).flatten(0, 1).expand(len(flat), -1, -1), flat)
            return found.unflatten(2, sizes).unflatten(1, mix.shape[:0:-1]).permute(3, 4, 0, 2, 1)

        return of_outputs

    def _at_frames(self, units: Tensor) -> Tensor:
        """Return hidden units with input frames on the third axis in place of relative ones."""
        if self.lifting:
            return units
        return units.gather(2, self.relative[None, :, :, None].expand(len(units), -1, -1, units.shape[-1]))

    def convolve(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        self._check(x, graph)
        if self.form == "separable":
            return super().convolve(x, graph)
        units = self.features(graph)
        if self.lifting:
            summed = to_targets(units[..., None], x[:, :, None, None], graph)[:, :, 0]
        else:
            terms = RelativeTerms(displacement_bias=self._at_frames(units), row=graph.relative.row)
            value = x[:, :, None].expand(-1, -1, units.shape[-1], -1)
            summed = graph_attention(None, None, value, graph, normalize="none", terms=terms)[0]
        return torch.einsum("pamc,moc->pao", summed, self.mix)


class BumpKernel(ExactConstants, ConvolutionKernel):
    r"""Gaussian bumps on a small lattice that turns with the frame, each with a matrix for every relative frame.

    .. math::  \psi_{oc}(v, q) = \sum_m \exp\!\big(-2 |v - c_m|^2 / s^2\big) A_{moc}(q)

    where v = h_a⁻¹(x_j - x_i) / length, and c_m are the points of a lattice of spacing s in the cube from -1 to 1. With
    five points on a side, upright frames have about a free number for each of 5 x 5 pixels.

    With ``depthwise``, A is a diagonal matrix for q = e and zero for other q: the convolution is within each frame and
    channel, and its cost is less by the numbers of frames and channels. Together with group-tied maps, it is a
    separable group convolution (Knigge et al., arXiv 2110.13059).

    **Equivariance.** That of :class:`RelativeFunction`.

    Parameters
    ----------
    group, in_channels, out_channels, lifting
        See :class:`ConvolutionKernel`.
    depthwise
        Whether channels and frames are not mixed; ValueError is raised unless there are as many outputs as inputs.
    side
        Number of points of the lattice on a side, at least 2.
    init_scale
        Initial scale of the values.
    """

    centers: Tensor

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        *,
        lifting: bool = False,
        depthwise: bool = False,
        side: int = 5,
        init_scale: float = 1.0,
    ) -> None:
        check_arguments(BumpKernel.__init__, locals())
        check_positive(init_scale=init_scale)
        check_count("side", side, 2)
        super().__init__(group, in_channels, out_channels, lifting=lifting)
        if depthwise and in_channels != out_channels:
            raise ValueError(
                f"depthwise: expected as many output channels as input channels, got {in_channels} and {out_channels}"
            )
        self.spacing = 2 / (side - 1)
        line = torch.linspace(-1, 1, side, dtype=torch.float64, device="cpu")
        centers = torch.cartesian_prod(*[line] * group.dim).reshape(-1, group.dim)
        self.register_constant("centers", centers)
        self.depthwise = depthwise
        sizes = (out_channels,) if depthwise else (self.poses, out_channels, in_channels)
        bound = init_scale * math.sqrt(3 * out_channels / math.prod(sizes))
        self.weight = nn.Parameter(bound * (2 * torch.rand(len(centers), *sizes) - 1))

    def bumps(self, graph: LiftedGraph) -> Float[Tensor, "rows fiber bumps"]:
        """Return the heights ``[rows, fiber, bumps]`` of the bumps, in the dtype of the weights."""
        check_graph(graph, LiftedGraph, self.weight, "the weights")
        seen = graph.relative.positions
        square = (seen[:, :, None] - self.centers.to(seen)).square().sum(-1)
        return (square * (-2 / self.spacing**2)).exp().to(self.weight.dtype)

    def separated(self, graph: LiftedGraph, x: Tensor) -> tuple[Tensor, Tensor] | None:
        return (self.bumps(graph) @ self.weight, x) if self.depthwise else None

    def values(self, graph: LiftedGraph) -> Tensor:
        if self.depthwise:
            same = torch.arange(self.poses, device=graph.device) == (0 if self.lifting else self.group.identity_index)
            return same[:, None, None] * torch.diag_embed(self.bumps(graph) @ self.weight)[:, :, None]
        return torch.einsum("tam,muoc->tauoc", self.bumps(graph), self.weight)

    def convolve(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        if self.depthwise:
            return super().convolve(x, graph)
        self._check(x, graph)
        bumps, row = self.bumps(graph), graph.relative.row
        # How many edges share a row is not known to programs.
        if row is not None and len(bumps) <= _MOST_TYPES and not torch.compiler.is_compiling():
            return super().convolve(x, graph)
        # The matrices come before the sum over neighbors: each bump is a head.
        outs = self.relative[:1] if self.lifting else self.relative
        mixed = torch.einsum("pbc,maboc->pamo", x, self.weight[:, outs])
        terms = RelativeTerms(psi=bumps[:, :, None, :, None], row=row)
        value = mixed.expand(-1, graph.fiber, -1, -1)
        summed, _ = graph_attention(None, None, value, graph, pattern="framewise", normalize="none", terms=terms)
        return summed.sum(dim=2)


class RankKernel(RelativeFunction):
    """The network of LieConv, from the coordinates of a relative element to a number of coefficients.

    It has three linear maps, each followed by the activation, and needs only the memory of the result.
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
        """Return terms with ``displacement_bias`` ``[rows, fiber, fiber, rank]``, with one head for each number."""
        check_graph(graph, LiftedGraph, self.linear1.weight, "the weights")
        layers = {"linear1": self.linear1, "linear2": self.linear2, "linear3": self.linear3}
        weights = [weight_of(name, layer).T[None] for name, layer in layers.items()]
        biases = [layer.bias[None] for layer in layers.values()]
        bias = networks_of_coordinates(graph.relative.coordinates, weights, biases, self.activation)
        return RelativeTerms(displacement_bias=bias, row=graph.relative.row)
