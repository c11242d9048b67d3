"""The objects that a cell of a comparison is made of."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence, Sized
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset, Subset
from torch_geometric.data import Data

from lieattn._core.machine import usable_accelerator
from lieattn._core.names import arguments
from lieattn.certify import Kind, moved
from lieattn.compare._settings import Cell, ModelSettings, Settings, Spec
from lieattn.groups import SO, Group
from lieattn.train import Plateau, PointSetData, PointSetTask, UsageError, build


class TurnedClouds(Dataset[Data]):
    """A data set that rotates each cloud at random whenever it is loaded, with torch's global generator."""

    def __init__(
        self, source: Dataset[Data], axis: str | bool, vectors: Sequence[str] = (), tensors: Sequence[str] = ()
    ) -> None:
        self.source, self.axis, self.vectors, self.tensors = source, axis, vectors, tensors

    def __len__(self) -> int:
        return len(cast(Sized, self.source))

    def __getitem__(self, index: int) -> Data:
        cloud = self.source[index]
        return turned(cloud, random_rotation(cloud.pos.shape[1], self.axis), self.vectors, self.tensors)


def random_rotation(dim: int, axis: str | bool = True) -> Tensor:
    """Draw a Haar-distributed rotation ``[dim, dim]`` in float64, or a rotation about an axis in 3 dimensions."""
    if not isinstance(axis, str):
        return SO(dim).sample(dtype=torch.float64)
    if dim != 3:
        raise UsageError(f"data: expected clouds in 3 dimensions to rotate about an axis, got {dim}")
    others = [index for index, name in enumerate("xyz") if name != axis]
    matrix = torch.eye(3, dtype=torch.float64)
    matrix[np.ix_(others, others)] = SO(2).sample(dtype=torch.float64)
    return matrix


def kinds_of(cloud: Data, vectors: Iterable[str], tensors: Iterable[str]) -> dict[str, Kind]:
    """Say how positions and other attributes of a cloud rotate; an attribute may have several vectors side by side.

    Attributes that the cloud does not have are skipped.
    """
    kinds: dict[str, Kind] = {"pos": "vector"}
    dim = int(cloud.pos.shape[1])
    for name in filter(cloud.__contains__, dict.fromkeys([*vectors, *tensors])):
        shape: list[Any] = list(cloud[name].shape) if isinstance(cloud[name], Tensor) else [type(cloud[name]).__name__]
        if name in tensors and (len(shape) < 3 or shape[-2:] != [dim, dim]):
            raise UsageError(f"data.tensors: {name} must be [..., {dim}, {dim}] to be turned, got {shape}")
        if name not in tensors and (len(shape) < 2 or shape[-1] % dim):
            raise UsageError(f"data.vectors: {name} must be [..., {dim}] to be turned, got {shape}")
        kinds[name] = "tensor" if name in tensors else ("vector",) * (shape[-1] // dim)
    return kinds


def turned(cloud: Data, matrix: Tensor, vectors: Iterable[str], tensors: Iterable[str]) -> Data:
    """Return a cloud whose positions, vectors and tensors are multiplied by an orthogonal matrix.

    Vectors are ``[..., dim]`` and tensors ``[..., dim, dim]``.
    """
    kinds = kinds_of(cloud, vectors, tensors)
    other = moved(cloud, matrix, kinds=kinds)
    for name in kinds:
        other[name] = other[name].to(cloud[name])
    return other


class Sets:
    """The data sets of a comparison, built once; each cell gets copies, so that no cell affects the next one.

    ``vectors`` and ``tensors`` are the names of the attributes that rotate with the points.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        data = settings.data
        self._sets: dict[str, Dataset[Data]] = {}
        for name in ("train", "val", "test"):
            built: Any = build(Dataset, _with_root(getattr(data, name), settings.root), f"data.{name}")
            if not len(built):
                raise UsageError(f"data.{name}: the data set is empty")
            self._sets[name] = _limited(built, data.limit.get(name))
            if name == "train":
                self._units = dict(
                    zip(getattr(built, "target_names", ()), getattr(built, "target_units", ()), strict=False)
                )
                self.vectors = tuple(getattr(built, "vectors", ()) if data.vectors is None else data.vectors)
                self.tensors = tuple(getattr(built, "tensors", ()) if data.tensors is None else data.tensors)
        cloud = next(iter(self.clouds(1)), None)
        if cloud is None:
            raise UsageError("data.test: expected clouds with positions pos, which are not all empty")
        for argument, names in (("vectors", data.vectors), ("tensors", data.tensors)):
            if missing := [name for name in names or () if name not in cloud]:
                known = sorted(cloud.keys())
                raise UsageError(f"data.{argument}: expected attributes of the clouds, {known}, got {missing}")
        for axis in (data.rotate_train, data.rotate_test):
            if axis:  # so that attributes that cannot be rotated raise an error before anything is trained
                turned(cloud, random_rotation(cloud.pos.shape[1], axis), self.vectors, self.tensors)

    def described(self, targets: Iterable[str]) -> str | None:
        """The name and unit of what is learned, such as ``"homo (meV)"``; None if there are no targets."""
        named = {"y": [f"{name} ({unit})" for name, unit in self._units.items()]}
        words = (", ".join(named.get(name, ())) or f"{name} (unit of the data)" for name in targets)
        return ", ".join(words) or None

    def data(self, cell: Cell) -> PointSetData:
        """Training and validation data of a cell."""
        train, val = copy.deepcopy(self._sets["train"]), copy.deepcopy(self._sets["val"])
        size = len(cast(Sized, train))
        order = np.random.default_rng([cell.seed, size]).permutation(size)
        # Every share is the beginning of the same order, so a larger share contains the smaller ones.
        train = Subset(train, order[: max(1, round(cell.fraction * size))].tolist())
        axis = self.settings.data.rotate_train
        return self._loaders(cell.seed, train=self._turned(train, axis), val=self._turned(val, axis))

    def test_data(self, *, rotated: bool) -> PointSetData:
        """The test set; it is the same for all cells, and rotated in the same way."""
        test = copy.deepcopy(self._sets["test"])
        return self._loaders(0, test=self._turned(test, rotated and self.settings.data.rotate_test))

    def clouds(self, count: int) -> list[Data]:
        """The first clouds of the test set that have points."""
        test = copy.deepcopy(self._sets["test"])
        every = (test[index] for index in range(len(cast(Sized, test))))
        return list(islice((cloud for cloud in every if _has_points(cloud)), count))

    def _loaders(self, seed: int, **sets: Any) -> PointSetData:
        data = self.settings.data
        return PointSetData(**sets, batch_size=data.batch_size, eval_batch_size=data.eval_batch_size, seed=seed)

    def _turned(self, source: Dataset[Data], axis: str | bool) -> Dataset[Data]:
        return TurnedClouds(source, axis, self.vectors, self.tensors) if axis else source


def _has_points(cloud: Data) -> bool:
    pos = cloud.get("pos")
    return isinstance(pos, Tensor) and len(pos) > 0


def _with_root(spec: Spec, root: str | None) -> Spec:
    """Set ``root`` of a data set, if its class takes this argument and the configuration does not give it."""
    given = spec.get("init_args", {})
    if root is None or "root" in given or "root" not in (arguments(spec["class_path"]) or {}):
        return spec
    return {"class_path": spec["class_path"], "init_args": {**given, "root": root}}


def _limited(source: Dataset[Data], count: int | None) -> Dataset[Data]:
    size = len(cast(Sized, source))
    if count is None or count >= size:
        return source
    return Subset(source, sorted(np.random.default_rng(0).permutation(size)[:count].tolist()))


def build_network(name: str, model: ModelSettings) -> nn.Module:
    """Build the network of a model; UsageError is raised if this is not possible, or if it has weights without size."""
    network = build(nn.Module, model.network, f"models.{name}")
    _check_sizes(name, network)
    return network


def _check_sizes(name: str, network: nn.Module) -> None:
    for weight, value in chain(network.named_parameters(), network.named_buffers()):
        if is_lazy(value):
            what = f"but {weight} gets its size from the first batch; give its layer the number of inputs"
            raise UsageError(f"models.{name}: expected weights whose sizes are known from the start, {what}")


def build_task(settings: Settings, name: str, model: ModelSettings) -> PointSetTask:
    """Build the Lightning module of a model; UsageError is raised if a part or the schedule does not fit."""
    parts = {"optimizer": model.optimizer or settings.optimizer, "schedule": settings.schedule}
    given: dict[str, Any] = {**settings.task.get("init_args", {}), "network": model.network}
    given |= {key: part for key, part in parts.items() if part is not None}
    spec = {"class_path": settings.task["class_path"], "init_args": given}
    task = build(PointSetTask, spec, f"the task with models.{name}")  # type: ignore[type-abstract]
    _check_sizes(name, task.network)
    if isinstance(task.schedule, Plateau):
        raise UsageError("schedule: expected another one than Plateau, which counts epochs, since a budget has none")
    try:
        total = settings.budget.steps or 1000
        task.schedule.factor(0, total, total)
    except ValueError as error:
        raise UsageError(
            f"schedule: the whole budget counts as one epoch (a warm-up of 0.05 epochs is its first 5 %): {error}"
        ) from error
    task.config = {"model": spec}
    return task


def build_group(name: str, model: ModelSettings) -> Group | None:
    """Build the group that is given for a model; UsageError is raised if this is not possible."""
    return None if model.group is None else build(Group, model.group, f"models.{name}.group")


def make_trainer(settings: Settings, **options: Any) -> Trainer:
    """Make a trainer without progress bar and logger, with the options of the settings; UsageError if one is wrong."""
    given: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    # Forces are gradients, which cannot be computed in inference mode.
    given |= {"inference_mode": False, "devices": 1, "accelerator": "auto", **settings.trainer, **options}
    try:
        return Trainer(**given | {"accelerator": usable_accelerator(given["accelerator"])})
    except (ImportError, TypeError, ValueError) as error:
        raise UsageError(f"trainer: {error}") from error
