"""Attentive group convolution on point clouds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_choice, check_count, check_flag
from lieattn._core.contexts import recomputed
from lieattn._core.numerics import attention_of
from lieattn.geometry import AllPairs, LiftedGraph, lift
from lieattn.io import TiedWeights
from lieattn.nn._convolution import GroupConvolution, input_of
from lieattn.nn._grid import checked_measure
from lieattn.nn._grid_attention import (
    ChannelGate,
    check_moves_along,
    default_hidden,
    uniform,
    with_random_weights,
)
from lieattn.nn.relative import ConvolutionKernel, NetworkKernel
from lieattn.nn.relative._base import measured
from lieattn.nn.relative._kernels import to_targets
from lieattn.ops import AttentionMaps, RelativeTerms, attentive_sums, fuses_attentive_sums, tied_linear

Kind = Literal["full", "channel", "spatial", "input", "pose"]
Reduction = Literal["sum", "mean"]
Operator = Callable[[Tensor, LiftedGraph], Tensor]

_POINTS = 6  # points of the random cloud on which operators of a user are checked
_AT_ONCE = 2**24  # numbers of the kernel or responses that are stored at a time


class AttentiveGroupConvolution(TiedWeights):
    r"""Group convolution whose responses or inputs are weighted by attention, ``layer(x, graph) -> x``.

    .. math::
        t_{oc}(x_i, h, \tilde h)
        &= \sum_{j \in N(i)} \psi_{oc}(h^{-1}(x_j - x_i), h^{-1} \tilde h) f_c(x_j, \tilde h) \\
        f'_o(x_i, h) &= \mu \sum_{c, \tilde h} (1 - \alpha_X(o, x_i, h, \tilde h)\, \alpha_C(o, h, c, \tilde h))
        \, t_{oc}(x_i, h, \tilde h)

    where α_C is a function of the mean and maximum of t over the points of the cloud, and α_X is a convolution of the
    mean and maximum of α_C t over channels. The weights of both depend on :math:`h^{-1} \tilde h` (Romero, Bekkers,
    Tomczak, Hoogendoorn 2020, Eqs. 14-20, with the attended part subtracted, as in the authors' code). On a full raster
    the layer equals :class:`lieattn.nn.GridAttentiveConvolution` and the other attentive layers on grids; it also works
    on any points and for any finite group. A convolution followed by the gates of SE-Net, BAM, CBAM or a co-attentive
    network is a special case.

    **Equivariance.** That of :class:`GroupConvolution`. The maps A are also equivariant:
    ``A[L_g f](g1, g2) = A[f](g⁻¹ g1, g⁻¹ g2)``.

    **Cost.** See :func:`lieattn.ops.attentive_sums`. If displacements hardly repeat, neighbors are summed before the
    matrices of a ``NetworkKernel`` are applied. On large graphs, a few output channels or frames are computed at a
    time, and again in the backward pass, so memory is proportional to the edges, ``|H|²`` and the input channels.

    Parameters
    ----------
    kernel
        Kernel ψ, which determines the group, the channels, and whether the layer lifts.
    attention
        ``"full"`` (α), ``"channel"`` (α_CH, α_X = 1) or ``"spatial"`` (α_SP, α_C = 1); ``"input"`` (α_F): maps of the
        input that all output channels share; ``"pose"`` (α_RH): co-attention to the frames of the input; or your own
        operator, for example a module, that maps the responses ``[points, fiber, frames, out, in]`` and the graph to a
        tensor in place of α_X α_C, which must broadcast to the shape of the responses. The equivariance of A above, the
        condition of Theorem 1, is tested on random responses for all elements of the group and random translations,
        with random parameters of a module; ValueError is raised if it fails.
    hidden
        Hidden width of the channel attention; half the input channels if absent (for lifting, all of them).
    spatial
        Kernel of the spatial attention, with 2 input channels, as many output channels as ``kernel`` (1 for
        ``"input"``), its group and ``lifting``; a :class:`lieattn.nn.relative.NetworkKernel` if absent. It sees the
        neighbors of the graph. If the graph carries a ``local`` graph, ``kernel`` sees those neighbors instead.
    measure
        Factor μ; if absent that of grids, 2π/|H| in the plane (the plain measure for ``"input"`` and ``"pose"``), and 1
        for lifting.
    reduction
        ``"sum"`` over the neighbors, or ``"mean"``, also in the spatial attention.

    Examples
    --------
    >>> import torch
    >>> from lieattn.geometry import Radius, lift
    >>> from lieattn.groups import cyclic
    >>> from lieattn.nn.relative import NetworkKernel
    >>> graph = lift(torch.randn(20, 2), cyclic(8), Radius(1.0))
    >>> layer = AttentiveGroupConvolution(NetworkKernel(cyclic(8), 4, 6))
    >>> layer(torch.randn(20, 8, 4), graph).shape
    torch.Size([20, 8, 6])
    """

    def __init__(
        self,
        kernel: ConvolutionKernel,
        *,
        attention: Kind | Operator = "full",
        hidden: int | None = None,
        spatial: ConvolutionKernel | None = None,
        measure: float | None = None,
        reduction: Reduction = "sum",
    ) -> None:
        if isinstance(attention, str):
            check_choice("attention", attention, Kind)
        check_arguments(AttentiveGroupConvolution.__init__, locals())
        super().__init__()
        self.kernel, self.group, self.reduction = kernel, kernel.group, reduction
        hidden = default_hidden(kernel.in_channels, kernel.lifting) if hidden is None else hidden
        check_count("hidden", hidden)
        gated = attention in ("input", "pose")
        self.measure = checked_measure(measure, kernel.group, lifting=kernel.lifting, attentive=not gated)
        self.gate: nn.Module | None = None
        self.attention: Any
        if attention == "pose":
            self.gate, self.attention = _PoseGate(kernel, self.measure), attention
        elif attention == "input":
            wide = GroupConvolution(_spatial(kernel, spatial, 1), measure=self.measure, reduction=reduction)
            self.gate, self.attention = _InputGate(kernel, hidden, wide), attention
        elif isinstance(attention, str):
            self.attention = _ResponseGate(kernel, attention, hidden, spatial, reduction)
        else:
            _check_operator(kernel, attention)
            self.attention = attention

    def forward(
        self, x: Float[Tensor, "points ... channels"], graph: LiftedGraph
    ) -> Float[Tensor, "nodes fiber outputs"]:
        """Map features ``[points, in]`` or a field ``[points, fiber, in]`` to a field ``[points, fiber, out]``.

        ValueError is raised if the shape is wrong, or the graph is not lifted to the group of the kernel.
        """
        return self.attend(x, graph)[0]

    def attend(
        self, x: Tensor, graph: LiftedGraph, *, return_maps: bool = False
    ) -> tuple[Tensor, AttentionMaps | None]:
        """Return the output and, with ``return_maps``, the attention maps.

        The channel map is ``[clouds, fiber, frames, out, in]``, the spatial map ``[points, fiber, frames, out, 1]``;
        those of ``"input"`` and ``"pose"`` are ``[clouds, frames, in]`` and ``[points, frames, 1]``. The map of an own
        operator is returned as ``spatial``.
        """
        check_flag(return_maps=return_maps)
        kernel = self.kernel
        x = input_of(kernel, x, graph)
        local = graph if graph.local is None else graph.local
        maps: AttentionMaps | None
        if self.gate is not None:
            x, maps = cast(tuple[Tensor, AttentionMaps], self.gate(x, graph))
            out = _reduced(kernel.convolve(x, local), local, self.reduction)
            return self.measure * out, maps if return_maps else None
        if isinstance(self.attention, _ResponseGate):
            out, maps = self.attention.weigh(x, kernel, graph, return_maps)
            return self.measure * out, maps
        terms = measured(kernel(local), local, "none", x.dtype)
        responses = to_targets(cast(Tensor, terms.psi), x[:, None, :, None], local)
        responses = _reduced(responses, local, self.reduction)
        removed = self.attention(responses, graph)
        out = ((1 - removed) * responses).sum((2, 4))
        return self.measure * out, AttentionMaps(spatial=removed) if return_maps else None


def _reduced(x: Tensor, graph: LiftedGraph, reduction: Reduction) -> Tensor:
    """Return sums over neighbors, divided by their number if the reduction is ``"mean"``."""
    if reduction == "sum":
        return x
    return x / graph.degree.clamp(min=1).to(x.dtype).view(-1, *[1] * (x.ndim - 1))


def _in_factors(local: LiftedGraph, points: int) -> bool:
    """Return whether the displacements repeat so little that kernels in factors are faster."""
    return local.relative.num_rows > points


def _spatial(kernel: ConvolutionKernel, spatial: ConvolutionKernel | None, outputs: int) -> ConvolutionKernel:
    """Return the kernel of the spatial attention, by default a network; ValueError if it does not fit."""
    if spatial is None:
        return NetworkKernel(kernel.group, 2, outputs, lifting=kernel.lifting)
    found = spatial.group, spatial.in_channels, spatial.out_channels, spatial.lifting
    if found != (kernel.group, 2, outputs, kernel.lifting):
        raise ValueError(
            f"spatial: expected a kernel for {kernel.group.name} with 2 input and {outputs} output channels and "
            f"lifting={kernel.lifting}, got {spatial.group.name}, {found[1]}, {found[2]} and lifting={found[3]}"
        )
    return spatial


class _ResponseGate(nn.Module):
    """Attention to the responses, of some output channels at a time if there are many."""

    def __init__(
        self,
        kernel: ConvolutionKernel,
        attention: str,
        hidden: int,
        spatial: ConvolutionKernel | None,
        reduction: Reduction,
    ) -> None:
        super().__init__()
        self.reduction = reduction
        outputs, inputs, frames = kernel.out_channels, kernel.in_channels, kernel.poses
        self.outputs, self.first, self.second = outputs, None, None
        if attention != "spatial":
            self.first = uniform(outputs, hidden, inputs, frames)
            self.second = uniform(outputs, inputs, hidden, frames)
        self.spatial = None if attention == "channel" else _spatial(kernel, spatial, outputs)

    def weigh(
        self, x: Tensor, kernel: ConvolutionKernel, graph: LiftedGraph, return_maps: bool
    ) -> tuple[Tensor, AttentionMaps | None]:
        """Return the sums ``[points, fiber, out]`` and the maps ``[*, fiber, frames, out, in | 1]``."""
        local = graph if graph.local is None else graph.local
        matrices = [
            matrix[..., kernel.relative].movedim((3, 4), (1, 2))
            for matrix in (self.first, self.second)
            if matrix is not None
        ]
        fused = not return_maps and x.dtype.itemsize >= 4 and fuses_attentive_sums(graph)
        factors = kernel.factors(local) if fused and _in_factors(local, len(x)) else None
        if factors is not None:
            return self._of_factors(x, factors, matrices, graph), None
        near, wide = kernel.terms_of(local), None if self.spatial is None else self.spatial.terms_of(graph)

        def of_outputs(own: slice) -> tuple[Tensor, AttentionMaps | None]:
            return attentive_sums(
                x,
                measured(near(own), local, "none", x.dtype),
                graph,
                channel=(matrices[0][own], matrices[1][own]) if matrices else None,
                spatial=None if wide is None else measured(wide(own), graph, "none", x.dtype),
                mean=self.reduction == "mean",
                return_maps=return_maps,
            )

        # The fused kernel stores the kernel ψ, but no responses.
        stored = local.relative.num_rows if fused else len(x)
        numbers = max(stored, local.relative.num_rows) * kernel.relative.numel() * kernel.in_channels
        at_once = max(1, _AT_ONCE // max(1, numbers))
        if at_once >= self.outputs:
            return of_outputs(slice(None))
        found = [recomputed(of_outputs, slice(start, start + at_once)) for start in range(0, self.outputs, at_once)]
        outs, maps = zip(*found, strict=True)
        if not return_maps:
            return torch.cat(outs, dim=-1), None
        parts = ([part.channel for part in maps], [part.spatial for part in maps])
        return torch.cat(outs, dim=-1), AttentionMaps(*(None if p[0] is None else torch.cat(p, dim=3) for p in parts))

    def _of_factors(
        self, x: Tensor, factors: tuple[Tensor, Tensor], matrices: list[Tensor], graph: LiftedGraph
    ) -> Tensor:
        """Return the sums ``[points, fiber, out]`` with a kernel in factors, for some output frames at a time."""
        local = graph if graph.local is None else graph.local
        found = None if self.spatial is None else self.spatial.factors(graph)
        psi = None if self.spatial is None or found is not None else self.spatial(graph).psi

        def terms(units: Tensor, graph: LiftedGraph) -> RelativeTerms:
            return measured(RelativeTerms(psi=units, row=graph.relative.row), graph, "none", x.dtype)

        def of_frames(own: slice) -> Tensor:
            far = psi[:, own] if psi is not None else None if found is None else found[0][:, own, None, :, None]
            return attentive_sums(
                x,
                terms(factors[0][:, own, None, :, None], local),
                graph,
                mix=factors[1][own],
                channel=(matrices[0][:, own], matrices[1][:, own]) if matrices else None,
                spatial=None if far is None else terms(far, graph),
                spatial_mix=None if found is None else found[1][own],
                mean=self.reduction == "mean",
            )[0]

        numbers = x.numel() * factors[0].shape[2]
        if self.spatial is not None:
            numbers = max(numbers, 2 * graph.relative.num_rows * x.shape[1] * self.outputs)
        at_once = max(1, _AT_ONCE // max(1, numbers))
        if at_once >= graph.fiber:
            return of_frames(slice(None))
        starts = range(0, graph.fiber, at_once)
        return torch.cat([recomputed(of_frames, slice(start, start + at_once)) for start in starts], dim=1)


class _InputGate(nn.Module):
    """Attention α_F to the input, of features or of a field."""

    def __init__(self, kernel: ConvolutionKernel, hidden: int, spatial: GroupConvolution) -> None:
        super().__init__()
        group = None if kernel.lifting else kernel.group
        self.channel = ChannelGate(group, kernel.in_channels, hidden)
        self.spatial = spatial

    def forward(self, x: Tensor, graph: LiftedGraph) -> tuple[Tensor, AttentionMaps]:
        """Return the weighted input ``[points, frames, in]`` and its maps."""
        level = self.channel(graph.mean(x).mT, graph.max(x).mT).mT
        channel, rest = attention_of(level)
        passed, removed = rest[graph.batch] * x, channel[graph.batch] * x
        statistics = torch.stack([removed.mean(-1), removed.amax(-1)], dim=-1)
        kernel = self.spatial.kernel
        level = self.spatial.measure * _reduced(kernel.convolve(statistics, graph), graph, self.spatial.reduction)
        seen, rest = attention_of(level.amax(dim=1, keepdim=True) if kernel.lifting else level)
        return passed + rest * removed, AttentionMaps(channel, seen)


class _PoseGate(nn.Module):
    """Co-attention α_RH to the frames of a field, or to points."""

    def __init__(self, kernel: ConvolutionKernel, measure: float) -> None:
        super().__init__()
        self.group, self.measure = kernel.group, measure
        bound = 1 / math.sqrt(kernel.in_channels)
        self.weight = nn.Parameter(torch.empty(kernel.poses, 1, kernel.in_channels).uniform_(-bound, bound))

    def forward(self, x: Tensor, graph: LiftedGraph) -> tuple[Tensor, AttentionMaps]:
        """Return the weighted input ``[points, frames, in]`` and its map."""
        if len(self.weight) == 1:
            level = x @ self.weight[0].T
        else:
            level = tied_linear(x, self.weight, self.group.relative_index.to(x.device))
        seen, rest = attention_of(self.measure * level)
        return rest * x, AttentionMaps(None, seen)


def _check_operator(kernel: ConvolutionKernel, attention: Operator) -> None:
    """Raise an error unless the maps of a user's operator move with random responses, for random parameters."""
    group, generator = kernel.group, torch.Generator().manual_seed(0)
    attention = with_random_weights(attention, generator)
    shape = (_POINTS, group.order, kernel.poses, kernel.out_channels, kernel.in_channels)
    pos, responses = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in ((_POINTS, group.dim), shape)
    )

    def moved(h: int, x: Tensor) -> Tensor:
        x = x[:, group.permutation(h)]
        return x if kernel.lifting else x[:, :, group.permutation(h)]

    def maps(h: int) -> Tensor:
        shift = torch.randn(group.dim, generator=generator, dtype=torch.float64)
        return attention(moved(h, responses), lift(group.act(h, pos) + shift, group, AllPairs()))

    check_moves_along(group, shape, maps, moved)
