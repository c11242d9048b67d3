"""What a network states about itself, as base classes of all models."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from lieattn._core.checks import (
    check_arguments,
    check_counts,
    check_features,
    check_floating,
    check_length,
    check_neighborhood,
    check_size,
)
from lieattn._core.contexts import recomputed
from lieattn._core.messages import titled_table
from lieattn._core.values import plain_text
from lieattn.geometry import (
    LiftedGraph,
    Neighborhood,
    PointClouds,
    Raster,
    point_clouds,
)
from lieattn.groups import FiniteGroup, Group, trivial
from lieattn.io import Recorded, TiedWeights
from lieattn.models._base.inputs import (
    CloudInputs,
    VectorEmbedding,
    VectorInputs,
    check_domains,
    in_precision_of_weights,
    read_fields,
    read_inputs,
    with_planes,
)
from lieattn.models._base.symmetry import (
    Symmetry,
    decided,
    is_open,
    jumps_of,
    jumps_of_frames,
    jumps_of_neighbors,
    kinks_of,
)
from lieattn.models._base.tied import tied_geometry
from lieattn.nn import Pooling, act_on_grid, grid_images
from lieattn.reps import Representation

T = TypeVar("T")
OutputKind = Literal["invariant", "vector"]
Downsampling = Literal["pooled", "strided"]


class GroupField(NamedTuple):
    """A field ``x`` ``[points, fiber, channels]`` on the group, and its ``graph`` with the frames of the points."""

    x: Tensor
    graph: LiftedGraph


class Shown(nn.Module):
    """A module with a short description for ``print`` and notebooks; ``repr`` has the whole tree of modules."""

    guarantee: str

    def __str__(self) -> str:
        """Return class, number of parameters and guarantee, and a line for each part."""
        rows = self._parts()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)] or [0] * 3
        lines = [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
        return "\n".join([self._heading(), *lines])

    def _repr_html_(self) -> str:
        return titled_table(self._heading(), self._parts(), ("part", "class", "parameters"))

    def _heading(self) -> str:
        total = sum(weight.numel() for weight in self.parameters())
        return f"{type(self).__name__}: {total:,} parameters; {self.guarantee}"

    def _parts(self) -> list[tuple[str, str, str]]:
        """Return name, class and number of parameters of each part."""
        rows = []
        for name, part in self.named_children():
            kinds = {type(inner).__name__ for inner in part.children()}
            several = isinstance(part, nn.ModuleList) and len(kinds) == 1
            kind = f"{len(list(part.children()))} x {kinds.pop()}" if several else type(part).__name__
            rows.append((name, kind, f"{sum(weight.numel() for weight in part.parameters()):,}"))
        return rows


class EquivariantModule(Recorded, Shown, TiedWeights, abc.ABC):
    """Base class of modules with a known :attr:`symmetry`.

    State dicts store in their metadata the group, geometry, inputs, options and kind of outputs of the weights.
    ``load_state_dict`` raises RuntimeError and names the difference if those of the module differ. To skip this check,
    load ``dict(state_dict)``, which has no metadata.

    Attributes
    ----------
    vector_inputs
        Names of attributes of the data with vectors ``[points, dim]``, which rotate with the points. ``"pos"`` stands
        for positions relative to the origin: the symmetry is then that about the origin, without translations.
    field_inputs
        Representations of the other attributes of the data that move with the points, by name.
    cloud_inputs
        Names of attributes of the data with a number for each cloud, see :class:`CloudInputs`.
    sees_order
        Whether the outputs depend on the order of the points.
    has_kinks
        Whether first derivatives of the outputs are discontinuous, for example because of maxima or relu.
    recomputes
        Whether activations are recomputed in the backward pass, see :meth:`Network.checkpoint_activations`.
    inputs
        Input features of the points; None for modules without their own.
    group, space, frames, neighborhood
        Group, space, frames and neighborhood that the weights belong to; None where a module has none.
    tied
        Descriptions by name of further properties that the weights depend on, see :meth:`tied_to`.
    """

    inputs: Any = None
    group: Any = None
    space: Any = None
    frames: Any = None
    neighborhood: Any = None
    vector_inputs: tuple[str, ...] = ()
    field_inputs: Mapping[str, Representation] = MappingProxyType({})
    cloud_inputs: tuple[str, ...] = ()
    sees_order: bool = False
    has_kinks: bool = False
    recomputes: bool = False
    tied: Mapping[str, str] = MappingProxyType({})

    @property
    @abc.abstractmethod
    def symmetry(self) -> Symmetry:
        """Motions of the input under which the outputs are invariant or equivariant."""

    def tied_to(self) -> dict[str, str]:
        """Return descriptions by name of the properties, besides shapes, that the weights depend on."""
        return {**tied_geometry(self), **self.tied}

    def decide(self, tied_to: Mapping[str, str]) -> None:
        """Adopt the smoothness of the radius from the weights if this module leaves it open."""
        for smooth in (False, True) if is_open(self.neighborhood) else ():
            if tied_to.get("neighborhood") == plain_text(repr(chosen := decided(self.neighborhood, smooth))):
                self.neighborhood = chosen

    def rounded_positions(self, data: Any, dtype: torch.dtype) -> Tensor:
        """Return the positions of data in a dtype, around the origin if the outputs do not depend on translations.

        Clouds far from the origin would lose the digits of their displacements. Outputs that are positions themselves
        depend on translations. See :meth:`lieattn.geometry.PointClouds.around_origin`.
        """
        check_floating("dtype", dtype)
        symmetry, kinds = self.symmetry, self.kind
        moves = "position" in (kinds.values() if isinstance(kinds, Mapping) else (kinds,))
        narrower = data.pos.itemsize > dtype.itemsize and not torch.compiler.is_compiling()
        if not narrower or moves or not symmetry.all_translations:
            return cast(Tensor, data.pos.to(dtype))
        seen = any(getattr(part, "sees_images", False) for part in self.modules())
        return point_clouds(data).around_origin(dtype, cast(Group, symmetry.group).dim, keep_images=seen)

    @property
    def guarantee(self) -> str:  # type: ignore[override]
        """The symmetry as a sentence."""
        return str(self.symmetry)

    @property
    def jumps(self) -> tuple[str, ...] | None:
        """Sentences about discontinuities of the outputs as points move, with advice; empty if there are none.

        None if they are not known, because a network within this module says nothing about them.
        """
        return ()

    @property
    def kind(self) -> Any:
        """Transformation of the outputs: ``"invariant"``, ``"vector"``, a :class:`lieattn.reps.Representation`, ..."""
        return "invariant"


class Wrapper(EquivariantModule):
    """Base class of modules around another one, ``wrapped``, that adopt what it states about inputs and outputs.

    The other one can be any network. Its attributes are those that :func:`lieattn.certify.certify` reads.
    """

    def __init__(self, wrapped: object) -> None:
        super().__init__()
        self._symmetry = Symmetry.stated_by(wrapped)
        self._inside = (wrapped,)  # a tuple, so that torch does not register the module under a second name
        for name in ("vector_inputs", "cloud_inputs", "sees_order"):
            setattr(self, name, getattr(wrapped, name, getattr(self, name)))
        self.field_inputs = dict(getattr(wrapped, "field_inputs", {}))
        self.has_kinks = kinks_of(wrapped)

    @property
    def wrapped(self) -> Any:
        """The other module."""
        return self._inside[0]

    @property
    def symmetry(self) -> Symmetry:
        return self._symmetry

    @property
    def guarantee(self) -> str:  # type: ignore[override]
        """The sentence of the network, or else its symmetry as a sentence."""
        return guarantee_of(self.wrapped) if self.symmetry is self._symmetry else super().guarantee

    @property
    def jumps(self) -> tuple[str, ...] | None:
        return jumps_of(self.wrapped)

    @property
    def kind(self) -> Any:
        """Kind of the outputs of the network."""
        return getattr(self.wrapped, "kind", "invariant")


def guarantee_of(network: object) -> str:
    """Return the sentence in which a network states its guarantee, or else its symmetry as a sentence."""
    stated = getattr(network, "guarantee", None)
    return stated if isinstance(stated, str) else str(Symmetry.stated_by(network))


class Network(EquivariantModule):
    """Base class of regular-representation models: a field over the frames of the points, and a head.

    Input vectors are named by ``vector_inputs``. Heads such as :class:`lieattn.nn.VectorHead` map the result of
    :meth:`field` to outputs of any field type, see :class:`FieldModel`.

    ``forward`` is geometry, field, head. Inputs are converted to the dtype of the weights. If the weights are in half
    precision (``network.bfloat16()``), layers compute as under autocast: geometry stays in float32, and outputs have
    the dtype of the weights.

    Attributes
    ----------
    head
        ``head(x, graph) -> outputs``.
    """

    head: nn.Module
    _has_other_head: bool = False

    @property
    def kind(self) -> Any:
        return getattr(getattr(self, "head", None), "kind", "invariant")

    @property
    def jumps(self) -> tuple[str, ...]:
        return (*jumps_of_neighbors(self.neighborhood), *jumps_of_frames(self.frames))

    def with_head(self, head: nn.Module) -> Self:
        """Return this network with another head. All other weights are shared, and this object does not change."""
        self.check_head(head)
        other = copy.copy(self)
        other._modules = {**self._modules, "head": head}
        other._has_other_head = True
        other.has_kinks = self.has_kinks or bool(getattr(head, "has_kinks", False))
        return other

    def checkpoint_activations(self, enabled: bool = True) -> Self:
        """Keep only the fields between the blocks in training, and recompute other activations in the backward pass.

        Gradients are the same, in less memory and about 4/3 of the time. Return the network itself. Training with
        weights in half precision raises RuntimeError; autocast works. In compiled networks this has no effect, since
        the compiler chooses the activations to keep.
        """
        check_arguments(Network.checkpoint_activations, locals())
        for module in self.modules():
            if isinstance(module, Network):
                module.recomputes = enabled
        return self

    def _through(self, block: Callable[..., T], *inputs: Any) -> T:
        """Return ``block(*inputs)``; its activations are recomputed in the backward pass if :attr:`recomputes`."""
        if self.recomputes and not torch.compiler.is_compiling():
            return recomputed(block, *inputs)
        return block(*inputs)

    def check_head(self, head: nn.Module) -> None:
        """Raise ValueError if the field does not determine the outputs of a head."""

    @abc.abstractmethod
    def field(self, data: Any, geometry: Any = None) -> GroupField:
        """Return the field after the last layer and its graph.

        Parameters
        ----------
        data
            torch_geometric ``Data`` or ``Batch``.
        geometry
            Result of ``geometry(data)`` for networks with this method; computed here if absent.
        """

    @in_precision_of_weights
    def forward(self, data: Any, geometry: Any = None) -> Any:
        """Return the outputs of the head, ``[clouds, *]`` or ``[points, *]``; arguments as in :meth:`field`."""
        x, graph = self.field(data, geometry)
        return self.head(x, graph)


class ImageNetwork(Network):
    """Base class of networks on images of equal size, ``[images, in_channels, *sides]``, or on their pixels as points.

    Groups of the plane act on images, groups of space on voxels. Pixels as points are read by
    :func:`lieattn.nn.grid_images`. ``limits`` are sentences about the limits of the symmetry, and ``stem_channels`` is
    the number of channels of the field to which vector inputs are added. A network with strided ``downsampling`` has
    no guaranteed symmetry if the group has elements that reverse rows, columns or layers.
    """

    limits: ClassVar[tuple[str, ...]] = ()
    downsampling: Downsampling = "pooled"
    has_kinks = True  # because of relu and maxima

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int | CloudInputs,
        out_channels: int,
        stem_channels: int,
        vector_inputs: VectorInputs = (),
    ) -> None:
        check_arguments(ImageNetwork.__init__, locals())
        super().__init__()
        check_counts(out_channels=out_channels)
        self.inputs, self.in_channels, self.cloud_inputs = read_inputs(in_channels)
        self.group, self.out_channels = group, out_channels
        self.vector_inputs, self.field_inputs = read_fields(vector_inputs, group.dim)
        check_domains(self.field_inputs, group)
        if "pos" in self.vector_inputs:
            raise ValueError(
                "vector_inputs: expected vectors at the pixels, got 'pos', which only networks on points see"
            )
        self.vectors = VectorEmbedding(vector_inputs, group.dim, stem_channels)

    @property
    def symmetry(self) -> Symmetry:
        """The group, acting about the centers of the images; the trivial group if strides break the symmetry."""
        group, notes = self.group, self.limits
        if self.downsampling == "strided" and _reverses_axes(group):
            notes = (f"strided downsampling of even sides breaks equivariance to {group.name}, use 'pooled'",)
            group = trivial(group.dim)
        return Symmetry(group, "images about their centers", translations=False, notes=notes)

    def tied_to(self) -> dict[str, str]:
        return {**super().tied_to(), "downsampling": self.downsampling}

    @in_precision_of_weights
    def field(self, data: Any, geometry: Any = None) -> GroupField:
        """Return the field after the last block, in raster order, and the lifted pixels; ``geometry`` is not used."""
        x, raster = self.last_field(data, self.embedded_vectors(data))
        return GroupField(x, raster.lift(self.group, 3, x.device))

    @abc.abstractmethod
    def last_field(self, images: Any, vectors: Tensor | None) -> tuple[Tensor, Raster]:
        """Return the field ``[points, order, channels]`` after the last block, and its raster.

        ``images`` are data as in :meth:`images`, and ``vectors`` the result of :meth:`embedded_vectors`.
        """

    def images(self, data: Any) -> Tensor:
        """Return the images ``[images, in_channels, *sides]`` in the dtype of the weights; ValueError for others."""
        images, dim = with_planes(grid_images(data), self.inputs, data), self.group.dim
        if images.ndim != 2 + dim or images.shape[1] != self.in_channels or not images.is_floating_point():
            got = f"{images.dtype} {tuple(images.shape)}"
            expected = f"floating images with {self.in_channels} channels and {dim} sides"
            raise ValueError(f"data: expected {expected}, got {got}")
        images = images.to(next(self.parameters()).dtype)
        check_features(images, next(self.parameters()), argument="data")
        check_size("data", images)
        return images

    def embedded_vectors(self, data: Any) -> Tensor | None:
        """Return the vector inputs on the raster, ``[images, stem_channels, order, *sides]``, or None without names."""
        if self.vectors.linear is None:
            return None
        if isinstance(data, Tensor):
            names = (*self.vector_inputs, *self.field_inputs)
            raise TypeError(f"data: expected a Batch with the vectors {names}, got images as a tensor")
        raster, order = Raster.read(point_clouds(data))
        embedded: Tensor = self.vectors(data, raster.lift(self.group, 1, order.device))
        return raster.unflatten(embedded[order]).movedim((-1, -2), (1, 2))


def _reverses_axes(group: FiniteGroup) -> bool:
    """Return whether an element moves the first pixel of an image, which strides sample."""
    first = torch.arange(2**group.dim, device="cpu").view(1, 1, *[2] * group.dim) == 0
    return any(not torch.equal(act_on_grid(group, h, first), first) for h in range(group.order))


@dataclass(frozen=True)
class PointOutputs:
    """Pooling of ``"invariant"`` or ``"vector"`` outputs of points over each cloud; none with ``pool="none"``."""

    kind: OutputKind = "invariant"
    pool: Pooling = "mean"

    def __post_init__(self) -> None:
        check_arguments(PointOutputs, vars(self))
        if self.kind == "vector" and self.pool == "max":
            raise ValueError("pool: expected 'mean', 'sum' or 'none', since the maximum of vectors is not equivariant")

    def __call__(self, values: Tensor, clouds: PointClouds) -> Tensor:
        """Pool ``[points, out_channels]`` or ``[points, out_channels, dim]``; a single vector loses its axis."""
        if self.kind == "vector" and values.shape[1] == 1:
            values = values[:, 0]
        return values if self.pool == "none" else getattr(clouds, self.pool)(values)


def cutoff_of(neighborhood: Neighborhood, cutoff: float | None, argument: str = "cutoff") -> float:
    """Return the distance at which neighbors have no influence: ``cutoff``, or the length of the neighborhood."""
    check_neighborhood(neighborhood)
    found = neighborhood.length if cutoff is None else cutoff
    if found is None:
        raise ValueError(f"{argument}: expected a distance, since {neighborhood} has no length of its own, got None")
    check_length(argument, found)
    return float(found)
