"""Shapes as clouds of surface points."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments, check_counts
from lieattn_datasets._checks import class_array, dtype_of_places, real_array, require
from lieattn_datasets._clouds import Card, LabeledClouds, Transform
from lieattn_datasets._files import Release, read_hdf5, read_text
from lieattn_datasets._meshes import normalize_cloud
from lieattn_datasets._splits import SPLITS, Split, frozen_stream, half_of, hold_out
from lieattn_datasets._transforms import rotation_matrix

Rotate = Literal["none", "z", "SO3"]
Task = Literal["classification", "normals"]

TINY = Release(
    dataset="ModelNet10, 600 shapes",
    origin="The file is modelnet10_tiny.npz, 60 shapes of each class of ModelNet10 (Wu et al., CVPR 2015).",
    computed=("points",),
    digests={"modelnet10_tiny.npz": "content:dcc052d3c13f30e0adbd529f8d1acbccd642ee0e59a9cf012f1ca34f76a8254d"},
)
ADRENAL = Release(
    dataset="AdrenalMNIST3D",
    origin="The file is adrenalmnist3d.npz, all of AdrenalMNIST3D with packed bits (MedMNIST v2, Yang et al., 2023).",
    digests={"adrenalmnist3d.npz": "content:6df48286c582d7c89e6d72d2aec758ccd67cfba43db27eb1f57e97d598a03e1a"},
)
MED = Release(
    dataset="MedMNIST",
    origin="The files are those of MedMNIST v2 (Yang et al., 2023), medmnist.com, such as bloodmnist.npz.",
)

SCANS = Release(
    dataset="ScanObjectNN",
    origin="The files are those of h5_files.zip (Uy et al., ICCV 2019), hkust-vgd.github.io/scanobjectnn.",
)
_SCANNED = "bag bin box cabinet chair desk display door shelf table bed pillow sink sofa toilet".split()
# Classes and labels of an image of the data sets of MedMNIST, by the name of the file without its size.
_MEDICAL = {"chestmnist": (2, 14)} | {
    name: (classes, 1)
    for classes, names in {
        2: "pneumoniamnist breastmnist nodulemnist3d adrenalmnist3d vesselmnist3d synapsemnist3d",
        3: "fracturemnist3d",
        4: "octmnist",
        5: "retinamnist",
        7: "dermamnist",
        8: "bloodmnist tissuemnist",
        9: "pathmnist",
        11: "organamnist organcmnist organsmnist organmnist3d",
    }.items()
    for name in names.split()
}
_VARIANTS = {
    "OBJ": "",
    "PB_T25": "_augmented25_norot",
    "PB_T25_R": "_augmented25rot",
    "PB_T50_R": "_augmentedrot",
    "PB_T50_RS": "_augmentedrot_scale75",
}


class ShapePoints(LabeledClouds):
    """Labeled clouds of surface points, with normals if they are known.

    For ``task="classification"`` an item has ``pos`` float32 ``[points, 3]``, ``normal`` float32 ``[points, 3]``
    (unit vectors, if known) and ``y`` int64 ``[1]``, or ``[points]`` if the points have labels (segmentation). For
    ``task="normals"`` it has ``pos``, ``y`` float32 ``[points, 3]`` (the normals, to be predicted) and ``label`` int64
    ``[1]`` or ``[points]``. Shapes that are rotated also have their pose, ``rotation`` float32 ``[1, 3, 3]``. Positions
    stay in float64 if float32 would round some by more than 1e-5 of the extent of their shape, far from the origin.

    Parameters
    ----------
    pos
        Positions ``[shapes, points, 3]``.
    normal
        Unit normals ``[shapes, points, 3]``, or None.
    labels
        Class of each shape, integers ``[shapes]``, or of each point, ``[shapes, points]``.
    classes
        Names of the classes.
    targets
        Numbers ``[shapes, targets]``, which replace the class as ``y`` float32 ``[1, targets]``; not for
        ``task="normals"``.
    task
        ``"classification"`` or ``"normals"``.
    rotate
        ``"z"`` or ``"SO3"`` rotates each shape by its own fixed rotation, about the z axis or about any axis. The
        protocols of the literature, z/SO(3) and SO(3)/SO(3), test on ``"SO3"``. For new rotations on each access in
        training use :class:`RandomRotateFields`.
    seed
        Seed of the rotations.
    transform
        Function that is applied to each new ``Data``.
    """

    vectors: tuple[str, ...] = ("pos", "normal")

    def __init__(
        self,
        pos: ArrayLike,
        normal: ArrayLike | None,
        labels: ArrayLike,
        classes: Sequence[str],
        *,
        targets: ArrayLike | None = None,
        task: Task = "classification",
        rotate: Rotate = "none",
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(ShapePoints.__init__, locals())
        frozen_stream(seed)
        self._pos: NDArray[Any] = real_array("pos", pos)
        self._normal = None if normal is None else real_array("normal", normal).astype(np.float32)
        self._labels = class_array("labels", labels)
        self._targets = None if targets is None else real_array("targets", targets)
        shape = self._pos.shape
        right = len(shape) == 3 and shape[2] == 3 and self._labels.shape in (shape[:1], shape[:2])
        expected = "[shapes, points, 3] and [shapes] or [shapes, points]"
        require(right, "pos, labels", expected, f"{list(shape)} and {list(self._labels.shape)}")
        if self._normal is not None:
            require(self._normal.shape == shape, "normal", f"{list(shape)} like pos", list(self._normal.shape))
        low, high = self._labels.min(initial=0), self._labels.max(initial=-1)
        expected = f"integers in 0 .. {len(classes) - 1}"
        require(low >= 0 and high < len(classes), "labels", expected, f"{low} .. {high}")
        if self._targets is not None:
            right = self._targets.ndim == 2 and len(self._targets) == len(self._pos)
            require(right, "targets", f"[{shape[0]}, targets]", list(self._targets.shape))
            require(task != "normals", "targets", "None for task='normals', which predicts the normals", "numbers")
        has_normals = task != "normals" or self._normal is not None
        require(has_normals, "task", "'classification' for shapes without normals", "'normals'")
        extents = np.abs(self._pos - self._pos[:, :1]).max(axis=(1, 2), initial=0.0)
        self._pos = self._pos.astype(dtype_of_places(self._pos, extents))
        super().__init__(shape[0], transform)
        self.classes, self.num_classes = tuple(classes), len(classes)
        self.task, self.rotate, self._seed = task, rotate, seed
        if task == "normals":
            self.vectors = ("pos", "y")

    def _make(self, index: int) -> Data:
        turn = self._rotation(index)
        pos = torch.from_numpy((self._pos[index] @ turn.T).astype(self._pos.dtype))
        label = torch.from_numpy(np.atleast_1d(self._labels[index]).copy())
        if self._targets is not None:
            label = torch.from_numpy(self._targets[index : index + 1].astype(np.float32))
        data = Data(pos=pos, y=label)
        if self._normal is not None:
            normal = torch.from_numpy((self._normal[index] @ turn.T).astype(np.float32))
            normals = self.task == "normals"
            data = Data(pos=pos, y=normal, label=label) if normals else Data(pos=pos, normal=normal, y=label)
        if self.rotate != "none":
            data.rotation = torch.from_numpy(turn[None].astype(np.float32))
        return data

    def _rotation(self, index: int) -> NDArray[np.float64]:
        if self.rotate == "none":
            return np.eye(3)
        quaternion = frozen_stream(self._seed, index).standard_normal(4)
        if self.rotate == "z":
            quaternion[1:3] = 0.0
        return rotation_matrix(quaternion)

    def __repr__(self) -> str:
        known = f"{self.num_classes} classes" if self._targets is None else f"y [1, {self._targets.shape[1]}]"
        return f"{type(self).__name__}({len(self)} shapes of {self._pos.shape[1]} points, {known})"


class ModelNet10Tiny(ShapePoints):
    """600 shapes of ModelNet10, 40 + 20 of each class, as points on the surface of 30 x 30 x 30 voxels.

    The shapes are coarse and have no normals; the data set is meant for quick trials on real shapes. The third axis
    points up. Results are not comparable with those on ModelNet10. The terms of ModelNet allow only academic research.

    Parameters
    ----------
    root
        Folder with ``modelnet10_tiny.npz``.
    split
        ``"train"`` (400), ``"test"`` (200; both from the official halves) or ``"valid"``.
    points
        Number of points of each shape, at most 512. Default: all.
    validation
        Number of training shapes that are set aside as ``"valid"``, by a permutation with a fixed seed.
    rotate, seed, transform
        As for :class:`ShapePoints`.
    verify
        Whether to compare the digest. If False, any file in the same format is read.
    """

    card = Card(
        "ModelNet10, voxels of 30 x 30 x 30",
        "academic research; not to be redistributed",
        "400 + 200 shapes, 512 surface voxels each, 10 classes, no normals",
    )

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        points: int | None = None,
        validation: int = 0,
        rotate: Rotate = "none",
        seed: int = 0,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(ModelNet10Tiny.__init__, locals())
        half = half_of(split)
        part = f"split_{half}"
        expected = {
            "points": "uint8 [shapes, points, 3]",
            "label": "integer [shapes]",
            "classes": "text [classes]",
            part: "integer [chosen]",
        }
        path, (voxels, labels, names, chosen) = TINY.read(root, expected, verify)
        labels = TINY.check_indices(path, "label", labels, len(names))
        chosen = TINY.check_indices(path, part, chosen, len(voxels))
        found = f"has points {list(voxels.shape)} and {len(chosen)} shapes for {half}"
        TINY.require(voxels.size and len(chosen), path, found)
        right = points is None or 1 <= points <= voxels.shape[1]
        require(right, "points", f"None or an integer in 1 .. {voxels.shape[1]}", points)
        pos = np.stack([normalize_cloud(cloud[:points]) for cloud in voxels[chosen]])
        super().__init__(pos, None, labels[chosen], read_text(names), rotate=rotate, seed=seed, transform=transform)
        self._indices = hold_out(len(chosen), validation, split)


class AdrenalMNIST3D(ShapePoints):
    """Adrenal glands from CT scans, normal or with hyperplasia, as points on the surface of a mask.

    The splits have 1,188 / 98 / 298 glands. Size is relevant for the classification, so clouds are not scaled to the
    unit sphere: the mean of a cloud is the origin, and one unit is half the side of the 28 x 28 x 28 grid. The glands
    are oriented as in the body, so rotate them to test equivariance. A fifth to a quarter of each split has
    hyperplasia, so accuracy alone is not informative.

    Parameters
    ----------
    root
        Folder with ``adrenalmnist3d.npz``.
    split
        ``"train"``, ``"valid"`` or ``"test"``: the official split.
    points
        Number of points per gland, drawn from its surface voxels, without repetition if there are enough.
    voxels
        Whether items are whole masks instead of points, for networks on grids: ``x`` float32 ``[voxels, 1]``, 1 in the
        gland and 0 elsewhere, for all voxels in raster order, with ``pos`` relative to the center of the grid and
        ``grid`` int64 ``[1, 3]`` (depth, height, width). The third coordinate increases with the layer, and the second
        decreases with the row.
    rotate, transform
        As for :class:`ShapePoints`; voxels cannot be rotated.
    seed
        Seed of the points and the rotations.
    verify
        Whether to compare the digest. If False, any file in the same format is read.
    """

    card = Card(
        'J. Yang et al., "MedMNIST v2", Scientific Data 2023',
        "CC BY 4.0",
        "1,584 binary masks of 28 x 28 x 28, 2 classes",
    )

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        points: int = 256,
        voxels: bool = False,
        rotate: Rotate = "none",
        seed: int = 0,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(AdrenalMNIST3D.__init__, locals())
        check_counts(points=points)
        upright = rotate == "none" or not voxels
        require(upright, "rotate", "'none' for voxels, whose lattice stays upright", repr(rotate))
        key = "val" if split == "valid" else split
        expected = {
            f"voxels_packed_{key}": "uint8 [masks, bytes]",
            f"label_{key}": "integer [masks]",
            "classes": "text [classes]",
            "voxel_shape": "integer [3]",
        }
        path, (packed, labels, names, size) = ADRENAL.read(root, expected, verify)
        labels = ADRENAL.check_indices(path, f"label_{key}", labels, len(names))
        cells = math.prod(size.tolist())
        right = len(packed) and size.min() >= 1 and 0 <= packed.shape[1] * 8 - cells < 8
        found = f"has voxels {list(packed.shape)} for masks of {size.tolist()}"
        ADRENAL.require(right, path, f"{found}, expected [masks, bits / 8] with at least one mask")
        masks = np.unpackbits(packed, axis=1)[:, :cells].reshape(-1, *size).astype(bool)
        empty = np.flatnonzero(~masks.any(axis=(1, 2, 3))).tolist()
        ADRENAL.require(not empty, path, f"has an empty mask, number {min(empty, default=None)} of {key}")
        options: dict[str, Any] = {"rotate": rotate, "seed": seed, "transform": transform}
        self._images: NDArray[np.bool_] | None = None
        if voxels:
            super().__init__(np.zeros((len(masks), 1, 3)), None, labels, read_text(names), **options)
            self._images = masks.transpose(0, 3, 2, 1)[:, :, ::-1]
            lattice = _raster_positions(self._images.shape[1:]) / (max(size) / 2)
            self._pos = np.broadcast_to(lattice.astype(np.float32), (len(masks), *lattice.shape))
            return
        key_seed = SPLITS.index(split)
        clouds = [surface_voxels(mask, points, frozen_stream(seed, key_seed, n)) for n, mask in enumerate(masks)]
        pos = np.stack([(cloud - cloud.mean(axis=0)) / (max(size) / 2) for cloud in clouds])
        super().__init__(pos, None, labels, read_text(names), **options)

    def _make(self, index: int) -> Data:
        data = super()._make(index)
        if self._images is not None:
            data.x = torch.from_numpy(self._images[index].astype(np.float32).reshape(-1, 1))
            data.grid = torch.tensor([self._images.shape[1:]])
        return data


class ScanObjectNN(ShapePoints):
    """Objects in scans of rooms, of 15 classes, partly hidden and with points of what is around them.

    Clouds are normalized: the mean is the origin and the largest distance from it is 1. The third axis points up (in
    the files, the second), so ``rotate="z"`` turns objects about the vertical. There are no normals. The splits have
    2,309 / 581 objects, and 11,416 / 2,882 in variants with perturbations.

    Parameters
    ----------
    root
        Folder with ``main_split`` and ``main_split_nobg``, or the folder with the files themselves, such as
        ``split1``, one of the four further splits.
    split
        ``"train"``, ``"test"``, or ``"valid"`` with ``validation``.
    variant
        ``"OBJ"``, or perturbed boxes around the objects: shifted by up to 25 % (``"PB_T25"``), rotated too
        (``"PB_T25_R"``), shifted by up to 50 % and rotated (``"PB_T50_R"``), and scaled (``"PB_T50_RS"``, the hardest).
    background
        Whether clouds contain points around the object: of ``"OBJ"``, True is the benchmark ``OBJ_BG``, False
        ``OBJ_ONLY``.
    per
        What has labels: each ``"cloud"``, or each ``"point"``, 1 on the object and 0 around it.
    points
        Number of points of each object, at most 2,048, which are in random order in the files.
    validation
        Number of training objects that are set aside as ``"valid"``, by a permutation with a fixed seed.
    rotate, seed, transform
        As for :class:`ShapePoints`.
    """

    card = Card(
        'M. A. Uy et al., "Revisiting Point Cloud Classification", ICCV 2019',
        "those of the project page, agreed to before the download",
        "2,890 objects of 15 classes, or 14,298 perturbed ones, of 2,048 points",
    )

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        variant: Literal["OBJ", "PB_T25", "PB_T25_R", "PB_T50_R", "PB_T50_RS"] = "OBJ",
        background: bool = True,
        per: Literal["cloud", "point"] = "cloud",
        points: int = 1024,
        validation: int = 0,
        rotate: Rotate = "none",
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(ScanObjectNN.__init__, locals())
        require(background or per == "cloud", "per", "'cloud' for objects without background", repr(per))
        folder = "main_split" if background else "main_split_nobg"
        half = "training" if half_of(split) == "train" else "test"
        release = replace(SCANS, folders=(folder, f"h5_files/{folder}"))
        path = release.locate(root, f"{half}_objectdataset{_VARIANTS[variant]}.h5")
        right = path.parent.resolve().name.endswith("_nobg") != background
        require(right, "background", f"{not background} for files in {str(path.parent)!r}", background)
        expected = {"data": "number [objects, points, 3]", "label": "integer [objects]"}
        if per == "point":
            expected["mask"] = "integer [objects, points]"
        pos, labels, *mask = read_hdf5(release, path, expected)
        release.require(pos.size, path, f"has no points, but data {list(pos.shape)}")
        require(1 <= points <= pos.shape[1], "points", f"an integer in 1 .. {pos.shape[1]}", points)
        labels = release.check_indices(path, "label", labels, len(_SCANNED))
        pos = np.stack([normalize_cloud(cloud[:points]) for cloud in pos])
        pos = np.stack([pos[..., 0], -pos[..., 2], pos[..., 1]], axis=-1)
        names = _SCANNED
        if mask:  # of a file: -1 around the object
            labels, names = (mask[0][:, :points] != -1).astype(np.int64), ["background", "object"]
        super().__init__(pos, None, labels, names, rotate=rotate, seed=seed, transform=transform)
        self._indices = hold_out(len(pos), validation, split)


class MedMNIST(LabeledClouds):
    """Medical images or volumes with classes or several labels: any file of MedMNIST, of any size.

    An item has the intensities ``x`` float32 ``[points, channels]`` on [0, 1] in raster order, the coordinates ``pos``
    in pixels, relative to the center, and ``grid`` int64 ``[1, 2]`` (height, width) or ``[1, 3]``. The axes of volumes
    are those of the file. ``y`` int64 is the class ``[1]`` or, of ChestMNIST, 1 for each finding that is present and 0
    for the others, ``[1, labels]``. With ``PointSetClassifier(network, classes=dataset.num_classes,
    labels=dataset.num_labels)`` the loss of such labels is the binary cross entropy of the difference of two logits.

    Parameters
    ----------
    root
        Folder with the file.
    name
        Name of the file without ``.npz``: ``"bloodmnist"``, ``"chestmnist"``, ``"organmnist3d_64"``, ...
    split
        ``"train"``, ``"valid"`` or ``"test"``: the official split.
    transform
        Function that is applied to each new item.

    Attributes
    ----------
    num_classes, num_labels : int
        Number of classes, for each label if there are several, and number of labels of an item. They are those of the
        data set that the file is named after; of a file with another name, they are counted in its training set.
    """

    card = Card(
        'J. Yang et al., "MedMNIST v2", Scientific Data 2023',
        "CC BY 4.0; DermaMNIST CC BY-NC 4.0",
        "12 sets of images of 28 x 28 to 224 x 224, and 6 of volumes of 28 x 28 x 28 or 64 x 64 x 64",
    )

    def __init__(
        self, root: str | Path, name: str = "bloodmnist", split: Split = "train", *, transform: Transform | None = None
    ) -> None:
        check_arguments(MedMNIST.__init__, locals())
        key = "val" if split == "valid" else split
        path = MED.locate(root, f"{name}.npz")
        kinds = {f"{key}_images": "uint8 [images, ...]", f"{key}_labels": "integer [images, labels]"}
        images, labels, known = MED.read_npz(path, {**kinds, "train_labels": "integer [items, labels]"})
        color = images.ndim == 4 and images.shape[3] == 3
        right = images.ndim in (3, 4) and images.size and labels.size
        MED.require(right, path, f"has {key}_images {list(images.shape)}, which are no images or volumes")
        self.num_labels = labels.shape[1]
        kind = re.sub(r"_\d+$", "", name)
        counted = 2 if self.num_labels > 1 else max(int(known.max(initial=0)) + 1, 2)
        self.num_classes, expected = _MEDICAL.get(kind, (counted, self.num_labels))
        right = self.num_labels == expected
        MED.require(right, path, f"has {self.num_labels} labels of each image, and {kind} has {expected}")
        labels = MED.check_indices(path, f"{key}_labels", labels, self.num_classes)
        super().__init__(len(images), transform)
        self._labels = labels if self.num_labels > 1 else labels[:, 0]
        self._images = images if color else images[..., None]
        sides = self._images.shape[1:-1]
        flat = _raster_positions((1, *sides))[:, :2] if len(sides) == 2 else _raster_positions(sides)
        self._pos, self._grid = torch.from_numpy(flat.astype(np.float32)), torch.tensor([sides], device="cpu")

    def _make(self, index: int) -> Data:
        image = self._images[index]
        x = torch.from_numpy(image.reshape(-1, image.shape[-1]).astype(np.float32) / np.float32(255))
        y = torch.tensor(self._labels[index], device="cpu")[None]
        return Data(x=x, pos=self._pos.clone(), grid=self._grid.clone(), y=y)


def _raster_positions(sides: Sequence[int]) -> NDArray[np.float64]:
    """Return the centers of voxels ``[depth * height * width, 3]`` in raster order.

    They are relative to the center of the grid, in units of voxels.
    """
    depth, height, width = (np.arange(side) - (side - 1) / 2 for side in sides)
    z, y, x = np.meshgrid(depth, -height, width, indexing="ij")
    return np.stack([x, y, z], axis=-1).reshape(-1, 3)


def surface_voxels(mask: NDArray[np.bool_], points: int, stream: np.random.RandomState) -> NDArray[np.float64]:
    """Draw indices ``[points, 3]`` of filled voxels with at least one empty voxel among their six neighbors.

    They are drawn without repetition if there are enough. Otherwise all are returned, and some are repeated.
    """
    framed = np.pad(mask, 1)
    inner = np.ones_like(mask)
    for axis in range(3):
        for step in (-1, 1):
            inner &= np.roll(framed, step, axis)[1:-1, 1:-1, 1:-1]
    places = np.argwhere(mask & ~inner).astype(np.float64)
    return places[drawn(len(places), points, stream)]


def drawn(size: int, count: int, stream: np.random.RandomState) -> NDArray[np.int64]:
    """Return random indices below ``size``, without repetition if there are enough, otherwise all and some again."""
    order = stream.permutation(size)
    return np.concatenate([order[:count], stream.randint(size, size=max(count - size, 0))])
