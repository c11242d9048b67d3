"""Attentive group convolution on grids."""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import (
    check_arguments,
    check_broadcast,
    check_choice,
    check_count,
    check_counts,
    check_flag,
    check_positive,
    check_tensor,
)
from lieattn._core.numerics import KeptTables, attention_of
from lieattn.groups import FiniteGroup
from lieattn.io import TiedWeights
from lieattn.nn._grid import (
    GridConvolution,
    GridGroupConvolution,
    GridLiftingConvolution,
    act_on_grid,
    check_grid,
    check_lattice_group,
    checked_measure,
    group_taps,
    lifting_taps,
    moved_kernels,
    permuted_copies,
)
from lieattn.ops import AttentionMaps, attentive_convolution, convolution_responses, residual_branch, tied_linear

Attention = Literal["full", "channel", "spatial"]
ChannelAction = Literal["group", "cyclic"]
T = TypeVar("T", bound=Callable[..., Tensor])
AttentionOperator = Callable[[Tensor], Tensor]

_SIDE = 5  # side of the random responses on which user-defined operators are checked
_ALLOWED = 1e-8  # allowed relative difference of their maps in float64


class ResponseAttention(KeptTables):
    """Weights of :class:`GridAttentiveConvolution`: matrices for the channels and a kernel for the positions."""

    first: nn.Parameter | None
    second: nn.Parameter | None
    spatial: nn.Parameter | None
    between: Tensor
    taps: Tensor

    def __init__(
        self,
        layer: GridConvolution,
        attention: Attention,
        hidden: int | None,
        size: int,
        channel_action: ChannelAction,
        init_scale: float,
    ) -> None:
        super().__init__()
        _check_odd(size)
        group, in_channels, out_channels = layer.group, layer.in_channels, layer.out_channels
        self.order, self.lifting = group.order, layer.lifting
        fiber = () if layer.lifting else (group.order,)
        self.first = self.second = self.spatial = None
        if attention != "spatial":
            hidden = default_hidden(in_channels, layer.lifting) if hidden is None else hidden
            check_count("hidden", hidden)
            self.first = uniform(out_channels, hidden, in_channels, *fiber)
            self.second = uniform(out_channels, in_channels, hidden, *fiber)
        if attention != "channel":
            bound, sides = init_scale / math.sqrt(2 * size**group.dim), [size] * group.dim
            self.spatial = nn.Parameter(torch.empty(out_channels, 2, *fiber, *sides).uniform_(-bound, bound))
        frames = torch.arange(group.order)
        # In the authors' code, the index of the weights is (h̃ - h) modulo the order.
        cyclic = (frames[None, :] - frames[:, None]) % group.order
        between = group.relative_index.clone() if channel_action == "group" else cyclic
        self.register_buffer("between", between, persistent=False)
        taps = lifting_taps(group, size) if layer.lifting else group_taps(group, size)
        self.register_buffer("taps", taps, persistent=False)

    def channel_matrices(self) -> tuple[Tensor, Tensor] | None:
        """Return W1 ``[out, order, fiber, hidden, in]`` and W2 ``[out, order, fiber, in, hidden]`` of frame pairs."""
        if self.first is None or self.second is None:
            return None
        if self.lifting:
            first, second = (m[:, None, None].expand(-1, self.order, 1, -1, -1) for m in (self.first, self.second))
        else:
            first, second = (permuted_copies(m, self.between).permute(0, 3, 4, 1, 2) for m in (self.first, self.second))
        return first, second

    def spatial_kernels(self) -> Tensor | None:
        """Return the spatial kernels ``[out, order, fiber, 2, *sides]`` of all pairs of frames."""
        return None if self.spatial is None else moved_kernels(self.spatial, self.taps).transpose(2, 3)


class _Attentive(GridConvolution):
    """Base class of the two attentive layers."""

    attentive = True

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        size: int,
        *,
        attention: Attention | AttentionOperator = "full",
        hidden: int | None = None,
        spatial_size: int = 7,
        spatial_dilation: int = 1,
        channel_action: ChannelAction = "group",
        **options: Any,
    ) -> None:
        if isinstance(attention, str):
            check_choice("attention", attention, Attention)
        check_arguments(_Attentive.__init__, locals())
        super().__init__(group, in_channels, out_channels, size, **options)
        check_count("spatial_dilation", spatial_dilation)
        self.spatial_dilation = spatial_dilation
        self.attention: Any
        if not isinstance(attention, str):
            _check_operator(self, attention)
            self.attention = attention
            return
        init_scale = options.get("init_scale", 1.0)
        self.attention = ResponseAttention(self, attention, hidden, spatial_size, channel_action, init_scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)[0]

    def attend(self, x: Tensor, *, return_maps: bool = False) -> tuple[Tensor, AttentionMaps | None]:
        """Return the output and, with ``return_maps``, the attention maps.

        The channel map is ``[batch, out, order, in, fiber, *ones]``, the spatial map ``[batch, out, order, 1, fiber,
        *sides']``. The map of a user-defined operator is returned as ``spatial``.
        """
        check_flag(return_maps=return_maps)
        attention = self.attention
        if not isinstance(attention, ResponseAttention):
            responses = self.responses(x)
            maps = AttentionMaps(spatial=attention(responses))
            return residual_branch(responses, maps, self.measure), maps if return_maps else None
        return attentive_convolution(
            self.checked(x),
            self.kernels(),
            channel=attention.channel_matrices(),
            spatial=attention.spatial_kernels(),
            measure=self.measure,
            stride=self.stride,
            pad=self.pad,
            dilation=self.dilation,
            spatial_dilation=self.spatial_dilation,
            return_maps=return_maps,
        )

    def responses(self, x: Tensor) -> Tensor:
        """Return the responses of the convolution, ``[batch, out, order, in, fiber, *sides']``."""
        return convolution_responses(
            self.checked(x), self.kernels(), stride=self.stride, pad=self.pad, dilation=self.dilation
        )


def default_hidden(channels: int, lifting: bool) -> int:
    """Return the hidden width of channel attention if none is given."""
    return channels if lifting else max(1, channels // 2)


def with_random_weights(operator: T, generator: torch.Generator) -> T:
    """Return a copy of a module in float64 with random parameters; another function is returned as it is."""
    if not isinstance(operator, nn.Module):
        return operator
    made = copy.deepcopy(operator).to("cpu", torch.float64).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, generator=generator)
    return made


def _check_operator(layer: GridConvolution, attention: AttentionOperator) -> None:
    """Raise an error unless the maps of a user-defined operator move with random responses, for random parameters."""
    group, generator = layer.group, torch.Generator().manual_seed(0)
    attention = with_random_weights(attention, generator)
    fiber = 1 if layer.lifting else group.order
    shape = (2, layer.out_channels, group.order, layer.in_channels, fiber, *[_SIDE] * group.dim)
    responses = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    def moved(h: int, x: Tensor) -> Tensor:
        x = x[:, :, group.permutation(h)]
        x = x if layer.lifting else x[:, :, :, :, group.permutation(h)]
        return act_on_grid(group, h, x.flatten(1, 4)).unflatten(1, shape[1:5])

    check_moves_along(group, shape, lambda h: attention(moved(h, responses)), moved)


def check_moves_along(
    group: FiniteGroup, shape: Sequence[int], maps: Callable[[int], Tensor], moved: Callable[[int, Tensor], Tensor]
) -> None:
    """Raise an error unless ``maps(h)`` of responses that h moves are the maps ``moved`` by h, for all elements h."""

    def checked(h: int) -> Tensor:
        found = maps(h)
        check_tensor("attention: its maps", found, "a floating tensor")
        check_broadcast("attention: its maps", found.shape, "responses", shape)
        return found.expand(*shape)

    with torch.no_grad():
        before = checked(group.identity_index)
        for h in range(group.order):
            worst = float((checked(h) - moved(h, before)).abs().max() / before.abs().max().clamp(min=1))
            if not worst <= _ALLOWED:
                raise ValueError(
                    "attention: expected maps that move with the group, A[L_h f](g, g') = A[f](h^-1 g, h^-1 g'); for "
                    f"element h = {h} of {group.name} they differ by {worst:.1e}"
                )


class GridAttentiveLifting(_Attentive, GridLiftingConvolution):
    r"""Lifting convolution with attention to its responses.

    .. math::
        f'_o(h, y) = \sum_c (1 - \alpha_X(o, h, y)\, \alpha_C(o, h, c)) \, t_{oc}(h, y)

    See :class:`GridAttentiveConvolution`, also for the parameters. Channel matrices do not depend on the frame.

    **Equivariance.** That of :class:`lieattn.nn.GridLiftingConvolution`. The attention maps transform like the output.
    """


class GridAttentiveConvolution(_Attentive, GridGroupConvolution):
    r"""Group convolution with attention to its responses (attentive group convolution).

    .. math::
        t_{oc}(y, h, \tilde h) &= \sum_p f_c(\tilde h, y + p) \psi_{oc}(h^{-1} \tilde h, h^{-1} p), \\
        f'_o(h, y) &= \mu \sum_{c, \tilde h} (1 - \alpha_X(o, h, \tilde h, y)\, \alpha_C(o, h, c, \tilde h))
        \, t_{oc}(y, h, \tilde h)

    where :math:`\alpha_C` is a function of the mean and maximum of t over positions, and :math:`\alpha_X` a function of
    the mean and maximum of :math:`\alpha_C t` over channels; the weights of both depend on :math:`h^{-1} \tilde h`
    (Romero, Bekkers, Tomczak, Hoogendoorn 2020, Eqs. 14-20). As in the authors' code, the attended part is subtracted.

    **Equivariance.** That of :class:`lieattn.nn.GridGroupConvolution`. The maps A are also equivariant:
    ``A[L_g f](g1, g2) = A[f](g⁻¹ g1, g⁻¹ g2)``.

    **Cost.** See :func:`lieattn.ops.attentive_convolution`.

    Parameters
    ----------
    group, in_channels, out_channels, size
        See :class:`lieattn.nn.GridGroupConvolution`.
    attention
        ``"full"``, ``"channel"`` (α_CH, α_X = 1) or ``"spatial"`` (α_SP, α_C = 1); or your own operator, for example a
        module, that maps the responses t ``[batch, out, order, in, fiber, *sides]`` to a tensor in place of α_X α_C,
        which must broadcast to the shape of t. The other options of the attention are not used then. The equivariance
        of A above, the condition of Theorem 1, is tested on random responses for all elements of the group, with random
        parameters of a module; ValueError is raised if it fails. Translations are not tested.
    hidden
        Hidden width of the channel attention; half the input channels if absent (for lifting, all of them).
    spatial_size, spatial_dilation
        Odd side of the spatial kernel, and its dilation.
    channel_action
        ``"group"``; or ``"cyclic"``, which serves to import weights of the authors' code and is not equivariant to
        reflections.
    **options
        Options of :class:`lieattn.nn.GridGroupConvolution`. The default of the measure is that of the authors' code,
        2π/|H| (for p4m π/4 instead of the π of the plain layer), and 1 in space or without rotations.
    """


class ChannelGate(KeptTables):
    """W₂ relu(W₁ mean) + W₂ relu(W₁ max) with group-tied W₁ and W₂; ``group`` is None for planes."""

    relative: Tensor

    def __init__(self, group: FiniteGroup | None, channels: int, hidden: int) -> None:
        super().__init__()
        check_counts(channels=channels, hidden=hidden)
        fiber = () if group is None else (group.order,)
        relative = torch.zeros(1, 1, dtype=torch.int64) if group is None else group.relative_index.clone()
        self.first, self.second = uniform(hidden, channels, *fiber), uniform(channels, hidden, *fiber)
        self.register_buffer("relative", relative, persistent=False)

    def forward(
        self, mean: Float[Tensor, "batch channels fiber"], top: Float[Tensor, "batch channels fiber"]
    ) -> Float[Tensor, "batch channels fiber"]:
        """Map statistics ``[batch, channels, fiber]`` to levels of the same shape; the fiber is 1 for planes."""
        hidden = torch.relu(self._mix(self.first, mean)) + torch.relu(self._mix(self.first, top))
        return self._mix(self.second, hidden)

    def _mix(self, matrix: Tensor, statistics: Tensor) -> Tensor:
        kernel = matrix.flatten(2).permute(2, 0, 1) if matrix.ndim == 3 else matrix[None]
        return tied_linear(statistics.mT, kernel, self.relative).mT


class _Gate(TiedWeights):
    """Base class of attention to a field on a grid, or to planes if ``lifting``."""

    def __init__(self, group: FiniteGroup, channels: int, lifting: bool, init_scale: float) -> None:
        super().__init__()
        check_positive(init_scale=init_scale)
        check_lattice_group(group)
        check_count("channels", channels)
        self.group, self.channels, self.lifting = group, channels, lifting

    def forward(self, x: Float[Tensor, "batch channels *rest"]) -> Float[Tensor, "batch channels *rest"]:
        """Map ``[batch, channels, (order,) *sides]`` to the same shape."""
        return self.attend(x)[0]

    @abc.abstractmethod
    def attend(self, x: Tensor, *, return_maps: bool = False) -> tuple[Tensor, AttentionMaps | None]:
        """Return the gated input and, with ``return_maps``, its attention maps."""


class GridInputAttention(_Gate):
    r"""Input attention α_F: attention maps that all output channels of the following convolution share.

    .. math::  f' = (1 - \alpha_X \alpha_C) f

    Here :math:`\alpha_C = \sigma(W_2 \operatorname{relu}(W_1 s_{mean}) + W_2 \operatorname{relu}(W_1 s_{max}))`, with
    mean and maximum of f over positions and group-tied W, without a measure. :math:`\alpha_X` is the sigmoid of a group
    convolution of the mean and maximum of :math:`\alpha_C f` over channels; on planes it is the sigmoid of the maximum
    over the frames of a lifting convolution.

    **Equivariance.** If a group element acts on the image and its frames, f' and the maps transform in the same way.

    Parameters
    ----------
    group, attention, hidden, spatial_size, spatial_dilation
        See :class:`GridAttentiveConvolution`. The border keeps the size of the image.
    channels, lifting
        Channels of the input, and whether the input consists of planes without frames.
    measure, init_scale
        Options of the spatial kernel, see :class:`lieattn.nn.GridGroupConvolution`. On planes the default of the
        measure is 1.
    """

    def __init__(
        self,
        group: FiniteGroup,
        channels: int,
        *,
        attention: Attention = "full",
        hidden: int | None = None,
        spatial_size: int = 7,
        spatial_dilation: int = 1,
        lifting: bool = False,
        measure: float | None = None,
        init_scale: float = 1.0,
    ) -> None:
        check_arguments(GridInputAttention.__init__, locals())
        super().__init__(group, channels, lifting, init_scale)
        _check_odd(spatial_size)
        check_count("spatial_dilation", spatial_dilation)
        hidden = default_hidden(channels, lifting) if hidden is None else hidden
        self.channel = None if attention == "spatial" else ChannelGate(None if lifting else group, channels, hidden)
        self.spatial: GridConvolution | None = None
        if attention != "channel":
            layer = GridLiftingConvolution if lifting else GridGroupConvolution
            pad = spatial_dilation * (spatial_size // 2)
            self.spatial = layer(
                group, 2, 1, spatial_size, pad=pad, dilation=spatial_dilation, measure=measure, init_scale=init_scale
            )

    def attend(self, x: Tensor, *, return_maps: bool = False) -> tuple[Tensor, AttentionMaps | None]:
        """Return the gated input and, with ``return_maps``, the attention maps.

        The channel map is ``[batch, channels, (order,) *ones]``, the spatial map ``[batch, 1, (order,) *sides]``.
        """
        check_flag(return_maps=return_maps)
        field = check_grid(x, self.group, self.channels, next(self.parameters()), lifting=self.lifting)
        scores = seen = None
        passed, removed = torch.zeros_like(field), field
        if self.channel is not None:
            flat = field.flatten(3)
            level = self.channel(flat.mean(-1), flat.amax(-1))[(..., *[None] * self.group.dim)]
            scores, rest = attention_of(level)
            passed, removed = rest * field, scores * field
        if self.spatial is not None:
            statistics = torch.stack([removed.mean(dim=1), removed.amax(dim=1)], dim=1)
            level = self.spatial(statistics[:, :, 0] if self.lifting else statistics)
            level = level.amax(dim=2, keepdim=True) if self.lifting else level
            seen, rest = attention_of(level)
            passed = passed.addcmul(rest, removed)
        if self.lifting:
            scores, seen = (None if part is None else part[:, :, 0] for part in (scores, seen))
        return passed.view_as(x), AttentionMaps(scores, seen) if return_maps else None


class GridPoseAttention(_Gate):
    r"""Co-attention over the frames, α_RH: a group convolution of side 1 with one output channel.

    .. math::
        \alpha_H(h, y) = \sigma\Big( \mu \sum_{c, \tilde h} w_c(h^{-1} \tilde h) f_c(\tilde h, y) \Big), \qquad
        f' = (1 - \alpha_H) f

    On planes it is a lifting convolution. As in the authors' comparison, a sigmoid replaces the softmax of co-attentive
    networks. The parameters are those of :class:`GridInputAttention`.

    **Equivariance.** If a group element acts on the image and its frames, f' and the map transform in the same way.
    """

    relative: Tensor

    def __init__(
        self,
        group: FiniteGroup,
        channels: int,
        *,
        lifting: bool = False,
        measure: float | None = None,
        init_scale: float = 1.0,
    ) -> None:
        check_arguments(GridPoseAttention.__init__, locals())
        super().__init__(group, channels, lifting, init_scale)
        self.measure = checked_measure(measure, group, lifting=lifting)
        bound = init_scale / math.sqrt(channels)
        self.weight = nn.Parameter(torch.empty(channels, *(() if lifting else (group.order,))).uniform_(-bound, bound))
        self.register_buffer("relative", group.relative_index.clone(), persistent=False)

    def attend(self, x: Tensor, *, return_maps: bool = False) -> tuple[Tensor, AttentionMaps | None]:
        """Return the gated input and, with ``return_maps``, the map ``[batch, 1, (order,) *sides]`` as ``spatial``."""
        check_flag(return_maps=return_maps)
        check_grid(x, self.group, self.channels, self.weight, lifting=self.lifting)
        if self.lifting:
            level = torch.einsum("c,bc...->b...", self.weight, x)[:, None]
        else:
            level = torch.einsum("chg,bcg...->bh...", self.weight[:, self.relative], x)[:, None]
        seen, rest = attention_of(self.measure * level)
        return rest * x, AttentionMaps(None, seen) if return_maps else None


def uniform(*shape: int) -> nn.Parameter:
    """Return a parameter that is initially uniform in ±1 / sqrt(fan in)."""
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def _check_odd(spatial_size: int) -> None:
    """Raise ValueError for even sides of kernels, for which no border keeps the size of an image."""
    check_count("spatial_size", spatial_size)
    if spatial_size % 2 == 0:
        expected = "expected an odd number, so that a border can keep the size of images"
        raise ValueError(f"spatial_size: {expected}, got {spatial_size}")
