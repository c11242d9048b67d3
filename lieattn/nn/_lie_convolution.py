"""Convolutions on group elements: LieConv in PointConv form, and one whose neighbors are weighted by attention."""

from __future__ import annotations

import math
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from lieattn._checks import check_count, check_features
from lieattn.geometry import LiftedGraph
from lieattn.nn._lie_attention import LieSelfAttention
from lieattn.nn._lie_block import norm_layer
from lieattn.nn._location import RelativeGraph, pair_coordinates
from lieattn.nn._measure import haar_weights
from lieattn.ops import Activation, RelativeTerms, activation, group_attention


class KernelNetwork(nn.Module):
    """The network of LieConv that makes a few numbers of a relative element: three maps, each with activation.

    Parameters
    ----------
    coordinates
        Number of coordinates of a relative element.
    out_channels
        Numbers made.
    hidden
        Units of both hidden layers.
    activation
        After each map.
    """

    def __init__(
        self, coordinates: int, out_channels: int = 16, hidden: int = 32, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        for name, count in (("coordinates", coordinates), ("out_channels", out_channels), ("hidden", hidden)):
            check_count(name, count)
        self.linear1 = nn.Linear(coordinates, hidden)
        self.linear2 = nn.Linear(hidden, hidden)
        self.linear3 = nn.Linear(hidden, out_channels)
        self.activation: Activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """``[*, coordinates]`` to ``[*, out_channels]``, in the dtype of the weights."""
        if x.shape[-1] != self.linear1.in_features:
            raise ValueError(
                f"x: expected {self.linear1.in_features} coordinates of a relative element, got {x.shape[-1]}"
            )
        act = activation("activation", self.activation)
        x = x.to(self.linear1.weight.dtype)
        for linear in (self.linear1, self.linear2, self.linear3):
            x = act(linear(x))
        return x


class LieConvolution(nn.Module):
    r"""Group convolution of LieConv (arXiv 2002.12880, Eq. 8) with kernels of finite rank, as in PointConv.

    .. math::  f'(g) = \sum_{g' \in N(g)} W(g^{-1} g')\, f(g') + b, \qquad W(u) = \sum_m k_m(u)\, W_m

    with k a small network of the relative element. The sum over neighbors is taken before the matrices W_m: it is
    the operator with scores k_m that are not normalized, one head for each m, and the same values for all heads.

    **Equivariance.** That of :class:`LieSelfAttention`.

    Parameters
    ----------
    in_channels, out_channels
        Channels of the fields.
    coordinates
        Number of coordinates of a relative element.
    rank
        Number of matrices W_m.
    hidden, activation
        Of the network k.
    divide
        What the sum over neighbors is divided by: ``"neighbors"`` by their number, ``"published"`` divides the
        bias too, as the authors' code does, ``"none"`` leaves the sum.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        coordinates: int,
        *,
        rank: int = 16,
        hidden: int = 32,
        activation: Activation = "silu",
        divide: Literal["neighbors", "published", "none"] = "neighbors",
    ) -> None:
        super().__init__()
        check_count("in_channels", in_channels)
        check_count("out_channels", out_channels)
        if divide not in ("neighbors", "published", "none"):
            raise ValueError(f"divide: expected 'neighbors', 'published' or 'none', got {divide!r}")
        self.divide = divide
        self.kernel = KernelNetwork(coordinates, rank, hidden, activation)
        bound = 1 / math.sqrt(in_channels * rank)
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, rank).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out_channels).uniform_(-bound, bound))

    def forward(self, x: Tensor, graph: RelativeGraph | LiftedGraph) -> Tensor:
        """Field ``[points, fiber, in_channels]`` to ``[points, fiber, out_channels]``."""
        check_field(x, graph, self.weight, self.weight.shape[1])
        coordinates, row = pair_coordinates(graph)
        kernel = self.kernel(coordinates)[..., None, :]
        weights = haar_weights(graph)
        if weights is not None:
            kernel = kernel * weights[:, None, None, None, None].to(kernel.dtype)
        mixed = _ranked_sums(x[:, :, None], kernel, graph, row)
        out = torch.einsum("pahrc,ocr->pao", mixed, self.weight)
        if self.divide == "none":
            return out + self.bias
        count = (graph.neighbors.degree.clamp(min=1) * x.shape[1]).to(out)[:, None, None]
        return (out + self.bias) / count if self.divide == "published" else out / count + self.bias


class AttentiveConvolution(nn.Module):
    r"""Convolution whose neighbors are weighted by attention: values are acted on by a kernel of the relative element.

    .. math::
        f'(g) = b + \sum_e W_e \sum_{g' \in N(g)} A_e(g, g')\, W_V^e(g^{-1} g')\, f(g'), \qquad
        W_V^e(u) = \sum_m k_m^e(u)\, W_m^e

    with A the weights of a :class:`LieSelfAttention`. On R^d that is W_V(x_i - x_j), so geometry is seen also where
    features are constant.

    **Equivariance.** That of :class:`LieSelfAttention`.

    Parameters
    ----------
    attention
        Makes the weights, the values V f that W_V acts on, and the output.
    coordinates
        Number of coordinates of a relative element.
    rank
        Number of matrices W_m of each head.
    hidden, activation
        Of the network k.
    """

    def __init__(
        self,
        attention: LieSelfAttention,
        coordinates: int,
        *,
        rank: int = 4,
        hidden: int = 32,
        activation: Activation = "silu",
    ) -> None:
        super().__init__()
        check_count("rank", rank)
        self.attention = attention
        heads, channels = attention.heads, attention.channels
        self.rank = rank
        self.kernel = KernelNetwork(coordinates, heads * rank, hidden, activation)
        width = channels // heads
        bound = 1 / math.sqrt(width * rank)
        self.weight = nn.Parameter(torch.empty(heads, rank, width, width).uniform_(-bound, bound))

    def forward(self, x: Tensor, graph: RelativeGraph | LiftedGraph) -> Tensor:
        """Field ``[points, fiber, channels]`` to a field of the same shape."""
        attention = self.attention
        weights = attention.weights(x, graph)
        coordinates, row = pair_coordinates(graph)
        kernel = self.kernel(coordinates)
        if row is not None:
            kernel = kernel.index_select(0, row)
        ranked = weights[..., None] * kernel.unflatten(-1, (attention.heads, self.rank))
        value = attention.value(x).unflatten(-1, (attention.heads, -1))
        mixed = _ranked_sums(value, ranked, graph, None)
        return cast(Tensor, attention.output(torch.einsum("pahrc,hrcd->pahd", mixed, self.weight).flatten(-2)))


class LieBottleneck(nn.Module):
    """Residual block of LieConv: down, convolution, up, each behind a normalization and the activation.

    f is added to the first in_channels channels of the result, so channels may grow but not shrink.

    **Equivariance.** That of :class:`LieConvolution`.

    Parameters
    ----------
    in_channels, out_channels
        Channels of the fields; at least as many out as in.
    coordinates
        Number of coordinates of a relative element.
    widths
        Channels of the convolution's input and output; a quarter of those outside if absent.
    norm
        ``"batch"`` (the authors'), ``"layer"`` or ``"none"``.
    activation
        Between the maps and of the network of the kernel.
    rank, hidden, divide
        See :class:`LieConvolution`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        coordinates: int,
        *,
        widths: tuple[int, int] | None = None,
        norm: Literal["batch", "layer", "none"] = "batch",
        activation: Activation = "silu",
        rank: int = 16,
        hidden: int = 32,
        divide: Literal["neighbors", "published", "none"] = "neighbors",
    ) -> None:
        super().__init__()
        if out_channels < in_channels:
            raise ValueError(
                f"out_channels: expected at least {in_channels}, as many as in_channels, got {out_channels}"
            )
        if norm not in get_args(Literal["batch", "layer", "none"]):
            raise ValueError(f"norm: expected 'batch', 'layer' or 'none', got {norm!r}")
        narrow_in, narrow_out = widths or (max(1, in_channels // 4), max(1, out_channels // 4))
        self.activation: Activation = activation
        self.norm_in, self.norm_down, self.norm_up = (
            norm_layer(norm, width) for width in (in_channels, narrow_in, narrow_out)
        )
        self.down = nn.Linear(in_channels, narrow_in)
        self.convolution = LieConvolution(
            narrow_in,
            narrow_out,
            coordinates,
            rank=rank,
            hidden=hidden,
            activation=activation,
            divide=divide,
        )
        self.up = nn.Linear(narrow_out, out_channels)

    def forward(self, x: Tensor, graph: RelativeGraph | LiftedGraph, kept: Tensor | None = None) -> Tensor:
        """Field ``[points, fiber, in_channels]`` to ``[points kept, fiber, out_channels]``.

        Parameters
        ----------
        x
            Field on ``graph``.
        graph
            Geometry of the convolution.
        kept
            ``[points kept]`` int64 indices of the points that subsampling keeps; all if absent.
        """
        act = activation("activation", self.activation)
        y = self.convolution(act(self.norm_down(self.down(act(self.norm_in(x))))), graph)
        if kept is not None:
            x, y = x[kept], y[kept]
        y = self.up(act(self.norm_up(y)))
        return torch.cat([y[..., : x.shape[-1]] + x, y[..., x.shape[-1] :]], dim=-1)


def _ranked_sums(value: Tensor, ranked: Tensor, graph: RelativeGraph | LiftedGraph, row: Tensor | None) -> Tensor:
    """Σ of values times each of the kernel's numbers, ``[points, fiber, heads, rank, channels]``.

    ``value`` is ``[points, fiber, heads, channels]``, ``ranked`` ``[rows, fiber, fiber, heads, rank]``.
    """
    heads, rank = ranked.shape[-2:]
    values = value[:, :, :, None].expand(-1, -1, -1, rank, -1).flatten(2, 3)
    out, _ = group_attention(
        None,
        None,
        values,
        graph.neighbors,
        pattern="joint",
        normalize="none",
        terms=RelativeTerms(displacement_bias=ranked.flatten(-2), row=row),
    )
    return out.unflatten(2, (heads, rank))


def check_field(x: Tensor, graph: RelativeGraph | LiftedGraph, weight: Tensor, channels: int) -> None:
    """Refuse what is no field on the graph that these weights can multiply."""
    check_features(x, weight)
    if x.ndim != 3 or x.shape[0] != graph.neighbors.num_points or x.shape[2] != channels:
        raise ValueError(
            f"x: expected a field [points={graph.neighbors.num_points}, fiber, {channels}], got {tuple(x.shape)}"
        )
