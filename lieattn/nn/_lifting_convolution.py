"""Lifting convolution, and messages between frames: what every frame sees of the neighborhood of its point."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._checks import check_count, check_features, check_length
from lieattn.geometry import Neighbors
from lieattn.nn._radial import bessel_functions, keep_variance, smooth_lengths, smooth_window

_NEAR = 0.1  # share of the cutoff below which directions fade


@dataclass(frozen=True, eq=False)
class FrameEdges:
    """What the frames of points see of their neighbors; made by :class:`EdgeNetwork`.

    Attributes
    ----------
    neighbors
        Who sees whom.
    signals
        ``[edges, fiber, hidden]``, zero from the cutoff on and for edges of a point to itself.
    norm
        ``[points]``, what sums over neighbors are multiplied by: one over the root of 1 + their windows.
    """

    neighbors: Neighbors
    signals: Tensor
    norm: Tensor

    def sum_to_targets(self, messages: Tensor) -> Tensor:
        """Messages ``[edges, fiber, channels]`` summed at their targets, times the norm: ``[points, fiber, ...]``."""
        total = messages.new_zeros(self.neighbors.num_points, *messages.shape[1:])
        return total.index_add(0, self.neighbors.target, messages) * self.norm[:, None, None]


class EdgeNetwork(nn.Module):
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

    def __init__(
        self, dim: int, in_channels: int, *, cutoff: float, in_vectors: int = 0, basis: int = 8, hidden: int = 16
    ) -> None:
        super().__init__()
        for argument, count in {"dim": dim, "basis": basis, "hidden": hidden}.items():
            check_count(argument, count)
        for argument, count in {"in_channels": in_channels, "in_vectors": in_vectors}.items():
            check_count(argument, count, least=0)
        check_length("cutoff", cutoff)
        self.dim, self.cutoff, self.basis = dim, float(cutoff), basis
        self.in_channels, self.in_vectors = in_channels, in_vectors
        self.radial = nn.Linear(basis, hidden)
        self.own, self.other = (nn.Linear(in_channels, hidden, bias=False) if in_channels else None for _ in range(2))
        self.arrows = nn.Linear(dim * (1 + 2 * in_vectors), hidden, bias=False)
        self.hidden = nn.Linear(hidden, hidden)
        # Few features are not zero, and all of what is seen should count from the start. Searched on
        # HOMO energies: half of these factors, or twice that of the directions, learns slower.
        for linear, factor in ((self.radial, 1.0), (self.own, 2.0), (self.other, 2.0), (self.arrows, 1.0)):
            if linear is not None:
                keep_variance(linear, factor)
        keep_variance(self.hidden, math.sqrt(2))

    def forward(self, pos: Tensor, neighbors: Neighbors, frames: Tensor, x: Tensor, vectors: Tensor) -> FrameEdges:
        """Signals of all edges and frames.

        Parameters
        ----------
        pos
            ``[points, dim]``.
        neighbors
            Who sees whom; edges from a point to itself count nothing, those to its images do.
        frames
            Orthogonal matrices ``[fiber, dim, dim]``, or ``[points, fiber, dim, dim]``.
        x
            Features ``[points, in_channels]``.
        vectors
            ``[points, in_vectors, dim]``.
        """
        self._check(pos, x, vectors)
        target, source = neighbors.target, neighbors.source
        edges = neighbors.displacements(pos) / self.cutoff
        length = smooth_lengths(edges)
        window = smooth_window(length) * ~neighbors.is_loop
        directions = edges / (length.square() + _NEAR**2).sqrt()[:, None]
        arrows = torch.cat([directions[:, None], vectors[target], vectors[source]], dim=1)
        seen = torch.einsum("...aji,...kj->...aki", frames if frames.ndim == 3 else frames[target], arrows)
        invariants = self.radial(bessel_functions(length, self.basis))
        if self.own is not None and self.other is not None:
            invariants = invariants + self.own(x)[target] + self.other(x)[source]
        y = F.silu(self.arrows(seen.flatten(-2)) + invariants[:, None])
        signals = F.silu(self.hidden(y)) * window[:, None, None]
        weight = window.new_zeros(len(pos)).index_add(0, target, window)
        return FrameEdges(neighbors, signals, (1 + weight).rsqrt())

    def _check(self, pos: Tensor, x: Tensor, vectors: Tensor) -> None:
        expected = {
            "pos": (pos, (len(pos), self.dim)),
            "x": (x, (len(pos), self.in_channels)),
            "vectors": (vectors, (len(pos), self.in_vectors, self.dim)),
        }
        for argument, (value, shape) in expected.items():
            if value.shape != shape:
                raise ValueError(f"{argument}: expected {shape}, got {tuple(value.shape)}")


class LiftingConvolution(nn.Module):
    r"""A field over the frames of the points from what these see of their neighbors.

    .. math::  f(x_i, a) = W \sum_j \psi_{ija} \Big/ \sqrt{1 + \textstyle\sum_j w(r_{ij})}

    with ψ of :class:`EdgeNetwork`. A point without neighbors has a field of zero.

    **Equivariance.** The field stays with the frames: with the same frames h_a, a in H, over all points it is
    translated by H.

    Parameters
    ----------
    hidden
        Channels of ψ.
    channels
        Channels of the field.
    """

    def __init__(self, hidden: int, channels: int) -> None:
        super().__init__()
        for argument, count in {"hidden": hidden, "channels": channels}.items():
            check_count(argument, count)
        self.output = nn.Linear(hidden, channels, bias=False)
        keep_variance(self.output)

    def forward(self, edges: FrameEdges) -> Tensor:
        """Field ``[points, fiber, channels]``."""
        field: Tensor = self.output(edges.sum_to_targets(edges.signals))
        return field


class FrameMessages(nn.Module):
    r"""Convolution within each frame and channel, with kernels that are linear in what the frame sees.

    .. math::  f'(x_i, a)_c = \sum_j (W \psi_{ija})_c \, f(x_j, a)_c \Big/ \sqrt{1 + \textstyle\sum_j w(r_{ij})}

    with ψ of :class:`EdgeNetwork`: the spatial factor of a separable group convolution (as in PONITA, Bekkers et al.
    2024, Eq. 13), whose other factor are maps such as :class:`GroupLinear`. It relates frames of the same index, so
    all points have the same frames, or those of their cloud.

    **Equivariance.** If the points move by (t, h) in R^d ⋊ H and the field is translated by h, so is the output.

    Parameters
    ----------
    hidden
        Channels of ψ.
    channels
        Channels of the field.
    """

    def __init__(self, hidden: int, channels: int) -> None:
        super().__init__()
        for argument, count in {"hidden": hidden, "channels": channels}.items():
            check_count(argument, count)
        self.kernel = nn.Linear(hidden, channels, bias=False)
        keep_variance(self.kernel, 2.0)  # beside what is attended, see EdgeNetwork

    def forward(self, x: Tensor, edges: FrameEdges) -> Tensor:
        """Field ``[points, fiber, channels]`` to the same."""
        check_features(x, self.kernel.weight)
        at_source = x.index_select(0, edges.neighbors.source)
        return edges.sum_to_targets(self.kernel(edges.signals) * at_source)
