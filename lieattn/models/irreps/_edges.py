"""Edges as irreps see them: lengths in a radial basis, directions in spherical harmonics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lieattn.geometry import Neighbors
from lieattn.ops import bessel_functions, smooth_window

_TINY = 1e-6  # of the cutoff: closer points count as coincident, they have a distance but no direction


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges without loops and what layers need of them.

    Attributes
    ----------
    target, source
        ``[edges]`` int64; messages go from source to target.
    vectors
        ``[edges, 3]``, x_source - x_target.
    radial
        ``[edges, basis]``, Bessel functions of the length times a window that vanishes smoothly at the cutoff.
    window
        ``[edges]``, that window alone.
    harmonics
        ``[edges, (degree + 1)²]`` in e3nn's component normalization; zero above degree 0 where points coincide.
    norm
        ``[points]``, what sums over neighbors are multiplied by: one over the root of 1 + their windows.
    """

    target: Tensor
    source: Tensor
    vectors: Tensor
    radial: Tensor
    window: Tensor
    harmonics: Tensor
    norm: Tensor

    @property
    def num_points(self) -> int:
        """Number of points."""
        return len(self.norm)

    def sum_to_targets(self, messages: Tensor) -> Tensor:
        """Messages ``[edges, *]`` summed at their targets, times the norm: ``[points, *]``."""
        total = messages.new_zeros(self.num_points, *messages.shape[1:]).index_add(0, self.target, messages)
        return total * self.norm.to(messages.dtype).view(-1, *[1] * (messages.ndim - 1))


def find_edges(neighbors: Neighbors, pos: Tensor, *, degree: int, basis: int, cutoff: float) -> Edges:
    """Edges of neighbor lists, with harmonics up to a degree.

    Parameters
    ----------
    neighbors
        Who sees whom; edges from a point to itself are left out, those to its images in a periodic box are not.
    pos
        ``[points, 3]``.
    degree
        Largest degree of the harmonics.
    basis
        Number of radial functions.
    cutoff
        Length at which the radial functions vanish.
    """
    from e3nn import o3

    keep = ~neighbors.is_loop
    target, source = neighbors.target[keep], neighbors.source[keep]
    vectors = neighbors.displacements(pos)[keep]
    square = vectors.square().sum(dim=1)
    apart = square > (_TINY * cutoff) ** 2
    # Both branches of each where have finite derivatives, so coincident points do not spoil gradients.
    length = torch.where(apart, square, 1.0).sqrt() * apart
    axis = torch.zeros_like(vectors)
    axis[:, 0] = 1
    direction = torch.where(apart[:, None], vectors, axis)
    harmonics = o3.spherical_harmonics(list(range(degree + 1)), direction, normalize=True, normalization="component")
    harmonics = torch.cat([harmonics[:, :1], harmonics[:, 1:] * apart[:, None]], dim=1)
    window = smooth_window(length / cutoff)
    radial = bessel_functions(length / cutoff, basis) * window[:, None]
    norm = (1 + window.new_zeros(len(pos)).index_add(0, target, window)).rsqrt()
    return Edges(target, source, vectors, radial, window, harmonics, norm)
