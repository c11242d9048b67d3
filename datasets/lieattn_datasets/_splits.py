"""Splits that are the same on every machine and with every version of NumPy.

They use ``RandomState``, whose stream NumPy has frozen for good; that of ``default_rng`` may change.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lieattn_datasets._streams import SPLITS, frozen_stream

_SEED = 2024


def hold_out(size: int, validation: int, split: str) -> NDArray[np.int64]:
    """Return the indices of ``"train"`` or ``"valid"`` when part of a training set is set aside.

    Parameters
    ----------
    size
        Number of official training images.
    validation
        How many of them, drawn by a permutation with a fixed seed, make the validation set.
    split
        ``"train"`` for the rest, ``"valid"`` for those set aside.

    Returns
    -------
    NDArray
        Increasing indices, int64. With ``validation=0``, ``"train"`` is everything.

    Raises
    ------
    ValueError
        If validation is negative or leaves no training image, or if ``"valid"`` is asked for while
        nothing is set aside.
    """
    if not 0 <= validation < size:
        raise ValueError(
            f"validation: expected an integer of at least 0 and less than the {size} training images, got {validation}"
        )
    if split == "valid" and validation == 0:
        raise ValueError(
            "split='valid' needs validation > 0: this data set has no official validation images, "
            "so say how many training images to set aside (and give the same number for split='train')"
        )
    order = np.random.RandomState(_SEED).permutation(size)
    chosen = order[size - validation :] if split == "valid" else order[: size - validation]
    return np.sort(chosen).astype(np.int64)


def stratified(
    labels: NDArray[np.int64], fractions: Sequence[float], generator: np.random.RandomState | None = None
) -> list[NDArray[np.int64]]:
    """Divide indices into parts that hold the same share of every class.

    Parameters
    ----------
    labels
        Class of each example, int64 ``[examples]``.
    fractions
        Share of each part but the last, which gets what is left.
    generator
        What permutes them; one with a fixed seed if absent.

    Returns
    -------
    list of NDArray
        Increasing indices of each part, disjoint, together all; one more part than fractions.
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
    """Return the indices of a split of examples that have none of their own, with the same share of every class.

    Parameters
    ----------
    labels
        Class of each example, int64 ``[examples]``.
    split
        ``"train"``, ``"valid"``, ``"test"`` or ``"all"``.
    shares
        Of ``"train"`` and of ``"valid"``; the others are ``"test"``.
    seed
        Of the permutation.

    Raises
    ------
    ValueError
        If the shares are none, or nothing is left for the split.
    """
    if split == "all":
        return np.arange(len(labels))
    if len(shares) != 2 or not (min(shares) >= 0 and sum(shares) <= 1):
        raise ValueError(
            f"shares: expected those of train and valid, not negative and with a sum of at most 1, got {shares}"
        )
    chosen = stratified(labels, shares, frozen_stream(seed))[SPLITS.index(split)]
    if not len(chosen):
        raise ValueError(f"shares {tuple(shares)} of {len(labels)} examples leave none for split={split!r}")
    return chosen
