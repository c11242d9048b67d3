"""Measurements of models before they are trained."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from lieattn import train
from lieattn.compare._build import Sets, build_network, build_task, make_trainer
from lieattn.compare._settings import Cell, ModelSettings, Settings
from lieattn.models import GroupField
from lieattn.ops import count_operations

_BATCHES = 4  # the steps take this many batches of the training set in turn
WARM_UP = 2  # steps; compiled code of e3nn is optimized in its second run


@dataclass
class Meter:
    """Measures models on the first batches of the training set."""

    settings: Settings

    def parameters(self, name: str, model: ModelSettings) -> int:
        """Number of trainable parameters."""
        return count_parameters(build_network(name, model))

    def operations(self, name: str, model: ModelSettings) -> int:
        """Number of multiply-adds in the forward and backward pass of a training step, averaged over some batches."""
        return step_operations(build_task(self.settings, name, model), self._batches)

    def width(self, name: str, model: ModelSettings) -> int:
        """Channels times frames of the last field; for a model without a field, its argument ``width``."""
        network = build_network(name, model)
        if callable(read := getattr(network, "field", None)):
            with torch.no_grad():
                found = read(self._batches[0].clone())
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

    def timed_step(self, name: str, model: ModelSettings) -> Callable[[], float]:
        """Return a function that makes a training step of a warmed up model and returns its seconds.

        They are seconds of processor time, which other processes do not affect, or elapsed ones on CUDA.
        """
        train.seed_generators(self.settings.seeds[0])
        task = build_task(self.settings, name, model)
        task.to(make_trainer(self.settings).strategy.root_device)
        optimizer = task.make_optimizer(task.network.parameters())
        batches = itertools.cycle([batch.to(task.device) for batch in self._batches])

        def step() -> float:
            batch = next(batches).clone()
            started = _clock(task.device)
            optimizer.zero_grad()
            scalar(task.network(task.cast(batch))).backward()
            optimizer.step()
            return _clock(task.device) - started

        task.network.train()
        for _ in range(WARM_UP):
            step()
        return step

    @cached_property
    def _batches(self) -> list[Batch]:
        settings = self.settings
        data = Sets(settings).data(Cell("", max(settings.fractions), settings.seeds[0]))
        return list(itertools.islice(data.train_dataloader(), _BATCHES))


def count_parameters(network: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(weight.numel() for weight in network.parameters() if weight.requires_grad)


def step_operations(task: train.PointSetTask, batches: Sequence[Batch]) -> int:
    """Number of multiply-adds of a step, averaged over batches; see :func:`pass_through`."""
    return round(count_operations(partial(pass_through, task, batches)) / len(batches))


def pass_through(task: train.PointSetTask, batches: Sequence[Batch]) -> None:
    """Run forward and backward passes. Afterwards, the state is as before, and weights have no gradients."""
    network = task.network
    state = {name: value.clone() for name, value in network.state_dict().items()}
    network.train()
    for batch in batches:
        scalar(network(task.cast(batch.clone().to(task.device)))).backward()
    network.zero_grad(set_to_none=True)
    network.load_state_dict(state)


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
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
