"""Group elements, the transformation of inputs and outputs, and moved clouds."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn._checks import check_arguments, check_tensor
from lieattn._values import attributes_of_points, select_points
from lieattn.geometry import Raster, pixel_positions, point_clouds
from lieattn.groups import (
    SO,
    FiniteGroup,
    Group,
    O,
    RotationDilations,
    SemidirectProduct,
    Translations,
    cyclic,
    cyclic_about,
    dihedral,
    dihedral_about,
    full_tetrahedral,
    icosahedral,
    linear_part,
    octahedral,
    pyritohedral,
    reflection,
    tetrahedral,
)
from lieattn.reps import Pseudovector, Representation

Kind = str | Representation | tuple[Any, ...]
"""``"invariant"``, ``"position"``, ``"vector"``, ``"pseudovector"``, ``"pseudoscalar"``, ``"tensor"`` (matrices
R T Rᵀ), ``"rotation"`` (det(R) R T), a :class:`lieattn.reps.Representation`, or a tuple of kinds whose components
are concatenated in the last axis."""

_KINDS = ("invariant", "position", "vector", "pseudovector", "pseudoscalar", "tensor", "rotation")
_NEAR = 1e-3  # size of the element near the identity, in radians
_SAME = 1e-6  # largest difference between equal matrices
_MOTIONS = 6  # number of motions from which one is drawn for each point of a scrambled cloud


# --- transformation of values ---------------------------------------------------------------------------------------


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


def transform(argument: str, kind: Kind, values: Tensor, linear: Tensor, shift: Tensor) -> Tensor:
    """Transform values ``[rows, *, components]`` float64 by the motion x ↦ A x + t, with one t ``[d]`` for each row.

    ValueError, which names ``argument``, is raised if the number of components is not that of the kind.
    """
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
        return rep.act(linear, values)
    turned = values @ linear.mT
    return turned + shift.view(len(shift), *[1] * (values.ndim - 2), -1) if kind == "position" else turned


def _components(kind: Kind, dim: int) -> int:
    """Return the number of components in the last axis. In a tuple, each invariant has one component."""
    if isinstance(kind, Representation):
        return kind.dim
    if isinstance(kind, tuple):
        return sum(_components(part, dim) for part in kind)
    return 1 if kind in ("invariant", "pseudoscalar") else dim


# --- elements ---------------------------------------------------------------------------------------------------


class Element(NamedTuple):
    """A motion x ↦ A x + t.

    ``translation`` is t. It is None if the group contains all translations, so that each cloud has a random one.
    """

    label: str
    linear: Tensor
    translation: Tensor | None


def elements_of(
    group: Group, count: int, generator: torch.Generator, *, translations: bool = True
) -> Iterator[Element]:
    """Yield all elements of a finite group, or ``count`` random elements of a Lie group, then special ones.

    ``translations`` is whether elements of a finite group are combined with translations. The special elements are
    those of the following that the group contains: one near the identity, a half turn, a reflection, the inversion.
    """
    if isinstance(group, SemidirectProduct) and isinstance(group.stabilizer, FiniteGroup):
        group = group.stabilizer
    finite = isinstance(group, FiniteGroup)
    free = translations if finite else isinstance(group, SemidirectProduct | Translations)
    fixed = None if free else torch.zeros(group.dim, dtype=torch.float64)
    if isinstance(group, FiniteGroup):
        yield from (Element(str(index), matrix, fixed) for index, matrix in enumerate(group.elements))
        return
    for number, g in enumerate(group.sample(count, generator=generator, dtype=torch.float64)):
        yield Element(f"random {number}", group.linear(g), None if free else group.translation(g))
    linear = linear_part(group)
    if not linear.is_affine:
        yield from (Element(label, matrix, fixed) for label, matrix in _special(linear, generator))


def _special(group: Group, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    direction = torch.randn(group.algebra_dim, generator=generator, dtype=torch.float64)
    direction = direction / direction.norm()
    try:
        yield "near identity", group.exp(_NEAR * direction)
    except NotImplementedError:
        return
    if not isinstance(group, SO | O | RotationDilations):
        return
    angle = torch.randn(SO(group.dim).algebra_dim, generator=generator, dtype=torch.float64)
    yield "half turn", SO(group.dim).exp(math.pi * angle / angle.norm())
    if isinstance(group, O):
        yield "reflection", _reflection(group.dim, generator)
        if group.dim == 3:
            yield "inversion", -torch.eye(3, dtype=torch.float64)


def outside_of(group: Group | None, dim: int, count: int, generator: torch.Generator) -> Iterator[Element]:
    """Yield random motions outside of a group, for comparison.

    These are rotations, of which the last one is replaced by a reflection if the group is finite and contains none. If
    the group contains all rotations, they are reflections; if it contains these too, there are none. For a finite group
    in the plane or in space, one element of each larger group of :func:`_larger` follows.
    """
    linear = linear_part(group)
    if isinstance(linear, O) or dim == 1:
        return
    zero = torch.zeros(dim, dtype=torch.float64)
    proper = isinstance(linear, FiniteGroup) and bool((torch.linalg.det(linear.elements) > 0).all())
    for number in range(count):
        if isinstance(linear, SO | RotationDilations) or (proper and number == count - 1 > 0):
            yield Element("random reflection", _reflection(dim, generator), zero)
        else:
            matrix, label = _rotation(dim, generator)
            yield Element(label, matrix, zero)
    if isinstance(linear, FiniteGroup) and count > 0:
        yield from (Element(label, matrix, zero) for label, matrix in _larger(linear))


def _larger(group: FiniteGroup) -> Iterator[tuple[str, Tensor]]:
    """Yield an element outside of a finite group for each of some larger groups that contain it.

    Random motions almost never belong to these larger groups. In the plane, they are C_2n, C_3n, and D_n and D_2n with
    a mirror on the x axis. In space, they are T, O, T_h, T_d, I, D_n and D_2n about the z axis, and the group extended
    by the inversion. For rotations about one axis, a rotation by half the smallest angle and one by 1 rad are added.
    Elements that the group makes of another one of these are not repeated.
    """
    n = int((torch.linalg.det(group.elements) > 0).sum())
    if group.dim == 2:
        known = [cyclic(2 * n), cyclic(3 * n), dihedral(n), dihedral(2 * n)]
    elif group.dim == 3:
        known = [tetrahedral(), octahedral(), pyritohedral(), full_tetrahedral(), icosahedral()]
        known += [dihedral_about(number) for number in sorted({n, 2 * n, max(1, n // 2)})]
        known.sort(key=lambda larger: larger.order)  # the element of a larger group is not one of its subgroups
    else:
        return
    named = list(_extended(group, n)) if group.dim == 3 else []
    tried = torch.cat([group.elements, *(group.elements @ matrix for _, matrix in named)])
    for larger in known:
        others = larger.elements[~are_among(larger.elements, tried, group.tolerance)]
        if len(others) > 0 and bool(are_among(group.elements, larger.elements, group.tolerance).all()):
            tried = torch.cat([tried, group.elements @ others[0]])
            yield f"of {larger.name}", others[0]
    yield from named


def _extended(group: FiniteGroup, n: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the inversion and rotations about the axis of ``n`` rotations in space, if they are outside of a group."""
    if not are_among(inversion := -torch.eye(3, dtype=torch.float64)[None], group.elements, group.tolerance).any():
        yield "inversion", inversion[0]
    # The projection onto the vectors that all rotations leave unchanged.
    fixed = group.elements[torch.linalg.det(group.elements) > 0].mean(dim=0)
    if n > 1 and float(fixed.trace()) > 0.5:
        axis = torch.linalg.eigh(fixed)[1][:, -1]
        yield f"of C{2 * n} about its axis", cyclic_about(2 * n, axis.tolist()).elements[1]
        yield "1 rad about its axis", SO(3).exp(axis)


def are_among(matrices: Tensor, others: Tensor, tolerance: float) -> Tensor:
    """Return a mask ``[n]`` of the matrices ``[n, dim, dim]`` that are among others, up to a tolerance or rounding."""
    return (matrices[:, None] - others).abs().amax(dim=(2, 3)).amin(dim=1) < max(_SAME, tolerance)


def _reflection(dim: int, generator: torch.Generator) -> Tensor:
    return reflection(dim, torch.randn(dim, generator=generator, dtype=torch.float64).tolist()).elements[1]


def _rotation(dim: int, generator: torch.Generator) -> tuple[Tensor, str]:
    """Return a rotation and its label: a sign in one dimension, and of the first three coordinates beyond three."""
    if dim == 1:
        return 2.0 * torch.randint(2, (1, 1), generator=generator).double() - 1, "random sign"
    matrix = SO(min(dim, 3)).sample(generator=generator, dtype=torch.float64)
    if dim == 2:
        return matrix, f"{math.degrees(float(SO(2).log(matrix))) % 360:.1f} degrees"
    return torch.block_diag(matrix, torch.eye(dim - 3, dtype=torch.float64)), "random rotation"


# --- moves ------------------------------------------------------------------------------------------------------


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
        if per_cloud or self.orders is None:
            return changed
        starts = (sizes.cumsum(0) - sizes).tolist()
        return changed[torch.cat([start + order for start, order in zip(starts, self.orders, strict=True)])]


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
    zero = torch.zeros(len(clouds), dim, dtype=torch.float64)
    return Move("permutation", "", promised, torch.eye(dim, dtype=torch.float64), zero, orders)


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
    zero = torch.zeros(len(clouds), dim, dtype=torch.float64)
    still = torch.eye(dim, dtype=torch.float64)
    return [Move("image", "", promised, still, zero, images=tuple(images), excepted=excepted)]


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
        linear, rows = factors[number] * _rotation(dim, generator)[0], (chosen == number).nonzero()[:, 0]
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
    """Return the pixels of images ``[images, channels, *sides]`` as points in raster order.

    ValueError is raised if they are not floating images.
    """
    if images.ndim not in (4, 5) or images.numel() == 0 or not images.is_floating_point():
        raise ValueError(
            f"data: expected floating images [images, channels, (layers,) rows, columns], got {images.dtype} "
            f"{tuple(images.shape)}"
        )
    pos, grid = pixel_positions(*images.shape[2:]), torch.tensor([images.shape[2:]])
    return [Data(x=x, pos=pos, grid=grid) for x in images.detach().cpu().flatten(2).mT]


def images_of_clouds(clouds: Sequence[Data]) -> Tensor:
    """Return the images ``[images, channels, *sides]`` of points in raster order."""
    return torch.stack([cloud.x.mT.unflatten(1, cloud.grid[0].tolist()) for cloud in clouds])


def sizes_of(clouds: Sequence[Data]) -> Tensor:
    """Return the number of points of each cloud, int64 ``[clouds]``."""
    return torch.tensor([int(cloud.num_nodes or 0) for cloud in clouds])


def point_indices(cloud: Data) -> Iterator[str]:
    """Yield the names of attributes that contain indices of points, such as ``edge_index``. Batches shift them."""
    for name, value in cloud.to_dict().items():
        if isinstance(value, Tensor) and is_whole(value) and "batch" not in name and name != "ptr":
            if (torch.as_tensor(cloud.__inc__(name, value)) == cloud.num_nodes).any():
                yield name


def is_whole(value: Tensor) -> bool:
    """Return whether a tensor has an integer dtype."""
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _relabel(cloud: Data, order: Tensor, names: Iterable[str]) -> None:
    """Replace indices of points by the new indices of the same points. Negative ones are kept."""
    places = order.argsort()
    for name in names:
        value = cloud[name]
        shifted = (torch.as_tensor(cloud.__inc__(name, value)) == len(order)).to(value.device)
        new = places.to(value.device)[value.long().clamp(0, max(len(order) - 1, 0))]
        cloud[name] = torch.where(shifted & (value >= 0), new.to(value.dtype), value)
