"""One cell of a comparison: train under the budget, take the best weights, measure."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch_geometric.data import Batch

from lieattn.train._checkpoint import read_checkpoint
from lieattn.train._compare_budget import NEVER, Budget, BudgetSchedule, CellCheckpoint, InferenceClock
from lieattn.train._compare_config import Cell, ModelSettings, Settings
from lieattn.train._compare_data import Sets
from lieattn.train._compare_equivariance import EquivarianceProbe, group_of
from lieattn.train._compare_memory import scalar, training_memory
from lieattn.train._compare_models import build_task, count_parameters
from lieattn.train._compare_store import CellStore, Record
from lieattn.train._data import PointSetData
from lieattn.train._errors import CheckpointError, NonFiniteError
from lieattn.train._generators import seed_generators
from lieattn.train._schedule import Constant
from lieattn.train._task import PointSetTask

Report = Callable[[int, float], None]

_WARM_UP = 2  # e3nn's compiled code is optimized in its second run


@dataclass
class CellRunner:
    """Runs cells of one comparison.

    Attributes
    ----------
    settings, sets, store
        The comparison, its data, and where records and progress are kept.
    """

    settings: Settings
    sets: Sets
    store: CellStore
    _memory: dict[str, float] = field(default_factory=dict)

    def run(self, cell: Cell, model: ModelSettings, report: Report | None = None) -> Record:
        """Train and measure a cell, and write its record.

        A cell in progress is continued. A training that diverges is a result: its record has the message under
        ``failed`` and no metrics.

        Parameters
        ----------
        cell
            The cell.
        model
            Its model, of the width it is trained with.
        report
            Called with steps and seconds spent, after each step.

        Raises
        ------
        TrainingInterrupted
            On SIGINT and SIGTERM while training, after the state was saved.
        UsageError
            If parts of the configuration do not fit together.
        """
        key = self.settings.key(cell, model)
        folder = self.store.progress(cell, key)
        seed_generators(cell.seed)
        task = build_task(self.settings, cell.model, model)
        data = self.sets.data(cell)
        budget = Budget(self.settings.budget, report)
        if not isinstance(task.schedule, Constant):
            task.schedule = BudgetSchedule(task.schedule, budget)
        trainer = self._trainer(folder, budget)
        task.to(trainer.strategy.root_device)
        record = self._facts(cell, model, task, data)
        probe, group = self._probe(task), group_of(cell.model, model, task.network)
        before = probe.measure(task.network, group)
        batches = _first_batches(data)
        record["peak_memory_mib"] = self._peak_memory(cell, model, task, batches[0])
        _warm_up(task, batches)
        seed_generators(cell.seed)
        try:
            _train(trainer, task, data, folder)
        except NonFiniteError as error:
            record |= {"failed": str(error), **_spent(budget)}
        else:
            _take_best(trainer, task, data, budget, folder)
            record |= _spent(budget)
            if task.device.type == "cuda":
                record["peak_memory_mib"] = torch.cuda.max_memory_allocated(task.device) / 2**20
            record |= self._test(task, trainer)
            task.to(trainer.strategy.root_device)
            record["equivariance"] = {"before": before, "after": probe.measure(task.network, group)}
        self.store.save(cell, key, record)
        return record

    def _facts(self, cell: Cell, model: ModelSettings, task: PointSetTask, data: PointSetData) -> Record:
        group = group_of(cell.model, model, task.network)
        return {
            "model": cell.model,
            "fraction": cell.fraction,
            "seed": cell.seed,
            "clouds": len(cast(Sized, data.sets["train"])),
            "parameters": count_parameters(task.network),
            "chosen": model.chosen,
            "group": None if group is None else group.name,
            "guarantee": getattr(task.network, "guarantee", None),
            "device": str(task.device),
            "threads": torch.get_num_threads(),
            "failed": None,
        }

    def _trainer(self, folder: Path, budget: Budget) -> Trainer:
        return _make_trainer(
            self.settings,
            callbacks=[budget, CellCheckpoint(str(folder), budget)],
            max_epochs=-1,
            val_check_interval=NEVER,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
        )

    def _probe(self, task: PointSetTask) -> EquivarianceProbe:
        chosen = self.settings.equivariance
        targets = getattr(task, "targets", {"y": 1.0})
        return EquivarianceProbe(self.sets, chosen.clouds, chosen.elements, list(targets))

    def _peak_memory(self, cell: Cell, model: ModelSettings, task: PointSetTask, batch: Batch) -> float | None:
        """Of a step on the CPU, which is measured with the first seed alone; on CUDA the training itself tells."""
        if task.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(task.device)
            return None
        if not self.settings.memory or cell.seed != self.settings.seeds[0]:
            return None
        if cell.model not in self._memory:
            self._memory[cell.model] = training_memory(model.network, batch)
        return self._memory[cell.model]

    def _test(self, task: PointSetTask, trainer: Trainer) -> Record:
        """Metrics on the test set as it is, and on the turned one if asked for; forward passes are timed."""
        found: Record = {}
        kinds = {"metrics": False, **({"rotated_metrics": True} if self.settings.data.rotate_test else {})}
        for kind, rotated in kinds.items():
            clock = InferenceClock()
            tester = _make_trainer(self.settings, callbacks=[clock])
            (metrics,) = tester.test(task, self.sets.test_data(rotated=rotated), verbose=False)
            found[kind] = {name.removeprefix("test/"): float(value) for name, value in metrics.items()}
            found.setdefault("inference_clouds_per_s", clock.rate)
        return found


def _make_trainer(settings: Settings, **options: Any) -> Trainer:
    # Forces are gradients, which inference mode forbids.
    fixed: dict[str, Any] = {
        "inference_mode": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**fixed, enable_checkpointing=True, devices=1, **{**_without_devices(settings), **options})


def _without_devices(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in settings.trainer.items() if name != "devices"}


def _train(trainer: Trainer, task: PointSetTask, data: PointSetData, folder: Path) -> None:
    """Train, from the last checkpoint if there is a whole one."""
    last = folder / "last.ckpt"
    if last.exists():
        try:
            read_checkpoint(last)
        except CheckpointError:
            last.unlink()
    trainer.fit(task, data, ckpt_path=last if last.exists() else None)


def _take_best(trainer: Trainer, task: PointSetTask, data: PointSetData, budget: Budget, folder: Path) -> None:
    """Validate the last weights if a continued training did not, and load the best ones."""
    if not budget.is_validated:
        trainer.validate(task, data, verbose=False)
    task.load_state_dict(budget.best or {})
    trainer.save_checkpoint(folder / "best.ckpt", weights_only=True)


def _spent(budget: Budget) -> Record:
    return {
        "steps": budget.steps,
        "seconds": budget.seconds,
        "train_clouds_per_s": budget.clouds / max(budget.seconds, 1e-9),
        "clouds_seen": budget.clouds,
        "validation": budget.best_value,
        "history": budget.history,
    }


def _first_batches(data: PointSetData) -> list[Batch]:
    """The first batches in the order of the set, which need not be different ones."""
    train = cast(Any, data.sets["train"])
    size = min(data.batch_size, len(train))
    clouds = [train[index % len(train)] for index in range(_WARM_UP * size)]
    return [Batch.from_data_list(clouds[start : start + size]) for start in range(0, len(clouds), size)]


def _warm_up(task: LightningModule, batches: list[Batch]) -> None:
    """Run some steps that leave no trace, so that compilation is not counted."""
    network: Any = task.network
    state = {name: value.clone() for name, value in network.state_dict().items()}
    dtype = task.dtype
    network.train()
    for batch in batches:
        moved = batch.clone().to(task.device)
        moved = moved.apply(
            lambda value: value.to(dtype) if isinstance(dtype, torch.dtype) and value.is_floating_point() else value
        )
        scalar(network(moved)).backward()
    network.zero_grad(set_to_none=True)
    network.load_state_dict(state)
