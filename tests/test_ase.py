"""Networks as calculators of ASE: derivatives, units and dynamics."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset
from torch_geometric.data import Batch, Data

import lieattn
from lieattn.certify import certify
from lieattn.geometry import Radius, find_neighbors, point_clouds
from lieattn.groups import Translations, tetrahedral
from lieattn.models import (
    Captured,
    CloudInputs,
    DirectionConvNet,
    EnergyForces,
    Ensemble,
    FramewiseTransformer,
    LieTransformer,
    Preprocessed,
    Readout,
    Rescaled,
    Species,
)
from lieattn.models.dynamics import _compiled
from lieattn.nn import DipoleHead, Heads, InvariantHead
from lieattn.spaces import Euclidean
from lieattn.testing import randomize
from lieattn.train import PointSetRegressor
from lieattn_datasets import ExtendedXYZ

ase = pytest.importorskip("ase")
build, lj = (pytest.importorskip(f"ase.{name}") for name in ("build", "calculators.lj"))
velocitydistribution, verlet = (pytest.importorskip(f"ase.md.{name}") for name in ("velocitydistribution", "verlet"))
calculator = pytest.importorskip("lieattn.ase")

RADIUS = 6.0
NO_TORCH_SIM = 'torch-sim is not installed: pip install "lieattn[torchsim]"'


class LennardJones(nn.Module):
    """The Lennard-Jones potential of argon, shifted at the cutoff, in eV and Å, with the parameters of ASE."""

    def __init__(self, epsilon=0.0104, sigma=3.4):
        super().__init__()
        self.epsilon, self.sigma = (nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (epsilon, sigma))

    def forward(self, data):
        neighbors = find_neighbors(point_clouds(data), Radius(RADIUS, include_self=False))
        powers = self.sigma**6 / neighbors.displacements(data.pos).square().sum(1) ** 3
        end = (self.sigma / RADIUS) ** 6
        return (2 * self.epsilon * ((powers**2 - powers) - (end**2 - end))).sum().reshape(1)


def argon(repeat=1, seed=0):
    atoms = build.bulk("Ar", "fcc", a=5.3, cubic=True) * (repeat, repeat, repeat)
    atoms.rattle(0.1, seed=seed)
    return atoms


def network(radius=None):
    radius = radius or Radius(3.0, smooth=True)
    options = {"channels": 8, "layers": 1, "heads": 2, "readout": Readout(pool="sum")}
    made = LieTransformer(Species((1, 8)), 1, space=Euclidean(Translations(3)), neighborhood=radius, **options)
    return randomize(made).double()


def water(cell=False):
    atoms = build.molecule("H2O")
    if cell:
        atoms.set_cell([[3.1, 0.2, 0.0], [0.0, 2.9, 0.3], [0.4, 0.0, 3.3]])
        atoms.pbc = True
    return atoms


def with_calculator(atoms, *args, **options):
    atoms.calc = calculator.Calculator(*args, **options)
    return atoms


def test_lennard_jones_is_that_of_ase():
    ours, theirs = argon(), argon()
    ours.calc = calculator.Calculator(LennardJones())
    theirs.calc = lj.LennardJones(epsilon=0.0104, sigma=3.4, rc=RADIUS)
    assert ours.get_potential_energy() == pytest.approx(theirs.get_potential_energy(), rel=1e-10)
    np.testing.assert_allclose(ours.get_forces(), theirs.get_forces(), atol=1e-10)
    np.testing.assert_allclose(ours.get_stress(), theirs.get_stress(), atol=1e-10)


def test_dynamics_conserve_energy():
    """10 fs of a crystal with a random network: the energy drift is the second-order error of the time steps."""
    drifts = []
    for step in (0.5, 0.25):
        atoms = with_calculator(water(cell=True), Rescaled(network(), {"y": 0.1}))
        # The second name is deprecated in ASE 3.29, before which the first one does not exist.
        names = ("thermalize_momenta", "MaxwellBoltzmannDistribution")
        draw = next(getattr(velocitydistribution, name) for name in names if hasattr(velocitydistribution, name))
        draw(atoms, temperature_K=300, rng=np.random.default_rng(0))
        kinetic, energies = atoms.get_kinetic_energy(), []
        dynamics = verlet.VelocityVerlet(atoms, timestep=step * ase.units.fs)
        dynamics.attach(lambda atoms=atoms, energies=energies: energies.append(atoms.get_total_energy()))
        dynamics.run(round(10 / step))
        drifts.append(np.ptp(energies) / kinetic)
    assert drifts[1] < 1e-2
    assert drifts[0] / drifts[1] == pytest.approx(4, rel=0.1)


def test_units_come_from_the_model():
    plain = network()
    task = PointSetRegressor(EnergyForces(plain), {"energy": 1.0, "force": 1.0}, scale_of={"energy": "force"}).double()
    task.scale_energy.fill_(3.0), task.scale_force.fill_(3.0), task.shift_energy.fill_(-7.0)
    theirs, ours = with_calculator(water(), plain), with_calculator(water(), task.model, energy_unit="kcal/mol")
    unit = ase.units.kcal / ase.units.mol
    assert ours.get_potential_energy() == pytest.approx(unit * (3 * theirs.get_potential_energy() - 7), rel=1e-12)
    np.testing.assert_allclose(ours.get_forces(), 3 * unit * theirs.get_forces(), rtol=1e-10)


@pytest.mark.parametrize(
    ("unit", "factor"), [("meV", 1e-3), ("kcal/mol", 0.0433641), ("kJ/mol", 0.01036427), ("Ha", 27.2114)]
)
def test_units_of_energies(unit, factor):
    net, atoms = network(), water()
    wanted = with_calculator(water(), net).get_potential_energy() * factor
    atoms.calc = calculator.Calculator(net, energy_unit=unit)
    assert atoms.get_potential_energy() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("unit", "size"), [("nm", 10.0), ("Bohr", 0.529177)])
def test_units_of_lengths(unit, size):
    net, theirs, ours = network(), water(cell=True), water(cell=True)
    theirs.calc, ours.calc = calculator.Calculator(net), calculator.Calculator(net, length_unit=unit)
    ours.set_cell(theirs.cell.array * size, scale_atoms=True)
    assert ours.get_potential_energy() == pytest.approx(theirs.get_potential_energy(), rel=1e-5)
    np.testing.assert_allclose(ours.get_forces() * size, theirs.get_forces(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(ours.get_stress() * size**3, theirs.get_stress(), rtol=1e-4, atol=1e-6)


def test_cells_that_are_periodic_along_some_vectors():
    net, atoms = network(), water(cell=True)
    atoms.pbc = True, True, False
    atoms.calc = calculator.Calculator(net)
    given = inputs(atoms)
    given.cell, given.pbc = torch.tensor(atoms.cell.array)[None], torch.tensor([[True, True, False]])
    assert atoms.get_potential_energy() == pytest.approx(float(net(given).detach()), rel=1e-12)
    with pytest.raises(ase.calculators.calculator.PropertyNotImplementedError, match="three cell vectors"):
        atoms.get_stress()


class Noisy(LennardJones):
    """Another energy in training than in evaluation."""

    def forward(self, data):
        return super().forward(data) + self.training


def test_models_are_copied_and_evaluated():
    model = Rescaled(Noisy().train(), {"y": 2.0}, {"y": 1.0}).double()
    atoms = with_calculator(argon(), model)
    wanted = 2 * with_calculator(argon(), LennardJones()).get_potential_energy() + 1
    assert atoms.get_potential_energy() == pytest.approx(wanted, rel=1e-12)
    assert not any(weight.requires_grad for weight in atoms.calc.model.parameters())
    assert model.network.training
    assert model.network.sigma.requires_grad
    model.scale_y.fill_(7.0)
    atoms.calc.results = {}
    assert atoms.get_potential_energy() == pytest.approx(wanted, rel=1e-12)


def test_shifts_and_scales_apply_from_the_inside():
    theirs = with_calculator(water(), network()).get_potential_energy()
    ours = with_calculator(water(), Rescaled(Rescaled(network(), {"y": 2.0}, {"y": 3.0}), {"y": 5.0}, {"y": 7.0}))
    assert ours.get_potential_energy() == pytest.approx(5 * (2 * theirs + 3) + 7, rel=1e-12)


def molecules(count=12):
    """Frames of molecules of H and O far below 0, as total energies are, with small deviations from sums of atoms."""
    generator = np.random.default_rng(0)
    for number in range(count):
        atoms = build.molecule(("H2O", "H2", "O2", "H2O2")[number % 4])
        atoms.rattle(0.05, seed=number)
        level = -13.7 * np.sum(atoms.numbers == 1) - 2041.3 * np.sum(atoms.numbers == 8)
        atoms.info["energy"], atoms.arrays["forces"] = (
            level + generator.normal(),
            generator.normal(size=(len(atoms), 3)),
        )
        yield atoms


@pytest.mark.parametrize(
    ("targets", "extensive"), [({"energy": 1.0, "force": 1.0}, True), ({"y": 1.0}, False), ({"energy": 1.0}, True)]
)
@pytest.mark.filterwarnings("ignore:frames. the energy and that of a frame near it")
def test_energies_are_at_the_level_of_the_training_data(tmp_path, targets, extensive):
    """Data sets subtracted energies of atoms, which no model added: -1.456 eV where the reference has +0.808."""
    frames, path = list(molecules()), tmp_path / "frames.xyz"
    pytest.importorskip("ase.io").write(path, frames, format="extxyz")
    inner = network().float()
    model = EnergyForces(inner) if "force" in targets else inner
    options = {"scale_of": {"energy": "force"}} if "force" in targets else {}
    name = "y" if "y" in targets else "energy"
    task = PointSetRegressor(model, targets, extensive=[name] if extensive else [], **options).eval()
    data = ExtendedXYZ(path, "all")
    assert data[0].energy.dtype == torch.float64
    for given in (Subset(data, range(len(data))), data):
        task.measure(given)
        assert f"references of {name}  {{1: -13.637, 8: -2041.4}}" in str(task.model)
    lieattn.save(task.model, tmp_path / "model")
    again = PointSetRegressor(copy.deepcopy(model), targets, extensive=[name] if extensive else [], **options).eval()
    again.load_state_dict(task.state_dict())
    batch = Batch.from_data_list(list(data))
    wanted = torch.tensor([frame.info["energy"] for frame in frames], dtype=torch.float64)
    for one in (again.half().float(), task):  # the references stay in float64
        found = one(batch)[name].detach().reshape(-1)
        assert (found - wanted).abs().max() < 10 + 10 * float(task.get_buffer(f"scale_{name}"))
    for one in (task.model, lieattn.load(tmp_path / "model")):
        energies = [with_calculator(frame.copy(), one).get_potential_energy() for frame in frames]
        np.testing.assert_allclose(energies, found.numpy(), rtol=0, atol=2e-3)
    task.log = lambda *args, **kwargs: None
    losses = [task.evaluate(batch, "test")]
    with_references = ExtendedXYZ(path, "all", references=True)
    task.measure(with_references)  # the data have sums of atoms no longer, so none are measured
    assert "references" not in str(task.model)
    losses.append(task.evaluate(Batch.from_data_list(list(with_references)), "test"))
    torch.testing.assert_close(losses[0].double(), losses[1].double(), rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match=r"data.z: expected elements with references, \[1, 8\], got 6"):
        again.model.shift_of(name, torch.zeros(1), Data(pos=torch.zeros(2, 3), z=torch.tensor([6, 8])))
    again.load_state_dict(task.state_dict())  # as that of an earlier version
    assert "references" not in str(again.model)


def test_references_belong_to_outputs_and_have_rows_of_two():
    for references, message in (
        ({"x": torch.zeros(1, 2)}, r"references: \['x'\] are not among the outputs \['y'\]"),
        ({"y": torch.zeros(2)}, r"references\['y'\]: expected a table \[elements, 2\], got \(2,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            Rescaled(network(), {"y": 1.0}, references=references)
    with pytest.raises(ValueError, match=r"data\.z: expected elements"):
        Rescaled(nn.Identity(), {"y": 1.0}, references={"y": torch.ones(1, 2)})(torch.zeros(1))


@pytest.mark.parametrize("pbc", [None, (True, True, False), True], ids=["molecule", "slab", "crystal"])
def test_compiled_functions_compute_molecules_and_crystals(pbc, monkeypatch):
    """Here they are eager."""
    calls = []

    def function(net, options):
        def compiled(values, geometry, *inputs):
            calls.append(len(inputs))
            usual = EnergyForces(net, stress=len(inputs) > 1).eval()
            results = usual(Data(**{**values, "pos": inputs[0]}))
            gradients = [-results.force, *(-results.virial for _ in inputs[1:])]
            return results.energy, {}, tuple(gradients)

        return compiled

    monkeypatch.setattr(_compiled, "_function", function)
    net = DirectionConvNet(
        tetrahedral(), Species((1, 8)), 1, channels=4, layers=1, neighborhood=Radius(3.0, smooth=True), pool="sum"
    )
    model = Rescaled(randomize(net).double(), {"energy": 2.0}, {"energy": 3.0})
    usual, found = (
        with_calculator(water(pbc is not None), model, energy_unit="kcal/mol", compile=compile)
        for compile in (False, True)
    )
    for atoms in (usual, found) if pbc else ():
        atoms.pbc = pbc
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + 0.05 * np.random.default_rng(0).normal(size=(3, 3))))
    assert found.get_potential_energy() == pytest.approx(usual.get_potential_energy(), rel=1e-12)
    np.testing.assert_allclose(found.get_forces(), usual.get_forces(), atol=1e-10 * np.abs(usual.get_forces()).max())
    if pbc is True:
        expected = usual.get_stress()
        np.testing.assert_allclose(found.get_stress(), expected, atol=1e-10 * np.abs(expected).max())
    assert set(calls) == {2 if pbc is True else 1}


def test_its_networks_are_printed():
    assert repr(calculator.Calculator(network())) == "Calculator(EnergyForces)"
    assert repr(calculator.Calculator(Ensemble([network(), network()]))).count("EnergyForces") == 2


def same(data):
    """A transform that is no change."""
    return data


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda net: Preprocessed(EnergyForces(net), same),
        lambda net: Preprocessed(Rescaled(EnergyForces(net), {"energy": 1.0, "force": 1.0}), same),
        lambda net: Rescaled(Rescaled(EnergyForces(net), {"energy": 2.0}), {"energy": 0.5}),
        lambda net: Captured(EnergyForces(net), inputs=("pos",)),
        lambda net: torch.compile(EnergyForces(net), backend="eager"),
        lambda net: Preprocessed(Ensemble([net, EnergyForces(copy.deepcopy(net))]), same),
    ],
)
def test_energies_are_found_within_other_modules(wrapped):
    net = network()
    theirs, ours = with_calculator(water(), net), with_calculator(water(), wrapped(net))
    assert ours.get_potential_energy() == theirs.get_potential_energy()
    np.testing.assert_array_equal(ours.get_forces(), theirs.get_forces())
    assert ("energy_std" in ours.calc.results) == ("Ensemble" in repr(wrapped(net)))
    assert {"energy", "forces"} <= set(ours.calc.export_properties())


def test_the_energy_among_several_outputs():
    net = network()
    heads = Heads({"energy": net.head, "charge": InvariantHead(8, 1, pool="none")}).double()
    theirs, ours = with_calculator(water(), net), with_calculator(water(), net.with_head(heads))
    assert ours.get_potential_energy() == theirs.get_potential_energy()
    np.testing.assert_allclose(ours.get_forces(), theirs.get_forces(), atol=1e-12)
    whole = Rescaled(EnergyForces(net.with_head(heads)), {"energy": 2.0, "force": 2.0, "charge": 5.0}, {"energy": 1.0})
    assert with_calculator(water(), whole.double()).get_potential_energy() == pytest.approx(
        2 * theirs.get_potential_energy() + 1
    )


@pytest.mark.parametrize("whole", [lambda model: model, Captured], ids=["alone", "captured"])
def test_an_energy_does_not_have_the_scale_of_another_output(whole):
    """Training on dipoles alone trains no energy."""
    net = network()
    heads = Heads({"energy": net.head, "dipole": DipoleHead(8)}).double()
    model = whole(Rescaled(net.with_head(heads), {"dipole": 3.0}))
    with pytest.raises(ValueError, match=r"model: expected the scale of the output 'energy', got that of 'dipole'"):
        with_calculator(water(), model.double()).get_potential_energy()
    with pytest.raises(ValueError, match=r"model: expected an output 'energy', .* got \['dipole'\]"):
        EnergyForces(model)


def several(net=None, **more):
    """Return a network with energies, dipoles and charges."""
    net = net or network()
    torch.manual_seed(0)
    heads = {"energy": net.head, "dipole": DipoleHead(8), "charges": InvariantHead(8, 1, pool="none"), **more}
    return net.with_head(Heads(heads).double())


def inputs(atoms):
    return Data(z=torch.tensor(atoms.numbers), pos=torch.tensor(atoms.positions))


@pytest.mark.parametrize("whole", [lambda net: net, EnergyForces, Captured], ids=["alone", "forces", "captured"])
def test_dipoles_and_charges(whole):
    net, atoms = several(), water()
    wanted = net(inputs(atoms))
    atoms.calc = calculator.Calculator(whole(net))
    np.testing.assert_allclose(atoms.get_dipole_moment(), wanted["dipole"][0].detach(), rtol=1e-12)
    np.testing.assert_allclose(atoms.get_charges(), wanted["charges"][:, 0].detach(), rtol=1e-12)
    assert {"dipole", "charges"} <= set(atoms.calc.export_properties())
    before = atoms.get_dipole_moment()
    atoms.positions[0] += 0.1
    assert not np.allclose(atoms.get_dipole_moment(), before)
    atoms.calc = calculator.Calculator(whole(net), dipole_unit="D")
    dipole = net(inputs(atoms))["dipole"][0].detach()
    np.testing.assert_allclose(atoms.get_dipole_moment(), dipole * ase.units.Debye)
    atoms.calc = calculator.Calculator(whole(net), dipole_unit="e Bohr")
    np.testing.assert_allclose(atoms.get_dipole_moment(), dipole * ase.units.Bohr)


def test_dipoles_and_charges_in_the_units_of_the_data():
    net, atoms = several(charge=InvariantHead(8, 1, pool="none")), water()
    heads = net.head.heads
    del heads["charges"]
    scales, shifts = {"energy": 2.0, "force": 2.0, "dipole": 3.0, "charge": 5.0}, {"charge": 0.5}
    model = Rescaled(EnergyForces(net), scales, shifts).double()
    wanted = model.eval()(inputs(atoms))
    atoms.calc = calculator.Calculator(Rescaled(model, {"energy": 1.0, "dipole": 7.0, "charge": 1.0}))
    np.testing.assert_allclose(atoms.get_dipole_moment(), 7 * wanted["dipole"][0], rtol=1e-6)
    np.testing.assert_allclose(atoms.get_charges(), wanted["charge"][:, 0], rtol=1e-6)
    assert np.abs(atoms.get_charges()).max() > 0.1


def test_dipoles_of_an_ensemble_are_means():
    nets, atoms = [several(), several(randomize(network(), 5))], water(cell=True)
    atoms.calc = calculator.Calculator(Ensemble(nets))
    each = [with_calculator(water(cell=True), net).get_dipole_moment() for net in nets]
    assert not np.allclose(*each)
    np.testing.assert_allclose(atoms.get_dipole_moment(), np.mean(each, axis=0), rtol=1e-12)
    np.testing.assert_allclose(atoms.get_stress(), with_calculator(water(True), Ensemble(nets)).get_stress())


def test_charges_of_atoms_are_not_that_of_the_structure():
    net, atom = several(charge=InvariantHead(8, 1)), ase.Atoms("O")
    atom.calc = calculator.Calculator(net)
    charges = net(inputs(atom))["charges"][:, 0].detach()
    assert not np.allclose(charges, net(inputs(atom))["charge"][0].detach())
    np.testing.assert_allclose(atom.get_charges(), charges, rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (network, "only an energy"),
        (lambda: Ensemble([several(), network()]), r"'charges': \[3, 1\].*only an energy"),
        (lambda: Rescaled(several(), {"energy": 1.0}), "only an energy"),  # trained on energies alone
        (
            lambda: several(dipole=InvariantHead(8, 1), charges=InvariantHead(8, 1)),
            r"'dipole': \[1, 1\], 'charges': \[1, 1\]",
        ),
    ],
    ids=["one output", "ensemble", "energies", "other shapes"],
)
def test_dipoles_and_charges_that_there_are_not(make, found):
    atoms = with_calculator(water(), make())
    missing = ase.calculators.calculator.PropertyNotImplementedError
    with pytest.raises(missing, match=rf"dipole: expected a model with a dipole \[1, 3\] among .*, got .*{found}"):
        atoms.get_dipole_moment()
    with pytest.raises(missing, match=rf"charges: expected a model with charges \[3\] or \[3, 1\] .*{found}"):
        atoms.get_charges()
    assert np.isfinite(atoms.get_forces()).all()


def ions(*names):
    network = FramewiseTransformer(tetrahedral(), CloudInputs(names, points=1), 1, channels=4, layers=1, pool="sum")
    return randomize(network).double()


def test_an_array_is_no_number_of_a_structure():
    atoms = with_calculator(water(), ions("charge"))
    atoms.info["charge"] = 1
    charged = atoms.get_potential_energy()
    for wrong in (np.array([1.0, 2.0]), True):
        atoms.info["charge"] = wrong
        with pytest.raises(ValueError, match=r"atoms.info\['charge'\]: expected a number"):
            atoms.calc.calculate(atoms)
    atoms.info["charge"] = 1
    assert atoms.get_potential_energy() == charged


def test_networks_of_an_ensemble_have_their_own_inputs():
    members = [ions("charge"), ions("spin", "charge")]
    atoms = with_calculator(water(), Ensemble(members))
    atoms.info |= {"charge": 1, "spin": 2}
    each = []
    for member in members:
        single = with_calculator(water(), member)
        single.info |= atoms.info
        each.append(single.get_potential_energy())
    assert atoms.get_potential_energy() == pytest.approx(np.mean(each))
    before = atoms.get_potential_energy()
    atoms.info["spin"] = 4
    assert atoms.get_potential_energy() != before


def test_large_shifts_do_not_round_energies():
    """Shift and scale of a float32 network are in float64, also inside of a transform, which counts the points."""

    def doubled(data):
        return Data(pos=torch.cat([data.pos, data.pos + 50]), z=torch.cat([data.z, data.z]))

    net = network().float()
    inner = Rescaled(net, {"y": 2.0}, {"y": -4e5}, extensive=["y"])
    for transform, points in ((same, 3), (doubled, 6)):
        theirs, ours = (with_calculator(water(), Preprocessed(model, transform)) for model in (net, inner))
        wanted = 2 * theirs.get_potential_energy() - points * 4e5
        assert ours.get_potential_energy() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_networks_in_half_precision_have_exact_positions(dtype):
    atoms = with_calculator(water(), net := network().to(dtype))
    atoms.positions += 100
    wanted = net(Data(z=torch.tensor(atoms.numbers), pos=torch.tensor(atoms.positions).float()))
    assert atoms.get_potential_energy() == float(wanted.detach())


BOXES = {
    "molecule": (None, False),
    "box": (np.diag([499.7, 500.1, 500.0]), True),
    "triclinic": ([[499.7, 0, 0], [120.3, 480.2, 0], [90.1, -60.7, 490.3]], True),
    "slab": ([[499.7, 0, 0], [120.3, 480.2, 0], [0, 0, 0]], [True, True, False]),
    "crystal": ([[2.31, 0, 0], [0.73, 2.22, 0], [0.41, -0.3, 2.44]], True),
}


@pytest.mark.parametrize("name", BOXES)
def test_results_in_single_precision_do_not_depend_on_the_place(name):
    """Also for an atom in another image: in boxes of 500 Å, and at 10,000 Å, float32 has steps of 3e-5 and 1e-3 Å."""
    cell, pbc = BOXES[name]
    atoms = water() if cell is None else ase.Atoms(water(), cell=cell, pbc=pbc)
    exact = with_calculator(atoms.copy(), net := network())
    single = calculator.Calculator(copy.deepcopy(net).float())
    size = np.abs(exact.get_forces()).max()
    for shift, wrapped in ((0.0, False), (0.0, True), (333.3, True), (1e4 / 3, False), (-1e4, True)):
        moved = atoms.copy()
        moved.positions += shift
        if wrapped:
            moved.wrap()
        moved.calc = single
        assert moved.get_potential_energy() == pytest.approx(exact.get_potential_energy(), rel=3e-6, abs=1e-7)
        np.testing.assert_allclose(moved.get_forces(), exact.get_forces(), rtol=0, atol=3e-6 * size)
        if np.all(pbc):
            stress = exact.get_stress()
            np.testing.assert_allclose(moved.get_stress(), stress, rtol=0, atol=1e-5 * np.abs(stress).max())


def test_a_bond_across_a_large_cell_keeps_its_digits():
    """Points of a ring of 500 Å cannot all be near the origin, where float32 is exact."""
    ring = ase.Atoms("H360", positions=[[1.3881 * i, 0, 0] for i in range(360)], cell=[360 * 1.3881, 20, 20], pbc=True)
    ring.calc = calculator.Calculator(network().float())
    forces = ring.get_forces()
    each = with_calculator(ring[:6], network().float()).get_forces()
    assert np.abs(forces).max() < 1e-4 * np.abs(each).max()


@pytest.mark.parametrize(
    "given", [lambda net, change: (net, change), lambda net, change: (Preprocessed(net, change), None)]
)
def test_transforms_see_the_places_of_atoms(given):
    def height(data):
        data = copy.copy(data)
        data.x = data.pos[:, 2:]
        return data

    net = randomize(FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1, pool="sum")).eval()
    model, transform = given(net, height)
    atoms = with_calculator(water(), model, transform=transform)
    atoms.positions += 3
    pos = torch.tensor(atoms.positions)
    wanted = float(net(Data(pos=pos, x=pos[:, 2:])).detach())
    assert atoms.get_potential_energy() == pytest.approx(wanted, rel=1e-6)
    atoms.positions += 1
    assert atoms.get_potential_energy() != pytest.approx(wanted, rel=1e-4)


def test_forces_in_inference_mode():
    wanted = with_calculator(water(), net := network()).get_forces()
    with torch.inference_mode():
        found = with_calculator(water(), net).get_forces()
        made = with_calculator(water(), network()).get_forces()
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(made, wanted)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"model: its energies jump.*smooth=True"):
        calculator.Calculator(network(Radius(3.0)))  # as if it had been trained with a sharp radius
    sharp = calculator.Calculator(given := network(Radius(3.0)), jumps="allow")
    assert sharp.model.model.neighborhood == Radius(3.0, smooth=False)
    assert given.neighborhood == Radius(3.0)
    assert calculator.Calculator(EnergyForces(network(Radius(3.0)))).model.model.neighborhood == Radius(
        3.0, smooth=True
    )
    with pytest.raises(ValueError, match=r"scale_of=\{'energy': 'force'\}"):
        calculator.Calculator(Rescaled(EnergyForces(network()), {"energy": 1.0, "force": 2.0}))
    stressed = EnergyForces(network(), stress=True)
    with pytest.raises(ValueError, match=r"scale_of=\{'stress': 'force'\}"):
        calculator.Calculator(Rescaled(stressed, {"energy": 1.0, "force": 1.0, "stress": 2.0}))
    with pytest.raises(ValueError, match="expected one with energies as outputs, got outputs"):
        calculator.Calculator(Rescaled(EnergyForces(network()), {"force": 2.0}))
    with pytest.raises(ValueError, match="model: expected one energy per cloud, got scales and shifts of 2 outputs"):
        calculator.Calculator(Rescaled(network(), {"y": torch.ones(2)}))
    pair = Ensemble([network(), network()])
    with pytest.raises(ValueError, match="model: expected an ensemble of networks, got one of ensembles"):
        calculator.Calculator(Ensemble([Rescaled(pair, {"y": 2.0}), Rescaled(network(), {"y": 2.0})]))
    with pytest.raises(ValueError, match="energy_unit: expected one of"):
        calculator.Calculator(network(), energy_unit="Ry")


def test_several_numbers_are_no_energy():
    class Two(nn.Module):
        def forward(self, data):
            return data.pos.square().sum().expand(1, 2)

    with pytest.raises(ValueError, match=r"model: expected one energy per cloud.*got \(1, 2\)"):
        with_calculator(argon(), Two()).get_potential_energy()


def test_calculations_without_atoms_take_the_last_ones():
    atoms = with_calculator(argon(), LennardJones())
    with pytest.raises(ase.calculators.calculator.CalculatorSetupError, match="atoms: expected the atoms to compute"):
        atoms.calc.calculate()
    wanted = atoms.get_potential_energy()
    atoms.calc.results = {}
    atoms.calc.calculate()
    assert atoms.calc.results["energy"] == wanted


def test_calculators_that_read_numbers_of_whole_structures_are_certified():
    cloud = Data(pos=torch.randn(3, 3), z=torch.ones(3).long(), charge=torch.tensor([1]))
    network = calculator.Calculator(ions("charge"), jumps="allow")
    assert certify(network, cloud, tetrahedral(), continuity=False, rotations=0).verdict == "kept"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cell", [False, True], ids=["molecules", "crystals"])
def test_batches_of_torch_sim_are_those_of_the_calculator(cell, dtype):
    """Systems of several sizes in one batch, in the units of the model, with a shift and references of each atom."""
    ts, torchsim = pytest.importorskip("torch_sim", reason=NO_TORCH_SIM), pytest.importorskip("lieattn.torchsim")
    references = {"y": torch.tensor([[1, -13.7], [8, -41.3]])}
    made = Rescaled(network(Radius(6.0, smooth=True)).to(dtype), {"y": 0.5}, {"y": -2.0}, ["y"], references=references)
    chosen = calculator.Calculator(made, energy_unit="kcal/mol", length_unit="Bohr")
    systems = [water(cell), build.molecule("H2", cell=np.eye(3) * 3.0, pbc=cell), water(cell) * (1 + cell, 1, 1)]
    for seed, atoms in enumerate(systems):
        atoms.rattle(0.05, seed=seed)
    model = torchsim.Model(chosen, stress=cell)
    found = model(ts.initialize_state(systems, model.device, model.dtype))
    assert {values.dtype for values in found.values()} == {model.dtype} == {dtype}
    assert found["forces"].abs().max() > 1e-3
    assert ("stress" in found) == cell
    limits = {"rtol": 1e-10, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    for k, (atoms, forces) in enumerate(zip(systems, found["forces"].split(list(map(len, systems))), strict=True)):
        atoms.calc = chosen
        np.testing.assert_allclose(found["energy"][k], atoms.get_potential_energy(), **limits)
        np.testing.assert_allclose(forces, atoms.get_forces(), **limits)
        if cell:
            np.testing.assert_allclose(found["stress"][k], atoms.get_stress(voigt=False), **limits)


def test_torch_sim_accepts_its_models():
    """Its own check of models passes, and numbers of whole systems are attributes of its states."""
    ts, torchsim = pytest.importorskip("torch_sim", reason=NO_TORCH_SIM), pytest.importorskip("lieattn.torchsim")
    options = {"channels": 4, "layers": 1, "heads": 1, "readout": Readout(pool="sum")}
    options |= {"space": Euclidean(Translations(3)), "neighborhood": Radius(3.0, smooth=True)}
    made = randomize(LieTransformer(Species((14, 26)), 1, **options)).double()
    model = torchsim.Model(calculator.Calculator(made), stress=True, memory_scales_with="n_atoms")
    ts.models.interface.validate_model_outputs(model, model.device, model.dtype)
    assert model.memory_scales_with == "n_atoms"
    charged = randomize(LieTransformer(CloudInputs(("charge",), Species((14,))), 1, **options)).double()
    model = torchsim.Model(calculator.Calculator(charged))
    state = ts.initialize_state([build.bulk("Si"), build.bulk("Si")], model.device, model.dtype)
    with pytest.raises(ValueError, match=r"state\.charge: expected numbers \[2\], an input of the model, got None"):
        model(state)
    state.charge = torch.tensor([0.0, 1.0])
    energies = model(state)["energy"]
    assert energies[0] != energies[1]
