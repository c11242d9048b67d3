"""Splits that are the same on every machine and with every version of NumPy.

They use ``RandomState``, whose stream NumPy guarantees not to change. The stream of ``default_rng`` may change.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lieattn_datasets._streams import SPLITS, frozen_stream

_SEED = 2024


def hold_out(size: int, validation: int, split: str) -> NDArray[np.int64]:
    """Return the indices of ``"train"`` or ``"valid"`` if a part of a training set is set aside.

    Parameters
    ----------
    size
        Number of official training images.
    validation
        Number of images that are set aside for validation, by a permutation with a fixed seed.
    split
        ``"valid"`` for the images that are set aside, ``"train"`` for the others.

    Returns
    -------
    NDArray
        Increasing indices, int64. With ``validation=0``, ``"train"`` contains all images.

    Raises
    ------
    ValueError
        If ``validation`` is negative or leaves no training image, or if the split is ``"valid"`` and ``validation`` is
        0.
    """
    if not 0 <= validation < size:
        raise ValueError(
            f"validation: expected an integer of at least 0 and less than the {size} training images, got {validation}"
        )
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

    Parameters
    ----------
    labels
        Class of each example, int64 ``[examples]``.
    fractions
        Share of each part except the last, which gets the rest.
    generator
        Generator of the permutations. Default: one with a fixed seed.

    Returns
    -------
    list of NDArray
        Increasing indices of each part. The parts are disjoint and contain all indices; there is one more part than
        fractions.
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

    Parameters
    ----------
    labels
        Class of each example, int64 ``[examples]``.
    split
        ``"train"``, ``"valid"``, ``"test"`` or ``"all"``.
    shares
        Shares of ``"train"`` and ``"valid"``. The rest is ``"test"``.
    seed
        Seed of the permutation.
    """
    if len(shares) != 2 or not (min(shares) >= 0 and sum(shares) <= 1):
        raise ValueError(
            f"shares: expected those of train and valid, not negative and with a sum of at most 1, got {shares}"
        )
    if split == "all":
        return np.arange(len(labels))
    chosen = stratified(labels, shares, frozen_stream(seed))[SPLITS.index(split)]
    if not len(chosen):
        raise ValueError(
            f"shares: expected at least one of the {len(labels)} examples for split={split!r}, got {tuple(shares)}"
        )
    return chosen
