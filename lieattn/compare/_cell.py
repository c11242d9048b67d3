"""One cell of a comparison: train under the budget, take the best weights, measure, equivariance included."""

from __future__ import annotations

import dataclasses
import math
import pickle
import platform
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Self, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch_geometric.data import Batch

from lieattn import train
from lieattn.bench import peak_memory
from lieattn.certify import Kind, certify
from lieattn.compare._budget import NEVER, Budget, BudgetSchedule, InferenceClock
from lieattn.compare._build import Sets, build_task, kinds_of, make_trainer
from lieattn.compare._interpreter import Interpreter
from lieattn.compare._meter import count_parameters, scalar, step_operations
from lieattn.compare._records import CellStore, Record
from lieattn.compare._settings import Cell, ModelSettings, Settings, Spec
from lieattn.groups import SO, Group, cyclic, octahedral, reflection
from lieattn.models import AffineSelfConvNet, AttentiveNetwork, Symmetry

_ON_LATTICES = (AffineSelfConvNet, AttentiveNetwork)
_QUARTER_TURNS = {2: cyclic(4), 3: octahedral()}
_WARM_UP = 2  # e3nn's compiled code is optimized in its second run


@dataclass
class CellRunner:
    """Runs cells of one comparison: its settings and data, and where records and progress are kept."""

    settings: Settings
    sets: Sets
    store: CellStore
    _memory: dict[str, float] = field(default_factory=dict)  # by model
    _interpreters: dict[str, Interpreter] = field(default_factory=dict)  # by their paths

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the interpreters end that cells were run in."""
        for interpreter in self._interpreters.values():
            interpreter.close()

    def run(self, cell: Cell, model: ModelSettings, report: Callable[[int, float], None] | None = None) -> Record:
        """Train and measure a cell, with its ``model`` of the width chosen, and write its record.

        A cell in progress is continued. A training that diverges is a result: its record has the message under
        ``failed`` and no metrics. ``report`` is called with steps and seconds spent, after each step.
        TrainingInterrupted is raised on signals, after the state was saved, UsageError if parts do not fit together. A
        model with a ``python`` of its own is run there.
        """
        if model.python is not None:
            other = self._interpreters.setdefault(model.python, Interpreter(model.python, self.settings))
            return other.run(cell, model, self.store.folder.parent, report)
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
            **_description(task, group),
            "ema": decay,
            "failed": None,
        }
        probe = EquivarianceProbe(self.sets, getattr(task, "targets", ("y",)))
        before = probe.measure(task.network, group)
        record |= self._cost_of_a_step(cell, model, task, data)
        train.seed_generators(cell.seed)
        try:
            trainer.fit(task, data, ckpt_path=_readable(folder / "last.ckpt"))
        except train.NonFiniteError as error:
            record |= {"failed": str(error), **_spent(budget)}
        else:
            if not budget.history or budget.history[-1][0] != budget.steps:  # as after a training that was continued
                trainer.validate(task, data, verbose=False)
            task.load_state_dict(budget.best or {})
            _save_weights(trainer, folder / "best.ckpt")
            record |= _spent(budget)
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
        """Peak memory and operations of a training step. Afterwards the network is warm, and has the same weights."""
        batches = list(islice(data.train_dataloader(), _WARM_UP)) * _WARM_UP
        memory = self._peak_memory(cell, model, task, batches[0])
        operations = step_operations(task, batches[:_WARM_UP])
        _warm_up(task, batches[:_WARM_UP])
        return {"peak_memory_mib": memory, "operations": operations}

    def _peak_memory(self, cell: Cell, model: ModelSettings, task: train.PointSetTask, batch: Batch) -> float | None:
        """Of a step on the CPU, which is measured with the first seed alone; on CUDA the training itself tells."""
        if task.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(task.device)
            return None
        if not self.settings.memory or cell.seed != self.settings.seeds[0]:
            return None
        if cell.model not in self._memory:
            self._memory[cell.model] = training_memory(model.network, batch)
        return self._memory[cell.model]

    def _test(self, task: train.PointSetTask) -> Record:
        """Metrics on the test set as it is, and on the rotated one if it is wanted; forward passes are timed."""
        found: Record = {}
        for kind in ("metrics", "rotated_metrics") if self.settings.data.rotate_test else ("metrics",):
            clock = InferenceClock()
            tester = make_trainer(self.settings, callbacks=[clock])
            (metrics,) = tester.test(task, self.sets.test_data(rotated=kind == "rotated_metrics"), verbose=False)
            found[kind] = {name.removeprefix("test/"): float(value) for name, value in metrics.items()}
            found.setdefault("inference_clouds_per_s", clock.rate)
        return found


class EquivarianceProbe:
    """Relative errors ‖f(g x) - g f(x)‖ / ‖f(x)‖ by :func:`lieattn.certify.certify`, on clouds of the test set.

    Outputs for those ``targets`` that are among the vectors or tensors of the data should transform with the points.
    Errors are the largest over the elements: ``own`` of the model's own group, ``rotations`` of SO(d), ``reflections``;
    for networks of images and voxels quarter turns, and one mirror.
    Translations are added unless the clouds have other vectors or tensors, such as later positions.
    """

    def __init__(self, sets: Sets, targets: Iterable[str]) -> None:
        self.elements = sets.settings.equivariance.elements
        self.clouds = sets.clouds(sets.settings.equivariance.clouds)
        self.dim = int(self.clouds[0].pos.shape[1])
        kinds: dict[str, Kind] = {**dict.fromkeys(sets.vectors, "vector"), **dict.fromkeys(sets.tensors, "tensor")}
        self.outputs = {name: kinds.get(name, "invariant") for name in targets}
        self.inputs = kinds_of(self.clouds[0], sets.vectors, sets.tensors)
        if len(self.inputs) == 1:
            self.inputs = {}  # positions, which may be shifted too

    def measure(self, network: nn.Module, group: Group | None) -> dict[str, float | None]:
        """Errors by kind; ``own`` is None for a network without a group."""
        if group is not None and group.dim != self.dim:
            raise train.UsageError(f"group: {group.name} acts on {group.dim} coordinates, the clouds have {self.dim}")
        own = None if group is None else self._largest(network, group)["element"]
        if any(isinstance(module, _ON_LATTICES) for module in network.modules()):  # which other motions leave
            moves = {"element": _QUARTER_TURNS[self.dim], "outside": reflection(self.dim)}
            free = {check: self._largest(network, moved)["element"] for check, moved in moves.items()}
        else:
            free = self._largest(network, SO(self.dim), outside=self.elements)
        return {"own": own, "rotations": free["element"], "reflections": free["outside"]}

    def _largest(self, network: nn.Module, group: Group, outside: int = 0) -> dict[str, float]:
        """Largest errors under elements of the group, and under what is not in it."""
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
    """The outputs of a network that are for targets, by their names."""

    def __init__(self, network: nn.Module, targets: tuple[str, ...]) -> None:
        super().__init__()
        self.network, self.targets = network, targets
        self.vector_inputs = getattr(network, "vector_inputs", ())

    def forward(self, data: Batch) -> dict[str, Tensor]:
        outputs = train.named_outputs(self.network(data), self.targets[0])
        return {name: outputs[name] for name in self.targets}


def group_of(name: str, model: ModelSettings, network: nn.Module) -> Group | None:
    """The group given for a model, or that of the ``symmetry`` of its network."""
    if model.group is not None:
        return train.build(Group, model.group, f"models.{name}.group")
    symmetry = getattr(network, "symmetry", None)
    found = symmetry.group if isinstance(symmetry, Symmetry) else symmetry
    return found if isinstance(found, Group) else None


def _description(task: train.PointSetTask, group: Group | None) -> Record:
    """What a record says of the network and of the machine, before the training."""
    return {
        "parameters": count_parameters(task.network),
        "group": None if group is None else group.name,
        "guarantee": getattr(task.network, "guarantee", None),
        "device": str(task.device),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": platform.node(),
        "monitor": list(task.monitor),
    }


def _readable(checkpoint: Path) -> Path | None:
    """The checkpoint that a training continues from; one that is damaged is deleted, so the cell starts anew."""
    try:
        train.read_checkpoint(checkpoint)
    except train.CheckpointError:
        checkpoint.unlink(missing_ok=True)
        return None
    return checkpoint


def _save_weights(trainer: Trainer, path: Path) -> None:
    """Write the weights that the network has at present."""
    for callback in list(trainer.callbacks):  # type: ignore[attr-defined]
        if isinstance(callback, train.AveragedWeights):  # it would write the last averages instead
            trainer.callbacks.remove(callback)  # type: ignore[attr-defined]
    trainer.save_checkpoint(path, weights_only=True)


def _spent(budget: Budget) -> Record:
    """What a training took, and the values of its validations."""
    return {
        "steps": budget.steps,
        "seconds": budget.seconds,
        "train_clouds_per_s": budget.clouds / max(budget.seconds, 1e-9),
        "clouds_seen": budget.clouds,
        "validation": budget.best_value,
        "history": budget.history,
    }


def _warm_up(task: train.PointSetTask, batches: list[Batch]) -> None:
    """Run some steps that leave no trace, so that compilation is not counted."""
    network = task.network
    state = {name: value.clone() for name, value in network.state_dict().items()}
    network.train()
    for batch in batches:
        scalar(network(task.cast(batch.clone().to(task.device)))).backward()
    network.zero_grad(set_to_none=True)
    network.load_state_dict(state)


def training_memory(network: Spec, batch: Batch) -> float:
    """Peak resident memory in MiB of a forward and backward pass on the CPU, above that of weights and gradients."""
    # As bytes, since tensors sent to another process would need shared memory.
    return peak_memory(partial(_problem, network, pickle.dumps(batch)))


def _problem(network: Spec, batch: bytes) -> Callable[[], Iterator[Tensor]]:
    built, clouds = train.build(nn.Module, network, "the network"), pickle.loads(batch)

    def step() -> Iterator[Tensor]:
        yield scalar(built(clouds))

    return step
