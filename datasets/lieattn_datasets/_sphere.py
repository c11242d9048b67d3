"""Points on the unit sphere."""

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float32, Float64
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments, check_choice, check_counts
from lieattn_datasets._checks import real_array, require
from lieattn_datasets._clouds import Card, Clouds, LabeledClouds, Transform
from lieattn_datasets._files import Release
from lieattn_datasets._images import ImagePoints, data_to_image
from lieattn_datasets._splits import Split, frozen_stream, half_of, hold_out
from lieattn_datasets._transforms import rotation_matrix

_NAMES = {"latitude": ("latitude", "lat", "nav_lat"), "longitude": ("longitude", "lon", "lng", "long", "nav_lon")}
_ROUNDED = 1 + 1e-6  # factor for angles of float32, where a quarter turn can be more than pi / 2
_LONGEST = 10  # largest plausible ratio of the steps of longitudes and latitudes of a grid

_COUNTS = {("train", False): 5000, ("train", True): 2000, ("test", False): 1000, ("test", True): 1000}

RELEASE = Release(
    dataset="Spherical MNIST, re-created",
    origin="The file is spherical_mnist_recipe.npz, made from MNIST by the recipe in the documentation of the class.",
    computed=("x_train_nr", "x_test_nr"),
    digests={"spherical_mnist_recipe.npz": "content:d679280247ec055f25e391746d702d58f872be14a025653f7360a453a3b1bb0f"},
)


def fibonacci_sphere(points: int) -> Float64[np.ndarray, "{points} 3"]:
    """Return nearly uniform directions of equal weight on the sphere, on a golden-angle spiral from north to south.

    Parameters
    ----------
    points
        Number of directions.
    """
    check_arguments(fibonacci_sphere, locals())
    check_counts(points=points)
    index = np.arange(points)
    height = 1 - (2 * index + 1) / points
    angle = index * math.pi * (3 - math.sqrt(5))
    radius = np.sqrt(1 - height**2)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), height], axis=1)


def project_image(image: ArrayLike, directions: ArrayLike) -> Float64[np.ndarray, "points *channels"]:
    """Project an image onto the sphere, by stereographic projection from the south pole.

    The center of the image is mapped to the north pole, and the circle that touches the centers of its outermost pixels
    to the equator; x points right, y up, z out of the image. Values between pixel centers are interpolated bilinearly,
    and values beyond the outermost centers are zero.

    Parameters
    ----------
    image
        Intensities ``[size, size]`` or ``[size, size, channels]``, the top row first.
    directions
        Unit vectors, ``[points, 3]``.

    Raises
    ------
    ValueError
        If the image is not square or smaller than 2 x 2, or directions are not ``[points, 3]``.
    """
    check_arguments(project_image, locals())
    pixels, s = real_array("image", image), real_array("directions", directions)
    square = pixels.ndim in (2, 3) and pixels.shape[0] == pixels.shape[1] and len(pixels) > 1
    require(square, "image", "[size, size] or [size, size, channels]", list(pixels.shape))
    require(s.ndim == 2 and s.shape[1] == 3, "directions", "[points, 3]", list(s.shape))
    center = (len(pixels) - 1) / 2
    finite = s[:, 2] > -1 + 1e-9  # the south pole has no image in the plane
    stretch = center / np.where(finite, 1 + s[:, 2], 1.0)
    row, column = center - stretch * s[:, 1], center + stretch * s[:, 0]
    inside = finite & (np.abs(row - center) <= center) & (np.abs(column - center) <= center)
    row, column = np.where(inside, row, 0.0), np.where(inside, column, 0.0)
    top, left = (np.minimum(np.floor(place).astype(np.int64), len(pixels) - 2) for place in (row, column))
    down, right = row - top, column - left
    if pixels.ndim == 3:
        inside, down, right = inside[:, None], down[:, None], right[:, None]
    upper = (1 - right) * pixels[top, left] + right * pixels[top, left + 1]
    lower = (1 - right) * pixels[top + 1, left] + right * pixels[top + 1, left + 1]
    return np.where(inside, (1 - down) * upper + down * lower, 0.0)


class SphericalImages(Clouds):
    """Any labeled images, projected onto the sphere by the recipe of :class:`SphericalMNIST`.

    An item has ``pos`` float32 ``[points, 3]`` (unit vectors, the same for all items), ``x`` float32
    ``[points, channels]`` in [0, 1], ``area`` ``[points]`` (with the sum 4 pi), ``y`` int64 ``[1]``, and
    ``rotation`` ``[1, 3, 3]`` if it is rotated.

    Parameters
    ----------
    images
        Square images, for example ``MNIST(root, "test")``, without a transform that moves pixels.
    points
        Number of directions, which are those of :func:`fibonacci_sphere`.
    rotate
        Whether the signal of each item is rotated by its own random rotation R: ``rotated(s) = unrotated(R^T s)``. The
        directions stay the same, and the values on them are sampled again.
    seed
        Seed of the rotations.
    transform
        Function that is applied to each new ``Data``.
    """

    card = Card(
        "MNIST digits by stereographic projection onto the sphere",
        "CC BY-SA 3.0 (derived from MNIST)",
        "60 x 60 points (latitude x longitude)",
    )

    def __init__(
        self,
        images: ImagePoints,
        points: int = 1024,
        *,
        rotate: bool = False,
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(SphericalImages.__init__, locals())
        height, width = images.image_shape
        require(height == width, "images", "square images", f"{height} x {width}")
        frozen_stream(seed)
        self._directions = fibonacci_sphere(points)
        self._source, self._rotate, self._seed = images, rotate, seed
        self.num_classes, self.num_channels = images.num_classes, images.num_channels
        super().__init__(len(images), transform)

    def _make(self, index: int) -> Data:
        source = self._source[index]
        points = len(self._directions)
        directions = self._directions
        if self._rotate:
            rotation = rotation_matrix(frozen_stream(self._seed, index).standard_normal(4))
            directions = directions @ rotation  # row by row: R^T s
        values = project_image(data_to_image(source).numpy(), directions)
        data = sphere_data(self._directions, values, np.full(points, 4 * math.pi / points))
        data.y = source.y
        if self._rotate:
            data.rotation = torch.from_numpy(rotation[None].astype(np.float32))
        return data


class SphericalMNIST(LabeledClouds):
    """MNIST digits on the sphere, unrotated or with a random rotation each, on a grid of 60 x 60 angles.

    A digit is centered at the north pole, by stereographic projection from the south pole with its outermost pixels at
    the equator, bilinear interpolation and rounding to uint8. For rotated digits the projection is sampled at rotated
    directions, ``rotated(s) = unrotated(R^T s)``. The data are similar to those of Cohen et al. (Spherical CNNs, 2018)
    but not the same, so results are not comparable. :class:`SphericalImages` does the same for other images and on
    other points.

    An item has ``pos`` float32 ``[points, 3]`` (unit vectors, the same for all items), ``x`` float32
    ``[points, 1]`` in [0, 1], ``area`` float32 ``[points]`` (the area of the sphere that each point represents,
    with the sum 4 pi), ``y`` int64 ``[1]``, and ``rotation`` ``[1, 3, 3]`` if it is rotated.

    Parameters
    ----------
    root
        Folder with ``spherical_mnist_recipe.npz``.
    split
        ``"train"`` (5,000 unrotated digits, of which the first 2,000 also exist rotated), ``"test"`` (1,000), or
        ``"valid"``.
    rotated
        Whether the digits are rotated. The usual protocols train and test on unrotated digits (NR/NR), train and test
        on rotated digits (R/R), or train on unrotated and test on rotated digits (NR/R).
    points
        Number of points that are kept of the 3,600 points of the grid. They are chosen once so that all represent about
        the same area (the grid itself is dense at the poles). Default: all.
    validation
        As for :class:`MNIST`, of the training digits.
    seed
        Seed of the choice of points.
    verify, transform
        As for :class:`FashionMNIST900`.
    """

    card = SphericalImages.card

    num_classes = 10

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        rotated: bool = False,
        points: int | None = None,
        validation: int = 0,
        seed: int = 0,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(SphericalMNIST.__init__, locals())
        half = half_of(split)
        kind = "r" if rotated else "nr"
        expected = {
            f"x_{half}_{kind}": "uint8 [images, beta, alpha]",
            f"y_{half}": "integer [labels]",
            "beta": "number [beta]",
            "alpha": "number [alpha]",
        }
        if rotated:
            expected[f"rot_{half}"] = "number [images, 3, 3]"
        path, (images, labels, beta, alpha, *rotations) = RELEASE.read(root, expected, verify)
        right = images.size and len(labels) >= len(images)
        RELEASE.require(right, path, f"has {len(labels)} labels for {len(images)} images")
        if verify:
            RELEASE.check_count(path, len(images), _COUNTS[half, rotated])
        super().__init__(len(images), transform)
        self._rotations = rotations[0] if rotated else None
        edge = math.pi / (2 * len(beta))
        right = np.allclose(beta, edge * (2 * np.arange(len(beta)) + 1)) and np.abs(alpha).max() <= 2 * math.pi
        problem = "has beta other than pi (2 i + 1) / (2 n) from the north, or alpha in degrees"
        RELEASE.require(right, path, problem)
        areas = 2 * math.pi * (np.cos(beta - edge) - np.cos(beta + edge))
        sizes = np.full(len(beta), len(alpha))
        chosen, self._areas = choose_on_rings(sizes, areas, points, frozen_stream(seed))
        self._directions = angles_to_directions(beta[:, None], alpha).reshape(-1, 3)[chosen]
        self._images = images.reshape(len(images), -1)[:, chosen]
        self._labels = RELEASE.check_indices(path, f"y_{half}", labels[: len(images)], 10)
        self._indices = hold_out(len(images), validation, split)

    def _make(self, index: int) -> Data:
        data = sphere_data(self._directions, self._images[index, :, None] / 255, self._areas)
        data.y = torch.from_numpy(self._labels[index : index + 1].copy())
        if self._rotations is not None:
            data.rotation = torch.from_numpy(self._rotations[index : index + 1].astype(np.float32))
        return data


def sphere_data(directions: NDArray[np.float64], values: NDArray[np.float64], areas: NDArray[np.float64]) -> Data:
    """Return values ``[points, channels]`` on directions with areas, as float32 tensors."""
    return Data(
        x=torch.from_numpy(values.astype(np.float32)),
        pos=torch.from_numpy(directions.astype(np.float32)),
        area=torch.from_numpy(areas.astype(np.float32)),
    )


def on_sphere(
    latitude: Any, longitude: ArrayLike | None = None, *, units: Literal["degrees", "radians"] | None = None
) -> Float32[Tensor, "points 3"]:
    """Return points of the unit sphere for latitudes and longitudes, for example of stations.

    Use it as in ``Data(pos=on_sphere(lat, lon), x=...)``. x points to 0 N 0 E, y to 0 N 90 E, z to the north pole.

    Parameters
    ----------
    latitude, longitude
        Angles, ``[points]``: north from -90 to 90 degrees, east from -360 to 360. Or one table with both, under one of
        the names latitude, lat, longitude, lon, lng, long: a dictionary, a data frame of pandas, or a data set of
        xarray, whose grid becomes points, row by row.
    units
        Units of both. Default: those that xarray states, else degrees; angles that could be radians are refused.

    Examples
    --------
    >>> on_sphere([0.0, 90.0], [90.0, 0.0]).abs().round()
    tensor([[0., 1., 0.],
            [0., 0., 1.]])
    """
    phi, lam = _of_points(latitude, longitude, units)
    return torch.from_numpy(angles_to_directions(math.pi / 2 - phi, lam).astype(np.float32))


def areas_on_sphere(
    latitude: ArrayLike, longitude: ArrayLike | None = None, *, units: Literal["degrees", "radians"] | None = None
) -> Float32[Tensor, " points"]:
    """Return the areas that the points of a grid of latitudes and longitudes represent, with the mean 1.

    They are weights for losses and errors: without them, the many points near the poles count as much as those of the
    tropics. ``Data(pos=on_sphere(lat, lon), weight=areas_on_sphere(lat, lon))`` is what
    :class:`lieattn.train.PointSetRegressor` reads.

    Each ring of equal latitude has the band up to halfway to its neighbors, and its points share it equally. Between
    equally spaced rings this is the cosine of the latitude; a pole has a cap instead of 0. Points are in the order of
    :func:`on_sphere`, which has the same parameters. Rings may have different numbers of points, as in reduced grids.

    Raises
    ------
    ValueError
        For the reasons of :func:`on_sphere`, and if rings besides the poles have a single point, as for stations, or if
        there is only one ring.

    Examples
    --------
    >>> areas_on_sphere([60.0, 60.0, 0.0, 0.0, -60.0, -60.0], [0.0, 180.0] * 3)
    tensor([0.7500, 0.7500, 1.5000, 1.5000, 0.7500, 0.7500])
    """
    phi, _ = _of_points(latitude, longitude, units)
    rings, place, counts = np.unique(phi.round(7), return_inverse=True, return_counts=True)
    alone = (counts == 1) & (np.abs(rings) < math.pi / 2 - 1e-6)
    expected = "rings of equal latitude with several points each, as in a grid"
    require(len(rings) > 1 and not alone.any(), "latitude", expected, f"{len(rings)} latitudes of {len(phi)} points")
    areas = ring_areas(math.pi / 2 - rings) / counts
    return torch.from_numpy((areas[place] / areas[place].mean()).astype(np.float32))


def ring_areas(colatitude: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the areas of rings of the unit sphere in order of their colatitudes, up to halfway to their neighbors.

    The first and the last ring extend as far on their other side, but at most to the pole.
    """
    between = (colatitude[1:] + colatitude[:-1]) / 2
    ends = np.clip([2 * colatitude[0] - between[0], 2 * colatitude[-1] - between[-1]], 0, math.pi)
    return np.asarray(2 * math.pi * np.abs(np.diff(np.cos([ends[0], *between, ends[1]]))))


def _of_points(latitude: Any, longitude: Any, units: str | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return latitudes and longitudes of points in radians, both ``[points]``; a grid of xarray becomes points."""
    if longitude is None:
        latitude, longitude = (angles_named(name, latitude) for name in ("latitude", "longitude"))
    grid = getattr(latitude, "dims", None) != getattr(longitude, "dims", None)
    phi, lam = in_radians(latitude, longitude, units, grid=grid)
    if grid:
        phi, lam = (angles.reshape(-1) for angles in np.meshgrid(phi, lam, indexing="ij"))
    return phi, lam


def angles_named(argument: str, table: Any) -> Any:
    """Return the column or coordinate of a table that has one of the usual names of latitudes or longitudes."""
    names = [spelled for name in _NAMES[argument] for spelled in (name, name.title(), name.upper())]
    require(hasattr(table, "keys"), argument, "angles, or a table with them", f"{type(table).__name__} alone")
    found = [name for name in names if name in table]
    held = ", ".join(map(str, found or table)) or "nothing"
    require(len(found) == 1, argument, f"one of the names {', '.join(_NAMES[argument])} in a table", held)
    return table[found[0]]


def in_radians(
    latitude: ArrayLike, longitude: ArrayLike, units: str | None, *, grid: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return latitudes and longitudes in radians.

    If ``units`` is None, they are those of the attribute ``units`` of xarray, or the only ones that are possible for
    the values. With ``grid``, the angles are those of rows and columns. They are known to be radians if there is a pole
    among them or the columns surround the sphere; angles of points never are.
    """
    phi, lam = real_array("latitude", latitude), real_array("longitude", longitude)
    expected = "at least one angle, [rows] and [columns]" if grid else "[points] both"
    right = phi.ndim == lam.ndim == 1 and (phi.size and lam.size if grid else phi.shape == lam.shape)
    require(right, "latitude, longitude", expected, f"{list(phi.shape)} and {list(lam.shape)}")
    if units is None:
        units = _stated_units(latitude, longitude) or _only_units(phi, lam, grid)
        if units is None:
            spans = " and ".join(f"{angles.min():g} .. {angles.max():g}" for angles in (phi, lam))
            raise ValueError(
                f"latitude, longitude: expected both in degrees or both in radians, got {spans}, which can be either, "
                "or one of each; say which with units='degrees' or units='radians' (latitudes count from the equator)"
            )
    check_choice("units", units, ("degrees", "radians"))
    turn = 360.0 if units == "degrees" else 2 * math.pi
    for argument, angles, most in (("latitude", phi, turn / 4), ("longitude", lam, turn)):
        beyond = np.flatnonzero(np.abs(angles) > most * _ROUNDED)
        if beyond.size:
            got = f"{angles[beyond[0]]:g} for point {beyond[0]}"
            raise ValueError(f"{argument}: expected {units} in -{most:g} .. {most:g}, got {got}")
    return phi * (2 * math.pi / turn), lam * (2 * math.pi / turn)


def _stated_units(*angles: Any) -> str | None:
    """Return the units in the attributes of xarray, such as ``degrees_north``, if all state the same."""
    stated = {str(getattr(values, "attrs", {}).get("units", ""))[:6] for values in angles}
    return {"degree": "degrees", "radian": "radians"}.get(stated.pop()) if len(stated) == 1 else None


def _only_units(phi: NDArray[np.float64], lam: NDArray[np.float64], grid: bool) -> str | None:
    """Return the only units that angles can have, or None if there are two, or one for each."""
    high, wide = (np.abs(angles).max(initial=0) for angles in (phi, lam))
    if not high and not wide:
        return "degrees"
    steps = [float(np.median(np.abs(np.diff(angles)))) for angles in (phi, lam) if angles.size > 1]
    if grid and len(steps) == 2 and max(steps) > _LONGEST * min(steps):
        return None  # a degree has 57 times the number of a radian
    around = np.ptp(lam) * np.array([1, lam.size / max(lam.size - 1, 1)]) if grid else lam
    known = np.isclose(np.abs(phi), math.pi / 2, rtol=1e-6, atol=0).any() or np.isclose(around, 2 * math.pi).any()
    if grid and known and high <= math.pi / 2 * _ROUNDED:
        return "radians"
    # Up to half a turn, they can be radians from the pole.
    return "degrees" if high > math.pi * _ROUNDED or wide > 2 * math.pi * _ROUNDED else None


def angles_to_directions(colatitude: ArrayLike, longitude: ArrayLike) -> Float64[np.ndarray, "*points 3"]:
    """Return the unit vectors ``[..., 3]`` of angles in radians."""
    beta, alpha = np.broadcast_arrays(np.asarray(colatitude, dtype=np.float64), longitude)
    return np.stack([np.sin(beta) * np.cos(alpha), np.sin(beta) * np.sin(alpha), np.cos(beta)], axis=-1)


def choose_on_rings(
    sizes: ArrayLike, areas: ArrayLike, points: int | None, stream: np.random.RandomState
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Choose points of a latitude-longitude grid so that all represent about the same area.

    The grid itself is dense at the poles. The number of points on each ring is proportional to the area of the ring,
    and they are evenly spaced from a random longitude on. The grid lists ring after ring, with these ``sizes``
    ``[rings]`` and ``areas`` ``[rings]``. Increasing indices ``[points]`` are returned, of all points for None, and the
    area of each point, scaled so that their sum is that of all rings.
    """
    most, ring = np.asarray(sizes, dtype=np.int64), np.asarray(areas, dtype=np.float64)
    total = int(most.sum())
    right = points is None or 1 <= points <= total
    require(right, "points", f"None or an integer in 1 .. {total}", points)
    kept = most if points is None else _apportion(ring, most, points)
    firsts = np.concatenate([[0], np.cumsum(most)[:-1]])
    shifts = stream.uniform(size=len(most))
    indices, weights = [], []
    for first, size, keep, area, shift in zip(firsts, most, kept, ring, shifts, strict=True):
        if keep:
            places = np.floor((np.arange(keep) + shift) * size / keep).astype(np.int64)
            indices.append(first + np.minimum(places, size - 1))
            weights.append(np.full(keep, area / keep))
    weight = np.concatenate(weights)
    return np.concatenate(indices), weight * (ring.sum() / weight.sum())


def _apportion(areas: NDArray[np.float64], most: NDArray[np.int64], points: int) -> NDArray[np.int64]:
    """Distribute a number of points over rings in proportion to their areas, up to the number of points on each."""
    kept = np.zeros_like(most)
    while (left := points - int(kept.sum())) > 0:
        open_areas = np.where(kept < most, areas, 0.0)
        share = left * open_areas / open_areas.sum()
        added = np.minimum(np.floor(share).astype(np.int64), most - kept)
        if not added.any():  # all shares are below one: the largest come first
            added[np.argsort(-share, kind="stable")[:left]] = 1
        kept += added
    return kept
