"""Training on numbers, vectors and forces: units, shifts, scales, and errors."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

import lieattn
from lieattn.cli import main
from lieattn.geometry import Radius
from lieattn.groups import tetrahedral
from lieattn.models import (
    DirectionConvNet,
    DirectionOptions,
    EnergyForces,
    FieldModel,
    FramewiseTransformer,
    Rescaled,
    transfer_weights,
)
from lieattn.nn import VectorHead
from lieattn.reps import Scalar, Vector
from lieattn.train import LastCheckpoint, PointSetClassifier, PointSetData, PointSetRegressor, UsageError, load_task
from lieattn.train._targets import WeightedMean, WeightedMeans, find_unused_weights, target_weights, weighted_sums
from lieattn_datasets import areas_on_sphere, on_sphere
from tests.cases import quiet_trainer, refuses
from tests.test_train import Stacked, config, write


class Springs(Dataset):
    """Pairs of points with the energy and the forces of a spring, in unusual units."""

    def __init__(self, size: int = 24, offset: float = 1000.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pos = torch.randn(size, 2, 3, generator=generator)
        self.offset = offset

    def __len__(self) -> int:
        return len(self.pos)

    def __getitem__(self, index: int) -> Data:
        pos = self.pos[index]
        bond = pos[1] - pos[0]
        energy = 50 * bond.square().sum() + self.offset
        return Data(
            x=torch.ones(2, 1),
            pos=pos,
            y=torch.stack([energy, 3 * bond.norm()])[None],
            energy=energy[None],
            force=100 * torch.stack([bond, -bond]),
            dipole=bond[None],
        )


class Spring(nn.Module):
    """Energy k |bond|² with a learnable stiffness, and its forces."""

    def __init__(self, stiffness: float = 0.1) -> None:
        super().__init__()
        self.stiffness = nn.Parameter(torch.tensor(stiffness))

    def forward(self, data: Batch) -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            pos = data.pos.detach().requires_grad_()
            bond = pos[1::2] - pos[::2]
            energy = self.stiffness * bond.square().sum(dim=1)
            (slope,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
        return {"energy": energy, "force": -slope, "dipole": self.stiffness * bond}


class Bond(nn.Module):
    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(2, outputs)

    def forward(self, data: Batch) -> torch.Tensor:
        bond = (data.pos[1::2] - data.pos[::2]).norm(dim=1)
        return self.linear(torch.stack([bond, bond.square()], dim=1))


def batch(size=8):
    springs = Springs()
    return Batch.from_data_list([springs[i] for i in range(size)])


def measured(network=None, targets=None, clouds=None, **options):
    """Return a task that has measured its clouds, and does not log; by default of energies and forces of springs."""
    module = PointSetRegressor(network or Spring(), targets or {"energy": 0.1, "force": 1.0}, **options)
    module.measure(clouds or Springs())
    module.log = lambda *args, **kwargs: None
    return module


def test_predictions_come_in_the_units_of_the_data():
    module = measured(Bond(), "y")
    y = torch.cat([item.y for item in map(Springs().__getitem__, range(24))])
    torch.testing.assert_close(module.shift_y, y.mean(dim=0))
    torch.testing.assert_close(module.scale_y, y.std(dim=0, correction=0), rtol=1e-5, atol=0)
    expected = module.shift_y + module.scale_y * module.network(batch())
    torch.testing.assert_close(module(batch())["y"], expected)


def test_outputs_in_units_are_not_rescaled_unnoticed():
    """A loaded network returns values in the units of the data; a new task gave them units a second time."""
    trained = measured(Bond(), "y")
    known = copy.deepcopy(trained.model)
    with pytest.warns(
        UserWarning, match=r"network: outputs of Rescaled .* of y .* shift=\[\] and scale_of=\{'y': 'none'\}"
    ):
        PointSetRegressor(known, "y").measure(Springs())
    tuned = measured(known, "y", shift=[], scale_of={"y": "none"})
    assert torch.equal(tuned(batch())["y"], trained(batch())["y"])


def test_statistics_travel_with_the_weights():
    module = measured(Bond(), "y")
    other = PointSetRegressor(Bond(), "y")
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(other(batch())["y"], module(batch())["y"])
    assert other.measured
    other.on_fit_start()  # nothing is measured again, which would need a trainer with data


def logged(module, data, stage="test"):
    """Return the loss, and the values logged at the end of an epoch of the batches."""
    found = {}
    module.log = lambda name, value, **options: found.__setitem__(name, value)
    losses = [module.evaluate(one, stage) for one in data]
    return losses, {name: float(value.compute()) for name, value in found.items() if hasattr(value, "compute")}


class NoAnswer(Spring):
    """Returns NaN for the first cloud."""

    def forward(self, data: Batch) -> dict[str, torch.Tensor]:
        missing = torch.arange(data.num_graphs) == 0
        return {"energy": super().forward(data)["energy"].where(~missing, math.nan)}


def test_errors_of_a_network_without_an_answer_are_nan():
    one = batch()
    for counts, expected in ((0, True), (1, False)):
        one.energy_mask = torch.arange(8) >= counts
        _, errors = logged(PointSetRegressor(NoAnswer(), "energy"), [one])
        assert math.isnan(errors["test/error"]) is expected


class Poses(nn.Module):
    """Rotations about z by a learnable angle."""

    def __init__(self, degrees: float) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.tensor(math.radians(degrees)))

    def forward(self, data: Batch) -> torch.Tensor:
        about_z = torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 0]])
        return torch.matrix_exp(self.angle * about_z).expand(data.num_graphs, 3, 3)


def test_errors_of_rotations_are_angles_in_degrees():
    items = [Data(pos=torch.zeros(2, 3), rotation=torch.eye(3)[None], mask=torch.tensor([True])) for _ in range(3)]
    items[1].rotation = Poses(150.0)(Batch.from_data_list(items[:1])).detach()
    items[2].rotation, items[2].mask = torch.full((1, 3, 3), math.nan), torch.tensor([False])
    data = Batch.from_data_list(items)
    module = measured(Poses(30.0), "rotation", items, loss="rotation")
    (loss,), errors = logged(module, [data])
    assert errors["test/error"] == pytest.approx((30 + 120) / 2, rel=1e-5)
    expected = 1 - torch.tensor([30.0, 120.0]).deg2rad().cos().mean()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert module.network.angle.grad.isfinite()
    for degrees in (0.0, 180.0):
        module = PointSetRegressor(Poses(degrees), "rotation", "rotation")
        (loss,), errors = logged(module, [Batch.from_data_list(items[:1])])
        loss.backward()
        assert errors["test/error"] == pytest.approx(degrees, abs=0.05)
        assert abs(module.network.angle.grad) < 1e-6
    with pytest.raises(ValueError, match="shift, scale_of: expected none for rotations"):
        PointSetRegressor(Poses(0.0), "rotation", "rotation", shift=["rotation"])
    assert PointSetRegressor(Poses(0.0), "rotation", "rotation", shift=[], scale_of={"rotation": "none"}).shifted == ()
    with pytest.raises(ValueError, match=r"data.dipole: expected rotations \[clouds, 3, 3\]"):
        PointSetRegressor(Spring(), "dipole", "rotation").evaluate(batch(), "test")
    data.rotation_weight = torch.ones(3, 3, 3)
    with pytest.raises(ValueError, match=r"expected masks and weights \(3,\) of whole entries, got \(3, 3, 3\)"):
        module.evaluate(data, "test")


def test_scales_of_components_are_not_those_of_a_single_number():
    """Of three clouds, each would get the scale of one component; more clouds would give an error of torch."""
    items = [Data(pos=torch.zeros(2, 3), a=torch.ones(1), b=torch.tensor([[1.0, 10, 100]]) * n) for n in range(5)]
    module = PointSetRegressor(Spring(), {"a": 1.0, "b": 1.0}, shift=["b"], scale_of={"a": "b"})
    with pytest.raises(ValueError, match=r"scale_of: expected a single scale for a.* component of b, \(3,\)"):
        module.measure(items)
    other = measured(Spring(), {"a": 1.0, "b": 1.0}, items, shift=[], scale_of={"a": "b"})
    assert torch.equal(other.scale_a, other.scale_b)


def test_errors_are_in_the_units_of_the_data_for_each_target():
    module = measured(scale_of={"energy": "force"})
    predicted, data = module(batch(8)), batch(8)
    parts = [Batch.from_data_list([Springs()[i] for i in some]) for some in (range(5), range(5, 8))]
    _, found = logged(module, parts)
    assert set(found) == {"test/error_energy", "test/error_force", "test/loss"}  # a sum of both would have no unit
    for name in ("energy", "force"):
        assert found[f"test/error_{name}"] == pytest.approx(float((predicted[name] - data[name]).detach().abs().mean()))
    assert module.monitor == ("val/loss", "min")
    assert PointSetRegressor(Bond(), "y").monitor == ("val/error", "min")


def test_masks_and_weights_count_in_losses_errors_and_scales():
    """Masked clouds and points count as absent, and clouds of weight 2 count twice."""
    items = [Springs()[i] for i in range(6)]
    for number, item in enumerate(items):
        item.mask, item.weight = torch.tensor([number != 1]), torch.tensor([2.0 if number == 3 else 1.0])
    items[1].energy[:] = torch.nan
    kept = [Springs()[i] for i in (0, 2, 3, 3, 4, 5)]
    module, plain = (PointSetRegressor(Spring(), "energy", loss="mse") for _ in range(2))
    module.measure(items)
    plain.measure([Springs()[i] for i in (0, 2, 3, 4, 5)])
    torch.testing.assert_close(module.state_dict(), plain.state_dict())
    (loss,), found = logged(module, [Batch.from_data_list(items)])
    (expected,), others = logged(plain, [Batch.from_data_list(kept)])
    torch.testing.assert_close(loss, expected)
    assert found == pytest.approx(others)
    loss.backward()
    assert module.network.stiffness.grad.isfinite()


@pytest.mark.parametrize("name", ["mask", "energy_mask"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=["mask without axes", "mask of one entry"])
@pytest.mark.parametrize("of_target", [(), (1,)], ids=["target without axes", "target of one entry"])
def test_numbers_without_axes_are_masked_in_scales(of_target, shape, name):
    items = [Springs()[number] for number in range(6)]
    plain, module = (PointSetRegressor(Spring(), "energy") for _ in range(2))
    plain.measure(items[:5])
    for number, item in enumerate(items):
        item.energy = item.energy.reshape(of_target) if number < 5 else torch.full(of_target, 1e6)
        item[name] = torch.full(shape, number < 5)
    module.measure(items)
    torch.testing.assert_close(module.state_dict(), plain.state_dict())


class Logits(nn.Module):
    """Logits for two classes at each point."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, data: Batch) -> torch.Tensor:
        return self.linear(data.pos)


class Charge(nn.Module):
    """A number for each point, with or without a last axis."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.weight, self.axes = nn.Parameter(torch.ones(3)), axes

    def forward(self, data: Batch) -> torch.Tensor:
        return (data.pos @ self.weight).reshape(-1, *self.axes)


def grids(rows: int = 7, columns: int = 6) -> list[Data]:
    """Return fields on a grid of latitudes and longitudes, with the area of each point."""
    latitude = np.repeat(np.linspace(90, -90, rows), columns)
    longitude = np.tile(np.arange(columns) * 360 / columns, rows)
    keep = np.flatnonzero((np.abs(latitude) < 90) | (longitude == 0))  # one point at each pole
    pos, area = on_sphere(latitude[keep], longitude[keep]), areas_on_sphere(latitude[keep], longitude[keep])
    generator = torch.Generator().manual_seed(0)
    return [Data(pos=pos, y=torch.randn(len(pos), generator=generator), area=area) for _ in range(3)]


@pytest.mark.parametrize("loss", ["l1", "mse"])
def test_areas_as_weights_of_a_loss(loss):
    """The loss and the error are those of a hand-computed mean over the sphere, and not those without areas."""
    items = grids()
    task = measured(Charge(), "y", items, loss=loss, loss_weight="area")
    batch = Batch.from_data_list(items)
    (found,), logs = logged(task, [batch])
    apart = (task(batch)["y"] - batch.y).abs().double()
    weight = batch.area.double()
    scaled = apart / float(task.scale_y)
    expected = (weight * (scaled if loss == "l1" else scaled.square())).sum() / weight.sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert logs["test/error"] == pytest.approx(((weight * apart).sum() / weight.sum()).item(), rel=1e-6)
    assert logs["test/error"] != pytest.approx(apart.mean().item(), rel=1e-3)
    batch.weight = 7 * torch.rand(len(batch.y))  # the attribute that is read without the argument
    assert torch.equal(logged(task, [batch])[0][0], found)


def test_areas_as_weights_of_a_classifier():
    items = grids()
    for item in items:
        item.y = (item.y > 0).long()
    network = Logits()
    task, batch = PointSetClassifier(network, 2, per="point", loss_weight="area"), Batch.from_data_list(items)
    (found,), logs = logged(task, [batch])
    entropy = nn.functional.cross_entropy(network(batch), batch.y, reduction="none")
    torch.testing.assert_close(found, (batch.area * entropy).sum() / batch.area.sum())
    right = (network(batch).argmax(dim=1) == batch.y).float()
    assert logs["test/accuracy"] == pytest.approx(float((batch.area * right).sum() / batch.area.sum()))
    assert "area" in task.read_apart


def test_errors_of_named_weights():
    items = grids()
    task = PointSetRegressor(Charge(), loss_weight="area")
    for value, message in (
        (None, r"data.area: expected weights of clouds or points \(loss_weight\), got none"),
        (-items[0].area, r"data.area: expected finite weights of at least 0, got -"),
        (items[0].area[1:], r"data.area: expected the first axes of y \(32,\), got \(31,\)"),
    ):
        wrong = items[0].clone()
        wrong.area = value
        with pytest.raises(ValueError, match=message):
            task.evaluate(Batch.from_data_list([wrong]), "test")
        with pytest.raises(ValueError, match=message):
            task.measure([wrong])
    with pytest.raises(ValueError, match=r"loss_weight: expected the name of an attribute of the data, got 'an area'"):
        PointSetRegressor(Charge(), loss_weight="an area")


@pytest.mark.parametrize("shift", [None, ["charge"]], ids=["scaled", "shifted"])
@pytest.mark.parametrize("sizes", [(3, 0, 1, 5), (4, 4, 4, 4)], ids=["uneven clouds", "even clouds"])
@pytest.mark.parametrize(("numbers", "outputs"), [([], []), ([], [1]), ([1], [1])], ids=str)
def test_numbers_of_points_have_one_shift_and_scale(numbers, outputs, sizes, shift):
    items = [Data(pos=torch.randn(n, 3), charge=5.0 + torch.randn(n, *numbers)) for n in sizes]
    module = measured(Charge(*outputs), "charge", items, shift=shift)
    data = Batch.from_data_list(items)
    charges = data.charge.flatten()
    mean = charges.mean() if shift else torch.zeros(())
    expected = mean + (charges - mean).square().mean().sqrt() * data.pos.sum(dim=1)
    torch.testing.assert_close(module(data)["charge"].flatten(), expected)
    _, found = logged(module, [data])
    assert found["test/error"] == pytest.approx(float((expected - charges).abs().mean()))


def test_stacked_numbers_of_clouds_have_shifts_and_scales_of_their_own():
    items = [Stacked(pos=torch.randn(2, 3), y=torch.tensor([float(number), 10.0 * number])) for number in range(4)]
    module = measured(Constant(2), "y", items)
    assert module.shift_y.tolist() == [1.5, 15.0]
    assert Batch.from_data_list(items).y.shape == module(Batch.from_data_list(items))["y"].shape


@pytest.mark.parametrize("extensive", [[], ["energy"]], ids=["shifted", "extensive"])
def test_energies_far_from_zero_keep_their_spread(extensive):
    """In float32, numbers of the size of 1e6 are multiples of 1/16."""
    energies = 0.01 * torch.arange(10, dtype=torch.float64)[:, None] - 1e6
    items = [Data(pos=torch.randn(4, 3), energy=energy) for energy in energies]
    module = measured(Constant(1), "energy", items, extensive=extensive)
    shift = float(module.shift_energy) * (4 if extensive else 1)
    expected = (0.5 * float(module.scale_energy) + shift - energies).abs().mean()
    _, found = logged(module, [Batch.from_data_list(items)])
    assert found["test/error"] == pytest.approx(float(expected), rel=1e-4)


def test_sums_are_at_least_in_single_precision():
    """In bfloat16, 259 entries would count as 260; sums in float16 end at 65504."""
    mean = WeightedMean()
    mean.update(torch.tensor(257 * [1.0] + 2 * [0.0]).bfloat16(), torch.ones(259).bfloat16())
    assert float(mean.compute()) == pytest.approx(257 / 259, rel=1e-6)
    found = weighted_sums(torch.full((70_000,), 2.0).half(), torch.ones(70_000).half())
    assert found.tolist() == [140_000, 70_000]


@pytest.mark.parametrize("metric", [WeightedMean(), WeightedMeans([1.0])], ids=["error", "loss"])
def test_metrics_of_cast_tasks_count_every_batch(metric):
    """Trainer(precision="bf16-true") casts the task. In bfloat16, 256 + 1 is 256."""
    metric = torch.nn.ModuleList([metric]).to(torch.bfloat16)[0]
    for number in range(600):
        metric.update(torch.tensor([float(number % 2)]), torch.ones(1))
    assert float(metric.compute()) == 0.5


def test_means_of_small_weights_and_of_nothing():
    mean = WeightedMean()
    mean.update(torch.zeros(0), torch.zeros(0))
    assert math.isnan(float(mean.compute()))
    mean.reset()
    mean.update(torch.tensor([1.0, 3.0]), torch.tensor([0.1, 0.1]))
    assert float(mean.compute()) == pytest.approx(2.0)
    loss = WeightedMeans([2.0, 5.0])
    loss.update(torch.tensor([0.4, 0.0]), torch.tensor([0.2, 0.0]))
    assert float(loss.compute()) == pytest.approx(4.0)


def test_masks_of_components_go_with_weights_of_points():
    items = [Springs()[number] for number in range(3)]
    for number, item in enumerate(items):
        item.mask = torch.tensor([[True, True, number == 1]] * 2)
        item.force_weight = torch.tensor([1.0, 2.0])
    data = Batch.from_data_list(items)
    wanted = data.mask * data.force_weight[:, None]
    assert torch.equal(target_weights(data, "force", data.force), wanted)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_targets_that_are_not_finite_are_named_unless_they_are_masked(number):
    """The message about a loss that is NaN advised to lower the learning rate."""
    items = [Springs()[i] for i in range(3)]
    items[1].energy = torch.full_like(items[1].energy, number)
    message = rf"data.energy: expected finite targets, got {number}; .* False in data.energy_mask"
    with pytest.raises(ValueError, match=message):
        PointSetRegressor(Spring(), "energy").measure(items)
    module = PointSetRegressor(Spring(), "energy")
    module.log = lambda *_, **__: None
    with pytest.raises(ValueError, match=message):
        module.evaluate(Batch.from_data_list(items), "val")
    for i, item in enumerate(items):
        item.energy_mask = torch.tensor([i != 1])
    module.measure(items)
    assert torch.isfinite(module.evaluate(Batch.from_data_list(items), "val"))


def test_targets_may_be_numbers_of_python():
    items = [Data(pos=torch.randn(4, 3), energy=float(number)) for number in range(4)]
    module = measured(Constant(1), "energy", items)
    assert float(module.shift_energy) == 1.5
    _, found = logged(module, [Batch.from_data_list(items)])
    assert found["test/error"] == pytest.approx(1.0, rel=0.2)
    items[2].energy = "high"
    with pytest.raises(ValueError, match=r"data\.energy: expected float as in cloud 0, got str in cloud 2"):
        module.measure(items)


@pytest.mark.parametrize(
    "kind",
    ["vector", "position", "pseudovector", "pseudoscalar", ("position", "vector"), Vector(3), {"y": "vector"}],
    ids=str,
)
def test_vectors_have_no_shift(kind):
    """A shift, and scales of single components, would break the equivariance of the predictions."""

    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.kind = kind

        def forward(self, data):
            return data.pos

    task = measured(Ends(), "y", [Data(pos=torch.randn(4, 3), y=torch.randn(4, 3) + 5.0) for _ in range(3)])
    assert float(task.shift_y) == 0.0
    assert task.scale_y.shape == ()
    with pytest.raises(ValueError, match=r"shift: expected invariant numbers, but \['y'\] of the network change"):
        PointSetRegressor(Ends(), "y", shift=["y"])


@pytest.mark.parametrize("kind", ["invariant", Scalar(), "attention", None, {"x": "vector"}], ids=str)
def test_numbers_have_a_shift(kind):
    network = Bond()
    network.kind = kind
    assert PointSetRegressor(network, "y").shifted == ("y",)


def test_masks_of_points_are_not_those_of_as_many_clouds():
    """Clouds with 0 and 2 points, and single clouds with one point, have as many clouds as points."""
    items = []
    for number, points in enumerate((0, 2, 1)):
        mask = torch.tensor([False] * points, dtype=torch.bool)
        energy, force = torch.tensor([7.0 * (number == 2) + 1.0]), torch.zeros(points, 3)
        items.append(Data(pos=torch.zeros(points, 3), energy=energy, force=force, mask=mask))
    task = PointSetRegressor(nn.Identity(), {"energy": 1.0, "force": 1.0})
    items[1].mask[0] = True
    task.measure(items)
    assert float(task.shift_energy) == pytest.approx(10 / 3)
    batch = Batch.from_data_list(items[:2])
    assert target_weights(batch, "energy", batch.energy) is None
    assert target_weights(batch, "force", batch.force).tolist() == [1.0, 0.0]


def test_shared_weights_of_single_points_apply_to_all_targets():
    """Those with names apply to one target, whatever the batch."""
    one, two = (
        Data(pos=torch.zeros(n, 3), energy=torch.ones(1), force=torch.zeros(n, 3), weight=torch.full((n,), 2.0))
        for n in (1, 2)
    )
    for clouds, expected in (([one], [2.0]), ([one, one], [2.0, 2.0]), ([one, two], None)):
        batch = Batch.from_data_list(clouds)
        found = target_weights(batch, "energy", batch.energy)
        assert expected == (None if found is None else found.tolist())
        assert target_weights(batch, "force", batch.force).tolist() == [2.0] * batch.num_nodes
        batch.force_weight = batch.weight
        del batch.weight
        assert target_weights(batch, "energy", batch.energy) is None
        assert target_weights(batch, "force", batch.force).tolist() == [2.0] * batch.num_nodes


def test_points_may_be_masked_for_one_target():
    """``mask`` and ``weight`` of points do not affect the energies of clouds."""
    items = [Springs()[i] for i in range(3)]
    for item in items:
        item.force_mask, item.weight = torch.tensor([True, False]), torch.tensor([1.0, 5.0])
        item.force[1] = torch.nan
    module = measured()
    _, found = logged(module, [Batch.from_data_list(items)])
    predicted, data = module(batch(3)), batch(3)
    assert found["test/error_energy"] == pytest.approx(float((predicted["energy"] - data.energy).detach().abs().mean()))
    assert found["test/error_force"] == pytest.approx(
        float((predicted["force"] - data.force)[::2].detach().abs().mean())
    )
    apart = PointSetRegressor(module.network, "energy", shift=[])
    with pytest.raises(ValueError, match=r"data.weight: expected the first axes of a target \(energy \(3,\)\)"):
        logged(apart, [Batch.from_data_list(items)])
    nothing = [item.clone() for item in items]
    for item in nothing:
        item.force_mask, item.energy_mask = torch.tensor([False, False]), torch.tensor([False])
    (loss,), _ = logged(module, [Batch.from_data_list(nothing)])
    assert loss == 0
    for name, value, message in (
        ("force_mask", torch.ones(7, dtype=torch.bool), r"data.force_mask: expected the first axes of force \(6, 3\)"),
        ("weight", -torch.ones(6), "data.weight: expected finite weights of at least 0, got -1.0"),
        ("weight", torch.tensor([1.0, 2, math.inf] * 2), "data.weight: expected finite weights of at least 0, got inf"),
        ("mask", torch.ones(5, dtype=torch.bool), "data.mask: expected the first axes of energy"),
    ):
        wrong = Batch.from_data_list(items)
        wrong[name] = value
        with pytest.raises(ValueError, match=message):
            module.evaluate(wrong, "test")


class Pair(Bond):
    def forward(self, data):
        return super().forward(data), 1


def points(number):
    return Batch.from_data_list([Data(pos=torch.ones(number, 3), y=torch.ones(number, 1))])


def masked():
    items = [Springs()[i] for i in range(3)]
    return [item.update({"mask": torch.tensor([False])}) for item in items]


test_what_does_not_fit_is_named = refuses(
    (lambda: PointSetRegressor(Bond(), "y", loss="l3"), "loss: expected one of"),
    (lambda: PointSetRegressor(Bond(), {}), "targets: expected names"),
    (lambda: PointSetRegressor(Bond(), {"y": math.nan}), "targets: expected names with weights of at least 0"),
    (lambda: PointSetRegressor(Bond(), "y", shift=["z"]), "shift: \\['z'\\] are not among"),
    (lambda: PointSetRegressor(Bond(), "y", scale_of={"y": "z"}), "scale_of: \\['z'\\] are neither"),
    (lambda: PointSetRegressor(Bond(), "y", extensive=["z"]), r"extensive: \['z'\] are not among the targets"),
    (lambda: PointSetRegressor(Bond(), "y", shift=[], extensive=["y"]), r"extensive: \['y'\] have no shift"),
    (lambda: PointSetRegressor(Bond(), "charge").measure(Springs()), "24 of 24 training clouds have no charge"),
    (
        lambda: PointSetRegressor(Bond(3), "y").evaluate(batch(), "val"),
        "data.y: expected \\(8, 3\\) like the output, got",
    ),
    (lambda: PointSetRegressor(Charge()).evaluate(points(7), "val"), r"data.y: expected \(7,\) like .*, got \(7, 1\)"),
    (lambda: PointSetRegressor(Spring(), "energy").measure([]), "data: expected clouds .*, got an empty training set"),
    (lambda: PointSetRegressor(Spring(), "energy").measure(masked()), "data.energy: .*, got only masked ones"),
    (lambda: PointSetRegressor(Bond(), {"y": 1, "force": 1})(batch()), "network: expected a mapping"),
    (lambda: PointSetRegressor(Pair(), "y")(batch()), "network: expected a tensor, .* as output, got tuple"),
    (lambda: PointSetRegressor(Spring(), {"energy": 1, "y": 1})(batch()), "\\['y'\\] are missing"),
    error=(TypeError, ValueError),
)


def test_the_command_trains_on_forces_and_writes_predictions(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # and restore what the run sets
    springs = {"class_path": f"{__name__}.Springs"}
    content = config(tmp_path, max_epochs=12)
    content["model"] = {
        "class_path": "lieattn.train.PointSetRegressor",
        "init_args": {
            "network": {"class_path": f"{__name__}.Spring"},
            "targets": {"energy": 0.1, "force": 1.0},
            "scale_of": {"energy": "force"},
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.05}},
        },
    }
    content["data"] = dict.fromkeys(("train", "val", "test", "predict"), springs) | {"batch_size": 8}
    content["trainer"]["callbacks"] = []
    file = write(tmp_path / "run.yaml", content)
    assert main(["fit", "--config", file]) == 0
    checkpoint = torch.load(tmp_path / "checkpoints/best.ckpt", weights_only=True)
    state = checkpoint["state_dict"]
    assert float(state["network.stiffness"] * state["scale_force"]) == pytest.approx(50, rel=0.05)
    assert main(["predict", "--config", file, "--ckpt_path", "best"]) == 0
    rows = {name: Path(tmp_path / f"predictions_{name}.csv").read_text().splitlines() for name in ("energy", "force")}
    assert len(rows["energy"]) == 25
    assert len(rows["force"]) == 49


class Chains(Dataset):
    """Clouds of 2 to 7 points in a row, with an energy of 10 per point and 1 per bond."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Data:
        points = 2 + index % 6
        pos = torch.arange(3.0 * points).view(points, 3) % (3 * index + 5)
        energy = torch.tensor([10.0 * points + (points - 1)])
        return Data(x=torch.ones(points, 1), pos=pos, energy=energy, y=torch.stack([energy, -2 * energy], dim=1))


class Constant(nn.Module):
    """The same number for every cloud."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.full((outputs,), 0.5))

    def forward(self, data: Batch) -> torch.Tensor:
        out = self.number.expand(data.num_graphs, -1)
        return out[:, 0] if len(self.number) == 1 else out


@pytest.mark.parametrize(("target", "outputs"), [("energy", 1), ("y", 2)])
def test_of_sums_over_the_points_a_multiple_of_their_number_is_subtracted(target, outputs):
    items = [Chains()[index] for index in range(24)]
    counts = torch.tensor([float(item.num_nodes) for item in items])
    values = torch.stack([item[target].reshape(-1) for item in items])
    slope = torch.linalg.lstsq(counts[:, None], values).solution[0]
    module = measured(Constant(outputs), target, Chains(), extensive=[target])
    torch.testing.assert_close(module.get_buffer(f"shift_{target}").reshape(-1), slope)
    rest = values - counts[:, None] * slope
    scale = rest.square().mean(dim=0).sqrt()
    torch.testing.assert_close(module.get_buffer(f"scale_{target}").reshape(-1), scale, rtol=1e-3, atol=0)
    assert scale[0] < 0.2 * values[:, 0].std()
    batch = Batch.from_data_list(items)
    expected = counts[:, None] * slope + scale * 0.5
    torch.testing.assert_close(module(batch)[target].reshape(24, -1), expected, rtol=1e-3, atol=1e-3)
    loss = (0.5 - rest / scale).abs().mean()
    torch.testing.assert_close(module.evaluate(batch, "train"), loss, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("number", [3, 5])
def test_tensors_are_sums_over_the_points_too(number):
    """Also with as many clouds as components."""
    clouds = [Data(pos=torch.randn(2 + index, 3), v=(2.0 + index) * torch.ones(1, 3, 3)) for index in range(number)]
    module = measured(Constant(1), "v", clouds, shift=["v"], extensive=["v"])
    torch.testing.assert_close(module.shift_v, torch.ones(3, 3))


@pytest.mark.parametrize("nan", [False, True], ids=["masked", "masked NaN"])
def test_sums_that_are_not_known_have_no_part_in_the_number_of_a_point(nan):
    """Of the third component none is known."""
    clouds = []
    for index in range(6):
        points, known = 2 + index, torch.tensor([[True, index != 3, False]])
        y = torch.tensor([[1.0, 2.0, 3.0]]) * points
        y = y.where(known, torch.nan) if nan else y
        clouds.append(Data(pos=torch.randn(points, 3), y=y, y_mask=known))
    module = measured(Constant(3), "y", clouds, extensive=["y"])
    torch.testing.assert_close(module.shift_y, torch.tensor([1.0, 2.0, 0.0]))


def test_components_that_are_never_known_have_no_shift_and_the_scale_one():
    y = torch.tensor([[1.0, 5.0, 4.0], [3.0, 6.0, 4.0]], dtype=torch.float64)
    known = torch.tensor([[True, False, True]])  # and the last component is constant
    clouds = [Data(pos=torch.zeros(2, 3), y=row[None], y_mask=known) for row in y]
    module = measured(Constant(3), "y", clouds)
    assert module.shift_y.tolist() == [2.0, 0.0, 4.0]
    assert module.scale_y.tolist() == [1.0, 1.0, 1.0]
    assert y.isfinite().all()  # the data stay as they were


def test_extensive_targets_have_one_number_for_each_cloud():
    module = measured(Constant(1), "energy", Chains(), extensive=["energy"])
    with pytest.raises(ValueError, match="extensive: expected one energy for each of 2 clouds"):
        module.model.shift_of("energy", torch.zeros(3), Batch.from_data_list([Chains()[0], Chains()[1]]))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_other_loaders_need_a_measurement():
    """A task measures the training set of a PointSetData by itself."""
    module, loader = PointSetRegressor(Spring(), "energy"), DataLoader(list(Springs()), batch_size=8)
    with pytest.raises(ValueError, match=r"datamodule: .* call task\.measure\(clouds\) before"):
        quiet_trainer().fit(module, loader)
    module.measure(Springs())
    trainer = quiet_trainer(log_every_n_steps=1)
    trainer.fit(module, loader)
    assert trainer.global_step == 3


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_random_targets_are_measured_by_the_seed_of_the_data():
    """Shifts and scales are those of the first epoch, and the global random generators do not change."""

    class Noisy(Springs):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            item.energy = item.energy + 100 * torch.randn(1)
            return item

    statistics, states = [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        module, before = PointSetRegressor(Spring(), "energy"), torch.get_rng_state()
        data = PointSetData(Noisy(), batch_size=24, seed=3)
        quiet_trainer(log_every_n_steps=1).fit(module, data)
        statistics.append(torch.stack([module.shift_energy, module.scale_energy]))
        states.append(torch.equal(torch.get_rng_state(), before))
    assert torch.equal(*statistics)
    assert states == [True, True]
    (first,) = PointSetData(Noisy(), batch_size=24, seed=3).train_dataloader()
    torch.testing.assert_close(statistics[0][0], first.energy.mean(dim=0, keepdim=True), rtol=1e-6, atol=0)


def test_outputs_that_do_not_depend_on_trained_weights(monkeypatch):
    task = PointSetRegressor(Bond().requires_grad_(False), "y")
    monkeypatch.setattr(task, "log", lambda *_, **__: None)  # there is no trainer
    with pytest.raises(UsageError, match="network: expected outputs that depend on weights with requires_grad"):
        task.training_step(batch(), 0)
    with torch.no_grad():
        assert task.training_step(batch(), 0).isfinite()


def test_data_in_single_precision_for_weights_in_double_precision(monkeypatch):
    task = PointSetRegressor(Bond().double(), "y")
    monkeypatch.setattr(task, "log", lambda *_, **__: None)
    assert task.double().evaluate(batch(), "val").dtype == torch.float64
    assert task.cast(data := batch()).pos.dtype == torch.float64
    assert data.pos.dtype == torch.float32


def test_positions_beside_vectors_keep_their_unit():
    network = Bond()
    network.kind = "position", "vector"
    assert PointSetRegressor(network).scale_of == {"y": "none"}
    network.kind = "vector"
    assert PointSetRegressor(network).scale_of == {}


def test_the_order_of_extensive_outputs_does_not_matter():
    one, other = (
        Rescaled(Spring(), {"energy": 2.0, "dipole": 3.0}, extensive=names)
        for names in (["energy", "dipole"], ["dipole", "energy"])
    )
    other.load_state_dict(one.state_dict())
    with pytest.raises(RuntimeError, match="extensive"):
        Rescaled(Spring(), {"energy": 2.0, "dipole": 3.0}, extensive=["energy"]).load_state_dict(one.state_dict())


@pytest.mark.parametrize("task", ["l1", "mse", "classifier"])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_untrained_outputs_that_are_very_large_are_told_once(task, size, monkeypatch, recwarn):
    class Sized(Bond):
        def forward(self, data):
            return size * super().forward(data)

    data = batch()
    if task == "classifier":
        data.y = torch.arange(len(data.y)) % 2
        module = PointSetClassifier(Sized(), 2)
    else:
        module = measured(Sized(), "y", loss=task)
    monkeypatch.setattr(module, "log", lambda *_, **__: None)  # there is no trainer
    for _ in range(2):
        module.training_step(data, 0)
    told = [str(warning.message) for warning in recwarn]
    assert len(told) == (size > 1)
    assert all("network: its untrained outputs are so large that the first loss is" in text for text in told)


def lattice(spacing, atoms=12):
    """Points near a cubic lattice, with energies and forces of the order of 1 kcal/mol."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        pos = spacing * torch.cartesian_prod(*[torch.arange(3.0)] * 3)[:atoms]
        pos = pos + 0.1 * spacing * torch.randn(atoms, 3, generator=generator)
        energy, force = (20 * torch.randn(*shape, generator=generator) for shape in ((1,), (atoms, 3)))
        yield Data(x=torch.ones(atoms, 1), pos=pos, energy=energy, force=force)


@pytest.mark.filterwarnings("ignore:network. its first energies or forces are")
@pytest.mark.parametrize(
    ("layers", "radius", "spacing", "pool", "factor"),
    [
        (4, 5.0, 0.7, "sum", 1.0),
        (4, 5.0, 0.7, "sum", 1e4),
        (4, 5.0, 1.5, "mean", 1.0),
        (1, 5.0, 0.7, "sum", 1e4),
        (1, 2.0, 1.5, "sum", 1.0),
    ],
)
def test_energies_and_forces_start_at_the_scale_of_the_data(layers, radius, spacing, pool, factor):
    """Four layers with a radius of 5 Å began with energies off by 2,500 eV and forces of 1,200 eV/Å."""

    class Model(DirectionConvNet):
        def forward(self, data):
            return factor * super().forward(data)

    options = {"channels": 16, "layers": layers, "neighborhood": Radius(radius), "pool": pool}
    network = EnergyForces(Model(tetrahedral(), 1, 1, **options))
    clouds = list(lattice(spacing))
    task = measured(network, {"energy": 0.1, "force": 1.0}, clouds, scale_of={"energy": "force"})
    batch, scale = Batch.from_data_list(clouds), float(task.scale_force)
    before, weights = task(batch)["force"].detach(), copy.deepcopy(network.state_dict())
    task.training_step(batch, 0)
    found = {name: value.detach() for name, value in task(batch).items()}
    assert float(found["force"].square().mean().sqrt()) < 20 * scale
    assert float(((found["energy"] - batch.energy) / 12).square().mean().sqrt()) < 20 * scale
    changed = {name for name, weight in network.state_dict().items() if not torch.equal(weight, weights[name])}
    assert changed <= {f"model.blocks.{number}.messages.kernel.weight" for number in range(layers)}
    if (layers, pool, radius) == (4, "sum", 5.0):  # control: weights are scaled, and what that cannot mend is divided
        assert float(before.abs().max()) > 100 * scale
        assert changed
        assert (float(task.gain) < 0.05) == (factor > 1)
    gain, kernel = float(task.gain), network.model.blocks[0].messages.kernel.weight.detach().clone()
    task.training_step(Batch.from_data_list(list(lattice(2 * spacing))), 0)  # only the first batch counts
    assert float(task.gain) == gain
    assert torch.equal(network.model.blocks[0].messages.kernel.weight, kernel)
    again = PointSetRegressor(network, {"energy": 0.1, "force": 1.0}, scale_of={"energy": "force"})
    again.load_state_dict(task.state_dict())
    torch.testing.assert_close(again(batch)["energy"].detach(), found["energy"])
    again.load_state_dict({name: value for name, value in task.state_dict().items() if name != "gain"})
    assert again.gain == 1  # of an earlier version


def test_logits_start_at_the_order_of_one():
    """On paths of thirty points with two layers, first losses were 144 to 268."""
    torch.manual_seed(0)
    data = Batch.from_data_list(list(lattice(0.7)))
    data.y = torch.arange(data.num_graphs) % 2
    network = DirectionConvNet(tetrahedral(), 1, 2, channels=16, layers=4, neighborhood=Radius(5.0))
    task = PointSetClassifier(network, 2)
    task.log = lambda *_, **__: None
    assert float(network(data).detach().square().mean().sqrt()) > 50
    assert float(task.training_step(data, 0).detach()) < 3
    weights = copy.deepcopy(network.state_dict())
    task.training_step(data, 0)
    assert all(torch.equal(weight, weights[name]) for name, weight in network.state_dict().items())


@pytest.mark.parametrize(
    ("radius", "layers", "gain", "kind"),
    [(5.0, 4, 1.0, "vector"), (5.0, 6, 1.0, "invariant"), (1.2, 2, 0.01, "invariant")],
)
def test_numbers_and_vectors_start_at_the_scale_of_the_data(radius, layers, gain, kind):
    """On a table of SMILES, the first loss was 413, and after ten epochs still 11."""
    torch.manual_seed(0)
    options = {"channels": 16, "layers": layers, "neighborhood": Radius(radius), "kind": kind}
    network = DirectionConvNet(tetrahedral(), 1, 2, options=DirectionOptions(gain=gain), **options)
    clouds = list(lattice(0.7))
    for cloud in clouds:
        cloud.y = torch.randn(1, 2, *[3] * (kind == "vector")) + 7
    task = measured(network, "y", clouds, shift=["y"] if kind == "invariant" else [])
    data, weights = Batch.from_data_list(clouds), copy.deepcopy(network.state_dict())
    before = float(network(data).detach().square().mean().sqrt())
    first = float(task.training_step(data, 0).detach())
    after = float(network(data).detach().square().mean().sqrt())
    changed = {name for name, weight in network.state_dict().items() if not torch.equal(weight, weights[name])}
    if gain < 1:  # control: nothing is scaled if nothing is large
        assert before == after < 5
        assert not changed
        return
    assert before > 50
    assert first < 3
    assert after <= 1 + 1e-5
    last = {"head.2.weight", "head.2.bias"}
    assert changed <= {f"blocks.{number}.messages.kernel.weight" for number in range(layers)} | last
    kept = copy.deepcopy(network.state_dict())
    task.training_step(data, 0)
    assert all(torch.equal(weight, kept[name]) for name, weight in network.state_dict().items())
    with_units = PointSetRegressor(Rescaled(network, {"y": 50.0}), shift=[])
    with_units.measured.fill_(True)
    with_units.log = task.log
    with_units.training_step(data, 0)  # trained elsewhere
    assert all(torch.equal(weight, kept[name]) for name, weight in network.state_dict().items())
    network.load_state_dict(weights)
    network.blocks.requires_grad_(False)  # only a new head is trained
    with_head = measured(network, "y", clouds, shift=[])
    with_head.training_step(data, 0)
    changed = {name for name, weight in network.state_dict().items() if not torch.equal(weight, weights[name])}
    assert changed == last


@pytest.mark.filterwarnings("ignore:network. its")
@pytest.mark.parametrize("start", ["other outputs", "same outputs", "energies", "file"])
def test_weights_of_a_trained_network_are_never_scaled(start, tmp_path):
    """Who fine-tunes a network expects to begin with what it has learned."""
    torch.manual_seed(0)
    options = {"channels": 16, "layers": 2, "neighborhood": Radius(5.0, smooth=True), "pool": "sum"}
    trained, network = (DirectionConvNet(tetrahedral(), 1, outputs, **options) for outputs in (1, 1))
    if start == "other outputs":
        network = DirectionConvNet(tetrahedral(), 1, 2, **options)
    if start == "file":
        lieattn.save(trained, tmp_path / "network")
        network = lieattn.load(tmp_path / "network").train()
    else:
        transfer_weights(network, trained)
    clouds = list(lattice(0.7))
    for cloud in clouds:
        cloud.y = torch.randn(1, network.head.out_channels)
    data, weights = Batch.from_data_list(clouds), copy.deepcopy(network.state_dict())
    assert float(network(data).detach().abs().max()) > 50
    if start == "energies":
        task = PointSetRegressor(EnergyForces(network), {"energy": 0.1, "force": 1.0}, scale_of={"energy": "force"})
    else:
        task = PointSetRegressor(network, shift=[])
    task.measure(clouds)
    task.log = lambda *args, **kwargs: None
    task.training_step(data, 0)
    changed = {name for name, weight in network.state_dict().items() if not torch.equal(weight, weights[name])}
    assert changed == ({"head.2.weight", "head.2.bias"} if start == "other outputs" else set())


def test_positions_keep_their_unit_and_move_with_the_points():
    """A scale would multiply the known positions, and so the shift of translated clouds."""
    generator = torch.Generator().manual_seed(0)
    pos = 3 * torch.randn(8, 5, 3, generator=generator)
    clouds = [Data(x=torch.ones(5, 1), pos=one, y=one + 0.1) for one in pos]
    inner = FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1, heads=1)
    network = FieldModel(inner, VectorHead(4), start={"pos": 1.0})
    task = measured(network, "y", clouds)
    assert float(task.scale_y) == 1
    model = task.model.eval()
    moved = Data(x=clouds[0].x, pos=clouds[0].pos + 10)
    torch.testing.assert_close(model(moved), model(clouds[0]) + 10, atol=1e-4, rtol=0)
    scaled = measured(network, "y", clouds, scale_of={"y": "y"})
    with pytest.raises(ValueError, match=r"scale\['y'\]: expected 1, since y moves with the points, got 3"):
        scaled.evaluate(Batch.from_data_list(clouds), "train")
    with pytest.raises(ValueError, match=r"scale\['y'\]: expected 1"):
        Rescaled(network, {"y": 2.0})


def test_shifts_are_not_rounded_with_weights_in_half_precision(tmp_path):
    """In bfloat16, -10,000 is -9,984: all predictions were the same number, and the error was 16."""
    torch.manual_seed(0)
    items = [
        Data(x=torch.randn(4, 2), pos=torch.randn(4, 3), y=torch.randn(1).bfloat16().float() - 10_000.5)
        for _ in range(8)
    ]
    module = PointSetRegressor(FramewiseTransformer(tetrahedral(), 2, 1, channels=4, layers=1))
    last = LastCheckpoint(str(tmp_path))
    trainer = quiet_trainer(precision="bf16-true", callbacks=[last], enable_checkpointing=True)
    trainer.fit(module, PointSetData(items, val=items))
    values = torch.cat([item.y for item in items])
    assert float(module.shift_y) == pytest.approx(float(values.mean()), rel=1e-6)
    assert float(trainer.callback_metrics["val/error"]) < 3
    again = load_task(tmp_path / "last.ckpt")
    assert (again.shift_y.dtype, next(again.network.parameters()).dtype) == (torch.float32, torch.bfloat16)
    found, data = again(Batch.from_data_list(items))["y"], Batch.from_data_list(items)
    assert len(found.unique()) > 4
    error = float((found[:, 0] - data.y).detach().abs().mean())
    assert float(trainer.callback_metrics["val/error"]) == pytest.approx(error, abs=5e-4)  # float32 near 10,000


RISING, ALONG = torch.arange(6.0) % 3, torch.tensor([1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("values", "kind", "options", "warned"),
    [
        (300 + RISING, "invariant", {}, True),
        (3 + RISING, "invariant", {}, False),
        (300 + 0 * RISING, "invariant", {}, False),
        ((300 + RISING)[:, None] * ALONG, "vector", {}, False),
        (300 + RISING, "invariant", {"shift": []}, False),
        (300 + RISING, "invariant", {"shift": ["temperature"]}, False),
        (300 + RISING, "invariant", {"scale_of": {"temperature": "none"}}, False),
    ],
    ids=str,
)
def test_targets_far_from_0_without_a_shift_are_named(recwarn, values, kind, options, warned):
    """The network would learn the constant, in units of the constant."""
    items = [Data(pos=torch.zeros(1, 3), temperature=value[None]) for value in values]
    network = FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1, kind=kind)
    PointSetRegressor(network, "temperature", **options).measure(items)
    told = [str(warning.message) for warning in recwarn if "shift" in str(warning.message)]
    assert len(told) == warned
    if warned:
        assert "data.temperature: its mean over the training set is 301 with deviations of 0.816" in told[0]


@pytest.mark.parametrize(
    ("kinds", "targets", "looked"),
    [
        (("energy", "force"), ["energy", "force"], False),
        (("energy", "force"), ["energy"], False),  # the force has the same weights
        (("energy", "force", "dipole"), ["force"], True),
        (("gap", "dipole"), ["gap"], True),
    ],
    ids=str,
)
def test_weights_without_gradients_are_looked_for_if_there_are_outputs_without_a_target(kinds, targets, looked):
    network = nn.Identity()
    network.kind = dict.fromkeys(kinds, "invariant")
    for options, wanted in (({}, looked), ({"find_unused_parameters": False}, False)):
        strategy = DDPStrategy(**options)
        find_unused_weights(strategy, network, targets)
        assert strategy._ddp_kwargs.get("find_unused_parameters", False) == wanted
