"""Fields on grids of pixels: from and to points in raster order, and how a planar group moves them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lieattn.geometry import Raster, point_clouds
from lieattn.groups import FiniteGroup
from lieattn.nn._grid_kernels import check_lattice_group


def to_grid(x: Tensor, grid: Tensor) -> Tensor:
    """Lay out a field on the pixels of equally large images as a grid.

    Parameters
    ----------
    x
        ``[points, channels]`` or ``[points, fiber, channels]``, points in raster order, image after image.
    grid
        ``[images, 2]`` int64, rows and columns of each image, all alike.

    Returns
    -------
    Tensor
        ``[images, channels, rows, columns]`` or ``[images, channels, fiber, rows, columns]``.

    Raises
    ------
    ValueError
        If the images differ in size, or the points are not their pixels.
    """
    if grid.ndim != 2 or grid.shape[1] != 2 or len(grid) == 0 or bool((grid != grid[0]).any()):
        raise ValueError(f"grid: expected [images, 2] with one size for all images, got {grid.tolist()}")
    rows, columns = grid[0].tolist()
    if x.ndim not in (2, 3) or x.shape[0] != len(grid) * rows * columns:
        raise ValueError(f"x: expected [points={len(grid) * rows * columns}, (fiber,) channels], got {tuple(x.shape)}")
    planes = x.reshape(len(grid), rows, columns, *x.shape[1:])
    return planes.movedim(-1, 1) if x.ndim == 2 else planes.permute(0, 4, 3, 1, 2)


def from_grid(x: Tensor) -> Tensor:
    """Pixels of a grid field as points in raster order, the inverse of :func:`to_grid`."""
    if x.ndim not in (4, 5):
        raise ValueError(f"x: expected [images, channels, (fiber,) rows, columns], got {tuple(x.shape)}")
    return x.movedim(1, -1).flatten(0, 2) if x.ndim == 4 else x.permute(0, 3, 4, 2, 1).flatten(0, 2)


def act_on_grid(group: FiniteGroup, h: int, x: Tensor) -> Tensor:
    """Move an image or a field about the center of the image: (h · f)(h̃, y) = f(h⁻¹h̃, h⁻¹y).

    Parameters
    ----------
    group
        H: any group of quarter turns and mirrors that keep the lattice.
    h
        Index of the element.
    x
        ``[batch, channels, rows, columns]``, or a field ``[batch, channels, order, rows, columns]``.

    Returns
    -------
    Tensor
        Of the shape of ``x``, with rows and columns exchanged where h exchanges them.
    """
    check_lattice_group("group", group)
    if x.ndim not in (4, 5) or (x.ndim == 5 and x.shape[2] != group.order):
        raise ValueError(
            f"x: expected [batch, channels, rows, columns] or [batch, channels, {group.order}, rows, columns], got "
            f"{tuple(x.shape)}"
        )
    if x.ndim == 5:
        x = x[:, :, group.permutation(h).to(x.device)]
    matrix = group.elements[int(group.inverse_index[h])].round().tolist()
    if matrix[0][0]:
        reversed_axes = [axis for axis, sign in ((-1, matrix[0][0]), (-2, matrix[1][1])) if sign < 0]
        return x.flip(reversed_axes)
    # The transpose reads (right, up) at (-up, -right).
    reversed_axes = [axis for axis, sign in ((-2, matrix[0][1]), (-1, matrix[1][0])) if sign > 0]
    return x.mT.flip(reversed_axes)


def grid_images(data: Any) -> Tensor:
    """Images of a batch of point clouds, each pixel put where its coordinates say.

    So an image whose points were moved by quarter turns, mirrors and translations is read as the moved image; points
    that are not on an upright lattice are refused, since a grid network would have to resample them.

    Parameters
    ----------
    data
        torch_geometric ``Data`` or ``Batch`` with features ``x`` ``[points, channels]``, coordinates ``pos``
        ``[points, 2]`` (right, up) and ``grid`` ``[images, 2]``, points image after image; or images
        ``[images, channels, rows, columns]``, which are returned as they are.

    Returns
    -------
    Tensor
        ``[images, channels, rows, columns]``.

    Raises
    ------
    TypeError, ValueError
        If there are no features, coordinates or grid, images differ in size, or points are on no upright lattice.
    """
    if isinstance(data, Tensor):
        if data.ndim != 4:
            raise ValueError(f"data: expected images [images, channels, rows, columns], got {tuple(data.shape)}")
        return data
    x, pos = getattr(data, "x", None), getattr(data, "pos", None)
    if not isinstance(x, Tensor) or not isinstance(pos, Tensor) or x.ndim != 2:
        raise TypeError(
            "data: expected images as a tensor, or a torch_geometric Data or Batch with x [points, channels] and pos, "
            f"got {type(data).__name__}"
        )
    raster, order = Raster.read(point_clouds(data))
    return raster.unflatten(x[order]).movedim(-1, 1)
