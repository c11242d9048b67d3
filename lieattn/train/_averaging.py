"""Averages of the weights over the steps of a training, which are validated and saved in place of the last weights."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lieattn._checks import check_arguments
from lieattn.train._configuration import UsageError

_TRAINED = "current_model_state"  # Lightning's entry for the weights that are not averages


class AveragedWeights(WeightAveraging):
    r"""Exponential moving average of the weights, which is validated, saved and left in the task after training.

    .. math::  \bar w_n = d_n \bar w_{n-1} + (1 - d_n) w_n, \qquad d_n = \min(d, (1 + n) / (10 + n))

    after each step of the optimizer, from the weights :math:`\bar w_0 = w_0` after the first one on. The decays grow to
    d, so that the initial weights are soon forgotten.

    This is :class:`lightning.pytorch.callbacks.WeightAveraging`: a checkpoint has the averages as ``"state_dict"``,
    which is what is loaded for tests and predictions, and the weights that are trained as ``"current_model_state"``,
    from which a run continues. Running statistics of normalizations are averaged like weights. What does not change,
    such as the tables of a group, keeps its bits, and integers are copied: Lightning's EMAWeightAveraging rounds them
    down, and is refused.

    Averages of weights in half precision, as of ``Trainer(precision="bf16-true")``, are kept in float32, since their
    steps are smaller than what such numbers can tell apart; validation and ``"state_dict"`` have them rounded.

    Parameters
    ----------
    decay
        d in [0, 1), ValueError for others. An average goes over about 1 / (1 - d) steps.
    """

    def __init__(self, decay: float = 0.999) -> None:
        check_arguments(AveragedWeights.__init__, locals())
        if not 0 <= decay < 1:
            raise ValueError(f"decay: expected a number in [0, 1), got {decay}")
        super().__init__(multi_avg_fn=self._average)
        self.decay = decay
        self._kept: list[Tensor] | None = None  # averages in all their digits, while they are validated

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the averages, in the precision that the weights will have, or float32 for less than that."""
        if stage == "fit":
            # Lightning does so later, when the weights of a checkpoint were already rounded.
            trainer.precision_plugin.convert_module(pl_module)
        super().setup(trainer, pl_module, stage)
        self._kept = None
        for average in _tensors(self._average_model):
            if average.is_floating_point() and average.element_size() < 4:
                average.data = average.data.float()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the state of the task, which may have measured its data since the average was made."""
        average = self._average_model
        if average is not None and average.n_averaged == 0:
            average.module.load_state_dict(pl_module.state_dict())

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """Move the averages after a step of the optimizer."""
        weights: Any = _Widened(pl_module, self._average_model)
        super().on_train_batch_end(trainer, weights, *rest)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the averages where weights are loaded from, with what the weights are for."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        averages = OrderedDict(checkpoint["state_dict"])
        for name, weight in checkpoint.get(_TRAINED, {}).items():
            if averages[name].dtype != weight.dtype:  # what was not rounded is loaded over what was
                checkpoint["averaging_state"][f"module.{name}"] = averages[name]
                averages[name] = averages[name].to(weight.dtype)
        vars(averages)["_metadata"] = getattr(pl_module.state_dict(), "_metadata", {})
        checkpoint["state_dict"] = averages

    def _average(self, averages: list[Tensor], weights: list[Tensor], steps: Tensor) -> None:
        """Move averages of one dtype toward the weights; equal numbers stay as they are."""
        done = int(steps)
        decay = min(self.decay, (1 + done) / (10 + done))
        if averages[0].is_floating_point():
            torch._foreach_lerp_(averages, weights, 1 - decay)
        else:
            torch._foreach_copy_(averages, weights)

    def _swap_models(self, pl_module: LightningModule) -> None:
        """Validate the averages; there are none before the first step."""
        if self._average_model is None or self._average_model.n_averaged == 0:
            return
        pairs = zip(_tensors(self._average_model.module), _tensors(pl_module), strict=True)
        finer = [average for average, weight in pairs if average.dtype != weight.dtype]
        kept, self._kept = self._kept, [average.detach().clone() for average in finer]
        super()._swap_models(pl_module)
        if kept is not None:  # they come back, rounded by then
            for average, value in zip(finer, kept, strict=True):
                average.data.copy_(value)
            self._kept = None


class _Widened:
    """Parameters and buffers of a module in the dtypes of their averages."""

    def __init__(self, module: nn.Module, averages: AveragedModel | None) -> None:
        self.module, self.averages = module, averages.module if averages else module

    def parameters(self) -> Iterator[Tensor]:
        return map(_in_dtype_of, self.module.parameters(), self.averages.parameters())

    def buffers(self) -> Iterator[Tensor]:
        return map(_in_dtype_of, self.module.buffers(), self.averages.buffers())


def _in_dtype_of(weight: Tensor, average: Tensor) -> Tensor:
    return weight.detach().to(average.dtype)


def _tensors(module: nn.Module | None) -> Iterator[Tensor]:
    return iter(()) if module is None else itertools.chain(module.parameters(), module.buffers())


def check_averaging(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Raise UsageError for averages that change tables of a network, or if a run would drop those of its checkpoint."""
    found = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]  # type: ignore[attr-defined]
    for callback in found:
        if not isinstance(callback, AveragedWeights):
            name = type(callback).__name__
            raise UsageError(f"trainer.callbacks: {name} changes tables of networks, use lieattn.train.AveragedWeights")
    if trainer.training and _TRAINED in checkpoint and not found:
        expected = "continue with --ema, or in Python with lieattn.train.AveragedWeights among the callbacks"
        raise UsageError(f"ema: the checkpoint is of a training with averaged weights: {expected}")
