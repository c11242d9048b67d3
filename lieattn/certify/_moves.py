"""Motions of clouds with the outputs that are expected after them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments, check_tensor, is_whole
from lieattn._core.values import attributes_of_points, select_points
from lieattn.certify._elements import Element, are_among, random_rotation
from lieattn.geometry import Raster, pixel_positions, point_clouds
from lieattn.reps import Pseudovector, Representation

Kind = str | Representation | tuple[Any, ...]
"""``"invariant"``, ``"position"``, ``"vector"``, ``"pseudovector"``, ``"pseudoscalar"``, ``"tensor"`` (matrices
R T Rᵀ), ``"rotation"`` (det(R) R T), a :class:`lieattn.reps.Representation`, or a tuple of kinds whose components
are concatenated in the last axis."""

_KINDS = ("invariant", "position", "vector", "pseudovector", "pseudoscalar", "tensor", "rotation")


def check_kind(argument: str, kind: object) -> None:
    """Raise TypeError or ValueError, naming the argument, unless a value is a :data:`Kind`."""
    expected = f"expected one of {_KINDS}, a Representation or a tuple of those"
    if isinstance(kind, tuple):
        if not kind:
            raise ValueError(f"{argument}: expected kinds in the tuple, got none")
        for part in kind:
            check_kind(argument, part)
        if "tensor" in kind or "rotation" in kind:
            raise ValueError(f"{argument}: a tensor has two axes and cannot be combined with other kinds in a tuple")
    elif isinstance(kind, str) and kind not in _KINDS:
        raise ValueError(f"{argument}: {expected}, got {kind!r}")
    elif not isinstance(kind, str | Representation):
        raise TypeError(f"{argument}: {expected}, got {kind!r}")


def transform(
    argument: str,
    kind: Kind,
    values: Float[Tensor, "*rest components"],
    linear: Float[Tensor, "d d"],
    shift: Float[Tensor, "rows d"],
) -> Float[Tensor, "*rest components"]:
    """Transform values ``[rows, *, components]`` float64 by the motion x ↦ A x + t, with one t ``[d]`` for each row."""
    if kind == "invariant":
        return values
    if kind == "pseudoscalar":
        return values * torch.linalg.det(linear).sign()
    if kind in ("tensor", "rotation"):
        if values.ndim < 3 or values.shape[-2:] != linear.shape:
            size = f"{len(linear)}, {len(linear)}"
            raise ValueError(f"{argument}: expected tensors [rows, *, {size}], got {tuple(values.shape)}")
        return linear @ values @ linear.mT if kind == "tensor" else torch.linalg.det(linear).sign() * linear @ values
    components = _components(kind, len(linear))
    if values.ndim < 2 or values.shape[-1] != components:
        raise ValueError(
            f"{argument}: expected {components} components in the last axis for kind {kind}, got {tuple(values.shape)}"
        )
    if isinstance(kind, tuple):
        parts = values.split([_components(part, len(linear)) for part in kind], dim=-1)
        moved = [transform(argument, one, part, linear, shift) for one, part in zip(kind, parts, strict=True)]
        return torch.cat(moved, dim=-1)
    rep = Pseudovector() if kind == "pseudovector" else kind
    if isinstance(rep, Representation):
        rep.check_domain(argument, linear)
        return rep.act(linear, values)
    turned = values @ linear.mT
    return turned + shift.view(len(shift), *[1] * (values.ndim - 2), -1) if kind == "position" else turned


def is_defined(kind: Kind, linear: Tensor) -> bool:
    """Return whether a motion with this linear part acts on values of a kind; a group may permute channels alone."""
    if isinstance(kind, tuple):
        return all(is_defined(part, linear) for part in kind)
    group = kind.domain if isinstance(kind, Representation) else None
    return group is None or bool(are_among(linear[None], group.elements, group.tolerance).all())


def _components(kind: Kind, dim: int) -> int:
    """Return the number of components in the last axis. In a tuple, each invariant has one component."""
    if isinstance(kind, Representation):
        return kind.dim
    if isinstance(kind, tuple):
        return sum(_components(part, dim) for part in kind)
    return 1 if kind in ("invariant", "pseudoscalar") else dim


# --- clouds -------------------------------------------------------------------------------------------------------


_MOTIONS = 6  # number of motions from which one is drawn for each point of a scrambled cloud


def moved(cloud: Data, linear: Tensor, shift: Tensor | None = None, kinds: Mapping[str, Kind] | None = None) -> Data:
    """Return a copy of a cloud after the motion x ↦ A x + t.

    A is float64 ``[dim, dim]``; t is float64 ``[dim]`` and defaults to 0. ``kinds`` has the :data:`Kind` of the
    attributes that are transformed, by default ``{"pos": "position"}``. Transformed attributes are float64.
    """
    check_arguments(moved, locals())
    check_tensor("linear", linear, "a float64 matrix [dim, dim]", torch.float64)
    if linear.ndim != 2 or len(linear) != linear.shape[1]:
        raise ValueError(f"linear: expected a matrix [dim, dim], got {tuple(linear.shape)}")
    other = copy.copy(cloud)
    shift = linear.new_zeros(len(linear)) if shift is None else shift
    for name, kind in ({"pos": "position"} if kinds is None else kinds).items():
        if cloud.get(name) is not None:
            value = cloud[name].detach().cpu().double()
            other[name] = transform(f"data.{name}", kind, value, linear, shift.expand(len(value), -1))
    return other


def shifted(cloud: Data, shifts: Tensor) -> Data:
    """Return a cloud in float64 with its points shifted by ``[points, dim]``, or all of them by ``[dim]``."""
    other = copy.copy(cloud)
    other.pos = cloud.pos.detach().cpu().double()
    other.pos = other.pos + torch.nn.functional.pad(shifts, (0, other.pos.shape[1] - shifts.shape[-1]))
    return other


def center_and_extent(cloud: Data, dim: int) -> tuple[Tensor, float]:
    """Return the mean of the positions, float64 ``[dim]``, and the largest distance from there."""
    pos = cloud.pos.detach().cpu().double()[:, :dim]
    center = pos.mean(dim=0)
    return center, float((pos - center).norm(dim=1).max())


def scrambled(cloud: Data, kind: Kind, dim: int, *, centered: bool, scaled: bool, generator: torch.Generator) -> Data:
    """Return a cloud in which each point is moved by a random motion, or an image with permuted pixels.

    Positions, of this ``kind``, are rotated about their mean if ``centered``, otherwise about the origin. Distances
    from there change if ``scaled``; otherwise, points of a sphere remain on it.
    """
    other = copy.copy(cloud)
    if cloud.get("grid") is not None:
        order = torch.randperm(int(cloud.num_nodes or 0), generator=generator)
        select_points(other, order, [name for name in attributes_of_points(cloud) if name != "pos"])
        return other
    pos = cloud.pos.detach().cpu().double()
    center = pos[:, :dim].mean(dim=0) if centered else pos.new_zeros(dim)
    factors = 0.5 + torch.rand(_MOTIONS, generator=generator, dtype=torch.float64) if scaled else pos.new_ones(_MOTIONS)
    chosen = torch.randperm(len(pos), generator=generator) % _MOTIONS
    other.pos = pos.clone()
    for number in chosen.unique().tolist():
        linear, rows = factors[number] * random_rotation(dim, generator)[0], (chosen == number).nonzero()[:, 0]
        shift = (center - linear @ center).expand(len(rows), -1)
        other.pos[rows] = transform("data.pos", kind, pos[rows], linear, shift)
    return other


def degenerate(cloud: Data, dim: int, *, centered: bool) -> dict[str, Data]:
    """Return clouds, by name, with the attributes of a cloud, in which frames, directions or logarithms are undefined.

    If the cloud is not ``centered``, such as points of a sphere, only its own positions are used.
    """
    pos = cloud.pos.detach().cpu().double()
    found = {"one point": _with_points(cloud, pos[:1]), "two points": _with_points(cloud, pos[:2])}
    found["coincident points"] = _with_points(cloud, pos[:1].expand_as(pos))
    if not centered:
        return found
    # Further components, if there are any, are directions.
    center, extent = center_and_extent(cloud, dim)
    extent = extent or 1.0
    along = torch.linspace(1, 2, dim, dtype=torch.float64)
    steps = torch.linspace(-extent, extent, len(pos), dtype=torch.float64)[:, None]
    shapes = {"points on a line": center + steps * along / along.norm()}
    if len(pos) >= 2 * dim:
        axes = extent * torch.eye(dim, dtype=torch.float64)
        shapes["square" if dim == 2 else "octahedron"] = center + torch.cat([axes, -axes])
    for name, places in shapes.items():
        found[name] = _with_points(cloud, torch.cat([places, pos[: len(places), dim:]], dim=1))
    return found


def _with_points(cloud: Data, pos: Tensor) -> Data:
    """Return the first points of a cloud at other positions."""
    other = copy.copy(cloud)
    for name in attributes_of_points(cloud):
        other[name] = cloud[name][: len(pos)]
    other.pos = pos.clone()
    return other


def clouds_of_images(images: Tensor) -> list[Data]:
    """Return the pixels of images ``[images, channels, *sides]`` as points in raster order."""
    if images.ndim not in (4, 5) or images.numel() == 0 or not images.is_floating_point():
        raise ValueError(
            f"data: expected floating images [images, channels, (layers,) rows, columns], got {images.dtype} "
            f"{tuple(images.shape)}"
        )
    pos, grid = pixel_positions(*images.shape[2:]), torch.tensor([images.shape[2:]])
    return [Data(x=x, pos=pos, grid=grid) for x in images.detach().cpu().flatten(2).mT]


def images_of_clouds(clouds: Sequence[Data]) -> Float[Tensor, "images channels *sides"]:
    """Return the images ``[images, channels, *sides]`` of points in raster order."""
    return torch.stack([cloud.x.mT.unflatten(1, cloud.grid[0].tolist()) for cloud in clouds])


def sizes_of(clouds: Sequence[Data]) -> Int[Tensor, " clouds"]:
    """Return the number of points of each cloud, int64 ``[clouds]``."""
    return torch.tensor([int(cloud.num_nodes or 0) for cloud in clouds])


def point_indices(cloud: Data) -> Iterator[str]:
    """Yield the names of attributes that contain indices of points, such as ``edge_index``. Batches shift them."""
    for name, value in cloud.to_dict().items():
        if isinstance(value, Tensor) and is_whole(value) and "batch" not in name and name != "ptr":
            if (torch.as_tensor(cloud.__inc__(name, value)) == cloud.num_nodes).any():
                yield name


# --- moves --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Move:
    """A motion of all clouds, with a translation for each cloud, which may also reorder the points.

    Attributes
    ----------
    check, label
        The check that the move belongs to, as in :class:`Row`, and the name of the motion.
    promised
        Whether equivariance is promised; otherwise the error is for comparison only.
    linear, shifts
        ``[dim, dim]`` float64, the same for all clouds, and ``[clouds, dim]`` float64, the translation of each cloud.
    orders, grids
        The new order of the points and the new sides of the raster of each cloud, or None if these do not change.
    images
        Vectors of the lattice ``[points, dim]`` float64 of each cloud, by which its points are shifted before the
        motion, or None if they are not.
    excepted
        Names of outputs for which equivariance is not promised.
    """

    check: str
    label: str
    promised: bool
    linear: Tensor
    shifts: Tensor
    orders: tuple[Tensor, ...] | None = None
    grids: tuple[tuple[int, ...], ...] | None = None
    images: tuple[Tensor, ...] | None = None
    excepted: frozenset[str] = frozenset()

    def apply(self, clouds: Sequence[Data], kinds: Mapping[str, Kind]) -> list[Data]:
        """Return moved clouds in float64. The attributes in ``kinds`` are transformed too."""
        if self.images is not None:
            clouds = [shifted(cloud, image) for cloud, image in zip(clouds, self.images, strict=True)]
        changed = [moved(cloud, self.linear, shift, kinds) for cloud, shift in zip(clouds, self.shifts, strict=True)]
        for cloud, order in zip(changed, self.orders or (), strict=False):
            indices = list(point_indices(cloud))  # found before any attribute changes
            select_points(cloud, order, attributes_of_points(cloud))
            _relabel(cloud, order, indices)
        for cloud, grid in zip(changed, self.grids or (), strict=False):
            cloud.grid = cloud.grid.new_tensor([grid])
        return changed

    def expected(self, name: str, kind: Kind, values: Tensor, sizes: Tensor) -> Tensor:
        """Return the expected outputs ``[clouds, *]`` or ``[points, *]`` float64 after the move."""
        per_cloud = len(values) == len(sizes)
        shift = self.shifts if per_cloud else self.shifts.repeat_interleave(sizes, dim=0)
        if self.images is not None and len(values) == int(sizes.sum()):  # also for clouds of one point
            shift = shift + torch.cat(self.images) @ self.linear.mT
        changed = transform(f"outputs {name}".rstrip(), kind, values, self.linear, shift)
        order = None if per_cloud else self.order(sizes)
        return changed if order is None else changed[order]

    def order(self, sizes: Tensor) -> Tensor | None:
        """Return the former index of the point at each place, int64 ``[points]``, or None if no point is reordered."""
        if self.orders is None:
            return None
        starts = (sizes.cumsum(0) - sizes).tolist()
        return torch.cat([start + order for start, order in zip(starts, self.orders, strict=True)])


def relative_error(found: Tensor | None, expected: Tensor, reference: Tensor) -> float:
    """Return the largest error relative to the largest output (or 1); infinity for NaN and for another shape."""
    if found is None or found.shape != expected.shape:
        return math.inf
    return float((found - expected).abs().nan_to_num(math.inf).max()) / max(1.0, float(reference.abs().max()))


def still(check: str, clouds: Sequence[Data], dim: int) -> Move:
    """Return a move that changes nothing, but is made into another one."""
    zero = torch.zeros(len(clouds), dim, dtype=torch.float64)
    return Move(check, "", True, torch.eye(dim, dtype=torch.float64), zero)


def motion(check: str, element: Element, clouds: Sequence[Data], promised: bool, generator: torch.Generator) -> Move:
    """Return the move of all clouds by an element. Random translations have about the size of the cloud."""
    dim = len(element.linear)
    if element.translation is not None:
        return Move(check, element.label, promised, element.linear, element.translation.expand(len(clouds), -1))
    shifts = []
    for cloud in clouds:
        extent = center_and_extent(cloud, dim)[1] or 1.0
        shifts.append(extent * torch.randn(dim, generator=generator, dtype=torch.float64))
    return Move(check, element.label, promised, element.linear, torch.stack(shifts))


def permutation(clouds: Sequence[Data], dim: int, promised: bool, generator: torch.Generator) -> Move:
    """Return a move that puts the points of each cloud in a random order."""
    orders = tuple(torch.randperm(int(cloud.num_nodes or 0), generator=generator) for cloud in clouds)
    return replace(still("permutation", clouds, dim), promised=promised, orders=orders)


def other_images(
    clouds: Sequence[Data],
    dim: int,
    promised: bool,
    generator: torch.Generator,
    excepted: frozenset[str] = frozenset(),
) -> list[Move]:
    """Return a move of each point to a random periodic image, or no move without periodic clouds, or with given edges.

    Given edges would have to connect other images after the move, but which ones is up to the network. Nothing is
    promised for the outputs in ``excepted``.
    """
    if all(cloud.get("cell") is None for cloud in clouds) or any(list(point_indices(cloud)) for cloud in clouds):
        return []
    images = []
    for cloud in clouds:
        read = point_clouds(cloud.pos.double()[:, :dim], cell=cloud.get("cell"), pbc=cloud.get("pbc"))
        steps = torch.randint(-1, 2, read.pos.shape, generator=generator).double()
        if read.cell is None or read.pbc is None:  # the cloud is not periodic
            images.append(torch.zeros_like(steps))
        else:
            images.append((steps * read.pbc[0].cpu()) @ read.cell[0].detach().cpu().double())
    if not any(bool(image.any()) for image in images):
        return []
    return [replace(still("image", clouds, dim), promised=promised, images=tuple(images), excepted=excepted)]


def raster_motion(check: str, move: Move, clouds: Sequence[Data]) -> Move | None:
    """Return the same motion with the pixels in raster order, or None if some image is not on an upright lattice then.

    A network that uses the places of the pixels in the raster instead of coordinates thus gets a moved image.
    """
    try:
        read = [Raster.read(point_clouds(moved(cloud, move.linear))) for cloud in clouds]
    except ValueError:
        return None
    grids = tuple(raster.sides for raster, _ in read)
    return replace(move, check=check, orders=tuple(order for _, order in read), grids=grids)


def _relabel(cloud: Data, order: Tensor, names: Iterable[str]) -> None:
    """Replace indices of points by the new indices of the same points. Negative ones are kept."""
    places = order.argsort()
    for name in names:
        value = cloud[name]
        shifted = (torch.as_tensor(cloud.__inc__(name, value)) == len(order)).to(value.device)
        new = places.to(value.device)[value.long().clamp(0, max(len(order) - 1, 0))]
        cloud[name] = torch.where(shifted & (value >= 0), new.to(value.dtype), value)
