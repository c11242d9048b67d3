"""Sizes of models that match, by measurements before the training."""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from lieattn import train
from lieattn._core.messages import warn
from lieattn.compare._build import Sets, build_group, build_network, build_task, make_trainer
from lieattn.compare._records import write_json
from lieattn.compare._settings import Cell, ModelSettings, Settings
from lieattn.io import digest_of_json
from lieattn.ops import count_operations
from lieattn.train import UsageError

Matched = dict[str, tuple[ModelSettings, float]]
"""By name, the model with its chosen arguments, and the value that is matched: a count, or seconds per step."""

_BATCHES = 4  # the steps take this many batches of the training set in turn
WARM_UP = 2  # steps; compiled code of e3nn is optimized in its second run
_MOST_TRIALS = 60
_PAIRS, _MOST_PAIRS = 9, 40  # least and largest number of pairs of steps of two models
_ENOUGH = 1.0  # seconds of steps after which the median is reliable
_GROWTH = 4.0  # largest factor between the widths of two trials, if a trial runs training steps
_UNITS = {
    "parameters": "{:.0f} parameters",
    "seconds": "{:.4g} seconds a step",
    "operations": "{:.4g} multiply-adds a step",
}


def match_models(settings: Settings, folder: Path | None = None, names: Collection[str] | None = None) -> Matched:
    """Choose the width of every model. A warning has the nearest values if none is near enough; the first is used.

    The choices are kept in ``widths.json`` of the ``folder``, so that all cells of a model have the same size, also in
    an environment in which the model cannot be built. They are used again as long as the settings on which they depend
    are the same. UsageError is raised if the folder contains models that were matched by another quantity. Models that
    are not among the ``names`` are included only if their choice is known.
    """
    kept = _Widths(settings, folder)
    matcher, matched = _Matcher(settings, kept), Matched()
    for name, model in settings.models.items():
        is_wanted = names is None or name in names
        if is_wanted:
            build_group(name, model)  # so that a group with a mistake raises an error before anything is trained
        if (found := kept.get(name)) is not None:
            matched[name] = found
        elif is_wanted:
            matched[name] = matcher.match(name, model)
    kept.write(matched)
    return matched


def in_words(settings: Settings, value: float) -> str:
    """The value by which a model was matched, in words, such as ``"48012 parameters"``."""
    return _UNITS[settings.match.by].format(value)


class _Matcher:
    """Finds widths; it holds the meter, the reference model and the value that all models should have."""

    def __init__(self, settings: Settings, kept: _Widths) -> None:
        self.settings, self.kept, self.by = settings, kept, settings.match.by
        self.meter = Meter(settings)

    @cached_property
    def target(self) -> float:
        """The value that all models should have."""
        given, reference = self.settings.match.to, self.settings.reference
        if not isinstance(given, str | None):
            return float(given)
        known = self.kept.get(reference)
        return self._measure(reference, self.settings.models[reference]) if known is None else known[1]

    def match(self, name: str, model: ModelSettings) -> tuple[ModelSettings, float]:
        """Return the first combination of adjusted arguments and width with a value within the tolerance.

        If there is none, return the nearest one, with a warning.
        """
        tolerance, target = self.settings.match.tolerance, self.target
        if name == self.settings.reference and isinstance(self.settings.match.to, str | None):
            return model, target
        reached: list[tuple[ModelSettings, float]] = []
        for values in itertools.product(*model.adjust.values()):
            adjusted = model.with_arguments(**dict(zip(model.adjust, values, strict=True)))
            as_it_is = not model.widths
            reached += [(adjusted, self._measure(name, adjusted))] if as_it_is else self._nearest(name, adjusted)
            reached.sort(key=lambda found: abs(found[1] - target))
            if abs(reached[0][1] - target) <= tolerance * target:
                return reached[0]
        nearest = " and ".join(f"{value:.6g} ({one.choice or 'as configured'})" for one, value in reached[:2])
        what = _UNITS[self.by].format(target)
        warn(
            f"models.{name}: cannot be matched to {what} within {100 * tolerance:g} %; the nearest are {nearest}, of "
            f"which the first is used. Set a width or a smaller step, let other arguments adjust, or set match.to or "
            f"match.tolerance"
        )
        return reached[0]

    def _nearest(self, name: str, model: ModelSettings) -> list[tuple[ModelSettings, float]]:
        """Bracket the target by widths that are multiples of the step; return the nearest widths with their values."""
        width = " = ".join(model.widths)
        start = model.chosen.get(model.widths[0], 8 * model.step)
        if not isinstance(start, int) or start < 1:
            raise UsageError(f"models.{name}.width: expected an integer argument {width}, got {start!r}")
        found: dict[int, tuple[ModelSettings, float]] = {}  # models and values by multiple of the step
        below, above, multiple = 0, None, max(1, round(start / model.step))
        for _ in range(_MOST_TRIALS):
            sized = model.with_arguments(**dict.fromkeys(model.widths, multiple * model.step))
            value = self._measure(name, sized)
            found[multiple] = sized, value
            if self.by == "seconds" and abs(value - self.target) <= self.settings.match.tolerance / 2 * self.target:
                return [found[multiple]]  # a second measurement could differ by more than this
            below, above = (multiple, above) if value <= self.target else (below, multiple)
            if above is not None and above - below <= 1:
                break
            if value <= 0 or _is_constant({one: size for one, (_, size) in found.items()}):
                widths = " and ".join(str(one * model.step) for one in sorted({min(found), max(found)}))
                size = f"{_UNITS[self.by].format(value)} with {width} = {widths}"
                raise UsageError(f"models.{name}.width: expected an argument that changes the size, got {size}")
            ratio = (self.target / value) ** 0.5  # sizes grow roughly with the square of the width
            guess = max(below + 1, round(multiple * (ratio if self.by == "parameters" else min(ratio, _GROWTH))))
            multiple = guess if above is None else min(guess, above - 1)
        return [found[multiple] for multiple in (below, above) if multiple in found]

    def _measure(self, name: str, model: ModelSettings) -> float:
        meter = self.meter
        measures = {"parameters": meter.parameters, "operations": meter.operations}
        try:
            return self._step_seconds(name, model) if self.by == "seconds" else measures[self.by](name, model)
        except UsageError as error:
            if _lacks_a_package(error):
                advice = "Run its cells with --models in an environment that has its packages"
            elif model.chosen != self.settings.models[name].chosen:
                tried = f"{model.choice} was tried to match the models"
                advice = f"{tried}; a model that accepts multiples only has a `step`"
            else:
                raise
            raise UsageError(f"{error}. {advice}") from error

    def _step_seconds(self, name: str, model: ModelSettings) -> float:
        """Seconds of a step: the seconds of the reference, times the median ratio of alternating steps of both models.

        So no model looks slow because the machine is busier at some times than at others.
        """
        step, seconds = self._reference
        pairs: list[tuple[float, float]] = []
        other = self.meter.timed_step(name, model)
        while len(pairs) < _PAIRS or (len(pairs) < _MOST_PAIRS and sum(map(sum, pairs)) < _ENOUGH):
            pairs.append((step(), other()))
        return seconds * statistics.median(own / max(beside, 1e-9) for beside, own in pairs)

    @cached_property
    def _reference(self) -> tuple[Callable[[], float], float]:
        """A timed step of the reference model, and its median seconds."""
        name = self.settings.reference
        step = self.meter.timed_step(name, self.settings.models[name])
        return step, statistics.median(step() for _ in range(_PAIRS))


class _Widths:
    """The file ``widths.json`` of a folder: the choices, with the settings for which they were made."""

    def __init__(self, settings: Settings, folder: Path | None) -> None:
        self.settings, self.path = settings, None if folder is None else folder / "widths.json"
        self.models: dict[str, Any] = {}
        if folder is None or self.path is None:
            return
        by = "parameters"  # version 0.3 wrote no file if these were matched
        if self.path.is_file():
            try:
                content = json.loads(self.path.read_text(encoding="utf-8"))
                by, self.models = content["by"], content["models"]
                if not all(one.keys() >= {"key", "chosen", "value"} for one in self.models.values()):
                    raise ValueError("a model has no key, no chosen arguments or no value")
            except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
                raise UsageError(f"{self.path} is damaged ({error}): remove it to measure again") from error
        elif not any(folder.glob("cells/*.json")):
            return
        if by != settings.match.by:
            raise UsageError(
                f"{folder} holds models that were matched by {by}, these are matched by {settings.match.by}: choose "
                f"another folder with --out"
            )

    def get(self, name: str) -> tuple[ModelSettings, float] | None:
        """Return the model in the size that was chosen before; None if there is no valid choice."""
        found = self.models.get(name)
        if found is None or found["key"] != self._key(name):
            return None
        return self.settings.models[name].with_arguments(**found["chosen"]), found["value"]

    def write(self, matched: Matched) -> None:
        """Write the choices, beside those of other models of the settings."""
        if self.path is None:
            return
        models = {name: one for name, one in self.models.items() if name in self.settings.models}
        for name, (model, value) in matched.items():
            models[name] = {"key": self._key(name), "chosen": model.chosen, "value": value}
        if models != self.models or not self.path.is_file():
            place = {"machine": platform.node(), "processor": platform.processor() or platform.machine()}
            write_json(self.path, {"by": self.settings.match.by, **place, "models": models})

    def _key(self, name: str) -> str:
        settings = self.settings
        models = [dataclasses.asdict(settings.models[one]) for one in (name, settings.reference)]
        used = models, dataclasses.asdict(settings.match), dataclasses.asdict(settings.data), settings.task
        for model in models:
            del model["group"]
        return digest_of_json(used)


def _lacks_a_package(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, ImportError) or _lacks_a_package(error.__cause__))


def _is_constant(sizes: Mapping[int, float]) -> bool:
    """Whether a size is the same for three widths, of which the largest is several times the smallest."""
    return len(sizes) > 2 and max(sizes) >= 4 * min(sizes) and len(set(sizes.values())) == 1


@dataclass
class Meter:
    """Measures models on the first batches of the training set."""

    settings: Settings

    def parameters(self, name: str, model: ModelSettings) -> int:
        """Number of trainable parameters."""
        return count_parameters(build_network(name, model))

    def operations(self, name: str, model: ModelSettings) -> int:
        """Number of multiply-adds in the forward and backward pass of a training step, averaged over some batches."""
        return step_operations(build_task(self.settings, name, model), self._batches)

    def timed_step(self, name: str, model: ModelSettings) -> Callable[[], float]:
        """Return a function that makes a training step of a warmed up model and returns its seconds.

        They are seconds of processor time, which other processes do not affect, or elapsed ones on CUDA.
        """
        train.seed_generators(self.settings.seeds[0])
        task = build_task(self.settings, name, model)
        task.to(make_trainer(self.settings).strategy.root_device)
        optimizer = task.make_optimizer(task.network.parameters())
        batches = itertools.cycle([batch.to(task.device) for batch in self._batches])

        def step() -> float:
            batch = next(batches).clone()
            started = _clock(task.device)
            optimizer.zero_grad()
            scalar(task.network(task.cast(batch))).backward()
            optimizer.step()
            return _clock(task.device) - started

        task.network.train()
        for _ in range(WARM_UP):
            step()
        return step

    @cached_property
    def _batches(self) -> list[Batch]:
        settings = self.settings
        data = Sets(settings).data(Cell("", max(settings.fractions), settings.seeds[0]))
        return list(itertools.islice(data.train_dataloader(), _BATCHES))


def count_parameters(network: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(weight.numel() for weight in network.parameters() if weight.requires_grad)


def step_operations(task: train.PointSetTask, batches: Sequence[Batch]) -> int:
    """Number of multiply-adds of a step, averaged over batches; see :func:`pass_through`."""
    return round(count_operations(partial(pass_through, task, batches)) / len(batches))


def pass_through(task: train.PointSetTask, batches: Sequence[Batch]) -> None:
    """Run forward and backward passes. Afterwards, the state is as before, and weights have no gradients."""
    network = task.network
    state = {name: value.clone() for name, value in network.state_dict().items()}
    network.train()
    for batch in batches:
        scalar(network(task.cast(batch.clone().to(task.device)))).backward()
    network.zero_grad(set_to_none=True)
    network.load_state_dict(state)


def scalar(outputs: Any) -> Tensor:
    """Return a number that depends on all outputs with gradients, as the loss of a backward pass.

    UsageError is raised if no output depends on weights that are trained.
    """
    parts = train.named_outputs(outputs, "").values()  # tasks ignore those that are no targets
    means = [part.square().mean() for part in parts if isinstance(part, Tensor) and part.requires_grad]
    if not means:
        raise UsageError("network: expected outputs that depend on weights with requires_grad, got constant ones")
    return torch.stack(means).sum()


def _clock(device: torch.device) -> float:
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
