"""Positional encodings."""

from __future__ import annotations

import abc
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lieattn._core.checks import (
    check_arguments,
    check_count,
    check_counts,
    check_features,
    check_graph,
    check_is,
    check_length,
    check_tensor,
)
from lieattn._core.numerics import ExactConstants, KeptTables, LayerNorm
from lieattn.geometry import LiftedGraph
from lieattn.groups import FiniteGroup
from lieattn.nn.relative._base import (
    RelativeFunction,
    check_lifted_to,
    checked_offsets,
    distinct_vectors,
    rows_of_table,
)
from lieattn.ops import RelativeTerms


class FiberEncoding(KeptTables):
    """Learned vector for each pair of frames: ``E[table[g, m]]``, where table[g, m] is the index of g⁻¹ m.

    **Equivariance.** The vectors do not change when an element of the group acts on all frames, g -> u g and m -> u m.

    Parameters
    ----------
    group, channels
        Finite group H, and length of the vectors.
    table
        Another table, int64 for (query, key) or (output, query, key) frames. It is equivariant if its entries are
        functions of relative frames, such as g⁻¹ m or, with the output frame h, h⁻¹ m. Eq. 16 of GSA-Nets as printed
        is not: its h⁻¹ g⁻¹ m has errors of 0.03 to 0.55 of the largest output for C4, C8, D4, D1 and random weights.
    """

    table: Tensor

    def __init__(self, group: FiniteGroup, channels: int, table: Tensor | None = None) -> None:
        check_arguments(FiberEncoding.__init__, locals())
        super().__init__()
        check_count("channels", channels)
        order = group.order
        table = group.relative_index if table is None else table
        fits = table.dtype == torch.int64 and table.shape in ((order,) * 2, (order,) * 3)
        if not fits or table.min() < 0 or table.max() >= order:
            raise ValueError(
                f"table: expected int64 rows 0..{order - 1} for [query, key] or [out, query, key] frames of "
                f"{group.name}, got {table.dtype} {tuple(table.shape)}"
            )
        self.weight = nn.Parameter(torch.randn(order, channels))
        self.register_buffer("table", table.clone(), persistent=False)

    def forward(self) -> Float[Tensor, "*frames channels"]:
        """Return vectors ``[query, key, channels]`` or ``[out, query, key, channels]``."""
        return self.weight[self.table]


class CoordinateNetwork(nn.Module):
    """The encoding of one coordinate in GSA-Nets: linear, normalization over the ``hidden`` units, swish, linear.

    If all biases of the first map were 0, the output would depend only on the sign of the coordinate.
    """

    def __init__(self, channels: int, hidden: int = 16) -> None:
        check_arguments(CoordinateNetwork.__init__, locals())
        super().__init__()
        check_counts(channels=channels, hidden=hidden)
        self.linear1 = nn.Linear(1, hidden)
        self.norm = LayerNorm(hidden, eps=1e-12)
        self.linear2 = nn.Linear(hidden, channels)

    def forward(self, coordinate: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch channels"]:
        """Return codes ``[*, channels]`` of coordinates ``[*]``."""
        check_features(coordinate, self.linear1.weight, argument="coordinate")
        return self.linear2(F.silu(self.norm(self.linear1(coordinate[..., None]))))


class KeyEncoding(RelativeFunction):
    """Base class of encodings that compute a key ρ(u) from the relative element and add ⟨q, ρ(u)⟩ to the scores.

    All heads have the same encoding. The first of the ``channels`` of a head encode the displacement in the output
    frame. With a group, the other channels encode the frame h_a⁻¹ h_b (GSA-Nets, Eqs. 14 and 16, with the correction
    that they depend on h_a⁻¹ h_b only). In these equations the encoding is added before the key map, so that each head
    projects it; here, as in the authors' code, after it.
    """

    def __init__(self, dim: int, channels: int, group: FiniteGroup | None = None, table: Tensor | None = None) -> None:
        super().__init__()
        check_count("dim", dim)
        self.group, self.dim = group, dim
        parts = dim if group is None else dim + 1
        if channels < parts:
            raise ValueError(
                f"channels: expected at least {parts} per head, one for each part of the encoding, got {channels}"
            )
        per_axis = channels // parts
        self.group_channels = 0 if group is None else channels - dim * per_axis
        self.position_channels = channels - self.group_channels
        # The remainder goes to the last axis for lifting, and otherwise it is part of the group channels.
        self.axis_channels = [per_axis] * (dim - 1) + [self.position_channels - per_axis * (dim - 1)]
        self.fiber = None if group is None else FiberEncoding(group, self.group_channels, table)
        if self.fiber is not None and self.fiber.table.ndim == 3:
            self.patterns = ("query_sum",)  # type: ignore[misc]  # the others have no query frames besides the output's

    @abc.abstractmethod
    def encode_position(self, graph: LiftedGraph) -> Float[Tensor, "rows fiber channels"]:
        """Return codes ``[rows, fiber, position_channels]`` of the displacements in each frame."""

    def row(self, graph: LiftedGraph) -> Int[Tensor, " edges"] | None:
        """Return the row of the codes for each edge, ``[edges]`` int64; None if each edge has its own row."""
        check_is("graph", graph, LiftedGraph)
        return graph.relative.row

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Return terms with ``positional_key`` and, with a group, ``fiber_key``."""
        position, row = F.pad(self.encode_position(graph), (0, self.group_channels))[:, :, None], self.row(graph)
        if self.fiber is None:
            return RelativeTerms(positional_key=position, row=row)
        check_lifted_to(graph, self.group, "encoding")
        fiber = F.pad(self.fiber(), (self.position_channels, 0))[..., None, :]
        return RelativeTerms(positional_key=position, fiber_key=fiber, row=row)


class CoordinateEncoding(KeyEncoding):
    """The positional encoding of GSA-Nets: a small network for each coordinate of h_a⁻¹(x_j - x_i) / length.

    **Equivariance.** That of :class:`RelativeFunction`, except with ``absolute``.

    Parameters
    ----------
    dim, channels, hidden
        Dimension of the points, channels of a head, and hidden units of each network.
    group, table
        H for layers between fields, None for lifting; table of a :class:`FiberEncoding`.
    absolute
        Whether to encode the position of the key about the origin, h_a⁻¹ x_j / length. This is equivariant to H only:
        translations change the output (GSA-Nets, Proposition 4.2). Eqs. 4 and 10 add the encoding to the query too,
        as :class:`lieattn.nn.GroupSelfAttention` does with ``encoded="features"``. With random weights, outputs
        without it differ by 0.1 to 0.7 of the largest output.
    """

    def __init__(
        self,
        dim: int,
        channels: int,
        group: FiniteGroup | None = None,
        table: Tensor | None = None,
        hidden: int = 16,
        *,
        absolute: bool = False,
    ) -> None:
        check_arguments(CoordinateEncoding.__init__, locals())
        super().__init__(dim, channels, group, table)
        self.absolute = absolute
        self.axes = nn.ModuleList(CoordinateNetwork(width, hidden) for width in self.axis_channels)

    def row(self, graph: LiftedGraph) -> Tensor | None:
        return graph.neighbors.source if self.absolute else super().row(graph)

    def encode_position(self, graph: LiftedGraph) -> Tensor:
        weight = next(self.axes.parameters())
        check_graph(graph, LiftedGraph, weight, "the weights")
        positions = graph.frame_positions(centered=False) if self.absolute else graph.relative.positions
        if positions.shape[-1] != self.dim:
            raise ValueError(f"graph: expected {self.dim} coordinates for this encoding, got {positions.shape[-1]}")
        coordinates = positions.to(weight.dtype).unbind(-1)
        return torch.cat([net(c) for net, c in zip(self.axes, coordinates, strict=True)], dim=-1)


class TableEncoding(ExactConstants, KeyEncoding):
    """A learned vector for every displacement in the frames, for grids, where displacements repeat.

    ``channels`` are those of a head. For ``lifting``, frames are not encoded. See :class:`TableKernel` for the other
    parameters.

    **Equivariance.** That of :class:`RelativeFunction`.
    """

    rows: Tensor

    def __init__(
        self, group: FiniteGroup, offsets: Tensor, channels: int, *, lifting: bool = False, tolerance: float = 1e-3
    ) -> None:
        check_arguments(TableEncoding.__init__, locals())
        super().__init__(group.dim, channels, None if lifting else group)
        check_length("tolerance", tolerance)
        self.group = group
        seen = torch.einsum("aij,oj->oai", group.elements, checked_offsets(offsets, group)).flatten(0, 1)
        self.register_constant("rows", distinct_vectors(seen, tolerance))
        self.tolerance = tolerance
        self.weight = nn.Parameter(torch.randn(len(self.rows), self.position_channels))

    def encode_position(self, graph: LiftedGraph) -> Tensor:
        return self.weight[rows_of_table(graph, self.rows, self.tolerance)]


class MLPEncoding(ExactConstants, RelativeFunction):
    """A network of the relative element whose outputs, one for each head, are added to the scores.

    **Equivariance.** That of :class:`RelativeFunction`.

    Parameters
    ----------
    group, heads, hidden
        Finite group H, number of heads, and number of hidden units.
    between_frames
        Whether the entries of h_a⁻¹ h_b are inputs besides h_a⁻¹(x_j - x_i) / length, for the pattern ``"joint"``.
    value_channels
        Channels of the values of a head, on which a second output acts as in :class:`PositionalValues`; None for
        scores only.
    """

    relative: Tensor
    matrices: Tensor

    def __init__(
        self,
        group: FiniteGroup,
        heads: int,
        *,
        hidden: int = 16,
        between_frames: bool = True,
        value_channels: int | None = None,
    ) -> None:
        check_arguments(MLPEncoding.__init__, locals())
        super().__init__()
        check_counts(heads=heads, hidden=hidden)
        self.group = group
        self.heads, self.value_channels, self.between_frames = heads, value_channels, between_frames
        self.position = nn.Linear(group.dim, hidden)
        self.frame = nn.Linear(group.dim**2, hidden, bias=False) if between_frames else None
        self.score = nn.Linear(hidden, heads)
        self.value = None if value_channels is None else nn.Linear(hidden, 2 * heads * value_channels)
        self.register_constant("matrices", group.elements[group.relative_index].flatten(-2))

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Return terms with ``displacement_bias`` and, with ``value_channels``, ``psi`` and ``beta``."""
        check_graph(graph, LiftedGraph, self.matrices, "the weights")
        check_lifted_to(graph, self.group, "encoding")
        row = graph.relative.row
        position = self.position(graph.relative.positions.to(self.position.weight.dtype))
        hidden = position[:, :, None]
        if self.frame is not None:
            hidden = hidden + self.frame(self.matrices.to(hidden.dtype))
        bias = self.score(F.silu(hidden))
        values: dict[str, Any] = {} if self.value is None else _values(position, self.value, self.heads)
        return RelativeTerms(displacement_bias=bias, row=row, **values)


class PositionalValues(RelativeFunction):
    r"""Values that depend on positions: :math:`\psi(u) v + \beta(u)` in place of v, also for constant features.

    ψ - 1 and β are outputs of a network with one hidden layer, whose input is the position h_a⁻¹(x_j - x_i) / length in
    a frame.

    **Equivariance.** That of :class:`RelativeFunction`.

    Parameters
    ----------
    dim, heads, channels, hidden
        Dimension of the positions, number of heads, channels of the values of a head, and hidden units.
    """

    def __init__(self, dim: int, heads: int, channels: int, hidden: int = 16) -> None:
        check_arguments(PositionalValues.__init__, locals())
        super().__init__()
        check_counts(dim=dim, heads=heads, channels=channels, hidden=hidden)
        self.dim, self.heads = dim, heads
        self.linear1, self.linear2 = nn.Linear(dim, hidden), nn.Linear(hidden, 2 * heads * channels)

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Return terms with ``psi`` and ``beta``."""
        check_graph(graph, LiftedGraph, self.linear1.weight, "the weights")
        positions = graph.relative.positions.to(self.linear1.weight.dtype)
        values = _values(self.linear1(positions), self.linear2, self.heads)
        return RelativeTerms(row=graph.relative.row, **values)


def _values(hidden: Tensor, output: nn.Module, heads: int) -> dict[str, Any]:
    """Return psi and beta ``[rows, fiber, 1, heads, channels]`` from hidden units before their activation."""
    psi, beta = output(F.silu(hidden))[:, :, None].unflatten(-1, (2, heads, -1)).unbind(3)
    return {"psi": 1 + psi, "beta": beta}


class RotaryPhases(nn.Module):
    r"""Phases of rotary encodings whose frequencies rotate with the frame: :math:`\langle\omega, h_a^{-1} x_i\rangle`.

    Parameters
    ----------
    dim, heads, channels
        Dimension of the positions, number of heads, and channels of a head, which must be even (otherwise ValueError).
        Each head has channels / 2 frequencies.
    init_scale
        Initial standard deviation of the frequencies, in radians per unit of length.
    """

    def __init__(self, dim: int, heads: int, channels: int, *, init_scale: float = 1.0) -> None:
        check_arguments(RotaryPhases.__init__, locals())
        super().__init__()
        check_counts(dim=dim, heads=heads)
        if channels % 2 or channels < 2:
            raise ValueError(f"channels: expected an even number per head for rotary pairs, got {channels}")
        self.frequencies = nn.Parameter(init_scale * torch.randn(heads, channels // 2, dim))

    def forward(self, positions: Float[Tensor, "points fiber dim"]) -> Float[Tensor, "points fiber heads pairs 2"]:
        """Return cosines and sines ``[points, fiber, heads, channels / 2, 2]`` at positions ``[points, fiber, dim]``.

        They are computed in float32 at least.
        """
        check_tensor("positions", positions, "floating positions [points, fiber, dim]")
        dim = self.frequencies.shape[-1]
        if positions.ndim != 3 or positions.shape[-1] != dim:
            raise ValueError(f"positions: expected [points, fiber, {dim}], got {tuple(positions.shape)}")
        exact = torch.promote_types(self.frequencies.dtype, torch.float32)
        frequencies = self.frequencies.to(exact)
        # Not a matrix product, because autocast would round it, and large angles need full precision.
        angle = (positions.to(exact)[:, :, None, None] * frequencies).sum(dim=-1)
        return torch.stack([angle.cos(), angle.sin()], dim=-1)

    def terms(self, graph: LiftedGraph, *, values: bool) -> RelativeTerms:
        """Return terms that rotate pairs of channels, and those of the values if ``values``, by the phases of points.

        ValueError is raised if points of a cloud have different frames.
        """
        check_graph(graph, LiftedGraph, self.frequencies, "the weights")
        if not graph.relative.tied:
            raise ValueError("graph: rotary encodings need the same frames over all points of a cloud")
        return RelativeTerms(rotary=self(graph.frame_positions()), rotary_values=values)


class RotaryEncoding(RelativeFunction):
    """Rotary encoding with frequencies that rotate with the frame, for the framewise pattern.

    Pairs of channels of q(x_i, a) and k(x_j, a) are rotated by the angles ⟨ω, h_a⁻¹ x⟩. If all points of a cloud have
    the same frames, their product depends on h_a⁻¹(x_j - x_i). With ``values``, the values are also rotated, and the
    output is rotated back, so that it depends on the geometry even if features are constant. The other parameters are
    those of :class:`RotaryPhases`, with ``graph.length`` as the unit of length.

    **Equivariance.** That of :class:`RelativeFunction`. On a fiber of scales, the phases are the same on all scales, so
    dilations of the points do not shift the output by one scale.
    """

    patterns = ("framewise",)

    def __init__(self, dim: int, heads: int, channels: int, *, init_scale: float = 1.0, values: bool = False) -> None:
        check_arguments(RotaryEncoding.__init__, locals())
        super().__init__()
        check_count("dim", dim)
        self.dim, self.values = dim, values
        self.phases = RotaryPhases(dim, heads, channels, init_scale=init_scale)

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Return terms with ``rotary``, the phases of all points; ValueError if frames of a cloud differ."""
        return self.phases.terms(graph, values=self.values)
