"""The same budget for every cell: steps or seconds are counted, the schedule follows, the best weights are kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lieattn.compare._settings import BudgetSettings
from lieattn.train import LastCheckpoint, PointSetTask, Schedule

_SAVE_EVERY = 30.0  # seconds between two savings of a cell in progress

NEVER = 10**15
"""More batches than any training has."""


class Budget(Callback):
    """Validate at even shares of the steps or seconds, stop when they are spent, and remember what was best.

    Counted is the time of the optimizer steps: forward pass, backward pass and update, from when a batch is on the
    device. Not counted are the preparation of data, of batches and of the first step (compilation), validation and
    checkpoints. The step in which the seconds end is finished. The trainer's ``val_check_interval`` is :data:`NEVER`.

    Parameters
    ----------
    budget
        What may be spent.
    report
        Called with the steps and seconds spent, after each step.

    Attributes
    ----------
    steps, seconds, clouds
        Spent so far, and clouds trained on.
    history
        For each validation the step, the seconds and the value monitored.
    best
        Weights of the best validation; None before the first.
    """

    def __init__(self, budget: BudgetSettings, report: Callable[[int, float], None] | None = None) -> None:
        self.budget, self.report = budget, report
        self.steps, self.clouds, self.seconds = 0, 0, 0.0
        self.history: list[list[float]] = []
        self.best: dict[str, Tensor] | None = None
        self.best_value = float("nan")
        self._started: float | None = None

    @property
    def spent(self) -> float:
        """Share of the budget that is spent, from 0 to 1."""
        if self.budget.steps is not None:
            return min(1.0, self.steps / self.budget.steps)
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        return min(1.0, (self.seconds + running) / float(self.budget.seconds or 1.0))

    @property
    def validation_is_due(self) -> bool:
        """Whether another share of the budget was spent since the last validation."""
        steps, seconds = self.history[-1][:2] if self.history else (0, 0.0)
        return self._shares(self.steps, self.seconds) > self._shares(steps, seconds)

    @property
    def is_validated(self) -> bool:
        """Whether the present weights were validated."""
        return bool(self.history) and self.history[-1][0] == self.steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End at once where a continued training had spent all."""
        trainer.should_stop = self.spent >= 1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        _synchronize(pl_module)
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock, and the training if all is spent."""
        _synchronize(pl_module)
        started, self._started = self._started, None
        self.seconds += 0.0 if started is None else time.perf_counter() - started
        self.steps += 1
        self.clouds += batch.num_graphs
        if self.report is not None:
            self.report(self.steps, self.seconds)
        trainer.should_stop = trainer.should_stop or self.spent >= 1
        # Validation by Lightning's own clock would count what the budget does not.
        trainer.val_check_batch = 1 if self.validation_is_due else NEVER

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the weights if they are the best so far; a value that is NaN never is, unless it is the first."""
        if trainer.sanity_checking or not isinstance(pl_module, PointSetTask):
            return
        name, mode = pl_module.monitor
        value = float(trainer.callback_metrics[name])
        self.history.append([self.steps, self.seconds, value])
        if self.best is None or (value > self.best_value if mode == "max" else value < self.best_value):
            self.best_value = value
            self.best = {key: weight.detach().cpu().clone() for key, weight in pl_module.state_dict().items()}

    def _shares(self, steps: float, seconds: float) -> int:
        """How many shares of the budget are spent, of as many as there are validations."""
        spent, total = (seconds, self.budget.seconds) if self.budget.steps is None else (steps, self.budget.steps)
        return int(spent * self.budget.evaluations / float(total or 1.0))

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
    """Stretches a schedule over the budget, which counts as one epoch.

    Parameters
    ----------
    schedule
        Any schedule that fits into one epoch.
    budget
        Tells how much is spent.
    """

    RESOLUTION = 100_000

    def __init__(self, schedule: Schedule, budget: Budget) -> None:
        self.schedule, self.budget = schedule, budget

    def factor(self, step: int, steps: float, steps_per_epoch: int) -> float:
        """Factor of the wrapped schedule, where ``step`` steps, or the seconds at present, are of the budget."""
        total = self.budget.budget.steps
        if total is not None:
            return self.schedule.factor(min(step, total), total, total)
        return self.schedule.factor(round(self.budget.spent * self.RESOLUTION), self.RESOLUTION, self.RESOLUTION)


class CellCheckpoint(LastCheckpoint):
    """Keep the state of a cell in progress: every 30 seconds, and on SIGINT or SIGTERM, which stop the training.

    Never between a step and the validation that belongs to it, which a continued training would leave out.

    Parameters
    ----------
    dirpath
        Folder of ``last.ckpt``.
    budget
        Tells when a validation is due; it comes before this in the list of callbacks.
    """

    def __init__(self, dirpath: str, budget: Budget) -> None:
        super().__init__(dirpath)
        self.budget = budget
        self._saved = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time, or stop, between two steps of an epoch."""
        if not (trainer.is_last_batch or trainer.should_stop or self.budget.validation_is_due):
            self._save_if_due(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if it is time or the training ends, and stop if asked to."""
        self._save_if_due(trainer, now=trainer.should_stop)

    def _save_if_due(self, trainer: Trainer, *, now: bool = False) -> None:
        stop = self._stop(trainer)
        if stop or now or time.monotonic() - self._saved > _SAVE_EVERY:
            self._save(trainer, stop)
            self._saved = time.monotonic()


class InferenceClock(Callback):
    """Measure forward passes on the test set: the clouds and seconds of all batches but the first.

    Attributes
    ----------
    rate
        Clouds in a second; of the only batch if there is one.
    """

    def __init__(self) -> None:
        self._times: list[tuple[int, float]] = []
        self._started = 0.0

    @property
    def rate(self) -> float:
        """Clouds in a second."""
        times = self._times[1:] or self._times
        return sum(count for count, _ in times) / max(sum(seconds for _, seconds in times), 1e-9)

    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """Start the clock."""
        _synchronize(pl_module)
        self._started = time.perf_counter()

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *rest: Any
    ) -> None:
        """Stop the clock."""
        _synchronize(pl_module)
        self._times.append((batch.num_graphs, time.perf_counter() - self._started))


def _synchronize(module: LightningModule) -> None:
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
