"""Measurements of a model before it is trained: its parameters, the width of its fiber, and its training steps."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from lieattn import train
from lieattn.compare._build import Sets, build_network, build_task, make_trainer
from lieattn.compare._settings import Cell, ModelSettings, Settings
from lieattn.models import GroupField
from lieattn.ops import count_operations

_BATCHES = 4  # the steps take this many batches of the training set in turn
_WARM_UP = 2  # steps; compiled code of e3nn is optimized in its second run


class Meter(Protocol):
    """Measures models, in this process or in another one."""

    def parameters(self, name: str, model: ModelSettings) -> int:
        """Number of trainable parameters."""

    def operations(self, name: str, model: ModelSettings) -> int:
        """Number of multiply-adds in the forward and backward pass of a training step, averaged over some batches."""

    def width(self, name: str, model: ModelSettings) -> int:
        """Channels times frames of the last field; for a model without a field, its argument ``width``."""

    def prepare(self, slot: str, name: str, model: ModelSettings) -> None:
        """Build a model for :meth:`step`, warm it up, and put it into ``slot`` in place of the previous one."""

    def step(self, slot: str) -> float:
        """Seconds of a training step: processor time, or elapsed time on CUDA."""


@dataclass
class LocalMeter:
    """Measures models in this process."""

    settings: Settings
    _slots: dict[str, Callable[[], float]] = field(default_factory=dict)

    @cached_property
    def sets(self) -> Sets:
        """The data sets, built when they are first needed."""
        return Sets(self.settings)

    def parameters(self, name: str, model: ModelSettings) -> int:
        """See :class:`Meter`."""
        return count_parameters(build_network(name, model))

    def operations(self, name: str, model: ModelSettings) -> int:
        """See :class:`Meter`."""
        task = build_task(self.settings, name, model)
        return step_operations(task, list(self._batches(name)))

    def width(self, name: str, model: ModelSettings) -> int:
        """See :class:`Meter`."""
        network = build_network(name, model)
        if callable(read := getattr(network, "field", None)):
            with torch.no_grad():
                found = read(next(self._batches(name)))
            if isinstance(found, GroupField):
                return found.x.shape[1] * found.x.shape[2]
        argument = str(model.width)
        own, parameters = model.chosen.get(argument), inspect.signature(type(network)).parameters
        if own is None and argument in parameters:  # a reference may leave its width at the default
            own = parameters[argument].default
        if not isinstance(own, int):
            raise train.UsageError(
                f"models.{name}: cannot be matched by width: it has no field, and its argument `width` is not a number"
            )
        return own

    def prepare(self, slot: str, name: str, model: ModelSettings) -> None:
        """See :class:`Meter`."""
        train.seed_generators(self.settings.seeds[0])
        task = build_task(self.settings, name, model)
        task.to(make_trainer(self.settings).strategy.root_device)
        optimizer = task.make_optimizer(task.network.parameters())
        batches = itertools.cycle([batch.to(task.device) for batch in self._batches(name)])

        def step() -> float:
            batch = next(batches).clone()
            started = _clock(task.device)
            optimizer.zero_grad()
            scalar(task.network(task.cast(batch))).backward()
            optimizer.step()
            return _clock(task.device) - started

        task.network.train()
        for _ in range(_WARM_UP):
            step()
        self._slots[slot] = step

    def step(self, slot: str) -> float:
        """See :class:`Meter`."""
        return self._slots[slot]()

    def _batches(self, name: str) -> Iterator[Batch]:
        """The first batches of the training of a cell."""
        data = self.sets.data(Cell(name, max(self.settings.fractions), self.settings.seeds[0]))
        return itertools.islice(data.train_dataloader(), _BATCHES)


def count_parameters(network: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(weight.numel() for weight in network.parameters() if weight.requires_grad)


def step_operations(task: train.PointSetTask, batches: Sequence[Batch]) -> int:
    """Number of multiply-adds of a step, averaged over batches. The weights do not change, and have no gradients."""
    network = task.network
    state = {name: value.clone() for name, value in network.state_dict().items()}
    network.train()

    def work() -> None:
        for batch in batches:
            scalar(network(task.cast(batch.clone().to(task.device)))).backward()

    total = count_operations(work)
    network.zero_grad(set_to_none=True)
    network.load_state_dict(state)
    return round(total / len(batches))


def scalar(outputs: Any) -> Tensor:
    """Return a number that depends on all outputs with gradients, as the loss of a backward pass.

    UsageError is raised if no output depends on weights that are trained.
    """
    parts = train.named_outputs(outputs, "").values()  # tasks ignore those that are no targets
    means = [part.square().mean() for part in parts if isinstance(part, Tensor) and part.requires_grad]
    if not means:
        raise train.UsageError("network: expected outputs that depend on weights with requires_grad, got constant ones")
    return torch.stack(means).sum()


def _clock(device: torch.device) -> float:
    """Seconds of processor time of this process, which other processes do not affect; on CUDA, seconds elapsed."""
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
