"""Convolution: the corner of the operator whose weights do not depend on the features."""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from lieattn._checks import (
    check_arguments,
    check_count,
    check_counts,
    check_features,
    check_graph,
    check_is,
)
from lieattn._tied import TiedWeights
from lieattn.geometry import LiftedGraph
from lieattn.nn._attention import GroupAttention, check_field, spread_features
from lieattn.nn._grid import published_measure
from lieattn.nn.relative import (
    ConvolutionKernel,
    RankKernel,
    RelativeFunction,
    TableKernel,
    graph_attention,
    keep_variance,
)
from lieattn.nn.relative._base import check_lifted_to, rows_of_table
from lieattn.ops import Activation, RelativeTerms, edge_messages, group_attention

_SHARP = 1000.0  # a score of which softmax makes 1, and of 0 beside it 0, in every dtype


class GroupConvolution(TiedWeights):
    r"""Lifting or group convolution on point clouds, ``layer(x, graph) -> x``.

    .. math::  f'_o(x_i, h_a) = \mu \sum_{j \in N(i)} \sum_b \sum_c \psi_{oc}(h_a^{-1}(x_j - x_i), h_a^{-1} h_b)
        f_c(x_j, h_b)

    with the sum over b absent where the kernel lifts. A :class:`lieattn.nn.relative.TableKernel` on a grid gives the
    numbers of :class:`lieattn.nn.GridGroupConvolution` with a border; a :class:`lieattn.nn.relative.NetworkKernel`
    serves any cloud. Kernels that lift work on every graph, those between frames on the fiber of their finite group.

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the field is translated by h (features that are lifted
    stay as they are), the output is translated by h. Exact for every H where neighborhoods are balls.

    Parameters
    ----------
    kernel
        ψ, which knows group, channels and whether the layer lifts.
    measure
        μ; if absent that of grids: 1 for lifting, π/2 on p4 and π on p4m.
    reduction
        ``"sum"`` over the neighbors, or ``"mean"``, which does not depend on how densely points are sampled.

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
        if measure is not None and not math.isfinite(measure):
            raise ValueError(f"measure: expected a finite number, got {measure}")
        if measure is None:
            measure = 1.0 if kernel.lifting else published_measure(kernel.group)
        self.kernel, self.group, self.measure = kernel, kernel.group, float(measure)
        self.reduction: Literal["sum", "mean"] = reduction

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Features ``[points, in]`` or a field ``[points, fiber, in]`` to a field ``[points, fiber, out]``."""
        kernel = self.kernel
        check_features(x, next(kernel.parameters()))
        check_graph(graph, LiftedGraph, x)
        if kernel.lifting:
            x = spread_features(x, graph, kernel.in_channels)
        else:
            check_lifted_to(graph, self.group)
            x = check_field(x, graph, kernel.in_channels)
        summed = kernel.convolve(x, graph)
        if self.reduction == "mean":
            summed = summed / graph.degree.clamp(min=1).to(summed.dtype)[:, None, None]
        return self.measure * summed

    def as_attention(self) -> GroupAttention:
        """The same map as attention (GSA-Nets, section 5.3), for a sum with a :class:`lieattn.nn.relative.TableKernel`.

        There is a head for each relative element u of the table, which puts all its weight on g u, its values are the
        features, and the output maps heads by ψ(u): attention can be any such convolution. Where a neighborhood ends
        before g u, the head adds nothing. Costs grow with the square of the heads' number; use it to see, not to train.
        ValueError is raised for other kernels and reductions.
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
            # Lifting, the sum is over the one query of a point.
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


class _OneElement(RelativeFunction):
    """Scores by which each head sees one relative element alone, and factors without which it would see others."""

    rows: Tensor

    def __init__(self, kernel: TableKernel) -> None:
        super().__init__()
        self.lifted_to = None if kernel.lifting else kernel.group
        self.dim, self.tolerance = kernel.group.dim, kernel.tolerance
        self.register_buffer("rows", kernel.rows.clone(), persistent=False)

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        check_lifted_to(graph, self.lifted_to)
        row = rows_of_table(graph, self.rows, self.tolerance)
        found = one_hot(row, len(self.rows))[:, :, None]  # [rows, fiber, 1, offsets]
        if self.lifted_to is not None:
            poses = one_hot(graph.relative.pair_index, graph.fiber)
            found = (found[..., None] * poses[:, :, None]).flatten(-2)
        chosen = found.to(graph.pos.dtype)
        return RelativeTerms(displacement_bias=_SHARP * chosen, psi=chosen[..., None], row=graph.relative.row)


class LieConvolution(nn.Module):
    r"""Group convolution of LieConv (arXiv 2002.12880, Eq. 8) with kernels of finite rank, as in PointConv.

    .. math::  f'(g) = \sum_{g' \in N(g)} W(g^{-1} g')\, f(g') + b, \qquad W(u) = \sum_m k_m(u)\, W_m

    with k a small network of the relative element, :class:`lieattn.nn.relative.RankKernel`.

    **Equivariance.** That of :class:`GroupAttention`; on every graph.

    Parameters
    ----------
    in_channels, out_channels
        Channels of the fields.
    coordinates, rank, hidden, activation
        See :class:`lieattn.nn.relative.RankKernel`.
    divide
        ``"neighbors"`` divides the sum by their number, ``"published"`` the bias too, as the authors' code does,
        ``"none"`` neither.
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

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Field ``[points, fiber, in_channels]`` to ``[points, fiber, out_channels]``."""
        check_features(x, self.weight)
        check_graph(graph, LiftedGraph, x)
        x = check_field(x, graph, self.weight.shape[1])
        # The sum over neighbors comes before the matrices: m is a head, and all heads have the same values.
        values = x[:, :, None].expand(-1, -1, self.weight.shape[2], -1)
        mixed, _ = graph_attention(None, None, values, graph, normalize="none", terms=self.kernel(graph))
        out = torch.einsum("parc,ocr->pao", mixed, self.weight)
        if self.divide == "none":
            return out + self.bias
        count = (graph.degree.clamp(min=1) * x.shape[1]).to(out)[:, None, None]
        return (out + self.bias) / count if self.divide == "published" else out / count + self.bias


class AttentiveConvolution(nn.Module):
    r"""Convolution whose neighbors are weighted by attention: values are acted on by a kernel of the relative element.

    .. math::
        f'(g) = b + \sum_e W_e \sum_{g' \in N(g)} A_e(g, g')\, W_V^e(g^{-1} g')\, V_e f(g'), \qquad
        W_V^e(u) = \sum_m k_m^e(u)\, W_m^e

    with A the weights of ``attention``, a :class:`GroupAttention` in the joint pattern, which also makes the values and
    the output: geometry is seen also where features are constant. For the rest see :class:`LieConvolution`.

    **Equivariance.** That of :class:`GroupAttention`; on every graph.
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

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Field ``[points, fiber, in_channels]`` to ``[points, fiber, out_channels]``."""
        attention = self.attention
        terms = self.kernel(graph)
        kernel = cast(Tensor, terms.displacement_bias)
        if terms.row is not None:
            kernel = kernel.index_select(0, terms.row)
        weights = attention.weights(x, graph)
        ranked = weights[..., None] * kernel.unflatten(-1, (attention.heads, self.rank))
        value = attention._project(x)[2]
        values = value[:, :, :, None].expand(-1, -1, -1, self.rank, -1).flatten(2, 3)
        terms = RelativeTerms(displacement_bias=ranked.flatten(-2))
        mixed, _ = group_attention(None, None, values, graph.neighbors, normalize="none", terms=terms)
        summed = torch.einsum("pahrc,hrcd->pahd", mixed.unflatten(2, (attention.heads, self.rank)), self.weight)
        return cast(Tensor, attention.output(summed.flatten(-2)))


class LiftingConvolution(nn.Module):
    r"""A field over the frames of the points from what these see of their neighbors.

    .. math::  f(x_i, a) = W \sum_j \psi_{ija} \Big/ \sqrt{1 + \textstyle\sum_j w(r_{ij})}

    with ψ, of ``hidden`` channels, and w of :class:`lieattn.nn.relative.EdgeNetwork`. A point without neighbors has a
    field of zero.

    **Equivariance.** The field stays with the frames: with the same frames h_a, a in H, over all points it is
    translated by H.
    """

    def __init__(self, hidden: int, channels: int) -> None:
        check_arguments(LiftingConvolution.__init__, locals())
        super().__init__()
        check_counts(hidden=hidden, channels=channels)
        self.output = nn.Linear(hidden, channels, bias=False)
        keep_variance(self.output)

    def forward(self, terms: RelativeTerms | Tensor, graph: LiftedGraph) -> Tensor:
        """Terms of an ``EdgeNetwork`` on a graph to a field ``[points, fiber, channels]``.

        A network that has evaluated W ψ, ``EdgeNetwork.kernels``, gives that in place of the terms.
        """
        check_is("graph", graph, LiftedGraph)
        if isinstance(terms, Tensor):
            return graph.neighbors.sum_to_targets(_checked_kernel(terms, graph, self.output.out_features))
        return cast(Tensor, self.output(graph.neighbors.sum_to_targets(_signals(terms))))


class FrameMessages(nn.Module):
    r"""Convolution within each frame and channel, with kernels that are linear in what the frame sees.

    .. math::  f'(x_i, a)_c = \sum_j (W \psi_{ija})_c \, f(x_j, a)_c \Big/ \sqrt{1 + \textstyle\sum_j w(r_{ij})}

    with ψ and w as in :class:`LiftingConvolution`: the spatial factor of a separable group convolution (as in PONITA,
    Bekkers et al. 2024, Eq. 13). It relates frames of the same index, which all points of a cloud must share; or what
    else the network sees neighbors from, such as directions.

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the field is translated by h, so is the output.
    """

    def __init__(self, hidden: int, channels: int) -> None:
        check_arguments(FrameMessages.__init__, locals())
        super().__init__()
        check_counts(hidden=hidden, channels=channels)
        self.kernel = nn.Linear(hidden, channels, bias=False)
        keep_variance(self.kernel, 2.0)  # beside what is attended, see EdgeNetwork

    def forward(self, x: Tensor, graph: LiftedGraph, terms: RelativeTerms | Tensor) -> Tensor:
        """Field ``[points, fiber, channels]`` to the same, with the terms of an ``EdgeNetwork`` on the graph.

        A network that has evaluated W ψ, ``EdgeNetwork.kernels``, gives that in place of the terms.
        """
        check_features(x, self.kernel.weight)
        check_graph(graph, LiftedGraph, x)
        neighbors = graph.neighbors
        if not graph.relative.tied:
            raise ValueError("graph: messages within frames need the same frames over all points of a cloud")
        if isinstance(terms, Tensor):
            check_field(x, graph, self.kernel.out_features)
            kernel = _checked_kernel(terms, graph, self.kernel.out_features)
            return neighbors.sum_to_targets(kernel * x.index_select(0, neighbors.source))
        units = _signals(terms)
        if len(units) != neighbors.num_edges:
            raise ValueError(f"terms: expected one row for each of {neighbors.num_edges} edges, got {len(units)}")
        check_field(x, graph, self.kernel.out_features, units.shape[1])
        return edge_messages(units, self.kernel.weight, x, neighbors)


def _checked_kernel(kernel: Tensor, graph: LiftedGraph, channels: int) -> Tensor:
    expected = graph.neighbors.num_edges, graph.fiber, channels
    if kernel.shape != expected:
        raise ValueError(f"terms: expected a kernel [edges, fiber, channels] = {expected}, got {tuple(kernel.shape)}")
    return kernel


def _signals(terms: RelativeTerms) -> Tensor:
    """ψ of an ``EdgeNetwork``, ``[edges, fiber, hidden]``."""
    check_is("terms", terms, RelativeTerms)
    if terms.psi is None or terms.psi.shape[2:4] != (1, 1):
        raise ValueError("terms: expected those of an EdgeNetwork, with psi [edges, fiber, 1, 1, hidden]")
    return terms.psi.flatten(2)  # the gradient of a selection would be written twice
