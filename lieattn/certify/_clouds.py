"""Clouds that are made from the given ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments, check_tensor
from lieattn._core.values import attributes_of_points, select_points
from lieattn.certify._elements import random_rotation
from lieattn.certify._kinds import Kind, transform
from lieattn.geometry import pixel_positions

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


def is_whole(value: Tensor) -> bool:
    """Return whether a tensor has an integer dtype."""
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
