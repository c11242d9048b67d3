"""Choosing sizes of models that match in the number of parameters, the time or operations of a step, or the width."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import platform
import statistics
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from lieattn.compare._build import build_group
from lieattn.compare._interpreter import Interpreter, InterpreterError
from lieattn.compare._meter import LocalMeter, Meter
from lieattn.compare._records import write_json
from lieattn.compare._settings import ModelSettings, Settings
from lieattn.train import UsageError

Matched = dict[str, tuple[ModelSettings, float]]
"""By name, the model with its chosen arguments, and the value that is matched: a count, or seconds per step."""

_MOST_TRIALS = 60
_PAIRS, _MOST_PAIRS = 9, 40  # least and largest number of pairs of steps of two models
_ENOUGH = 1.0  # seconds of steps after which the median is reliable
_GROWTH = 4.0  # largest factor between the widths of two trials, if a trial runs training steps
_UNITS = {
    "parameters": "{:.0f} parameters",
    "seconds": "{:.4g} seconds a step",
    "operations": "{:.4g} multiply-adds a step",
    "width": "{:.0f} channels times frames",
}


def match_models(settings: Settings, folder: Path | None = None, names: Collection[str] | None = None) -> Matched:
    """Choose the width of every model. UsageError names the model and the nearest values if none is near enough.

    Choices that depend on measurements, or on another interpreter, are kept in ``widths.json`` of the ``folder``, so
    that all cells of a model have the same size. They are used again as long as the settings on which they depend are
    the same. UsageError is raised if the folder contains models that were matched by another quantity. A model that is
    not among the ``names`` is only sized to report its finished cells, and left out if a package is missing. The model
    that others are matched to is always built.
    """
    kept, matched = _Widths(settings, folder), Matched()
    with ExitStack() as stack:
        matcher = _Matcher(settings, stack)
        for name, model in settings.models.items():
            if model.python is None and (names is None or name in names):
                build_group(name, model)  # so that a group with a mistake raises an error before anything is trained
            if (found := kept.get(name)) is not None:
                matched[name] = found
            elif names is None or name in names:
                matched[name] = matcher.match(name, model)
            elif not kept.holds(name) and _has_cells(settings, folder, name):
                with suppress(UsageError, ImportError):
                    matched[name] = matcher.match(name, model)
    kept.write(matched)
    return matched


def in_words(settings: Settings, value: float) -> str:
    """The value by which a model was matched, in words, such as ``"48012 parameters"``."""
    return _UNITS[settings.match.by].format(value)


class _Matcher:
    """Finds widths; it holds the meters, the reference model and the value of the reference."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self.settings, self.stack, self.by = settings, stack, settings.match.by
        given = settings.match.to
        self.reference = given if isinstance(given, str) else next(iter(settings.models))
        self._target = None if isinstance(given, str | None) else float(given)
        self._meters: dict[str | None, Meter] = {}
        self._seconds: float | None = None  # seconds of a step of the reference

    @property
    def target(self) -> float:
        """The value that all models should have."""
        if self._target is None:
            self._target = self._measure(self.reference, self.settings.models[self.reference])
        return self._target

    def match(self, name: str, model: ModelSettings) -> tuple[ModelSettings, float]:
        """Return the first combination of adjusted arguments and width with a value within the tolerance."""
        tolerance, target = self.settings.match.tolerance, self.target
        if name == self.reference and isinstance(self.settings.match.to, str | None):
            return model, target
        reached: list[tuple[ModelSettings, float]] = []
        for values in itertools.product(*model.adjust.values()):
            adjusted = model.with_arguments(**dict(zip(model.adjust, values, strict=True)))
            as_it_is = model.width is None
            reached += [(adjusted, self._measure(name, adjusted))] if as_it_is else self._nearest(name, adjusted)
            reached.sort(key=lambda found: abs(found[1] - target))
            if abs(reached[0][1] - target) <= tolerance * target:
                return reached[0]
        nearest = " and ".join(f"{_number(value)} ({one.choice or 'as configured'})" for one, value in reached[:2])
        what = _UNITS[self.by].format(target)
        raise UsageError(
            f"models.{name}: cannot be matched to {what} within {100 * tolerance:g} %; the nearest are {nearest}. "
            f"Choose a smaller step, let other arguments adjust, or set match.to or match.tolerance"
        )

    def _nearest(self, name: str, model: ModelSettings) -> list[tuple[ModelSettings, float]]:
        """Bracket the target by widths that are multiples of the step; return the nearest widths with their values."""
        width, counted = str(model.width), self.by == "parameters"
        start = model.chosen.get(width, 8 * model.step)
        if not isinstance(start, int) or start < 1:
            raise UsageError(f"models.{name}.width: expected an integer argument {width}, got {start!r}")
        found: dict[int, tuple[ModelSettings, float]] = {}  # models and values by multiple of the step
        below, above, multiple = 0, None, max(1, round(start / model.step))
        for _ in range(_MOST_TRIALS):
            sized = model.with_arguments(**{width: multiple * model.step})
            value = self._measured(name, sized, width, multiple * model.step)
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
            # Parameters grow roughly with the square of the width, the width of the fiber in proportion to it.
            ratio = (self.target / value) ** (1.0 if self.by == "width" else 0.5)
            guess = max(below + 1, round(multiple * (ratio if counted else min(ratio, _GROWTH))))
            multiple = guess if above is None else min(guess, above - 1)
        return [found[multiple] for multiple in (below, above) if multiple in found]

    def _measured(self, name: str, model: ModelSettings, width: str, tried: int) -> float:
        try:
            return self._measure(name, model)
        except InterpreterError:
            raise
        except UsageError as error:
            if tried == self.settings.models[name].chosen.get(width):
                raise
            advice = (
                f"{width} = {tried} was tried to match the models; a model that accepts multiples only has a `step`"
            )
            raise UsageError(f"{error}. {advice}") from error

    def _measure(self, name: str, model: ModelSettings) -> float:
        if self.by == "seconds":
            return self._step_seconds(name, model)
        measure: Callable[[str, ModelSettings], int] = getattr(self._meter(model), self.by)
        return measure(name, model)

    def _step_seconds(self, name: str, model: ModelSettings) -> float:
        """Seconds of a step: the seconds of the reference, times the median ratio of alternating steps of both models.

        So no model looks slow because the machine is busier at some times than at others.
        """
        reference, other = self._meter(self.settings.models[self.reference]), self._meter(model)
        if self._seconds is None:
            reference.prepare("reference", self.reference, self.settings.models[self.reference])
            self._seconds = statistics.median(reference.step("reference") for _ in range(_PAIRS))
        other.prepare("candidate", name, model)
        pairs: list[tuple[float, float]] = []
        while len(pairs) < _PAIRS or (len(pairs) < _MOST_PAIRS and sum(map(sum, pairs)) < _ENOUGH):
            pairs.append((reference.step("reference"), other.step("candidate")))
        return self._seconds * statistics.median(own / max(beside, 1e-9) for beside, own in pairs)

    def _meter(self, model: ModelSettings) -> Meter:
        """The meter in the interpreter of a model, which is started when it is needed and ends with the matching."""
        if model.python not in self._meters:
            here = model.python is None
            other = None if here else self.stack.enter_context(Interpreter(str(model.python), self.settings))
            self._meters[model.python] = other or LocalMeter(self.settings)
        return self._meters[model.python]


class _Widths:
    """The file ``widths.json`` of a folder: the choices, with the settings for which they were made."""

    def __init__(self, settings: Settings, folder: Path | None) -> None:
        self.settings, self.path = settings, None if folder is None else folder / "widths.json"
        self.models: dict[str, Any] = {}
        if folder is None or self.path is None:
            return
        content: Any = {"by": "parameters"}  # before the file existed, all models were matched by parameters
        if self.path.is_file():
            try:
                content = json.loads(self.path.read_text(encoding="utf-8"))
                if not {"by", "models"} <= set(content):
                    raise ValueError("it was not written by `lieattn compare`")
                if not all(one.keys() >= {"key", "chosen", "value"} for one in content["models"].values()):
                    raise ValueError("a model has no key, no chosen arguments or no value")
            except (OSError, ValueError, TypeError, AttributeError) as error:
                raise UsageError(f"{self.path} is damaged ({error}): remove it to measure again") from error
            self.models = content["models"]
        elif not any(folder.glob("cells/*.json")):
            return
        if content["by"] != settings.match.by:
            raise UsageError(
                f"{folder} holds models that were matched by {content['by']}, these are matched by "
                f"{settings.match.by}: choose another folder with --out"
            )

    def get(self, name: str) -> tuple[ModelSettings, float] | None:
        """Return the model in the size that was chosen before; None if there is no valid choice."""
        found = self.models.get(name)
        if not self.holds(name) or found is None or found["key"] != self._key(name):
            return None
        return self.settings.models[name].with_arguments(**found["chosen"]), found["value"]

    def write(self, matched: Matched) -> None:
        """Write the choices that are to be kept."""
        if self.path is None:
            return
        models = {
            name: {"key": self._key(name), "chosen": model.chosen, "value": value}
            for name, (model, value) in matched.items()
            if self.holds(name)
        }
        models = {name: one for name, one in self.models.items() if name in self.settings.models} | models
        if models != self.models or not self.path.is_file():
            place = {"machine": platform.node(), "processor": platform.processor() or platform.machine()}
            write_json(self.path, {"by": self.settings.match.by, **place, "models": models})

    def holds(self, name: str) -> bool:
        """Whether the choice is kept: it cannot be repeated quickly, with the same result, on another machine."""
        return self.settings.match.by != "parameters" or self.settings.models[name].python is not None

    def _key(self, name: str) -> str:
        settings = self.settings
        reference = settings.match.to if isinstance(settings.match.to, str) else next(iter(settings.models))
        models = [dataclasses.asdict(settings.models[one]) for one in (name, reference)]
        used = models, dataclasses.asdict(settings.match), dataclasses.asdict(settings.data), settings.task
        for model in models:
            del model["python"], model["group"]
        return hashlib.sha256(json.dumps(used, sort_keys=True, default=str).encode()).hexdigest()


def _has_cells(settings: Settings, folder: Path | None, name: str) -> bool:
    """Whether any cell of a model is finished."""
    own = [cell for cell in settings.cells() if cell.model == name]
    return folder is not None and any((folder / "cells" / f"{cell.name}.json").is_file() for cell in own)


def _is_constant(sizes: Mapping[int, float]) -> bool:
    """Whether a size is the same for three widths, of which the largest is several times the smallest."""
    return len(sizes) > 2 and max(sizes) >= 4 * min(sizes) and len(set(sizes.values())) == 1


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
