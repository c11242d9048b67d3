"""What a comparison is: models, task, data and budget of its configuration files, and the cells to train."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from lieattn._checks import check_count
from lieattn.train import UsageError

T = TypeVar("T")


class Spec(TypedDict):
    """An object of a configuration file; its class and arguments are checked when it is built."""

    class_path: str
    init_args: NotRequired[dict]  # type: ignore[type-arg] # jsonargparse would build the values of a dict[str, Any]


_FORMAT = 1  # of the cell files; part of their key
_NAME = re.compile(r"\w[\w .+()-]*")
_AXES = (False, True, "x", "y", "z")
_SETS = ("train", "val", "test")
_TRAINER = ("accelerator", "deterministic", "devices", "gradient_clip_val", "precision")


@dataclass(frozen=True)
class ModelSettings:
    """A network to compare.

    Attributes
    ----------
    class_path, init_args
        The network.
    width
        The argument that is chosen so that the number of parameters fits; None leaves the network as it is.
    step
        Widths tried are multiples of this, such as the number of heads.
    adjust
        Further arguments with the values they may take where the width alone does not suffice: all combinations are
        tried in their order, such as ``{"widening": [4, 3, 5]}``, until one fits.
    group
        Group to measure the equivariance error of; the network's own attribute ``group`` by default.
    optimizer
        Used for this network instead of the common one.
    """

    class_path: str
    init_args: dict = field(default_factory=dict)  # type: ignore[type-arg]
    width: str | None = None
    step: int = 1
    adjust: dict[str, list] = field(default_factory=dict)  # type: ignore[type-arg]
    group: Spec | None = None
    optimizer: Spec | None = None

    def __post_init__(self) -> None:
        check_count("step", self.step)
        if not all(self.adjust.values()):
            raise UsageError(f"adjust: expected lists of values by argument, got {self.adjust}")

    @property
    def network(self) -> Spec:
        """The network as configuration files have it."""
        return {"class_path": self.class_path, "init_args": self.init_args}

    def with_arguments(self, **arguments: Any) -> ModelSettings:
        """The same model with other arguments, such as its width."""
        return dataclasses.replace(self, init_args={**self.init_args, **arguments})

    @property
    def chosen(self) -> dict[str, Any]:
        """The arguments that are chosen, with their present values."""
        names = [*([self.width] if self.width else []), *self.adjust]
        return {name: self.init_args.get(name) for name in names}


@dataclass(frozen=True)
class DataSettings:
    """Data sets, batches, and what is rotated at random.

    Attributes
    ----------
    train, val, test
        Data sets of ``torch_geometric.data.Data``.
    batch_size, eval_batch_size
        Clouds in a batch of training, and of validation and test.
    limit
        Largest number of clouds of a set, chosen at random once and for all; such as ``{"val": 500}``.
    rotate_train, rotate_test
        Whether each cloud of training and validation is rotated at random whenever it is seen, and whether the test
        set is evaluated a second time with every cloud rotated; an axis ``"z"`` instead of true rotates about it only.
    vectors, tensors
        Attributes that rotate with the points; by default those that the training set lists under these names.
    """

    train: Spec
    val: Spec
    test: Spec
    batch_size: int = 32
    eval_batch_size: int = 128
    limit: dict[str, int] = field(default_factory=dict)
    rotate_train: bool | str = False
    rotate_test: bool | str = False
    vectors: list[str] | None = None
    tensors: list[str] | None = None

    def __post_init__(self) -> None:
        if unknown := set(self.limit) - set(_SETS):
            raise UsageError(f"limit: expected some of {list(_SETS)}, got {sorted(unknown)}")
        counts = {f"limit.{name}": count for name, count in self.limit.items()}
        for name, count in {"batch_size": self.batch_size, "eval_batch_size": self.eval_batch_size, **counts}.items():
            check_count(name, count)
        for name in ("rotate_train", "rotate_test"):
            if getattr(self, name) not in _AXES:
                raise UsageError(f"{name}: expected true, false, or an axis x, y or z, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class BudgetSettings:
    """How long each cell trains: optimizer steps, or seconds of them; and how often it is validated meanwhile."""

    steps: int | None = None
    seconds: int | float | None = None  # a whole number stays one, in the keys of cells too
    evaluations: int = 10

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise UsageError("expected either steps or seconds")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise UsageError(f"seconds: expected a positive number, got {self.seconds!r}")
        for name, count in (("steps", self.steps), ("evaluations", self.evaluations)):
            if count is not None:
                check_count(name, count)


@dataclass(frozen=True)
class EquivarianceSettings:
    """On how many clouds of the test set, and for how many random elements, the error is measured."""

    clouds: int = 8
    elements: int = 8

    def __post_init__(self) -> None:
        check_count("clouds", self.clouds)
        check_count("elements", self.elements)


@dataclass(frozen=True)
class Cell:
    """One training: a model, the share of the training set it sees, and a seed."""

    model: str
    fraction: float
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.model.replace(' ', '_')}-{self.fraction:g}-{self.seed}"

    def __str__(self) -> str:
        return f"{self.model}, {100 * self.fraction:g} % of the data, seed {self.seed}"


@dataclass(frozen=True)
class Settings:
    """A comparison; the sections of its configuration files are the attributes.

    Attributes
    ----------
    task
        A ``PointSetTask`` without its network, optimizer and schedule.
    models, data, budget, equivariance
        See their classes.
    seeds, fractions
        Each model is trained for every seed on every share of the training set; the shares of a seed are nested.
    parameters
        Number of trainable parameters of all models; by default that of the first one as configured.
    tolerance
        Largest relative deviation from it.
    optimizer, schedule
        As for the task. The whole budget counts as one epoch of the schedule.
    trainer
        Some options of Lightning's Trainer.
    memory
        Whether the peak memory of a training step is measured, on the CPU in a process of its own and with the first
        seed alone.
    root
        Folder of the data, for data sets that take a ``root`` and have none.
    """

    task: Spec
    models: dict[str, ModelSettings]
    data: DataSettings
    budget: BudgetSettings
    equivariance: EquivarianceSettings
    seeds: list[int] = field(default_factory=lambda: [0])
    fractions: list[float] = field(default_factory=lambda: [1.0])
    parameters: int | None = None
    tolerance: float = 0.05
    optimizer: Spec | None = None
    schedule: Spec | None = None
    trainer: dict = field(default_factory=dict)  # type: ignore[type-arg]
    memory: bool = True
    root: str | None = None

    def __post_init__(self) -> None:
        for name, values, allowed, fit in (
            ("seeds", self.seeds, "integers of at least 0", all(0 <= seed < 2**32 for seed in self.seeds)),
            ("fractions", self.fractions, "numbers in (0, 1]", all(0 < share <= 1 for share in self.fractions)),
        ):
            if not values or not fit:
                raise UsageError(f"{name}: expected a list of {allowed}, got {values}")
            if len(set(values)) < len(values):
                raise UsageError(f"{name}: expected different ones, got {values}")
        if self.parameters is not None:
            check_count("parameters", self.parameters)
        if not 0 < self.tolerance < 1:
            raise UsageError(f"tolerance: expected a number in (0, 1), got {self.tolerance}")
        if unknown := set(self.trainer) - set(_TRAINER):
            raise UsageError(f"trainer: expected some of {list(_TRAINER)}, got {sorted(unknown)}")
        if self.trainer.get("devices", 1) != 1:
            raise UsageError(f"trainer.devices: cells train on one device, got {self.trainer['devices']!r}")

    def cells(self) -> list[Cell]:
        """All cells: every model for the first seed, then for the next one."""
        return [
            Cell(model, float(fraction), seed)
            for seed in self.seeds
            for fraction in self.fractions
            for model in self.models
        ]

    def key(self, cell: Cell, model: ModelSettings) -> str:
        """Digest of all that determines the result of a cell, for ``model`` of the width it is trained with."""
        settings = dataclasses.asdict(self)
        common = ("task", "data", "budget", "optimizer", "schedule", "trainer", "equivariance", "memory")
        content = {
            "format": _FORMAT,
            "cell": [cell.fraction, cell.seed],
            "model": {**model.network, "group": model.group, "optimizer": model.optimizer},
            **{name: settings[name] for name in common},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


_SECTIONS: dict[str, type] = {"data": DataSettings, "budget": BudgetSettings, "equivariance": EquivarianceSettings}


def read_settings(paths: Sequence[str | Path], root: str | None = None, changes: Sequence[str] = ()) -> Settings:
    """Read configuration files: a base, and others that change some of its settings.

    Sections are merged, whatever their depth; any other value of a later file replaces that of the earlier ones, and an
    object of another ``class_path`` replaces the whole object.

    Parameters
    ----------
    paths
        YAML files.
    root
        Folder of the data, instead of that in the files.
    changes
        Settings that replace those of the files: ``"data.batch_size=16"``, values in YAML.

    Raises
    ------
    UsageError
        If a file cannot be read, or a change or setting is unknown, missing or out of range; the message names it.
    """
    content: dict[str, Any] = {}
    for path in paths:
        try:
            overlay = yaml.safe_load(Path(path).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        if not isinstance(overlay, dict):
            raise UsageError(f"{path}: expected sections task, models, data and budget, got {overlay!r}")
        content = _merged(content, overlay)
    for change in changes:
        content = _merged(content, _overlay(content, change))
    if root is not None:
        content["root"] = root
    try:
        return _settings(content)
    except ValueError as error:
        raise UsageError(f"{', '.join(map(str, paths))}: {error}") from error


def _merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        present = merged.get(key)
        if isinstance(present, dict) and isinstance(value, dict):
            classes = present.get("class_path"), value.get("class_path")
            value = value if None not in classes and classes[0] != classes[1] else _merged(present, value)
        merged[key] = value
    return merged


def _overlay(content: Any, change: str) -> dict[str, Any]:
    """The setting of ``--set`` as a configuration file would have it."""
    path, equals, text = change.partition("=")
    *above, last = path.split(".")
    for name in above:
        content = content.get(name, {}) if isinstance(content, dict) else None
    if not equals or not isinstance(content, dict):
        raise UsageError(f"--set {change}: expected SETTING=VALUE or SECTION.SETTING=VALUE, of sections that exist")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {change}: {error}") from error
    for name in [last, *reversed(above)]:
        value = {name: value}
    return dict(value)


def _settings(content: dict[str, Any]) -> Settings:
    content = dict(content)
    sections = {name: _parsed(kind, content.pop(name, {}), f"{name}: ") for name, kind in _SECTIONS.items()}
    models = content.pop("models", {})
    if not isinstance(models, dict) or not models:
        raise UsageError(f"models: expected names with a class_path each, got {models!r}")
    for name in models:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(f"models: expected names of letters, digits, spaces and .+()-_, got {name!r}")
    slugs = [name.replace(" ", "_").casefold() for name in models]
    if len(set(slugs)) < len(slugs):
        raise UsageError(f"models: names must differ in more than case and spaces, got {list(models)}")
    parsed = {name: _parsed(ModelSettings, model, f"models.{name}: ") for name, model in models.items()}
    return _parsed(Settings, content, "", models=parsed, **sections)


def _parsed(kind: type[T], content: Any, where: str, **given: Any) -> T:
    """Build a dataclass from a section of the files, of which jsonargparse knows the types and defaults."""
    if not isinstance(content, dict):
        raise UsageError(f"{where}expected settings, got {content!r}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, skip=set(given))
    known = [entry.name for entry in dataclasses.fields(kind)]  # type: ignore[arg-type]
    try:
        if unknown := [key for key in content if key not in known]:
            raise UsageError(f"unknown setting {unknown[0]!r}; expected some of {', '.join(known)}")
        return kind(**given, **vars(parser.parse_object(content)))
    except (ArgumentError, ValueError) as error:
        text = re.sub(r'^Parser key "(.*?)":', r"\1:", " ".join(str(error).split()))
        raise UsageError(f"{where}{text}") from error
