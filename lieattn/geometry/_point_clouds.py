"""Batches of point clouds, in whatever form they come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lieattn._checks import check_tensor
from lieattn.geometry._clouds import Movable, as_coordinates, check_grid, cloud_index, first_true

_FLAT = 1e-8  # a cell is refused as flat if its volume, relative to the product of its edges, is smaller


@dataclass(frozen=True, eq=False, kw_only=True)
class PointClouds(Movable):
    """Points of several clouds, of which some may be empty. Make one with :func:`point_clouds`.

    Attributes
    ----------
    pos, batch
        ``[points, dim]`` floating coordinates, and ``[points]`` int64, the cloud of each point, in any order.
    grid
        ``[clouds, 2]`` int64 height and width if the clouds are images in raster order, else None.
    cell, pbc
        ``[clouds, dim, dim]`` floating, whose rows are the vectors by which each cloud repeats, and ``[clouds, dim]``
        bool, along which of them it does; both None if the clouds do not repeat.
    """

    pos: Tensor
    batch: Tensor
    num_clouds: int
    grid: Tensor | None = None
    cell: Tensor | None = None
    pbc: Tensor | None = None

    @property
    def num_points(self) -> int:
        """Number of points of all clouds."""
        return self.pos.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.pos.device

    @property
    def counts(self) -> Tensor:
        """``[clouds]`` int64, the number of points of each cloud."""
        return torch.bincount(self.batch, minlength=self.num_clouds)

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the points of each cloud, ``[points, *]`` to ``[clouds, *]``; zero for an empty one."""
        self._check_rows(x)
        return x.new_zeros(self.num_clouds, *x.shape[1:]).index_add(0, self.batch, x)

    def mean(self, x: Tensor) -> Tensor:
        """Mean over the points of each cloud, ``[points, *]`` to ``[clouds, *]``; zero for an empty one."""
        return self.sum(x) / self.counts.clamp(min=1).to(x.dtype).view(-1, *[1] * (x.ndim - 1))

    def max(self, x: Tensor) -> Tensor:
        """Maximum over the points of each cloud, ``[points, *]`` to ``[clouds, *]``; zero for an empty one."""
        self._check_rows(x)
        index = self.batch.view(-1, *[1] * (x.ndim - 1)).expand_as(x)
        empty = x.new_zeros(self.num_clouds, *x.shape[1:])
        return empty.scatter_reduce(0, index, x, "amax", include_self=False)

    def _check_rows(self, x: Tensor) -> None:
        if len(x) != self.num_points:
            raise ValueError(f"x: expected one row for each of {self.num_points} points, got {tuple(x.shape)}")


def point_clouds(
    points: Any,
    *,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    mask: Tensor | None = None,
    grid: Tensor | None = None,
    cell: Tensor | None = None,
    pbc: Tensor | None = None,
) -> PointClouds:
    """Read point clouds from tensors or a torch_geometric object.

    TypeError or ValueError is raised if shapes, dtypes, devices or batch indices do not fit, or a coordinate is not
    finite.

    Parameters
    ----------
    points
        Coordinates ``[points, dim]``; or padded ones ``[clouds, N, dim]``, with a ``mask`` if some are padding;
        or a torch_geometric ``Data`` or ``Batch`` with ``pos`` and, where they are there, ``batch``, ``ptr``,
        ``grid``, ``cell`` and ``pbc``; or :class:`PointClouds`, which are returned as they are.
    batch, ptr
        Cloud of each point ``[points]``, or first point of each cloud ``[clouds + 1]``; one cloud if absent.
    mask
        ``[clouds, N]`` bool, which padded points are there. Lay out features likewise with :func:`flatten`.
    grid
        ``[clouds, 2]`` int64 heights and widths if the clouds are images in raster order.
    cell
        Vectors by which each cloud repeats, the rows of ``[clouds, dim, dim]``, or of ``[dim, dim]`` for all clouds.
    pbc
        Along which of them a cloud repeats, bool ``[clouds, dim]`` or ``[dim]``; along all if absent. Vectors along
        which it does not are ignored and may be zero.
    """
    if isinstance(points, PointClouds):
        if any(given is not None for given in (batch, ptr, mask, grid, cell, pbc)):
            raise ValueError("batch, ptr, mask, grid, cell, pbc: PointClouds have their clouds already; leave them out")
        return points
    if not isinstance(points, Tensor):
        given = {"batch": batch, "ptr": ptr, "grid": grid, "cell": cell, "pbc": pbc}
        points, batch, ptr, grid, cell, pbc = _read(points, given)
    if points.ndim == 3:
        if mask is None:
            mask = torch.ones(points.shape[:2], dtype=torch.bool, device=points.device)
        if batch is not None or ptr is not None:
            raise ValueError("batch, ptr: padded points [clouds, N, dim] have their clouds already; leave both out")
        _check_mask(mask, points.device, points.shape[:2])
        counts = mask.sum(dim=1)
        ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        points = points[mask]
    elif mask is not None:
        raise ValueError(f"mask: needs padded points [clouds, N, dim], got points of shape {tuple(points.shape)}")
    as_coordinates(points)
    cloud, num_clouds = cloud_index(points, batch, ptr)
    if grid is not None:
        _check_grid(grid, cloud, num_clouds)
    cell, pbc = lattices(cell, pbc, num_clouds, points)
    return PointClouds(pos=points, batch=cloud, num_clouds=num_clouds, grid=grid, cell=cell, pbc=pbc)


def _read(data: Any, given: dict[str, Tensor | None]) -> tuple[Any, ...]:
    """Points of a torch_geometric object, and its attributes where they are not given."""
    pos = getattr(data, "pos", None)
    if pos is None:
        expected = "expected a tensor, or a torch_geometric Data or Batch with pos"
        raise TypeError(f"points: {expected}, got {type(data).__name__}")
    return pos, *(getattr(data, name, None) if value is None else value for name, value in given.items())


def lattices(
    cell: Tensor | None, pbc: Tensor | None, num_clouds: int, points: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Check lattices, see :func:`point_clouds`, and give every cloud its own.

    Returns ``[clouds, dim, dim]`` in the dtype given, and ``[clouds, dim]``; both None if nothing repeats. TypeError or
    ValueError is raised for wrong dtypes, shapes or devices, or vectors that are not finite or span no volume (in the
    directions in which the cloud repeats).
    """
    if cell is None:
        if pbc is not None and (not isinstance(pbc, Tensor) or bool(pbc.any())):
            raise ValueError("pbc: says that clouds repeat, but there is no cell")
        return None, None
    cell, pbc = _checked_lattices(cell, pbc, num_clouds, points)
    if not pbc.any():
        return None, None
    used = torch.where(pbc[..., None], cell.detach().double(), 0.0)
    infinite = ~torch.isfinite(used).flatten(1).all(-1)
    if infinite.any():
        raise ValueError(f"cell: expected finite vectors, got {cell[first_true(infinite)].tolist()}")
    lengths = torch.linalg.vector_norm(used, dim=-1)
    units = used / torch.where(lengths == 0, 1.0, lengths)[..., None]
    # The squared volume that the unit vectors span, with 1 in place of those that are not used.
    gram = units @ units.mT + torch.diag_embed((~pbc).double())
    flat = torch.linalg.det(gram) < _FLAT**2
    if flat.any():
        i = first_true(flat)
        got = f"got the cell {cell[i].tolist()} of cloud {i}, whose volume is zero"
        raise ValueError(f"cell: expected vectors that span a volume along pbc={pbc[i].tolist()}, {got}")
    return cell, pbc


def _checked_lattices(cell: Tensor, pbc: Tensor | None, num_clouds: int, points: Tensor) -> tuple[Tensor, Tensor]:
    """Dtypes, devices and shapes; one cell for every cloud."""
    dim = points.shape[1]
    check_tensor("cell", cell, "a floating tensor [clouds, dim, dim]")
    if pbc is None:
        pbc = torch.ones(dim, dtype=torch.bool, device=cell.device)
    check_tensor("pbc", pbc, "a bool tensor [clouds, dim]", torch.bool)
    for name, given, own in (("cell", cell, (dim, dim)), ("pbc", pbc, (dim,))):
        if given.device != points.device:
            raise ValueError(f"{name}: expected on {points.device} as the points, got on {given.device}")
        if given.shape not in (own, (num_clouds, *own)):
            raise ValueError(f"{name}: expected {list(own)} or {[num_clouds, *own]}, got {list(given.shape)}")
    return cell.expand(num_clouds, dim, dim), pbc.expand(num_clouds, dim)


def collate_clouds(argument: str, parts: Sequence[PointClouds], alike: Sequence[str] = ()) -> PointClouds:
    """Disjoint union of clouds, in their order.

    ValueError, naming the ``argument``, is raised if there are none, or if they differ in the attributes ``alike``, in
    dtype, in device, or in having a raster or a cell.
    """
    if not parts:
        raise ValueError(f"{argument}: expected at least one graph to collate, got none")
    described = [{name: attrgetter(name)(part) for name in alike} | _kind_of(part) for part in parts]
    for number, one in enumerate(described):
        for what, mine in described[0].items():
            if mine != one[what]:
                raise ValueError(f"{argument}: graph {number} has another {what} than graph 0: {one[what]} and {mine}")
    shifts = itertools.accumulate((part.num_clouds for part in parts), initial=0)
    given = [name for name in ("grid", "cell", "pbc") if getattr(parts[0], name) is not None]
    return PointClouds(
        pos=torch.cat([part.pos for part in parts]),
        batch=torch.cat([part.batch + shift for part, shift in zip(parts, shifts, strict=False)]),
        num_clouds=sum(part.num_clouds for part in parts),
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in given},
    )


def _kind_of(part: PointClouds) -> dict[str, object]:
    absent = {name: "absent" if getattr(part, name) is None else "given" for name in ("grid", "cell")}
    return absent | {"dtype": part.pos.dtype, "device": part.device}


def flatten(padded: Tensor, mask: Tensor) -> Tensor:
    """Points that are there, ``[clouds, N, *]`` with mask ``[clouds, N]`` to ``[points, *]``."""
    _check_mask(mask, padded.device, padded.shape[:2])
    return padded[mask]


def unflatten(flat: Tensor, mask: Tensor) -> Tensor:
    """Padded layout again, zero where no point is: ``[points, *]`` to ``[clouds, N, *]``."""
    _check_mask(mask, flat.device)
    if flat.shape[0] != int(mask.sum()):
        raise ValueError(f"flat: expected {int(mask.sum())} points as in mask, got {flat.shape[0]}")
    padded = flat.new_zeros(*mask.shape, *flat.shape[1:])
    padded[mask] = flat
    return padded


def _check_mask(mask: Tensor, device: torch.device, shape: torch.Size | None = None) -> None:
    check_tensor("mask", mask, "a bool tensor [clouds, N]", torch.bool)
    if shape is not None and mask.shape != shape:
        raise ValueError(f"mask: expected shape {tuple(shape)}, got {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"mask: expected on {device} as the points, got on {mask.device}")


def _check_grid(grid: Tensor, cloud: Tensor, num_clouds: int) -> None:
    check_grid(grid, cloud.device)
    if len(grid) != num_clouds:
        raise ValueError(f"grid: expected [{num_clouds}, 2], one row for each cloud, got {tuple(grid.shape)}")
    counts = torch.bincount(cloud, minlength=num_clouds)
    wrong = (counts != grid.prod(dim=1)) | (grid < 1).any(dim=1)
    if wrong.any():
        first = first_true(wrong)
        raise ValueError(f"grid: image {first} has {int(counts[first])} points, its grid is {grid[first].tolist()}")
    if (cloud[1:] < cloud[:-1]).any():
        raise ValueError("grid: images must be in raster order one after another, but batch is not sorted")
