"""Every loader of lieattn_datasets with small valid files of its formats, and the values that it reads."""

from __future__ import annotations

import atexit
import functools
import inspect
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trimesh

import lieattn_datasets as ld
from lieattn_datasets._targets import TARGETS
from tests import (
    test_data_dynamics,
    test_data_folders,
    test_data_molecules,
    test_data_shapes,
    test_data_sphere,
    test_datasets,
)

_COUNT = 3


@dataclass(frozen=True)
class Case:
    """Files of a loader.

    Attributes
    ----------
    write
        Function that writes them to a folder.
    load
        Function that reads them.
    checksums
        Whether the format has checksums, so that every changed bit must be detected.
    counts
        Whether the format states its size, so that every missing end must be detected.
    only
        Prefix of the names of files that are damaged.
    """

    write: Callable[[Path], Any]
    load: Callable[[Path], Any]
    checksums: bool = False
    counts: bool = True
    only: str = ""

    @functools.cached_property
    def folder(self) -> Path:
        """Folder with the valid files, which are made once per process and removed at its end."""
        folder = Path(tempfile.mkdtemp(prefix="lieattn_data_"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.write(folder)
        return folder

    @functools.cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the files that are damaged."""
        names = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        return tuple(sorted(name for name in names if name.startswith(self.only)))

    @functools.cached_property
    def values(self) -> tuple[np.ndarray, ...]:
        """The values that are read from the valid files."""
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(self.folder, copy, dirs_exist_ok=True)
            return self.read(Path(copy))

    def read(self, folder: Path) -> tuple[np.ndarray, ...]:
        """Return everything that the loader reads from files in a folder, as arrays."""
        loaded = self.load(folder)
        if isinstance(loaded, tuple):
            return loaded
        classes = np.array([str(getattr(loaded, "classes", len(loaded)))])
        items = [loaded[index].to_dict() for index in range(len(loaded))]
        tensors = [
            item[key].nan_to_num() if f"{key}_mask" in item else item[key]  # rows that some frames lack are NaN
            for item in items
            for key in sorted(item)
            if torch.is_tensor(item[key])
        ]
        return (classes, *map(np.asarray, tensors))


def of_loaders() -> set[str]:
    """Return the names of the public classes and functions that read files."""
    public = ((name, getattr(ld, name)) for name in ld.__all__ if name != "MeshError")
    return {
        name
        for name, loader in public
        if callable(loader) and {"root", "path"} & {*inspect.signature(loader).parameters}
    }


def _write_amat(folder: Path, name: str) -> None:
    (folder / name).write_text(test_datasets.amat(test_datasets.GRAY[:_COUNT], test_datasets.LABELS[:_COUNT]))


def _write_amat_zip(folder: Path) -> None:
    with zipfile.ZipFile(folder / "mnist_rotation_new.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        text = test_datasets.amat(test_datasets.GRAY[:_COUNT], test_datasets.LABELS[:_COUNT])
        archive.writestr(test_datasets.AMAT, text)


def _write_pcam(folder: Path) -> None:
    import h5py

    images = np.random.default_rng(0).integers(0, 4, (_COUNT, 96, 96, 3), dtype=np.uint8)
    options = {"compression": "gzip", "shuffle": True, "fletcher32": True}
    with h5py.File(folder / test_datasets.PCAM_X, "w") as file:
        file.create_dataset("x", data=images, chunks=(1, 96, 96, 3), **options)
    with h5py.File(folder / test_datasets.PCAM_Y, "w") as file:
        file["y"] = np.array([0, 1, 1], dtype=np.uint8).reshape(-1, 1, 1, 1)


def _write_qm9(folder: Path) -> None:
    """Write three molecules in the original formats. The second one is in the list of excluded molecules."""
    (folder / "raw").mkdir()
    molecule = (
        "gdb_{0}\n  made\n\n  3  2  0     0  0  0  0  0  0999 V2000\n"
        "    0.0{0}00    0.0000    0.1200 O   0  0\n    0.0000    0.7600   -0.4800 H   0  0\n"
        "    0.0000   -0.7600   -0.4800 H   0  0\n  1  2  1  0\n  1  3  1  0\nM  END\n$$$$\n"
    )
    numbers = range(1, _COUNT + 1)
    (folder / "raw" / "gdb9.sdf").write_text("".join(molecule.format(number) for number in numbers))
    header = ",".join(["mol_id", *TARGETS[-3:], *TARGETS[:-3]])
    rows = [",".join([f"gdb_{n}", *(f"{n * 100 + k}.5" for k in range(19))]) for n in numbers]
    (folder / "raw" / "gdb9.sdf.csv").write_text("\n".join([header, *rows, ""]))
    (folder / "raw" / "uncharacterized.txt").write_text("a line\n" * 9 + "2 left out\nend\n")


def _write_gfn2(folder: Path) -> None:
    test_data_molecules.write_gfn2(folder, test_data_molecules.write_subset(folder))


def _write_rmd17(folder: Path) -> None:
    test_data_molecules.write_rmd17(folder, test_data_molecules.trajectory(8, 4), range(4), range(4, 8))


def _write_rmd17_subset(folder: Path) -> None:
    z, pos, energy, force = test_data_molecules.trajectory(8, 4)
    np.savez(folder / "rmd17_split01.npz", uracil_z=z, uracil_R=pos, uracil_F=force, uracil_E=energy)


def _write_images(folder: Path, name: str, shape: tuple[int, ...], *keys: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (10, *shape), dtype=np.uint8)
    np.savez_compressed(folder / name, **dict(zip(keys, (images, np.arange(10)), strict=True)))


def _write_meshes(folder: Path) -> None:
    test_data_shapes.write_modelnet(folder)


def _write_mesh_zip(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as unpacked:
        test_data_shapes.pack(test_data_shapes.write_modelnet(Path(unpacked)), folder / "ModelNet10.zip")


def _write_adrenal(folder: Path) -> None:
    masks = np.random.default_rng(0).random((3, 6, 6, 6)) < 0.5
    test_data_shapes.TestVoxels().write_adrenal(folder, masks)


def _write_mesh(folder: Path, kind: str) -> None:
    mesh = trimesh.creation.icosahedron().export(file_type=kind)
    (folder / f"mesh.{kind}").write_bytes(mesh if isinstance(mesh, bytes) else mesh.encode())


def _write_xyz(folder: Path) -> None:
    from ase.io import write

    write(folder / "frames.xyz", test_data_molecules.crystals(3), format="extxyz")


def _write_smiles(folder: Path) -> None:
    (folder / "mols.csv").write_text("smiles,y\nC,1\n")


def _image_folder(suffix: str, **options: bool) -> Case:
    return Case(
        lambda folder: test_data_folders.write_images(folder, count=1, suffix=suffix),
        lambda folder: ld.ImageFolder(folder, "all"),
        **options,
    )


def _images(loader: Callable[..., Any], split: str = "test", **options: Any) -> Callable[[Path], Any]:
    return lambda folder: loader(folder, split, verify=False, **options)


def _qm9(folder: Path) -> Any:
    return ld.QM9(folder, "all", verify=False, references=False)


def _mesh(kind: str) -> Case:
    return Case(
        lambda folder: _write_mesh(folder, kind),
        lambda folder: ld.read_mesh(folder / f"mesh.{kind}"),
        counts=kind != "obj",
    )


def _scan(kind: str) -> Case:
    def write(folder: Path) -> None:
        (folder / "chair").mkdir()  # otherwise, the class has the name of the folder
        (folder / f"chair/scan.{kind.split()[0]}").write_bytes(test_data_shapes.scan_file(kind))

    return Case(write, lambda folder: ld.MeshFolder(folder, points=8, shares=(1.0, 0.0)), counts=kind != "xyz")


def _npz(write: Callable[[Path], Any], load: Callable[[Path], Any]) -> Case:
    return Case(write, load, checksums=True)


CASES: dict[str, Case] = {
    "MNIST": Case(lambda folder: test_datasets.write_idx(folder, "t10k"), _images(ld.MNIST)),
    "MNIST npz": _npz(
        lambda folder: _write_images(folder, "mnist.npz", (28, 28), "x_test", "y_test"), _images(ld.MNIST)
    ),
    "FashionMNIST": Case(
        lambda folder: test_datasets.write_idx(folder, "t10k", pack=True), _images(ld.FashionMNIST), checksums=True
    ),
    "RotatedMNIST": Case(_write_amat_zip, _images(ld.RotatedMNIST, "train"), checksums=True),
    "RotatedMNIST amat": Case(
        lambda folder: _write_amat(folder, test_datasets.AMAT), _images(ld.RotatedMNIST, "train"), counts=False
    ),
    "CIFAR10": Case(
        lambda folder: test_datasets.write_cifar(folder, ["test_batch.bin"]), _images(ld.CIFAR10), counts=False
    ),
    "CIFAR100": Case(
        lambda folder: test_datasets.write_cifar(folder, ["test.bin"], coarse=b"0"), _images(ld.CIFAR100), counts=False
    ),
    "PatchCamelyon": Case(_write_pcam, _images(ld.PatchCamelyon)),
    "RotatedMNISTRecipe": _npz(
        lambda folder: _write_images(folder, "mnist_rot_recipe.npz", (28, 28), "x_test", "y_test"),
        _images(ld.RotatedMNISTRecipe),
    ),
    "FashionMNIST900": _npz(
        lambda folder: _write_images(folder, "fashion_mnist_900.npz", (28, 28), "x", "y"),
        _images(ld.FashionMNIST900, "all"),
    ),
    "CIFAR10Subset": _npz(
        lambda folder: _write_images(folder, "cifar10_subset.npz", (32, 32, 3), "x_test", "y_test"),
        _images(ld.CIFAR10Subset),
    ),
    "QM9": Case(_write_qm9, _qm9, only="raw/gdb9"),
    "QM9Subset": _npz(test_data_molecules.write_subset, _images(ld.QM9Subset, "all")),
    "QM9GFN2": _npz(_write_gfn2, _images(ld.QM9GFN2, "all")),
    "RMD17": Case(
        _write_rmd17,
        _images(lambda root, split, **options: ld.RMD17(root, "ethanol", split, **options), number=2, validation=0),
        counts=False,
    ),
    "RMD17Subset": _npz(
        _write_rmd17_subset,
        _images(lambda root, split, **options: ld.RMD17Subset(root, "uracil", split, **options), validation=0),
    ),
    "NBody": _npz(test_data_dynamics.write_nbody, _images(ld.NBody, start=0, end=1)),
    "SphericalMNIST": _npz(test_data_sphere.write_sphere, _images(ld.SphericalMNIST, rotated=True)),
    "WindOnSphere": _npz(test_data_sphere.write_wind, _images(ld.WindOnSphere)),
    "ImageFolder": _image_folder("png", checksums=True),
    "ImageFolder jpeg": _image_folder("jpg"),
    "ExtendedXYZ": Case(_write_xyz, lambda folder: ld.ExtendedXYZ(folder / "frames.xyz", "all"), counts=False),
    "SmilesTable": Case(
        _write_smiles, lambda folder: ld.SmilesTable(folder / "mols.csv", "all", target="y"), counts=False
    ),
    "ModelNet": Case(_write_mesh_zip, _images(ld.ModelNet, points=8), checksums=True),
    "MeshFolder": Case(
        _write_meshes, lambda folder: ld.MeshFolder(folder / "ModelNet10", "test", points=8), only="ModelNet10/bed/test"
    ),
    **{f"MeshFolder {kind}": _scan(kind) for kind in ("ply", "ply binary", "pcd", "pcd binary", "xyz")},
    "ModelNet10Tiny": _npz(test_data_shapes.TestVoxels().write_tiny, _images(ld.ModelNet10Tiny)),
    "AdrenalMNIST3D": _npz(_write_adrenal, _images(ld.AdrenalMNIST3D, points=8)),
    "MedMNIST": _npz(
        lambda folder: test_data_shapes.TestVoxels().write_med(folder, 5, 6),
        lambda folder: ld.MedMNIST(folder, "some", "test"),
    ),
    "ScanObjectNN": Case(
        test_data_shapes.write_scans, lambda folder: ld.ScanObjectNN(folder, "test", per="point", points=20)
    ),
    "read_mesh": _mesh("off"),
    **{f"read_mesh {kind}": _mesh(kind) for kind in ("obj", "stl", "ply", "glb")},
}
