"""What a comparison is: models, task, data and budget of a configuration file, checked, and its cells."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lieattn._checks import check_count
from lieattn.train._compare_checks import check_distinct, check_spec, check_texts, is_number
from lieattn.train._errors import UsageError

Spec = dict[str, Any]
"""``class_path`` and ``init_args``, as configuration files have them."""

T = TypeVar("T")

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
        Further arguments with the values they may take where the width alone does not do: all combinations are
        tried in their order, such as ``{"widening": [4, 3, 5]}``, until one fits.
    group
        Group to measure the equivariance error of; the network's own attribute ``group`` if absent.
    optimizer
        Used for this network instead of the common one.
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)
    width: str | None = None
    step: int = 1
    adjust: dict[str, list[Any]] = field(default_factory=dict)
    group: Spec | None = None
    optimizer: Spec | None = None

    def __post_init__(self) -> None:
        check_spec("network", {"class_path": self.class_path, "init_args": self.init_args})
        check_count("step", self.step)
        if not all(isinstance(values, list) and values for values in self.adjust.values()):
            raise UsageError(f"adjust: expected lists of values by argument, got {self.adjust}")
        for name in ("group", "optimizer"):
            if getattr(self, name) is not None:
                check_spec(name, getattr(self, name))

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
    """Data sets, batches, and what is turned at random.

    Attributes
    ----------
    train, val, test
        Data sets of ``torch_geometric.data.Data``.
    batch_size, eval_batch_size
        Clouds in a batch of training, and of validation and test.
    limit
        Largest number of clouds of a set, chosen at random once and for all; such as ``{"val": 500}``.
    rotate_train, rotate_test
        Whether each cloud of training and validation is turned at random whenever it is seen, and whether the test
        set is evaluated a second time with every cloud turned; an axis ``"z"`` instead of true turns about it only.
    vectors, tensors
        Attributes that turn with the points; by default those that the training set lists under these names.
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
        for name in _SETS:
            check_spec(name, getattr(self, name))
        for name in ("batch_size", "eval_batch_size"):
            check_count(name, getattr(self, name))
        if unknown := set(self.limit) - set(_SETS):
            raise UsageError(f"limit: expected some of {list(_SETS)}, got {sorted(unknown)}")
        for name, count in self.limit.items():
            check_count(f"limit.{name}", count)
        for name in ("rotate_train", "rotate_test"):
            if getattr(self, name) not in _AXES:
                raise UsageError(f"{name}: expected true, false, or an axis x, y or z, got {getattr(self, name)!r}")
        for name in ("vectors", "tensors"):
            if getattr(self, name) is not None:
                check_texts(name, getattr(self, name))


@dataclass(frozen=True)
class BudgetSettings:
    """How long each cell trains: optimizer steps, or seconds of them; and how often it is validated meanwhile."""

    steps: int | None = None
    seconds: float | None = None
    evaluations: int = 10

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise UsageError("expected either steps or seconds")
        if self.steps is not None:
            check_count("steps", self.steps)
        elif not (is_number(self.seconds) and 0 < float(self.seconds or 0) < math.inf):
            raise UsageError(f"seconds: expected a positive number, got {self.seconds!r}")
        check_count("evaluations", self.evaluations)


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
    """A comparison; the sections of the configuration file are its attributes.

    Attributes
    ----------
    task
        A ``PointSetTask`` without its network, optimizer and schedule.
    models, data, budget, equivariance
        See their classes.
    seeds, fractions
        Each model is trained for every seed on every share of the training set; the shares of a seed are nested.
    parameters
        Number of trainable parameters of all models; that of the first one as configured, if absent.
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
    seeds: list[int] = field(default_factory=lambda: [0])
    fractions: list[float] = field(default_factory=lambda: [1.0])
    parameters: int | None = None
    tolerance: float = 0.05
    optimizer: Spec | None = None
    schedule: Spec | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    equivariance: EquivarianceSettings = field(default_factory=EquivarianceSettings)
    memory: bool = True
    root: str | None = None

    def __post_init__(self) -> None:
        for name in ("task", "optimizer", "schedule"):
            if getattr(self, name) is not None:
                check_spec(name, getattr(self, name))
        check_distinct("seeds", self.seeds, lambda seed: isinstance(seed, int) and 0 <= seed < 2**32)
        check_distinct("fractions", self.fractions, lambda share: is_number(share) and 0 < share <= 1)
        if self.parameters is not None:
            check_count("parameters", self.parameters)
        if not (is_number(self.tolerance) and 0 < self.tolerance < 1):
            raise UsageError(f"tolerance: expected a number in (0, 1), got {self.tolerance!r}")
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
        common = ("task", "budget", "optimizer", "schedule", "trainer", "equivariance", "memory")
        content = {
            "format": _FORMAT,
            "cell": [cell.fraction, cell.seed],
            "model": {**model.network, "group": model.group, "optimizer": model.optimizer},
            "data": dataclasses.asdict(self.data),
            **{name: _plain(getattr(self, name)) for name in common},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def read_settings(path: str | Path, root: str | None = None, changes: Sequence[str] = ()) -> Settings:
    """Read a configuration file.

    Parameters
    ----------
    path
        YAML.
    root
        Folder of the data, instead of that in the file.
    changes
        Settings that replace those of the file: ``"data.batch_size=16"``, values in YAML.

    Raises
    ------
    UsageError
        If the file cannot be read, or a change or setting is unknown, missing or out of range; the message names it.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    for change in changes:
        _change(content, change)
    try:
        return _settings(content, root)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _change(content: Any, change: str) -> None:
    """Replace one setting of the file's content."""
    path, equals, text = change.partition("=")
    *above, last = path.split(".")
    for name in above:
        content = content.setdefault(name, {}) if isinstance(content, dict) else None
    if not equals or not isinstance(content, dict):
        raise UsageError(f"--set {change}: expected SETTING=VALUE or SECTION.SETTING=VALUE, of sections that exist")
    try:
        content[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {change}: {error}") from error


def _settings(content: Any, root: str | None) -> Settings:
    if not isinstance(content, dict):
        raise UsageError(f"expected sections task, models, data and budget, got {content!r}")
    content = {**content, **({} if root is None else {"root": root})}
    for name, kind in (("data", DataSettings), ("budget", BudgetSettings), ("equivariance", EquivarianceSettings)):
        if name in content:
            content[name] = _section(name, kind, content[name])
    models = content.get("models", {})
    if not isinstance(models, dict) or ("models" in content and not models):
        raise UsageError(f"models: expected names with a class_path each, got {models!r}")
    for name in models:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(f"models: expected names of letters, digits, spaces and .+()-_, got {name!r}")
    slugs = [name.replace(" ", "_").casefold() for name in models]
    if len(set(slugs)) < len(slugs):
        raise UsageError(f"models: names must differ in more than case and spaces, got {list(models)}")
    if models:
        content["models"] = {name: _section(f"models.{name}", ModelSettings, model) for name, model in models.items()}
    return _section("", Settings, content)


def _section(where: str, kind: type[T], content: Any) -> T:
    """Build a dataclass from a section of the file."""
    prefix = f"{where}: " if where else ""
    if not isinstance(content, dict):
        raise UsageError(f"{prefix}expected settings, got {content!r}")
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = [entry.name for entry in fields]
    if unknown := [key for key in content if key not in known]:
        raise UsageError(f"{prefix}unknown setting {unknown[0]!r}; expected some of {', '.join(known)}")
    optional = (dataclasses.MISSING, dataclasses.MISSING)
    needed = [entry.name for entry in fields if (entry.default, entry.default_factory) == optional]
    if missing := [name for name in needed if name not in content]:
        raise UsageError(f"{prefix}{missing[0]} is missing")
    try:
        return kind(**content)
    except ValueError as error:
        raise UsageError(f"{prefix}{error}") from error


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
