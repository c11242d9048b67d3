"""Layers of steerable features, on e3nn: edges, gated maps, normalization, tensor product messages and attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from lieattn.geometry import Neighbors
from lieattn.nn.relative import keep_variance
from lieattn.ops import bessel_functions, smooth_window

_TINY = 1e-6  # of the cutoff: closer points count as coincident, they have a distance but no direction


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges ``[edges]`` without loops, from source to target, and what layers need of them.

    Attributes
    ----------
    vectors
        ``[edges, 3]``, x_source - x_target.
    radial, window
        ``[edges, basis]``, Bessel functions of the length times a window that vanishes smoothly at the cutoff, and
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

    def sum_to_targets(self, messages: Tensor) -> Tensor:
        """Messages ``[edges, *]`` summed at their targets, times the norm: ``[points, *]``."""
        total = messages.new_zeros(len(self.norm), *messages.shape[1:]).index_add(0, self.target, messages)
        return total * self.norm.to(messages.dtype).view(-1, *[1] * (messages.ndim - 1))


def find_edges(neighbors: Neighbors, pos: Tensor, *, degree: int, basis: int, cutoff: float) -> Edges:
    """Edges of neighbor lists without those from a point to itself, with harmonics up to a degree.

    Of the ``basis`` radial functions all vanish at the cutoff.
    """
    from e3nn import o3

    keep = ~neighbors.is_loop
    target, source = neighbors.target[keep], neighbors.source[keep]
    vectors = neighbors.displacements(pos)[keep]
    square = vectors.square().sum(dim=1)
    apart = square > (_TINY * cutoff) ** 2
    # Both branches of each where have finite derivatives, so coincident points do not spoil gradients.
    length = torch.where(apart, square, 1.0).sqrt() * apart
    direction = torch.where(apart[:, None], vectors, vectors.new_tensor([1.0, 0.0, 0.0]))
    harmonics = o3.spherical_harmonics(list(range(degree + 1)), direction, normalize=True, normalization="component")
    harmonics = torch.cat([harmonics[:, :1], harmonics[:, 1:] * apart[:, None]], dim=1)
    window = smooth_window(length / cutoff)
    radial = bessel_functions(length / cutoff, basis) * window[:, None]
    norm = (1 + window.new_zeros(len(pos)).index_add(0, target, window)).rsqrt()
    return Edges(target, source, vectors, radial, window, harmonics, norm)


def hidden_irreps(channels: int, degree: int) -> Any:
    """``channels`` copies of 0e, 1o, 2e, ...: the types of tensors made of positions alone."""
    from e3nn import o3

    return o3.Irreps([(channels, (number, (-1) ** number)) for number in range(degree + 1)])


def two_linears(
    inputs: int, hidden: int, outputs: int, *, bias: bool = True, factors: tuple[float, float] = (1.0, 1.0)
) -> nn.Sequential:
    """A network with weights that keep the size of signals, times factors."""
    first, last = nn.Linear(inputs, hidden, bias), nn.Linear(hidden, outputs, bias)
    keep_variance(first, factors[0])
    keep_variance(last, factors[1])
    return nn.Sequential(first, nn.SiLU(), last)


class IrrepsNorm(nn.Module):
    """Divide each type of irreps by its root mean square over copies and components; scalars are centered first."""

    def __init__(self, irreps: Any, eps: float = 1e-6) -> None:
        super().__init__()
        self.irreps, self.eps = irreps, eps
        self.weight = nn.Parameter(torch.ones(irreps.num_irreps))
        self.bias = nn.Parameter(torch.zeros(sum(count for count, kind in irreps if kind.is_scalar())))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[points, irreps.dim]``."""
        parts, place = [], 0
        for (count, kind), where in zip(self.irreps, self.irreps.slices(), strict=True):
            part = x[:, where].unflatten(1, (count, kind.dim))
            if kind.is_scalar():
                part = part - part.mean(dim=1, keepdim=True)
            scale = torch.rsqrt(part.square().mean(dim=(1, 2), keepdim=True) + self.eps)
            part = part * scale * self.weight[place : place + count, None]
            if kind.is_scalar():
                part = part + self.bias[:, None]
            parts.append(part.flatten(1))
            place += count
        return torch.cat(parts, dim=1)


class GatedLinear(nn.Module):
    """Linear map of irreps followed by a gate: scalars pass a swish, the rest is multiplied by sigmoids of scalars."""

    def __init__(self, irreps_in: Any, irreps_out: Any) -> None:
        super().__init__()
        from e3nn import o3
        from e3nn.nn import Gate

        scalars = o3.Irreps([(count, kind) for count, kind in irreps_out if kind.is_scalar()])
        gated = o3.Irreps([(count, kind) for count, kind in irreps_out if not kind.is_scalar()])
        gates = o3.Irreps([(gated.num_irreps, "0e")] if len(gated) else [])
        self.gate = Gate(scalars, [torch.nn.functional.silu] * len(scalars), gates, [torch.sigmoid] * len(gates), gated)
        self.linear = o3.Linear(irreps_in, self.gate.irreps_in, biases=True)

    def forward(self, x: Tensor) -> Tensor:
        """``[points, irreps_in.dim]`` to ``[points, irreps_out.dim]``."""
        return self.gate(self.linear(x))


class TensorProductMessage(nn.Module):
    """Messages (f_j ⊗ Y(x_j - x_i)) weighted by functions of the distance, then mixed by a linear map.

    Each copy of an input irrep is multiplied with the harmonics by itself, and the linear map mixes copies: as in
    NequIP, and far cheaper than a weight for each pair of copies as in Tensor Field Networks (Thomas et al. 2018,
    Eq. 3), of which it is a factorization. A network of the radial functions weighs the paths.
    """

    def __init__(self, irreps_in: Any, irreps_out: Any, degree: int, basis: int, hidden: int) -> None:
        super().__init__()
        from e3nn import o3

        harmonics = o3.Irreps.spherical_harmonics(degree)
        wanted = {kind for _, kind in irreps_out}
        middle: list[tuple[int, Any]] = []
        paths = []
        for one, (count, kind) in enumerate(irreps_in):
            for other, (_, harmonic) in enumerate(harmonics):
                for made in kind * harmonic:
                    if made in wanted:
                        paths.append((one, other, len(middle), "uvu", True))
                        middle.append((count, made))
        self.product = o3.TensorProduct(
            irreps_in, harmonics, o3.Irreps(middle), paths, shared_weights=False, internal_weights=False
        )
        # Without biases, so that with the radial functions the messages vanish at the cutoff.
        self.radial = two_linears(basis, hidden, self.product.weight_numel, bias=False, factors=(1.0, 1.4))
        self.linear = o3.Linear(o3.Irreps(middle), irreps_out)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Make coupling coefficients anew where they are moved to float64: e3nn rounds them to the default dtype."""
        from e3nn import o3

        super()._apply(fn, recurse)
        for name, buffer in self.product.named_buffers():
            _, found, degrees = name.rpartition("_w3j_")
            if found and buffer.dtype == torch.float64 and not buffer.is_meta:
                one, other, made = (int(degree) for degree in degrees.split("_"))
                buffer.copy_(o3.wigner_3j(one, other, made, dtype=torch.float64))
        return self

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        """Features ``[points, irreps_in.dim]`` to messages ``[edges, irreps_out.dim]``."""
        return self.linear(self.product(x[edges.source], edges.harmonics, self.radial(edges.radial)))


class IrrepsAttention(nn.Module):
    r"""Attention of SE(3)-Transformers (Fuchs et al. 2020, Eq. 10): keys and values are tensor products.

    .. math::
        f'_i = W_o \sum_j \operatorname{softmax}_j \big( \langle W_q f_i, k_{ij} \rangle / \sqrt d \big) v_{ij},
        \qquad k_{ij}, v_{ij} \text{ linear in } f_j \otimes Y(x_j - x_i)

    Weights carry the window of the distance, so they are continuous where neighbors come and go. The copies of every
    type are divided among the heads.
    """

    def __init__(self, irreps: Any, heads: int, degree: int, basis: int, hidden: int) -> None:
        super().__init__()
        from e3nn import o3

        if any(count % heads for count, _ in irreps):
            raise ValueError(f"heads: {heads} heads do not divide the copies of {irreps}")
        self.irreps, self.heads = irreps, heads
        self.query, self.output = o3.Linear(irreps, irreps), o3.Linear(irreps, irreps)
        self.key = TensorProductMessage(irreps, irreps, degree, basis, hidden)
        self.value = TensorProductMessage(irreps, irreps, degree, basis, hidden)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        """``[points, irreps.dim]`` to the same."""
        from torch_geometric.utils import softmax

        query, key = self._by_head(self.query(x))[edges.target], self._by_head(self.key(x, edges))
        score = (query * key).sum(dim=-1) / math.sqrt(key.shape[-1])
        # log of the window: a neighbor at the cutoff has weight zero.
        score = score + edges.window.clamp(min=torch.finfo(score.dtype).tiny).log()[:, None]
        weight = softmax(score, edges.target, num_nodes=len(edges.norm))
        message = weight[..., None] * self._by_head(self.value(x, edges))
        total = x.new_zeros(len(edges.norm), *message.shape[1:]).index_add(0, edges.target, message)
        return self.output(self._join(total))

    def _by_head(self, x: Tensor) -> Tensor:
        """``[*, irreps.dim]`` to ``[*, heads, irreps.dim / heads]``: copies are divided, irreps are not."""
        parts = x.split([count * kind.dim for count, kind in self.irreps], dim=1)
        return torch.cat([part.unflatten(1, (self.heads, part.shape[1] // self.heads)) for part in parts], dim=-1)

    def _join(self, x: Tensor) -> Tensor:
        sizes = [count * kind.dim // self.heads for count, kind in self.irreps]
        return torch.cat([part.flatten(1) for part in x.split(sizes, dim=-1)], dim=-1)
