"""PatchCamelyon, read from its HDF5 files image by image.

torchvision follows references in these files to other files, and to filters in libraries on the disk. This reader
refuses them.
"""

import math
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lieattn_datasets._archives import MOST_BYTES
from lieattn_datasets._checks import check_arguments
from lieattn_datasets._download import SOURCES, fetch
from lieattn_datasets._files import Release, check_choice, check_count
from lieattn_datasets._images import ImagePoints, Transform
from lieattn_datasets._streams import SPLITS

_COUNTS = {"train": 262_144, "valid": 32_768, "test": 32_768}
_SHAPE = (96, 96, 3)
_FILTERS = {1, 2, 3}  # deflate, shuffle and a checksum; HDF5 searches for other filters in libraries on the disk

_RELEASE = Release(
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


class PatchCamelyon(ImagePoints):
    """PatchCamelyon: 262,144 / 32,768 / 32,768 patches of lymph node sections, 96 x 96 in color.

    The label is 1 if the central 32 x 32 pixels contain at least one pixel of tumor tissue, and 0 otherwise.

    The images stay on disk and are read one at a time; each worker process of a loader opens the file itself. Each
    image has 9,216 points.

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

    def __init__(
        self,
        root: str | Path,
        split: Literal["train", "valid", "test"] = "train",
        *,
        download: bool = False,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(PatchCamelyon.__init__, locals())
        check_choice("split", split, SPLITS)
        names = [f"camelyonpatch_level_2_split_{split}_{part}.h5" for part in "xy"]
        if download:
            fetch(_RELEASE, root, *names)
        path, label_path = (_RELEASE.locate(root, name) for name in names)
        if verify:
            _RELEASE.check_file(path)
            _RELEASE.check_file(label_path)
        images = H5Images(path)
        if images.shape[1:] != _SHAPE or images.dtype != np.uint8:
            found = f"{images.dtype} images of shape {images.shape[1:]}"
            raise _RELEASE.damaged(path, f"has {found}, expected uint8 of {_SHAPE}")
        labels = _read_labels(label_path)
        if len(labels) != images.shape[0]:
            raise _RELEASE.damaged(label_path, f"has {len(labels)} labels, but there are {images.shape[0]} images")
        if verify:
            check_count(_RELEASE, path, images.shape[0], _COUNTS[split])
        super().__init__(images, labels, num_classes=2, channels=3, transform=transform)


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
            raise _RELEASE.damaged(self._path, f"cannot be read at image {index} ({error})") from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None, "_source": None}

    def _open(self) -> Any:
        if self._process != os.getpid():
            self._source = _dataset(self._path, "x")
            self._process = os.getpid()
        return self._source


def _dataset(path: Path, key: str) -> Any:
    """Open an array of a file; raise ValueError if its values are in other files, or incomplete."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError("PatchCamelyon needs h5py: pip install 'lieattn[data]'") from error
    try:
        file = h5py.File(path, "r")
        link = file.get(key, getlink=True)
        source = file[key] if isinstance(link, h5py.HardLink) else None
        if not isinstance(source, h5py.Dataset):
            problem = f"has no array {key!r}, only {', '.join(file) or 'nothing'}"
        else:
            problem = _problem(source)
    except Exception as error:  # a damaged file can fail in any way
        raise _RELEASE.damaged(path, f"is not a complete HDF5 file ({error})") from error
    if problem:
        file.close()
        raise _RELEASE.damaged(path, problem)
    return source


def _problem(source: Any) -> str:
    """Return a description of the problem with the storage of an array, or an empty string."""
    stored = source.id.get_create_plist()
    filters = {stored.get_filter(number)[0] for number in range(stored.get_nfilters())}
    if source.is_virtual or stored.get_external_count():
        return f"has an array {source.name!r} whose values are in other files"
    if not filters <= _FILTERS:
        return f"has an array {source.name!r} with the filters {sorted(filters)}, expected some of {sorted(_FILTERS)}"
    if source.chunks is None:
        complete = source.id.get_storage_size() == source.size * source.dtype.itemsize
    else:
        if math.prod(source.chunks) * source.dtype.itemsize > MOST_BYTES:
            return f"has an array {source.name!r} in chunks of {source.chunks}, which exceed {MOST_BYTES} bytes"
        pieces = zip(source.shape, source.chunks, strict=True)
        complete = source.id.get_num_chunks() == math.prod(-(-size // chunk) for size, chunk in pieces)
    return "" if complete else f"has an array {source.name!r} that was written only in part"


def _read_labels(path: Path) -> NDArray[np.int64]:
    source = _dataset(path, "y")
    try:
        if source.dtype.kind not in "iu" or not source.ndim or source.size != source.shape[0] or not source.size:
            raise _RELEASE.damaged(path, f"has labels of {source.dtype} {source.shape}, expected one integer per image")
        if source.size * source.dtype.itemsize > MOST_BYTES:
            raise _RELEASE.damaged(path, f"has {source.size} labels, which exceed {MOST_BYTES} bytes")
        labels = np.asarray(source[...]).reshape(-1)
    except OSError as error:
        raise _RELEASE.damaged(path, f"cannot be read ({error})") from error
    finally:
        source.file.close()
    if not np.isin(labels, (0, 1)).all():
        raise _RELEASE.damaged(path, "has labels other than 0 and 1")
    return labels.astype(np.int64)
