"""Random numbers that depend only on a seed, and are the same with every version of NumPy and on every machine."""

import inspect
import zlib
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from lieattn_datasets._checks import check_arguments
from lieattn_datasets._files import check_choice

Item = TypeVar("Item")

Split = Literal["train", "valid", "test"]
SPLITS: tuple[str, ...] = get_args(Split)


def frozen_stream(*keys: int) -> np.random.RandomState:
    """Return a generator for a sequence of non-negative integers, such as a seed, a split and a kind of numbers.

    NumPy guarantees that the streams of ``RandomState`` do not change; those of ``default_rng`` may change. With the
    same keys, an array with more rows begins with the rows of a smaller one.
    """
    if not all(0 <= key < 2**32 for key in keys):
        raise ValueError(f"seed: expected an integer in 0 .. {2**32 - 1}, got {keys[0]}")
    return np.random.RandomState(list(keys))


def split_size(split: str, size: int | None, sizes: tuple[int, int, int] = (3000, 2000, 2000)) -> int:
    """Check a split and the requested size, and return the size."""
    check_choice("split", split, SPLITS)
    count = sizes[SPLITS.index(split)] if size is None else size
    if count < 1:
        raise ValueError(f"size: expected an integer of at least 1, got {size}")
    return count


def progress(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items, with a progress bar on the terminal if it takes more than two seconds."""
    from tqdm import tqdm

    yield from tqdm(items, description, total, delay=2.0, leave=False, disable=None)


class Configured:
    """A transform that shows its arguments, which are attributes of the same names."""

    def __repr__(self) -> str:
        values = {name: getattr(self, name, ...) for name in inspect.signature(type(self)).parameters}
        shown = (f"{name}={value.tolist() if isinstance(value, Tensor) else value!r}" for name, value in values.items())
        return f"{type(self).__name__}({', '.join(shown)})"


class RandomTransform(Configured):
    """A random transform, whose numbers are a stream that the seed and the class determine.

    If the seed of torch has changed since the transform was constructed, and :meth:`set_epoch` was not called, the
    numbers also depend on torch's generator. Worker processes of a loader therefore draw different numbers, which
    differ between epochs and follow ``torch.manual_seed``. In a loader that seeds torch for each item, such as
    ``lieattn.train.PointSetData``, the numbers of an item do not depend on the other items.

    Transforms of different classes have different streams. Two transforms of the same class in a chain need different
    seeds.

    Parameters
    ----------
    seed
        Non-negative integer.
    """

    def __init__(self, seed: int) -> None:
        check_arguments(RandomTransform.__init__, locals())
        if seed < 0:
            raise ValueError(f"seed: expected an integer of at least 0, got {seed}")
        self.seed = seed
        self._class = zlib.crc32(type(self).__name__.encode())
        self._torch_seed = torch.initial_seed()
        self._epoch: int | None = None
        self._key: tuple[int, ...] | None = None
        self._generator = np.random.default_rng([self._class, seed])

    def set_epoch(self, epoch: int) -> None:
        """Restart the stream from the seed and the epoch, so that a single epoch can be repeated."""
        check_arguments(RandomTransform.set_epoch, locals())
        if epoch < 0:
            raise ValueError(f"epoch: expected an integer of at least 0, got {epoch}")
        self._epoch = epoch
        self._key = None

    def _stream(self) -> np.random.Generator:
        key: tuple[int, ...] = (self._class, self.seed)
        if self._epoch is not None:
            worker = get_worker_info()
            key = (*key, self._epoch, 0 if worker is None else worker.id + 1)
        elif torch.initial_seed() != self._torch_seed:
            return np.random.default_rng([self.seed, *torch.randint(2**31, (2,), device="cpu").tolist()])
        if key != self._key:  # each process and each epoch begins its own stream
            self._key = key
            self._generator = np.random.default_rng(key)
        return self._generator
