"""The budget of a cell."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lieattn.compare._settings import BudgetSettings
from lieattn.train import LastCheckpoint, PointSetTask, Schedule, UsageError

NEVER = 10**15
"""A number of batches that no training reaches."""

_SAVE_EVERY = 30.0  # seconds between two savings of a cell in progress


class Budget(LastCheckpoint):
    """Validate after equal shares of the steps or seconds, stop when they are spent, and keep the best weights.

    The seconds are the time of the optimizer steps: forward pass, backward pass and update of a batch that is already
    on the device. The step in which the seconds run out is finished. The trainer's ``val_check_interval`` must be
    :data:`NEVER`.

    The state is saved every 30 seconds, and on SIGINT or SIGTERM, which stop the training. It is never saved between a
    step and the validation that follows it, because a continued training would leave out the validation.

    After each step, ``report`` is called with the steps and seconds spent.
    """

    def __init__(
        self, budget: BudgetSettings, dirpath: str | None = None, report: Callable[[int, float], None] | None = None
    ) -> None:
        super().__init__(dirpath)
        self.budget, self.report = budget, report
        self.steps, self.clouds, self.seconds = 0, 0, 0.0  # spent so far
        self.processor_seconds, self._processor = 0.0, 0.0  # during these steps, whatever the clock
        self.history: list[list[float]] = []  # step, seconds and monitored value of each validation
        self.best: dict[str, Tensor] | None = None  # weights of the best validation
        self.best_value = float("nan")
        self._validated: dict[str, Tensor] = {}
        self._clock = time.process_time if budget.clock == "processor" else time.perf_counter
        self._started: float | None = None
        self._saved = time.monotonic()

    @property
    def spent(self) -> float:
        """The share of the budget that is spent, from 0 to 1."""
        running = 0.0 if self._started is None else self._clock() - self._started
        return min(1.0, self._share(self.steps, self.seconds + running))

    @property
    def record(self) -> dict[str, Any]:
        """The cost of the training, and the values of its validations."""
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "processor_seconds": self.processor_seconds,
            "train_clouds_per_s": self.clouds / max(self.seconds, 1e-9),
            "clouds_seen": self.clouds,
            "validation": self.best_value,
            "history": self.history,
        }

    @property
    def validation_is_due(self) -> bool:
        """Whether another share of the budget was spent since the last validation."""
        parts = self.budget.evaluations
        before = self._share(*self.history[-1][:2], parts=parts) if self.history else 0.0
        return int(self._share(self.steps, self.seconds, parts=parts)) > int(before)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop at once if a continued training has already spent its budget."""
        super().on_train_start(trainer, pl_module)
        trainer.should_stop = self.spent >= 1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Start the clock."""
        self._started, self._processor = _now(pl_module, self._clock), time.process_time()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Stop the clock, end the training if the budget is spent, and save between two steps if it is due."""
        if self._started is not None:
            self.seconds += _now(pl_module, self._clock) - self._started
            self.processor_seconds += time.process_time() - self._processor
        self._started = None
        self.steps += 1
        self.clouds += batch.num_graphs
        if self.report is not None:
            self.report(self.steps, self.seconds)
        trainer.should_stop = trainer.should_stop or self.spent >= 1
        # Lightning's own interval between validations would also count time outside the budget.
        trainer.val_check_batch = 1 if self.validation_is_due else NEVER
        if not (trainer.is_last_batch or trainer.should_stop or self.validation_is_due):
            self._save_if_due(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if it is due or the training ends, and stop if asked to."""
        self._save_if_due(trainer, now=trainer.should_stop)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the weights that are validated; averages are in the module only during the validation."""
        self._validated = {key: weight.detach().cpu().clone() for key, weight in pl_module.state_dict().items()}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the weights if they are the best so far; a value that is NaN only counts until there is a number."""
        if trainer.sanity_checking or not isinstance(pl_module, PointSetTask):
            return
        name, mode = pl_module.monitor
        if name not in trainer.callback_metrics:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise UsageError(f"task: {type(pl_module).__name__}.monitor is {name!r}, but evaluate logs {logged}")
        value = float(trainer.callback_metrics[name])
        self.history.append([self.steps, self.seconds, value])
        better = value > self.best_value if mode == "max" else value < self.best_value
        if self.best is None or better or (math.isnan(self.best_value) and not math.isnan(value)):
            self.best, self.best_value = self._validated, value

    def _share(self, steps: float, seconds: float, *, parts: int = 1) -> float:
        """The number of parts that are spent if the budget is divided into ``parts``."""
        spent, total = (seconds, self.budget.seconds) if self.budget.steps is None else (steps, self.budget.steps)
        return spent * parts / (total or 1.0)

    def _save_if_due(self, trainer: Trainer, *, now: bool = False) -> None:
        stop = self._stop(trainer)
        if stop or now or time.monotonic() - self._saved > _SAVE_EVERY:
            self._save(trainer, stop)
            self._saved = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """What is counted, and the best weights, for a checkpoint."""
        spent = [self.steps, self.seconds, self.clouds, self.processor_seconds]
        return {"spent": spent, "history": self.history, "best": self.best, "best_value": self.best_value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the counts, the history and the best weights of a checkpoint."""
        # Cells in progress of earlier versions have no seconds of the processor.
        self.steps, self.seconds, self.clouds, self.processor_seconds = [*state_dict["spent"], math.nan][:4]
        self.history, self.best = state_dict["history"], state_dict["best"]
        self.best_value = state_dict["best_value"]


class BudgetSchedule(Schedule):
    """Stretches a schedule over the budget, which counts as one epoch; the schedule must fit into one epoch."""

    RESOLUTION = 100_000

    def __init__(self, schedule: Schedule, budget: Budget) -> None:
        self.schedule, self.budget = schedule, budget

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Share the budget with the copy, as in copies of a task for averages; a budget cannot always be copied."""
        return type(self)(copy.deepcopy(self.schedule, memo), self.budget)

    def factor(self, step: int, steps: float, steps_per_epoch: int) -> float:
        """Factor of the wrapped schedule at ``step``, or at the seconds that are spent at present."""
        total = self.budget.budget.steps
        if total is not None:
            return self.schedule.factor(min(step, total), total, total)
        return self.schedule.factor(round(self.budget.spent * self.RESOLUTION), self.RESOLUTION, self.RESOLUTION)


class InferenceClock(Callback):
    """Measures the speed of forward passes on the test set, over all batches except the first."""

    def __init__(self) -> None:
        self._times: list[tuple[int, float]] = []
        self._started = 0.0

    @property
    def rate(self) -> float:
        """The number of clouds per second; a single batch is used if there is only one."""
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
    """Wait until the device has finished its work, and return the seconds of a clock."""
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    return clock()
