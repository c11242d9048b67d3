"""Data on the sphere: projections, areas, tangent fields, with files that the tests write."""

import math
import pickle

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader

import lieattn_datasets as ld
from lieattn.groups import tetrahedral
from lieattn.models import FramewiseTransformer
from lieattn.spaces import Sphere
from lieattn.train import PointSetClassifier
from lieattn_datasets import _sphere, _toys, _wind
from lieattn_datasets._splits import frozen_stream
from tests.cases import refuses

RANDOM = np.random.default_rng(7)
QUARTER = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])


def smooth_images(count=3, size=28):
    rows, columns = np.mgrid[:size, :size]
    bumps = [np.exp(-((rows - 9 - 3 * k) ** 2 + (columns - 14 + 2 * k) ** 2) / 40) for k in range(count)]
    return np.rint(255 * np.stack(bumps)).astype(np.uint8)


test_bad_input = refuses(
    (lambda: ld.fibonacci_sphere(0), "points: expected an integer of at least 1"),
    (
        lambda: _sphere.choose_on_rings([2, 2], [1.0, 1.0], 5, frozen_stream(0)),
        r"points: expected None or an integer in 1 \.\. 4, got 5",
    ),
    (lambda: ld.project_image(np.zeros((3, 4)), np.zeros((1, 3))), "image: expected"),
    (lambda: ld.project_image(np.zeros((3, 3)), np.zeros((1, 2))), "directions: expected"),
    (
        lambda: ld.SphericalImages(ld.ImagePoints(np.zeros((1, 4, 6)), [0])),
        "images: expected square images, got 4 x 6",
    ),
)


class TestDirections:
    @pytest.mark.parametrize("points", [1, 2, 17, 1000])
    def test_fibonacci(self, points):
        directions = ld.fibonacci_sphere(points)
        np.testing.assert_allclose(np.linalg.norm(directions, axis=1), 1)
        if points == 1000:  # equal weights integrate polynomials of low degree well
            np.testing.assert_allclose(directions.mean(axis=0), 0, atol=1e-3)
            np.testing.assert_allclose(directions.T @ directions / points, np.eye(3) / 3, atol=1e-3)
            apart = np.linalg.norm(directions[:, None] - directions[None], axis=-1) + 2 * np.eye(points)
            assert apart.min(axis=1).min() > 0.5 * apart.min(axis=1).max()

    @pytest.mark.parametrize("points", [None, 1, 7, 60, 100, 221])
    def test_rings(self, points):
        sizes = np.array([1, 40, 60, 60, 60])
        areas = np.array([0.01, 1.0, 3.0, 4.0, 2.0])
        chosen, weights = _sphere.choose_on_rings(sizes, areas, points, frozen_stream(0))
        assert len(chosen) == len(np.unique(chosen)) == (points or 221)
        assert (np.diff(chosen) > 0).all()
        assert 0 <= chosen[0] <= chosen[-1] < 221
        assert weights.sum() == pytest.approx(10.01)
        if points == 1:
            assert 101 <= chosen[0] < 161  # on the largest ring
        if points == 100:
            counts = np.histogram(chosen, bins=[0, 1, 41, 101, 161, 221])[0]
            np.testing.assert_allclose(counts, areas * 10, atol=1.0)


class TestProjection:
    def test_places(self):
        image = np.zeros((5, 5))
        image[0, 2] = 1.0  # up
        image[2, 4] = 2.0  # right
        image[2, 2] = 3.0  # center
        directions = np.array([[0, 1.0, 0], [1.0, 0, 0], [0, 0, 1.0], [0, 0, -1.0], [-1.0, 0, 0]])
        np.testing.assert_allclose(ld.project_image(image, directions), [1, 2, 3, 0, 0])

    def test_against_scipy(self):
        from scipy.ndimage import map_coordinates

        image = RANDOM.integers(0, 256, (28, 28))
        directions = ld.fibonacci_sphere(500)
        spread = 13.5 / (1 + directions[:, 2:])
        place = [13.5 - spread[:, 0] * directions[:, 1], 13.5 + spread[:, 0] * directions[:, 0]]
        expected = map_coordinates(image.astype(float), place, order=1, mode="constant", cval=0.0)
        np.testing.assert_allclose(ld.project_image(image, directions), expected, atol=1e-9)


class TestSphericalImages:
    def test_items(self):
        images = ld.ImagePoints(smooth_images(), [2, 0, 1])
        sphere = ld.SphericalImages(images, 300)
        data = sphere[1]
        expected = ld.project_image(smooth_images()[1] / 255, ld.fibonacci_sphere(300))
        np.testing.assert_allclose(data.x[:, 0], expected, atol=1e-6)
        assert data.area.sum().item() == pytest.approx(4 * math.pi, rel=1e-5)
        assert data.y.tolist() == [0]
        assert sphere.num_classes == 3
        assert "rotation" not in data

    def test_rotation_convention(self):
        """The rotated signal at R s is the unrotated one at s."""
        images = ld.ImagePoints(smooth_images(), [0, 1, 2])
        turned = ld.SphericalImages(images, 200, rotate=True, seed=4)[2]
        rotation = turned.rotation[0].double().numpy()
        np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-6)
        back = turned.pos.double().numpy() @ rotation
        expected = ld.project_image(smooth_images()[2] / 255, back)
        np.testing.assert_allclose(turned.x[:, 0], expected, atol=1e-4)
        again = ld.SphericalImages(images, 200, rotate=True, seed=4)
        assert torch.equal(again[2].x, turned.x)
        assert not torch.allclose(again[1].rotation, again[2].rotation)
        assert not torch.allclose(ld.SphericalImages(images, 200, rotate=True)[2].rotation, turned.rotation)

    def test_classifiers_accept_them(self, monkeypatch):
        """Areas of points are no weights of labels, so they have another name."""
        task = PointSetClassifier(FramewiseTransformer(tetrahedral(), 1, 3, channels=4, layers=1), 3)
        monkeypatch.setattr(task, "log", lambda *_, **__: None)
        images = ld.SphericalImages(ld.ImagePoints(smooth_images(), [2, 0, 1]), 20)
        assert task.evaluate(Batch.from_data_list(list(images)), "train").isfinite()


def write_sphere(root, **changes):
    beta = np.pi * (2 * np.arange(6) + 1) / 12
    alpha = 2 * np.pi * np.arange(8) / 8
    content = {
        "beta": beta,
        "alpha": alpha,
        "x_train_nr": RANDOM.integers(0, 256, (5, 6, 8), dtype=np.uint8),
        "x_train_r": RANDOM.integers(0, 256, (3, 6, 8), dtype=np.uint8),
        "x_test_nr": RANDOM.integers(0, 256, (2, 6, 8), dtype=np.uint8),
        "x_test_r": RANDOM.integers(0, 256, (2, 6, 8), dtype=np.uint8),
        "y_train": np.arange(5, dtype=np.uint8),
        "y_test": np.array([9, 3], dtype=np.uint8),
        "rot_train": np.stack([QUARTER] * 3).astype(np.float32),
        "rot_test": np.stack([QUARTER] * 2).astype(np.float32),
    }
    content.update(changes)
    np.savez(root / "spherical_mnist_recipe.npz", **content)
    return content


class TestSphericalMNIST:
    def test_grid_and_areas(self, tmp_path):
        content = write_sphere(tmp_path)
        data = ld.SphericalMNIST(tmp_path, "test", verify=False)[1]
        assert data.y.tolist() == [3]
        np.testing.assert_allclose(data.x[:, 0], content["x_test_nr"][1].ravel() / 255, atol=1e-6)
        beta, alpha = np.meshgrid(content["beta"], content["alpha"], indexing="ij")
        x, y, z = data.pos.T
        np.testing.assert_allclose(np.arccos(z), beta.ravel(), atol=1e-6)
        np.testing.assert_allclose(np.mod(np.arctan2(y, x), 2 * np.pi), alpha.ravel(), atol=1e-5)
        assert data.area.sum().item() == pytest.approx(4 * math.pi, rel=1e-6)
        np.testing.assert_allclose((data.area * z**2).sum(), 4 * math.pi / 3, rtol=0.03)

    def test_splits_and_rotations(self, tmp_path):
        content = write_sphere(tmp_path)
        rotated = ld.SphericalMNIST(tmp_path, rotated=True, verify=False)
        assert rotated.labels.tolist() == [0, 1, 2]
        torch.testing.assert_close(rotated[0].rotation, torch.from_numpy(content["rot_train"][:1]))
        parts = [ld.SphericalMNIST(tmp_path, split, validation=2, verify=False) for split in ("train", "valid")]
        assert sorted(torch.cat([part.labels for part in parts]).tolist()) == [0, 1, 2, 3, 4]
        batch = next(iter(DataLoader(rotated, batch_size=3)))
        assert batch.rotation.shape == (3, 3, 3)
        assert batch.pos.shape == (144, 3)

    def test_fewer_points(self, tmp_path):
        content = write_sphere(tmp_path)
        whole, some = (ld.SphericalMNIST(tmp_path, points=points, verify=False) for points in (None, 20))
        assert some[0].pos.shape == (20, 3)
        assert some[0].area.sum().item() == pytest.approx(4 * math.pi, rel=1e-6)
        match = (whole[4].pos[None] - some[4].pos[:, None]).abs().sum(-1).argmin(dim=1)
        torch.testing.assert_close(whole[4].x[match], some[4].x)
        spread = some[0].area.max() / some[0].area.min()
        grid = whole[0].area.max() / whole[0].area.min()
        assert spread < 0.7 * grid
        assert len(pickle.dumps(some)) < len(pickle.dumps(whole))
        assert content["x_train_nr"].shape == (5, 6, 8)


def rotating_sphere(axis, latitude, longitude):
    """Return eastward and northward components of the field axis x s, from their definition."""
    phi, lam = np.meshgrid(latitude, longitude, indexing="ij")
    a, b, c = axis
    u = -np.sin(phi) * (a * np.cos(lam) + b * np.sin(lam)) + c * np.cos(phi)
    v = b * np.cos(lam) - a * np.sin(lam)
    return u, -v


class Named(np.ndarray):
    """As much of an array of xarray as is read: names of its axes, its coordinates, and its attributes."""

    def __new__(cls, values, dims, coords=None, units=None):
        self = np.asarray(values).view(cls)
        self.dims, self.coords, self.attrs = dims, coords or {}, {"units": units} if units else {}
        return self

    def transpose(self, _, *last):
        dims = [dim for dim in self.dims if dim not in last] + list(last)
        return np.asarray(self).transpose([self.dims.index(dim) for dim in dims])


def write_wind(root, **changes):
    latitude, longitude = np.linspace(90, -90, 13), 30.0 * np.arange(12)
    u, v = zip(
        *[rotating_sphere([month, 2.0, -3.0], np.deg2rad(latitude), np.deg2rad(longitude)) for month in range(1, 13)],
        strict=True,
    )
    content = {
        "u": np.stack(u).astype(np.float32),
        "v": np.stack(v).astype(np.float32),
        "lat": latitude.astype(np.float32),
        "lon": longitude.astype(np.float32),
        "month": np.arange(1, 13, dtype=np.int8),
    }
    content.update(changes)
    np.savez(root / "wind_monthly_mean.npz", **content)
    return content


class TestWind:
    def test_vectors_of_a_rotating_sphere(self, tmp_path):
        """A known field, also at the poles, where the components alone do not determine the vector."""
        write_wind(tmp_path)
        data = ld.WindOnSphere(tmp_path, verify=False)[2]
        assert data.month.tolist() == [3]
        assert data.pos.shape == (2 + 11 * 12, 3)
        for wind, month in ((data.wind, 3.0), (data.y, 4.0)):
            axis = torch.tensor([[month, 2.0, -3.0]])
            torch.testing.assert_close(wind, torch.linalg.cross(axis.expand_as(data.pos), data.pos), atol=1e-5, rtol=0)
        assert data.east[[0, -1]].norm() == 0
        torch.testing.assert_close(data.east[1:-1, :2], data.pos[1:-1, [1, 0]] * torch.tensor([-1.0, 1.0]))
        assert data.sun[0].tolist() == pytest.approx([0, 0, 0], abs=1e-6)  # in March, when it moves north
        assert data.sun_change.tolist() == [[0, 0, 1]]
        assert data.pos[0].tolist() == [0, 0, 1]
        assert data.pos[-1].tolist() == [0, 0, -1]
        assert data.weight.sum().item() == pytest.approx(4 * math.pi, rel=1e-6)

    @pytest.mark.parametrize("south", [True, False])
    def test_grids_of_xarray(self, south):
        """Names and axes in any order; the units are those that the file states, also where both are possible."""
        latitude, longitude = np.linspace(1.5, 0.3, 5)[:: -1 if south else 1], np.linspace(-0.5, 0.5, 5)
        u, v = RANDOM.normal(size=(2, 3, 5, 5))
        expected = ld.wind_vectors(u, v, latitude, longitude, units="degrees")
        coords = {"lat": Named(latitude, ("lat",), units="degrees_north")}
        coords["lon"] = Named(longitude, ("lon",), units="degrees_east")
        fields = (
            Named(u.transpose(2, 0, 1), ("lon", "valid_time", "lat"), coords),
            Named(v, ("valid_time", "lat", "lon"), coords),
        )
        for found in (ld.wind_vectors(*fields), ld.wind_vectors(*fields, coords["lat"], coords["lon"])):
            assert all(map(np.array_equal, found, expected))
        torch.testing.assert_close(ld.on_sphere(coords), torch.from_numpy(expected[0].astype(np.float32)))
        with pytest.raises(ValueError, match="v: expected the coordinates latitude and longitude, got v on others"):
            ld.wind_vectors(fields[0], Named(v, ("lat", "lon"), {**coords, "lat": coords["lat"][::-1]}))

    @pytest.mark.parametrize(
        ("latitude", "longitude", "message"),
        [
            (
                [0.5, 0.4, 0.3],
                [0.1, 0.2],
                r"in degrees or both in radians, got 0.3 .. 0.5 and 0.1 .. 0.2, which can be",
            ),
            ([0.0, 1.5, 3.0], [0.0, 2.0], "latitudes count from the equator"),
            (np.linspace(-np.pi / 2, np.pi / 2, 3), [0.0, 180.0], "or one of each"),
            ([60.0, 0.0, -60.0], [0.0, np.pi], "or one of each"),
            ([0.0, 90.0, 180.0], [0.0, 180.0], r"latitude: expected degrees in -90 \.\. 90, got 180 for point 2"),
            (
                [1.0, 0.0, -1.0],
                [0.1, 0.1 + 2 * np.pi],
                "longitude: expected radians in -6.28319 .. 6.28319, got 6.38319",
            ),
            ([90.0, 0.0, 0.0], [0.0, 180.0], "latitude: expected each angle once, got some of the 3 again"),
            ([90.0, 0.0, -90.0], [-180.0, 180.0], "u, v: expected the same values in the first and the last column"),
            ([90.0, 0.0, -90.0], [[0.0], [180.0]], r"expected at least one angle, .rows. and .columns., got"),
            ([90.0, 0.0], [0.0, 180.0], r"u, v: expected \[..., 2, 2\] for these latitude and longitude, got"),
            (None, None, "latitude: expected angles, or a table with them, got ndarray alone"),
        ],
    )
    def test_grids_that_can_be_read_in_two_ways(self, latitude, longitude, message):
        u = np.arange(6.0).reshape(1, 3, 2)
        with pytest.raises(ValueError, match=message):
            ld.wind_vectors(u, u, latitude, longitude)

    @pytest.mark.parametrize("task", ["forecast", "fill"])
    def test_months_are_in_one_split(self, task, tmp_path):
        write_wind(tmp_path)
        seen = []
        for split in ("train", "valid", "test"):
            part = ld.WindOnSphere(tmp_path, split, task=task, verify=False)
            months = {data.month.item() for data in part}
            seen.append(months | {month + 1 for month in months} if task == "forecast" else months)
        assert not seen[0] & seen[1]
        assert not seen[0] & seen[2]
        assert not seen[1] & seen[2]
        assert _wind._MONTHS[task]["train"] == tuple(sorted(_wind._MONTHS[task]["train"]))

    def test_fill(self, tmp_path):
        write_wind(tmp_path)
        part = ld.WindOnSphere(tmp_path, "test", task="fill", points=40, observed=0.3, draws=3, verify=False)
        assert [data.month.item() for data in part] == [6, 6, 6, 12, 12, 12]
        masks = set()
        for data in part:
            above = {6: 1.0, 12: -1.0}[data.month.item()]  # it is in the north in June
            torch.testing.assert_close(data.sun, torch.tensor([[0, 0, above]]))
            assert data.x.sum() == 12
            assert torch.equal(data.x[:, 0] == 0, data.mask)
            assert torch.equal(data.wind[~data.mask], data.y[~data.mask])
            assert not data.wind[data.mask].any()
            assert torch.equal(data.interpolated[~data.mask], data.y[~data.mask])
            torch.testing.assert_close((data.interpolated * data.pos).sum(1), torch.zeros(40), atol=1e-5, rtol=0)
            place = int(data.mask.nonzero()[0])
            distance = (data.pos - data.pos[place]).norm(dim=1).masked_fill(data.mask, math.inf)
            near = distance.topk(8, largest=False).indices
            mean = torch.einsum("n,nd->d", torch.softmax(-3 * distance[near].log(), 0), data.wind[near])
            mean = mean - (mean @ data.pos[place]) * data.pos[place]
            torch.testing.assert_close(data.interpolated[place], mean, atol=1e-4, rtol=0)
            masks.add(tuple(data.pos.flatten().tolist()))
        assert len(masks) == 6
        again = ld.WindOnSphere(tmp_path, "test", task="fill", points=40, observed=0.3, draws=3, verify=False)
        assert torch.equal(again[4].wind, part[4].wind)
        other = ld.WindOnSphere(tmp_path, "test", task="fill", points=40, draws=3, seed=1, verify=False)
        assert not torch.equal(other[4].pos, part[4].pos)
        turned = ld.RandomRotateFields(0, vectors=part.vectors)(part[0])
        torch.testing.assert_close((turned.pos * turned.y).sum(-1), torch.zeros(40), atol=1e-5, rtol=0)

    def test_scale_is_of_the_training_months(self, tmp_path):
        write_wind(tmp_path)
        part = ld.WindOnSphere(tmp_path, "test", verify=False)
        squared = [2 / 3 * (month**2 + 13) for month in range(1, 9)]
        assert part.scale == pytest.approx(math.sqrt(np.mean(squared)), rel=0.02)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"task": "paint"}, "task: expected one of"),
            ({"observed": 1.0}, "observed: expected a number between 0 and 1"),
            ({"draws": 0}, "draws: expected an integer of at least 1"),
            ({"neighbors": 0}, "neighbors: expected an integer of at least 1"),
            ({"points": 1, "task": "fill"}, "points: expected at least 2 for 'fill'"),
            ({"points": 999}, r"points: expected None or an integer in 1 \.\. 134"),
            ({"seed": -1}, "seed: expected an integer in 0"),
        ],
    )
    def test_bad_arguments(self, tmp_path, options, message):
        write_wind(tmp_path)
        with pytest.raises(ValueError, match=message):
            ld.WindOnSphere(tmp_path, verify=False, **options)


class TestFlights:
    def test_great_circles_without_wind_and_noise(self):
        """Positions ahead and past fixes are those of one great circle, flown at a constant speed."""
        flights = ld.Flights("test", 20, wind=0.0, noise=0.0, ahead=(0.5, 1.0))
        batch = Batch.from_data_list(list(flights))
        assert batch.drift.abs().max() < 1e-4  # 10 m: fixes are interpolated between minutes
        last = batch.pos[batch.ptr[1:] - 1]
        ahead = Sphere().exponential(last, batch.ahead[..., None] * batch.vel[:, None])
        torch.testing.assert_close(ahead, batch.y, atol=2e-6, rtol=0)
        speed = _toys.EARTH_RADIUS * batch.vel.norm(dim=-1)
        assert 800 <= speed.min() < speed.max() <= 950

    def test_items(self):
        flights = ld.Flights("valid", 30)
        item = flights[3]
        assert (item.y.shape, item.ahead.tolist()) == ((1, 3, 3), [[0.25, 0.5, 1.0]])
        times = torch.stack([data.x[:, 0] for data in flights])
        assert (times[:, -1] == 0).all()
        gaps = times.diff(dim=1)
        assert (gaps >= 0).all()
        assert (gaps.max(dim=1).values > 1 / 3).all()
        for data in flights:
            torch.testing.assert_close(data.pos.norm(dim=1), torch.ones(12))
            assert (data.pos * data.drift).sum(dim=1).abs().max() < 1e-5  # tangent
        assert all(torch.equal(a.y, b.y) for a, b in zip(flights, ld.Flights("valid", 5), strict=False))
        assert not torch.equal(flights[0].y, ld.Flights("test", 1)[0].y)

    def test_the_drift_shows_the_wind(self):
        """Fixes are beside the great circle by the wind, and by the noise where there is no wind."""
        sizes = [
            np.mean([data.drift.norm(dim=1).mean() for data in ld.Flights("test", 50, wind=wind, noise=noise)])
            for wind, noise in ((200.0, 0.0), (0.0, 1.0))
        ]
        assert sizes[0] > 4 * sizes[1] > 0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"fixes": 2}, "fixes: expected an integer of at least 3, got 2"),
            ({"ahead": (0.5, 0.25)}, "ahead: expected increasing times in hours"),
            ({"ahead": ()}, "ahead: expected increasing times in hours"),
            ({"wind": 1000.0}, r"wind, noise: expected 0 \.\. 500 km/h"),
        ],
    )
    def test_bad_arguments(self, options, message):
        with pytest.raises(ValueError, match=message):
            ld.Flights("test", 2, **options)
