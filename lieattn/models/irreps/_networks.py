"""Models with steerable features of e3nn.

All have the interface of :class:`lieattn.models.FramewiseTransformer` and are equivariant to E(3).
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple, Required, TypedDict, Unpack

import torch
from e3nn import o3
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_counts
from lieattn._core.contexts import as_without_autocast, without_autocast
from lieattn._core.numerics import LayerNorm, sums
from lieattn.geometry import Neighborhood, Neighbors, PointClouds, find_neighbors, point_clouds
from lieattn.groups import E
from lieattn.models._base.inputs import (
    PointInputs,
    VectorInputs,
    check_domains,
    features,
    in_precision_of_weights,
    read_fields,
    read_inputs,
    vectors,
)
from lieattn.models._base.network import EquivariantModule, OutputKind, PointOutputs, cutoff_of
from lieattn.models._base.symmetry import Symmetry, jumps_of_neighbors, of_squares
from lieattn.models.irreps._layers import (
    AttentionBlock,
    Convolution,
    DistanceBlock,
    Edges,
    Fields,
    GatedLinear,
    IrrepsNorm,
    RadialOptions,
    log_window,
    two_linears,
)
from lieattn.nn import Pooling
from lieattn.ops import bessel_functions, smooth_window

__all__ = ["DistanceTransformer", "PointOptions", "RadialOptions", "SE3Transformer", "TensorFieldNetwork"]

_TINY = 1e-6  # times the cutoff: closer points count as coincident, without a direction


class PointOptions(TypedDict, total=False):
    """Options of all networks in this module; see :class:`lieattn.models.FramewiseTransformer`.

    ``cutoff`` is the distance at which neighbors have no influence; the length of the neighborhood if absent.
    """

    neighborhood: Required[Neighborhood]
    cutoff: float | None
    vector_inputs: VectorInputs
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
        vector_inputs: VectorInputs = (),
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
        self.vector_inputs, self.field_inputs = read_fields(vector_inputs, 3)
        check_domains(self.field_inputs, None)
        self.radial, self.degree = radial, degree
        self.fields = Fields(self.field_inputs) if self.field_inputs else None
        self.neighborhood, self.cutoff = neighborhood, cutoff_of(neighborhood, cutoff)
        self.tied = {"cutoff": repr(self.cutoff)}
        self.has_kinks = pool == "max"

    @property
    def symmetry(self) -> Symmetry:
        """Symmetry under E(3); less if neighborhoods are cubes of voxels and the cutoff exceeds them."""
        return of_squares(Symmetry(E(3)), self.neighborhood, self.cutoff).seeing(self.vector_inputs)

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
        others = directed.new_zeros(len(directed), 0) if self.fields is None else self.fields(data, clouds)
        return self.outputs(self._at_points(invariants, directed, others, edges), clouds)

    @abc.abstractmethod
    def _at_points(self, x: Tensor, directed: Tensor, others: Tensor, edges: Edges) -> Tensor:
        """Return numbers ``[points, out_channels]`` or vectors ``[points, out_channels, 3]``.

        ``x`` are invariant features, ``directed`` vectors ``[points, n, 3]``, and ``others`` all other input fields as
        features of irreps.
        """

    def _edges(self, neighbors: Neighbors, pos: Tensor) -> Edges:
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
        return Edges(neighbors, keep, target, source, vectors, radial, window, harmonics, norm)


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
        if self.fields is not None:
            inputs += f" + {self.fields.spec}"
            if (most := max(number for _, number, _ in self.fields.parts)) > degree:
                raise ValueError(
                    f"degree: expected at least {most} for fields of the irreps {self.fields.spec}, got {degree}"
                )
            if any(parity != (-1) ** number for _, number, parity in self.fields.parts):  # pseudovectors
                self.irreps += o3.Irreps([(channels, (number, -((-1) ** number))) for number in range(degree + 1)])
        self.embed = o3.Linear(inputs, self.irreps, biases=True)
        self.layers = nn.ModuleList()  # declared here for the order of parameters, filled last for that of random draws
        self.norm = IrrepsNorm(self.irreps)
        self.hidden = GatedLinear(self.irreps)
        self.head = o3.Linear(self.irreps, f"{out_channels}x{'0e' if self.kind == 'invariant' else '1o'}", biases=True)
        self.layers.extend(self._layer() for _ in range(layers))

    def _layer(self) -> nn.Module:
        """Return a layer ``layer(x, edges) -> x``."""
        return Convolution(self.irreps, self.degree, self.radial)

    def _at_points(self, x: Tensor, directed: Tensor, others: Tensor, edges: Edges) -> Tensor:
        # Tensor products of e3nn need operands of the same dtype, which autocast would mix.
        with without_autocast(x.device):
            x = self.embed(torch.cat([x, directed.flatten(1), others], dim=1))
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
        return AttentionBlock(self.irreps, self.heads, self.degree, self.radial)


class DistanceTransformer(_PointNetwork):
    """A transformer on invariant features that depends on positions through distances only.

    Scores are dot products plus a function of the distance, and values are multiplied by another function of it.
    Vector outputs are sums of x_j - x_i and of the vector inputs with invariant coefficients (as in EGNN, Satorras
    et al. 2021, Eq. 4). Squared lengths of vector inputs, and of the irreps of other input fields, are input features.

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
        seen = 0 if self.fields is None else sum(count for count, _, _ in self.fields.parts)
        self.embed = nn.Linear(self.in_channels + len(self.vector_inputs) + seen, channels)
        self.layers = nn.ModuleList(DistanceBlock(channels, heads, radial) for _ in range(layers))
        self.norm = LayerNorm(channels)
        if width := out_channels if self.kind == "invariant" else out_channels * len(self.vector_inputs):
            self.head = two_linears(channels, channels, width)
        if self.kind == "vector":
            self.pair = two_linears(2 * channels + radial.basis, channels, out_channels)

    def _at_points(self, x: Tensor, directed: Tensor, others: Tensor, edges: Edges) -> Tensor:
        others = others if self.fields is None else self.fields.invariants(others)
        x = self.embed(torch.cat([x, directed.square().sum(dim=-1), others], dim=1))
        # For all edges of the lists: loops have radial functions 0 and window 1, whose logarithm is 0.
        number = edges.lists.num_edges
        radial = edges.radial.new_zeros(number, self.radial.basis).index_copy(0, edges.kept, edges.radial)
        window = edges.window.new_zeros(number).index_copy(0, edges.kept, log_window(edges.window))
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


class PointGeometry(NamedTuple):
    """Geometry of a forward pass: the clouds, and their edges."""

    clouds: PointClouds
    edges: Edges
