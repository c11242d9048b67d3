"""The same budget for every cell: steps or seconds are counted, the schedule follows, the best weights are kept."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lieattn.compare._settings import BudgetSettings
from lieattn.train import LastCheckpoint, PointSetTask, Schedule

NEVER = 10**15
"""More batches than any training has."""

_SAVE_EVERY = 30.0  # seconds between two savings of a cell in progress


class Budget(LastCheckpoint):
    """Validate at even shares of the steps or seconds, stop when they are spent, and remember what was best.

    Counted is the time of the optimizer steps: forward pass, backward pass and update, from when a batch is on the
    device. The step in which the seconds end is finished. The trainer's ``val_check_interval`` is :data:`NEVER`.

    The state is saved every 30 seconds, and on SIGINT or SIGTERM, which stop the training; never between a step and the
    validation that belongs to it, which a continued training would leave out.

    ``report`` is called with the steps and seconds spent, after each step.
    """

    def __init__(
        self, budget: BudgetSettings, dirpath: str | None = None, report: Callable[[int, float], None] | None = None
    ) -> None:
        super().__init__(dirpath)
        self.budget, self.report = budget, report
        self.steps, self.clouds, self.seconds = 0, 0, 0.0  # spent so far
        self.history: list[list[float]] = []  # for each validation the step, the seconds and the value monitored
        self.best: dict[str, Tensor] | None = None  # weights of the best validation
        self.best_value = float("nan")
        self._validated: dict[str, Tensor] = {}
        self._clock = time.process_time if budget.clock == "processor" else time.perf_counter
        self._started: float | None = None
        self._saved = time.monotonic()

    @property
    def spent(self) -> float:
        """Share of the budget that is spent, from 0 to 1."""
        running = 0.0 if self._started is None else self._clock() - self._started
        return min(1.0, self._share(self.steps, self.seconds + running))

    @property
    def validation_is_due(self) -> bool:
        """Whether another share of the budget was spent since the last validation."""
        parts = self.budget.evaluations
        before = self._share(*self.history[-1][:2], parts=parts) if self.history else 0.0
        return int(self._share(self.steps, self.seconds, parts=parts)) > int(before)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End at once where a continued training had spent all."""
        super().on_train_start(trainer, pl_module)
        trainer.should_stop = self.spent >= 1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Start the clock."""
        self._started = _now(pl_module, self._clock)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Stop the clock, and the training if all is spent; save between two steps of an epoch if it is time."""
        if self._started is not None:
            self.seconds += _now(pl_module, self._clock) - self._started
        self._started = None
        self.steps += 1
        self.clouds += batch.num_graphs
        if self.report is not None:
            self.report(self.steps, self.seconds)
        trainer.should_stop = trainer.should_stop or self.spent >= 1
        # Validation by Lightning's own clock would count what the budget does not.
        trainer.val_check_batch = 1 if self.validation_is_due else NEVER
        if not (trainer.is_last_batch or trainer.should_stop or self.validation_is_due):
            self._save_if_due(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if it is time or the training ends, and stop if asked to."""
        self._save_if_due(trainer, now=trainer.should_stop)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the weights that are validated: averages are there from now until the last batch alone."""
        self._validated = {key: weight.detach().cpu().clone() for key, weight in pl_module.state_dict().items()}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the weights if they are the best so far; a value that is NaN never is, unless it is the first."""
        if trainer.sanity_checking or not isinstance(pl_module, PointSetTask):
            return
        name, mode = pl_module.monitor
        value = float(trainer.callback_metrics[name])
        self.history.append([self.steps, self.seconds, value])
        if self.best is None or (value > self.best_value if mode == "max" else value < self.best_value):
            self.best, self.best_value = self._validated, value

    def _share(self, steps: float, seconds: float, *, parts: int = 1) -> float:
        """How many parts are spent of a budget that is divided into ``parts``."""
        spent, total = (seconds, self.budget.seconds) if self.budget.steps is None else (steps, self.budget.steps)
        return spent * parts / (total or 1.0)

    def _save_if_due(self, trainer: Trainer, *, now: bool = False) -> None:
        stop = self._stop(trainer)
        if stop or now or time.monotonic() - self._saved > _SAVE_EVERY:
            self._save(trainer, stop)
            self._saved = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """All that was counted, for a checkpoint."""
        spent = [self.steps, self.seconds, self.clouds]
        return {"spent": spent, "history": self.history, "best": self.best, "best_value": self.best_value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting from a checkpoint."""
        self.steps, self.seconds, self.clouds = state_dict["spent"]
        self.history, self.best = state_dict["history"], state_dict["best"]
        self.best_value = state_dict["best_value"]


class BudgetSchedule(Schedule):
    """Stretches a schedule, any one that fits into one epoch, over the budget, which counts as one epoch."""

    RESOLUTION = 100_000

    def __init__(self, schedule: Schedule, budget: Budget) -> None:
        self.schedule, self.budget = schedule, budget

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a task, as averages of its weights are, has the same budget: it may hold what nothing can copy."""
        return type(self)(copy.deepcopy(self.schedule, memo), self.budget)

    def factor(self, step: int, steps: float, steps_per_epoch: int) -> float:
        """Factor of the wrapped schedule, where ``step`` steps, or the seconds at present, are of the budget."""
        total = self.budget.budget.steps
        if total is not None:
            return self.schedule.factor(min(step, total), total, total)
        return self.schedule.factor(round(self.budget.spent * self.RESOLUTION), self.RESOLUTION, self.RESOLUTION)


class InferenceClock(Callback):
    """Measure forward passes on the test set: the clouds and seconds of all batches but the first."""

    def __init__(self) -> None:
        self._times: list[tuple[int, float]] = []
        self._started = 0.0

    @property
    def rate(self) -> float:
        """Clouds in a second; of the only batch if there is one."""
        times = self._times[1:] or self._times
        return sum(count for count, _ in times) / max(sum(seconds for _, seconds in times), 1e-9)

    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Start the clock."""
        self._started = _now(pl_module)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Stop the clock."""
        self._times.append((batch.num_graphs, _now(pl_module) - self._started))


def _now(module: LightningModule, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a clock, when the device has finished its work."""
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    return clock()
