"""Folders and archives of labeled shapes, including ModelNet.

torch_geometric unpacks the archive to disk without a limit, and trusts the counts in a mesh. This reader has limits.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments, check_counts
from lieattn_datasets._checks import require
from lieattn_datasets._clouds import Card, Transform
from lieattn_datasets._download import SOURCES, fetch
from lieattn_datasets._files import Archive, Release, files_below, is_hidden, listed, portable_name
from lieattn_datasets._meshes import MESH_SUFFIXES, normalize_cloud, read_mesh, sample_surface
from lieattn_datasets._scans import (
    CHANNELS,
    LABEL,
    NORMAL,
    POSITION,
    SCAN_SUFFIXES,
    estimate_normals,
    is_scan,
    read_scan,
)
from lieattn_datasets._shapes import Rotate, ShapePoints, Task, drawn
from lieattn_datasets._splits import SPLITS, Split, frozen_stream, half_of, hold_out, progress, seeded, split_folders

_COUNTS = {10: {"train": 3991, "test": 908}, 40: {"train": 9843, "test": 2468}}
_NO_LABEL = "none (its name may also be class or classification, and begin with scalar_)"
_RELEASES = {
    version: Release(
        dataset=f"ModelNet{version}",
        origin=(
            f"The official archive is ModelNet{version}.zip (Wu et al., 3D ShapeNets, CVPR 2015), which is read "
            f"without unpacking it; its folder ModelNet{version} is read as well."
        ),
        sources=SOURCES[f"ModelNet{version}"],
    )
    for version in _COUNTS
}

# The name of a file for errors, and a function that reads its bytes.
_Entry = tuple[str, Callable[[], bytes]]
# Paths without the folder of the split, and splits, by paths.
_Splits = Mapping[PurePosixPath, tuple[PurePosixPath, str]]


class MeshFolder(ShapePoints):
    """Labeled triangle meshes or scans of a folder, as points on their surfaces, with normals.

    The folder contains ``CLASS/train/*`` and ``CLASS/test/*``, as ModelNet does, or ``train/CLASS/*`` and
    ``test/CLASS/*`` (with ``labels`` also ``train/*`` and ``test/*``), and possibly ``val`` or ``valid``; or
    ``CLASS/*``, or only files, which a permutation splits with the same share of every class. The formats OFF, OBJ,
    STL, PLY and GLB are supported. Points are sampled once per mesh, uniformly by area, centered and scaled into the
    unit sphere. Normals are the normals of the faces. Many meshes, including those of ModelNet, are not oriented
    consistently, so a loss on normals should not depend on their sign.

    **Scans** are clouds of points without faces, in PLY, PCD (ascii or binary), XYZ or TXT files. Points are drawn from
    a cloud, without repetition if there are enough. Colors in [0, 1] and intensities, if all files have them, are the
    channels ``x`` float32 ``[points, channels]``. Integers are divided by the largest one of their type. If a file has
    no normals, they are estimated: that of the plane through the 16 nearest points, away from the mean of the cloud,
    and zero where these points are on one line. So they turn with the scan.

    Parameters
    ----------
    root
        The folder, or a zip archive of it. Hidden files and folders are ignored. Links to files and folders are
        followed.
    split
        ``"train"``, ``"test"`` or ``"valid"``.
    points
        Number of points per mesh.
    labels
        Map from the name of each file in the folder to its class (a string) or its target (a number, which becomes
        ``y`` float32 ``[1, 1]``). Default: classes are the subfolders; if there are only files, they form one class
        with the name of the folder. Or a list of the names of the classes of points, for segmentation: ``y`` is int64
        ``[points]``, from the column ``label`` of the scans, which counts from 0. Subfolders are not classes then.
    columns
        Names of the columns of XYZ and TXT files, among ``x, y, z, nx, ny, nz, red, green, blue, intensity, label``;
        columns with other names are left out. Default: those in the first line, or x, y, z. TXT files are read if
        ``columns`` are given.
    validation
        Number of files of ``CLASS/train/*`` that are set aside as ``"valid"``, by a permutation with a fixed seed.
        Expected to be 0 if there is a folder of that name.
    shares
        Shares of ``"train"`` and ``"valid"`` if the folder has no splits. The rest is ``"test"``.
    split_seed
        Seed of that permutation. Use the same for all splits.
    task, rotate, transform
        As for :class:`ShapePoints`.
    seed
        Seed of the points and the rotations.

    Raises
    ------
    FileNotFoundError
        If the folder does not exist, or has no meshes and no scans.
    ValueError
        If files are damaged, have no label, have other channels than the first one, or are in no split or no class
        although others are (the message names them); or if an argument is out of range.

    Attributes
    ----------
    channels : tuple[str, ...]
        Names of the channels of ``x``, among red, green, blue and intensity; empty for meshes, which have no ``x``.
    """

    card = Card("your own meshes or scans", "those of your files", "all meshes and scans in the folder")

    channels: tuple[str, ...] = ()

    _needs_split = False
    _values: NDArray[np.float32]

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        points: int = 1024,
        labels: Mapping[str, str | float] | list[str] | None = None,
        columns: Sequence[str] | None = None,
        validation: int = 0,
        shares: Sequence[float] = (0.8, 0.1),
        split_seed: int = 0,
        task: Task = "classification",
        rotate: Rotate = "none",
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(MeshFolder.__init__, locals())
        check_counts(points=points)
        require(columns is None or {*POSITION} <= {*columns}, "columns", "x, y and z, and others", columns)
        require(labels != [], "labels", "at least one class of points", "an empty list")
        parts, labels = (labels, None) if isinstance(labels, list) else (None, labels)  # of points, of files
        place = Path(root)
        half = half_of(split)
        with contextlib.ExitStack() as stack:
            found = _list_shapes(place, stack, (*MESH_SUFFIXES, *SCAN_SUFFIXES, *([".txt"] if columns else [])))
            meshes = sorted(found, key=str)
            splits = split_folders(meshes)
            classless = bool(splits) and all(len(path.parts) == 1 for path, _ in splits.values())
            needed = "those of the files or, in a list, the classes of points, since files train/* are in no class"
            require(parts or labels or not classless, "labels", needed, labels)
            given = bool(splits) or self._needs_split
            _check_layout(place, meshes, splits, labels is None)
            meshes = [*splits] if given else meshes
            kinds = _kinds(place, meshes, labels, splits)
            classes = sorted({kind for kind in kinds if isinstance(kind, str)})
            numbers = np.array([classes.index(kind) if isinstance(kind, str) else 0 for kind in kinds], dtype=np.int64)
            if any(part == "valid" for _, part in splits.values()):
                require(not validation, "validation", "0 for a folder with a split of its own", validation)
                half = split
            if given:
                chosen = np.flatnonzero([splits[path][1] == half for path in meshes])
            else:
                chosen = seeded(numbers, split, shares, split_seed) if meshes else np.arange(0)
            if not len(chosen):
                where = f"CLASS/{half}/*" if given else "CLASS/* or *"
                suffixes = ", ".join((*MESH_SUFFIXES, *SCAN_SUFFIXES))
                raise FileNotFoundError(f"there are no meshes or scans {where} ({suffixes}) in {str(place)!r}")
            entries = [found[meshes[i]] for i in chosen]
            keys = seed, SPLITS.index(half if given else split)
            sampled = _sample(entries, points, keys, columns, len(parts or ()))
        options: dict[str, Any] = {"task": task, "rotate": rotate, "seed": seed, "transform": transform}
        if parts:
            kinds_of_points = np.stack([shape.pop(LABEL) for shape in sampled]).astype(np.int64)
            numbers, classes, chosen = kinds_of_points, parts, np.arange(len(chosen))
        pos, normal = (np.stack([shape[name] for shape in sampled]) for name in ("pos", "normal"))
        targets = None if classes else [[cast(float, kinds[i])] for i in chosen]
        super().__init__(pos, normal, numbers[chosen], classes or [_name(place)], targets=targets, **options)
        self.channels = tuple(name for name in CHANNELS if name in sampled[0])
        if self.channels:
            self._values = np.stack([[shape[name] for name in self.channels] for shape in sampled]).swapaxes(1, 2)
        self._files = [name for name, _ in entries]
        if given and half != "valid":
            self._indices = hold_out(len(entries), validation, split)
        got = f"{validation}; use shares instead"
        require(given or not validation, "validation", "0 for a folder without CLASS/train/*", got)

    def _make(self, index: int) -> Data:
        data = super()._make(index)
        if self.channels:
            data.x = torch.from_numpy(self._values[index].astype(np.float32))
        return data


class ModelNet(MeshFolder):
    """ModelNet10 or ModelNet40: 3,991 + 908 or 9,843 + 2,468 CAD models of 10 or 40 kinds of furniture and objects.

    Items are as for :class:`MeshFolder`. The z axis points up; ModelNet10 is aligned, ModelNet40 only partly. All
    meshes are read and sampled when the data set is constructed, which takes some minutes for ModelNet40.

    Parameters
    ----------
    root
        Folder that contains ``ModelNet10.zip`` or ``ModelNet40.zip``, or the unpacked folder of that name.
    split
        ``"train"``, ``"test"`` (official) or ``"valid"``.
    version
        10 or 40.
    points, validation, task, rotate, seed, transform
        As for :class:`MeshFolder`.
    download
        Whether to download the archive into the root if neither the archive nor the folder exists. Nothing is
        downloaded otherwise.
    verify
        Whether to compare the number of shapes with the official one. If False, any files in the same layout are read.
    """

    card = Card(
        'Z. Wu et al., "3D ShapeNets", CVPR 2015',
        "academic research; the models belong to their authors",
        "ModelNet10: 3,991 + 908 meshes, 10 classes; ModelNet40: 9,843 + 2,468, 40 classes",
    )

    _needs_split = True

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        version: Literal[10, 40] = 10,
        points: int = 1024,
        validation: int = 0,
        task: Task = "classification",
        rotate: Rotate = "none",
        seed: int = 0,
        download: bool = False,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(ModelNet.__init__, locals())
        release = _RELEASES[version]
        folder, name = Path(root) / f"ModelNet{version}", f"ModelNet{version}.zip"
        archive = next((path for path in Path(root).glob("*.*") if path.name.lower() == name.lower()), None)
        if download and archive is None and not folder.is_dir():
            fetch(release, root, name)
        place = folder if folder.is_dir() else archive or release.locate(root, name)
        options: dict[str, Any] = {"points": points, "validation": validation, "task": task}
        super().__init__(place, split, rotate=rotate, seed=seed, transform=transform, **options)
        if verify:
            half = half_of(split)
            release.check_count(place, len(self._labels), _COUNTS[version][half], f"shapes for {half}")


def _sample(
    entries: Sequence[_Entry], points: int, keys: tuple[int, ...], columns: Sequence[str] | None, classes: int
) -> list[dict[str, NDArray[Any]]]:
    """Read all files and take points of them; raise one error for those that cannot be used.

    Returns ``pos`` and ``normal`` ``[points, 3]`` and further columns ``[points]`` of each. The column of labels is
    required, and checked, if there are ``classes`` of points.
    """
    sampled: list[dict[str, NDArray[Any]]] = []
    broken = []
    for number, (name, read) in enumerate(progress(entries, "reading shapes", len(entries))):
        stream = frozen_stream(*keys, number)
        try:
            data = read()
            if is_scan(name, data):
                shape = _draw(read_scan(name, data, columns), points, stream)
            else:
                shape = dict(
                    zip(("pos", "normal"), sample_surface(*read_mesh(name, data), points, stream), strict=True)
                )
                shape["pos"] = normalize_cloud(shape["pos"])
            labels = shape.get(LABEL, np.array([np.nan])) if classes else np.zeros(1)
            right = (labels == np.clip(np.rint(labels), 0, max(classes - 1, 0))).all()
            got = f"numbers in {labels.min():g} .. {labels.max():g}" if LABEL in shape else _NO_LABEL
            require(right, name, f"a column label of integers in 0 .. {classes - 1}", got)
            first = {*sampled[0]} - {LABEL} if sampled else {*shape} - {LABEL}
            expected = ", ".join(sorted(first - {"pos", "normal"})) or "no channels"
            found = ", ".join(sorted({*shape} - {"pos", "normal", LABEL})) or "none"
            require({*shape} - {LABEL} == first, name, f"{expected} as in the first file", found)
        except (ValueError, OSError) as error:  # raised by the file, by the archive or for a broken link
            broken.append(str(error))
        else:
            sampled.append({key: values.astype(np.float32) for key, values in shape.items()})
    if broken:
        raise ValueError(f"{len(broken)} of {len(entries)} files cannot be used: {listed(broken, '; ')}")
    return sampled


def _draw(scan: dict[str, NDArray[Any]], points: int, stream: np.random.RandomState) -> dict[str, NDArray[Any]]:
    """Draw points of a scan, and estimate their normals if it has none."""
    pos = np.stack([scan.pop(axis) for axis in POSITION], axis=1).astype(np.float64)
    chosen = drawn(len(pos), points, stream)
    normals = [scan.pop(axis, None) for axis in NORMAL]
    kept = {name: values[chosen] for name, values in scan.items()}
    if any(axis is None for axis in normals):
        normal = estimate_normals(pos, chosen)
    else:
        normal = np.stack(normals, axis=1)[chosen]  # type: ignore[arg-type]
        length = np.linalg.norm(normal, axis=1, keepdims=True)
        normal = normal / np.where(length > 0, length, 1.0)
    return {"pos": normalize_cloud(pos[chosen]), "normal": normal, **kept}


def _list_shapes(place: Path, stack: contextlib.ExitStack, suffixes: Sequence[str]) -> dict[PurePosixPath, _Entry]:
    """Return the files with these suffixes in a folder or archive by their names in it, without hidden files."""
    entries: dict[str, _Entry]
    if place.suffix.lower() == ".zip" and place.is_file():
        archive = stack.enter_context(Archive(place, lambda problem: ValueError(f"{place} {problem}")))
        entries = {name: (f"{place}/{name}", functools.partial(archive.read, name)) for name in archive.names}
    elif place.is_dir():
        entries = {name: (str(path), path.read_bytes) for name, path in files_below(place).items()}
    else:
        raise FileNotFoundError(f"there is neither a folder nor a zip archive {str(place)!r} of meshes or scans")
    found = {PurePosixPath(name): entry for name, entry in entries.items() if not is_hidden(name)}
    return {path: entry for path, entry in found.items() if path.suffix.lower() in suffixes}


def _check_layout(place: Path, meshes: Sequence[PurePosixPath], splits: _Splits, named: bool) -> None:
    """Raise ValueError if meshes would be ignored, or if folders that are not classes would be taken for classes.

    If ``named`` is False, folders have no meaning, since the classes are given.
    """
    if other := sorted({*meshes} - {*splits}) if splits else []:
        found = "meshes in CLASS/train/* or CLASS/test/*, and meshes that are in no split"
        raise ValueError(f"{place} has {found}: {listed([str(path) for path in other])}")
    plain = {path: splits[path][0] if splits else path for path in meshes}
    places = {(len(path.parts) > 1, path.parts[:-2]): str(file) for file, path in plain.items()}
    layouts = "meshes CLASS/* or only files, or CLASS/train/* and CLASS/test/*, with all classes in one folder"
    require(not named or len(places) < 2, str(place), layouts, listed(list(places.values())))


def _name(place: Path) -> str:
    return place.resolve().name if place.is_dir() else place.stem


def _kinds(
    place: Path, meshes: Sequence[PurePosixPath], labels: Mapping[str, str | float] | None, splits: _Splits
) -> list[str | float]:
    """Return the class or target of each mesh."""
    if labels is None:
        plain = [splits[path][0] if splits else path for path in meshes]
        return [path.parts[-2] if len(path.parts) > 1 else _name(place) for path in plain]
    names, labels = [str(path) for path in meshes], {portable_name(name): kind for name, kind in labels.items()}
    for argument, one, other in (("no label", names, labels), ("no file", labels, names)):
        missing = sorted({*one} - {*other})
        require(not missing, "labels", f"one for each mesh of {place}", f"{argument} for {listed(missing)}")
    found = [labels[name] for name in names]
    of_one_kind = len({isinstance(kind, str) for kind in found}) < 2
    require(of_one_kind, "labels", "all strings (classes) or all numbers (targets)", "both")
    return found
