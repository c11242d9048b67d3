"""The scripts that make the small data sets, with a little data in the source formats; nothing is downloaded."""

import csv
import functools
import importlib.util
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from scipy.io import netcdf_file

import lieattn_datasets as ld
from lieattn_datasets import _md17
from lieattn_datasets._files import Release
from lieattn_datasets._targets import TARGETS
from tests.test_datasets import write_idx

RANDOM = np.random.default_rng(0)
SCRIPT = importlib.util.spec_from_file_location("make", Path(__file__).parent.parent / "datasets/scripts/make.py")
make = importlib.util.module_from_spec(SCRIPT)
SCRIPT.loader.exec_module(make)


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """Write 60 and 10 digits into the folder of the sources."""
    for prefix, count in (("train", 60), ("t10k", 10)):
        images = np.zeros((count, 28, 28), dtype=np.uint8)
        images[:, 4:24, 4:24] = RANDOM.integers(0, 256, (count, 20, 20))
        write_idx(tmp_path, prefix, images, np.arange(count, dtype=np.uint8) % 10)
    monkeypatch.setattr(make, "MNIST", functools.partial(ld.MNIST, verify=False))
    return np.concatenate([np.asarray(ld.MNIST(tmp_path, half, verify=False)._images) for half in ("train", "test")])


def saved(tmp_path, name, *options):
    np.savez(tmp_path / f"{name}.npz", **getattr(make, name)(tmp_path, *options))


def test_rotated_digits(digits, tmp_path):
    content = make.mnist_rot_recipe(tmp_path)
    parts = [content[f"source_{split}"] for split in ("train", "valid", "test")]
    assert [len(part) for part in parts] == [10, 2, 50]
    assert len(set(np.concatenate(parts).tolist())) == 62
    for image, source, angle in zip(content["x_test"], parts[2], content["angle_test"], strict=True):
        turned = ld.RotateImage(float(angle))(ld.image_to_data(digits[source]))
        assert np.abs(ld.data_to_image(turned).numpy()[..., 0] * 255 - image).max() < 1
    assert np.array_equal(content["y_train"], np.arange(60)[parts[0]] % 10)


def test_digits_on_the_sphere(digits, tmp_path):
    saved(tmp_path, "spherical_mnist_recipe")
    still = ld.SphericalMNIST(tmp_path, "test", verify=False)
    turned = ld.SphericalMNIST(tmp_path, "test", rotated=True, verify=False)
    assert (len(still), len(turned)) == (1, 1)
    expected = ld.project_image(
        digits[60:][np.load(tmp_path / "spherical_mnist_recipe.npz")["source_test"][0]], still[0].pos
    )
    assert np.abs(expected - 255 * still[0].x[:, 0].numpy()).max() < 0.51
    assert not np.array_equal(still[0].x, turned[0].x)


def test_qm9_subset(tmp_path):
    atoms = {number: ["C", "O", "H", "H"] if number != 4 else ["C", "F"] for number in range(1, 30)}
    with (tmp_path / "qm9_small.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, ["", "mol_id", "smiles", *TARGETS])
        rows.writeheader()
        for number in [20, 4, 3, *range(1, 30, 2)]:  # unsorted; 3 occurs twice
            rows.writerow({"mol_id": f"gdb_{number}", "smiles": "C=O", **dict.fromkeys(TARGETS, number)})
    (tmp_path / "uncharacterized.txt").write_text("\n" * 9 + "5 left out\nend\n")
    with tarfile.open(tmp_path / "dsgdb9nsd.xyz.tar.bz2", "w:bz2") as archive:
        for number, symbols in atoms.items():
            lines = [f"{symbol}\t{place}.5\t-2.5*^-6\t{number}\t0.1" for place, symbol in enumerate(symbols)]
            text = "\n".join([str(len(symbols)), f"gdb {number}", *lines, "1.0", "C=O\tC=O"]).encode()
            info = tarfile.TarInfo(f"dsgdb9nsd_{number:06d}.xyz")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    saved(tmp_path, "qm9_subset")
    whole = ld.QM9Subset(tmp_path, "all", targets="mu", references=False, verify=False)
    assert [int(item.gdb_number) for item in whole] == [1, 3, 3, *range(7, 20, 2), 20, *range(21, 30, 2)]
    assert [float(item.y) for item in whole] == [float(item.gdb_number) for item in whole]
    assert whole[1].z.tolist() == [6, 8, 1, 1]
    assert whole[1].pos[2].tolist() == pytest.approx([2.5, -2.5e-6, 3.0])
    sizes = [len(ld.QM9Subset(tmp_path, split, verify=False)) for split in ("train", "valid", "test")]
    assert sizes == [11, 2, 3]


def test_gfn2_labels_of_one_molecule():
    pytest.importorskip("tblite")
    z, pos = ld.embed_molecule("CO")
    pos = pos.astype(np.float32)
    made, known = make._labels(z, pos), ld.label_gfn2(z, pos)
    assert made["energy"] * 27.211386245988 == pytest.approx(known.energy, rel=1e-9)
    np.testing.assert_allclose(made["dipole"], known.dipole, atol=1e-5)
    np.testing.assert_allclose(made["forces"], known.force, atol=1e-5)
    assert made["polarizability_ok"]
    assert 5 < np.linalg.eigvalsh(made["polarizability"]).min() < 30


def test_frames_of_revised_md17(tmp_path, monkeypatch):
    monkeypatch.setattr(_md17, "MD17_MOLECULES", ("uracil",))
    vectors = {name: RANDOM.normal(size=(2100, 3, 3)) for name in ("coords", "forces")}
    z, energies = np.array([8, 1, 1], dtype=np.uint8), RANDOM.normal(size=2100)
    np.savez(tmp_path / "rmd17_uracil.npz", nuclear_charges=z, energies=energies, **vectors)
    frames = RANDOM.permutation(2100)
    np.savetxt(tmp_path / "index_train_01.csv", frames[:1000], "%d")
    np.savetxt(tmp_path / "index_test_01.csv", frames[1000:2000], "%d")
    saved(tmp_path, "rmd17_split01")
    for split in ("train", "test"):
        ours = ld.RMD17Subset(tmp_path, "uracil", split, verify=False)
        official = ld.RMD17(tmp_path, "uracil", split)
        assert len(ours) == len(official)
        np.testing.assert_allclose(ours[7].force, official[7].force, rtol=1e-6)
        np.testing.assert_allclose(ours[7].energy, official[7].energy, rtol=1e-6)


def test_shapes(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "_SHAPES", "3 1 0")
    voxels = np.zeros((4, 30, 30, 30), dtype=np.uint8)
    voxels[:, 5:20, 5:20, 5:20] = 1
    labels = np.arange(4)
    np.savez(tmp_path / "modelnet10.npz", X_train=voxels, y_train=labels, X_test=voxels, y_test=labels)
    saved(tmp_path, "modelnet10_tiny")
    train, test = (ld.ModelNet10Tiny(tmp_path, split, verify=False) for split in ("train", "test"))
    assert [int(item.y) for item in (*train, *test)] == [3, 1, 0]

    parts = ("train", "val", "test")
    masks = {f"{part}_images": 255 * voxels[:2, :28, :28, :28] for part in parts}
    (tmp_path / "official").mkdir()
    np.savez(
        tmp_path / "official" / "adrenalmnist3d.npz",
        **masks,
        **{f"{part}_labels": np.array([[0], [1]]) for part in parts},
    )
    np.savez(tmp_path / "adrenalmnist3d.npz", **make.adrenalmnist3d(tmp_path / "official"))
    assert [int(item.y) for item in ld.AdrenalMNIST3D(tmp_path, "valid", verify=False)] == [0, 1]


def test_pictures_and_wind(tmp_path):
    image = pytest.importorskip("PIL.Image")
    sprite = np.repeat(np.arange(30, dtype=np.uint8), 28)[:, None] * np.ones(840, dtype=np.uint8)
    image.fromarray(sprite).save(tmp_path / "fashion-mnist-sprite.png")
    content = make.fashion_mnist_900(tmp_path)
    assert np.array_equal(content["x"][:, 0, 0] // 3, content["y"])

    wind = RANDOM.normal(size=(2, 12, 73, 144)).astype(np.float32)
    sizes = {"time": 12, "latitude": 73, "longitude": 144}
    grid = {"latitude": np.linspace(90, -90, 73), "longitude": 2.5 * np.arange(144)}
    for name, values in zip("uv", wind, strict=True):
        with netcdf_file(tmp_path / f"{name}wnd_mean.nc", "w") as file:
            for dimension, size in sizes.items():
                file.createDimension(dimension, size)
            for axis, angles in grid.items():
                file.createVariable(axis, "f4", (axis,))[:] = angles
            file.createVariable(f"{name}wnd", "f4", tuple(sizes))[:] = values
    made = make.wind_monthly_mean(tmp_path)
    assert np.array_equal(made["u"], wind[0])
    assert np.array_equal(made["v"], wind[1])
    np.savez(tmp_path / "wind_monthly_mean.npz", **made)
    assert len(ld.WindOnSphere(tmp_path, verify=False)) > 0


def test_particles(tmp_path):
    saved(tmp_path, "nbody_charged5", 14)
    assert [len(ld.NBody(tmp_path, split, verify=False)) for split in ("train", "valid", "test")] == [6, 4, 4]


def test_the_command_compares_content_however_it_is_packed(tmp_path, monkeypatch, capsys):
    content = {"a": np.arange(3), "b": np.ones(2)}
    np.savez(tmp_path / "known.npz", **content)
    with make.Archive(tmp_path / "known.npz", ValueError) as archive:
        digests = {"small.npz": f"content:{archive.fingerprint(['b.npy'])}"}
    release = Release("Small", "Made here.", digests, computed=("b",))
    with pytest.raises(
        FileNotFoundError, match=r"yourself, or run 'python datasets/scripts/make\.py small .*' in .*\. Made"
    ):
        release.locate(tmp_path, "small.npz")
    monkeypatch.setitem(make.MAKERS, "small", (lambda sources: content, release))
    assert make.main(["small", str(tmp_path)]) == 0
    content["b"] = np.zeros(2)
    assert make.main(["small", str(tmp_path)]) == 0
    content["a"] = np.arange(1, 4)
    with pytest.raises(SystemExit) as caught:
        make.main(["small", str(tmp_path)])
    assert caught.value.code == 1
    assert "small.npz has the digest content:" in capsys.readouterr().err
