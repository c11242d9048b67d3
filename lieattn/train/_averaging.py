"""Averages of the weights over the training steps."""

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

from lieattn._core.checks import check_arguments
from lieattn.io import UsageError

_TRAINED = "current_model_state"  # Lightning's entry for the weights that are not averages


class AveragedWeights(WeightAveraging):
    r"""Exponential moving average of the weights, which is validated, saved and left in the task after training.

    .. math::  \bar w_n = d_n \bar w_{n-1} + (1 - d_n) w_n, \qquad d_n = \min(d, (1 + n) / (10 + n))

    The averages are updated after each optimizer step, beginning with the weights :math:`\bar w_0 = w_0` after the
    first one. The decays grow to d, so that the initial weights are soon forgotten.

    This is a :class:`lightning.pytorch.callbacks.WeightAveraging`. A checkpoint stores the averages as
    ``"state_dict"``, which is loaded for tests and predictions, and the trained weights as ``"current_model_state"``,
    from which a run continues. Running statistics of normalizations are averaged like weights. Constant buffers, such
    as the tables of a group, stay bitwise equal, and integers are copied. Lightning's own EMAWeightAveraging is
    refused because it rounds integers down.

    Averages of weights in half precision, as with ``Trainer(precision="bf16-true")``, are kept in float32, because
    half precision cannot resolve their small steps. They are rounded for validation and in ``"state_dict"``.

    Parameters
    ----------
    decay
        The decay d in [0, 1); ValueError is raised for other numbers. The average covers about 1 / (1 - d) steps.
    """

    def __init__(self, decay: float = 0.999) -> None:
        check_arguments(AveragedWeights.__init__, locals())
        if not 0 <= decay < 1:
            raise ValueError(f"decay: expected a number in [0, 1), got {decay}")
        super().__init__(multi_avg_fn=self._average)
        self.decay = decay
        self._kept: list[Tensor] | None = None  # unrounded averages, kept while rounded ones are validated

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Create the averages in the precision that the weights will have, but at least in float32."""
        if stage == "fit":
            # Lightning converts the module later, when the weights of a checkpoint have already been rounded.
            trainer.precision_plugin.convert_module(pl_module)
        super().setup(trainer, pl_module, stage)
        self._kept = None
        for average in _tensors(self._average_model):
            if average.is_floating_point() and average.element_size() < 4:
                average.data = average.data.float()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start from the present state of the task, which may have measured its data since the averages were made."""
        average = self._average_model
        if average is not None and average.n_averaged == 0:
            average.module.load_state_dict(pl_module.state_dict())

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """Update the averages after an optimizer step."""
        weights: Any = _Widened(pl_module, self._average_model)
        super().on_train_batch_end(trainer, weights, *rest)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the averages as ``"state_dict"``, together with the metadata of the weights."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        averages = OrderedDict(checkpoint["state_dict"])
        for name, weight in checkpoint.get(_TRAINED, {}).items():
            if averages[name].dtype != weight.dtype:  # a continued run loads the unrounded averages
                checkpoint["averaging_state"][f"module.{name}"] = averages[name]
                averages[name] = averages[name].to(weight.dtype)
        vars(averages)["_metadata"] = getattr(pl_module.state_dict(), "_metadata", {})
        checkpoint["state_dict"] = averages

    def _average(self, averages: list[Tensor], weights: list[Tensor], steps: Tensor) -> None:
        """Move averages of one dtype toward the weights; an average that equals its weight does not change."""
        done = int(steps)
        decay = min(self.decay, (1 + done) / (10 + done))
        if averages[0].is_floating_point():
            torch._foreach_lerp_(averages, weights, 1 - decay)
        else:
            torch._foreach_copy_(averages, weights)

    def _swap_models(self, pl_module: LightningModule) -> None:
        """Swap weights and averages for a validation; before the first step there are no averages."""
        if self._average_model is None or self._average_model.n_averaged == 0:
            return
        pairs = zip(_tensors(self._average_model.module), _tensors(pl_module), strict=True)
        finer = [average for average, weight in pairs if average.dtype != weight.dtype]
        kept, self._kept = self._kept, [average.detach().clone() for average in finer]
        super()._swap_models(pl_module)
        if kept is not None:  # the averages are swapped back after they were rounded
            for average, value in zip(finer, kept, strict=True):
                average.data.copy_(value)
            self._kept = None


class _Widened:
    """Parameters and buffers of a module, converted to the dtypes of their averages."""

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
    """Raise UsageError if averaging would change tables of a network, or a run would drop its checkpoint's averages."""
    found = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]  # type: ignore[attr-defined]
    for callback in found:
        if not isinstance(callback, AveragedWeights):
            name = type(callback).__name__
            raise UsageError(f"trainer.callbacks: {name} changes tables of networks, use lieattn.train.AveragedWeights")
    if trainer.training and _TRAINED in checkpoint and not found:
        expected = "continue with --ema, or in Python with lieattn.train.AveragedWeights among the callbacks"
        raise UsageError(f"ema: the checkpoint is of a training with averaged weights: {expected}")
