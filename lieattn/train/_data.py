"""Batches of point sets in an order that is reproduced when a run is continued."""

from __future__ import annotations

import copy
import math
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, SequentialSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from lieattn._core.checks import check_arguments, check_count, check_counts
from lieattn._core.values import agreeing
from lieattn.io import UsageError

REPEATED = "repeated"
"""Attribute bool ``[clouds]`` of batches in several processes: marks clouds that only fill up a batch."""

_Items = Dataset[Any] | list[Data]
_TENSORS = ("pos", "x", "z", "y", "grid", "raster", "pixel", "cell", "pbc")


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Delay the handling of SIGINT to the end of the block; processes that are started in the block ignore it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda *signaled: received.append(signaled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received and callable(handler):
            handler(*received[0])


def _states_on_cpu() -> dict[str, Any]:
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}


def _set_states_on_cpu(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch (on the CPU) after the block, also after an error."""
    state = _states_on_cpu()
    try:
        yield
    finally:
        _set_states_on_cpu(state)


def random_state() -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy and torch (CPU, and CUDA if it is in use).

    A file with these states can be loaded with ``weights_only``.
    """
    return {**_states_on_cpu(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []}


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a state of :func:`random_state`; CUDA is left alone if the state has more devices than this machine."""
    _set_states_on_cpu(state)
    if len(state["cuda"]) <= torch.cuda.device_count():
        for device, cuda in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(cuda.cpu(), device)


def set_random_states(states: list[dict[str, Any]] | None, rank: int) -> None:
    """Restore the state of the process with this rank; without one, give ranks above 0 a seed of their own."""
    if states is not None and rank < len(states):
        set_random_state(states[rank])
    elif rank:
        words = np.random.SeedSequence([torch.initial_seed(), rank]).generate_state(1, np.uint64)
        seed_generators(int(words[0]))
        torch.cuda.manual_seed_all(int(words[0]))  # waits until CUDA is used, if it is


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch (on the CPU) with one number below 2^64."""
    check_arguments(seed_generators, locals())
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class EpochSampler(DistributedSampler[Any]):
    """Indices of ``size`` items in an order that depends on (seed, epoch) alone, and that can start in the middle.

    It yields pairs (epoch, index), from which the random choices of a data set for an item follow, in whichever process
    they are made. Of n ``replicas``, the one with ``rank`` r takes every n-th index, beginning with the r-th. Indices
    from the beginning are repeated at the end, so that all replicas have the same number.
    """

    def __init__(self, size: int, *, shuffle: bool = True, seed: int = 0, replicas: int = 1, rank: int = 0) -> None:
        check_arguments(EpochSampler.__init__, locals())
        check_counts(0, size=size, seed=seed, rank=rank)
        check_count("replicas", replicas)
        if rank >= replicas:
            raise ValueError(f"rank: expected less than replicas={replicas}, got {rank}")
        items = cast("Dataset[Any]", range(size))
        super().__init__(items, num_replicas=replicas, rank=rank, shuffle=shuffle, seed=seed)
        self._skip = 0

    def start(self, epoch: int, skip: int) -> None:
        """Go to an epoch, and skip the first ``skip`` items of this replica."""
        check_arguments(EpochSampler.start, locals())
        self.epoch = epoch
        self._skip = skip

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; if it is the present epoch, keep the place where it was started."""
        check_arguments(EpochSampler.set_epoch, locals())
        if epoch != self.epoch:
            self.start(epoch, 0)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((epoch, index) for epoch, index, _ in self.items())

    def items(self) -> Iterator[tuple[int, int, bool]]:
        """Yield (epoch, index, repeated), where ``repeated`` marks an index that only fills up a replica."""
        epoch, order = self.epoch, np.arange(len(cast(Sized, self.dataset)))
        if self.shuffle:  # by the pair, not the sum: seed 0 in epoch 1 differs from seed 1 in epoch 0
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        mine = np.resize(order, self.total_size)[self.rank :: self.num_replicas]
        places = range(self.rank, self.total_size, self.num_replicas)
        for place, index in zip(places[self._skip :], mine[self._skip :].tolist(), strict=True):
            yield epoch, index, place >= len(order)


class _TrainingSampler(EpochSampler):
    """A sampler that takes its place from the training, since Lightning's epoch is one too high after some restarts."""

    def __init__(self, size: int, data: PointSetData, **options: Any) -> None:
        super().__init__(size, seed=data.seed, **options)
        self._data = data

    def set_epoch(self, epoch: int) -> None:
        if place := self._data.state_dict():
            self.start_at(place)
        else:
            super().set_epoch(epoch)

    def start_at(self, place: dict[str, int]) -> None:
        self.start(place["epoch"], place["batch"] * self._data.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return self.items() if self.num_replicas > 1 else super().__iter__()


class _FirstBatchesSampler(_TrainingSampler, SequentialSampler):
    """A sampler without shuffling, for ``overfit_batches``.

    It is a SequentialSampler, because Lightning would replace any other by a sampler that cannot be continued.
    """


class _EvaluationSampler(EpochSampler):
    """A sampler that keeps the order of the data set, for several processes."""

    def __iter__(self) -> Iterator[Any]:
        return self.items()


# Index of an item, with its epoch, and with the mark of an item that only fills up a replica.
_Key = int | tuple[int, int] | tuple[int, int, bool]


class _SeededItems(Dataset[Data]):
    """Items whose random choices follow from (seed, epoch, index); the global random generators are not changed.

    If an item is requested as (epoch, index, repeated), it gets an attribute that says whether it only fills up a
    batch.
    """

    def __init__(self, source: _Items, seed: int) -> None:
        self.source = source
        self.seed = seed

    def __len__(self) -> int:
        return len(cast(Sized, self.source))

    def __getitem__(self, key: _Key) -> Data:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[_Key]) -> list[Data]:
        """Return the items of a batch; storing the states of the generators once per item would take longest."""
        with _generators_kept():
            items = [self._seeded(key) for key in keys]
        return _agreeing(items, [key[1] if isinstance(key, tuple) else key for key in keys])

    def _seeded(self, key: _Key) -> Data:
        epoch, index, *repeated = key if isinstance(key, tuple) else (0, key)
        words = np.random.SeedSequence([self.seed, epoch, index]).generate_state(1, np.uint64)
        seed_generators(int(words[0]))
        item = self.item(index)
        if repeated:
            item = copy.copy(item)
            item[REPEATED] = torch.tensor(repeated)
        return item

    def item(self, index: int) -> Data:
        """Return an item; UsageError is raised if it is no cloud, or has arrays in place of tensors."""
        item = self.source[index]
        if not isinstance(item, Data):
            name = type(self.source).__name__
            raise UsageError(f"data: item {index} of {name} is a {type(item).__name__}, expected torch_geometric Data")
        for attribute in _TENSORS:  # batches would have lists of arrays, which later code does not recognize
            if isinstance(item.get(attribute), np.ndarray):
                raise UsageError(f"data.{attribute}: expected a tensor, got an array of NumPy in item {index}")
        return item


def _agreeing(items: list[Data], numbers: Sequence[int], of: str = "") -> list[Data]:
    """Return items that agree in their attributes, or raise UsageError."""
    try:
        return agreeing(items, numbers)
    except ValueError as error:
        raise UsageError(f"{of}{error}") from error


class _Loader(DataLoader):
    """A loader that loses no interrupt: Python ignores exceptions of a signal handler while processes start."""

    def __iter__(self) -> Iterator[Any]:
        with _interrupted_later():
            return cast(Iterator[Any], super().__iter__())


class _ResumableLoader(_Loader):
    """A loader that tells Lightning its place, so that a run can be continued in the middle of an epoch."""

    sampler: _TrainingSampler

    def state_dict(self) -> dict[str, int]:
        return self.sampler._data.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sampler.start_at(state)


class PointSetData(LightningDataModule):
    """Batches of point sets for training, validation, test and prediction.

    The order of the training set depends on the seed and the epoch alone. The random choices of its transforms depend
    on the seed, the epoch and the item. Neither depends on the number of workers. A checkpoint keeps the place within
    the epoch.

    With n processes, each one has every n-th cloud, and all have the same number of batches. Clouds that are repeated
    for this at the end of a set are marked in the attribute ``repeated``, bool ``[clouds]``, of the batches, and have
    the weight 0 in losses and metrics. So n processes train like one process with batches n times as large, up to
    rounding.

    The clouds of a set have the same attributes. What only some of them have is added to the others if its absence has
    a meaning: clouds without ``cell`` are not periodic, missing masks are true, and missing weights 1. Other
    differences are errors: of lists before the training, of other data sets in the batch.

    Parameters
    ----------
    train, val, test, predict
        Data sets or lists of ``torch_geometric.data.Data``; only those that are used are needed. Streams such as an
        ``IterableDataset`` are refused, because order and random choices depend on the indices of the items.
    batch_size, eval_batch_size
        Number of clouds per process in a batch of the training set, and of the other sets; both are equal by default.
    workers
        Number of processes that prepare the batches; 0 for none.
    seed
        Seed of the order and the transforms; by default the seed of ``seed_everything``, or 0 if there is none.
    shuffle
        Whether to shuffle the training set.
    standardize
        Whether tasks subtract the mean of each channel of the features ``x`` over the training set, and divide by its
        standard deviation, when they are trained. They keep both numbers with the weights, so that checkpoints and
        ``task.model`` take features as they are in the data.

    Raises
    ------
    ValueError
        If a size, or the number of workers, is out of range.
    UsageError
        When a set is loaded, if it was not given, is empty or is a stream, or if its clouds differ in their attributes,
        or their dtypes or shapes; or if a checkpoint from the middle of an epoch was made with another seed, number of
        items, or number of clouds in a step.
    """

    def __init__(
        self,
        # With a type of the items, jsonargparse would build the base class itself.
        train: Dataset | list[Data] | None = None,  # type: ignore[type-arg]
        val: Dataset | list[Data] | None = None,  # type: ignore[type-arg]
        test: Dataset | list[Data] | None = None,  # type: ignore[type-arg]
        predict: Dataset | list[Data] | None = None,  # type: ignore[type-arg]
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        workers: int = 0,
        seed: int | None = None,
        shuffle: bool = True,
        standardize: bool = False,
    ) -> None:
        check_arguments(PointSetData.__init__, locals())
        super().__init__()
        counts = {"batch_size": batch_size, "eval_batch_size": eval_batch_size, "workers": workers, "seed": seed}
        for name, value in counts.items():
            if value is not None:
                check_count(name, value, least=int(name.endswith("size")))
        self.sets: dict[str, _Items | None] = {"train": train, "val": val, "test": test, "predict": predict}
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.workers = workers
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        self.shuffle, self.standardize = shuffle, standardize
        self._resume: dict[str, int] | None = None
        self._start = (0, 0, 0)  # epoch and batch at which this fit began, and number of batches before it
        if val is None:
            # Lightning validates whenever this hook is overridden.
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

    def setup(self, stage: str) -> None:
        """Raise UsageError if a set cannot be trained on, before the first validation, which comes before training."""
        if stage == "fit" and self.trainer is not None and self.trainer.fit_loop.total_batch_idx < 0:
            self._start = (0, 0, 0)  # it may be that of an earlier training, which was continued
        for name in ("train", "val") if stage == "fit" else ():
            if name == "train" or self.sets[name] is not None:
                self.items_of(name)

    def train_dataloader(self) -> DataLoader:
        """Batches of the training set, beginning at the place of a loaded checkpoint."""
        items = self.items_of("train")
        replicas, rank = self._replicas()
        overfits = getattr(self.trainer, "overfit_batches", 0) > 0
        kind = _FirstBatchesSampler if overfits else _TrainingSampler
        sampler = kind(len(items), self, shuffle=self.shuffle and not overfits, replicas=replicas, rank=rank)
        if (place := self._resume) is not None:
            present = self._fixed(len(items), replicas)
            changed = [f"{key}={place[key]} (got {value})" for key, value in present.items() if place[key] != value]
            # With the same number of clouds in a step, the rest of the epoch is the same for any number of processes.
            parts = "processes", "batch_size"
            same_step = math.prod(place[key] for key in parts) == math.prod(present[key] for key in parts)
            if same_step:
                changed = [change for change in changed if not change.startswith(parts)]
            if changed and place["batch"]:
                raise UsageError(
                    f"the checkpoint is from the middle of epoch {place['epoch']}, which can only be continued with "
                    f"the settings with which it began: {', '.join(changed)}; with another number of processes, "
                    "processes times batch_size must be the same"
                )
            sampler.start_at(place)
            if "done" in place:
                self._start = place["epoch"], place["batch"], place["done"]
            self._resume = None
        return self._loader(items, self.batch_size, _ResumableLoader, sampler=sampler)

    def val_dataloader(self) -> DataLoader:
        """Batches of the validation set, in its order."""
        return self._in_order("val")

    def test_dataloader(self) -> DataLoader:
        """Batches of the test set, in its order."""
        return self._in_order("test")

    def predict_dataloader(self) -> DataLoader:
        """Batches of the set to predict (by default the test set), in its order."""
        return self._in_order("predict" if self.sets["test"] is None or self.sets["predict"] is not None else "test")

    def state_dict(self) -> dict[str, int]:
        """The place of the training: the epoch, the batches done in it, and the settings that determine the order."""
        trainer = self.trainer
        if trainer is None or self.sets["train"] is None or not 0 < trainer.num_training_batches < float("inf"):
            return {}
        # In an earlier fit, an epoch may have had another number of batches.
        first, batch, before = self._start
        done = trainer.fit_loop.total_batch_idx + 1
        if done < before:  # a trial before a continued run, such as that of BatchSizeFinder
            return {}
        epochs, batch = divmod(batch + done - before, int(trainer.num_training_batches))
        fixed = self._fixed(len(cast(Sized, self.sets["train"])), trainer.world_size)
        return {"epoch": first + epochs, "batch": batch, "done": done, **fixed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Keep the place of a checkpoint for the next training loader."""
        self._resume = state_dict

    def _fixed(self, items: int, processes: int) -> dict[str, int]:
        """Settings that must not change in the middle of an epoch."""
        return {"items": items, "processes": processes, "batch_size": self.batch_size, "seed": self.seed}

    def _replicas(self) -> tuple[int, int]:
        """Number of processes, and the rank of this one."""
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)

    def _in_order(self, name: str) -> DataLoader:
        """Batches for evaluation; every process has the same number, since the processes wait for each other."""
        items, (replicas, rank) = self.items_of(name), self._replicas()
        if replicas == 1:
            return self._loader(items, self.eval_batch_size)
        sampler = _EvaluationSampler(len(items), shuffle=False, replicas=replicas, rank=rank)
        return self._loader(items, self.eval_batch_size, sampler=sampler)

    def items_of(self, name: str) -> _SeededItems:
        """Return the items of a set, transformed and seeded for the current epoch."""
        source = self.sets[name]
        if source is None:
            raise UsageError(f"data.{name}: expected a data set, got none")
        if isinstance(source, IterableDataset) or not hasattr(source, "__len__"):
            kind = type(source).__name__
            raise UsageError(f"data.{name}: expected a data set with a length and items by index, got {kind}")
        items = _SeededItems(source, self.seed)
        if not len(items):
            raise UsageError(f"data.{name}: the data set is empty")
        if isinstance(source, list):
            _agreeing([items.item(index) for index in range(len(source))], range(len(source)), f"data.{name}: ")
        return items

    def _loader(
        self, items: Dataset[Data], batch_size: int, kind: type[_Loader] = _Loader, **options: Any
    ) -> DataLoader:
        options |= {"num_workers": self.workers, "persistent_workers": self.workers > 0}
        # The loader draws a number at the beginning of each epoch; its own generator keeps the global one unchanged.
        return kind(items, batch_size=batch_size, generator=torch.Generator().manual_seed(self.seed), **options)
