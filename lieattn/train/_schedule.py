"""Schedules of the learning rate, given as factors of the optimizer's rate."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any, Literal, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, ReduceLROnPlateau

from lieattn._core.checks import check_arguments, check_count, counted


class Schedule(abc.ABC):
    """How the learning rate changes from one optimizer step to the next."""

    @abc.abstractmethod
    def factor(self, step: int, steps: float, steps_per_epoch: int) -> float:
        """Factor of the rate after ``step`` of ``steps`` steps; ``steps`` is infinite for a training without end."""

    def schedulers(
        self, optimizer: Optimizer, steps: float, steps_per_epoch: int, batches: int, monitor: tuple[str, str]
    ) -> list[dict[str, Any]]:
        """Schedulers of torch in the form that Lightning expects; an epoch has ``batches`` batches."""
        scheduler = LambdaLR(optimizer, lambda step: self.factor(step, steps, steps_per_epoch))
        return [{"scheduler": scheduler, "interval": "step"}]


@final
class Constant(Schedule):
    """Keep the optimizer's rate throughout the training."""

    def factor(self, step: int, steps: float, steps_per_epoch: int) -> float:
        """Return 1."""
        check_arguments(Constant.factor, locals())
        return 1.0


@final
class WarmupCosine(Schedule):
    """Linear warm-up, then half a cosine down to ``floor`` at the last step; both change the rate in every step.

    ValueError is raised if an argument is out of range, or the training has no end or ends during the warm-up.

    Parameters
    ----------
    warmup_epochs
        Length of the warm-up, at least 0. With a warm-up of n steps, the first step has 1/n of the rate.
    floor
        Factor at the end, in [0, 1].

    Examples
    --------
    >>> schedule = WarmupCosine(warmup_epochs=1)
    >>> [round(schedule.factor(step, 12, 4), 3) for step in (0, 3, 4, 8, 12)]
    [0.25, 1.0, 1.0, 0.5, 0.0]
    """

    def __init__(self, warmup_epochs: float = 10, floor: float = 0.0) -> None:
        check_arguments(WarmupCosine.__init__, locals())
        _check_warmup(warmup_epochs)
        if not 0 <= floor <= 1:
            raise ValueError(f"floor: expected a factor in [0, 1], got {floor}")
        self.warmup_epochs = warmup_epochs
        self.floor = floor

    def factor(self, step: int, steps: float, steps_per_epoch: int) -> float:
        """Return (step + 1) / warm-up steps, and later floor + (1 - floor) (1 + cos(pi t)) / 2 with t from 0 to 1."""
        check_arguments(WarmupCosine.factor, locals())
        warmup = round(self.warmup_epochs * steps_per_epoch)
        if not warmup < steps < math.inf:
            found = "one without end: set trainer.max_epochs or trainer.max_steps"
            if steps <= warmup:
                found = f"{counted(round(steps), 'step')}: lower warmup_epochs, or train longer"
            raise ValueError(
                f"schedule: expected a training that ends after its warm-up of {self.warmup_epochs:g} epochs "
                f"({counted(warmup, 'step')}), got {found}"
            )
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / (steps - warmup))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2


@final
class MultiStep(Schedule):
    """Multiply the rate by ``gamma`` at each milestone, optionally after a linear warm-up.

    Parameters
    ----------
    milestones
        Numbers of epochs, increasing and above 0.
    gamma
        Factor at each milestone, in (0, 1].
    warmup_epochs
        Length of the warm-up, at least 0.
    warmup_per
        Whether the rate rises in each ``"step"``, as for :class:`WarmupCosine`, or in each ``"epoch"``, where the first
        of n epochs has 1/n of the rate.

    Examples
    --------
    >>> schedule = MultiStep([3, 4], warmup_epochs=2, warmup_per="epoch")
    >>> [round(schedule.factor(step, 20, 4), 3) for step in (0, 3, 4, 11, 12, 16)]
    [0.5, 0.5, 1.0, 1.0, 0.1, 0.01]
    """

    def __init__(
        self,
        milestones: Sequence[float],
        gamma: float = 0.1,
        warmup_epochs: float = 0,
        warmup_per: Literal["step", "epoch"] = "step",
    ) -> None:
        check_arguments(MultiStep.__init__, locals())
        if not all(low < high < math.inf for low, high in zip([0, *milestones], milestones, strict=False)):
            raise ValueError(f"milestones: expected increasing numbers above 0, got {milestones}")
        _check_gamma(gamma)
        _check_warmup(warmup_epochs)
        self.milestones, self.gamma = tuple(milestones), gamma
        self.warmup_epochs, self.warmup_per = warmup_epochs, warmup_per

    def factor(self, step: int, steps: float, steps_per_epoch: int) -> float:
        """Return gamma to the power of the number of milestones passed, times the share of the warm-up that is done."""
        check_arguments(MultiStep.factor, locals())
        begun = step + 1 if self.warmup_per == "step" else (step // steps_per_epoch + 1) * steps_per_epoch
        passed = sum(step >= round(milestone * steps_per_epoch) for milestone in self.milestones)
        return float(min(1.0, begun / max(1, round(self.warmup_epochs * steps_per_epoch))) * self.gamma**passed)


@final
class Plateau(Schedule):
    """Multiply the rate by ``gamma`` if the validation has not improved for more than ``patience`` epochs.

    The result of the validation is passed to torch's ``ReduceLROnPlateau``, with its default threshold, at the end of
    each epoch that has a validation. ``lieattn compare`` has no epochs and refuses this
    schedule.

    Parameters
    ----------
    patience
        Number of epochs, at least 0; only epochs with a validation are counted.
    gamma
        Factor, in (0, 1].
    warmup_epochs
        Length of a linear warm-up at the beginning; the rate rises in each step, as for :class:`WarmupCosine`.
    loss
        Whether the loss of the validation counts, and not the task's :attr:`~lieattn.train.PointSetTask.monitor`.
    """

    def __init__(self, patience: int = 10, gamma: float = 0.1, warmup_epochs: float = 0, loss: bool = False) -> None:
        check_arguments(Plateau.__init__, locals())
        check_count("patience", patience, least=0)
        _check_gamma(gamma)
        _check_warmup(warmup_epochs)
        self.patience, self.gamma, self.warmup_epochs, self.loss = patience, gamma, warmup_epochs, loss

    def factor(self, step: int, steps: float, steps_per_epoch: int) -> float:
        """Return the share of the warm-up that is done; the factors from the validation are applied separately."""
        check_arguments(Plateau.factor, locals())
        return min(1.0, (step + 1) / max(1, round(self.warmup_epochs * steps_per_epoch)))

    def schedulers(
        self, optimizer: Optimizer, steps: float, steps_per_epoch: int, batches: int, monitor: tuple[str, str]
    ) -> list[dict[str, Any]]:
        warmup = round(self.warmup_epochs * steps_per_epoch)
        found: list[dict[str, Any]] = []
        if warmup > 1:
            # LinearLR multiplies the present rate, so that both schedulers can change it.
            found.append({"scheduler": LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1), "interval": "step"})
        monitor = ("val/loss", "min") if self.loss else monitor
        mode: Any = monitor[1]
        plateau = ReduceLROnPlateau(optimizer, mode, factor=self.gamma, patience=self.patience)
        # It follows the last batch and its validation; with interval "epoch" it would come after the checkpoint.
        place = {"interval": "step", "frequency": batches, "monitor": monitor[0], "reduce_on_plateau": True}
        return [*found, {"scheduler": plateau, **place}]


def _check_warmup(epochs: float) -> None:
    if not (math.isfinite(epochs) and epochs >= 0):
        raise ValueError(f"warmup_epochs: expected a number >= 0, got {epochs}")


def _check_gamma(gamma: float) -> None:
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma: expected a factor in (0, 1], got {gamma}")
