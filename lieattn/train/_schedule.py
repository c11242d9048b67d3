"""Learning rates over time, as factors of the optimizer's own rate."""

from __future__ import annotations

import abc
import math
from typing import final

from lieattn._checks import check_arguments


class Schedule(abc.ABC):
    """How the learning rate changes from one optimizer step to the next."""

    @abc.abstractmethod
    def factor(self, step: int, steps: float, steps_per_epoch: int) -> float:
        """Factor of the rate after ``step`` of ``steps`` steps, which are infinite for a training without end."""


@final
class Constant(Schedule):
    """The optimizer's own rate, throughout."""

    def factor(self, step: int, steps: float, steps_per_epoch: int) -> float:
        """Return 1."""
        check_arguments(Constant.factor, locals())
        return 1.0


@final
class WarmupCosine(Schedule):
    """Linear warm-up, then half a cosine down to ``floor`` at the last step, both per step.

    ValueError is raised if an argument is out of range, or the training has no end or ends during the warm-up.

    Parameters
    ----------
    warmup_epochs
        Length of the warm-up, at least 0; the first step has 1/n of the rate for a warm-up of n steps.
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
        if not (math.isfinite(warmup_epochs) and warmup_epochs >= 0):
            raise ValueError(f"warmup_epochs: expected a number >= 0, got {warmup_epochs}")
        if not 0 <= floor <= 1:
            raise ValueError(f"floor: expected a factor in [0, 1], got {floor}")
        self.warmup_epochs = warmup_epochs
        self.floor = floor

    def factor(self, step: int, steps: float, steps_per_epoch: int) -> float:
        """Return (step + 1) / warm-up steps, later floor + (1 - floor) (1 + cos(pi t)) / 2, t from 0 to 1."""
        check_arguments(WarmupCosine.factor, locals())
        warmup = round(self.warmup_epochs * steps_per_epoch)
        if not warmup < steps < math.inf:
            raise ValueError(
                f"schedule: a warm-up of {self.warmup_epochs:g} epochs ({warmup} steps) and a decay need a longer, "
                f"finite training than {steps:g} steps: set trainer.max_epochs"
            )
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / (steps - warmup))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2
