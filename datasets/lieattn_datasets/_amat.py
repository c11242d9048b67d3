"""The original rotated MNIST, in the text format of its authors.

Neither torchvision nor torch_geometric reads this format.
"""

import contextlib
import functools
import itertools
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lieattn_datasets._archives import Archive
from lieattn_datasets._checks import check_arguments
from lieattn_datasets._download import SOURCES, fetch
from lieattn_datasets._files import Release, check_choice, check_count
from lieattn_datasets._images import ImagePoints, Transform

_ARCHIVE = "mnist_rotation_new.zip"
_FILES = {
    "train": "mnist_all_rotation_normalized_float_train_valid.amat",
    "test": "mnist_all_rotation_normalized_float_test.amat",
}
_LONGEST = 1 << 16  # characters of a row: 785 numbers of 16 are 12,560
_COUNTS = {"train": 12_000, "test": 50_000}
_TRAIN, _TRAIN_AND_VALID = 10_000, 12_000

_RELEASE = Release(
    dataset="Rotated MNIST",
    origin=(
        f"The official files are {_FILES['train']} (12,000 rows) and {_FILES['test']} (50,000 rows), from "
        f"{_ARCHIVE} of 'Variations on the MNIST digits' (Larochelle, Erhan, Courville, Bergstra, Bengio, "
        "ICML 2007), which is read without unpacking it."
    ),
    digests={_ARCHIVE: "md5:0f9a947ff3d30e95cd685462cbf3b847"},
    folders=("mnist_rotation_new",),
    sources=SOURCES["Rotated MNIST"],
)


class RotatedMNIST(ImagePoints):
    """Rotated MNIST of Larochelle et al. (2007): 10,000 / 2,000 / 50,000 digits of 28 x 28.

    These are the files that the literature uses. The class :class:`~lieattn_datasets.RotatedMNISTRecipe` makes a
    similar data set from MNIST; results on the two must not be mixed.

    Each row of a file contains one image **column by column**, followed by its label; the loader transposes the
    images so that they are upright. Much published code reads the pixels row by row instead, and therefore trains and
    tests on mirrored digits. For weights from such code pass ``column_major=False``.

    Parameters
    ----------
    root
        Folder that contains ``mnist_rotation_new.zip`` or the two ``.amat`` files, directly or in its subfolder
        ``mnist_rotation_new``. The archive is preferred, since only the archive has a published digest. The shape and
        the values of the bare files are checked, but not their digests.
    split
        ``"train"`` (the first 10,000 rows of the first file), ``"valid"`` (its last 2,000), ``"train+valid"`` (both)
        or ``"test"``: the official split.
    column_major
        Whether a row contains the columns of the image, one after the other.
    download
        Whether to download the archive into the subfolder ``mnist_rotation_new`` of the root if the files are missing.
        Nothing is downloaded otherwise.
    verify
        Whether to compare the digest of the archive and the number of rows with the official files. If False, any files
        in the same format are read; 10/12 of the first file are used for training.
    transform
        Function that is applied to each new ``Data``.
    """

    def __init__(
        self,
        root: str | Path,
        split: Literal["train", "valid", "train+valid", "test"] = "train",
        *,
        column_major: bool = True,
        download: bool = False,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(RotatedMNIST.__init__, locals())
        check_choice("split", split, ("train", "valid", "train+valid", "test"))
        half = "test" if split == "test" else "train"
        if download and _RELEASE.find(root, _FILES[half]) is None:
            fetch(_RELEASE, root, _ARCHIVE)
        path = _RELEASE.find(root, _ARCHIVE) or _RELEASE.locate(root, _FILES[half])
        if verify:
            _RELEASE.check_file(path)
        table = _read(path, _FILES[half])
        if verify:
            check_count(_RELEASE, path, len(table), _COUNTS[half])
        images = table[:, :-1].reshape(-1, 28, 28)
        if column_major:
            images = images.transpose(0, 2, 1)
        labels = table[:, -1].astype(np.int64)
        super().__init__(np.ascontiguousarray(images), labels, num_classes=10, channels=1, transform=transform)
        if split in ("train", "valid"):
            first = len(table) * _TRAIN // _TRAIN_AND_VALID
            self._indices = self._indices[:first] if split == "train" else self._indices[first:]


def _read(path: Path, member: str) -> NDArray[np.float32]:
    """Read a table from a file, or from the member of an archive, and check its values."""
    refuse = functools.partial(_RELEASE.damaged, path)
    with contextlib.ExitStack() as stack:
        if path.suffix == ".zip":
            archive = stack.enter_context(Archive(path, refuse))
            name = next((name for name in archive.names if Path(name).name.lower() == member.lower()), None)
            if name is None:
                raise refuse(f"has no member {member}")
            stream = stack.enter_context(archive.open(name))
        else:
            stream = stack.enter_context(_RELEASE.open(path))
        # The length of lines is limited, so that a file without line breaks is not read into one string.
        lines = (line.decode("ascii") for line in iter(lambda: stream.readline(_LONGEST), b""))
        try:
            first = next(lines, "")
            table = np.loadtxt(itertools.chain([first], lines), dtype=np.float32, ndmin=2) if first.strip() else None
        except ValueError as error:
            raise refuse(f"is not a table of numbers ({error})") from error
    if table is None:
        raise refuse("is empty")
    if table.shape[1] != 785:
        raise refuse(f"has {table.shape[1]} numbers per row, expected 784 intensities and a label")
    if not (table[:, :-1].min() >= 0 and table[:, :-1].max() <= 1):
        raise refuse("has intensities outside [0, 1]")
    if not np.isin(table[:, -1], np.arange(10)).all():
        raise refuse("has labels that are not in 0 .. 9")
    return table
