"""Base class of all data sets."""

import copy
import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Data

from lieattn._core.checks import check_arguments

# Transforms return Data. With that annotation, jsonargparse would expect a factory of Data in configuration files.
Transform = Callable[[Data], Any]


class Card(NamedTuple):
    """Source, terms (license) and size of a data set; each has one as ``card``. The README has the details."""

    source: str
    terms: str
    size: str


class Clouds(Dataset[Data]):
    """Point clouds, each created on access. :meth:`subset` and :meth:`with_transform` return views.

    Methods never change a data set. It works with ``torch_geometric.loader.DataLoader`` and can be pickled.
    Items are on the CPU, also if torch has another default device.

    Parameters
    ----------
    size
        Number of clouds.
    transform
        Function that is applied to each new ``Data``.

    Attributes
    ----------
    vectors, tensors : tuple[str, ...]
        Names of the attributes of an item that rotate with its points, for :class:`~lieattn_datasets.TransformFields`.
    """

    vectors: tuple[str, ...] = ("pos",)
    tensors: tuple[str, ...] = ()
    _files: Sequence[str] = ()

    def __init__(self, size: int, transform: Transform | None = None) -> None:
        check_arguments(Clouds.__init__, locals())
        self.transform = transform
        self._indices = np.arange(size)

    @abstractmethod
    def _make(self, index: int) -> Data:
        """Return the cloud with this index in the stored data, before the transform."""

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Data:
        try:
            position = operator.index(index)
        except TypeError as error:
            raise TypeError(f"index: expected an integer, got {index!r}; use subset for several items") from error
        if not -len(self) <= position < len(self):
            raise IndexError(f"index: expected an integer in -{len(self)} .. {len(self) - 1}, got {position}")
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            data = self._make(int(self._indices[position]))
        return data if self.transform is None else self.transform(data)

    def __repr__(self) -> str:
        first = f" like {self._make(int(self._indices[0]))}" if len(self) else ""
        return f"{type(self).__name__}({len(self)} items{first})"

    @property
    def files(self) -> list[str]:
        """The file of each item, as found below ``root``; empty if items have no files of their own."""
        return [self._files[int(index)] for index in self._indices] if self._files else []

    def subset(self, indices: Sequence[int] | NDArray[Any] | Tensor) -> Self:
        """Return the items with these indices, in this order, without copying them.

        Raises
        ------
        TypeError
            If the indices are not integers (a mask of booleans is not accepted).
        """
        chosen = np.asarray(indices)
        if chosen.ndim != 1 or (chosen.size and not np.issubdtype(chosen.dtype, np.integer)):
            raise TypeError(f"indices: expected a list of integers, got {chosen.dtype} {list(chosen.shape)}")
        size = len(self)
        if chosen.size and not (-size <= int(chosen.min()) and int(chosen.max()) < size):
            raise IndexError(
                f"indices: expected integers in -{size} .. {size - 1}, got {chosen.min()} .. {chosen.max()}"
            )
        view = copy.copy(self)
        view._indices = self._indices[chosen.astype(np.int64)]
        return view

    def with_transform(self, transform: Transform | None) -> Self:
        """Return the same items with this transform instead of the current one."""
        view = copy.copy(self)
        view.transform = transform
        return view


class LabeledClouds(Clouds):
    """Clouds with classes or counts, integers ``[clouds, ...]``."""

    _labels: NDArray[np.int64]

    @property
    def labels(self) -> Int[Tensor, "clouds *values"]:
        """Classes or counts, int64 ``[clouds, ...]``, in the order of this data set."""
        return torch.from_numpy(self._labels[self._indices])
