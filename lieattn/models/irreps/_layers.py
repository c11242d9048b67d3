"""Layers on features of irreps at points, along the edges between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from e3nn import o3
from e3nn.nn import Gate
from torch import Tensor, nn
from torch_geometric.utils import softmax

from lieattn._core.checks import check_arguments, check_counts
from lieattn._core.contexts import SeenWeights, is_watched, show, without_autocast
from lieattn._core.numerics import ExactConstants, LayerNorm, keep_variance, sums
from lieattn.geometry import Neighbors, PointClouds
from lieattn.models._base.inputs import field_values
from lieattn.ops import RelativeTerms, group_attention
from lieattn.reps import Representation, to_irreps

_EPS = 1e-6  # of normalizations


@dataclass(frozen=True)
class RadialOptions:
    """Functions of the distance: the number of Bessel functions, and the hidden units of networks on them."""

    basis: int = 8
    hidden: int = 32

    def __post_init__(self) -> None:
        check_arguments(RadialOptions, vars(self))
        check_counts(basis=self.basis, hidden=self.hidden)


class Fields(ExactConstants):
    """Input fields as features of irreps."""

    basis: Tensor

    def __init__(self, fields: Mapping[str, Representation]) -> None:
        super().__init__()
        self.fields, found = fields, [to_irreps(rep) for rep in fields.values()]
        self.spec = " + ".join(irreps.spec for irreps, _ in found)
        self.parts = [part for irreps, _ in found for part in irreps.parts]
        self.register_constant("basis", torch.block_diag(*(basis for _, basis in found)))

    def forward(self, data: Any, clouds: PointClouds) -> Tensor:
        values = field_values(data, self.fields, clouds)
        with without_autocast(values.device):
            return values @ self.basis.to(values).T

    def invariants(self, x: Tensor) -> Tensor:
        """Return the scalars, and the squared lengths of all other irreps."""
        parts = x.split([count * (2 * degree + 1) for count, degree, _ in self.parts], dim=1)
        found = []
        for part, (count, degree, parity) in zip(parts, self.parts, strict=True):
            is_scalar = (degree, parity) == (0, 1)
            found.append(part if is_scalar else part.unflatten(1, (count, -1)).square().sum(dim=-1))
        return torch.cat(found, dim=1)


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges without loops, from source to target, and functions of their lengths and directions."""

    lists: Neighbors  # with loops
    kept: Tensor  # [edges] int64, indices of these edges in the lists
    target: Tensor
    source: Tensor
    vectors: Tensor  # [edges, 3], x_source - x_target
    radial: Tensor  # [edges, basis], Bessel functions of the length times the window
    window: Tensor  # [edges], vanishes smoothly at the cutoff
    harmonics: Tensor  # [edges, (degree + 1)²], component normalization; 0 above degree 0 where points coincide
    norm: Tensor  # [points], factor of sums over neighbors: 1 / sqrt(1 + sum of the windows)

    def sum_to_targets(self, messages: Tensor) -> Tensor:
        """Sum messages ``[edges, *]`` at their targets, and multiply by the norm: ``[points, *]``."""
        total = sums(messages, self.target, len(self.norm))
        return total * self.norm.view(-1, *[1] * (messages.ndim - 1))


class Convolution(nn.Module):
    """Residual layer: tensor product messages plus a linear map of the point itself, followed by a gate."""

    def __init__(self, irreps: Any, degree: int, radial: RadialOptions) -> None:
        super().__init__()
        self.norm = IrrepsNorm(irreps)
        self.message = _TensorProductMessage(irreps, degree, radial)
        self.own = o3.Linear(irreps, irreps)
        self.gate = GatedLinear(irreps)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        y = self.norm(x)
        return x + self.gate(self.own(y) + edges.sum_to_targets(self.message(y, edges)))


class AttentionBlock(nn.Module):
    """Pre-norm block: attention, then a gated linear map."""

    def __init__(self, irreps: Any, heads: int, degree: int, radial: RadialOptions) -> None:
        super().__init__()
        self.norm1, self.norm2 = IrrepsNorm(irreps), IrrepsNorm(irreps)
        self.attention = _IrrepsAttention(irreps, heads, degree, radial)
        self.gate = GatedLinear(irreps)
        self.linear = o3.Linear(irreps, irreps)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        x = x + self.attention(self.norm1(x), edges)
        return x + self.linear(self.gate(self.norm2(x)))


class DistanceBlock(nn.Module):
    """Pre-norm block on scalars, with the attention operator of the library and a fiber of size one."""

    def __init__(self, channels: int, heads: int, radial: RadialOptions) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = LayerNorm(channels), LayerNorm(channels)
        self.projection, self.output = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        # The geometry should have an effect at the start. Factors were tuned as for EdgeNetwork, for fair comparisons.
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


class IrrepsNorm(nn.Module):
    """Divide each type of irreps by its root mean square over copies and components; scalars are centered first."""

    def __init__(self, irreps: Any) -> None:
        super().__init__()
        # Stored as plain numbers, because torch.compile cannot guard irreps.
        self.types = [(count, kind.dim, kind.is_scalar()) for count, kind in irreps]
        self.weight = nn.Parameter(torch.ones(irreps.num_irreps))
        self.bias = nn.Parameter(torch.zeros(sum(count for count, kind in irreps if kind.is_scalar())))

    def forward(self, x: Tensor) -> Tensor:
        found, weights = [], self.weight.split([count for count, _, _ in self.types])
        parts = x.split([count * dim for count, dim, _ in self.types], dim=1)
        for (count, dim, scalar), flat, weight in zip(self.types, parts, weights, strict=True):
            part = flat.unflatten(1, (count, dim))
            if scalar:
                part = part - part.mean(dim=1, keepdim=True)
            scale = torch.rsqrt(part.square().mean(dim=(1, 2), keepdim=True) + _EPS)
            part = part * scale * weight[:, None]
            if scalar:
                part = part + self.bias[:, None]
            found.append(part.flatten(1))
        return torch.cat(found, dim=1)


class GatedLinear(nn.Module):
    """Linear map of irreps followed by a gate: swish for scalars; others are multiplied by sigmoids of scalars."""

    def __init__(self, irreps: Any) -> None:
        super().__init__()
        scalars = o3.Irreps([(count, kind) for count, kind in irreps if kind.is_scalar()])
        gated = o3.Irreps([(count, kind) for count, kind in irreps if not kind.is_scalar()])
        gates = o3.Irreps([(gated.num_irreps, "0e")] if gated else [])
        self.gate = Gate(scalars, [torch.nn.functional.silu] * len(scalars), gates, [torch.sigmoid] * len(gates), gated)
        self.linear = o3.Linear(irreps, self.gate.irreps_in, biases=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.linear(x))


class _TensorProductMessage(nn.Module):
    """Messages f_j ⊗ Y(x_j - x_i), weighted per copy by a network of the distance as in NequIP, and a linear map."""

    def __init__(self, irreps: Any, degree: int, radial: RadialOptions) -> None:
        super().__init__()
        harmonics = o3.Irreps.spherical_harmonics(degree)
        middle: list[tuple[int, Any]] = []
        paths = []
        for one, (count, kind) in enumerate(irreps):
            for other, (_, harmonic) in enumerate(harmonics):
                for made in kind * harmonic:
                    if made in irreps:
                        paths.append((one, other, len(middle), "uvu", True))
                        middle.append((count, made))
        self.product = o3.TensorProduct(
            irreps, harmonics, o3.Irreps(middle), paths, shared_weights=False, internal_weights=False
        )
        # Without biases, so that the messages vanish at the cutoff like the radial functions.
        weights = self.product.weight_numel
        self.radial = two_linears(radial.basis, radial.hidden, weights, bias=False, factors=(1.0, 1.4))
        self.linear = o3.Linear(o3.Irreps(middle), irreps)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Recompute coupling coefficients that are converted to float64, as e3nn rounds them to the default dtype."""
        super()._apply(fn, recurse)
        for name, buffer in self.product.named_buffers():
            _, found, degrees = name.rpartition("_w3j_")
            if found and buffer.dtype == torch.float64:
                one, other, made = (int(degree) for degree in degrees.split("_"))
                buffer.copy_(o3.wigner_3j(one, other, made, dtype=torch.float64))
        return self

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        return self.linear(self.product(x[edges.source], edges.harmonics, self.radial(edges.radial)))


class _IrrepsAttention(nn.Module):
    """Attention of SE(3)-Transformers (Fuchs et al. 2020, Eq. 10); the copies of each irrep are divided into heads."""

    def __init__(self, irreps: Any, heads: int, degree: int, radial: RadialOptions) -> None:
        super().__init__()
        if any(count % heads for count, _ in irreps):
            raise ValueError(f"heads: {heads} heads do not divide the copies of {irreps}")
        self.sizes, self.heads = [count * kind.dim for count, kind in irreps], heads
        self.query, self.output = o3.Linear(irreps, irreps), o3.Linear(irreps, irreps)
        self.key = _TensorProductMessage(irreps, degree, radial)
        self.value = _TensorProductMessage(irreps, degree, radial)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        query, key = self._by_head(self.query(x))[edges.target], self._by_head(self.key(x, edges))
        score = (query * key).sum(dim=-1) / math.sqrt(key.shape[-1])
        weight = softmax(score + log_window(edges.window)[:, None], edges.target, num_nodes=len(edges.norm))
        if is_watched():
            show(SeenWeights(weight[:, None], edges.lists.select(edges.kept), "pooled", 1))
        message = weight[..., None] * self._by_head(self.value(x, edges))
        total = sums(message, edges.target, len(edges.norm))
        sizes = [size // self.heads for size in self.sizes]
        return self.output(torch.cat([part.flatten(1) for part in total.split(sizes, dim=-1)], dim=-1))

    def _by_head(self, x: Tensor) -> Tensor:
        """Reshape ``[*, irreps.dim]`` to ``[*, heads, irreps.dim / heads]``; each head gets whole irreps."""
        return torch.cat([part.unflatten(1, (self.heads, -1)) for part in x.split(self.sizes, dim=1)], dim=-1)


def two_linears(
    inputs: int, hidden: int, outputs: int, *, bias: bool = True, factors: tuple[float, float] = (1.0, 1.0)
) -> nn.Sequential:
    """Return a network with initial weights that preserve the size of signals, times factors."""
    first, last = nn.Linear(inputs, hidden, bias), nn.Linear(hidden, outputs, bias)
    keep_variance(first, factors[0])
    keep_variance(last, factors[1])
    return nn.Sequential(first, nn.SiLU(), last)


def log_window(window: Tensor) -> Tensor:
    """Return the logarithm of the window, which is added to scores so that neighbors at the cutoff have weight 0."""
    return window.clamp(min=torch.finfo(window.dtype).tiny).log()
