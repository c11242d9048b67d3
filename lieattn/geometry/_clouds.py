"""Point clouds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from lieattn._core.checks import check_has_numbers, check_is, check_tensor
from lieattn._core.contexts import check_not_batched
from lieattn._core.messages import titled_table
from lieattn._core.numerics import counts, maxima, means, sums
from lieattn.geometry._indices import Movable, OnFirstUse, check_indices, check_mask, cloud_index, first_true, ranges
from lieattn.geometry._search import complete_cells

# Sums of squares of coordinates up to this size are finite in float64.
COORDINATE_LIMIT = 1e100
_FLAT = 1e-8  # smallest volume of a cell, relative to the product of its edge lengths


def as_coordinates(pos: Float[Tensor, "points dim"], argument: str = "pos") -> Float[Tensor, "points dim"]:
    """Convert coordinates ``[points, dim]`` of any floating dtype to float64, without gradient, on the same device.

    TypeError or ValueError is raised if ``pos`` has another dtype or shape, or a coordinate is NaN, infinite or beyond
    1e100; NotImplementedError on Apple's GPUs, which lack float64; RuntimeError in ``torch.jit.trace`` and
    ``torch.export``, and for positions that ``torch.func.vmap`` maps over.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        advice = "compute it outside, geometry = network.geometry(data), and use torch.export"
        raise RuntimeError(
            f"{argument}: torch.jit.trace would use the geometry of these points for all others; {advice}"
        )
    if torch.compiler.is_exporting():
        advice = "compute it outside, geometry = network.geometry(data), and export network(data, geometry)"
        raise RuntimeError(
            f"{argument}: torch.export cannot include the search for neighbors, which depends on values; {advice}"
        )
    check_tensor(argument, pos, "a floating tensor [points, dim]")
    check_has_numbers(argument, pos)
    if pos.device.type == "mps":
        advice = "move points and network to the CPU"
        raise NotImplementedError(
            f"{argument}: geometry is computed in float64, which device {pos.device} lacks; {advice}"
        )
    check_not_batched(pos)
    if pos.dim() != 2 or pos.shape[1] == 0:
        raise ValueError(f"{argument}: expected shape [points, dim] with dim >= 1, got {tuple(pos.shape)}")
    pos = pos.detach().to(torch.float64)
    good = (pos.abs() <= COORDINATE_LIMIT).all(dim=1)  # false for NaN
    if not good.all():
        i = first_true(~good)
        limit = f"expected finite coordinates, at most {COORDINATE_LIMIT:g} in size"
        raise ValueError(f"{argument}: {limit}, got {pos[i].tolist()} for point {i}")
    return pos


def check_grid(grid: Tensor, device: torch.device | None = None, dim: int = 2) -> None:
    """Raise an error unless a value is an int64 tensor ``[clouds, dim]`` on ``device`` (any if None)."""
    check_indices("grid", grid, dim=2, device=device)
    check_has_numbers("grid", grid)
    if grid.shape[1] != dim:
        sides = "depth, height and width" if dim == 3 else "height and width"
        raise ValueError(f"grid: expected [clouds, {dim}], {sides} of each image, got {tuple(grid.shape)}")


def point_weights(
    weights: Shaped[Tensor, " points"], pos: Float[Tensor, "points dim"], *, positive: bool = False
) -> Float[Tensor, " points"]:
    """Return weights in float64, or raise ValueError unless they are finite and not negative."""
    if not isinstance(weights, Tensor) or weights.shape != (len(pos),) or weights.device != pos.device:
        shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"weights: expected [points={len(pos)}] on {pos.device}, got {shape}")
    bad = ~(torch.isfinite(weights) & ((weights > 0) if positive else (weights >= 0)))
    if bad.any():
        i, expected = first_true(bad), "positive volumes" if positive else "finite numbers from 0"
        raise ValueError(f"weights: expected {expected}, got {float(weights[i])} for point {i}")
    return weights.double()


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PointClouds(Movable):
    """The points of several clouds, some of which may be empty. Build it with :func:`point_clouds`.

    Attributes
    ----------
    pos, batch
        ``[points, dim]`` floating coordinates, and ``[points]`` int64, the cloud of each point, in any order.
    grid
        ``[clouds, 2]`` int64 height and width if the clouds are images in raster order, ``[clouds, 3]`` int64 depth,
        height and width if they are voxels in space, otherwise None.
    raster, pixel
        Of images that lack pixels: the sides of the whole images, like ``grid``, and ``[points, 2]`` int64 row and
        column of each point (``[points, 3]`` layer, row and column of voxels). Otherwise both are None.
    cell, pbc
        Lattice vectors of periodic clouds, the rows of ``[clouds, dim, dim]`` floating, and a mask ``[clouds, dim]``
        bool of the vectors along which a cloud is periodic. Both are None if no cloud is periodic.
    edge_index
        Edges of the data, for :class:`Given`, which are not checked yet, or None.
    each
        Number of points of every cloud if all clouds are known to have as many, one cloud after another. Sums over
        clouds are faster then.
    """

    pos: Tensor
    batch: Tensor
    num_clouds: int
    grid: Tensor | None = None
    raster: Tensor | None = None
    pixel: Tensor | None = None
    cell: Tensor | None = None
    pbc: Tensor | None = None
    edge_index: Tensor | None = None
    each: int | None = None

    def __repr__(self) -> str:
        given = [f"with {name}" for name in ("grid", "raster", "cell", "edge_index") if getattr(self, name) is not None]
        told = [f"{name}={value}" for name, value in self._facts().items()]
        return f"{type(self).__name__}({', '.join(told + given)})"

    def _repr_html_(self) -> str:
        given = [
            (name, tuple(value.shape))
            for name in ("grid", "raster", "cell")
            if (value := getattr(self, name)) is not None
        ]
        return titled_table(type(self).__name__, [*self._facts().items(), *given])

    def _facts(self) -> dict[str, object]:
        """Return the facts that the printed forms show, by name."""
        of = {"points": self.num_points, "dim": self.pos.shape[1], "clouds": self.num_clouds}
        return {**of, "dtype": str(self.pos.dtype).removeprefix("torch."), "device": self.device}

    @property
    def num_points(self) -> int:
        """Number of points of all clouds."""
        return self.pos.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.pos.device

    @property
    def sides(self) -> tuple[int, ...] | None:
        """Sides of the images if all have the same ones, otherwise None. On a GPU, this waits for it."""
        grid = self.grid
        if grid is None or len(grid) == 0 or bool((grid != grid[0]).any()):
            return None
        return tuple(grid[0].tolist())

    def on_raster(self) -> tuple[Int[Tensor, "clouds axes"], Int[Tensor, "points axes"]] | None:
        """Return the sides of images, and the row and column (or layer, row and column) of each point.

        None for clouds that are no images.
        """
        if self.raster is not None and self.pixel is not None:
            return self.raster, self.pixel
        if (grid := self.grid) is None:
            return None
        _, number = ranges(torch.zeros_like(grid[:, 0]), grid.prod(dim=1))
        below = grid.flip(1).cumprod(1).flip(1) // grid.clamp(min=1)
        return grid, number[:, None] // below[self.batch] % grid[self.batch]

    @OnFirstUse
    def counts(self) -> Int[Tensor, " clouds"]:
        """Number of points of each cloud, ``[clouds]`` int64; computed on first use."""
        return counts(self.batch, self.num_clouds)

    def with_each(self) -> Self:
        """Return the same clouds with :attr:`each`, which is found from :attr:`batch`. On a GPU, this waits for it."""
        if self.num_points == 0 or self.num_points % self.num_clouds or torch.compiler.is_compiling():
            return self
        each = self.num_points // self.num_clouds
        regular = self.batch.view(-1, each) == torch.arange(self.num_clouds, device=self.device)[:, None]
        return replace(self, each=each) if bool(regular.all()) else self

    def by_cloud(self, x: Tensor) -> Tensor | None:
        """Return ``[points, *]`` as ``[clouds, points, *]``, or None if :attr:`each` is None or torch compiles."""
        self._check_rows(x)
        # The number of points is no constant of exported programs, nor a reason to compile another one.
        known = not torch.compiler.is_compiling() and self.each is not None
        return x.unflatten(0, (self.num_clouds, self.each)) if known else None

    def sum(self, x: Shaped[Tensor, " points *rest"]) -> Shaped[Tensor, " clouds *rest"]:
        """Sum ``[points, *]`` over the points of each cloud, to ``[clouds, *]``. Empty clouds give zero.

        Sums of integers and masks are int64, as in torch. The error is at most some rounding steps of the largest
        partial sum, however many points there are: sums over clouds of different sizes are computed in float64, those
        over clouds with as many points as sums of sums.
        """
        if (clouds := self.by_cloud(x)) is not None:
            return clouds.sum(dim=1)
        return sums(x, self.batch, self.num_clouds, torch.float64)

    def mean(self, x: Shaped[Tensor, " points *rest"]) -> Shaped[Tensor, " clouds *rest"]:
        """Average ``[points, *]`` over the points of each cloud, to ``[clouds, *]``. Empty clouds give zero."""
        clouds = self.by_cloud(x)
        if clouds is not None and (x.is_floating_point() or x.is_complex()):
            return clouds.mean(dim=1)
        return means(x, self.batch, self.counts, torch.float64)

    def max(self, x: Shaped[Tensor, " points *rest"]) -> Shaped[Tensor, " clouds *rest"]:
        """Return the maximum of ``[points, *]`` over each cloud, ``[clouds, *]``. Empty clouds give zero."""
        clouds = self.by_cloud(x)
        if x.is_complex():
            raise ValueError(f"x: expected real numbers, which have a maximum, got {x.dtype}")
        if clouds is not None:
            return clouds.amax(dim=1)
        return maxima(x, self.batch, self.num_clouds)

    def around_origin(
        self, dtype: torch.dtype, dim: int | None = None, *, keep_images: bool = False
    ) -> Float[Tensor, "points dim"]:
        """Return the positions in a dtype, without the means of the clouds, which are subtracted in float64.

        Coordinates far from the origin would lose the digits that displacements need. Points of periodic clouds are
        first moved to the image that is nearest to the first point of their cloud, unless ``keep_images``, so that they
        have the same digits wherever they are; then all are strained as the cell is when it is rounded. ``dim`` is the
        number of components that are coordinates, by default all.
        """
        places, others = self.pos[:, :dim].double(), self.pos[:, dim:] if dim is not None else self.pos[:, :0]
        if self.cell is not None and self.pbc is not None:
            own = self.cell.detach()
            cell, rounded = (complete_cells(lattice.double(), self.pbc) for lattice in (own, own.to(dtype)))
            inverse = torch.linalg.inv(cell)
            if not keep_images:
                numbers = torch.arange(self.num_points, device=self.device)
                first = numbers.new_zeros(self.num_clouds).scatter_reduce(
                    0, self.batch, numbers, "amin", include_self=False
                )
                relative = (places - places[first[self.batch]]).detach()
                steps = (relative[:, None] @ inverse[self.batch]).round()
                lattice = torch.where(self.pbc[..., None], self.cell.double(), 0.0)
                places = places - (torch.where(self.pbc[self.batch][:, None], steps, 0.0) @ lattice[self.batch])[:, 0]
            places = (places[:, None] @ (inverse @ rounded)[self.batch])[:, 0]
        places = places - self.mean(places)[self.batch]
        return torch.cat([places, others.double()], dim=1).to(dtype)

    def _check_rows(self, x: Tensor) -> None:
        check_is("x", x, Tensor)
        if x.shape[:1] != (self.num_points,) or x.device != self.device:
            expected = f"expected one row for each of {self.num_points} points on {self.device}"
            raise ValueError(f"x: {expected}, got {tuple(x.shape)} on {x.device}")


def point_clouds(
    points: Any,
    *,
    batch: Int[Tensor, " points"] | None = None,
    ptr: Int[Tensor, " starts"] | None = None,
    mask: Bool[Tensor, "clouds places"] | None = None,
    grid: Int[Tensor, "clouds axes"] | None = None,
    raster: Int[Tensor, "clouds axes"] | None = None,
    pixel: Int[Tensor, "points axes"] | None = None,
    cell: Float[Tensor, "... dim dim"] | None = None,
    pbc: Bool[Tensor, "... dim"] | None = None,
) -> PointClouds:
    """Read point clouds from tensors or a torch_geometric object.

    Parameters
    ----------
    points
        Coordinates ``[points, dim]``, padded coordinates ``[clouds, N, dim]`` with a ``mask``, a torch_geometric
        ``Data`` or ``Batch``, or :class:`PointClouds`, which are returned unchanged. Of torch_geometric data, ``pos``
        is read and, if present, the attributes with the names of the following parameters, and ``edge_index``.
    batch, ptr
        Cloud of each point ``[points]``, or first point of each cloud ``[clouds + 1]``. By default, all points are one
        cloud.
    mask
        ``[clouds, N]`` bool, true for points and false for padding. Convert features with :func:`flatten`.
    grid
        ``[clouds, 2]`` int64 heights and widths if the clouds are images in raster order, or ``[clouds, 3]`` depths,
        heights and widths of voxels in space.
    raster, pixel
        Instead of ``grid``, if images lack pixels: the sides of the whole images, and the row and column of each point,
        ``[points, 2]`` int64, or its layer, row and column. Points may be in any order.
    cell
        Lattice vectors of periodic clouds, the rows of ``[clouds, dim, dim]``, or of ``[dim, dim]`` for all clouds.
    pbc
        Lattice vectors along which a cloud is periodic, bool ``[clouds, dim]`` or ``[dim]``; by default, all. The other
        vectors are ignored and may be zero.
    """
    if isinstance(points, PointClouds):
        if any(given is not None for given in (batch, ptr, mask, grid, raster, pixel, cell, pbc)):
            names = "batch, ptr, mask, grid, raster, pixel, cell, pbc"
            raise ValueError(f"{names}: expected None, since PointClouds contain them")
        return points
    edge_index = None if isinstance(points, Tensor) else getattr(points, "edge_index", None)
    if not isinstance(points, Tensor):
        given = {"batch": batch, "ptr": ptr, "grid": grid, "raster": raster, "pixel": pixel, "cell": cell, "pbc": pbc}
        read = [getattr(points, name, None) if value is None else value for name, value in given.items()]
        points, (batch, ptr, grid, raster, pixel, cell, pbc) = _positions(points, mask), read
    if points.ndim == 3:
        if mask is None:
            mask = torch.ones(points.shape[:2], dtype=torch.bool, device=points.device)
        if batch is not None or ptr is not None:
            raise ValueError("batch, ptr: expected None, since padded points [clouds, N, dim] define their clouds")
        check_mask(mask, points.device, points.shape[:2])
        counts = mask.sum(dim=1)
        ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        points = points[mask]
    elif mask is not None:
        raise ValueError(f"mask: needs padded points [clouds, N, dim], got points of shape {tuple(points.shape)}")
    as_coordinates(points)
    cloud, num_clouds = cloud_index(points, batch, ptr)
    if grid is not None:
        _check_grid(grid, cloud, num_clouds, 3 if points.shape[1] == 3 else 2)
    if raster is not None or pixel is not None:
        _check_pixels(raster, pixel, grid, cloud, num_clouds)
    cell, pbc = lattices(cell, pbc, num_clouds, points)
    clouds = PointClouds(
        pos=points,
        batch=cloud,
        num_clouds=num_clouds,
        grid=grid,
        raster=raster,
        pixel=pixel,
        cell=cell,
        pbc=pbc,
        edge_index=edge_index,
    )
    return clouds.with_each()


def _positions(data: Any, mask: Tensor | None) -> Any:
    """Return the positions of data; TypeError if there are none, ValueError if they are padded without a mask."""
    if (pos := getattr(data, "pos", None)) is None:
        got = f"got {type(data).__name__}"
        if not hasattr(data, "to_dict"):
            raise TypeError(f"points: expected a tensor, or a torch_geometric Data or Batch with pos, {got}")
        raise TypeError(f"data.pos: expected [points, dim], {got} with {', '.join(data.to_dict()) or 'nothing'}")
    check_is("pos", pos, Tensor)
    if pos.ndim == 3 and mask is None:  # a mask of the data would be ignored, and padding count as points
        advice = "of padded clouds use Data(pos=pos[mask], x=x[mask], batch=mask.nonzero()[:, 0])"
        raise ValueError(f"data.pos: expected [points, dim], got {tuple(pos.shape)}; {advice}")
    return pos


def lattices(
    cell: Tensor | None, pbc: Tensor | None, num_clouds: int, points: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Check ``cell`` and ``pbc`` of :func:`point_clouds`, and expand them to all clouds; None if none is periodic."""
    if cell is None:
        if pbc is not None and (not isinstance(pbc, Tensor) or bool(pbc.any())):
            raise ValueError("pbc: expected a cell, since clouds are periodic, got None")
        return None, None
    dim = points.shape[1]
    check_tensor("cell", cell, "a floating tensor [clouds, dim, dim]")
    if pbc is None:
        pbc = torch.ones(dim, dtype=torch.bool, device=cell.device)
    check_tensor("pbc", pbc, "a bool tensor [clouds, dim]", torch.bool)
    for name, given, own in (("cell", cell, (dim, dim)), ("pbc", pbc, (dim,))):
        if given.device != points.device:
            raise ValueError(f"{name}: expected on {points.device} as the points, got on {given.device}")
        if given.shape not in (own, (num_clouds, *own)):
            got = f"got {list(given.shape)}; each Data of a batch has a {name} {[1, *own]}"
            raise ValueError(f"{name}: expected {list(own)} or {[num_clouds, *own]}, {got}")
    cell, pbc = cell.expand(num_clouds, dim, dim), pbc.expand(num_clouds, dim)
    if not pbc.any():
        return None, None
    used = torch.where(pbc[..., None], cell.detach().double(), 0.0)
    infinite = ~torch.isfinite(used).flatten(1).all(-1)
    if infinite.any():
        raise ValueError(f"cell: expected finite vectors, got {cell[first_true(infinite)].tolist()}")
    lengths = torch.linalg.vector_norm(used, dim=-1)
    units = used / torch.where(lengths == 0, 1.0, lengths)[..., None]
    # The determinant is the squared volume spanned by the unit vectors; vectors that are not used count as orthogonal.
    gram = units @ units.mT + torch.diag_embed((~pbc).double())
    flat = torch.linalg.det(gram) < _FLAT**2
    if flat.any():
        i = first_true(flat)
        got = f"got the cell {cell[i].tolist()} of cloud {i}, whose volume is zero"
        raise ValueError(f"cell: expected vectors that span a volume along pbc={pbc[i].tolist()}, {got}")
    return cell, pbc


def _check_grid(grid: Tensor, cloud: Tensor, num_clouds: int, dim: int) -> None:
    check_grid(grid, cloud.device, dim)
    if len(grid) != num_clouds:
        raise ValueError(f"grid: expected [{num_clouds}, {dim}], one row for each cloud, got {tuple(grid.shape)}")
    counts = torch.bincount(cloud, minlength=num_clouds)
    wrong = (counts != grid.prod(dim=1)) | (grid < 1).any(dim=1)
    if wrong.any():
        first = first_true(wrong)
        got = f"image {first} has {int(counts[first])} points, but its grid is {grid[first].tolist()}"
        raise ValueError(f"grid: {got}; images that lack pixels have a raster and the pixel of each point instead")
    if (cloud[1:] < cloud[:-1]).any():
        raise ValueError("grid: images must be in raster order one after another, but batch is not sorted")


def pixel_steps(clouds: PointClouds, places: Int[Tensor, "points axes"]) -> Float[Tensor, "clouds axes dim"]:
    """Return the steps from pixel to pixel along the axes of each image that fit its points best, in float64.

    ``places`` are those of :meth:`PointClouds.on_raster`. Steps move with the points.
    """
    place, pos = (x.double() - clouds.mean(x.double())[clouds.batch] for x in (places, clouds.pos))
    gram, moved = (clouds.sum(place[:, :, None] * x[:, None]) for x in (place, pos))
    return torch.linalg.pinv(gram, rtol=1e-9, hermitian=True) @ moved


def _check_pixels(
    raster: Tensor | None, pixel: Tensor | None, grid: Tensor | None, cloud: Tensor, num_clouds: int
) -> None:
    """Raise ValueError unless every point has a place on the raster of its image."""
    if grid is not None:
        got = f"got grid {tuple(grid.shape)} as well; remove one of them"
        raise ValueError(f"raster, pixel: expected None, since images with a grid have all pixels, {got}")
    if raster is None or pixel is None:
        got = "raster" if pixel is None else "pixel"
        raise ValueError(f"raster, pixel: expected the sides of images and the pixel of each point, got {got} alone")
    for name, value in (("raster", raster), ("pixel", pixel)):
        check_indices(name, value, dim=2, device=cloud.device)
        check_has_numbers(name, value)
    if raster.shape != (num_clouds, pixel.shape[1]) or len(pixel) != len(cloud):
        expected = f"[clouds={num_clouds}, axes] and [points={len(cloud)}, axes]"
        raise ValueError(f"raster, pixel: expected {expected}, got {tuple(raster.shape)} and {tuple(pixel.shape)}")
    flat = (raster < 1).any(dim=1)
    if flat.any():
        raise ValueError(f"raster: expected sides from 1, got {raster[first_true(flat)].tolist()}")
    outside = ((pixel < 0) | (pixel >= raster[cloud])).any(dim=1)
    if outside.any():
        first = first_true(outside)
        sides = raster[cloud[first]].tolist()
        raise ValueError(f"pixel: expected places on a raster {sides}, got {pixel[first].tolist()} for point {first}")
