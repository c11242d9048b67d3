"""What every frame sees of each neighbor of its point: distances, directions, features and vectors."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_counts, check_length
from lieattn.geometry import LiftedGraph
from lieattn.nn.relative._base import RelativeFunction
from lieattn.ops import RelativeTerms, bessel_functions, smooth_lengths, smooth_window

_NEAR = 0.1  # share of the cutoff below which directions fade


class EdgeNetwork(RelativeFunction):
    r"""A network of what each frame sees of each neighbor of its point.

    .. math::
        \psi_{ija} = w(r_{ij}) \, \phi\big( h_{ia}^{-1} e_{ij},\; h_{ia}^{-1} v_i,\; h_{ia}^{-1} v_j,\;
        R(r_{ij}),\; s_i,\; s_j \big)

    with the distance r, Bessel functions R and a window w that vanishes smoothly at the cutoff, features s and
    vectors v of the points, a network φ with two layers, and directions
    :math:`e = (x_j - x_i) / \sqrt{r^2 + (0.1\,\text{cutoff})^2}`, which fade where points coincide.

    **Equivariance.** Frames see components alone, so ψ stays with the frames where these and all vectors turn
    together.

    Parameters
    ----------
    dim
        Dimension of space.
    in_channels, in_vectors
        Invariant features and vectors of each point; there may be none.
    cutoff
        Distance at which neighbors count nothing, in the unit of the positions.
    basis
        Number of Bessel functions.
    hidden
        Units of both layers of φ.
    """

    dim: int

    def __init__(
        self, dim: int, in_channels: int, *, cutoff: float, in_vectors: int = 0, basis: int = 8, hidden: int = 16
    ) -> None:
        super().__init__()
        check_counts(dim=dim, basis=basis, hidden=hidden)
        check_counts(0, in_channels=in_channels, in_vectors=in_vectors)
        check_length("cutoff", cutoff)
        self.dim = dim
        self.cutoff, self.basis = float(cutoff), basis
        self.in_channels, self.in_vectors = in_channels, in_vectors
        self.radial = nn.Linear(basis, hidden)
        self.own, self.other = (nn.Linear(in_channels, hidden, bias=False) if in_channels else None for _ in range(2))
        self.arrows = nn.Linear(dim * (1 + 2 * in_vectors), hidden, bias=False)
        self.hidden = nn.Linear(hidden, hidden)
        # Features are often sparse (types of atoms), so their weights start larger than those of distances. Found by
        # search on HOMO energies: half of these factors, or twice that of the directions, learns more slowly.
        for linear, factor in ((self.radial, 1.0), (self.own, 2.0), (self.other, 2.0), (self.arrows, 1.0)):
            if linear is not None:
                keep_variance(linear, factor)
        keep_variance(self.hidden, math.sqrt(2))

    def forward(self, graph: LiftedGraph, x: Tensor | None = None, vectors: Tensor | None = None) -> RelativeTerms:
        """Terms with ``psi`` ``[edges, fiber, 1, 1, hidden]``, over the root of 1 + the windows at the target.

        Parameters
        ----------
        graph
            Who sees whom; edges from a point to itself count nothing, those to its images do.
        x
            Features ``[points, in_channels]``; None for none.
        vectors
            ``[points, in_vectors, dim]``; None for none.
        """
        points = graph.num_points
        x = graph.pos.new_zeros(points, 0) if x is None else x
        vectors = graph.pos.new_zeros(points, 0, self.dim) if vectors is None else vectors
        self._check(graph.pos, x, vectors)
        neighbors = graph.neighbors
        target, source = neighbors.target, neighbors.source
        edges = neighbors.displacements(graph.pos) / self.cutoff
        length = smooth_lengths(edges)
        window = smooth_window(length) * ~neighbors.is_loop
        directions = edges / (length.square() + _NEAR**2).sqrt()[:, None]
        around = torch.cat([directions[:, None], vectors[target], vectors[source]], dim=1)
        seen = graph.seen_in_frames(around, target)
        invariants = self.radial(bessel_functions(length, self.basis))
        if self.own is not None and self.other is not None:
            invariants = invariants + self.own(x)[target] + self.other(x)[source]
        y = F.silu(self.arrows(seen.flatten(-2)) + invariants[:, None])
        norm = (1 + window.new_zeros(points).index_add(0, target, window)).rsqrt()
        signals = F.silu(self.hidden(y)) * (window * norm[target])[:, None, None]
        return RelativeTerms(psi=signals[:, :, None, None])

    def _check(self, pos: Tensor, x: Tensor, vectors: Tensor) -> None:
        expected = {
            "pos": (pos, (len(pos), self.dim)),
            "x": (x, (len(pos), self.in_channels)),
            "vectors": (vectors, (len(pos), self.in_vectors, self.dim)),
        }
        for argument, (value, shape) in expected.items():
            if value.shape != shape:
                raise ValueError(f"{argument}: expected {shape}, got {tuple(value.shape)}")


def keep_variance(linear: nn.Linear, factor: float = 1.0) -> None:
    """Draw weights anew so that signals keep their size through the swish, times a factor.

    In networks of distances: with torch's own weights their outputs begin small, beside those of the points.
    """
    nn.init.normal_(linear.weight, std=factor * math.sqrt(2 / linear.in_features))
