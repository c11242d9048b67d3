"""Molecules of lieattn_datasets, with small files that the tests write in the original formats."""

import os
import pickle
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data

import lieattn_datasets as ld
from lieattn_datasets import _qm9, _smiles, _xtb
from lieattn_datasets._targets import TARGETS, Units
from tests.cases import refuses

RANDOM = np.random.default_rng(3)
HARTREE = 27.211386245988
ATOM_HARTREE = {1: -0.500273, 6: -37.846772, 7: -54.583861, 8: -75.064579}
SIZES = np.array([3, 5, 4, 3, 6, 3, 4, 5])


@pytest.fixture(autouse=True)
def own_random_numbers(monkeypatch):
    """Each test draws the same numbers, whichever tests ran before it."""
    monkeypatch.setattr(sys.modules[__name__], "RANDOM", np.random.default_rng(3))


class Hostile:
    """Creates the file MARK when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch MARK",)


def geometry(sizes=SIZES, species=(1, 6, 7, 8)):
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    z = RANDOM.choice(species, offsets[-1]).astype(np.uint8)
    return z, RANDOM.normal(size=(offsets[-1], 3)).astype(np.float32), offsets


def write_subset(root, **changes):
    z, pos, offsets = geometry()
    z[15:19] = 1, 6, 7, 8  # the training molecules have all elements
    atoms = len(SIZES)
    table = RANDOM.normal(size=(atoms, len(TARGETS)))
    content = {
        "z": z,
        "pos": pos,
        "offsets": offsets,
        "gdb_index": np.arange(7, 7 + atoms, dtype=np.int32),
        "targets": table,
        "target_names": np.array(TARGETS, dtype="S9"),
        "split_train": np.array([0, 2, 4, 6]),
        "split_valid": np.array([1, 3]),
        "split_test": np.array([7, 5]),
    }
    content.update(changes)
    np.savez(root / "qm9_subset.npz", **content)
    return content


def write_gfn2(root, content, **changes):
    count, atoms = len(content["gdb_index"]), len(content["z"])
    quadrupole = RANDOM.normal(size=(count, 6)).astype(np.float32)
    quadrupole[:, 2] = -quadrupole[:, 0] - quadrupole[:, 1]  # as stored: xx xy yy xz yz zz, made traceless below
    quadrupole[:, 5] = -quadrupole[:, 0] - quadrupole[:, 2]
    polarizability = RANDOM.normal(size=(count, 3, 3)).astype(np.float32)
    labels = {
        "gdb_index": content["gdb_index"],
        "energy": RANDOM.normal(size=count) - 20,
        "homo": RANDOM.normal(size=count),
        "gap": RANDOM.normal(size=count),
        "dipole": RANDOM.normal(size=(count, 3)).astype(np.float32),
        "quadrupole": quadrupole,
        "polarizability": polarizability + polarizability.transpose(0, 2, 1),
        "polarizability_ok": np.arange(count) != 2,
        "charges": RANDOM.normal(size=atoms).astype(np.float32),
        "forces": RANDOM.normal(size=(atoms, 3)).astype(np.float32),
    }
    labels.update(changes)
    np.savez(root / "qm9_subset_gfn2.npz", **labels)
    return labels


class TestMolecules:
    def build(self, **options):
        z, pos, offsets = geometry()
        y = RANDOM.normal(size=(len(SIZES), 2))
        return ld.Molecules(z, pos, offsets, y, ["a", "b"], ["eV", "D"], **options), (z, pos, offsets, y)

    def test_items(self):
        force = RANDOM.normal(size=(SIZES.sum(), 3))
        molecules, (z, pos, offsets, y) = self.build(of_atom={"force": force})
        for index, data in enumerate(molecules):
            own = slice(offsets[index], offsets[index + 1])
            assert data.z.tolist() == z[own].tolist()
            assert data.z.dtype == torch.int64
            torch.testing.assert_close(data.pos, torch.from_numpy(pos[own]))
            torch.testing.assert_close(data.force, torch.from_numpy(force[own]).float())
            torch.testing.assert_close(data.y, torch.from_numpy(y[[index]]).float())
        assert repr(molecules) == "Molecules(8 molecules, a, b)"

    def test_lists_and_tensors(self):
        """Lists are converted when the data set is created; booleans and integers keep their type."""
        given = {"of_molecule": {"energy": [1.85], "known": [True]}, "of_atom": {"charge": torch.tensor([1, -1])}}
        data = ld.Molecules([1, 1], torch.zeros(2, 3), [0, 2], [[0.5]], ["e"], ["eV"], **given)[0]
        assert data.energy.tolist() == pytest.approx([1.85])
        assert data.known.tolist() == [True]
        assert data.charge.tolist() == [1, -1]
        assert data.charge.dtype == torch.int64

    @pytest.mark.parametrize("count", [0, 1])
    def test_no_atoms(self, count):
        empty = ld.Molecules(np.arange(0), np.ones((0, 3)), [0] * (count + 1), np.ones((count, 1)), ["e"], ["eV"])
        assert [(data.pos.shape, data.y.tolist()) for data in empty] == [((0, 3), [[1.0]])] * count

    def test_statistics_are_those_of_the_view(self):
        molecules, (*_, y) = self.build()
        view = molecules.subset([1, 4, 6])
        mean, std = view.statistics()
        np.testing.assert_allclose(mean, y[[1, 4, 6]].mean(axis=0))
        np.testing.assert_allclose(std, y[[1, 4, 6]].std(axis=0))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"z": [0, 1]}, "z: expected nuclear charges in 1 .. 118, got 0 .. 1"),
            ({"z": [1.0, 1.0]}, "z: expected integers"),
            ({"pos": [[0, 0, 0]]}, r"pos: expected \[2, 3\] for the 2 atoms of z, got \[1, 3\]"),
            ({"pos": [[0, 0, 0], [0, 0, np.nan]]}, "pos: expected finite"),
            ({"offsets": [0, 3]}, "rise from 0 to the number of atoms, 2"),
            ({"offsets": [0, 2, 1, 2]}, "rise from 0"),
            ({"offsets": [1, 2]}, "rise from 0"),
            ({"y": [[1.0, 2.0]]}, r"y: expected \[1, 1\]"),
            ({"y": [[np.inf]]}, "y: expected finite"),
            ({"y": [[np.nan]]}, "y: expected finite .* belong to of_molecule, with masks"),
            ({"of_atom": {"force": np.zeros((3, 3))}}, r"of_atom\['force'\]: expected 2 rows"),
            ({"of_molecule": {"dipole": np.full((1, 3), np.nan)}}, r"of_molecule\['dipole'\]: expected finite"),
            ({"of_molecule": {"dipole": [np.nan], "dipole_mask": [True]}}, "known rows of of_molecule.* finite"),
            (
                {"of_molecule": {"dipole": [np.nan], "dipole_mask": [0]}},  # masks are boolean
                r"^of_molecule\['dipole'\]: expected finite",
            ),
            ({"of_molecule": {"dipole": [1.85, 0.2]}}, r"of_molecule\['dipole'\]: expected 1 rows, got \[2\]"),
            ({"of_molecule": {"dipole": 1.85}}, r"of_molecule\['dipole'\]: expected 1 rows, got \[\]"),
            ({"of_atom": {"force": [[0.0, 1.0], [0.0]]}}, r"of_atom\['force'\]: expected an array of real numbers"),
            ({"of_atom": {"name": ["H", "H"]}}, r"of_atom\['name'\]: expected an array of real numbers"),
            ({"of_atom": {"charge": torch.ones(2, requires_grad=True)}}, r"of_atom\['charge'\]: expected an array"),
            ({"of_molecule": {"pos": [1.0]}}, r"of_molecule: expected other names than z, pos, y, got 'pos'"),
            ({"of_atom": {"y": [1.0, 2.0]}}, r"of_atom: expected other names than z, pos, y, got 'y'"),
            (
                {"of_molecule": {"charge": [0.0]}, "of_atom": {"charge": [0.0, 0.0]}},
                "of_atom: expected other .*'charge'",
            ),
        ],
    )
    def test_bad_input(self, change, message):
        good = {"z": [1, 1], "pos": np.zeros((2, 3)), "offsets": [0, 2], "y": [[0.5]]}
        good |= {"target_names": ["e"], "target_units": ["eV"]}
        ld.Molecules(**good)
        with pytest.raises(ValueError, match=message):
            ld.Molecules(**{**good, **change})

    def test_empty_statistics(self):
        with pytest.raises(ValueError, match="at least one molecule"):
            self.build()[0].subset([]).statistics()


class TestFeatures:
    def test_batches_and_tables(self):
        batch = Batch.from_data_list([Data(z=torch.tensor([16, 1])), Data(z=torch.tensor([1]))])
        x = ld.MoleculeFeatures((1, 16), powers=2)(batch).x
        torch.testing.assert_close(x, torch.tensor([[0, 0, 1, 1], [1, 1 / 16, 0, 0], [1, 1 / 16, 0, 0]]))
        other = ld.MoleculeFeatures((16, 1), powers=2)(batch).x  # the largest charge need not be the last
        torch.testing.assert_close(other, x[:, [2, 3, 0, 1]])
        assert "x" not in batch
        usual = ld.MoleculeFeatures()(Data(z=torch.tensor([6]))).x[0]  # of H, C, N, O, F
        torch.testing.assert_close(usual, torch.tensor([0, 0, 0, 1, 6 / 9, (6 / 9) ** 2, *9 * [0.0]]))

    test_bad_calls = staticmethod(
        refuses(
            *((lambda s=s: ld.MoleculeFeatures(s), "species: expected diff") for s in ((), (1, 1), (0, 6), (1, 119))),
            (lambda: ld.MoleculeFeatures(powers=0), "powers: expected an integer of at least 1"),
            (lambda: ld.MoleculeFeatures()(Data(z=torch.tensor([6, 16]))), r"only the species .*\[16\]"),
            (lambda: ld.MoleculeFeatures()(Data(pos=torch.zeros(1, 3))), r"data\.z: expected"),
            (lambda: ld.MoleculeFeatures()(Data(z=torch.ones(2, 1).long())), r"data\.z: expected .*, got \[2, 1\]"),
        )
    )


class TestUnits:
    @pytest.mark.parametrize(
        ("units", "unit", "factor"),
        [
            (Units("eV"), "Ha", 27.211386),
            (Units("meV"), "kcal/mol", 43.36410),
            (Units("Ha"), "kcal/mol", 1 / 627.5095),
            (Units(dipole="e bohr"), "D", 1 / 2.541746),
            (Units(dipole="e angstrom"), "D", 0.2081943),
            (Units(), "GHz", 1.0),
        ],
    )
    def test_known_values(self, units, unit, factor):
        assert units.convert(unit)[0] == pytest.approx(factor, rel=1e-6)

    def test_powers_and_unknown_units(self):
        assert Units(length="angstrom").convert("bohr", 3) == (pytest.approx(0.14818471, rel=1e-6), "angstrom^3")
        with pytest.raises(
            ValueError, match=r"energy_unit: expected one of \('eV', 'meV', 'Ha', 'kcal/mol'\), got 'J'"
        ):
            Units("J")


class TestQM9Subset:
    def test_splits_and_items(self, tmp_path):
        content = write_subset(tmp_path)
        for split in ("train", "valid", "test"):
            molecules = ld.QM9Subset(tmp_path, split, verify=False)
            chosen = content[f"split_{split}"]
            assert [data.gdb_number.item() - 7 for data in molecules] == chosen.tolist()
            for index, data in zip(chosen, molecules, strict=True):
                assert (
                    data.z.tolist() == content["z"][content["offsets"][index] : content["offsets"][index + 1]].tolist()
                )
        assert len(pickle.dumps(molecules)) > 0
        # torch_geometric shifts attributes with 'index' in their name; the official number must not be shifted.
        batch = Batch.from_data_list(list(ld.QM9Subset(tmp_path, "all", verify=False)))
        assert batch.gdb_number.tolist() == list(range(7, 15))
        assert batch.y.shape == (8, 19)

    def test_units_and_references(self, tmp_path):
        content = write_subset(tmp_path)
        table = dict(zip(TARGETS, content["targets"].T, strict=True))
        names = ("homo", "mu", "alpha", "r2", "u0", "u0_atom", "cv", "A")
        options = {"targets": names, "verify": False, "energy_unit": "meV", "length_unit": "angstrom"}
        plain = ld.QM9Subset(tmp_path, "all", references=False, dipole_unit="e bohr", **options)
        bohr = 0.529177210903
        expected = [
            table["homo"] * HARTREE * 1e3,
            table["mu"] / 2.5417464739,
            table["alpha"] * bohr**3,
            table["r2"] * bohr**2,
            table["u0"] * HARTREE * 1e3,
            table["u0_atom"] * 4184 / 96485.33212331 * 1e3,
            table["cv"],
            table["A"],
        ]
        np.testing.assert_allclose(plain.targets, np.stack(expected, axis=1))
        units = ("meV", "e bohr", "angstrom^3", "angstrom^2", "meV", "meV", "cal/(mol K)", "GHz")
        assert plain.target_units == units
        less = ld.QM9Subset(tmp_path, "all", **options)
        np.testing.assert_allclose(less.targets[:, 4], expected[5])
        np.testing.assert_allclose(less.targets[:, 6], table["cv"] - 2.981 * SIZES)
        np.testing.assert_allclose(less.targets[:, [0, 7]], plain.targets[:, [0, 7]])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"targets": "energy"}, "targets: expected 'all' or different ones of 'mu', .*, got 'energy'"),
            ({"targets": ("mu", "mu")}, "targets: expected"),
            ({"length_unit": "nm"}, r"length_unit: expected one of \('bohr', 'angstrom'\)"),
        ],
    )
    def test_bad_arguments(self, tmp_path, options, message):
        with pytest.raises(ValueError, match=message):
            ld.QM9Subset(tmp_path, verify=False, **options)


class TestQM9GFN2:
    def test_labels(self, tmp_path):
        content = write_subset(tmp_path)
        labels = write_gfn2(tmp_path, content)
        molecules = ld.QM9GFN2(tmp_path, "all", references=False, verify=False)
        assert molecules.target_units == ("eV",) * 3
        expected = np.stack([labels[name] for name in ("energy", "homo", "gap")], axis=1) * HARTREE
        np.testing.assert_allclose(molecules.targets, expected)
        data = molecules[4]
        own = slice(content["offsets"][4], content["offsets"][5])
        np.testing.assert_allclose(data.dipole[0], labels["dipole"][4], rtol=1e-6)
        np.testing.assert_allclose(data.polarizability[0], labels["polarizability"][4], rtol=1e-6)
        np.testing.assert_allclose(data.force, labels["forces"][own], rtol=1e-6)
        np.testing.assert_allclose(data.charge, labels["charges"][own], rtol=1e-6)
        assert [bool(data.polarizability_ok) for data in molecules] == labels["polarizability_ok"].tolist()
        xx, xy, yy, xz, yz, zz = labels["quadrupole"][4]
        np.testing.assert_allclose(data.quadrupole[0], [[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]], rtol=1e-6)
        np.testing.assert_allclose(data.quadrupole.diagonal(dim1=1, dim2=2).sum(), 0, atol=1e-6)

    def test_units_of_vectors_and_tensors(self, tmp_path):
        write_gfn2(tmp_path, write_subset(tmp_path))
        one = ld.QM9GFN2(tmp_path, verify=False)[1]
        options = {"energy_unit": "meV", "dipole_unit": "e bohr", "length_unit": "angstrom", "verify": False}
        other = ld.QM9GFN2(tmp_path, **options)[1]
        torch.testing.assert_close(other.force, one.force * 1e3)
        torch.testing.assert_close(other.dipole, one.dipole / 2.5417464739)
        torch.testing.assert_close(other.polarizability, one.polarizability * 0.529177210903**3)
        torch.testing.assert_close(other.quadrupole, one.quadrupole * 0.529177210903**2)

    def test_references_come_from_the_training_molecules(self, tmp_path):
        """Energies that are sums over atoms become 0, also for molecules outside of the training set."""
        content = write_subset(tmp_path)
        running = np.concatenate([[0], np.cumsum([ATOM_HARTREE[int(charge)] for charge in content["z"]])])
        labels = write_gfn2(tmp_path, content, energy=np.diff(running[content["offsets"]]))
        molecules = ld.QM9GFN2(tmp_path, "test", targets="energy", verify=False)
        np.testing.assert_allclose(molecules.targets, 0, atol=1e-9)
        for charge, energy in molecules.atom_energies.items():
            assert energy == pytest.approx(ATOM_HARTREE[charge] * HARTREE)
        labels["energy"][content["split_test"]] += 1.0
        np.savez(tmp_path / "qm9_subset_gfn2.npz", **labels)
        moved = ld.QM9GFN2(tmp_path, "test", targets="energy", verify=False)
        np.testing.assert_allclose(moved.targets, HARTREE, atol=1e-9)


HEADER = "mol_id,A,B,C,mu,alpha,homo,lumo,gap,r2,zpve,u0,u298,h298,g298,cv,u0_atom,u298_atom,h298_atom,g298_atom"


def write_raw_qm9(root, smiles=("C", "N", "O", "CO", "CF")):
    """Write the original files with rdkit, without the third molecule, and the table of targets."""
    chem = pytest.importorskip("rdkit.Chem", reason="the molecules of this test are made by rdkit")
    from rdkit.Chem import AllChem

    raw = root / "raw"
    raw.mkdir(parents=True)
    writer = chem.SDWriter(str(raw / "gdb9.sdf"))
    for number, text in enumerate(smiles):
        molecule = chem.AddHs(chem.MolFromSmiles(text))
        AllChem.EmbedMolecule(molecule, randomSeed=1)
        molecule.SetProp("_Name", f"gdb_{number + 1}")
        writer.write(molecule)
    writer.close()
    table = np.random.default_rng(1).normal(size=(len(smiles), 19)) * 100
    rows = [",".join([f"gdb_{index + 1}", *map(repr, row.tolist())]) for index, row in enumerate(table)]
    (raw / "gdb9.sdf.csv").write_text("\n".join([HEADER, *rows, ""]))
    (raw / "uncharacterized.txt").write_text("\n" * 9 + "3 left out\nend\n")
    return table


class TestQM9:
    def test_split_sizes(self):
        parts = _qm9.cormorant_split(130_831)
        assert [len(parts[name]) for name in ("train", "valid", "test")] == [100_000, 17_748, 13_083]
        together = np.concatenate([parts[name] for name in ("train", "valid", "test")])
        np.testing.assert_array_equal(np.sort(together), parts["all"])
        np.testing.assert_array_equal(together, np.random.RandomState(0).permutation(130_831))
        assert len(_qm9.cormorant_split(29)["test"]) == 2  # a tenth, rounded down

    def test_same_numbers_as_torch_geometric(self, tmp_path):
        from torch_geometric.datasets import QM9

        table = write_raw_qm9(tmp_path / "ours")
        (tmp_path / "theirs").mkdir()
        shutil.copytree(tmp_path / "ours" / "raw", tmp_path / "theirs" / "raw")
        published = QM9(str(tmp_path / "theirs"))
        ours = ld.QM9(tmp_path / "ours", "all", verify=False, references=False)
        for source, data in zip(published, ours, strict=True):
            assert data.z.tolist() == source.z.tolist()
            assert data.gdb_number.item() == source.idx.item() + 1 == int(source.name[4:])
            assert torch.equal(data.pos, source.pos)
            assert torch.equal(data.y, source.y)
        assert [data.gdb_number.item() for data in ours] == [1, 2, 4, 5]
        train = ld.QM9(tmp_path / "ours", "train", verify=False)
        assert [data.gdb_number.item() for data in train] == [4, 5, 2]  # in the order of the permutation
        homo = ld.QM9(tmp_path / "ours", "all", verify=False, targets="homo", energy_unit="Ha")
        np.testing.assert_allclose(homo.targets[:, 0], table[[0, 1, 3, 4], 5], rtol=1e-6)
        sdf = tmp_path / "ours" / "raw" / "gdb9.sdf"
        sdf.write_bytes(sdf.read_bytes().replace(b" C   0", b" N   0"))  # changed files are read again
        changed = ld.QM9(tmp_path / "ours", "all", verify=False)
        assert sum(int((data.z == 7).sum()) for data in changed) > sum(int((data.z == 7).sum()) for data in ours)

    def test_nothing_of_torch_geometric_is_unpickled(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write_raw_qm9(tmp_path)
        (tmp_path / "processed").mkdir()
        for name in ("data_v3.pt", "pre_transform.pt", "pre_filter.pt"):
            torch.save(Hostile(), tmp_path / "processed" / name)
        assert len(ld.QM9(tmp_path, "all", verify=False)) == 4
        (tmp_path / "raw" / "gdb9.sdf").unlink()
        torch.save([Hostile()], tmp_path / "raw" / "qm9_v3.pt")
        with pytest.raises(FileNotFoundError, match=r"qm9_v3\.pt and .*/data_v3\.pt of torch_geometric are not read"):
            ld.QM9(tmp_path, verify=False)
        assert not (tmp_path / "MARK").exists()

    def test_missing_and_damaged_files(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"gdb9.sdf in .*raw.; there is no such folder"):
            ld.QM9(tmp_path)
        (tmp_path / "raw").mkdir()
        (tmp_path / "raw" / "gdb9.sdf").write_text("")
        with pytest.raises(FileNotFoundError, match=r"needs the file gdb9.sdf.csv"):
            ld.QM9(tmp_path)

    @pytest.mark.parametrize(
        ("name", "damage", "message"),
        [
            ("gdb9.sdf", lambda text: text[:300], r"gdb9\.sdf is broken at molecule 1"),
            ("gdb9.sdf", lambda text: text[: text.index("gdb_5")], "is broken at molecule 5: it is named ''"),
            ("gdb9.sdf", lambda text: text.replace("V2000", "V3000"), "does not end with V2000"),
            ("gdb9.sdf", lambda text: text.replace(" C ", " X ", 1), "is not an atom of H, C, N, O, F"),
            ("gdb9.sdf", lambda text: text.replace("  5  4 ", " -5  4 ", 1), "instead of a count"),
            ("gdb9.sdf", lambda text: text.replace("  5  4 ", "  4  4 ", 1), "is broken at molecule 1"),
            (
                "gdb9.sdf",
                lambda text: re.sub(r" \S+ H ", lambda found: "nan H ".rjust(len(found[0])), text, count=1),
                "pos: expected finite",
            ),
            ("gdb9.sdf.csv", lambda text: text[:-9], "is truncated: its last line has no line break"),
            ("gdb9.sdf.csv", lambda text: text[: text.index("gdb_4")], "has more molecules than the 3"),
            ("gdb9.sdf.csv", lambda text: text.replace("gdb_2", "gdb_9"), "named 'gdb_2', but the table has 'gdb_9'"),
            ("gdb9.sdf.csv", lambda text: text.replace("mu,alpha", "alpha,mu"), "does not begin with the line mol_id"),
            ("gdb9.sdf.csv", lambda text: text.replace("gdb_2,", "gdb_2,1,"), "has 20 targets in line 3"),
            ("gdb9.sdf.csv", lambda text: text.replace("gdb_2,", "gdb_2,x"), "is not a table of numbers in line 3"),
            ("gdb9.sdf.csv", lambda text: "", "does not begin with the line"),
            ("gdb9.sdf.csv", lambda text: re.sub("gdb_2,[^,]*", "gdb_2,nan", text), "not finite"),
            ("uncharacterized.txt", lambda text: text.replace("3 left", "three"), "not have a number in each line"),
        ],
    )
    def test_damaged_raw_files_are_named(self, tmp_path, name, damage, message):
        write_raw_qm9(tmp_path)
        path = tmp_path / "raw" / name
        path.write_text(damage(path.read_text()))
        with pytest.raises(ValueError, match=message) as caught:
            ld.QM9(tmp_path, verify=False)
        assert name in str(caught.value)


def trajectory(frames=40, atoms=4):
    energy = -97_000.0 + RANDOM.normal(size=frames)
    pos = RANDOM.normal(size=(frames, atoms, 3)) + 70.0
    return np.array([6, 1, 1, 8], dtype=np.uint8), pos, energy, RANDOM.normal(size=(frames, atoms, 3))


def write_rmd17(root, frames, train, test, molecule="ethanol"):
    folder, splits = root / "rmd17" / "npz_data", root / "rmd17" / "splits"
    for place in (folder, splits):
        place.mkdir(parents=True, exist_ok=True)
    z, pos, energy, force = frames
    content = {"nuclear_charges": z, "coords": pos, "energies": energy, "forces": force}
    np.savez(folder / f"rmd17_{molecule}.npz", **content)
    for half, indices in (("train", train), ("test", test)):
        (splits / f"index_{half}_02.csv").write_text("\n".join(map(str, indices)) + "\n")


class TestRMD17:
    def test_official_files(self, tmp_path):
        z, pos, energy, force = frames = trajectory()
        train, test = np.array([3, 30, 17, 5, 22, 11]), np.array([0, 1, 2])
        write_rmd17(tmp_path, frames, train, test)
        options = {"number": 2, "validation": 2, "verify": False}
        parts = {split: ld.RMD17(tmp_path, "ethanol", split, **options) for split in ("train", "valid", "test")}
        assert [len(part) for part in parts.values()] == [4, 2, 3]
        shift = parts["train"].energy_shift
        assert all(part.energy_shift == shift for part in parts.values())
        assert parts["train"].targets.mean().abs() < 1e-9
        seen = [int(np.abs(energy - shift - float(item)).argmin()) for part in parts.values() for item in part.targets]
        assert sorted(seen[:6]) == sorted(train)
        assert seen[6:] == test.tolist()
        data = parts["test"][1]
        assert data.energy.tolist() == data.y[0].tolist()
        np.testing.assert_allclose(data.y, [[energy[1] - shift]], rtol=1e-6)
        np.testing.assert_allclose(data.force, force[1], rtol=1e-6)
        np.testing.assert_allclose(data.pos, pos[1] - pos[1].mean(axis=0), atol=1e-5)
        assert data.z.tolist() == z.tolist()
        raw = ld.RMD17(tmp_path, "ethanol", "test", center=False, **options)[1]
        np.testing.assert_allclose(raw.pos, pos[1], rtol=1e-6)

    def test_small_energy_differences_survive_float32(self, tmp_path):
        z, pos, energy, force = trajectory()
        energy[:] = -406_273.0 + 1e-4 * np.arange(40)
        write_rmd17(tmp_path, (z, pos, energy, force), range(20), range(20, 40))
        for references in (True, False):
            part = ld.RMD17(tmp_path, number=2, validation=0, references=references, verify=False)
            steps = torch.cat([data.y for data in part])[:, 0].diff().float()
            torch.testing.assert_close(steps, torch.full((19,), 1e-4), atol=1e-8, rtol=0)
        assert part[0].energy.item() == energy[0]
        assert np.unique(energy.astype(np.float32)).size < 3  # control: plain float32 would lose them

    def test_subset_has_all_molecules_and_units(self, tmp_path):
        z, pos, energy, force = trajectory()
        content = {"uracil_z": z, "uracil_R": pos, "uracil_F": force, "uracil_E": energy}
        np.savez(tmp_path / "rmd17_split01.npz", **content)
        options = {"validation": 5, "verify": False}
        train = ld.RMD17Subset(tmp_path, "uracil", **options)
        assert len(train) == 15
        assert float(train.targets[:, 0].mean()) == pytest.approx(0.0, abs=1e-9)
        test = ld.RMD17Subset(tmp_path, "uracil", "test", **options)
        np.testing.assert_allclose(test.targets[:, 0], energy[20:] - train.energy_shift, atol=1e-9)
        fine = ld.RMD17Subset(tmp_path, "uracil", "test", energy_unit="meV", **options)
        factor = 4184 / 96485.33212331 * 1e3
        torch.testing.assert_close(fine.targets, test.targets * factor, atol=1e-6, rtol=1e-9)
        torch.testing.assert_close(fine[3].force, test[3].force * factor)
        assert fine.target_units == ("meV",)
        forces = torch.cat([data.force for data in train])
        assert test.force_scale == pytest.approx(float(forces.square().mean().sqrt()), rel=1e-5)
        assert fine.force_scale == pytest.approx(test.force_scale * factor)
        np.savez(
            tmp_path / "rmd17_split01.npz", **content | {f"uracil_{key}": content[f"uracil_{key}"][:1] for key in "RFE"}
        )
        with pytest.raises(ValueError, match="holds 1 frames of uracil, expected some for training"):
            ld.RMD17Subset(tmp_path, "uracil", **options)

    def test_bad_arguments_and_files(self, tmp_path):
        frames = trajectory()
        write_rmd17(tmp_path, frames, [0, 1], [2, 3])
        for error, options, message in (
            (ValueError, {"molecule": "methane"}, r"molecule: expected one of \('aspirin'"),
            (ValueError, {"number": 6}, "number: expected 1, 2, 3, 4 or 5, got 6"),
            (ValueError, {"number": 2, "verify": False}, "validation: expected an integer .* less than the 2"),
            (FileNotFoundError, {"validation": 0}, "needs the file index_train_01.csv"),
            (FileNotFoundError, {"molecule": "aspirin"}, "needs the file rmd17_aspirin.npz"),
        ):
            with pytest.raises(error, match=message):
                ld.RMD17(tmp_path, **options)
        for train, test, message in (
            ([0, 1], [1, 3], "index_test_02.csv and index_train_02.csv have frames in common"),
            ([0, 40], [2], "different frame numbers in 0 .. 39"),
            ([0, 0], [2], "different frame numbers"),
            (["x"], [2], "not a list of integers"),
        ):
            write_rmd17(tmp_path, frames, train, test)
            with pytest.raises(ValueError, match=message):
                ld.RMD17(tmp_path, number=2, validation=0, verify=False)
        write_rmd17(tmp_path, frames, [0, 1], [2, 3])
        with pytest.raises(ValueError, match=r"index_train_02\.csv holds 2 frames, but the official file holds 1000"):
            ld.RMD17(tmp_path, number=2, validation=0)


SMILES = ("C", "O", "CO", "N", "CC", "C=O", "CN", "C#N", "CF", "NO")


@pytest.fixture(scope="module")
def chemistry():
    pytest.importorskip("rdkit", reason="molecules from SMILES need rdkit")
    pytest.importorskip("tblite", reason="their labels need tblite")


@pytest.mark.usefixtures("chemistry")
class TestGFN2Molecules:
    def test_items_and_splits(self):
        options = {"smiles": SMILES, "conformers": 2, "references": False}
        parts = [ld.GFN2Molecules(split, **options) for split in ("train", "valid", "test")]
        assert [len(part) for part in parts] == [16, 2, 2]
        seen = [{data.molecule.item() for data in part} for part in parts]
        assert set.union(*seen) == set(range(10))
        assert sum(map(len, seen)) == 10
        for data in parts[0]:
            torch.testing.assert_close(data.force.sum(0), torch.zeros(3), atol=1e-4, rtol=0)
            assert data.charge.sum().item() == pytest.approx(0, abs=1e-5)
            assert data.force.abs().max() > 0.1
            assert data.energy.item() == data.y.item()
            assert len(data.z) == len(data.pos)
        pairs = [data for data in parts[0] if data.molecule.item() == parts[0][0].molecule.item()]
        assert not torch.allclose(pairs[0].pos, pairs[1].pos)
        again = ld.GFN2Molecules("train", **options)
        assert torch.equal(again[3].pos, parts[0][3].pos)

    def test_force_is_the_slope_of_the_energy(self):
        z, pos = ld.embed_molecule("CO", seed=2)
        pos += 0.05 * RANDOM.normal(size=pos.shape)
        force = ld.label_gfn2(z, pos).force
        step = 1e-3 * RANDOM.normal(size=pos.shape)
        change = ld.label_gfn2(z, pos + step).energy - ld.label_gfn2(z, pos - step).energy
        assert change == pytest.approx(-2 * (force * step).sum(), rel=1e-3)

    def test_labels_turn_with_the_molecule(self):
        z, pos = ld.embed_molecule("CF")
        matrix = np.linalg.qr(RANDOM.normal(size=(3, 3)))[0]
        one, two = ld.label_gfn2(z, pos), ld.label_gfn2(z, pos @ matrix.T)
        assert two.energy == pytest.approx(one.energy, abs=1e-6)
        np.testing.assert_allclose(two.dipole, one.dipole @ matrix.T, atol=1e-4)
        np.testing.assert_allclose(two.force, one.force @ matrix.T, atol=1e-4)
        assert np.linalg.norm(one.dipole) == pytest.approx(1.86, abs=0.4)  # measured: 1.858 D

    def test_units_and_references(self):
        options = {"split": "all", "smiles": SMILES, "conformers": 2, "noise": 0.02}
        one, less = ld.GFN2Molecules(**options), ld.GFN2Molecules(references=True, **options)
        taken = [sum(less.atom_energies[charge] for charge in data.z.tolist()) for data in less]
        np.testing.assert_allclose(less.targets[:, 0] + torch.tensor(taken), one.targets[:, 0])
        assert less.targets.abs().max() < 5
        fine = ld.GFN2Molecules(energy_unit="meV", dipole_unit="e bohr", references=True, **options)
        torch.testing.assert_close(fine.targets, less.targets * 1e3)
        torch.testing.assert_close(fine[0].force, less[0].force * 1e3)
        torch.testing.assert_close(fine[2].dipole, less[2].dipole / 2.5417464739)
        few = ["C", "N", "O", "CO", "CC"]
        few[_xtb._split(np.arange(5), 5)["test"][0]] = "CF"
        with pytest.raises(ValueError, match=r"references: expected .* got none with the element 9"):
            ld.GFN2Molecules(smiles=few, conformers=1, references=True)

    @pytest.mark.parametrize(
        ("smiles", "message"),
        [
            ("C1CC", "SMILES 'C1CC' is not a molecule"),
            ("", "SMILES '' is not a molecule"),
            ("[CH3]", r"SMILES '\[CH3\]' has a charge or unpaired electrons"),
            ("[NH4+]", "has a charge or unpaired electrons"),
            ("*C", r"SMILES '\*C' is not a molecule"),
            ("C[Hg]C", r"SMILES 'C\[Hg\]C' has Hg, a metal of the d or f block, which"),
            ("[LiH]", "MMFF has no parameters for its metal"),
            ("C1#CCCCC1", "could not be embedded"),
            ("CC(=O)[O-].C[NH3+]", "the bond N-H of the atoms 5 and 13 is 1.65 times"),  # a proton changes its fragment
            ("C[C@]12C[C@@]1(C)C2", "the minimum has other stereochemistry; use another seed"),
        ],
    )
    def test_bad_smiles_are_named(self, smiles, message):
        with pytest.raises(ValueError, match=message):
            ld.embed_molecule(smiles)

    @pytest.mark.parametrize(
        ("smiles", "name"),
        zip(
            "[H][H] O F Cl FF N#N [C-]#[O+] O=C=O S=C=S O=C=S O=S=O C#N N#CC#N N#[N+][O-] FB(F)F F[Si](F)(F)F "
            "C[N+](=O)[O-] CS(C)=O C1CS1 C1=CC1 C1[C@H]2C[C@@H]12 c1ccncc1 c1ccsc1 [Na+].[Cl-]".split(),
            "H2 H2O HF HCl F2 N2 CO CO2 CS2 OCS SO2 HCN NCCN N2O BF3 SiF4 "
            "CH3NO2 C2H6SO CH2SCH2 C3H4_C2v bicyclobutane C5H5N C4H4S NaCl".split(),
            strict=True,
        ),
    )
    def test_bonds_are_those_of_the_g2_database(self, smiles, name):
        build, data = pytest.importorskip("ase.build"), pytest.importorskip("ase.data")

        def bonds(z, pos):
            first, second = np.triu_indices(len(z), 1)
            length = np.linalg.norm(pos[first] - pos[second], axis=1)
            return np.sort(length[length < 1.35 * (data.covalent_radii[z[first]] + data.covalent_radii[z[second]])])

        reference = build.molecule(name)
        found, expected = bonds(*ld.embed_molecule(smiles)), bonds(reference.numbers, reference.positions)
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.07 if name in ("F2", "N2O") else 0.05)

    @pytest.mark.parametrize(("smiles", "bonds"), [("CO.O", 7), ("c1ccccc1.O", 14), ("O.O.O", 6), ("[He].[Ne]", 0)])
    def test_fragments_do_not_overlap(self, smiles, bonds):
        """All pairs of atoms but those of a bond are further apart than the longest bond."""
        _, pos = ld.embed_molecule(smiles)
        distances = np.linalg.norm(pos[:, None] - pos, axis=-1)[np.triu_indices(len(pos), 1)]
        assert (distances < 1.5).sum() == bonds
        assert ld.GFN2Molecules("all", smiles=[smiles], conformers=1, noise=0.0)[0].force.abs().max() < 2.7

    def test_inverted_centers_are_mended(self):
        """MMFF inverts a center of these two, of QM9, and GFN2-xTB turns it back."""
        for smiles in ("C[C@@]12C[C@@]3(O)CO[C@@H]1[C@H]32", "C[C@H]1[C@@H](C=O)[C@H]2C[C@]21O"):
            assert len(ld.embed_molecule(smiles)[0]) == 19

    @pytest.mark.parametrize("smiles", ["[He]", "[Xe]"])
    def test_single_atoms(self, smiles):
        z, pos = ld.embed_molecule(smiles)
        assert len(z) == 1
        np.testing.assert_array_equal(ld.label_gfn2(z, pos).force, np.zeros((1, 3)))

    def test_large_forces_and_odd_electrons_are_refused(self):
        with pytest.raises(ValueError, match=r"SMILES 'CC', conformer \d: noise=0.2: expected forces of at most 200 "):
            ld.GFN2Molecules("all", smiles=["CC"], noise=0.2)
        with pytest.raises(ValueError, match="z: expected a closed shell, got 15 electrons"):
            ld.label_gfn2([7, 8], [[0, 0, 0], [0, 0, 1.15]])

    def test_failed_labels_name_the_molecule(self, monkeypatch):
        monkeypatch.setattr(_xtb, "embed_molecule", lambda *_: (np.array([1, 1]), np.zeros((2, 3))))
        with pytest.raises(
            ValueError, match="SMILES 'CCCC', conformer 0: GFN2-xTB failed for these z and pos: Too close"
        ):
            ld.GFN2Molecules(smiles=("CCCC",), conformers=1, noise=0.0)

    def test_bad_arguments(self):
        for error, options, message in (
            (TypeError, {"smiles": "CC"}, "smiles: expected a sequence"),
            (ValueError, {"conformers": 0}, "conformers: expected an integer of at least 1"),
            (ValueError, {"split": "dev"}, "split: expected one of"),
            (ValueError, {"split": "valid", "smiles": ["C", "CC"]}, "smiles: expected at least one .*'valid', got 2"),
        ):
            with pytest.raises(error, match=message):
                ld.GFN2Molecules(**options)


class TestSmilesTable:
    TABLE = "id;Smiles;logS;pKa\n1;CO;-1.5;4\n2;C1CC;2;5\n3;O;0.25;6\n4;CC;;7\n5;[Na+];1;8\n6;N;1e3;9\n"

    def write(self, folder, text=TABLE):
        (folder / "mols.csv").write_text(text, encoding="utf-8-sig")
        return folder / "mols.csv"

    def test_broken_rows_are_reported_and_left_out(self, tmp_path):
        path, options = self.write(tmp_path), {"smiles": "Smiles", "target": "logS"}
        problems = (
            "line 3: SMILES 'C1CC' is not a molecule; "
            "line 5: logS: expected a number of at most 1e+15 in size, got ''; "
            "line 6: SMILES '[Na+]' has a charge or unpaired electrons, which are not supported"
        )
        told = re.escape(f"{path}: 3 of 6 rows cannot be used: {problems}")
        with pytest.raises(ValueError, match=f"^{told}; on_error='skip' leaves them out$"):
            ld.SmilesTable(path, "all", **options)
        with pytest.warns(UserWarning, match=f"^{told}$"):
            table = ld.SmilesTable(path, "all", on_error="skip", unit="mol/l", **options)
        with pytest.warns(UserWarning, match=f"^{told}$"):
            named = ld.SmilesTable(path, "all", on_error="skip", names="id", **options)
        assert table.skipped == tuple(problems.split("; "))
        assert (table.names, table.target_names, table.target_units) == (["CO", "O", "N"], ("logS",), ("mol/l",))
        assert table.targets.tolist() == [[-1.5], [0.25], [1000]]
        z, pos = ld.embed_molecule("O")
        assert torch.equal(table[1].z, torch.from_numpy(z))
        torch.testing.assert_close(table[1].pos, torch.from_numpy(pos).float())
        assert table.subset([2, 0]).names == ["N", "CO"]
        assert named.names == ["1", "3", "6"]

    def test_conformers_are_kept_beside_the_table(self, tmp_path, monkeypatch):
        """A file that runs code when it is unpickled is not read, and one that is damaged is made again."""
        path = self.write(tmp_path, "smiles,a,b\n" + "O,1,2\nN,3,4\n" * 5)
        kept = tmp_path / "mols.csv.seed0.pt"
        monkeypatch.chdir(tmp_path)
        for content in (pickle.dumps(Hostile()), b"PK"):
            kept.write_bytes(content)
            first = ld.SmilesTable(path, target=["b", "a"])
        assert not (tmp_path / "MARK").exists()
        assert sorted(file.name for file in tmp_path.iterdir()) == ["mols.csv", "mols.csv.seed0.pt"]
        monkeypatch.setattr(_smiles, "embed_molecule", lambda *_: pytest.fail("computed again"))
        parts = [ld.SmilesTable(path, split, target=["b", "a"]) for split in ("train", "valid", "test")]
        assert [len(part) for part in parts] == [8, 1, 1]
        assert torch.equal(parts[0][3].pos, first[3].pos)
        assert torch.cat([part.targets for part in parts]).sum(dim=0).tolist() == [30, 20]
        assert ld.SmilesTable(path, "all")[0].y.shape == (1, 0)

    @pytest.mark.parametrize(
        ("text", "options", "message"),
        [
            (TABLE, {}, r"smiles: expected one of the columns id, Smiles, logS, pKa of .*mols\.csv, got another"),
            ("smiles\n", {}, r"mols\.csv: expected at least one row, got none"),
            ("smiles\nC1\n", {"on_error": "skip"}, "1 of 1 rows cannot be used: line 2: SMILES 'C1' is not a molecule"),
            ("smiles\nC\n", {"on_error": "drop"}, r"on_error: expected one of \('raise', 'skip'\), got 'drop'"),
        ],
    )
    def test_bad_tables(self, tmp_path, text, options, message):
        with pytest.raises(ValueError, match=message):
            ld.SmilesTable(self.write(tmp_path, text), "all", **options)

    @pytest.mark.filterwarnings("ignore:.*rows cannot be used")
    def test_no_split_is_empty(self, tmp_path):
        few = self.write(tmp_path, "smiles,y\n" + "O,1\n" * 4)
        with pytest.raises(ValueError, match=r"shares: expected at least one of the 4 examples for split='test'"):
            ld.SmilesTable(few, "test", target="y")
        rows = [f"O,{row}\n" for row in range(10)]
        whole = ld.SmilesTable(self.write(tmp_path, "smiles,y\n" + "".join(rows)), "test", target="y")
        rows[int(whole.targets.item())] = "O,\n"  # the only one of the test set
        path = self.write(tmp_path, "smiles,y\n" + "".join(rows))
        told = r"shares: expected at least one row that can be used for split='test', got \(0.8, 0.1\), which"
        with pytest.raises(ValueError, match=told):
            ld.SmilesTable(path, "test", target="y", on_error="skip")

    def test_rows_keep_their_split_when_others_are_skipped(self, tmp_path):
        path = self.write(tmp_path, "smiles,y\n" + "".join(f"O,{n if n % 3 else ''}\n" for n in range(30)))
        with pytest.warns(UserWarning, match="10 of 30 rows"):
            parts = [ld.SmilesTable(path, split, target="y", on_error="skip") for split in ("train", "valid", "test")]
        whole = self.write(tmp_path, "smiles,y\n" + "".join(f"O,{n}\n" for n in range(30)))
        for split, part in zip(("train", "valid", "test"), parts, strict=True):
            every = ld.SmilesTable(whole, split, target="y").targets
            assert torch.equal(part.targets, every[every[:, 0] % 3 != 0])


@pytest.mark.parametrize(("package", "call"), [("rdkit", "embed_molecule"), ("tblite.interface", "label_gfn2")])
def test_missing_packages_are_named(monkeypatch, package, call):
    monkeypatch.setitem(sys.modules, package, None)
    arguments = ("C",) if call == "embed_molecule" else ([1, 1], [[0, 0, 0], [0, 0, 1.0]])
    with pytest.raises(ImportError, match=r'pip install "lieattn\[chem\]"'):
        getattr(ld, call)(*arguments)


def crystals(count=6, seed=0):
    """Return ASE frames with a calculator that provides energies, forces and stresses."""
    ase, single = pytest.importorskip("ase"), pytest.importorskip("ase.calculators.singlepoint")
    rng, frames = np.random.default_rng(seed), []
    for size in range(2, 2 + count):
        pos = np.indices((3, 3, 3)).reshape(3, 27).T[:size] + 0.1 * rng.normal(size=(size, 3))
        frame = ase.Atoms(["Si", "O"] + ["Si"] * (size - 2), pos, cell=[3, 4, 5], pbc=True)
        known = {
            "energy": rng.normal() - 100 * size,
            "forces": rng.normal(size=(size, 3)),
            "stress": rng.normal(size=6),
            "dipole": rng.normal(size=3),
        }
        frame.calc = single.SinglePointCalculator(frame, **known)
        frame.info["virial"] = -60 * frame.get_stress(voigt=False)  # the volume is 60 angstrom^3
        frames.append(frame)
    return frames


def springs():
    """Return frames of a spring with E = -20 + 10 (d - 1)^2 along z, in a cell of 64 cubic angstrom."""
    ase, frames = pytest.importorskip("ase"), []
    for length in (1.1, 1.2, 1.3):
        frame = ase.Atoms("OH", [[0, 0, 0], [0, 0, length]], cell=[4, 4, 4], pbc=True)
        pull = 20 * (length - 1)
        frame.info |= {"energy": -20 + 10 * (length - 1) ** 2, "energy_unit": "eV"}
        frame.info |= {"stress": 0.1 * np.eye(3), "virial": -6.4 * np.eye(3)}
        frame.arrays["forces"] = np.array([[0, 0, pull], [0, 0, -pull]])
        frames.append(frame)
    return frames


def _written(write, folder, frames):
    write(folder / "frames.xyz", frames, format="extxyz")
    return folder / "frames.xyz"


class TestFrames:
    def test_items_are_the_frames(self):
        frames = crystals()
        molecules = ld.Molecules.from_ase(frames, energy_unit="meV")
        assert (molecules.target_names, molecules.target_units) == (("energy",), ("meV",))
        for frame, data in zip(frames, molecules, strict=True):
            assert data.z.tolist() == frame.numbers.tolist()
            for mine, theirs in {
                "pos": frame.positions,
                "y": [[1000 * frame.get_potential_energy()]],
                "energy": [1000 * frame.get_potential_energy()],
                "force": 1000 * frame.get_forces(),
                "stress": [1000 * frame.get_stress(voigt=False)],
                "virial": [-60_000 * frame.get_stress(voigt=False)],
                "dipole": [frame.get_dipole_moment()],  # in e angstrom, for each unit of energies
                "cell": [frame.cell.array],
                "pbc": [frame.pbc],
            }.items():
                np.testing.assert_allclose(data[mine], theirs, rtol=1e-6, err_msg=mine)
        assert molecules.vectors == ("pos", "force", "dipole", "cell")
        turn = ld.RandomRotateFields()  # which turns them without being asked
        assert {*molecules.vectors} <= {"pos", *turn.vectors}
        assert {*molecules.tensors} == {"stress", "virial"} <= {*turn.tensors}

    @pytest.mark.filterwarnings("ignore:frames. the results of:UserWarning")  # those of the cells before
    @pytest.mark.parametrize("rotate", [lambda: None, lambda: ld.RandomRotateFields(1)], ids=["given", "rotated"])
    def test_frames_far_from_the_origin_keep_their_digits(self, rotate):
        """A network in float32 has the same forces at 10,000 angstrom, and for atoms in other images."""
        geometry, groups = pytest.importorskip("lieattn.geometry"), pytest.importorskip("lieattn.groups")
        models = pytest.importorskip("lieattn.models")
        torch.manual_seed(0)
        options = {"neighborhood": geometry.Radius(3.0, smooth=True), "channels": 8, "layers": 1, "pool": "sum"}
        inner = models.DirectionConvNet(groups.octahedral(), models.Species((8, 14)), 1, **options)
        network, frames = models.EnergyForces(inner).eval(), crystals(3)
        for frame in frames:
            frame.set_cell(np.diag([499.7, 500.1, 5.0]))
            frame.calc = None
        items = [list(ld.Molecules.from_ase(frames, transform=rotate()))]
        for shift, images in ((0, [1, -2, 0]), (-1e4 / 3, [0, 0, 0]), (1e4, [3, 0, 0])):
            for frame in (moved := [frame.copy() for frame in frames]):
                frame.positions += shift
                frame.positions[0] += images @ frame.cell
            items.append(list(ld.Molecules.from_ase(moved, transform=rotate())))
            np.testing.assert_allclose(moved[2].positions[1] - shift, frames[2].positions[1], atol=1e-9)
        assert [clouds[0].pos.dtype for clouds in items] == [torch.float32, *[torch.float64] * 3]
        wanted, *others = (network(Batch.from_data_list(clouds)) for clouds in items)
        for found in others:
            torch.testing.assert_close(found.energy, wanted.energy, rtol=1e-5, atol=0)
            error = (found.force - wanted.force).abs().max()
            assert error < 1e-5 * wanted.force.abs().max()

    def test_energies_less_those_of_the_atoms(self):
        frames = crystals(12)
        molecules = ld.Molecules.from_ase(frames, references=True)
        free = [sum(molecules.atom_energies[int(z)] for z in frame.numbers) for frame in frames]
        total = [frame.get_potential_energy() for frame in frames]
        np.testing.assert_allclose(molecules.targets[:, 0].numpy() + np.array(free), total, rtol=1e-12)
        assert molecules.targets.abs().max() < 10
        other = ld.Molecules.from_ase(frames, energy_unit="meV", references=True)
        assert other.atom_energies == pytest.approx({z: 1000 * e for z, e in molecules.atom_energies.items()})

    def test_results_of_other_positions_are_not_read(self):
        """A warning says so, since labels would be missing without a word. Those that are read are the first choice."""
        frames = crystals(3)
        for frame in frames[1:]:
            frame.info = {"energy": frame.get_potential_energy()}
            frame.center()
        frames[0].info["energy"], frames[0].arrays["forces"] = 0.0, np.zeros((2, 3))
        with pytest.warns(UserWarning, match="results of 2 calculators are not read, .* the first of frame 1; copy"):
            molecules = ld.Molecules.from_ase(frames)
        assert [data.energy.item() for data in molecules] == pytest.approx(
            [frame.calc.results["energy"] for frame in frames]
        )
        assert [bool(data.dipole_mask) for data in molecules] == [True, False, False]
        np.testing.assert_allclose(molecules[0].force, frames[0].get_forces(), rtol=1e-6)

    def test_one_periodic_frame_among_others(self):
        frames = crystals(2)
        frames[1].pbc = False
        for frame in frames:
            frame.calc, frame.info = None, {}
        items = list(ld.Molecules.from_ase(frames))
        assert [data.pbc.tolist() for data in items] == [[[True] * 3], [[False] * 3]]
        assert all(data.cell.shape == (1, 3, 3) for data in items)

    def test_plain_frames(self):
        """Frames may lack a cell, a calculator or labels; labels may be in `info` and `arrays`."""
        ase = pytest.importorskip("ase")
        frame = ase.Atoms("HF", [[0, 0, 0], [0, 0, 0.9]])
        assert sorted(ld.Molecules.from_ase([frame])[0].to_dict()) == ["pos", "y", "z"]
        frame.info["energy"], frame.arrays["forces"] = -1.0, np.ones((2, 3))
        assert sorted(ld.Molecules.from_ase([frame])[0].to_dict()) == ["energy", "force", "pos", "y", "z"]

    def test_nothing_is_computed(self):
        ase, emt = pytest.importorskip("ase"), pytest.importorskip("ase.calculators.emt")
        frame = ase.Atoms("Cu2", [[0, 0, 0], [0, 0, 2.2]], calculator=emt.EMT())
        assert "energy" not in ld.Molecules.from_ase([frame])[0]
        frame.get_potential_energy()
        assert "energy" in ld.Molecules.from_ase([frame])[0]

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (lambda frames: frames.clear(), ValueError, "frames: expected at least one"),
            (lambda frames: frames.append(3), TypeError, "frames: expected ase.Atoms, got int for frame 2"),
            (lambda frames: setattr(frames[1], "calc", None), ValueError, "energy in all .* frame 1"),
            (lambda frames: frames[0].calc.results.update(energy=np.nan), ValueError, "energy .* finite"),
            (lambda frames: frames[0].calc.results.update(forces=np.ones((2, 2))), ValueError, r"forces .* \[2, 3\]"),
            (
                lambda frames: frames[0].calc.results["forces"].__setitem__((0, 1), np.nan),
                ValueError,
                "forces .* finite",
            ),
            (lambda frames: frames[0].calc.results.update(dipole=1.8), ValueError, r"dipole .* \[3\], got \[\]"),
            (lambda frames: frames[0].cell.array.fill(1e200), ValueError, "cell of frames: expected at most 1e"),
            (lambda frames: frames[0].cell.array.fill(-1e200), ValueError, "cell of frames: expected at most 1e"),
            (lambda frames: frames[0].numbers.fill(0), ValueError, "z: expected nuclear charges in 1 .. 118"),
        ],
    )
    def test_bad_frames(self, change, error, message):
        frames = crystals(2)
        for frame in frames:
            frame.calc.check_state = lambda atoms: []
        change(frames)
        with pytest.raises(error, match=message):
            ld.Molecules.from_ase(frames)

    def test_frames_with_some_properties(self, tmp_path):
        """Properties of some frames only have masks, and the others do not enter the training."""
        write = pytest.importorskip("ase.io").write
        frames = crystals(3)
        frames[0].calc.results.pop("stress")
        frames[0].info.pop("virial")
        frames[1].calc.results["forces"] = np.full((3, 3), np.nan)
        frames[2].calc.results.pop("dipole")
        write(tmp_path / "frames.xyz", frames, format="extxyz")
        for molecules in (ld.Molecules.from_ase(frames), ld.ExtendedXYZ(tmp_path / "frames.xyz", "all")):
            batch = Batch.from_data_list(list(molecules))
            assert batch.stress_mask.tolist() == batch.virial_mask.tolist() == [False, True, True]
            assert batch.force_mask.tolist() == [True] * 2 + [False] * 3 + [True] * 4
            assert batch.dipole_mask.tolist() == [True, True, False]
            for name in ("stress", "virial", "force", "dipole"):
                assert batch[name][batch[f"{name}_mask"]].isfinite().all()
                assert batch[name][~batch[f"{name}_mask"]].isnan().all()
            np.testing.assert_allclose(batch.stress[2], frames[2].get_stress(voigt=False), rtol=1e-6, atol=1e-6)

    def test_stresses_are_those_of_frames_that_are_periodic_along_three_vectors(self):
        frames = crystals(4)
        for frame, pbc in zip(frames, ((1, 1, 0), (1, 1, 1), (0, 0, 1), (0, 0, 0)), strict=True):
            frame.pbc = pbc
            frame.calc.atoms.pbc = pbc
        with pytest.warns(UserWarning, match="3 stresses are left out, the first is of frame 0, because .* periodic"):
            batch = Batch.from_data_list(list(ld.Molecules.from_ase(frames)))
        assert batch.stress_mask.tolist() == [False, True, False, False]
        assert batch.stress.isfinite().all(dim=(1, 2)).tolist() == batch.stress_mask.tolist()
        assert "virial_mask" not in batch
        assert batch.virial.isfinite().all()

    def test_other_names(self, tmp_path):
        ase = pytest.importorskip("ase")
        frames = [ase.Atoms("HF", [[0, 0, 0], [0, 0, d]]) for d in (0.9, 1.0)]
        for frame in frames:
            frame.info |= {"REF_energy": -1.0 - frame.positions[1, 2], "total_charge": 1}
            frame.info["REF_dipole"] = 0.4 * frame.positions[1]
            frame.arrays["REF_forces"] = frame.positions
        pytest.importorskip("ase.io").write(tmp_path / "frames.xyz", frames, format="extxyz")
        with (
            pytest.warns(
                UserWarning, match="frames: no energy is read, but there is REF_energy; pass keys={'energy': "
            ),
            pytest.warns(UserWarning, match="frames: no forces is read, but there is REF_forces"),
            pytest.warns(UserWarning, match="frames: no dipole is read, but there is REF_dipole"),
        ):
            ld.Molecules.from_ase(frames)
        keys = {"energy": "REF_energy", "forces": "REF_forces", "dipole": "REF_dipole", "charge": "total_charge"}
        for molecules in (
            ld.Molecules.from_ase(frames, keys=keys),
            ld.ExtendedXYZ(tmp_path / "frames.xyz", "all", keys=keys),
        ):
            assert [data.energy.item() for data in molecules] == pytest.approx([-1.9, -2.0])
            assert [data.charge.item() for data in molecules] == [1, 1]
            torch.testing.assert_close(molecules[1].force, molecules[1].pos)
            torch.testing.assert_close(molecules[1].dipole, 0.4 * molecules[1].pos[1:])

    @pytest.mark.parametrize(
        ("keys", "energy", "force"),
        [
            ({"energy": "dft_energy"}, -5, None),
            ({"energy": "dft_energy", "forces": "dft_forces"}, -5, 9),
            ({"energy": "dft_energy", "forces": "forces"}, -5, 1),
            ({"forces": "dft_forces"}, None, 9),
            ({"charge": "total"}, -1, 1),
        ],
    )
    @pytest.mark.filterwarnings("ignore:frames. besides:UserWarning")
    def test_labels_of_several_levels_of_theory(self, tmp_path, recwarn, keys, energy, force):
        """With names of labels no other ones are read, since these may be of another level."""
        text = "1\nProperties=species:S:1:pos:R:3:forces:R:3:dft_forces:R:3 energy=-1 dft_energy=-5 total=1\n"
        (tmp_path / "frames.xyz").write_text(text + "O 0 0 0 1 1 1 9 9 9\n")
        data = ld.ExtendedXYZ(tmp_path / "frames.xyz", "all", keys=keys)[0]
        for name, found, wanted in (("energy", data.get("energy"), energy), ("forces", data.get("force"), force)):
            assert found is None if wanted is None else found.unique().tolist() == [wanted]
            told = f"frames: no {name} is read, but there is dft_{name}, {name}; pass keys={{'{name}': 'dft_{name}'}}"
            assert any(str(one.message).startswith(told) for one in recwarn) == (wanted is None)

    def test_several_levels_without_keys(self):
        ase = pytest.importorskip("ase")
        frame = ase.Atoms("O", [[0, 0, 0]], info={"energy": -1.0, "REF_energy": -5.0, "energy_unit": "eV"})
        frame.arrays |= {"forces": np.ones((1, 3)), "REF_forces": np.zeros((1, 3))}
        frame.info["forces_unit"] = "eV/A"
        with pytest.warns(UserWarning, match="read, there are REF_energy, REF_forces; pass keys"):
            assert ld.Molecules.from_ase([frame])[0].energy.tolist() == [-1]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"stress": 20 * np.eye(3), "virial": np.full((3, 3), np.nan)}, r"the stress is above 10 .* is frame 1"),
            ({"stress": np.full((3, 3), np.nan), "virial": -800 * np.eye(3)}, r"the stress is above 10 .* is frame 1"),
            ({"stress": np.eye(3), "virial": 64 * np.eye(3)}, "the virial is not minus the stress .* in 1"),
            ({"stress": 0.1 * np.eye(3), "virial": -4 * np.eye(3)}, "the virial is not minus the stress .* is frame 1"),
            ({"energy": -20.4}, "differ by another amount than by their forces in 3 of 3 frames, the first is frame 0"),
            ({"forces": np.array([[0, 0, -4.0], [0, 0, 4.0]])}, "another amount than by their forces in 3"),
            ({"positions": np.array([[0, 0, 0], [0, 0, 0.11]])}, "atoms are closer than 0.3 .* in 1 of 3 .* frame 1"),
            ({"stress-unit": "kbar"}, "stress-unit=kbar is stated, but numbers are read as they are, .* frame 1"),
            ({"energy_units": "Ha"}, "energy_units=Ha is stated, but numbers are read as they are, .* frame 1"),
        ],
    )
    def test_labels_that_contradict_each_other(self, changes, message):
        frames = springs()
        ld.Molecules.from_ase(frames)
        for name, value in changes.items():
            (frames[1].info if name in frames[1].info or "unit" in name else frames[1].arrays)[name] = value
        with pytest.warns(UserWarning, match=message):
            ld.Molecules.from_ase(frames)

    def test_one_energy_far_from_all_others(self, recwarn):
        ase = pytest.importorskip("ase")
        energies = np.random.default_rng(0).normal(-300.0, 0.2, 100)
        for count, moved in ((1, 500.0), (1, 2.0), (3, 500.0)):  # one is wrong; none is remote; there are several kinds
            changed = energies + moved * (np.arange(100) % 33 == 7) * (np.arange(100) < 33 * count)
            frames = [ase.Atoms("O", [[0, 0, 0]], info={"energy": energy}) for energy in changed]
            ld.Molecules.from_ase(frames)
        (found,) = recwarn
        wanted = "the energy is a hundred times as far .* in 1 of 100 frames, the first is frame 7"
        assert re.search(wanted, str(found.message))

    @pytest.mark.parametrize("factor", [-1, 1 / 51.4, 1 / 27.2, 23.06])
    def test_forces_in_another_unit_or_with_another_sign(self, factor):
        frames = springs()
        for frame in frames:
            frame.arrays["forces"] *= factor
        with pytest.warns(UserWarning, match="differ by another amount than by their forces in 3 of 3 frames"):
            ld.Molecules.from_ase(frames)

    def test_pairs_across_a_minimum_have_no_ratio(self):
        """Their work is small compared with its error, so that the energies may rise while the work falls."""
        ase, frames = pytest.importorskip("ase"), []
        for symbols in ("OH", "NH", "CH"):
            for length, energy in ((0.9, -20.0), (1.1, -19.97)):
                frame = ase.Atoms(symbols, [[0, 0, 0], [0, 0, length]], info={"energy": energy})
                frame.arrays["forces"] = np.outer((1, -1), (0, 0, 20 * (length - 1)))
                frames.append(frame)
        assert len(ld.Molecules.from_ase(frames)) == 6

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"force": "forces"}, "keys: expected names for energy, forces, .* got some for .*force"),
            ({"energy": "E"}, "keys: expected a name that the frames have for energy, some of .*, got 'E'"),
        ],
    )
    def test_bad_keys(self, keys, message):
        with pytest.raises(ValueError, match=message):
            ld.Molecules.from_ase(crystals(2), keys=keys)

    def test_frames_that_are_no_sequence(self):
        with pytest.raises(TypeError, match="frames: expected a sequence, got <list_iterator"):
            ld.Molecules.from_ase(iter(crystals(2)))

    def test_files(self, tmp_path):
        write = pytest.importorskip("ase.io").write
        frames, path = crystals(20), tmp_path / "frames.xyz"
        write(path, frames, format="extxyz")
        path.write_text(path.read_text(), encoding="utf-8-sig")  # some editors put a byte order mark before it
        everything = ld.ExtendedXYZ(path, "all", references=True)
        expected = ld.Molecules.from_ase(frames, references=True)
        for mine, theirs in zip(everything, expected, strict=True):
            for name, values in theirs.to_dict().items():
                torch.testing.assert_close(mine[name], values, rtol=0, atol=1e-4)
        parts = [
            ld.ExtendedXYZ(path, split, shares=(0.5, 0.2), references=True) for split in ("train", "valid", "test")
        ]
        assert [len(part) for part in parts] == [10, 4, 6]
        assert {tuple(data.pos.flatten().tolist()) for part in parts for data in part} == {
            tuple(data.pos.flatten().tolist()) for data in everything
        }
        assert parts[0].atom_energies == parts[2].atom_energies != everything.atom_energies

    def test_elements_without_a_training_frame(self, tmp_path):
        """Their energy would be fitted as 0, so that whole energies of test frames were off by that of an atom."""
        ase, write = pytest.importorskip("ase"), pytest.importorskip("ase.io").write
        frames = [ase.Atoms("OH", [[0, 0, 0], [0, 0, 0.9 + 0.01 * n]], info={"energy": -20.0}) for n in range(10)]
        test = ld.ExtendedXYZ(_written(write, tmp_path, frames), "test", split_seed=1)
        rare = int(test._indices[0])
        frames[rare] = ase.Atoms("SH", frames[rare].positions, info={"energy": -400.0})
        path = _written(write, tmp_path, frames)
        for split in ("train", "test"):
            with pytest.raises(ValueError, match="got none with the element 16; use more"):
                ld.ExtendedXYZ(path, split, split_seed=1, references=True)
        plain = ld.ExtendedXYZ(path, "test", split_seed=1)
        assert plain[0].y.item() == -400

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "line 1: expected the number"),
            ("many\n\nH 0 0 0\n", "line 1: expected the number of atoms of a frame, got 'many'"),
            ("99999999\n\nH 0 0 0\n", "line 1 promises 99999999 atoms, but the file has lines for 1"),
            ("1\n\nH 0 0 0\n3\n\nH 0 0 0\n", "line 4 promises 3 atoms, but the file has lines for 1"),
            ("3\n", "lines are missing: line 1 promises 3 atoms, but the file has lines for 0"),
            ("2\n\nH 0 0 0\n", "lines are missing: line 1 promises 2 atoms, but the file has lines for 1"),
            ("0\n\n1\n\nH 0 0 0\n", "line 1: expected the number of atoms of a frame, got '0'"),
            ("1\n\nH 0 0 0\n\n1\n\nH 0 0 0\n", "line 4: expected the number"),
            ("1\nProperties=species:S:1:pos:R:9999999999\nH 0 0 0\n", "expected at most 1000 columns"),
            ("1\n\n8 0 0 0\n", "frames.xyz .* '8' is no symbol of an element; name nuclear charges Z:I:1"),
            ("1\nProperties=species:I:1:pos:R:3\n8 0 0 0\n", "expected species:S:1 for symbols or Z:I:1"),
            ("1\nProperties=Species:S:1:pos:R:3\nH 0 0 0\n", "expected species:S:1 for symbols or Z:I:1"),
            ("1\nproperties=species:S:1:pos:R:3:forces:R:3\nH 0 0 0 1 1 1\n", "expected Properties=..., got it"),
            ('1\nlattice="4 0 0 0 4 0 0 0 4"\nH 0 0 0\n', "expected Lattice=..., got it in lower case"),
            ('1\nIt\'s Lattice="4 0 0 0 4 0 0 0 4"\nH 0 0 0\n', "expected Lattice=..., .* after an open quote"),
            ("1\nProperties=species:S:1:pos:R\nH 0 0 0\n", "Properties: expected the column pos:R:3"),
            ("1\nProperties=species:S:1:pos:R:3\nH 7 0 0 0\n", "line 3: expected the columns of Properties, got 'H 7"),
            ("1\nenergy=T\nH 0 0 0\n", "energy of frames: expected numbers, got True for frame 0"),
            ("1\ncharge=F\nH 0 0 0\n", "charge of frames: expected numbers, got False for frame 0"),
            ('1\nstress="1 2 3 0 1 0 0 0 1"\nH 0 0 0\n', "stress: expected a symmetric matrix"),
            ('1\nstress="1 2 3 0 1 0"\nH 0 0 0\n', "stress, expecting special 3x3 matrix"),
            ("1\nProperties=species:S:1 energy=1\nH\n", "Properties: expected the column pos:R:3, got species:S:1"),
            ("1\nenergy=abc\nH 0 0 0\n", "frames.xyz: energy of frames: expected an array of real numbers"),
            ("2\n\nH 0 0 0\nH 0 0 1\n1\n\nH 0 0 nan\n", "frames.xyz: pos of frames: .*NaN or infinity for frame 1"),
        ],
    )
    def test_damaged_files(self, tmp_path, text, message):
        pytest.importorskip("ase")
        (tmp_path / "frames.xyz").write_text(text)
        with pytest.raises(ValueError, match=message):
            ld.ExtendedXYZ(tmp_path / "frames.xyz", "all")
