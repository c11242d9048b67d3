"""Photographs in color: CIFAR and PatchCamelyon."""

import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lieattn._core.checks import check_arguments
from lieattn_datasets._clouds import Card, Transform
from lieattn_datasets._download import SOURCES, fetch
from lieattn_datasets._files import Release, open_hdf5, read_hdf5
from lieattn_datasets._images import NpzImages, OfficialImages, Read
from lieattn_datasets._splits import Split, half_of, hold_out

_PIXELS = 3 * 32 * 32
_CIFAR10 = Release(
    dataset="CIFAR-10",
    origin=(
        "The official files are data_batch_1.bin .. data_batch_5.bin and test_batch.bin, unpacked from "
        "cifar-10-binary.tar.gz ('CIFAR-10 binary version', A. Krizhevsky)."
    ),
    folders=("cifar-10-batches-bin",),
    sources=SOURCES["CIFAR-10"],
)
_CIFAR100 = Release(
    dataset="CIFAR-100",
    origin=(
        "The official files are train.bin and test.bin, unpacked from cifar-100-binary.tar.gz "
        "('CIFAR-100 binary version', A. Krizhevsky)."
    ),
    folders=("cifar-100-binary",),
    sources=SOURCES["CIFAR-100"],
)
CIFAR_SUBSET = Release(
    dataset="CIFAR-10, 3,000 images",
    origin="The file is cifar10_subset.npz, the first 2,000 training and 1,000 test images of CIFAR-10.",
    digests={"cifar10_subset.npz": "content:3dbf072b05462d86e95725a7ce51af19c80c04ca22b628dfe07e77981b7411bd"},
)
_PCAM = Release(
    dataset="PatchCamelyon",
    origin=(
        "The official files are camelyonpatch_level_2_split_{train,valid,test}_{x,y}.h5, each unpacked from "
        "the .h5.gz of that name ('PatchCamelyon', B. Veeling, repository basveeling/pcam, Zenodo record "
        "2546921)."
    ),
    digests={
        "camelyonpatch_level_2_split_train_x.h5": "md5:01844da899645b4d6f84946d417ba453",
        "camelyonpatch_level_2_split_train_y.h5": "md5:0781386bf6c2fb62d58ff18891466aca",
        "camelyonpatch_level_2_split_valid_x.h5": "md5:81cf9680f1724c40673f10dc88e909b1",
        "camelyonpatch_level_2_split_valid_y.h5": "md5:94d8aacc249253159ce2a2e78a86e658",
        "camelyonpatch_level_2_split_test_x.h5": "md5:2614b2e6717d6356be141d9d6dbfcb7e",
        "camelyonpatch_level_2_split_test_y.h5": "md5:11ed647efe9fe457a4eb45df1dba19ba",
    },
    folders=("pcam",),
    sources=SOURCES["PatchCamelyon"],
)


class CIFAR10(OfficialImages):
    """CIFAR-10: 50,000 + 10,000 color photographs of 32 x 32, 10 classes, from the binary version.

    The Python version of the same images consists of pickles, which can run code, and is not read.

    Parameters
    ----------
    root
        Folder that contains ``data_batch_1.bin`` .. ``data_batch_5.bin`` and ``test_batch.bin``, directly or in its
        subfolder ``cifar-10-batches-bin``.
    split
        ``"train"``, ``"test"`` (the official halves) or ``"valid"``.
    validation
        Number of the 50,000 training images that are set aside as ``"valid"``, by a permutation with a fixed seed;
        ``"train"`` contains the others. ``validation=10_000`` for both splits gives the usual
        40,000 / 10,000 / 10,000.
    download
        Whether to download the archive if files of the half are missing, compare its digest, and unpack it into the
        subfolder ``cifar-10-batches-bin`` of the root. Nothing is downloaded otherwise.
    verify
        Whether the number of images must be that of the official files. (Only the archive has a published digest.) If
        False, any files in the same format are read.
    transform
        Function that is applied to each new ``Data``.
    """

    card = Card(
        'A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009',
        "no license stated; citation requested",
        "50,000 + 10,000 images, 32 x 32, RGB, uint8, 10 or 100 (fine) classes",
    )

    _release, _counts = _CIFAR10, {"train": 50_000, "test": 10_000}
    _format = 10, 3
    _batches: ClassVar[dict[str, tuple[str, ...]]] = {
        "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test": ("test_batch.bin",),
    }

    def _read(self, root: str | Path, part: str, verify: bool, download: bool) -> Read:
        if download:
            fetch(self._release, root, *self._batches[part])
        paths = [self._release.locate(root, name) for name in self._batches[part]]
        rows = np.concatenate([self._rows(path) for path in paths])
        # The red, the green and the blue plane follow the label, each of them row by row.
        images = rows[:, -_PIXELS:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return paths[-1].parent, np.ascontiguousarray(images), rows[:, -1 - _PIXELS]

    def _rows(self, path: Path) -> NDArray[np.uint8]:
        """Return the images of a file, ``[images, labels + 3072]``. The last label is the one that is used."""
        with self._release.open(path) as stream:
            content = stream.read()
        classes = self._format[0]
        size = _PIXELS + (1 if classes == 10 else 2)
        whole = content and len(content) % size == 0
        self._release.require(whole, path, f"has {len(content)} bytes, expected a multiple of {size}, one row each")
        rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, size)
        highest = rows[:, -1 - _PIXELS].max()
        self._release.require(highest < classes, path, f"has labels up to {highest}, expected 0 .. {classes - 1}")
        return rows


class CIFAR100(CIFAR10):
    """CIFAR-100: 50,000 + 10,000 color photographs of 32 x 32, 100 fine classes.

    Parameters
    ----------
    root
        Folder that contains ``train.bin`` and ``test.bin``, directly or in its subfolder ``cifar-100-binary``.
    split, validation, download, verify, transform
        As for :class:`CIFAR10`; files are downloaded into ``cifar-100-binary``.
    """

    card = CIFAR10.card

    _release = _CIFAR100
    _format = 100, 3
    _batches: ClassVar[dict[str, tuple[str, ...]]] = {"train": ("train.bin",), "test": ("test.bin",)}


class CIFAR10Subset(NpzImages):
    """A subset of CIFAR-10: its first 2,000 training and first 1,000 test images, 32 x 32 in color.

    Parameters
    ----------
    root
        Folder with ``cifar10_subset.npz``.
    split
        ``"train"``, ``"test"`` (as in CIFAR-10) or ``"valid"``.
    validation
        As for :class:`CIFAR10`, of the 2,000 training images.
    verify, transform
        As for :class:`FashionMNIST900`.
    """

    card = Card(
        "CIFAR-10",
        "research use; not to be redistributed with a package",
        "its first 2,000 training and first 1,000 test images",
    )

    _release, _format, _shape = CIFAR_SUBSET, (10, 3), (32, 32, 3)
    _counts: ClassVar[dict[str, int]] = {"train": 2_000, "test": 1_000}

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        validation: int = 0,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(CIFAR10Subset.__init__, locals())
        self._load(root, half_of(split), verify, transform)
        self._indices = hold_out(len(self), validation, split)


class PatchCamelyon(OfficialImages):
    """PatchCamelyon: 262,144 / 32,768 / 32,768 patches of lymph node sections, 96 x 96 in color.

    The label is 1 if the central 32 x 32 pixels contain at least one pixel of tumor tissue, and 0 otherwise.

    The images stay on disk and are read one at a time; each worker process of a loader opens the file itself. Each
    image has 9,216 points. torchvision follows references in these files to other files, and to filters in libraries on
    the disk. This reader refuses them.

    Parameters
    ----------
    root
        Folder that contains the official ``.h5`` files, directly or in its subfolder ``pcam``.
    split
        ``"train"``, ``"valid"`` or ``"test"``: the official split.
    download
        Whether to download missing files of the split, and unpack them into the subfolder ``pcam`` of the root: 6.4 GB
        for training, 0.8 GB for each of the other splits. Nothing is downloaded otherwise.
    verify
        Whether to compare digests (once per process, since the training images have 7 GB) and the number of images with
        the official files. If False, any files in the same format are read.
    transform
        Function that is applied to each new ``Data``.
    """

    card = Card(
        "repository basveeling/pcam, Zenodo record 2546921; from Camelyon16",
        "CC0",
        "262,144 / 32,768 / 32,768 patches, 96 x 96, RGB, uint8, 2 classes",
    )

    _release, _format = _PCAM, (2, 3)
    _counts: ClassVar[dict[str, int]] = {"train": 262_144, "valid": 32_768, "test": 32_768}

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        download: bool = False,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(PatchCamelyon.__init__, locals())
        self._load(root, split, verify, transform, download)

    def _read(self, root: str | Path, part: str, verify: bool, download: bool) -> Read:
        names = [f"camelyonpatch_level_2_split_{part}_{key}.h5" for key in "xy"]
        if download:
            fetch(_PCAM, root, *names)
        path, label_path = (_PCAM.locate(root, name) for name in names)
        for each in (path, label_path) if verify else ():
            _PCAM.check_file(each)
        images, (labels,) = H5Images(path), read_hdf5(_PCAM, label_path, {"y": "integer [images, ...]"})
        right = images.shape[1:] == (96, 96, 3) and images.dtype == np.uint8
        problem = f"has {images.dtype} images of shape {images.shape[1:]}, expected uint8 of (96, 96, 3)"
        _PCAM.require(right, path, problem)
        problem = f"has {labels.size} labels, but there are {images.shape[0]} images"
        _PCAM.require(labels.size == len(labels) == images.shape[0], label_path, problem)
        return path, images, _PCAM.check_indices(label_path, "y", labels.reshape(-1), 2)


class H5Images:
    """The data set ``x`` of an HDF5 file, which is indexed like an array and read on access.

    Open files cannot be pickled or used after a fork, so each process opens its own.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: int | None = None
        self._source: Any = None
        source = self._open()
        self.shape: tuple[int, ...] = tuple(source.shape)
        self.dtype: np.dtype[Any] = source.dtype

    def __getitem__(self, index: Any) -> NDArray[Any]:
        try:
            return np.asarray(self._open()[index])
        except OSError as error:
            raise _PCAM.damaged(self._path, f"cannot be read at image {index} ({error})") from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None, "_source": None}

    def _open(self) -> Any:
        if self._process != os.getpid():
            self._source = open_hdf5(_PCAM, self._path, "x")
            self._process = os.getpid()
        return self._source
