"""The training of a cell under the budget."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch_geometric.data import Batch

from lieattn import train
from lieattn.bench import peak_memory
from lieattn.certify import Kind, certify
from lieattn.compare._build import Sets, build_group, build_task, kinds_of, make_trainer
from lieattn.compare._match import WARM_UP, count_parameters, pass_through, scalar, step_operations
from lieattn.compare._records import CellStore, Record
from lieattn.compare._settings import BudgetSettings, Cell, ModelSettings, Settings, Spec
from lieattn.groups import SO, Group, cyclic, octahedral, reflection
from lieattn.models import AffineSelfConvNet, AttentiveNetwork, FieldModel, Symmetry, Wrapper
from lieattn.train import LastCheckpoint, PointSetTask, Schedule, UsageError

_ON_LATTICES = (AffineSelfConvNet, AttentiveNetwork)
_QUARTER_TURNS = {2: cyclic(4), 3: octahedral()}


@dataclass
class CellRunner:
    """Runs the cells of a comparison, with its settings and data, and a store for records and progress."""

    settings: Settings
    sets: Sets
    store: CellStore
    _memory: dict[str, float] = field(default_factory=dict)  # peak memory by model

    def run(self, cell: Cell, model: ModelSettings, report: Callable[[int, float], None] | None = None) -> Record:
        """Train and measure a cell, with its ``model`` in the width that was chosen, and write its record.

        A cell in progress is continued. A training that diverges is a result too: its record has the message under
        ``failed`` and no metrics. After each step, ``report`` is called with the steps and seconds spent. On signals,
        TrainingInterrupted is raised after the state was saved.
        """
        key = self.settings.key(cell, model)
        folder = self.store.progress(cell, key)
        train.seed_generators(cell.seed)
        task = build_task(self.settings, cell.model, model)
        data = self.sets.data(cell)
        budget = Budget(self.settings.budget, str(folder), report)
        if not isinstance(task.schedule, train.Constant):
            task.schedule = BudgetSchedule(task.schedule, budget)
        decay = self.settings.decay(model)
        trainer = make_trainer(
            self.settings,
            callbacks=[*([] if decay is None else [train.AveragedWeights(decay)]), budget],
            max_epochs=-1,
            val_check_interval=NEVER,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
        )
        task.to(trainer.strategy.root_device)
        group = group_of(cell.model, model, task.network)
        record: Record = {
            **dataclasses.asdict(cell),
            "clouds": len(cast(Sized, data.sets["train"])),
            "chosen": model.chosen,
            "parameters": count_parameters(task.network),
            "family": family_of(task.network),
            "target": self.sets.described(getattr(task, "targets", ())),
            "group": None if group is None else group.name,
            "guarantee": getattr(task.network, "guarantee", None),
            "device": str(task.device),
            "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "machine": platform.node(),
            "monitor": list(task.monitor),
            "ema": decay,
            "failed": None,
        }
        probe = EquivarianceProbe(self.sets, getattr(task, "targets", ("y",)))
        before = probe.measure(task.network, group)
        record |= self._cost_of_a_step(cell, model, task, data)
        train.seed_generators(cell.seed)
        try:
            trainer.fit(task, data, ckpt_path=_readable(folder / "last.ckpt"))
            # The last step may have had no validation, for example if the training was continued.
            if not budget.history or budget.history[-1][0] != budget.steps:
                trainer.validate(task, data, verbose=False)
        except train.NonFiniteError as error:
            record["failed"] = str(error)
        record |= budget.record
        if record["failed"] is None:
            task.load_state_dict(budget.best or {})
            _save_weights(trainer, folder / "best.ckpt")
            if task.device.type == "cuda":
                record["peak_memory_mib"] = torch.cuda.max_memory_allocated(task.device) / 2**20
            record |= self._test(task)
            task.to(trainer.strategy.root_device)
            record["equivariance"] = {"before": before, "after": probe.measure(task.network, group)}
        self.store.save(cell, key, record)
        return record

    def _cost_of_a_step(
        self, cell: Cell, model: ModelSettings, task: train.PointSetTask, data: train.PointSetData
    ) -> Record:
        """Measure peak memory and operations of a training step, and warm the network up; its weights do not change."""
        batches = (list(islice(data.train_dataloader(), WARM_UP)) * WARM_UP)[:WARM_UP]
        memory = self._peak_memory(cell, model, task, batches[0])
        operations = step_operations(task, batches)
        pass_through(task, batches)  # so that compilation is not counted
        return {"peak_memory_mib": memory, "operations": operations}

    def _peak_memory(self, cell: Cell, model: ModelSettings, task: train.PointSetTask, batch: Batch) -> float | None:
        """Peak memory of a step on the CPU, measured for the first seed only; on CUDA the training measures it."""
        if task.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(task.device)
            return None
        if not self.settings.memory or cell.seed != self.settings.seeds[0]:
            return None
        if cell.model not in self._memory:
            self._memory[cell.model] = training_memory(model.network, batch)
        return self._memory[cell.model]

    def _test(self, task: train.PointSetTask) -> Record:
        """Metrics on the test set, also on the rotated one if the settings ask for it, and the inference speed."""
        found: Record = {}
        for kind in ("metrics", "rotated_metrics") if self.settings.data.rotate_test else ("metrics",):
            clock = InferenceClock()
            tester = make_trainer(self.settings, callbacks=[clock])
            (metrics,) = tester.test(task, self.sets.test_data(rotated=kind == "rotated_metrics"), verbose=False)
            found[kind] = {name.removeprefix("test/"): float(value) for name, value in metrics.items()}
            found.setdefault("inference_clouds_per_s", clock.rate)
        return found


class EquivarianceProbe:
    """Measures relative errors ‖f(g x) - g f(x)‖ / ‖f(x)‖ on clouds of the test set.

    They are measured by :func:`lieattn.certify.certify`. Outputs for ``targets`` that are among the vectors or tensors
    of the data should transform with the points. The errors are the largest ones over the elements g: ``own`` over the
    model's own group, ``rotations`` over SO(d), and ``reflections``. For networks on images and voxels, quarter turns
    and one mirror take the place of the latter two. Translations are added unless the clouds have other vectors or
    tensors, such as later positions.
    """

    def __init__(self, sets: Sets, targets: Iterable[str]) -> None:
        self.elements = sets.settings.equivariance.elements
        self.clouds = sets.clouds(sets.settings.equivariance.clouds)
        self.dim = int(self.clouds[0].pos.shape[1])
        kinds: dict[str, Kind] = {**dict.fromkeys(sets.vectors, "vector"), **dict.fromkeys(sets.tensors, "tensor")}
        self.outputs = {name: kinds.get(name, "invariant") for name in targets}
        self.inputs = kinds_of(self.clouds[0], sets.vectors, sets.tensors)
        if len(self.inputs) == 1:
            self.inputs = {}  # there are only positions, so translations can be added

    def measure(self, network: nn.Module, group: Group | None) -> dict[str, float | None]:
        """Return the errors by kind; ``own`` is None for a network without a group."""
        if group is not None and group.dim != self.dim:
            raise train.UsageError(f"group: {group.name} acts on {group.dim} coordinates, the clouds have {self.dim}")
        own = None if group is None else self._largest(network, group)["element"]
        if any(isinstance(module, _ON_LATTICES) for module in network.modules()):
            # Other motions do not map the lattice to itself.
            moves = {"element": _QUARTER_TURNS[self.dim], "outside": reflection(self.dim)}
            free = {check: self._largest(network, moved)["element"] for check, moved in moves.items()}
        else:
            free = self._largest(network, SO(self.dim), outside=self.elements)
        return {"own": own, "rotations": free["element"], "reflections": free["outside"]}

    def _largest(self, network: nn.Module, group: Group, outside: int = 0) -> dict[str, float]:
        """Largest errors under elements of the group, and under motions outside the group."""
        dtype = next((weight.dtype for weight in network.parameters()), torch.float32)
        certificate = certify(
            _Targets(network, tuple(self.outputs)),
            self.clouds,
            group,
            inputs=self.inputs,
            outputs=self.outputs,
            dtypes=[dtype],
            tolerances={dtype: math.inf},
            elements=self.elements,
            rotations=outside,
            permute=False,
        )
        largest: dict[str, float] = {}
        for row in certificate.rows:
            largest[row.check] = max(largest.get(row.check, 0.0), row.relative, key=lambda x: (math.isnan(x), x))
        return largest


class _Targets(nn.Module):
    """A network reduced to its outputs for the targets, by name."""

    def __init__(self, network: nn.Module, targets: tuple[str, ...]) -> None:
        super().__init__()
        self.network, self.targets = network, targets
        self.vector_inputs = getattr(network, "vector_inputs", ())
        self.field_inputs = getattr(network, "field_inputs", {})

    def forward(self, data: Batch) -> dict[str, Tensor]:
        outputs = train.named_outputs(self.network(data), self.targets[0])
        return {name: outputs[name] for name in self.targets}


def group_of(name: str, model: ModelSettings, network: nn.Module) -> Group | None:
    """The group that is given for a model, or the group in the ``symmetry`` of its network."""
    given = build_group(name, model)
    return Symmetry.stated_by(network).group if given is None else given


def family_of(network: Any) -> str:
    """The folder of ``lieattn.models`` with the class of a network, such as ``"irreps"``; the package of other ones."""
    while isinstance(network, Wrapper):
        network = network.wrapped
    network = network.network if isinstance(network, FieldModel) else network
    parts = type(network).__module__.split(".")
    return parts[2] if parts[:2] == ["lieattn", "models"] and len(parts) > 2 else parts[0]


def _readable(checkpoint: Path) -> Path | None:
    """The checkpoint from which a training continues; others are deleted, so that the cell starts anew."""
    try:
        whole = "optimizer_states" in train.read_checkpoint(checkpoint)  # a file of weights alone is no such checkpoint
    except train.CheckpointError:
        whole = False
    if not whole:
        checkpoint.unlink(missing_ok=True)
    return checkpoint if whole else None


def _save_weights(trainer: Trainer, path: Path) -> None:
    """Write a checkpoint with the present weights of the network."""
    for callback in list(trainer.callbacks):  # type: ignore[attr-defined]
        if isinstance(callback, train.AveragedWeights):  # it would write the latest averages instead
            trainer.callbacks.remove(callback)  # type: ignore[attr-defined]
    trainer.save_checkpoint(path, weights_only=True)


def training_memory(network: Spec, batch: Batch) -> float:
    """Peak resident memory in MiB of a forward and backward pass on the CPU, in addition to weights and gradients."""
    # The batch is sent as bytes, because tensors sent to another process would need shared memory.
    return peak_memory(partial(_problem, network, pickle.dumps(batch)))


def _problem(network: Spec, batch: bytes) -> Callable[[], Iterator[Tensor]]:
    built, clouds = train.build(nn.Module, network, "the network"), pickle.loads(batch)

    def step() -> Iterator[Tensor]:
        yield scalar(built(clouds))

    return step


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
