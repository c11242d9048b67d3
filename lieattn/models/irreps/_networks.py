"""Networks of steerable features, and one of distances alone."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor, nn

from lieattn._checks import check_counts
from lieattn.geometry import Neighborhood, Neighbors, find_neighbors, point_clouds
from lieattn.groups import E
from lieattn.models._network import EquivariantModule, Symmetry, features, vectors
from lieattn.models._point_options import OutputKind, PointOutputs, Pool, cutoff_of
from lieattn.models.irreps._layers import (
    Edges,
    GatedLinear,
    IrrepsAttention,
    IrrepsNorm,
    TensorProductMessage,
    find_edges,
    hidden_irreps,
    two_linears,
)
from lieattn.nn.relative import keep_variance
from lieattn.ops import RelativeTerms, group_attention


@dataclass(frozen=True)
class RadialOptions:
    """Functions of the distance.

    Attributes
    ----------
    basis
        Number of Bessel functions.
    hidden
        Hidden units of the networks of them.
    """

    basis: int = 8
    hidden: int = 32

    def __post_init__(self) -> None:
        check_counts(basis=self.basis, hidden=self.hidden)


class PointOptions(TypedDict, total=False):
    """Options that all networks here share.

    Attributes
    ----------
    neighborhood
        Who sees whom.
    cutoff
        Distance at which neighbors count nothing; the neighborhood's own length if absent.
    vector_inputs
        Names of attributes with vectors ``[points, 3]``.
    kind, pool
        ``"invariant"`` numbers or ``"vector"`` outputs; ``"mean"``, ``"sum"`` or ``"max"`` over the points of each
        cloud, or ``"none"`` for outputs at the points.
    """

    neighborhood: Required[Neighborhood]
    cutoff: float | None
    vector_inputs: Sequence[str]
    kind: OutputKind
    pool: Pool


class _PointNetwork(EquivariantModule):
    """What all have in common: how data are read, and what outputs are."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        neighborhood: Neighborhood,
        cutoff: float | None = None,
        vector_inputs: Sequence[str] = (),
        kind: OutputKind = "invariant",
        pool: Pool = "mean",
        channels: int,
        radial: RadialOptions,
    ) -> None:
        super().__init__()
        check_counts(in_channels=in_channels, out_channels=out_channels, channels=channels)
        self.in_channels, self.out_channels, self.outputs = in_channels, out_channels, PointOutputs(kind, pool)
        self.vector_inputs, self.radial = tuple(vector_inputs), radial
        self.neighborhood, self.cutoff = neighborhood, cutoff_of(neighborhood, cutoff)

    @property
    def symmetry(self) -> Symmetry:
        """E(3)."""
        return Symmetry(E(3))

    @property
    def kind(self) -> str:
        """``"invariant"`` or ``"vector"``."""
        return self.outputs.kind

    def forward(self, data: Any) -> Tensor:
        """Outputs ``[clouds, out_channels]`` or ``[clouds, out_channels, 3]`` vectors, one vector without its axis.

        Without pooling they are those of the points.

        Raises
        ------
        TypeError, ValueError
            If an attribute is missing or its shape does not fit.
        """
        clouds = point_clouds(data)
        if clouds.pos.shape[1] != 3:
            raise ValueError(f"data.pos: irreps of O(3) need 3 coordinates, got {tuple(clouds.pos.shape)}")
        invariants, directed = features(data, self.in_channels, clouds), vectors(data, self.vector_inputs, clouds)
        neighbors = find_neighbors(clouds, self.neighborhood)
        return self.outputs(self._at_points(invariants, directed, neighbors, clouds.pos), clouds)

    @abc.abstractmethod
    def _at_points(self, x: Tensor, directed: Tensor, neighbors: Neighbors, pos: Tensor) -> Tensor:
        """Numbers ``[points, out_channels]`` or vectors ``[points, out_channels, 3]``."""

    def _edges(self, neighbors: Neighbors, pos: Tensor, degree: int) -> Edges:
        return find_edges(neighbors, pos, degree=degree, basis=self.radial.basis, cutoff=self.cutoff)


class _SteerableNetwork(_PointNetwork):
    """Embedding and read-out around layers ``layer(x, edges) -> x``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        channels: int,
        degree: int,
        radial: RadialOptions | None,
        **options: Unpack[PointOptions],
    ) -> None:
        radial = RadialOptions() if radial is None else radial
        super().__init__(in_channels, out_channels, channels=channels, radial=radial, **options)
        from e3nn import o3

        check_counts(degree=degree)
        self.degree = degree
        self.irreps = hidden_irreps(channels, degree)
        count = len(self.vector_inputs)
        inputs = o3.Irreps(f"{in_channels}x0e + {count}x1o") if count else o3.Irreps(f"{in_channels}x0e")
        self.embed = o3.Linear(inputs, self.irreps, biases=True)
        self.layers = nn.ModuleList()
        self.norm = IrrepsNorm(self.irreps)
        self.hidden = GatedLinear(self.irreps, self.irreps)
        final = f"{out_channels}x0e" if self.kind == "invariant" else f"{out_channels}x1o"
        self.head = o3.Linear(self.irreps, final, biases=True)

    def _at_points(self, x: Tensor, directed: Tensor, neighbors: Neighbors, pos: Tensor) -> Tensor:
        edges = self._edges(neighbors, pos, self.degree)
        x = self.embed(torch.cat([x, directed.flatten(1)], dim=1))
        for layer in self.layers:
            x = layer(x, edges)
        out: Tensor = self.head(self.hidden(self.norm(x)))
        return out if self.kind == "invariant" else out.unflatten(1, (self.out_channels, 3))


class TensorFieldNetwork(_SteerableNetwork):
    """Tensor field network (Thomas et al. 2018): convolutions by tensor products, and gates.

    **Equivariance.** E(3), up to rounding.

    Parameters
    ----------
    in_channels
        Channels of the invariant features ``data.x`` ``[points, in_channels]``.
    out_channels
        Numbers, or vectors, for each cloud or point.
    channels, degree
        Copies of each irrep, and the largest degree of features and harmonics.
    layers
        Convolutions.
    radial
        Functions of the distance, which weigh the paths.
    **options
        See :class:`PointOptions`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        channels: int = 32,
        degree: int = 2,
        layers: int = 4,
        radial: RadialOptions | None = None,
        **options: Unpack[PointOptions],
    ) -> None:
        super().__init__(in_channels, out_channels, channels=channels, degree=degree, radial=radial, **options)
        self.layers.extend(_Convolution(self.irreps, degree, self.radial) for _ in range(layers))


class SE3Transformer(_SteerableNetwork):
    """SE(3)-Transformer (Fuchs et al. 2020): attention whose keys and values are tensor products.

    **Equivariance.** E(3), up to rounding.

    Parameters
    ----------
    heads
        Attention heads; they divide ``channels``.
    in_channels, out_channels, channels, degree, layers, radial, **options
        See :class:`TensorFieldNetwork`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        channels: int = 32,
        degree: int = 2,
        layers: int = 4,
        heads: int = 4,
        radial: RadialOptions | None = None,
        **options: Unpack[PointOptions],
    ) -> None:
        super().__init__(in_channels, out_channels, channels=channels, degree=degree, radial=radial, **options)
        self.layers.extend(_AttentionBlock(self.irreps, heads, degree, self.radial) for _ in range(layers))


class DistanceTransformer(_PointNetwork):
    """A transformer of invariant features that sees positions by their distances alone.

    Scores are dot products plus a function of the distance, values are multiplied by another. Vectors are made at
    the end, as sums of x_j - x_i and of the vector inputs with invariant coefficients (as in EGNN, Satorras et al.
    2021, Eq. 4); lengths of vector inputs are features.

    **Equivariance.** E(3), up to rounding.

    Parameters
    ----------
    channels, heads
        Width, and attention heads, which divide it.
    radial
        Functions of the distance; 16 Bessel functions if absent.
    in_channels, out_channels, layers, **options
        See :class:`TensorFieldNetwork`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        channels: int = 64,
        layers: int = 4,
        heads: int = 4,
        radial: RadialOptions | None = None,
        **options: Unpack[PointOptions],
    ) -> None:
        radial = RadialOptions(basis=16) if radial is None else radial
        super().__init__(in_channels, out_channels, channels=channels, radial=radial, **options)
        if channels % heads:
            raise ValueError(f"heads: {heads} heads do not divide {channels} channels")
        self.embed = nn.Linear(in_channels + len(self.vector_inputs), channels)
        self.layers = nn.ModuleList(_DistanceBlock(channels, heads, radial) for _ in range(layers))
        self.norm = nn.LayerNorm(channels)
        if width := out_channels if self.kind == "invariant" else out_channels * len(self.vector_inputs):
            self.head = two_linears(channels, channels, width)
        if self.kind == "vector":
            self.pair = two_linears(2 * channels + radial.basis, channels, out_channels)

    def _at_points(self, x: Tensor, directed: Tensor, neighbors: Neighbors, pos: Tensor) -> Tensor:
        x = self.embed(torch.cat([x, directed.square().sum(dim=-1)], dim=1))
        edges = self._edges(neighbors, pos, 1)
        radial, window = _with_loops(neighbors, edges)
        for layer in self.layers:
            x = layer(x, neighbors, radial, window)
        x = self.norm(x)
        if self.kind == "invariant":
            numbers: Tensor = self.head(x)
            return numbers
        both = torch.cat([x[edges.target], x[edges.source], edges.radial], dim=1)
        out = edges.sum_to_targets(self.pair(both)[..., None] * (edges.window[:, None] * edges.vectors)[:, None])
        if self.vector_inputs:
            out = out + torch.einsum("pov,pvd->pod", self.head(x).unflatten(1, (self.out_channels, -1)), directed)
        return out


class _Convolution(nn.Module):
    """Residual layer: tensor product messages and a map of the point itself, through a gate."""

    def __init__(self, irreps: Any, degree: int, radial: RadialOptions) -> None:
        super().__init__()
        from e3nn import o3

        self.norm = IrrepsNorm(irreps)
        self.message = TensorProductMessage(irreps, irreps, degree, radial.basis, radial.hidden)
        self.own = o3.Linear(irreps, irreps)
        self.gate = GatedLinear(irreps, irreps)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        y = self.norm(x)
        return x + self.gate(self.own(y) + edges.sum_to_targets(self.message(y, edges)))


class _AttentionBlock(nn.Module):
    """Pre-norm block: attention, then a gated map."""

    def __init__(self, irreps: Any, heads: int, degree: int, radial: RadialOptions) -> None:
        super().__init__()
        from e3nn import o3

        self.norm1, self.norm2 = IrrepsNorm(irreps), IrrepsNorm(irreps)
        self.attention = IrrepsAttention(irreps, heads, degree, radial.basis, radial.hidden)
        self.gate = GatedLinear(irreps, irreps)
        self.linear = o3.Linear(irreps, irreps)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        x = x + self.attention(self.norm1(x), edges)
        return x + self.linear(self.gate(self.norm2(x)))


class _DistanceBlock(nn.Module):
    """Pre-norm block on scalars; the operator of the library with a fiber of one."""

    def __init__(self, channels: int, heads: int, radial: RadialOptions) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.projection, self.output = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        # What is seen of the geometry should count from the start: searched as for EdgeNetwork, for a fair comparison.
        self.radial = two_linears(radial.basis, radial.hidden, heads + channels, factors=(1.5, 2.0))
        self.network = nn.Sequential(nn.Linear(channels, 4 * channels), nn.SiLU(), nn.Linear(4 * channels, channels))
        keep_variance(self.output)

    def forward(self, x: Tensor, neighbors: Neighbors, radial: Tensor, window: Tensor) -> Tensor:
        query, key, value = self.projection(self.norm1(x)).unflatten(1, (3, 1, self.heads, -1)).unbind(dim=1)
        bias, psi = self.radial(radial).split([self.heads, x.shape[1]], dim=1)
        terms = RelativeTerms(
            displacement_bias=(bias + window[:, None])[:, None, None],
            psi=1 + psi.unflatten(1, (self.heads, -1))[:, None, None],
        )
        out, _ = group_attention(query, key, value, neighbors, terms=terms)
        x = x + self.output(out.flatten(1))
        return x + self.network(self.norm2(x))


def _with_loops(neighbors: Neighbors, edges: Edges) -> tuple[Tensor, Tensor]:
    """Radial functions and log of the window for all edges of the lists; a point sees itself without them."""
    others = ~neighbors.is_loop
    radial = edges.radial.new_zeros(len(others), edges.radial.shape[1])
    window = edges.window.new_zeros(len(others))
    radial[others] = edges.radial
    window[others] = edges.window.clamp(min=torch.finfo(window.dtype).tiny).log()
    return radial, window
