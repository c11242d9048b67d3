"""The affine maps of Affine Self Convolution as modules: psi and beta as tables, or as sums of waves."""

from __future__ import annotations

import abc
import math

import torch
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.geometry import LiftedGraph
from lieattn.groups import FiniteGroup


class AffineMap(nn.Module, abc.ABC):
    """Psi and beta of one affine map, with a value for each channel; for lifting there is one key frame."""

    relative: Tensor

    def __init__(self, group: FiniteGroup, channels: int, lifting: bool) -> None:
        super().__init__()
        check_count("channels", channels)
        self.frames = 1 if lifting else group.order
        relative = torch.zeros(group.order, 1, dtype=torch.int64) if lifting else group.relative_index.clone()
        self.register_buffer("relative", relative, persistent=False)

    @abc.abstractmethod
    def forward(self, graph: LiftedGraph) -> tuple[Tensor, Tensor]:
        """Tables psi ``[types, out, key, channels]`` and beta ``[types, out, channels]``."""

    @abc.abstractmethod
    def center(self) -> tuple[Tensor, Tensor]:
        """Psi ``[frames, channels]`` of h_a⁻¹ h_b and beta ``[channels]`` at displacement 0."""


class AxisKeys(nn.Module, abc.ABC):
    """Keys whose channels depend on one coordinate of the displacement each (stand-alone self-attention)."""

    @abc.abstractmethod
    def forward(self, graph: LiftedGraph) -> Tensor:
        """Table ``[types, out, heads, channels of a head]``."""


class TableMap(AffineMap):
    """psi ``[frames, rows, channels]`` and beta ``[rows, channels]``, N(0, 1) at the start.

    Parameters
    ----------
    turned
        ``[rows, order]`` int64, the row of h_a⁻¹ times the offset of a row.
    zero
        Row of displacement 0, None if there is none.
    """

    turned: Tensor

    def __init__(self, group: FiniteGroup, channels: int, lifting: bool, turned: Tensor, zero: int | None) -> None:
        super().__init__(group, channels, lifting)
        self.psi = nn.Parameter(torch.randn(self.frames, len(turned), channels))
        self.beta = nn.Parameter(torch.randn(len(turned), channels))
        self.zero = zero
        self.register_buffer("turned", turned.clone(), persistent=False)

    def forward(self, graph: LiftedGraph) -> tuple[Tensor, Tensor]:
        """Tables with a row for each row of the window."""
        return self.psi[self.relative, self.turned[:, :, None]], self.beta[self.turned]

    def center(self) -> tuple[Tensor, Tensor]:
        """The row of displacement 0; raises ValueError where the window has none."""
        if self.zero is None:
            raise ValueError("offsets: the query is the affine map at displacement 0, which is not among them")
        return self.psi[:, self.zero], self.beta[self.zero]


class WaveMap(AffineMap):
    """Psi and beta as sums of waves; the frame h_a⁻¹ h_b chooses the amplitudes of psi."""

    def __init__(self, group: FiniteGroup, channels: int, lifting: bool, hidden: int, spread: float) -> None:
        super().__init__(group, channels, lifting)
        self.waves = Waves(group.dim, hidden, spread)
        self.psi = nn.Parameter(torch.randn(self.frames, channels, hidden) / math.sqrt(hidden))
        self.beta = nn.Parameter(torch.randn(channels, hidden) / math.sqrt(hidden))

    def forward(self, graph: LiftedGraph) -> tuple[Tensor, Tensor]:
        """Tables with a row for each type of displacement of the graph."""
        waves = self.waves(graph.relative_positions)
        return torch.einsum("tam,abcm->tabc", waves, self.psi[self.relative]), waves @ self.beta.mT

    def center(self) -> tuple[Tensor, Tensor]:
        """The waves at displacement 0."""
        waves = self.waves(self.waves.frequencies.new_zeros(self.waves.frequencies.shape[1]))
        return self.psi @ waves, self.beta @ waves


class Waves(nn.Module):
    """√2 cos(⟨ω, v⟩ + φ): unit variance over the phases, whatever v is."""

    def __init__(self, dim: int, hidden: int, spread: float) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(spread * torch.randn(hidden, dim))
        self.phases = nn.Parameter(2 * math.pi * torch.rand(hidden))

    def forward(self, displacements: Tensor) -> Tensor:
        """Waves ``[*, hidden]`` at ``[*, dim]``."""
        angle = displacements.to(self.frequencies.dtype) @ self.frequencies.mT + self.phases
        return math.sqrt(2) * angle.cos()


class AxisTable(AxisKeys):
    """A value for each coordinate that occurs along each axis, ``[values, heads, channels]``.

    Parameters
    ----------
    rows
        ``[rows, dim]`` offsets.
    turned
        See :class:`TableMap`.
    """

    turned: Tensor

    def __init__(self, heads: int, channels: int, rows: Tensor, turned: Tensor, tolerance: float) -> None:
        super().__init__()
        self.axes = nn.ParameterList()
        places = []
        for coordinate, width in zip(rows.unbind(1), _axis_widths(rows.shape[1], channels), strict=True):
            values = _distinct_numbers(coordinate, tolerance)
            places.append((coordinate[:, None] - values).abs().argmin(dim=1))
            self.axes.append(nn.Parameter(torch.randn(len(values), heads, width)))
        self.register_buffer("turned", torch.stack(places)[:, turned], persistent=False)

    def forward(self, graph: LiftedGraph) -> Tensor:
        """Table with a row for each row of the window."""
        parts = [axis[place] for axis, place in zip(self.axes, self.turned, strict=True)]
        return torch.cat(parts, dim=-1)


class AxisWaves(AxisKeys):
    """A sum of waves for each coordinate."""

    def __init__(self, dim: int, heads: int, channels: int, hidden: int, spread: float) -> None:
        super().__init__()
        self.waves, self.amplitudes = nn.ModuleList(), nn.ParameterList()
        for width in _axis_widths(dim, channels):
            self.waves.append(Waves(1, hidden, spread))
            self.amplitudes.append(nn.Parameter(torch.randn(heads, width, hidden) / math.sqrt(hidden)))

    def forward(self, graph: LiftedGraph) -> Tensor:
        """Table with a row for each type of displacement of the graph."""
        coordinates = graph.relative_positions.split(1, dim=-1)
        parts = [
            torch.einsum("tam,ecm->taec", waves(coordinate), amplitude)
            for waves, amplitude, coordinate in zip(self.waves, self.amplitudes, coordinates, strict=True)
        ]
        return torch.cat(parts, dim=-1)


def _axis_widths(dim: int, channels: int) -> list[int]:
    """Channels of a head for each coordinate; what does not divide goes to the last."""
    if channels < dim:
        raise ValueError(f"channels: {dim} coordinates need at least {dim} channels a head, got {channels}")
    return [channels // dim] * (dim - 1) + [channels - channels // dim * (dim - 1)]


def _distinct_numbers(numbers: Tensor, tolerance: float) -> Tensor:
    """The numbers ``[*]`` in ascending order without repetitions."""
    ascending = numbers.sort().values
    new = torch.cat([ascending.new_ones(1, dtype=torch.bool), ascending.diff() > tolerance])
    return ascending[new]
