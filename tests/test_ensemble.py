"""Networks as one: means and spreads of outputs, forces among them, files, certificates."""

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data

import lieattn
from lieattn.certify import certify
from lieattn.geometry import Radius
from lieattn.groups import octahedral, tetrahedral
from lieattn.models import EnergyAndForce, EnergyForces, Ensemble, FramewiseTransformer, Rescaled
from lieattn.testing import randomize

NUMBER = 3
T = tetrahedral()


def network(seed, group=T):
    options = {"channels": 4, "layers": 1, "neighborhood": Radius(2.0, smooth=True), "pool": "sum"}
    return randomize(FramewiseTransformer(group, 1, 1, **options), seed).double().eval()


@pytest.fixture(scope="module")
def networks():
    return [network(seed) for seed in range(NUMBER)]


@pytest.fixture(scope="module")
def clouds():
    torch.manual_seed(0)
    return [Data(x=torch.rand(n, 1).double(), pos=torch.randn(n, 3).double()) for n in (4, 6)]


def test_means_and_unbiased_deviations(networks, clouds):
    batch, ensemble = Batch.from_data_list(clouds), Ensemble(networks)
    each = np.stack([member(batch).detach().numpy() for member in networks])
    mean, std = ensemble.spread(batch)
    np.testing.assert_allclose(mean.detach().numpy(), each.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(std.detach().numpy(), each.std(axis=0, ddof=1), atol=1e-12)
    assert std.min() > 1e-3
    assert torch.equal(ensemble(batch), mean)
    moved = batch.clone()
    moved.pos = moved.pos @ T.elements[7].T + 1.0
    for one, other in zip(ensemble.spread(moved), (mean, std), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_forces_have_means_and_deviations(networks, clouds):
    """The mean force is that of the mean energy, whichever way round they are put together."""
    batch = Batch.from_data_list(clouds)
    mean, std = Ensemble([EnergyForces(member) for member in networks]).eval().spread(batch)
    assert isinstance(mean, EnergyAndForce)
    assert std.force.shape == batch.pos.shape
    whole = EnergyForces(Ensemble(networks)).eval()(batch)
    torch.testing.assert_close(mean.energy, whole.energy, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mean.force, whole.force, rtol=1e-10, atol=1e-10)
    each = torch.stack([EnergyForces(member).eval()(batch).force for member in networks])
    torch.testing.assert_close(std.force, each.std(dim=0), rtol=1e-10, atol=1e-10)


def test_outputs_by_name_keep_their_names(networks, clouds):
    units = [Rescaled(EnergyForces(member), {"energy": 2.0, "force": 2.0}, {"energy": 1.0}) for member in networks]
    mean, std = Ensemble(units).eval().spread(clouds[0])
    wanted = Ensemble([EnergyForces(member) for member in networks]).eval().spread(clouds[0])
    torch.testing.assert_close(mean.energy, 1 + 2 * wanted.mean.energy)
    torch.testing.assert_close(std.energy, 2 * wanted.std.energy)
    scaled = Ensemble([Rescaled(EnergyForces(member), {"energy": 2.0}) for member in networks]).eval().spread(clouds[0])
    assert list(scaled.mean) == ["energy"]


def test_one_file_and_a_certificate(networks, clouds, tmp_path):
    ensemble = Ensemble(networks)
    lieattn.save(ensemble, tmp_path / "ensemble.safetensors")
    loaded = lieattn.load(tmp_path / "ensemble.safetensors")
    assert isinstance(loaded, Ensemble)
    assert torch.equal(loaded(clouds[0]), ensemble(clouds[0]))
    assert loaded.guarantee == networks[0].guarantee
    assert certify(loaded, clouds, dtypes=[torch.float64]).verdict == "kept"


def test_calculator_of_ase(networks):
    ase, calculator = pytest.importorskip("ase"), pytest.importorskip("lieattn.ase")
    atoms = ase.Atoms("OH2", [[0, 0, 0.12], [0, 0.76, -0.48], [0, -0.76, -0.48]])
    units = [Rescaled(member, {"energy": 2.0 + k}, {"energy": float(k)}) for k, member in enumerate(networks)]
    each = []
    for one in units:
        atoms.calc = calculator.Calculator(one, energy_unit="kcal/mol")
        each.append((atoms.get_potential_energy(), atoms.get_forces()))
    energies, forces = (np.stack(column) for column in zip(*each, strict=True))
    atoms.calc = calculator.Calculator(Ensemble(units), energy_unit="kcal/mol")
    assert atoms.get_potential_energy() == pytest.approx(energies.mean(), abs=1e-12)
    np.testing.assert_allclose(atoms.get_forces(), forces.mean(axis=0), atol=1e-12)
    assert atoms.calc.get_property("energy_std", atoms) == pytest.approx(energies.std(ddof=1), abs=1e-12)
    np.testing.assert_allclose(atoms.calc.results["forces_std"], forces.std(axis=0, ddof=1), atol=1e-12)


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda: [network(0)], ValueError, "networks: expected at least two, of which there is a spread, got 1"),
        (
            lambda: [network(0), network(0, octahedral())],
            ValueError,
            "networks: expected the same guarantee of all, got",
        ),
        (lambda: [network(0), 3], TypeError, "networks"),
    ],
    ids=["one", "other group", "no network"],
)
def test_wrong_networks(made, error, message):
    with pytest.raises(error, match=message):
        Ensemble(made())


def test_outputs_must_be_tensors():
    class Text(nn.Module):
        def forward(self, data):
            return "text"

    with pytest.raises(TypeError, match="networks: expected outputs that are tensors, or tensors by name, got str"):
        Ensemble([Text(), Text()])(None)
