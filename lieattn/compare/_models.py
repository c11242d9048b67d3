"""The models of a comparison: widths chosen so that parameter counts agree, tasks around networks."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

from lieattn.compare._settings import ModelSettings, Settings
from lieattn.train import PointSetTask, UsageError, build

Matched = dict[str, tuple[ModelSettings, int]]
"""Models with the arguments that were chosen, and their parameter counts, by name."""

_MOST_TRIALS = 60


def count_parameters(network: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(weight.numel() for weight in network.parameters() if weight.requires_grad)


def match_models(settings: Settings) -> Matched:
    """Choose the width of every model.

    Raises
    ------
    UsageError
        If a network cannot be built, or no width comes within the tolerance; the message names the model and the
        nearest counts.
    """
    target = settings.parameters
    matched: Matched = {}
    for name, model in settings.models.items():
        if target is None:
            target = _count(name, model)
            matched[name] = model, target
        else:
            matched[name] = _match(name, model, target, settings.tolerance)
    return matched


def build_task(settings: Settings, name: str, model: ModelSettings) -> PointSetTask:
    """Build the Lightning module of a model, from torch's global generator.

    Raises
    ------
    UsageError
        If a part cannot be built, or the schedule does not fit into one epoch, which the budget counts as.
    """
    parts = {"optimizer": model.optimizer or settings.optimizer, "schedule": settings.schedule}
    arguments: dict[str, Any] = {**settings.task.get("init_args", {}), "network": model.network}
    arguments |= {key: part for key, part in parts.items() if part is not None}
    spec = {"class_path": settings.task["class_path"], "init_args": arguments}
    task = build(PointSetTask, spec, f"the task with models.{name}")  # type: ignore[type-abstract]
    try:
        task.schedule.factor(0, 1000, 1000)
    except ValueError as error:
        raise UsageError(
            f"schedule: the whole budget counts as one epoch (a warm-up of 0.05 epochs is its first 5 %): {error}"
        ) from error
    task.config = {"model": spec}
    return task


def _match(name: str, model: ModelSettings, target: int, tolerance: float) -> tuple[ModelSettings, int]:
    """Take the first combination of adjusted arguments with a width whose count is within the tolerance."""
    reached: list[tuple[ModelSettings, int]] = []
    for values in itertools.product(*model.adjust.values()):
        adjusted = model.with_arguments(**dict(zip(model.adjust, values, strict=True)))
        reached += [(adjusted, _count(name, adjusted))] if model.width is None else _nearest(name, adjusted, target)
        reached.sort(key=lambda found: abs(found[1] - target))
        if abs(reached[0][1] - target) <= tolerance * target:
            return reached[0]
    nearest = " and ".join(f"{count} ({found.choice or 'as configured'})" for found, count in reached[:2])
    raise UsageError(
        f"models.{name}: cannot have {target} parameters within {100 * tolerance:g} %; the nearest counts are "
        f"{nearest}. Choose a smaller step, let other arguments adjust, or set parameters or tolerance"
    )


def _nearest(name: str, model: ModelSettings, target: int) -> list[tuple[ModelSettings, int]]:
    """Close in on the target from both sides, in multiples of the step: the widths next to it with their counts."""
    width = str(model.width)
    start = model.chosen.get(width, 8 * model.step)
    if not isinstance(start, int) or start < 1:
        raise UsageError(f"models.{name}.width: expected an integer argument {width}, got {start!r}")
    found: dict[int, tuple[ModelSettings, int]] = {}  # by multiple of the step
    below, above, multiple = 0, None, max(1, round(start / model.step))
    for _ in range(_MOST_TRIALS):
        sized = model.with_arguments(**{width: multiple * model.step})
        count = _count(name, sized)
        found[multiple] = sized, count
        below, above = (multiple, above) if count <= target else (below, multiple)
        if above is not None and above - below <= 1:
            break
        # Counts grow about as the square of the width.
        guess = max(below + 1, round(multiple * (target / count) ** 0.5))
        multiple = guess if above is None else min(guess, above - 1)
    return [found[multiple] for multiple in (below, above) if multiple in found]


def _count(name: str, model: ModelSettings) -> int:
    return count_parameters(build(nn.Module, model.network, f"models.{name}"))
