"""Networks on the edges of neighborhoods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import (
    check_arguments,
    check_counts,
    check_features,
    check_graph,
    check_is,
    check_length,
    kind,
    weight_of,
)
from lieattn._core.numerics import ExactConstants, keep_variance
from lieattn.geometry import LiftedGraph
from lieattn.nn.relative._base import RelativeFunction
from lieattn.ops import RelativeTerms, bessel_functions, edge_kernels, edge_moments, edge_units, smooth_window
from lieattn.reps import TracelessSymmetric

_NEAR = 0.1  # share of the cutoff below which directions of edges fade


class EdgeNetwork(RelativeFunction):
    r"""A network on the edges of a neighborhood, evaluated in each frame of the target.

    .. math::
        \psi_{ija} = w(r_{ij}) \, \phi\big( h_{ia}^{-1} e_{ij},\; h_{ia}^{-1} v_i,\; h_{ia}^{-1} v_j,\;
        R(r_{ij}),\; s_i,\; s_j \big)

    where r is the distance, R are Bessel functions, w is a window that vanishes smoothly at the cutoff, s and v are
    features and vectors of the points, and φ is a network with two layers. The directions
    :math:`e = (x_j - x_i) / \sqrt{r^2 + (0.1\,\text{cutoff})^2}` vanish smoothly when points coincide.

    **Equivariance.** ψ does not change if points, frames and all vectors rotate together.

    Parameters
    ----------
    dim, in_channels, in_vectors
        Dimension of space, and numbers of invariant features and of vectors of each point, which can be 0.
    cutoff
        Distance at which neighbors have no influence, in the unit of the positions.
    basis, hidden
        Number of Bessel functions, and of units in both layers of φ.
    window
        Exponent of w(r) = (1 - r² / cutoff²)^window. The number of continuous derivatives is one less.
    in_edges
        Number of invariant features of the edges, which are further inputs of φ.
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
        self.in_channels, self.in_vectors, self.units = in_channels, in_vectors, hidden
        self.radial = nn.Linear(basis, hidden)
        self.own, self.other = (nn.Linear(in_channels, hidden, bias=False) if in_channels else None for _ in range(2))
        self.arrows = nn.Linear(dim * (1 + 2 * in_vectors), hidden, bias=False)
        self.hidden = nn.Linear(hidden, hidden)
        # Features are often sparse (types of atoms), so their initial weights are larger than those of distances.
        for linear, factor in ((self.radial, 1.0), (self.own, 2.0), (self.other, 2.0), (self.arrows, 1.0)):
            if linear is not None:
                keep_variance(linear, factor)
        keep_variance(self.hidden, math.sqrt(2))
        self.pairs = nn.Linear(in_edges, hidden, bias=False) if in_edges else None
        if self.pairs is not None:
            keep_variance(self.pairs)

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Return terms with ``psi`` ``[edges, fiber, 1, 1, hidden]`` over sqrt(1 + sum of windows at the target).

        Features ``x`` are ``[points, in_channels]``, ``graph.vectors`` ``[points, in_vectors, dim]``, and
        ``graph.edge_features`` ``[edges, in_edges]``; each can be None if its number is 0, and the latter two are then
        not read.
        """
        return RelativeTerms(psi=self._units(*self._seen(graph, x))[:, :, None, None])

    def geometry(self, graph: LiftedGraph) -> EdgeGeometry:
        """Return the functions of the displacements of edges, which a graph can carry as terms to other layers."""
        return edge_geometry(graph, self.cutoff, self.window, self.basis)

    def _units(self, seen: Tensor, invariants: Tensor, weight: Tensor, square: Tensor, radial: Tensor) -> Tensor:
        """Return ψ ``[edges, fiber, hidden]`` from the result of :meth:`_seen`."""
        arrows, hidden = weight_of("arrows", self.arrows), weight_of("hidden", self.hidden)
        return edge_units(seen, invariants, weight, arrows, (hidden, self.hidden.bias))

    def kernels(self, maps: Sequence[nn.Linear], graph: LiftedGraph, x: Tensor | None = None) -> list[Tensor]:
        """Apply linear maps without bias to ψ without storing it; return ``[edges, fiber, channels]`` for each map.

        The other arguments are those of :meth:`forward`. TypeError or ValueError is raised for maps that have a bias or
        do not fit.
        """
        if not isinstance(maps, list | tuple):
            raise TypeError(f"maps: expected a list or tuple of linear maps, got {kind(maps)}")
        weights = [weight_of(f"maps[{index}]", linear) for index, linear in enumerate(maps)]
        for index, linear in enumerate(maps):
            if linear.bias is not None or linear.in_features != self.hidden.out_features:
                raise ValueError(
                    f"maps: expected linear maps of {self.hidden.out_features} channels without bias, "
                    f"got maps[{index}] = {linear}"
                )
        seen, invariants, weight, *_ = self._seen(graph, x)
        second = weight_of("hidden", self.hidden), self.hidden.bias
        return list(edge_kernels(seen, invariants, weight, weight_of("arrows", self.arrows), second, weights))

    def _seen(self, graph: LiftedGraph, x: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs of the first layer and their factors.

        These are the components of vectors in the frames ``[edges, fiber, inputs]``, the invariant part of the first
        layer ``[edges, hidden]``, normalized windows and squared lengths ``[edges]``, and Bessel functions
        ``[edges, basis]``.
        """
        check_is("graph", graph, LiftedGraph)
        points = graph.num_points
        x = graph.pos.new_zeros(points, 0) if x is None else x
        vectors, pairs = graph.vectors, graph.edge_features
        if vectors is None or not self.in_vectors:
            vectors = graph.pos.new_zeros(points, 0, self.dim)
        if pairs is None or not self.in_edges:
            pairs = graph.pos.new_zeros(graph.neighbors.num_edges, 0)
        expected = {
            "pos": (graph.pos, (points, self.dim)),
            "x": (x, (points, self.in_channels)),
            "graph.vectors": (vectors, (points, self.in_vectors, self.dim)),
            "graph.edge_features": (pairs, (graph.neighbors.num_edges, self.in_edges)),
        }
        for argument, (value, shape) in expected.items():
            check_features(value, self.hidden.weight, argument=argument)
            if value.shape != shape:
                raise ValueError(f"{argument}: expected {shape}, got {tuple(value.shape)}")
        target, source = graph.neighbors.target, graph.neighbors.source
        _, directions, square, share, radial = self.geometry(graph)
        around = torch.cat([directions[:, None], vectors[target], vectors[source]], dim=1)
        invariants = self.radial(radial)
        if self.own is not None and self.other is not None:
            invariants = invariants + self.own(x)[target] + self.other(x)[source]
        if self.pairs is not None:
            invariants = invariants + self.pairs(pairs)
        return self._components(graph, around, target), invariants, share, square, radial

    def _components(self, graph: LiftedGraph, vectors: Tensor, points: Tensor) -> Tensor:
        """Return the components of vectors ``[n, count, dim]`` in the frames of points, ``[n, fiber, components]``."""
        return graph.seen_in_frames(vectors, points).flatten(-2)


class AngleFeatures(ExactConstants):
    r"""Invariants of the angles between neighbors, for points and for edges.

    With e, R and w as in :class:`EdgeNetwork`, degrees l = 1 and 2, and features s of the points, the features are

    .. math::
        A^l_{ikm} = \sum_{jj'} \phi_k(ij)\, \phi_m(ij')\, P_l(e_{ij}, e_{ij'}), \qquad
        B^l_{ijk} = \sum_{j'} \phi_k(ij')\, P_l(e_{ij}, e_{ij'}), \qquad
        \phi(ij) = \frac{w(r_{ij})\, (V R(r_{ij}) + c) \odot W s_j}{\sqrt{1 + \sum_j w(r_{ij})}}

    A is a feature of points. B is evaluated at both ends of an edge, with the same direction :math:`e_{ij}`: at the
    source j, the sum runs over the neighbors of j. Each degree has its own functions φ. The products are
    :math:`P_1(e, e') = \langle e, e' \rangle` and
    :math:`P_2(e, e') = (d \langle e, e' \rangle^2 - |e|^2 |e'|^2) / (d - 1)`, which for unit vectors in space are the
    Legendre polynomials of the cosine. The features are computed from the moments of e and of e ⊗ e without its trace,
    so the cost is linear in the number of edges. A are products of two sums over neighbors, like symmetry functions
    (Behler and Parrinello 2007).

    **Equivariance.** The features are invariant to all rotations and reflections, for all frames.

    Parameters
    ----------
    dim, in_channels, cutoff, basis, window
        See :class:`EdgeNetwork`. There must be at least one feature.
    count
        Number of functions φ for each degree.
    """

    upper: Tensor
    traceless: Tensor

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
        rows, columns = torch.triu_indices(count, count)
        self.register_buffer("upper", rows * count + columns, persistent=False)
        self.register_constant("traceless", _traceless(dim))
        self.of_points, self.of_edges = count * (count + 1), 4 * count

    def forward(
        self, x: Float[Tensor, "points channels"], graph: LiftedGraph
    ) -> tuple[Float[Tensor, "points {self.of_points}"], Float[Tensor, "edges {self.of_edges}"]]:
        """Return features of points and of edges, from input features of points."""
        check_graph(graph, LiftedGraph, x)
        check_features(x, self.other.weight, self.other.in_features)
        if graph.pos.shape[1] != self.dim:
            raise ValueError(f"graph: expected points with {self.dim} coordinates, got {graph.pos.shape[1]}")
        neighbors = graph.neighbors
        _, directions, _, weight, radial = edge_geometry(graph, self.cutoff, self.window, self.radial.in_features)
        radial = self.radial(radial)
        functions = (radial * self.other(x)[neighbors.source] * weight[:, None]).unflatten(1, (2, self.count))
        # P_2 is the inner product of the traceless parts of e ⊗ e.
        squares = (directions[:, :, None] * directions[:, None]).flatten(1) @ self.traceless.to(directions)
        points, edges = [], []
        for power, arrows in enumerate((directions, squares)):
            moments, *at_ends = edge_moments(arrows, functions[:, power], neighbors)
            gram = (moments.mT @ moments).flatten(1)
            points.append(gram.index_select(1, self.upper))
            edges += at_ends
        return torch.cat(points, dim=1), torch.cat(edges, dim=1)


def _traceless(dim: int) -> Tensor:
    """Return orthonormal symmetric traceless matrices times sqrt(d / (d - 1)), as columns ``[dim², ...]`` float64."""
    if dim == 1:
        return torch.zeros(1, 0, dtype=torch.float64)
    rep = TracelessSymmetric(dim)
    return rep.to_tensor(torch.eye(rep.dim, dtype=torch.float64)).flatten(1).T * math.sqrt(dim / (dim - 1))


class EdgeGeometry(NamedTuple):
    """Functions of the displacements of edges, all smooth in the positions, also where points coincide.

    Directions ``[edges, dim]`` vanish there. Squares of the lengths ``[edges]`` are divided by that of the cutoff.
    Windows ``[edges]`` are divided by sqrt(1 + sum of windows at the target), and those of loops are 0. Bessel
    functions are ``[edges, basis]``.
    """

    options: tuple[float, int, int]  # cutoff, power of the window, number of Bessel functions
    directions: Tensor
    square: Tensor
    share: Tensor
    radial: Tensor


def edge_geometry(graph: LiftedGraph, cutoff: float, power: int, basis: int) -> EdgeGeometry:
    """Return the geometry of the edges of a graph: the one that ``graph.terms`` carry if it has the same options."""
    if isinstance(graph.terms, EdgeGeometry) and graph.terms.options == (cutoff, power, basis):
        return graph.terms
    neighbors = graph.neighbors
    edges = neighbors.displacements(graph.pos) / cutoff
    square = edges.square().sum(dim=1)
    window = smooth_window(square, power, squared=True) * ~neighbors.is_loop
    norm = (1 + neighbors.sum_to_targets(window)).rsqrt()
    directions = edges / (square + _NEAR**2).sqrt()[:, None]
    radial = bessel_functions(square, basis, squared=True)
    return EdgeGeometry((cutoff, power, basis), directions, square, window * norm[neighbors.target], radial)
