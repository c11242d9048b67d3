"""Stresses and virials: derivatives by strain, signs and units, rotations, and training on them."""

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data

from lieattn._core.values import agreeing
from lieattn.geometry import Radius, find_neighbors, point_clouds
from lieattn.models import EnergyForces, EnergyForceStress
from lieattn.models.irreps import DistanceTransformer
from lieattn.testing import randomize, relative_error
from lieattn.train import PointSetData, PointSetRegressor
from tests.cases import quiet_trainer, short_training
from tests.test_crystals import MODELS, crystal

F64 = torch.float64
SEVERAL = ["FramewiseTransformer, O", "GSANet, T", "LieTransformer, axes of neighborhoods", "SE3Transformer"]


pytestmark = pytest.mark.usefixtures("plain")


def stressed(network):
    return EnergyForces(network, stress=True, jumps="allow").eval()


def boxes(*sizes, dtype=F64):
    """Return crystals of several sizes, the second one 10 % wider."""
    found = [crystal(points, seed, dtype) for seed, points in enumerate(sizes)]
    for number, cloud in enumerate(found):
        cloud.pos, cloud.cell = (1 + 0.1 * number) * cloud.pos, (1 + 0.1 * number) * cloud.cell
    return Batch.from_data_list(found)


class LennardJones(nn.Module):
    """The Lennard-Jones potential of argon, shifted at the cutoff, in eV and Å."""

    radius = 6.0

    def forward(self, data):
        clouds = point_clouds(data)
        neighbors = find_neighbors(clouds, Radius(self.radius, include_self=False))
        powers = 3.4**6 / neighbors.displacements(clouds.pos).square().sum(1) ** 3
        end = (3.4 / self.radius) ** 6
        pairs = 2 * 0.0104 * ((powers**2 - powers) - (end**2 - end))
        return clouds.sum(neighbors.sum_to_targets(pairs))


class Weighted(LennardJones):
    """Saves features for the gradient of a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(1, 1, dtype=F64)

    def forward(self, data):
        return super().forward(data) * self.weight(data.x).mean()


def argon(count, seed=0, spread=0.03):
    """Return strained crystals of four displaced atoms with energies, forces and stresses in eV, eV/Å and eV/Å³."""
    generator, found = torch.Generator().manual_seed(seed), []
    fractions = torch.tensor([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]], dtype=F64)
    for _ in range(count):
        cell = 5.3 * (torch.eye(3, dtype=F64) + spread * torch.randn(3, 3, generator=generator, dtype=F64))
        pos = fractions @ cell + 0.1 * torch.randn(4, 3, generator=generator, dtype=F64)
        data = Data(x=torch.ones(4, 1, dtype=F64), pos=pos, cell=cell[None], pbc=torch.ones(1, 3, dtype=torch.bool))
        found.append(data.update(stressed(LennardJones())(data)._asdict()))
    return found


def all_kinds():
    """Return a crystal, a slab, a wire, a molecule in a box, one without, and an atom."""
    found = [crystal(points, seed) for seed, points in enumerate((5, 6, 5, 6, 5, 1))]
    for cloud in found:
        cloud.pos = 0.5 * cloud.pos
    for cloud, pbc in zip(found, ((1, 1, 1), (1, 0, 1), (0, 0, 1), (0, 0, 0)), strict=False):
        cloud.pbc = torch.tensor([pbc]) > 0
    found[1].cell[0, 1] = 0.0  # is not used
    for cloud in found[4:]:
        del cloud.cell, cloud.pbc
    return found


@pytest.mark.parametrize("name", [*SEVERAL, "LennardJones"])
def test_stress_is_the_derivative_by_strain(name):
    if name == "LennardJones":
        network, data = LennardJones(), Batch.from_data_list(argon(2))
    else:
        network, data = randomize(MODELS[name]().double()), boxes(2, 3)
    found = stressed(network)(data)
    numeric = -virials(network, data) / torch.linalg.det(data.cell).abs()[:, None, None]
    assert found.stress.abs().max() > 1e-4
    assert relative_error(found.stress, numeric) < 1e-6
    assert relative_error(found.virial, -torch.linalg.det(data.cell).abs()[:, None, None] * found.stress) < 1e-12
    assert torch.equal(found.stress, found.stress.mT)
    plain = EnergyForces(network, jumps="allow").eval()(data)
    torch.testing.assert_close((found.energy, found.force), tuple(plain), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*eigenvalues of the second moments")  # of an atom
@pytest.mark.parametrize("name", SEVERAL)
def test_batches_mix_crystals_slabs_wires_and_molecules(name):
    """Every cloud has a virial, and those with a volume have a stress, alone and in a batch in any order."""
    network, clouds = randomize(MODELS[name]().double()), all_kinds()
    alone = [stressed(network)(cloud) for cloud in clouds]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 4, 1, 0, 2]):
        data = Batch.from_data_list(agreeing([clouds[number] for number in order]))
        found = stressed(network)(data)
        for part, values in found._asdict().items():
            expected = torch.cat([getattr(alone[number], part) for number in order])
            torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-11, equal_nan=True)
        assert found.stress.isnan().all(dim=(1, 2)).tolist() == [number != 0 for number in order]
        assert found.stress[order.index(0)].isfinite().all()
    assert (found.virial.abs().amax(dim=(1, 2)) > 1e-5).tolist() == [number != 5 for number in order]
    assert relative_error(found.virial, virials(network, data, 3e-6)) < 1e-6


def virials(network, data, step=1e-5):
    """Return minus the derivatives of energies by strain, from finite differences."""
    numeric = torch.zeros(data.num_graphs, 3, 3, dtype=F64)
    for i, k in np.ndindex(3, 3):
        ends = []
        for sign in (1, -1):
            strain = torch.zeros(3, 3, dtype=F64)
            strain[i, k] += sign * step / 2
            strain[k, i] += sign * step / 2
            other = data.clone()
            other.pos, other.cell = data.pos + data.pos @ strain, data.cell + data.cell @ strain
            with torch.no_grad():
                ends.append(network(other).flatten())
        numeric[:, i, k] = (ends[1] - ends[0]) / (2 * step)
    return numeric


def test_stress_does_not_depend_on_the_order_of_the_cell_vectors():
    """Volumes of left-handed cells are positive too."""
    (data,) = argon(1)
    other = data.clone()
    other.cell = data.cell[:, [1, 0, 2]]
    one, two = (stressed(LennardJones())(crystal) for crystal in (data, other))
    torch.testing.assert_close(two.stress, one.stress)
    torch.testing.assert_close(two.virial, one.virial)


def test_stress_under_pressure_is_negative():
    """A compressed crystal has negative stress: its energy decreases as it expands."""
    squeezed = argon(1, spread=0.0)[0]
    squeezed.pos, squeezed.cell = 0.9 * squeezed.pos, 0.9 * squeezed.cell
    assert stressed(LennardJones())(squeezed).stress[0].trace() < -1e-2
    single = stressed(LennardJones())(squeezed.apply(lambda x: x.float() if x.is_floating_point() else x))
    assert {part.dtype for part in single} == {torch.float32}


def test_results_are_detached_where_gradients_are_off():
    model, data = stressed(LennardJones()), argon(1)[0]
    weighted = EnergyForces(Weighted(), stress=True).train()
    with torch.inference_mode():
        found = model(data)
        inside = data.clone().apply(torch.clone)
        kept = dict(inside)
        again = weighted(inside)
    assert all(inside[name] is value for name, value in kept.items())
    assert again.stress.isfinite().all()
    assert isinstance(found, EnergyForceStress)
    assert not any(part.requires_grad for part in found)
    assert data.cell.grad is None
    training = EnergyForces(LennardJones(), stress=True).train()
    assert all(part.requires_grad for part in training(data))
    with torch.no_grad():
        assert not any(part.requires_grad for part in training(data))


@pytest.mark.parametrize("pbc", [(1, 0, 1), (0, 0, 0), None], ids=str)
def test_clouds_without_a_volume_have_no_stress(pbc):
    model, (whole, data) = stressed(LennardJones()), argon(2)
    data.pbc = None if pbc is None else torch.tensor([pbc]) > 0
    data.cell = None if pbc is None else data.cell
    assert model(data).stress.isnan().all()
    found = model(Batch.from_data_list(agreeing([data, whole])))
    assert found.stress[0].isnan().all()
    torch.testing.assert_close(found.stress[1:], whole.stress)
    torch.testing.assert_close(found.virial[:1], model(data).virial)


def test_masked_stresses_have_no_part_in_gradients():
    """Losses on a mixed batch have the gradients of the crystals alone, and weights have no NaN."""
    network = randomize(MODELS["FramewiseTransformer, O"]().double())
    model, clouds = EnergyForces(network, stress=True).train(), all_kinds()
    mixed, alone = Batch.from_data_list(agreeing(clouds[::-1])), Batch.from_data_list(clouds[:1])
    weights = [weight for weight in network.parameters() if weight.requires_grad]

    def gradients(data):
        stress = model(data).stress
        return torch.autograd.grad(stress[stress.isfinite()].square().sum(), weights, materialize_grads=True)

    for one, other in zip(gradients(mixed), gradients(alone), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert sum(float(gradient.abs().sum()) for gradient in gradients(mixed)) > 1e-3


def test_clouds_may_be_given_by_their_batch_alone():
    model, data = stressed(LennardJones()), Batch.from_data_list(argon(2))
    found = model(Data(x=data.x, pos=data.pos, cell=data.cell, pbc=data.pbc, batch=data.batch))
    for part, expected in zip(found, model(data), strict=True):
        torch.testing.assert_close(part, expected, rtol=0, atol=0)


@short_training
def test_training_learns_stresses_of_crystals_among_slabs_and_molecules():
    """The loss is the weighted one of all energies and forces, and of the stresses of the crystals alone."""
    ase, datasets = pytest.importorskip("ase"), pytest.importorskip("lieattn_datasets")
    frames = []
    for number, pbc in enumerate(((0, 0, 0), (1, 1, 1), (1, 1, 0), (1, 1, 1), (0, 0, 1))):
        frame = ase.Atoms("Cu2", [[0, 0, 0], [1.2, 0.3 * number, 1.0]], cell=[3.0, 3.1, 3.2 + 0.1 * number], pbc=pbc)
        frame.info |= {"energy": -2.0 - number, **({"stress": 0.01 * number * np.eye(3)} if all(pbc) else {})}
        frame.arrays["forces"] = 0.1 * np.array([[number, 0, 1], [-number, 0, -1]])
        frames.append(frame)
    clouds = [data.update({"x": torch.ones(2, 1)}) for data in datasets.Molecules.from_ase(frames, references=False)]
    assert [bool(data.stress_mask) for data in clouds] == [False, True, False, True, False]
    torch.manual_seed(0)
    network = DistanceTransformer(1, 1, channels=8, layers=1, heads=2, neighborhood=Radius(3.5), pool="sum")
    names = {"energy": 0.5, "force": 1.0, "stress": 2.0}
    task = PointSetRegressor(EnergyForces(network, stress=True), names, shift=[], scale_of=dict.fromkeys(names, "none"))
    found = task.network.eval()(Batch.from_data_list(clouds))
    task.train()
    targets = {name: torch.cat([data[name] for data in clouds]) for name in names}

    def errors(outputs):
        apart = {name: (outputs[name] - target).abs() for name, target in targets.items()}
        return {name: float(apart[name][target.isfinite()].mean()) for name, target in targets.items()}

    expected = sum(names[name] * error for name, error in errors(found._asdict()).items())
    first = []
    task.on_train_batch_end = lambda outputs, batch, index: first.append(float(outputs["loss"]))
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(task, PointSetData(clouds, clouds, batch_size=5, shuffle=False))
    assert first[0] == pytest.approx(expected, rel=1e-5)
    assert all(bool(weight.isfinite().all()) for weight in task.parameters())
    for name, error in errors(task.eval()(Batch.from_data_list(clouds))).items():
        assert float(trainer.callback_metrics[f"val/error_{name}"]) == pytest.approx(error, rel=1e-4)
    del clouds[2].stress_mask
    clouds[2].stress = torch.zeros(1, 3, 3)
    with pytest.raises(ValueError, match=r"data\.stress: cloud 2 of a batch is not periodic .* data\.stress_mask"):
        trainer.validate(task, PointSetData(val=clouds, eval_batch_size=5), verbose=False)
