"""Base class for functions of the relative elements g⁻¹ g'."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lieattn._core.checks import check_graph, check_is
from lieattn._core.contexts import without_autocast
from lieattn.geometry import LiftedGraph, Neighbors
from lieattn.groups import FiniteGroup
from lieattn.io import TiedWeights
from lieattn.ops import Activation, Normalization, RelativeTerms, group_attention, head_networks

EXPONENTIAL = ("softmax", "exp-mean")  # normalizations whose weights are exponentials of scores


class RelativeFunction(TiedWeights, abc.ABC):
    """A function of the relative elements :math:`g_{ia}^{-1} g_{jb}` of a graph: ``function(graph, x) -> terms``.

    It is evaluated once for every row of ``graph.relative``.

    **Equivariance.** The terms do not change when one element of the group acts on all elements.

    Attributes
    ----------
    patterns
        Fiber patterns with which a layer is equivariant.
    group, dim
        Finite group, and dimension of the positions, that the function requires; None if there is no requirement.
    """

    patterns: ClassVar[tuple[str, ...]] = ("joint", "framewise", "query_sum")
    group: FiniteGroup | None = None
    dim: int | None = None

    @abc.abstractmethod
    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Return terms of the operator for the edges of a graph and its field ``x`` ``[points, fiber, channels]``."""


class SumOfTerms(RelativeFunction):
    """Several relative functions together, each of which returns different terms."""

    def __init__(self, parts: Sequence[RelativeFunction]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        shared = (name for name in parts[0].patterns if all(name in part.patterns for part in parts))
        self.patterns = tuple(shared)  # type: ignore[misc]
        self.group = next((part.group for part in parts if part.group is not None), None)
        self.dim = next((part.dim for part in parts if part.dim is not None), None)

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Return the terms of all parts; ValueError if two parts return the same term."""
        return reduce(RelativeTerms.plus, (terms_of(part, graph, x) for part in self.parts))


def terms_of(function: nn.Module, graph: LiftedGraph, x: Tensor | None) -> RelativeTerms:
    """Return the terms of a relative function, or raise TypeError if one of the user returns something else."""
    terms = function(graph, x)
    check_is(f"encoding: {type(function).__name__}", terms, RelativeTerms)
    return cast(RelativeTerms, terms)


def measured(terms: RelativeTerms, graph: LiftedGraph, normalize: Normalization, dtype: torch.dtype) -> RelativeTerms:
    """Return terms that also weight the keys by the measure of the graph and by its smooth neighborhoods.

    With the Haar measure, sums over the keys are integrals over the group (GSA-Nets, Eqs. 20 and 21). In smooth
    neighborhoods, the weight decreases with the distance. If attention weights are exponentials of scores, the
    logarithm of this weight is added to the scores, so that the normalization includes it. Otherwise it multiplies the
    values. New terms have the ``dtype`` of the values, or float32 if that is wider.
    """
    measure, window, row = graph.log_measure, graph.relative.log_window, graph.relative.row
    if measure is None and window is None:
        return terms
    if measure is None and (terms.row is row or not terms.reads_rows):
        terms = replace(terms, row=row)
    elif terms.row is not None:
        what = "weights of smooth neighborhoods differ" if measure is None else "measure differs"
        raise ValueError(f"graph: the {what} between edges, which needs terms with one row for each edge, not a table")
    elif window is not None and row is not None:
        window = window[row]
    log_weight = cast(Tensor, window if measure is None else measure if window is None else measure + window)
    bias, psi, beta = terms.displacement_bias, terms.psi, terms.beta
    dtype = torch.promote_types(dtype, torch.float32)
    if normalize in EXPONENTIAL:
        weight = log_weight[:, None, None, None]
        return replace(terms, displacement_bias=weight.to(dtype) if bias is None else bias + weight.to(bias.dtype))
    weight = log_weight.exp()[:, None, None, None, None]
    beta = None if beta is None else beta * weight.to(beta.dtype)
    if psi is not None:
        psi = psi * weight.to(psi.dtype).view(-1, *[1] * (psi.ndim - 1))
    return replace(terms, psi=weight.to(dtype) if psi is None else psi, beta=beta)


def graph_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    graph: LiftedGraph,
    *,
    terms: RelativeTerms | None = None,
    normalize: Normalization = "softmax",
    neighbors: Neighbors | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call :func:`lieattn.ops.group_attention` on a graph, with keys weighted by its measure and smooth neighborhoods.

    ``neighbors`` replace the neighbor lists of the graph. The other arguments and the result, ``(out, weights)``, are
    those of the operator. For periodic clouds, rotary phases are given for all images, see
    :meth:`lieattn.geometry.LiftedGraph.frame_positions`.
    """
    check_graph(graph, LiftedGraph, value, "value")
    terms = RelativeTerms() if terms is None else terms
    check_is("terms", terms, RelativeTerms)
    terms = measured(terms, graph, normalize, value.dtype)
    near, points = graph.neighbors if neighbors is None else neighbors, len(value)
    if terms.rotary is not None and near.images is not None:
        # Images have the signals of their points, but their own phases.
        images, near = near.images, near.images.neighbors
        query, key = (None if x is None else x.index_select(0, images.point) for x in (query, key))
        value = value.index_select(0, images.point)
    out, weights = group_attention(query, key, value, near, normalize=normalize, terms=terms, **options)
    out = out[:points]
    if graph.relative.cutoff is None or normalize not in ("mean", "exp-mean"):
        return out, weights
    # The operator divides by the number of neighbors; smooth neighbors count only in part. There may be no neighbors,
    # as in the halo of a piece, where the output is 0.
    total = graph.degree
    share = graph.neighbors.degree / torch.where(total > 0, total, 1.0)
    if weights is not None:
        weights = weights * share[near.target].to(weights).view(-1, *[1] * (weights.ndim - 1))
    return out * share.to(out.dtype)[:, None, None, None], weights


def check_lifted_to(graph: LiftedGraph, group: FiniteGroup | None, what: str = "layer") -> None:
    """Raise ValueError unless a graph is lifted to the finite group, if there is one."""
    check_is("graph", graph, LiftedGraph)
    if group is not None and graph.group != group:
        found = graph.space.name if graph.group is None else graph.group.name
        raise ValueError(f"graph: is lifted to {found}, but this {what} is for {group.name}")


def distinct_vectors(vectors: Float[Tensor, "n dim"], tolerance: float) -> Float[Tensor, "distinct dim"]:
    """Remove repeated vectors from ``[n, dim]``, in the given order."""
    near = torch.cdist(vectors, vectors) < tolerance
    first = near.to(torch.int8).argmax(dim=1)
    return vectors[first == torch.arange(len(vectors), device=vectors.device)]


def checked_offsets(
    offsets: Float[Tensor, "offsets {group.dim}"], group: FiniteGroup
) -> Float[Tensor, "offsets {group.dim}"]:
    """Return displacements in float64; ValueError unless they are finite vectors that H acts on."""
    if offsets.ndim != 2 or offsets.shape[1] != group.dim or len(offsets) == 0:
        raise ValueError(f"offsets: expected [offsets, {group.dim}], at least one, got {tuple(offsets.shape)}")
    if not torch.isfinite(offsets).all():
        raise ValueError(f"offsets: expected finite displacements, got {offsets.tolist()}")
    return offsets.to(torch.float64)


def seen_offsets(offsets: Float[Tensor, "n dim"], group: FiniteGroup, tolerance: float) -> Float[Tensor, "rows dim"]:
    """Return distinct h⁻¹ o ``[rows, dim]`` for displacements o and h in H; the displacements themselves are first."""
    offsets = checked_offsets(offsets, group)
    # The identity need not be the first element.
    turned = torch.einsum("aij,oj->aoi", group.elements[group.inverse_index], offsets)
    return distinct_vectors(torch.cat([offsets, turned.flatten(0, 1)]), tolerance)


def rows_of_table(
    graph: LiftedGraph, table: Float[Tensor, "displacements dim"], tolerance: float
) -> Int[Tensor, "rows fiber"]:
    """Return the row of a table ``[displacements, dim]`` for each frame of each row, ``[rows, fiber]`` int64.

    ValueError is raised if a displacement differs from all rows of the table by more than ``tolerance``.
    """
    check_graph(graph, LiftedGraph, table, "the weights")
    seen = graph.relative.positions.detach().to(torch.float64) * graph.length
    distance, row = torch.cdist(seen.flatten(0, 1), table.to(seen)).min(dim=-1)
    if len(distance) and distance.max() > tolerance:
        stray = seen.flatten(0, 1)[distance.argmax()].tolist()
        raise ValueError(
            f"graph: displacement {stray} is not among the {len(table)} rows of the table; tables are for grids, use "
            "an encoding by coordinates for other points"
        )
    return row.reshape(seen.shape[:2])


def networks_of_coordinates(
    coordinates: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: Activation
) -> Tensor:
    """Return the outputs ``[*, heads]`` of :func:`lieattn.ops.head_networks`, evaluated without autocast.

    The coordinates ``[*, k]`` are converted to the dtype of the weights.
    """
    check_coordinates(coordinates, weights[0].shape[1])
    with without_autocast(weights[0].device):  # it would round coordinates
        rows = coordinates.to(weights[0].dtype).reshape(-1, coordinates.shape[-1])
        return head_networks(rows, weights, biases, activation).unflatten(0, coordinates.shape[:-1])


def check_coordinates(coordinates: Tensor, expected: int) -> None:
    """Raise ValueError unless the number of coordinates of a relative element is the expected one."""
    if coordinates.shape[-1] != expected:
        raise ValueError(
            f"graph: expected {expected} coordinates of a relative element, got {coordinates.shape[-1]}; the graph and "
            f"the layer must agree on the group and the kind of coordinates"
        )
