"""Options of LieTransformer and LieConv, and features that their authors make of molecules and patterns."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lieattn._checks import check_choice, check_count, check_counts, check_dropout, check_length, kind
from lieattn.geometry import LiftedGraph, PointClouds
from lieattn.models._network import OutputKind, Pool
from lieattn.nn import BlockNorm, InvariantHead, VectorHead
from lieattn.nn.relative import FeaturePart, Kernel, LocationPart
from lieattn.ops import Activation, Normalization
from lieattn.spaces import HomogeneousSpace

Order = Literal["pool_first", "point_first"]


class PairCoordinates(abc.ABC):
    """Coordinates of relative elements in place of those that a graph has by itself.

    For example :class:`lieattn.models.published.PublishedCoordinates`.
    """

    @property
    def continuous(self) -> bool:
        """Whether they depend continuously on the relative element."""
        return True

    @abc.abstractmethod
    def count(self, space: HomogeneousSpace) -> int:
        """How many there are in a space, invariants of both points included; ValueError if it has none."""

    @abc.abstractmethod
    def __call__(self, graph: LiftedGraph) -> Tensor:
        """``[rows, fiber, fiber, k]``, one row for each of those of ``graph.relative``."""


@dataclass(frozen=True)
class Lifting:
    """How networks see the relative elements of lifted points.

    Attributes
    ----------
    coordinates
        ``"smooth"``, ``"log"`` (see :class:`lieattn.geometry.RelativeElements`), or others, made of the graph.
    length
        Length by which translations are divided; the neighborhood's own if absent, or 1.
    bound
        Whether coordinates p become p tanh(|p| / 7) / |p|.
    neighbor_dropout
        Share of the neighbors of a point that a training step leaves out, drawn anew each time; a point keeps itself.
        In eval mode all neighbors are used.
    radial
        Number of Bessel functions of the distance that scores and kernels see beside the coordinates; for rigid
        motions.
    local
        Size of a convolution before the blocks, by which geometry enters the field also where features are constant;
        0 for none. Where the group preserves distances and there is a cutoff, it is a
        :class:`lieattn.nn.LiftingConvolution` of what frames see of their neighbors, with this many hidden units; else
        a :class:`lieattn.nn.LieConvolution` of the coordinates, of this rank.
    cutoff
        Distance at which the Bessel functions and that convolution vanish; the neighborhood's own length if absent.
    """

    coordinates: Literal["smooth", "log"] | PairCoordinates = "smooth"
    length: float | None = None
    bound: bool = False
    neighbor_dropout: float = 0.0
    radial: int = 0
    local: int = 16
    cutoff: float | None = None

    def __post_init__(self) -> None:
        if self.coordinates not in ("smooth", "log") and not isinstance(self.coordinates, PairCoordinates):
            raise ValueError(f"coordinates: expected 'smooth', 'log' or PairCoordinates, got {self.coordinates!r}")
        check_dropout("neighbor_dropout", self.neighbor_dropout)
        check_counts(0, radial=self.radial, local=self.local)
        for argument, length in (("length", self.length), ("cutoff", self.cutoff)):
            if length is not None:
                check_length(argument, length)
        if self.length is not None and isinstance(self.coordinates, PairCoordinates):
            raise ValueError(f"length: {self.coordinates} are not divided by a length, got {self.length}")

    @property
    def continuous(self) -> bool:
        """Whether coordinates depend continuously on relative elements: logarithms jump at half turns."""
        return self.coordinates != "log" if isinstance(self.coordinates, str) else self.coordinates.continuous


@dataclass(frozen=True)
class AttentionOptions:
    """Of the blocks of LieTransformer.

    Attributes
    ----------
    kernel, normalize, hidden, features, location, feature_channels, dropout
        See :class:`lieattn.nn.LieSelfAttention`.
    activation
        Of the networks of the scores and of the MLPs.
    norm, eps
        See :class:`lieattn.nn.LieBlock`.
    """

    kernel: Kernel = "sum"
    normalize: Normalization = "softmax"
    hidden: int = 16
    features: FeaturePart = "mixed"
    location: LocationPart = "coordinates"
    feature_channels: int | None = None
    dropout: float = 0.0
    activation: Activation = "silu"
    norm: BlockNorm = "layer_pre"
    eps: float = 1e-5


@dataclass(frozen=True)
class ConvolutionOptions:
    """Of the blocks of LieConv, see :class:`lieattn.nn.LieBottleneck`.

    Attributes
    ----------
    rank, hidden
        Of the kernel.
    norm, activation
        Of the blocks and behind the last one.
    downsampling
        Share of the points that is left behind all blocks; each keeps the same share.
    widening
        Exponent w: where a share s of the points is kept, channels grow by s^-w (½ in the paper's image network), and
        the radius of the neighborhoods by s^(-1 / dim).
    """

    rank: int = 16
    hidden: int = 32
    norm: Literal["batch", "layer", "none"] = "batch"
    activation: Activation = "silu"
    downsampling: float = 1.0
    widening: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.downsampling <= 1:
            raise ValueError(f"downsampling: expected a share in (0, 1], got {self.downsampling}")
        if not 0 <= self.widening <= 1:
            raise ValueError(f"widening: expected an exponent from 0 to 1, got {self.widening}")


@dataclass(frozen=True)
class Readout:
    """From the field behind the last block to outputs.

    Attributes
    ----------
    kind
        ``"invariant"`` numbers, by :class:`lieattn.nn.InvariantHead`; or ``"vector"`` outputs, for orthogonal frames,
        by :class:`lieattn.nn.VectorHead`.
    pool
        ``"mean"``, ``"max"`` (of numbers) or ``"sum"`` over the points of a cloud, or ``"none"`` for outputs at points.
    order
        Of numbers: ``"pool_first"`` is the authors' ``model_1``, ``"point_first"`` their ``lieconv``; if absent that of
        the paper of the network.
    norm
        Whether a layer normalization precedes each activation of ``"pool_first"``.
    activation
        Of the head.
    """

    kind: OutputKind = "invariant"
    pool: Pool = "mean"
    order: Order | None = None
    norm: bool = False
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, OutputKind)

    def head(self, channels: int, out_channels: int, dim: int, order: Order) -> nn.Module:
        """The head of a network whose paper has this order."""
        if self.kind == "vector":
            pool = cast(Literal["mean", "sum", "none"], self.pool)
            return VectorHead(channels, dim, outputs=out_channels, pool=pool, activation=self.activation)
        return InvariantHead(
            channels,
            out_channels,
            readout=self.order or order,
            pool=self.pool,
            activation=self.activation,
            norm=self.norm,
        )


@dataclass(frozen=True)
class Species:
    """One-hot species times powers 0, 1, 2 of the charge, made of ``data.z``.

    Channel ``3 a + q`` is (z / largest z of the table)^q for atoms of species a, 0 for others.

    Attributes
    ----------
    species
        Nuclear charges that are known.
    """

    species: Sequence[int] = (1, 6, 7, 8, 9)

    @property
    def channels(self) -> int:
        """Number of features."""
        return 3 * len(self.species)

    def __call__(self, data: Any, clouds: PointClouds) -> Tensor:
        """Features ``[points, channels]`` in torch's default dtype.

        Raises
        ------
        TypeError, ValueError
            If z is no int64 tensor ``[points]``, or an atom is not in the table.
        """
        z = getattr(data, "z", None)
        if not isinstance(z, Tensor) or z.dtype != torch.int64 or z.ndim != 1:
            raise TypeError(f"data.z: expected int64 nuclear charges [points], got {kind(z)}")
        one_hot = z[:, None] == torch.tensor(list(self.species), device=z.device)
        unknown = ~one_hot.any(dim=1)
        if unknown.any():
            atom = int(unknown.nonzero()[0])
            raise ValueError(f"data.z: expected charges among {list(self.species)}, got {int(z[atom])} for atom {atom}")
        charge = z.to(torch.get_default_dtype()) / max(self.species)
        power = charge[:, None] ** torch.arange(3, device=z.device)
        return (one_hot[:, :, None] * power[:, None]).flatten(1)


@dataclass(frozen=True)
class SortedDistances:
    """Distances of each point to the others of its cloud, largest first, zeros where there are fewer.

    Invariant under E(d) and permutations; where points coincide gradients are 0.

    Attributes
    ----------
    channels
        Number of features; a cloud has at most one point more.
    """

    channels: int

    def __post_init__(self) -> None:
        check_count("channels", self.channels)

    def __call__(self, data: Any, clouds: PointClouds) -> Tensor:
        """Features ``[points, channels]``; ValueError if a cloud has more points."""
        batch = clouds.batch
        same = batch[:, None] == batch
        most = int(same.sum(dim=1).max()) if len(batch) else 0
        if most > self.channels + 1:
            raise ValueError(f"data: expected at most {self.channels + 1} points in a cloud, got {most}")
        squared = (clouds.pos[:, None] - clouds.pos).square().sum(-1)
        apart = same & (squared > 0)
        distance = torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)
        ordered = distance.sort(dim=1, descending=True).values
        missing = max(0, self.channels - ordered.shape[1])
        return torch.nn.functional.pad(ordered, (0, missing))[:, : self.channels]
