"""Splits that are the same on every machine and with every version of NumPy.

They use ``RandomState``, whose stream NumPy guarantees not to change. The stream of ``default_rng`` may change.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from lieattn._core.checks import check_counts
from lieattn_datasets._checks import require

Item = TypeVar("Item")

Split = Literal["train", "valid", "test"]
SplitOrAll = Literal["train", "valid", "test", "all"]
SPLITS: tuple[str, ...] = get_args(Split)
FOLDERS = {"train": "train", "val": "valid", "valid": "valid", "validation": "valid", "test": "test"}

_AT = (-2, -3)  # of paths CLASS/train/* and train/CLASS/*, where the folder of the split is
_SEED = 2024


def frozen_stream(*keys: int) -> np.random.RandomState:
    """Return a generator for a sequence of non-negative integers, such as a seed, a split and a kind of numbers.

    With the same keys, an array with more rows begins with the rows of a smaller one.
    """
    require(all(0 <= key < 2**32 for key in keys), "seed", f"an integer in 0 .. {2**32 - 1}", keys[0])
    return np.random.RandomState(list(keys))


def split_size(split: str, size: int | None, sizes: tuple[int, int, int] = (3000, 2000, 2000)) -> int:
    """Check the requested size of a split, and return the size."""
    check_counts(size=1 if size is None else size)
    return sizes[SPLITS.index(split)] if size is None else size


def progress(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items, with a progress bar on the terminal if it takes more than two seconds."""
    from tqdm import tqdm

    yield from tqdm(items, description, total, delay=2.0, leave=False, disable=None)


def half_of(split: str) -> str:
    """Return the official half, ``"train"`` or ``"test"``, that contains a split."""
    return "test" if split == "test" else "train"


def split_folders(files: Sequence[PurePosixPath]) -> dict[PurePosixPath, tuple[PurePosixPath, str]]:
    """Return the files ``CLASS/train/*`` or ``train/CLASS/*``: their paths without that folder, and their splits.

    The files ``train/*`` have splits without classes. Capitals count only if all files are in such folders. The result
    is empty for other layouts.
    """
    tops = {file.parts[0].lower() for file in files if len(file.parts) == 2}
    if "train" in tops and tops <= FOLDERS.keys() and all(len(file.parts) == 2 for file in files):
        return {file: (PurePosixPath(file.name), FOLDERS[file.parts[0].lower()]) for file in files}
    deep = [file for file in files if len(file.parts) > 2]
    named = {place: {file: file.parts[place] for file in deep if file.parts[place].lower() in FOLDERS} for place in _AT}
    for place in sorted(_AT, key=lambda place: len(named[place]) < len(files)):  # a class may be called train
        found = named[place]
        if len(found) < len(files):
            found = {file: name for file, name in found.items() if name in FOLDERS}
        if found:
            rest = {file: PurePosixPath(*file.parts[:place], *file.parts[place:][1:]) for file in found}
            return {file: (rest[file], FOLDERS[name.lower()]) for file, name in found.items()}
    return {}


def hold_out(size: int, validation: int, split: str) -> NDArray[np.int64]:
    """Return the increasing indices of a split of an official half with ``size`` items, for all sets in the same way.

    ``validation`` of the training items are set aside as ``"valid"``, by a permutation with a fixed seed; ``"train"``
    is the others, and ``"test"`` all of the test half. ValueError is raised if no training or validation item is left.
    """
    if split == "test":
        return np.arange(size)
    expected = f"an integer of at least 0 and less than the {size} training images"
    require(0 <= validation < size, "validation", expected, validation)
    if split == "valid" and validation == 0:
        raise ValueError(
            "validation: expected at least 1 for split='valid', got 0; this data set has no official validation "
            "images, so set some training images aside (and give the same number for split='train')"
        )
    order = np.random.RandomState(_SEED).permutation(size)
    chosen = order[size - validation :] if split == "valid" else order[: size - validation]
    return np.sort(chosen).astype(np.int64)


def stratified(
    labels: NDArray[np.int64], fractions: Sequence[float], generator: np.random.RandomState | None = None
) -> list[NDArray[np.int64]]:
    """Divide indices into parts with the same share of every class.

    ``labels`` ``[examples]`` are the classes, and ``fractions`` the shares of all parts but the last, which gets the
    rest. The permutations are those of the generator, by default one with a fixed seed. The indices of a part increase.
    """
    generator = np.random.RandomState(_SEED) if generator is None else generator
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(len(fractions) + 1)]
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        ends = np.rint(np.cumsum(fractions) * len(members)).astype(np.int64)
        for part, piece in zip(parts, np.split(members, ends), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]


def seeded(labels: NDArray[np.int64], split: str, shares: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Return the indices of a split of examples without official splits, with the same share of every class.

    ``labels`` ``[examples]`` are the classes, and ``shares`` those of ``"train"`` and ``"valid"``. The rest is
    ``"test"``; ``"all"`` is in order.
    """
    right = len(shares) == 2 and min(shares) >= 0 and sum(shares) <= 1
    require(right, "shares", "those of train and valid, not negative and with a sum of at most 1", shares)
    if split == "all":
        return np.arange(len(labels))
    chosen = stratified(labels, shares, frozen_stream(seed))[SPLITS.index(split)]
    expected = f"at least one of the {len(labels)} examples for split={split!r}"
    require(len(chosen), "shares", expected, tuple(shares))
    return chosen
