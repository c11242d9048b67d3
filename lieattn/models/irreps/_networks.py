"""Models with steerable features of e3nn.

All have the interface of :class:`lieattn.models.FramewiseTransformer` and are equivariant to E(3).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Required, Self, TypedDict, Unpack

import torch
from e3nn import o3
from e3nn.nn import Gate
from torch import Tensor, nn
from torch_geometric.utils import softmax

from lieattn._core.checks import check_arguments, check_counts
from lieattn._core.contexts import SeenWeights, as_without_autocast, is_watched, show, without_autocast
from lieattn._core.numerics import LayerNorm, sums
from lieattn.geometry import Neighborhood, Neighbors, PointClouds, find_neighbors, point_clouds
from lieattn.groups import E
from lieattn.models._base.inputs import PointInputs, features, in_precision_of_weights, read_inputs, vectors
from lieattn.models._base.jumps import jumps_of_neighbors
from lieattn.models._base.network import EquivariantModule, OutputKind, PointOutputs, cutoff_of
from lieattn.models._base.symmetry import Symmetry, of_squares
from lieattn.nn import Pooling
from lieattn.nn.relative import keep_variance
from lieattn.ops import RelativeTerms, bessel_functions, group_attention, smooth_window

__all__ = ["DistanceTransformer", "PointOptions", "RadialOptions", "SE3Transformer", "TensorFieldNetwork"]

_EPS = 1e-6  # of normalizations
_TINY = 1e-6  # times the cutoff: closer points count as coincident, without a direction


@dataclass(frozen=True)
class RadialOptions:
    """Functions of the distance: the number of Bessel functions, and the hidden units of networks on them."""

    basis: int = 8
    hidden: int = 32

    def __post_init__(self) -> None:
        check_arguments(RadialOptions, vars(self))
        check_counts(basis=self.basis, hidden=self.hidden)


class PointOptions(TypedDict, total=False):
    """Options of all networks in this module; see :class:`lieattn.models.FramewiseTransformer`.

    ``cutoff`` is the distance at which neighbors have no influence; the length of the neighborhood if absent.
    """

    neighborhood: Required[Neighborhood]
    cutoff: float | None
    vector_inputs: Sequence[str]
    kind: OutputKind
    pool: Pooling


class _PointNetwork(EquivariantModule):
    """Base class of the networks: reads the data, and pools the outputs."""

    def __init__(
        self,
        in_channels: PointInputs,
        out_channels: int,
        *,
        neighborhood: Neighborhood,
        cutoff: float | None = None,
        vector_inputs: Sequence[str] = (),
        kind: OutputKind = "invariant",
        pool: Pooling = "mean",
        channels: int,
        radial: RadialOptions,
        degree: int = 0,
    ) -> None:
        check_arguments(_PointNetwork.__init__, locals())
        super().__init__()
        check_counts(out_channels=out_channels, channels=channels)
        self.inputs, self.in_channels, self.cloud_inputs = read_inputs(in_channels)
        self.out_channels, self.outputs = out_channels, PointOutputs(kind, pool)
        self.vector_inputs, self.radial, self.degree = tuple(vector_inputs), radial, degree
        self.neighborhood, self.cutoff = neighborhood, cutoff_of(neighborhood, cutoff)
        self.has_kinks = pool == "max"

    @property
    def symmetry(self) -> Symmetry:
        """Symmetry under E(3); less if neighborhoods are cubes of voxels and the cutoff exceeds them."""
        return of_squares(Symmetry(E(3)), self.neighborhood, self.cutoff)

    def tied_to(self) -> dict[str, str]:
        """Return descriptions of the geometry and the cutoff."""
        return {**super().tied_to(), "cutoff": repr(self.cutoff)}

    @property
    def jumps(self) -> tuple[str, ...]:
        return jumps_of_neighbors(self.neighborhood, self.cutoff)

    @property
    def kind(self) -> str:
        """Kind of the outputs, ``"invariant"`` or ``"vector"``."""
        return self.outputs.kind

    @in_precision_of_weights
    def geometry(self, data: Any) -> PointGeometry:
        """Return the clouds with their edges; ValueError if positions do not have three coordinates."""
        clouds = point_clouds(data)
        if clouds.pos.shape[1] != 3:
            raise ValueError(f"data.pos: irreps of O(3) need 3 coordinates, got {tuple(clouds.pos.shape)}")
        return PointGeometry(clouds, self._edges(find_neighbors(clouds, self.neighborhood), clouds.pos))

    @in_precision_of_weights
    def forward(self, data: Any, geometry: PointGeometry | None = None) -> Tensor:
        """Return outputs ``[clouds | points, out_channels(, 3)]``; a single vector has no axis of channels."""
        clouds, edges = self.geometry(data) if geometry is None else geometry
        invariants, directed = features(data, self.inputs, clouds), vectors(data, self.vector_inputs, clouds)
        return self.outputs(self._at_points(invariants, directed, edges), clouds)

    @abc.abstractmethod
    def _at_points(self, x: Tensor, directed: Tensor, edges: _Edges) -> Tensor:
        """Return numbers ``[points, out_channels]`` or vectors ``[points, out_channels, 3]``."""

    def _edges(self, neighbors: Neighbors, pos: Tensor) -> _Edges:
        keep = (~neighbors.is_loop).nonzero()[:, 0]
        target, source = neighbors.target[keep], neighbors.source[keep]
        vectors = neighbors.displacements(pos)[keep]
        square = vectors.square().sum(dim=1)
        apart = square > (_TINY * self.cutoff) ** 2
        axis = torch.tensor([1.0, 0.0, 0.0], dtype=vectors.dtype, device=vectors.device)
        direction = torch.where(apart[:, None], vectors, axis)
        degrees = list(range(self.degree + 1))
        harmonics = o3.spherical_harmonics(degrees, direction, normalize=True, normalization="component")
        harmonics = torch.cat([harmonics[:, :1], harmonics[:, 1:] * apart[:, None]], dim=1)
        square = square / self.cutoff**2
        window = smooth_window(square, squared=True)
        radial = bessel_functions(square, self.radial.basis, squared=True) * window[:, None]
        norm = (1 + sums(window, target, len(pos))).rsqrt()
        return _Edges(neighbors, keep, target, source, vectors, radial, window, harmonics, norm)


class TensorFieldNetwork(_PointNetwork):
    """Tensor field network (Thomas et al. 2018): convolutions by tensor products, factorized as in NequIP, and gates.

    **Equivariance.** E(3), up to rounding.

    Parameters
    ----------
    in_channels, out_channels
        See :class:`lieattn.models.FramewiseTransformer`.
    channels, degree
        Number of copies of each irrep, and largest degree of features and harmonics.
    layers
        Number of convolutions.
    radial
        Functions of the distance, which weight the paths of the tensor products.
    **options
        See :class:`PointOptions`.
    """

    def __init__(
        self,
        in_channels: PointInputs,
        out_channels: int,
        *,
        channels: int = 32,
        degree: int = 2,
        layers: int = 4,
        radial: RadialOptions | None = None,
        **options: Unpack[PointOptions],
    ) -> None:
        check_arguments(TensorFieldNetwork.__init__, locals())
        check_counts(degree=degree, layers=layers)
        radial = radial or RadialOptions()
        super().__init__(in_channels, out_channels, channels=channels, radial=radial, degree=degree, **options)
        # 0e, 1o, 2e, ...: the types of tensors made of positions alone.
        self.irreps = o3.Irreps([(channels, (number, (-1) ** number)) for number in range(degree + 1)])
        inputs = f"{self.in_channels}x0e" + (f" + {len(self.vector_inputs)}x1o" if self.vector_inputs else "")
        self.embed = o3.Linear(inputs, self.irreps, biases=True)
        self.layers = nn.ModuleList()  # declared here for the order of parameters, filled last for that of random draws
        self.norm = _IrrepsNorm(self.irreps)
        self.hidden = _GatedLinear(self.irreps)
        self.head = o3.Linear(self.irreps, f"{out_channels}x{'0e' if self.kind == 'invariant' else '1o'}", biases=True)
        self.layers.extend(self._layer() for _ in range(layers))

    def _layer(self) -> nn.Module:
        """Return a layer ``layer(x, edges) -> x``."""
        return _Convolution(self.irreps, self.degree, self.radial)

    def _at_points(self, x: Tensor, directed: Tensor, edges: _Edges) -> Tensor:
        # Tensor products of e3nn need operands of the same dtype, which autocast would mix.
        with without_autocast(x.device):
            x = self.embed(torch.cat([x, directed.flatten(1)], dim=1))
            for layer in self.layers:
                x = layer(x, edges)
            out: Tensor = self.head(self.hidden(self.norm(x)))
        return out if self.kind == "invariant" else out.unflatten(1, (self.out_channels, 3))


class SE3Transformer(TensorFieldNetwork):
    """SE(3)-Transformer (Fuchs et al. 2020): attention whose keys and values are tensor products.

    **Equivariance.** E(3), up to rounding.

    Parameters
    ----------
    heads
        Number of attention heads, a divisor of ``channels``.
    in_channels, out_channels, channels, degree, layers, radial, **options
        See :class:`TensorFieldNetwork`.
    """

    def __init__(
        self,
        in_channels: PointInputs,
        out_channels: int,
        *,
        channels: int = 32,
        degree: int = 2,
        layers: int = 4,
        heads: int = 4,
        radial: RadialOptions | None = None,
        **options: Unpack[PointOptions],
    ) -> None:
        check_arguments(SE3Transformer.__init__, locals())
        check_counts(channels=channels, heads=heads)
        self.heads = heads
        sizes: Any = {"channels": channels, "degree": degree, "layers": layers, "radial": radial}
        super().__init__(in_channels, out_channels, **sizes, **options)

    def _layer(self) -> nn.Module:
        return _AttentionBlock(self.irreps, self.heads, self.degree, self.radial)


class DistanceTransformer(_PointNetwork):
    """A transformer on invariant features that depends on positions through distances only.

    Scores are dot products plus a function of the distance, and values are multiplied by another function of it.
    Vector outputs are sums of x_j - x_i and of the vector inputs with invariant coefficients (as in EGNN, Satorras
    et al. 2021, Eq. 4). Squared lengths of vector inputs are input features.

    **Equivariance.** E(3), up to rounding.

    Parameters
    ----------
    channels, heads
        Width, and number of attention heads, a divisor of the width.
    in_channels, out_channels, layers, radial, **options
        See :class:`TensorFieldNetwork`. The default has 16 Bessel functions.
    """

    def __init__(
        self,
        in_channels: PointInputs,
        out_channels: int,
        *,
        channels: int = 64,
        layers: int = 4,
        heads: int = 4,
        radial: RadialOptions | None = None,
        **options: Unpack[PointOptions],
    ) -> None:
        check_arguments(DistanceTransformer.__init__, locals())
        radial = radial or RadialOptions(basis=16)
        super().__init__(in_channels, out_channels, channels=channels, radial=radial, **options)
        check_counts(layers=layers, heads=heads)
        if channels % heads:
            raise ValueError(f"heads: {heads} heads do not divide {channels} channels")
        self.embed = nn.Linear(self.in_channels + len(self.vector_inputs), channels)
        self.layers = nn.ModuleList(_DistanceBlock(channels, heads, radial) for _ in range(layers))
        self.norm = LayerNorm(channels)
        if width := out_channels if self.kind == "invariant" else out_channels * len(self.vector_inputs):
            self.head = _two_linears(channels, channels, width)
        if self.kind == "vector":
            self.pair = _two_linears(2 * channels + radial.basis, channels, out_channels)

    def _at_points(self, x: Tensor, directed: Tensor, edges: _Edges) -> Tensor:
        x = self.embed(torch.cat([x, directed.square().sum(dim=-1)], dim=1))
        # For all edges of the lists: loops have radial functions 0 and window 1, whose logarithm is 0.
        number = edges.lists.num_edges
        radial = edges.radial.new_zeros(number, self.radial.basis).index_copy(0, edges.kept, edges.radial)
        window = edges.window.new_zeros(number).index_copy(0, edges.kept, _log(edges.window))
        for layer in self.layers:
            x = layer(x, edges.lists, radial, window)
        x = self.norm(x)
        if self.kind == "invariant":
            return as_without_autocast(self.head, x, self.head)
        both = torch.cat([x[edges.target], x[edges.source], edges.radial], dim=1)
        out = edges.sum_to_targets(self.pair(both)[..., None] * (edges.window[:, None] * edges.vectors)[:, None])
        if self.vector_inputs:
            out = out + torch.einsum("pov,pvd->pod", self.head(x).unflatten(1, (self.out_channels, -1)), directed)
        return out


@dataclass(frozen=True, eq=False)
class _Edges:
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


class PointGeometry(NamedTuple):
    """Geometry of a forward pass: the clouds, and their edges."""

    clouds: PointClouds
    edges: _Edges


class _Convolution(nn.Module):
    """Residual layer: tensor product messages plus a linear map of the point itself, followed by a gate."""

    def __init__(self, irreps: Any, degree: int, radial: RadialOptions) -> None:
        super().__init__()
        self.norm = _IrrepsNorm(irreps)
        self.message = _TensorProductMessage(irreps, degree, radial)
        self.own = o3.Linear(irreps, irreps)
        self.gate = _GatedLinear(irreps)

    def forward(self, x: Tensor, edges: _Edges) -> Tensor:
        y = self.norm(x)
        return x + self.gate(self.own(y) + edges.sum_to_targets(self.message(y, edges)))


class _AttentionBlock(nn.Module):
    """Pre-norm block: attention, then a gated linear map."""

    def __init__(self, irreps: Any, heads: int, degree: int, radial: RadialOptions) -> None:
        super().__init__()
        self.norm1, self.norm2 = _IrrepsNorm(irreps), _IrrepsNorm(irreps)
        self.attention = _IrrepsAttention(irreps, heads, degree, radial)
        self.gate = _GatedLinear(irreps)
        self.linear = o3.Linear(irreps, irreps)

    def forward(self, x: Tensor, edges: _Edges) -> Tensor:
        x = x + self.attention(self.norm1(x), edges)
        return x + self.linear(self.gate(self.norm2(x)))


class _DistanceBlock(nn.Module):
    """Pre-norm block on scalars, with the attention operator of the library and a fiber of size one."""

    def __init__(self, channels: int, heads: int, radial: RadialOptions) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = LayerNorm(channels), LayerNorm(channels)
        self.projection, self.output = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        # The geometry should have an effect at the start. Factors were tuned as for EdgeNetwork, for fair comparisons.
        self.radial = _two_linears(radial.basis, radial.hidden, heads + channels, factors=(1.5, 2.0))
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


class _IrrepsNorm(nn.Module):
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


class _GatedLinear(nn.Module):
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
        self.radial = _two_linears(radial.basis, radial.hidden, weights, bias=False, factors=(1.0, 1.4))
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

    def forward(self, x: Tensor, edges: _Edges) -> Tensor:
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

    def forward(self, x: Tensor, edges: _Edges) -> Tensor:
        query, key = self._by_head(self.query(x))[edges.target], self._by_head(self.key(x, edges))
        score = (query * key).sum(dim=-1) / math.sqrt(key.shape[-1])
        weight = softmax(score + _log(edges.window)[:, None], edges.target, num_nodes=len(edges.norm))
        if is_watched():
            show(SeenWeights(weight[:, None], edges.lists.select(edges.kept), "pooled", 1))
        message = weight[..., None] * self._by_head(self.value(x, edges))
        total = sums(message, edges.target, len(edges.norm))
        sizes = [size // self.heads for size in self.sizes]
        return self.output(torch.cat([part.flatten(1) for part in total.split(sizes, dim=-1)], dim=-1))

    def _by_head(self, x: Tensor) -> Tensor:
        """Reshape ``[*, irreps.dim]`` to ``[*, heads, irreps.dim / heads]``; each head gets whole irreps."""
        return torch.cat([part.unflatten(1, (self.heads, -1)) for part in x.split(self.sizes, dim=1)], dim=-1)


def _two_linears(
    inputs: int, hidden: int, outputs: int, *, bias: bool = True, factors: tuple[float, float] = (1.0, 1.0)
) -> nn.Sequential:
    """Return a network with initial weights that preserve the size of signals, times factors."""
    first, last = nn.Linear(inputs, hidden, bias), nn.Linear(hidden, outputs, bias)
    keep_variance(first, factors[0])
    keep_variance(last, factors[1])
    return nn.Sequential(first, nn.SiLU(), last)


def _log(window: Tensor) -> Tensor:
    """Return the logarithm of the window, which is added to scores so that neighbors at the cutoff have weight 0."""
    return window.clamp(min=torch.finfo(window.dtype).tiny).log()
