"""Convolutions: the special case of the operator in which the weights do not depend on the features."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import (
    check_arguments,
    check_count,
    check_counts,
    check_features,
    check_field,
    check_graph,
    check_is,
    weight_of,
)
from lieattn._core.numerics import ExactConstants, keep_variance
from lieattn.geometry import LiftedGraph, Stencil
from lieattn.io import TiedWeights
from lieattn.nn._attention import GroupAttention, spread_features
from lieattn.nn._grid import checked_measure
from lieattn.nn.relative import (
    ConvolutionKernel,
    RelativeFunction,
    TableKernel,
    graph_attention,
)
from lieattn.nn.relative._base import EXPONENTIAL, check_lifted_to, measured, rows_of_table
from lieattn.nn.relative._kernels import RankKernel
from lieattn.ops import Activation, RelativeTerms, edge_messages, group_attention

_SHARP = 1000.0  # a score for which softmax gives the weights 1, and 0 for scores of 0, in every dtype


def input_of(kernel: ConvolutionKernel, x: Tensor, graph: LiftedGraph) -> Tensor:
    """Return features ``[points, in]``, with a fiber of 1, or a field ``[points, fiber, in]``, for a convolution.

    ValueError is raised if the shape is wrong, or the graph is not lifted to the group of the kernel.
    """
    check_features(x, next(kernel.parameters()))
    check_graph(graph, LiftedGraph, x)
    if kernel.lifting:
        return spread_features(x, graph, kernel.in_channels)
    check_lifted_to(graph, kernel.group)
    return check_field(x, graph, kernel.in_channels)


class GroupConvolution(TiedWeights):
    r"""Lifting or group convolution on point clouds, ``layer(x, graph) -> x``.

    .. math::  f'_o(x_i, h_a) = \mu \sum_{j \in N(i)} \sum_b \sum_c \psi_{oc}(h_a^{-1}(x_j - x_i), h_a^{-1} h_b)
        f_c(x_j, h_b)

    without the sum over b if the kernel lifts. A :class:`lieattn.nn.relative.TableKernel` on a grid gives the same
    result as :class:`lieattn.nn.GridGroupConvolution` with a border. A :class:`lieattn.nn.relative.NetworkKernel` works
    on any cloud. Lifting kernels accept every graph; kernels between frames need graphs lifted to their finite group.

    **Equivariance.** If (t, h) in R^d ⋊ H acts on the points and the field is translated by h (features of points, for
    lifting, do not change), the output is translated by h. This is exact for every H if neighborhoods are balls.

    Parameters
    ----------
    kernel
        Kernel ψ, which determines the group, the channels, and whether the layer lifts.
    measure
        Factor μ; if absent that of grids: 1 for lifting, π/2 for p4 and π for p4m.
    reduction
        ``"sum"`` over the neighbors, or ``"mean"``, which does not depend on the density of the points.

    Examples
    --------
    >>> import torch
    >>> from lieattn.geometry import Radius, lift
    >>> from lieattn.groups import cyclic
    >>> from lieattn.nn.relative import NetworkKernel
    >>> graph = lift(torch.randn(20, 2), cyclic(4), Radius(1.0))
    >>> lifting = GroupConvolution(NetworkKernel(cyclic(4), 3, 8, lifting=True))
    >>> lifting(torch.randn(20, 3), graph).shape
    torch.Size([20, 4, 8])
    """

    def __init__(
        self, kernel: ConvolutionKernel, *, measure: float | None = None, reduction: Literal["sum", "mean"] = "sum"
    ) -> None:
        check_arguments(GroupConvolution.__init__, locals())
        super().__init__()
        self.kernel, self.group = kernel, kernel.group
        self.measure = checked_measure(measure, kernel.group, lifting=kernel.lifting)
        self.reduction: Literal["sum", "mean"] = reduction

    def forward(
        self, x: Float[Tensor, "points ... channels"], graph: LiftedGraph
    ) -> Float[Tensor, "nodes fiber outputs"]:
        """Map features ``[points, in]`` or a field ``[points, fiber, in]`` to a field ``[points, fiber, out]``.

        ValueError is raised if the shape is wrong, or the graph is not lifted to the group of the kernel.
        """
        x, stencil = input_of(self.kernel, x, graph), graph.terms
        if isinstance(stencil, Stencil):
            parts = self.kernel.separated(stencil.graph, x)
            if parts is None:
                terms = self.kernel(stencil.graph)
            else:
                terms, x = RelativeTerms(psi=parts[0][:, :, None, None], row=stencil.graph.relative.row), parts[1]
            psi = cast(Tensor, measured(terms, stencil.graph, "none", x.dtype).psi)
            summed = stencil.convolve(x, self.measure * (psi if parts is None else psi.flatten(2)))
            degree = stencil.degrees(len(x))
        else:
            summed, degree = self.measure * self.kernel.convolve(x, graph), graph.degree
        if self.reduction == "mean":
            summed = summed / degree.clamp(min=1).to(summed.dtype)[:, None, None]
        return summed

    def as_attention(self) -> GroupAttention:
        """Return an attention layer that computes the same map (GSA-Nets, section 5.3).

        The layer has a head for each relative element u of the table. The head puts all its weight on g u, its values
        are the features, and the output projection applies ψ(u). This shows that joint attention can represent every
        convolution with a table; :class:`GroupSelfAttention` with its sum over query frames cannot. If g u is not in
        the neighborhood, the head contributes nothing. If several neighbors have the same u, such as points at one
        place or nodes on several scales, the head averages them, and the convolution sums them. The cost is quadratic
        in the number of heads, so the layer is for illustration, not for training. ValueError is raised unless the
        reduction is ``"sum"`` and the kernel is a :class:`lieattn.nn.relative.TableKernel`.
        """
        kernel = self.kernel
        if not isinstance(kernel, TableKernel) or self.reduction != "sum":
            found = f"{self.reduction!r} and a {type(kernel).__name__}"
            raise ValueError(f"reduction, kernel: expected 'sum' and a TableKernel, got {found}")
        heads, width = len(kernel.rows) * kernel.poses, kernel.in_channels
        layer = GroupAttention(
            width,
            kernel.out_channels,
            heads=heads,
            head_channels=width,
            # For lifting, the sum is over the single query of a point.
            pattern="query_sum" if kernel.lifting else "joint",
            encoding=_OneElement(kernel),
            lifting=kernel.lifting,
        ).to(kernel.weight)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
            cast(nn.Linear, layer.value).weight.copy_(torch.eye(width).repeat(heads, 1))
            cast(nn.Linear, layer.output).weight.copy_(self.measure * kernel.weight.permute(0, 3, 2, 1).flatten(1))
        return layer


class _OneElement(ExactConstants, RelativeFunction):
    """Scores that let each head attend to one relative element, and factors that remove all other elements."""

    rows: Tensor

    def __init__(self, kernel: TableKernel) -> None:
        super().__init__()
        self.lifted_to = None if kernel.lifting else kernel.group
        self.dim, self.tolerance = kernel.group.dim, kernel.tolerance
        self.register_constant("rows", kernel.rows.clone())

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        check_lifted_to(graph, self.lifted_to)
        row = rows_of_table(graph, self.rows, self.tolerance)
        found = F.one_hot(row, len(self.rows))[:, :, None]  # [rows, fiber, 1, offsets]
        if self.lifted_to is not None:
            poses = F.one_hot(graph.relative.pair_index, graph.fiber)
            found = (found[..., None] * poses[:, :, None]).flatten(-2)
        chosen = found.to(graph.pos.dtype)
        # The softmax removes the weights of smooth neighborhoods from the scores of a single key.
        terms = measured(RelativeTerms(psi=chosen[..., None], row=graph.relative.row), graph, "none", chosen.dtype)
        return replace(terms, displacement_bias=_SHARP * chosen)


class LieConvolution(nn.Module):
    r"""Group convolution of LieConv (arXiv 2002.12880, Eq. 8) with kernels of finite rank, as in PointConv.

    .. math::  f'(g) = \sum_{g' \in N(g)} W(g^{-1} g')\, f(g') + b, \qquad W(u) = \sum_m k_m(u)\, W_m

    where k is a network of the relative element with two hidden layers.

    **Equivariance.** That of :class:`GroupAttention`, on every graph.

    Parameters
    ----------
    in_channels, out_channels
        Channels of the fields.
    coordinates, rank, hidden, activation
        Number of coordinates of a relative element (``graph.relative.num_coordinates``), number of the k_m, number of
        units in both hidden layers of their network, and an activation of :func:`lieattn.ops.head_networks`.
    divide
        ``"neighbors"`` divides the sum by the number of neighboring elements, ``"published"`` also divides the bias, as
        the authors' code does, and ``"none"`` divides neither.
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
        check_arguments(LieConvolution.__init__, locals())
        super().__init__()
        check_counts(in_channels=in_channels, out_channels=out_channels)
        self.divide = divide
        self.kernel = RankKernel(coordinates, rank, hidden, activation)
        bound = 1 / math.sqrt(in_channels * rank)
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, rank).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out_channels).uniform_(-bound, bound))

    def forward(
        self, x: Float[Tensor, "points fiber channels"], graph: LiftedGraph
    ) -> Float[Tensor, "points fiber outputs"]:
        """Map a field ``[points, fiber, in_channels]`` to ``[points, fiber, out_channels]``."""
        check_features(x, self.weight)
        check_graph(graph, LiftedGraph, x)
        x = check_field(x, graph, self.weight.shape[1])
        # The sum over neighbors precedes the matrices W_m: each m is a head, and all heads have the same values.
        values = x[:, :, None].expand(-1, -1, self.weight.shape[2], -1)
        mixed, _ = graph_attention(None, None, values, graph, normalize="none", terms=self.kernel(graph))
        out = torch.einsum("parc,ocr->pao", mixed, self.weight)
        if self.divide == "none":
            return out + self.bias
        count = (graph.degree.clamp(min=1) * x.shape[1]).to(out)[:, None, None]
        return (out + self.bias) / count if self.divide == "published" else out / count + self.bias


class AttentiveConvolution(nn.Module):
    r"""Convolution weighted by attention: attention whose values are multiplied by a kernel of the relative element.

    .. math::
        f'(g) = b + \sum_e W_e \sum_{g' \in N(g)} A_e(g, g')\, W_V^e(g^{-1} g')\, V_e f(g'), \qquad
        W_V^e(u) = \sum_m k_m^e(u)\, W_m^e

    where A are the attention weights, after dropout. Because of the kernel, the output depends on the geometry even if
    features are constant.

    **Equivariance.** That of :class:`GroupAttention`, on every graph.

    Parameters
    ----------
    attention
        A :class:`GroupAttention` in the joint pattern without lifting, whose encoding computes scores only (otherwise
        ValueError). It computes weights, values and output.
    coordinates, rank, hidden, activation
        See :class:`LieConvolution`; the rank is that of each head.
    """

    def __init__(
        self,
        attention: GroupAttention,
        coordinates: int,
        *,
        rank: int = 4,
        hidden: int = 32,
        activation: Activation = "silu",
    ) -> None:
        check_arguments(AttentiveConvolution.__init__, locals())
        super().__init__()
        check_count("rank", rank)
        if attention.pattern != "joint" or attention.lifting:
            raise ValueError(f"attention: expected pattern 'joint' without lifting, got {attention}")
        self.attention, self.rank = attention, rank
        heads, width = attention.heads, attention.head_channels
        self.kernel = RankKernel(coordinates, heads * rank, hidden, activation)
        bound = 1 / math.sqrt(width * rank)
        self.weight = nn.Parameter(torch.empty(heads, rank, width, width).uniform_(-bound, bound))

    def forward(
        self, x: Float[Tensor, "points fiber channels"], graph: LiftedGraph
    ) -> Float[Tensor, "points fiber outputs"]:
        """Map a field ``[points, fiber, in_channels]`` to ``[points, fiber, out_channels]``."""
        attention = self.attention
        x = attention.checked(x, graph)
        scores = attention.terms(x, graph)
        if scores.psi is not None or scores.beta is not None or scores.rotary_values:
            raise ValueError("attention: expected an encoding of scores only, since the kernel acts on the values")
        terms = self.kernel(graph)
        kernel = cast(Tensor, terms.displacement_bias)
        if terms.row is not None:
            kernel = kernel.index_select(0, terms.row)
        query, key, value = attention.project(x)
        weights = cast(Tensor, attention.operate(query, key, value, graph, scores, return_weights=True)[1])
        weights = F.dropout(weights, attention.dropout, attention.training)
        ranked = weights[..., None] * kernel.unflatten(-1, (attention.heads, self.rank))
        values = value[:, :, :, None].expand(-1, -1, -1, self.rank, -1).flatten(2, 3)
        terms = RelativeTerms(displacement_bias=ranked.flatten(-2))
        if attention.normalize not in EXPONENTIAL:  # other weights do not contain the measure and smooth neighborhoods
            terms = measured(terms, graph, "none", values.dtype)
        mixed, _ = group_attention(None, None, values, graph.neighbors, normalize="none", terms=terms)
        summed = torch.einsum("pahrc,hrcd->pahd", mixed.unflatten(2, (attention.heads, self.rank)), self.weight)
        return cast(Tensor, attention.output(summed.flatten(-2)))


class LiftingConvolution(nn.Module):
    r"""A field over the frames of the points, computed from the neighbors as seen from each frame.

    .. math::  f(x_i, a) = W \sum_j \psi_{ija} \Big/ \sqrt{1 + \textstyle\sum_j w(r_{ij})}

    where ψ, with ``hidden`` channels, and w are those of :class:`lieattn.nn.relative.EdgeNetwork`. The field of a point
    without neighbors is zero.

    **Equivariance.** The field does not change if points, frames and vectors move together. With the same frames h_a,
    a in H, at all points, it is translated by H.

    Parameters
    ----------
    hidden, channels
        Hidden units of the ``EdgeNetwork``, and channels of the field.
    """

    def __init__(self, hidden: int, channels: int) -> None:
        check_arguments(LiftingConvolution.__init__, locals())
        super().__init__()
        check_counts(hidden=hidden, channels=channels)
        self.output = nn.Linear(hidden, channels, bias=False)
        keep_variance(self.output)

    def forward(
        self, x: Float[Tensor, "edges fiber *units"], graph: LiftedGraph
    ) -> Float[Tensor, "points fiber channels"]:
        """Map ψ of an ``EdgeNetwork``, ``[edges, fiber, (1, 1,) hidden]``, to a field ``[points, fiber, channels]``.

        ValueError is raised for other shapes.
        """
        check_features(x, self.output.weight, self.output.in_features)
        check_graph(graph, LiftedGraph, x)
        edges, hidden = graph.neighbors.num_edges, self.output.in_features
        if x.ndim < 3 or len(x) != edges or x.shape[2:].numel() != hidden:
            raise ValueError(f"x: expected [edges={edges}, fiber, {hidden}] of an EdgeNetwork, got {tuple(x.shape)}")
        return cast(Tensor, self.output(graph.neighbors.sum_to_targets(x.flatten(2))))


class FrameMessages(nn.Module):
    r"""Convolution within each frame and channel, with kernels that are linear in the units of an ``EdgeNetwork``.

    .. math::  f'(x_i, a)_c = \sum_j (W \psi_{ija})_c \, f(x_j, a)_c \Big/ \sqrt{1 + \textstyle\sum_j w(r_{ij})}

    with ψ and w as in :class:`LiftingConvolution`. This is the spatial factor of a separable group convolution (as in
    PONITA, Bekkers et al. 2024, Eq. 13). It relates frames of the same index, so all points of a cloud must have the
    same frames (otherwise ValueError). The fiber can also be another one for which ψ is given, such as directions.

    **Equivariance.** If (t, h) in R^d ⋊ H acts on the points and the field is translated by h, the output is
    translated by h.

    Parameters
    ----------
    hidden, channels
        Hidden units of the ``EdgeNetwork``, and channels of the field.
    """

    def __init__(self, hidden: int, channels: int) -> None:
        check_arguments(FrameMessages.__init__, locals())
        super().__init__()
        check_counts(hidden=hidden, channels=channels)
        self.kernel = nn.Linear(hidden, channels, bias=False)
        keep_variance(self.kernel, 2.0)  # so that messages count beside the attention

    def forward(
        self, x: Float[Tensor, "points fiber channels"], graph: LiftedGraph
    ) -> Float[Tensor, "points fiber channels"]:
        """Map a field to a field of the same shape.

        ``graph.terms`` are those of an ``EdgeNetwork`` on the graph, or W ψ ``[edges, fiber, channels]``, the result of
        ``EdgeNetwork.kernels``.
        """
        check_features(x, self.kernel.weight)
        check_graph(graph, LiftedGraph, x)
        neighbors, terms = graph.neighbors, graph.terms
        if not graph.relative.tied:
            raise ValueError("graph: messages within frames need the same frames over all points of a cloud")
        if isinstance(terms, Tensor):
            check_field(x, graph, self.kernel.out_features)
            expected = neighbors.num_edges, graph.fiber, self.kernel.out_features
            if terms.shape != expected:
                raise ValueError(
                    f"graph.terms: expected [edges, fiber, channels] = {expected}, got {tuple(terms.shape)}"
                )
            return edge_messages(terms, None, x, neighbors)
        check_is("graph.terms", terms, RelativeTerms)
        if terms.psi is None or terms.psi.shape[2:4] != (1, 1) or len(terms.psi) != neighbors.num_edges:
            psi = f"psi [edges={neighbors.num_edges}, fiber, 1, 1, hidden]"
            raise ValueError(f"graph.terms: expected those of an EdgeNetwork, with {psi}")
        units = terms.psi.flatten(2)  # unlike indexing, flatten does not copy the gradient once more
        check_field(x, graph, self.kernel.out_features, units.shape[1])
        weight, moving = weight_of("kernel", self.kernel), graph.pos.requires_grad
        return edge_messages(units, weight, x, neighbors, moving=moving)
