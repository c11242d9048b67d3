"""Dynamics of lieattn_datasets: physics against independent integrators, files, rotations of vectors."""

import math

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

import lieattn_datasets as ld
from lieattn.transforms import RadiusGraph
from lieattn_datasets import _nbody, _splits, _transforms


def systems(count=4, particles=5):
    return _nbody.random_charges(count, particles, seed=5, split=0)


GENERATED = {
    "charges": lambda *args, **options: ld.NBodySimulated(*args, start_time=0.0, end_time=0.1, **options),
    "springs": ld.Springs,
    "constellations": ld.Constellation,
    "shapes": lambda *args, **options: ld.ProceduralShapes(*args, points=16, **options),
    "scenes": lambda *args, **options: ld.ProceduralScenes(*args, points=16, **options),
}


@pytest.mark.parametrize("name", GENERATED)
class TestGenerated:
    def test_seeds_sizes_and_splits(self, name):
        make = GENERATED[name]
        few, more = make(size=3), make(size=5)
        for one, two in zip(few, more.subset(range(3)), strict=True):
            for key, value in one.to_dict().items():
                torch.testing.assert_close(two[key], value, rtol=0, atol=1e-6)
        others = [make(split, 1) for split in ("train", "valid", "test")] + [make(size=1, seed=1)]
        for key in ("pos", "x") if name == "springs" else ("pos",):
            assert len({tuple(other[0][key].flatten().tolist()) for other in others}) == 4

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"split": "all"}, "split: expected one of"),
            ({"size": 0}, "size: expected an integer of at least 1"),
            ({"size": 1, "seed": -1}, "seed: expected an integer in 0"),
            ({"size": 1, "seed": 2**32}, r"seed: expected an integer in 0 \.\. 4294967295, got 4294967296"),
        ],
    )
    def test_bad_arguments(self, name, options, message):
        with pytest.raises(ValueError, match=message):
            GENERATED[name](**options)


class TestCharges:
    def test_against_another_integrator(self):
        from scipy.integrate import solve_ivp

        charge, pos, vel = systems(2, 4)
        path, speed = ld.simulate_charges(charge, pos, vel, [0.0, 0.5, 1.0])

        def slope(_, state, q):
            x, v = state.reshape(2, -1, 3)
            force = np.zeros_like(x)
            for i in range(len(x)):
                for j in range(len(x)):
                    if i != j:
                        apart = x[i] - x[j]
                        force[i] += q[i] * q[j] * apart / (apart @ apart + 0.01) ** 1.5
            return np.concatenate([v.ravel(), force.ravel()])

        for system in range(2):
            start = np.concatenate([pos[system].ravel(), vel[system].ravel()])
            options = {"args": (charge[system],), "rtol": 1e-9, "atol": 1e-10, "t_eval": [0.0, 0.5, 1.0]}
            exact = solve_ivp(slope, (0, 1), start, **options).y.T.reshape(3, 2, 4, 3)
            np.testing.assert_allclose(path[system], exact[:, 0], atol=2e-5)
            np.testing.assert_allclose(speed[system], exact[:, 1], atol=2e-5)

    def test_what_is_conserved(self):
        charge, pos, vel = systems(300)
        path, speed = ld.simulate_charges(charge, pos, vel, [0.0, 0.7])
        np.testing.assert_allclose(path[:, 0], pos)
        np.testing.assert_allclose(speed.mean(axis=2), 0, atol=1e-12)
        np.testing.assert_allclose(path.mean(axis=2), 0, atol=1e-12)
        spin = np.cross(path, speed).sum(axis=2)
        np.testing.assert_allclose(spin[:, 1], spin[:, 0], atol=1e-10)
        before, after = (ld.charge_energy(charge, path[:, time], speed[:, time]) for time in (0, 1))
        np.testing.assert_allclose(after, before, atol=5e-3)

    def test_a_step_that_is_too_long_is_refused(self):
        charge = np.array([[1.0, -1.0]])
        pos = np.array([[[0.05, 0, 0], [-0.05, 0, 0]]])
        ld.simulate_charges(charge, pos, 0 * pos, [0.1, 0.2, 0.3])
        with pytest.raises(ValueError, match="use a smaller step"):
            ld.simulate_charges(charge, pos, 0 * pos, [0.1, 0.2, 0.3], step=0.1)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"pos": np.zeros((1, 3, 3))}, "expected .systems, particles."),
            ({"step": 0.0}, "step, softening: expected positive numbers"),
            ({"times": [0.0005]}, "multiples of the step"),
            ({"times": [1.0, 0.5]}, "times: expected increasing"),
            ({"times": [0.5, 0.5]}, "times: expected increasing"),
            ({"times": []}, "times: expected increasing"),
        ],
    )
    def test_bad_input(self, change, message):
        good = {"charge": np.ones((1, 2)), "pos": np.eye(3)[None, :2], "vel": np.zeros((1, 2, 3)), "times": [0.01]}
        ld.simulate_charges(**good)
        with pytest.raises(ValueError, match=message):
            ld.simulate_charges(**{**good, **change})

    def test_one_particle_goes_straight(self):
        path, _ = ld.simulate_charges([[1.0]], [[[0.0, 0, 0]]], [[[1.0, 2, 3]]], [2.0])
        np.testing.assert_allclose(path[0, 0, 0], [2, 4, 6])


def write_nbody(root, count=6, **changes):
    charge, pos, vel = systems(count)
    times = np.arange(3) / 10
    path, speed = ld.simulate_charges(charge, pos, vel, times)
    content = {
        "charge": charge.astype(np.int8),
        "pos": path.astype(np.float32),
        "vel": speed.astype(np.float32),
        "times": times.astype(np.float32),
        "energy": ld.charge_energy(charge, pos, vel),
        "traj_pos": path[:2].astype(np.float32),
        "traj_vel": speed[:2].astype(np.float32),
        "traj_times": times.astype(np.float32),
        "split_train": np.array([0, 3]),
        "split_valid": np.array([1, 4]),
        "split_test": np.array([5, 2]),
    }
    content.update(changes)
    np.savez(root / "nbody_charged5.npz", **content)
    return content


class TestNBody:
    def test_file(self, tmp_path):
        content = write_nbody(tmp_path)
        part = ld.NBody(tmp_path, "test", start=0, end=2, verify=False)
        for index, data in zip((5, 2), part, strict=True):
            np.testing.assert_array_equal(data.pos, content["pos"][index, 0])
            np.testing.assert_array_equal(data.vel, content["vel"][index, 0])
            np.testing.assert_array_equal(data.y, content["pos"][index, 2])
            assert data.x[:, 0].tolist() == content["charge"][index].tolist()
            assert data.time.item() == pytest.approx(0.2)
            assert data.mass.tolist() == [1.0] * 5
            assert data.energy.item() == pytest.approx(content["energy"][index], abs=1e-5)
        np.testing.assert_allclose(part.energy, content["energy"][[5, 2]], atol=1e-5)
        np.testing.assert_allclose(part.subset([1]).energy, content["energy"][[2]], atol=1e-5)
        batch = next(iter(DataLoader(part, batch_size=2)))
        assert batch.y.shape == (10, 3)

    def test_snapshots_of_the_file(self, tmp_path):
        write_nbody(tmp_path)
        with pytest.raises(ValueError, match=r"^start, end: expected increasing snapshots in 0 \.\. 2, got 3 and 4"):
            ld.NBody(tmp_path, verify=False)

    def test_stored_energies_are_compared(self, tmp_path, monkeypatch):
        content = write_nbody(tmp_path)
        monkeypatch.setattr(type(_nbody.RELEASE), "check_file", lambda self, path: None)
        ld.NBody(tmp_path, start=0, end=1)
        write_nbody(tmp_path, energy=content["energy"] + 0.1)
        with pytest.raises(ValueError, match="the energy changes by"):
            ld.NBody(tmp_path, start=0, end=1)

    @pytest.mark.parametrize("make", [ld.NBodySimulated, ld.Springs])
    def test_particles(self, make):
        with pytest.raises(ValueError, match="particles: expected an integer of at least 1"):
            make(size=1, particles=0)

    def test_sizes_and_speeds(self):
        """Those of the literature."""
        assert [_splits.split_size(split, None) for split in ("train", "valid", "test")] == [3000, 2000, 2000]
        assert [len(ld.Constellation(split)) for split in ("train", "valid", "test")] == [10_000, 1_000, 1_000]
        _, _, vel = _nbody.random_charges(4, 1000, seed=0, split=0)  # the velocity of the mean is small
        np.testing.assert_allclose(np.linalg.norm(vel, axis=-1), 0.5, atol=0.06)
        data = ld.NBodySimulated(size=1, particles=2)
        assert data[0].time.item() == 1.0
        assert repr(data).startswith("NBodySimulated(1 items like Data(x=[2, 1], ")
        assert repr(data.subset([])) == "NBodySimulated(0 items)"

    def test_simulated(self):
        small = {"start_time": 0.0, "end_time": 0.1}
        few = ld.NBodySimulated(size=3, **small)
        data = few[0]
        assert set(data.x.flatten().tolist()) <= {-1.0, 1.0}
        assert data.pos.mean(0).abs().max() < 1e-6
        assert data.time.item() == pytest.approx(0.1)
        end, _ = ld.simulate_charges(data.x.T, data.pos[None], data.vel[None], [0.1])
        np.testing.assert_allclose(data.y, end[0, 0], atol=1e-5)
        assert ld.NBodySimulated(size=1, particles=3, **small)[0].pos.shape == (3, 3)

    def test_other_snapshots_are_checked(self):
        charge, pos, vel = systems(2)
        with pytest.raises(ValueError, match=r"pos, vel: expected \[2, 2, 5, 3\]"):
            ld.ChargedParticles(charge, pos[:, None], vel[:, None], [0, 1], start=0, end=1)
        path = np.stack([pos, pos * np.nan], axis=1)
        with pytest.raises(ValueError, match="pos: expected finite"):
            ld.ChargedParticles(charge, path, path, [0, 1], start=0, end=1)
        path = np.stack([pos, pos], axis=1)
        faster = np.stack([vel, 2 * vel, 0 * vel], axis=1)
        later = ld.ChargedParticles(charge, np.stack([pos] * 3, axis=1), faster, [0, 1, 3], start=1, end=2)
        np.testing.assert_allclose(later.energy, ld.charge_energy(charge, pos, 2 * vel))  # at the start
        assert later[0].time.tolist() == [2]
        with pytest.raises(ValueError, match="charge: expected finite"):
            ld.ChargedParticles(np.full_like(charge, np.nan, dtype=float), path, path, [0, 1], start=0, end=1)
        with pytest.raises(ValueError, match="times: expected finite"):
            ld.ChargedParticles(charge, path, path, [0, np.inf], start=0, end=1)
        for bad, times in ((charge[0], [0, 1]), (charge, [[0, 1]])):
            with pytest.raises(ValueError, match=r"charge, times: expected \[systems, particles\] and \[times\], got"):
                ld.ChargedParticles(bad, path, path, times, start=0, end=1)


class TestSprings:
    def test_every_part_of_the_trajectories_occurs(self):
        assert set(ld.Springs(size=400, chunk=150)._first.tolist()) == {0, 150, 300}

    def test_against_another_integrator(self):
        from scipy.integrate import solve_ivp

        data = ld.Springs(size=1, chunk=None)[0]
        mass, stiffness = data.x.double().numpy().T
        q, p = data.pos.double().numpy(), data.momentum.double().numpy()
        times = np.linspace(0, 5, 500)

        def slope(_, state):
            place, push = state.reshape(2, 6, 2)
            force = np.zeros_like(place)
            for i in range(6):
                for j in range(6):
                    force[i] -= 2 * stiffness[i] * stiffness[j] * (place[i] - place[j])
            return np.concatenate([(push / mass[:, None]).ravel(), force.ravel()])

        start = np.concatenate([q.ravel(), p.ravel()])
        options = {"method": "DOP853", "rtol": 1e-10, "atol": 1e-10}
        exact = solve_ivp(slope, (0, 5), start, t_eval=times, **options).y.T.reshape(500, 2, 6, 2)
        path, push = ld.simulate_springs(mass, stiffness, q, p, times)
        np.testing.assert_allclose(path, exact[:, 0], atol=1e-7)
        np.testing.assert_allclose(push, exact[:, 1], atol=1e-6)
        np.testing.assert_allclose(data.y[:, :, :2].transpose(0, 1), path, atol=1e-5)
        np.testing.assert_allclose(data.y[:, :, 2:].transpose(0, 1), push, atol=1e-4)

    def test_energy_is_conserved(self):
        data = ld.Springs(size=1, chunk=None, seed=3)[0]
        mass, stiffness = data.x.double().numpy().T
        path, push = ld.simulate_springs(mass, stiffness, data.pos, data.momentum, np.linspace(0, 100, 50))
        energy = ld.spring_energy(mass, stiffness, path, push)
        np.testing.assert_allclose(energy, energy[0], rtol=1e-10)
        assert data.energy.item() == pytest.approx(energy[0], rel=1e-6)
        np.testing.assert_allclose(push.sum(axis=1), 0, atol=1e-5)

    def test_chunks(self):
        parts = ld.Springs(size=50)
        whole = ld.Springs(size=50, chunk=None)
        firsts = set()
        for chunk, full in zip(parts, whole, strict=True):
            assert chunk.y.shape == (6, 5, 4)
            torch.testing.assert_close(chunk.time, torch.arange(5)[None] * 5 / 499)
            torch.testing.assert_close(torch.cat([chunk.pos, chunk.momentum], 1), chunk.y[:, 0])
            match = (full.y[:, ::5] - chunk.y[:, :1]).abs().amax(dim=(0, 2))
            first = 5 * int(match.argmin())
            firsts.add(first)
            torch.testing.assert_close(full.y[:, first : first + 5], chunk.y)
            torch.testing.assert_close(full.energy, chunk.energy, rtol=1e-5, atol=1e-5)
        assert len(firsts) > 25

    def test_distributions(self):
        first = list(ld.Springs(size=400, chunk=None, particles=3, seed=2))
        mass, stiffness = torch.cat([data.x for data in first]).T
        assert 0.1 <= mass.min() < 0.2
        assert 3.0 < mass.max() < 3.1
        assert stiffness.mean() == pytest.approx(2.5, abs=0.2)
        assert torch.cat([data.pos for data in first]).std() == pytest.approx(0.4, abs=0.02)
        momentum = torch.stack([data.momentum for data in first])
        assert momentum.std() == pytest.approx(0.6 * math.sqrt(2 / 3), abs=0.02)
        assert momentum.mean(dim=1).abs().max() < 1e-6

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match=r"chunk: expected None or an integer in 1 \.\. 500, got 501"):
            ld.Springs(size=1, chunk=501)
        with pytest.raises(ValueError, match="mass, stiffness: expected positive"):
            ld.simulate_springs([0.0], [1.0], np.zeros((1, 2)), np.zeros((1, 2)), [0.0])
        with pytest.raises(ValueError, match="pos: expected an array of real numbers, got NoneType"):
            ld.simulate_springs([1.0], [1.0], None, np.zeros((1, 2)), [0.0])
        with pytest.raises(ValueError, match="momentum: expected finite numbers"):
            ld.simulate_springs([1.0], [1.0], np.zeros((1, 2)), np.full((1, 2), np.nan), [0.0])
        with pytest.raises(ValueError, match=r"mass, stiffness, pos.* got \[2\], \[1\], \[1, 2\]"):
            ld.simulate_springs([1.0, 1.0], [1.0], np.zeros((1, 2)), np.zeros((1, 2)), [0.0])


class TestConstellation:
    def test_items(self):
        data_set = ld.Constellation(size=200)
        corners = torch.tensor([3, 4, 5, 5])
        seen = set()
        for data in data_set:
            assert len(data.pos) == (data.y[0] * corners).sum()
            assert 1 <= data.y.sum() <= 8
            assert data.x.shape == (len(data.pos), 33)
            apart = torch.cdist(data.pos, data.pos).sort(dim=1).values[:, 1:]
            torch.testing.assert_close(data.x[:, : len(data.pos) - 1], apart, atol=1e-5, rtol=1e-4)
            assert not data.x[:, len(data.pos) - 1 :].any()
            seen |= set(data.y.flatten().tolist())
        assert seen == {0, 1, 2}
        assert data_set.num_classes == 3
        assert data_set.labels.float().mean(0).sub(1.0).abs().max() < 0.2

    def test_patterns_without_noise(self):
        """Without noise, the shortest distances within a pattern are those of its shape."""
        data_set = ld.Constellation(size=300, repetitions=1, drop=0.75, noise=0.0)
        sides = {"triangle": math.sqrt(3), "square": math.sqrt(2), "pentagon": 2 * math.sin(math.pi / 5), "L": 1.0}
        found = set()
        for data in data_set:
            if data.y.sum() == 1:
                name = data_set.patterns[int(data.y[0].argmax())]
                torch.testing.assert_close(data.x[:, 0], torch.full((len(data.pos),), sides[name] / 12))
                found.add(name)
        assert found == set(sides)

    def test_motions_keep_the_shapes(self):
        plain, shifted, moved = (ld.Constellation(size=20, motion=motion) for motion in ("none", "T2", "SE2"))
        for one, two, three in zip(plain, shifted, moved, strict=True):
            torch.testing.assert_close(one.x, two.x, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(one.x, three.x, atol=1e-5, rtol=1e-4)
            step = two.pos - one.pos
            torch.testing.assert_close(step, step[:1].expand_as(step), atol=1e-5, rtol=0)
            assert step.abs().max() <= 1
            centered = [data.pos - data.pos.mean(0) for data in (one, three)]
            u, _, v = torch.linalg.svd(centered[0].T @ centered[1])
            torch.testing.assert_close(centered[0] @ (u @ v), centered[1], atol=1e-4, rtol=0)
            assert torch.linalg.det(u @ v) > 0
        assert (plain[0].pos - moved[0].pos).std(0).max() > 0.01

    def test_never_empty(self):
        counts = ld.Constellation(size=400, drop=1.0).labels
        assert counts.sum(1).tolist() == [1] * 400
        assert (counts.sum(0) > 60).all()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"repetitions": 0}, "repetitions: expected an integer of at least 1"),
            ({"drop": 1.5}, "drop: expected a probability"),
            ({"noise": -1.0}, "noise, max_angle, side: expected finite numbers"),
            ({"side": math.inf}, "max_angle, side: expected finite"),
            ({"motion": "SE3"}, "motion: expected one of"),
        ],
    )
    def test_bad_arguments(self, options, message):
        with pytest.raises(ValueError, match=message):
            ld.Constellation(**{"size": 1, **options})


class TestMotions:
    def test_pairs_of_vectors_in_the_plane(self):
        part = ld.Springs(size=1)
        data = part[0]
        matrix = np.array([[0.0, -1.0], [1.0, 0.0]])
        turned = ld.TransformFields(matrix, vectors=part.vectors)(data)
        torch.testing.assert_close(turned.y[..., 0], -data.y[..., 1])
        torch.testing.assert_close(turned.y[..., 3], data.y[..., 2])
        torch.testing.assert_close(turned.momentum[:, 1], data.momentum[:, 0])
        assert torch.equal(turned.x, data.x)

    def test_tensors_and_shift(self):
        tensor = torch.randn(1, 3, 3, dtype=torch.float64)
        data = Data(pos=torch.randn(4, 3), polarizability=tensor, dipole=torch.randn(1, 3), z=torch.arange(4))
        data.rotation = torch.from_numpy(_transforms.rotation_matrix([3.0, 1, 2, -1]))[None]
        matrix = _transforms.rotation_matrix([1.0, -2, 0.5, 3])
        moved = ld.TransformFields(matrix, shift=[1, 2, 3])(data)
        rotation = torch.from_numpy(matrix)
        torch.testing.assert_close(moved.polarizability, rotation @ tensor @ rotation.T)
        torch.testing.assert_close(moved.rotation, rotation @ data.rotation)
        torch.testing.assert_close(moved.dipole, data.dipole @ rotation.T.float())
        torch.testing.assert_close(moved.pos, data.pos @ rotation.T.float() + torch.tensor([1.0, 2, 3]))
        assert "shift=[1.0, 2.0, 3.0]" in repr(ld.TransformFields(np.eye(3), [1, 2, 3]))

    def test_edges_of_a_crystal_turn_with_it(self):
        graph = RadiusGraph(0.9, displacements=True)
        made = graph(Data(pos=torch.rand(4, 3), cell=torch.eye(3)[None], pbc=torch.ones(1, 3, dtype=torch.bool)))
        turn = ld.TransformFields(_transforms.rotation_matrix([1.0, -2, 0.5, 3]), [1, 2, 3], vectors=("pos", "cell"))
        turned = turn(made)
        for name, vectors in graph(turned).to_dict().items():
            torch.testing.assert_close(turned[name], vectors)
        made.edge_shift = torch.ones(5, 3, dtype=torch.int64)  # numbers of cells, as in other packages
        assert torch.equal(turn(made).edge_shift, made.edge_shift)

    def test_default_names_are_those_of_all_data_sets(self):
        """Vectors that the default does not name stay where they are, such as the ground of the Earth under winds."""
        kinds = [one for one in vars(ld).values() if isinstance(one, type) and hasattr(one, "tensors")]
        assert ld.WindOnSphere in kinds
        for kind in kinds:
            assert {*kind.vectors} <= {"pos", "y", *_transforms.VECTORS}
            assert {*kind.tensors} <= {*_transforms.TENSORS}

    def test_random_rotations(self):
        data = Data(pos=torch.eye(3), normal=torch.eye(3))
        turn = ld.RandomRotateFields(seed=1)
        first, second = turn(data), turn(data)
        for moved in (first, second):
            torch.testing.assert_close(moved.pos @ moved.pos.T, torch.eye(3), atol=1e-6, rtol=0)
            assert torch.equal(moved.pos, moved.normal)
            assert torch.linalg.det(moved.pos) > 0
        assert not torch.allclose(first.pos, second.pos)
        assert torch.equal(ld.RandomRotateFields(seed=1)(data).pos, first.pos)
        average = torch.stack([turn(data).pos for _ in range(1000)]).mean(0)
        assert average.abs().max() < 0.06  # for Haar measure, the mean of rotations is zero

    @pytest.mark.parametrize("axis", ["x", "y", "z"])
    def test_one_axis(self, axis):
        turn = ld.RandomRotateFields(seed=2, axis=axis)
        still = "xyz".index(axis)
        angles = []
        for _ in range(250):
            matrix = turn(Data(pos=torch.eye(3))).pos
            torch.testing.assert_close(matrix[still], torch.eye(3)[still])
            other = (still + 1) % 3
            angles.append(math.atan2(matrix[other, (other + 1) % 3], matrix[other, other]))
        assert abs(np.mean(np.cos(angles))) < 0.15
        assert abs(np.mean(np.sin(angles))) < 0.15

    def test_plane_with_shifts(self):
        """Shifts go both ways, and distances stay."""
        move, place = ld.RandomRotateFields(0, dim=2, max_shift=2.0), Data(pos=torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
        moved = torch.stack([move(place).pos for _ in range(200)])
        torch.testing.assert_close((moved[:, 1] - moved[:, 0]).norm(dim=1), torch.ones(200))
        assert moved[:, 0].abs().max() <= 2
        assert moved[:, 0].min() < -1.8
        assert moved[:, 0].max() > 1.8

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: ld.TransformFields(np.ones((2, 3))), "square"),
            (lambda: ld.TransformFields(2 * np.eye(3)), "orthogonal"),
            (lambda: ld.TransformFields((1 + 1e-5) * np.eye(3)), "orthogonal"),
            (lambda: ld.TransformFields(np.eye(3), shift=[1.0, 2.0]), "3 finite numbers"),
            (lambda: ld.TransformFields(np.eye(3))(Data(pos=torch.zeros(2, 2))), r"data.pos: expected \[..., 3\]"),
            (lambda: ld.TransformFields(np.eye(2))(Data(pos=torch.zeros(2, 4))), r"data.pos: expected \[..., 2\]"),
            (
                lambda: ld.TransformFields(np.eye(2))(Data(pos=torch.zeros(1, 2), quadrupole=torch.zeros(1, 3, 3))),
                r"data.quadrupole: expected \[..., 2, 2\]",
            ),
            (lambda: ld.TransformFields(np.eye(2))(Data(pos=torch.ones(1, 2).long())), "data.pos: expected a floating"),
            (
                lambda: ld.TransformFields(np.eye(2))(Data(pos=torch.ones(1, 2), force=torch.ones(1, 2).int())),
                "data.force: expected a floating tensor, got torch.int32",
            ),
            (lambda: ld.RandomRotateFields(dim=4), r"dim: expected one of \(2, 3\)"),
            (lambda: ld.RandomRotateFields(axis="w"), r"axis: expected one of \('x', 'y', 'z'\) or None, got 'w'"),
            (lambda: ld.RandomRotateFields(dim=2, axis="z"), "axis: expected None"),
            (lambda: ld.RandomRotateFields(max_shift=-1), "max_shift: expected a finite"),
            (lambda: ld.RandomRotateFields(-1), "seed: expected an integer of at least 0"),
            (lambda: ld.RandomRotateFields()(Batch.from_data_list([Data(pos=torch.zeros(1, 3))])), "one cloud"),
        ],
    )
    def test_bad_input(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()


def test_drift_is_relative_to_one_or_to_the_energy():
    assert _nbody.check_drift(np.array([100.0]), np.array([100.5])) == pytest.approx(0.005)
    assert _nbody.check_drift(np.array([0.0]), np.array([0.005])) == pytest.approx(0.005)
    with pytest.raises(ValueError, match="more than"):
        _nbody.check_drift(np.array([0.0]), np.array([np.nan]))
