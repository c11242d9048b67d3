"""Models of steerable features, on e3nn, to compare regular-representation models with.

All have the interface of :class:`lieattn.models.FramewiseTransformer`: invariant features ``data.x``, vector inputs
by name, and outputs for each cloud or point that are numbers or vectors. They are equivariant to E(3), reflections
included, for every rotation and not only those of a finite group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lieattn.geometry import Neighborhood, Neighbors, find_neighbors, point_clouds
from lieattn.groups import E
from lieattn.models._irreps_edges import Edges, find_edges
from lieattn.models._irreps_layers import (
    GatedLinear,
    IrrepsAttention,
    IrrepsNorm,
    TensorProductMessage,
    hidden_irreps,
    two_linears,
)
from lieattn.models._point_inputs import Kind, Readout, check_options, features, length_of, read_out, vectors
from lieattn.nn import keep_variance
from lieattn.ops import RelativeTerms, group_attention


class _SteerableModel(nn.Module):
    """Embedding, read-out and checks, around layers ``layer(x, edges) -> x``."""

    guarantee = "outputs are equivariant to E(3) acting on positions and vectors, exactly up to rounding"
    symmetry = E(3)

    def __init__(
        self,
        in_channels: int,
        outputs: int,
        *,
        channels: int,
        degree: int,
        vector_inputs: Sequence[str],
        neighborhood: Neighborhood,
        scale: float | None,
        basis: int,
        readout: Readout,
        kind: Kind,
    ) -> None:
        super().__init__()
        from e3nn import o3

        self.scale = length_of("scale", neighborhood, scale)
        check_options(readout, kind, self.scale, in_channels=in_channels, outputs=outputs, channels=channels)
        if degree < 1:
            raise ValueError(f"degree: expected at least 1, got {degree}")
        self.neighborhood, self.degree, self.basis = neighborhood, degree, basis
        self.in_channels, self.outputs, self.readout, self.kind = in_channels, outputs, readout, kind
        self.vector_inputs = tuple(vector_inputs)
        self.irreps = hidden_irreps(channels, degree)
        self.embed = o3.Linear(_input_irreps(in_channels, len(self.vector_inputs)), self.irreps, biases=True)
        self.layers = nn.ModuleList()
        self.norm = IrrepsNorm(self.irreps)
        self.hidden = GatedLinear(self.irreps, self.irreps)
        self.head = o3.Linear(self.irreps, f"{outputs}x0e" if kind == "invariant" else f"{outputs}x1o", biases=True)

    def forward(self, data: Any) -> Tensor:
        """Outputs ``[clouds, outputs]``, or vectors ``[clouds, outputs, 3]`` (one: ``[clouds, 3]``), or per point.

        Raises
        ------
        TypeError, ValueError
            If an attribute is missing or its shape does not fit.
        """
        clouds = point_clouds(data)
        if clouds.pos.shape[1] != 3:
            raise ValueError(f"data.pos: irreps of O(3) need 3 coordinates, got {tuple(clouds.pos.shape)}")
        x = torch.cat(
            [features(data, self.in_channels, clouds), vectors(data, self.vector_inputs, clouds).flatten(1)], dim=1
        )
        neighbors = find_neighbors(clouds, self.neighborhood)
        edges = find_edges(neighbors, clouds.pos, degree=self.degree, basis=self.basis, cutoff=self.scale)
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, edges)
        out = self.head(self.hidden(self.norm(x)))
        if self.kind == "vector":
            out = out.unflatten(1, (self.outputs, 3))
        return read_out(out, clouds, self.readout, self.kind)


class TensorFieldNetwork(_SteerableModel):
    """Tensor field network (Thomas et al. 2018): convolutions by tensor products, and gates.

    **Equivariance.** E(3), up to rounding.

    Parameters
    ----------
    in_channels
        Channels of the invariant features ``data.x`` ``[points, in_channels]``.
    outputs
        Numbers, or vectors, for each cloud or point.
    neighborhood
        Who sees whom; the length of a :class:`lieattn.geometry.Radius` is the cutoff.
    channels, degree
        Copies of each irrep, and the largest degree of features and harmonics.
    layers
        Convolutions.
    vector_inputs
        Names of attributes with vectors ``[points, 3]``.
    scale
        Length at which radial functions vanish, in the unit of the positions; the neighborhood's own if absent.
    basis, hidden
        Radial functions, and hidden units of the networks that weigh paths.
    readout
        Sum or mean over the points of a cloud, or outputs for each point.
    kind
        ``"invariant"`` numbers or ``"vector"`` outputs.
    """

    def __init__(
        self,
        in_channels: int,
        outputs: int,
        *,
        neighborhood: Neighborhood,
        channels: int = 32,
        degree: int = 2,
        layers: int = 4,
        vector_inputs: Sequence[str] = (),
        scale: float | None = None,
        basis: int = 8,
        hidden: int = 32,
        readout: Readout = "mean",
        kind: Kind = "invariant",
    ) -> None:
        super().__init__(
            in_channels,
            outputs,
            channels=channels,
            degree=degree,
            vector_inputs=vector_inputs,
            neighborhood=neighborhood,
            scale=scale,
            basis=basis,
            readout=readout,
            kind=kind,
        )
        self.layers.extend(_Convolution(self.irreps, degree, basis, hidden) for _ in range(layers))


class SE3Transformer(_SteerableModel):
    """SE(3)-Transformer (Fuchs et al. 2020): attention whose keys and values are tensor products.

    **Equivariance.** E(3), up to rounding.

    Parameters
    ----------
    heads
        Attention heads; they divide ``channels``.
    in_channels, outputs, neighborhood, channels, degree, layers, vector_inputs, scale, basis, hidden, readout, kind
        See :class:`TensorFieldNetwork`.
    """

    def __init__(
        self,
        in_channels: int,
        outputs: int,
        *,
        neighborhood: Neighborhood,
        channels: int = 32,
        degree: int = 2,
        layers: int = 4,
        heads: int = 4,
        vector_inputs: Sequence[str] = (),
        scale: float | None = None,
        basis: int = 8,
        hidden: int = 32,
        readout: Readout = "mean",
        kind: Kind = "invariant",
    ) -> None:
        super().__init__(
            in_channels,
            outputs,
            channels=channels,
            degree=degree,
            vector_inputs=vector_inputs,
            neighborhood=neighborhood,
            scale=scale,
            basis=basis,
            readout=readout,
            kind=kind,
        )
        self.layers.extend(_AttentionBlock(self.irreps, heads, degree, basis, hidden) for _ in range(layers))


class DistanceTransformer(nn.Module):
    """A transformer of invariant features that sees positions by their distances alone.

    Scores are dot products plus a function of the distance, values are multiplied by another. Vectors are made at
    the end, as sums of x_j - x_i and of the vector inputs with invariant coefficients (as in EGNN, Satorras et al.
    2021, Eq. 4); lengths of vector inputs are features.

    **Equivariance.** E(3), up to rounding.

    Parameters
    ----------
    heads
        Attention heads; they divide ``channels``.
    in_channels, outputs, neighborhood, channels, layers, vector_inputs, scale, basis, hidden, readout, kind
        See :class:`TensorFieldNetwork`.
    """

    guarantee, symmetry = _SteerableModel.guarantee, _SteerableModel.symmetry

    def __init__(
        self,
        in_channels: int,
        outputs: int,
        *,
        neighborhood: Neighborhood,
        channels: int = 64,
        layers: int = 4,
        heads: int = 4,
        vector_inputs: Sequence[str] = (),
        scale: float | None = None,
        basis: int = 16,
        hidden: int = 32,
        readout: Readout = "mean",
        kind: Kind = "invariant",
    ) -> None:
        super().__init__()
        self.scale = length_of("scale", neighborhood, scale)
        check_options(readout, kind, self.scale, in_channels=in_channels, outputs=outputs, channels=channels)
        if channels % heads:
            raise ValueError(f"heads: {heads} heads do not divide {channels} channels")
        self.neighborhood, self.basis = neighborhood, basis
        self.in_channels, self.outputs, self.readout, self.kind = in_channels, outputs, readout, kind
        self.vector_inputs = tuple(vector_inputs)
        self.embed = nn.Linear(in_channels + len(self.vector_inputs), channels)
        self.layers = nn.ModuleList(_DistanceBlock(channels, heads, basis, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(channels)
        if width := outputs if kind == "invariant" else outputs * len(self.vector_inputs):
            self.head = two_linears(channels, channels, width)
        if kind == "vector":
            self.pair = two_linears(2 * channels + basis, channels, outputs)

    def forward(self, data: Any) -> Tensor:
        """Outputs as in :meth:`TensorFieldNetwork.forward`."""
        clouds = point_clouds(data)
        arrows = vectors(data, self.vector_inputs, clouds)
        x = self.embed(torch.cat([features(data, self.in_channels, clouds), arrows.square().sum(dim=-1)], dim=1))
        neighbors = find_neighbors(clouds, self.neighborhood)
        edges = find_edges(neighbors, clouds.pos, degree=1, basis=self.basis, cutoff=self.scale)
        radial, window = _with_loops(neighbors, edges)
        for layer in self.layers:
            x = layer(x, neighbors, radial, window)
        x = self.norm(x)
        if self.kind == "invariant":
            out = self.head(x)
        else:
            both = torch.cat([x[edges.target], x[edges.source], edges.radial], dim=1)
            out = edges.sum_to_targets(self.pair(both)[..., None] * (edges.window[:, None] * edges.vectors)[:, None])
            if self.vector_inputs:
                out = out + torch.einsum("pov,pvd->pod", self.head(x).unflatten(1, (self.outputs, -1)), arrows)
        return read_out(out, clouds, self.readout, self.kind)


class _Convolution(nn.Module):
    """Residual layer: tensor product messages and a map of the point itself, through a gate."""

    def __init__(self, irreps: Any, degree: int, basis: int, hidden: int) -> None:
        super().__init__()
        from e3nn import o3

        self.norm = IrrepsNorm(irreps)
        self.message = TensorProductMessage(irreps, irreps, degree, basis, hidden)
        self.own = o3.Linear(irreps, irreps)
        self.gate = GatedLinear(irreps, irreps)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        y = self.norm(x)
        return x + self.gate(self.own(y) + edges.sum_to_targets(self.message(y, edges)))


class _AttentionBlock(nn.Module):
    """Pre-norm block: attention, then a gated map."""

    def __init__(self, irreps: Any, heads: int, degree: int, basis: int, hidden: int) -> None:
        super().__init__()
        from e3nn import o3

        self.norm1, self.norm2 = IrrepsNorm(irreps), IrrepsNorm(irreps)
        self.attention = IrrepsAttention(irreps, heads, degree, basis, hidden)
        self.gate = GatedLinear(irreps, irreps)
        self.linear = o3.Linear(irreps, irreps)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        x = x + self.attention(self.norm1(x), edges)
        return x + self.linear(self.gate(self.norm2(x)))


class _DistanceBlock(nn.Module):
    """Pre-norm block on scalars; the operator of the library with a fiber of one."""

    def __init__(self, channels: int, heads: int, basis: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.projection, self.output = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        # What is seen of the geometry should count from the start: searched as for EdgeNetwork, for a fair comparison.
        self.radial = two_linears(basis, hidden, heads + channels, factors=(1.5, 2.0))
        self.network = nn.Sequential(nn.Linear(channels, 4 * channels), nn.SiLU(), nn.Linear(4 * channels, channels))
        keep_variance(self.output)

    def forward(self, x: Tensor, neighbors: Any, radial: Tensor, window: Tensor) -> Tensor:
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


def _input_irreps(channels: int, arrows: int) -> Any:
    from e3nn import o3

    return o3.Irreps(f"{channels}x0e + {arrows}x1o") if arrows else o3.Irreps(f"{channels}x0e")
