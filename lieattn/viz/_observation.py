"""What a microscope observes of a network."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments, check_counts, check_index
from lieattn.certify import moved, where_outside
from lieattn.geometry import PointClouds, point_clouds
from lieattn.groups import SO, FiniteGroup, linear_part
from lieattn.io import uncompiled
from lieattn.models import LieTransformer, Symmetry
from lieattn.spaces import Sphere
from lieattn.viz._draw import Scene, camera_of, in_words
from lieattn.viz._recording import Attention, Field, Recorder, Recording, pulled_back, rolled_out

_Layer = TypeVar("_Layer", Attention, Field)
_SAME = 1e-6  # difference of entries up to which a rotation is an element of the group


class Turn(NamedTuple):
    """A linear map of points ``[dim, dim]`` float64 with its description.

    ``outside`` is empty for an element of the group of the network, otherwise such as ``"element of C16, outside of
    C8"``.
    """

    label: str
    matrix: Tensor
    outside: str = ""

    @property
    def inside(self) -> bool:
        """Whether the map is in the group of the network."""
        return not self.outside


class Observation:
    """A recorded forward pass, and those of the transformed clouds, which are computed on first use.

    Arguments are those of :class:`Microscope`.
    """

    def __init__(
        self,
        network: nn.Module,
        data: Data,
        *,
        turns: int | Sequence[float] = 12,
        seed: int = 0,
        classes: Sequence[str] = (),
    ) -> None:
        check_arguments(Observation.__init__, locals())
        if isinstance(turns, int):
            check_counts(turns=turns)
        elif not all(math.isfinite(angle) for angle in turns):
            raise ValueError(f"turns: expected finite angles in radians, got {turns!r}")
        clouds = point_clouds(data)
        if clouds.num_clouds != 1 or clouds.num_points == 0:
            raise ValueError(f"data: expected one cloud with points, got {clouds}")
        self.classes = classes
        self.data, self.guarantee = data, getattr(network, "guarantee", "the network states no guarantee")
        network = copy.deepcopy(uncompiled(network)).cpu().eval()
        for module in network.modules():
            if isinstance(module, LieTransformer):  # without pieces the results are the same
                module.lifting = replace(module.lifting, piece=None)
        self._recorder = Recorder(network)
        self.name = type(self._recorder.inner).__name__
        self.recording = self._recorder(data)
        if not self.recording.fields and not self.recording.attention:
            raise ValueError(
                f"network: expected a layer with values at the {clouds.num_points} points, got none in {self.name}"
            )
        self._kinds: Any = {"pos": "position", "cell": "vector"}
        self._kinds |= dict.fromkeys(getattr(network, "vector_inputs", ()), "vector")
        self._kinds |= getattr(network, "field_inputs", {})
        self.turns = _turns(Symmetry.stated_by(network), clouds.pos.shape[1], turns, seed)

    @property
    def input(self) -> tuple[PointClouds, Tensor]:
        """The given cloud, and the mean of its features or its nuclear charges, ``[points]`` float64."""
        clouds, x = point_clouds(self.data), self.data.get("x", self.data.get("z"))
        features = clouds.pos.new_ones(clouds.num_points) if x is None else x
        flat = features.detach().cpu().double().reshape(clouds.num_points, -1).mean(dim=1)
        pos, grid = clouds.pos.detach().cpu().double(), None if clouds.grid is None else clouds.grid.cpu()
        return PointClouds(pos=pos, batch=clouds.batch.cpu(), num_clouds=1, grid=grid), flat

    @property
    def sphere(self) -> bool:
        """Whether the points are on a sphere."""
        return isinstance(getattr(self._recorder.inner, "space", None), Sphere)

    def class_name(self, label: Tensor) -> str:
        """Name a class, by its number if it has no name."""
        number = int(label)
        return self.classes[number] if 0 <= number < len(self.classes) else f"class {number}"

    def scene(self, clouds: PointClouds) -> Scene:
        """Return the scene in which the points of a layer are drawn."""
        return Scene.of(self.data, clouds, sphere=self.sphere)

    def attention_layer(self, layer: int) -> Attention:
        """Return the layer of attention with this number; raise ValueError if there is none."""
        if not self.recording.attention:
            gates = any(field.name.endswith("gate") for field in self.recording.fields)
            more = "its gates are among the fields" if gates else "it has fields"
            raise ValueError(
                f"network: expected attention between points, got {self.name} without it; {more}: use view 'field'"
            )
        return _chosen(self.recording.attention, layer)

    def field_layer(self, layer: int) -> Field:
        """Return the field with this number; raise ValueError if there is none."""
        if not self.recording.fields:
            raise ValueError(
                f"network: expected a layer with a field as output, got none in {self.name}; use view 'attention'"
            )
        return _chosen(self.recording.fields, layer)

    def query(self, found: Attention, point: int | None, frame: int | None) -> int:
        """Return the index of the query of a layer: ``point``, if given, or a default.

        The default is the point nearest to the center or, on a sphere, nearest to the viewer. ValueError is raised if
        the point or the frame does not exist.
        """
        pos = found.places.pos
        check_index("point", point, len(pos))
        check_index("frame", frame, found.places.fiber)
        if point is not None:
            return point
        eye = camera_of(self.data.pos)[2] if self.sphere else pos.mean(dim=0)
        return int((pos - eye).norm(dim=1).argmin())

    @property
    def attention_layers(self) -> tuple[str, ...]:
        """Names of the layers of attention; empty if there are none."""
        return tuple(layer.name for layer in self.recording.attention)

    @property
    def field_layers(self) -> tuple[str, ...]:
        """Names of the layers that have a field as output."""
        return tuple(layer.name for layer in self.recording.fields)

    def attention(
        self, point: int | None = None, *, frame: int | None = None, head: int | None = None, layer: int = -1
    ) -> Float[Tensor, "points keys"]:
        """Return the weights ``[points, keys]`` float64 with which a query attends to the frames of each point.

        Parameters
        ----------
        point
            Index of the query among the points of the layer. Default: the point nearest to the center of the cloud or,
            on a sphere, nearest to the viewer.
        frame, head
            Indices of the frame of the query and of the attention head. Default: the mean over all of them.
        layer
            Number of the layer in :attr:`attention_layers`.

        Returns
        -------
        Tensor
            The weights as the layer computes them. After a softmax they sum to 1, or to less if the query also attends
            to the zeros outside of an image. The shape is ``[points, 1]`` if all frames of a key point share one
            weight. GSA-Nets sum over the frames of the query; for them the weights are the mean over these frames.
        """
        check_arguments(Observation.attention, locals())
        found = self.attention_layer(layer)
        check_index("head", head, found.heads)
        return found.of_query(self.query(found, point, frame), frame, head)

    def rollout(
        self, point: int | None = None, *, frame: int | None = None, layer: int = -1
    ) -> Float[Tensor, "points keys"]:
        """Return the attention of a query that is rolled out from a layer to the input, ``[points, keys]`` float64.

        Points and keys are those of the first layer of attention. The matrices of all layers up to this one are
        multiplied. Each is the mean over the heads of a layer, averaged with the identity, which represents the
        residual connection: see docs/microscope.md. Arguments and errors are those of :meth:`attention`; ValueError is
        also raised if weights are negative.
        """
        check_arguments(Observation.rollout, locals())
        found, layers = self.attention_layer(layer), self.recording.attention
        point, fiber = self.query(found, point, frame), found.places.fiber
        flow = torch.zeros(1, len(found.places.pos), fiber, dtype=torch.float64)
        flow[0, point, slice(None) if frame is None else frame] = 1 / fiber if frame is None else 1
        return rolled_out(layers[: layer % len(layers) + 1], flow)[0]

    def fields(self, layer: int = -1) -> Float[Tensor, "turns points fiber channels"]:
        """Return the fields of the transformed clouds, ``[turns, points, fiber, channels]`` float64.

        The points are in the same order for all clouds.
        """
        check_arguments(Observation.fields, locals())
        return self._raw_and_stable(layer)[0]

    def stabilized(self, layer: int = -1) -> Float[Tensor, "turns points fiber channels"]:
        """Return the fields of the transformed clouds, pulled back by the map u: (u⁻¹ f_u)(g) = f_u(u g).

        The shape is ``[turns, points, fiber, channels]``. If the network is equivariant, the values are the same for
        all maps, up to rounding. It is not known how the channels of modules of other libraries transform; their fields
        are norms over the channels, ``[turns, points, 1, 1]``.
        """
        check_arguments(Observation.stabilized, locals())
        return self._raw_and_stable(layer)[1]

    def deviation(self, layer: int = -1) -> float:
        """Return the equivariance error: the largest difference of a stabilized field to that of the given cloud."""
        stable = self.stabilized(layer)
        return float((stable - stable[0]).abs().max())

    def _raw_and_stable(self, layer: int) -> tuple[Tensor, Tensor]:
        before = self.field_layer(layer)
        number = layer % len(self.recording.fields)
        raw, stable = [before.x], [before.x]
        for turn, recording in zip(self.turns[1:], self._turned, strict=True):
            found = pulled_back(before, recording.fields[number], turn.matrix)
            if found is None:
                raise ValueError(
                    f"data: expected points of {before.name} that move with the cloud, got others for the cloud "
                    f"{turn.label}"
                )
            raw.append(found[0])
            stable.append(found[1])
        return torch.stack(raw), torch.stack(stable)

    @cached_property
    def _turned(self) -> list[Recording]:
        found = []
        for turn in self.turns[1:]:
            data = moved(self.data, turn.matrix, kinds=self._kinds)
            for name in self._kinds:
                if data.get(name) is not None:
                    data[name] = data[name].to(self.data[name])
            found.append(self._recorder(data))
        return found


def _chosen(layers: Sequence[_Layer], layer: int) -> _Layer:
    if not -len(layers) <= layer < len(layers):
        names = ", ".join(f"{number} ({found.name})" for number, found in enumerate(layers))
        raise ValueError(f"layer: expected one of {names}, or -{len(layers)} to -1, got {layer}")
    return layers[layer]


def _turns(symmetry: Symmetry, dim: int, turns: int | Sequence[float], seed: int) -> tuple[Turn, ...]:
    """Return rotations by the angles or, for a number, elements of the group that a network states.

    If it states no finite group, the angles are equal. The identity comes first.
    """
    group = linear_part(symmetry.group)
    identity = Turn("unchanged", torch.eye(dim, dtype=torch.float64))
    finite = group.elements if isinstance(group, FiniteGroup) and group.dim == dim else identity.matrix[None]
    if isinstance(turns, int) and len(finite) > 1:
        elements = [matrix for matrix in finite if not torch.allclose(matrix, identity.matrix)]
        return (identity, *(Turn(in_words(matrix), matrix) for matrix in elements[: turns - 1]))
    if dim not in (2, 3):
        return (identity,)
    axis = torch.randn(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    along = axis.new_ones(1) if dim == 2 else axis / axis.norm()
    angles = [2 * math.pi * number / turns for number in range(1, turns)] if isinstance(turns, int) else turns
    found = [identity]
    for angle in angles:
        matrix = SO(dim).exp(float(angle) * along)
        inside = group is not None and group.has_rotations and group.dim == dim
        near = (finite - matrix).abs().amax(dim=(1, 2))
        if float(near.min()) < _SAME:  # matrices of the group are exact
            matrix, inside = finite[near.argmin()], True
        if not torch.equal(matrix, identity.matrix):
            outside = "" if inside else where_outside(matrix, group)
            found.append(Turn(f"rotated by {math.degrees(angle):.4g}°", matrix, outside))
    return tuple(found)
