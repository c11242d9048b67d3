"""The settings of a comparison."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, TypeVar

from jsonargparse import ArgumentError, ArgumentParser

from lieattn._core.checks import check_arguments, check_counts
from lieattn.io import digest_of_json
from lieattn.train import UsageError, parse_yaml, read_yaml, short_message

T = TypeVar("T")


class Spec(TypedDict):
    """An object of a configuration file; its class and arguments are checked when it is built."""

    class_path: str
    init_args: NotRequired[dict]  # type: ignore[type-arg] # jsonargparse would build the values of a dict[str, Any]


_FORMAT = 1  # version of the cell files; part of their key
_NAME = re.compile(r"\w[\w .+()-]*")
_TRAINER = ("accelerator", "deterministic", "devices", "gradient_clip_val", "precision")
_COMMON = ("task", "data", "budget", "optimizer", "schedule", "trainer", "equivariance", "memory")  # in keys of cells


@dataclass(frozen=True)
class ModelSettings:
    """A network to compare, and the arguments that may be chosen so that it matches the others.

    The argument named by ``width`` is set to a multiple of ``step``, for each combination of the values in ``adjust``
    in turn until one fits. An example is ``{"options.mlp_ratio": [4, 3, 5]}``; a dot leads to an option of an argument,
    or to an argument of a network in an argument: ``"network.channels"``. Several widths are equal.
    """

    class_path: str
    init_args: dict = field(default_factory=dict)  # type: ignore[type-arg]
    width: str | list[str] | None = None  # name of an argument, or of several; None leaves the network as it is
    step: int = 1  # widths tried are multiples of this, such as the number of heads
    adjust: dict[str, list] = field(default_factory=dict)  # type: ignore[type-arg]
    group: Spec | None = None  # group of the equivariance error; the network's own group by default
    optimizer: Spec | None = None  # replaces the common optimizer
    ema: float | None = None  # replaces the common decay; 0 for weights that are not averaged

    def __post_init__(self) -> None:
        check_arguments(ModelSettings, vars(self))
        check_counts(step=self.step)
        _check_decay(self.ema)
        if not all(self.adjust.values()):
            raise UsageError(f"adjust: expected lists of values by argument, got {self.adjust}")

    @property
    def network(self) -> Spec:
        """The network in the form of configuration files."""
        return {"class_path": self.class_path, "init_args": self.init_args}

    @property
    def widths(self) -> list[str]:
        """Names of the arguments that are set to the width."""
        return [self.width] if isinstance(self.width, str) else [*(self.width or ())]

    @property
    def chosen(self) -> dict[str, Any]:
        """The arguments that may be chosen, with their present values; arguments without a value are left out."""
        values = {name: _at(self.init_args, _path(self.init_args, name)) for name in [*self.widths, *self.adjust]}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def choice(self) -> str:
        """The chosen arguments in words, such as ``"channels = 14, options.mlp_ratio = 5"``."""
        return ", ".join(f"{name} = {value}" for name, value in self.chosen.items())

    def with_arguments(self, **arguments: Any) -> ModelSettings:
        """The same model with other arguments, such as its width."""
        nested = (_nested(_path(self.init_args, name), value) for name, value in arguments.items())
        return dataclasses.replace(self, init_args=reduce(_merged, nested, self.init_args))


@dataclass(frozen=True)
class DataSettings:
    """Data sets of ``torch_geometric.data.Data``, sizes of batches, and random rotations.

    With ``rotate_train``, each cloud of the training and validation set is rotated at random whenever it is loaded.
    With ``rotate_test``, the test set is evaluated a second time with every cloud rotated. An axis such as ``"z"`` in
    place of true restricts the rotations to this axis.
    """

    train: Spec
    val: Spec
    test: Spec
    batch_size: int = 32
    eval_batch_size: int = 128  # for validation and test
    limit: dict[str, int] = field(default_factory=dict)  # number of clouds of a set, drawn once: {"val": 500}
    rotate_train: bool | str = False
    rotate_test: bool | str = False
    vectors: list[str] | None = None  # attributes that rotate with the points; by default as the training set lists
    tensors: list[str] | None = None  # likewise for tensors

    def __post_init__(self) -> None:
        if unknown := set(self.limit) - {"train", "val", "test"}:
            raise UsageError(f"limit: expected some of ['train', 'val', 'test'], got {sorted(unknown)}")
        limits = {f"limit.{name}": count for name, count in self.limit.items()}
        check_counts(batch_size=self.batch_size, eval_batch_size=self.eval_batch_size, **limits)
        for name, axis in (("rotate_train", self.rotate_train), ("rotate_test", self.rotate_test)):
            if axis not in (False, True, "x", "y", "z"):
                raise UsageError(f"{name}: expected true, false, or an axis x, y or z, got {axis!r}")


@dataclass(frozen=True)
class BudgetSettings:
    """How long each cell trains, in optimizer steps or in seconds of such steps, and how often it is validated.

    The ``clock`` counts elapsed seconds (``"wall"``), or seconds of processor time over all threads of this process
    (``"processor"``), which is better on a machine that runs other programs at the same time.
    """

    steps: int | None = None
    seconds: int | float | None = None  # integers stay integers, since keys of cells depend on it
    evaluations: int = 10
    clock: Literal["wall", "processor"] = "wall"

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            both = f"steps {self.steps} and seconds {self.seconds}; set one to null"
            found = "neither" if self.steps is None else both
            raise UsageError(f"expected either steps or seconds, got {found}")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise UsageError(f"seconds: expected a positive number, got {self.seconds!r}")
        check_counts(steps=1 if self.steps is None else self.steps, evaluations=self.evaluations)


@dataclass(frozen=True)
class MatchSettings:
    """The quantity that all models have in common, up to a relative ``tolerance``.

    ``by`` is ``"parameters"`` for the number of trainable parameters, ``"seconds"`` for the time of a training step,
    measured on this machine in turn with steps of the reference model, or ``"operations"`` for the multiply-adds of
    such a step. ``to`` is a number, or the name of a reference model, which is taken as configured; by default the
    first model.
    """

    by: Literal["parameters", "seconds", "operations"] = "parameters"
    to: int | float | str | None = None
    tolerance: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise UsageError(f"tolerance: expected a number in (0, 1), got {self.tolerance}")
        if isinstance(self.to, int | float) and not 0 < self.to < math.inf:
            raise UsageError(f"to: expected a positive number, or the name of a model, got {self.to!r}")


@dataclass(frozen=True)
class EquivarianceSettings:
    """Numbers of clouds of the test set and of random elements for which the equivariance error is measured."""

    clouds: int = 8
    elements: int = 8

    def __post_init__(self) -> None:
        check_counts(clouds=self.clouds, elements=self.elements)


@dataclass(frozen=True)
class Cell:
    """One training: a model, a share of the training set, and a seed."""

    model: str
    fraction: float
    seed: int

    @property
    def name(self) -> str:
        """Name of the folder of the cell."""
        return f"{self.model.replace(' ', '_')}-{self.fraction:g}-{self.seed}"

    def __str__(self) -> str:
        return f"{self.model}, {100 * self.fraction:g} % of the data, seed {self.seed}"


@dataclass(frozen=True)
class Settings:
    """The settings of a comparison; the attributes are the sections of its configuration files.

    Each model is trained for every seed on every share of the training set; the shares of a seed are nested. The whole
    budget counts as one epoch of the schedule.
    """

    task: Spec  # a PointSetTask without its network, optimizer and schedule
    models: dict[str, ModelSettings]
    data: DataSettings
    budget: BudgetSettings
    match: MatchSettings
    equivariance: EquivarianceSettings
    seeds: list[int] = field(default_factory=lambda: [0])
    fractions: list[float] = field(default_factory=lambda: [1.0])
    optimizer: Spec | None = None
    schedule: Spec | None = None
    ema: float | None = None  # decay of averages of the weights; the averages are validated and tested
    trainer: dict = field(default_factory=dict)  # type: ignore[type-arg] # some options of Lightning's Trainer
    memory: bool = True  # whether the peak memory of a training step is measured, with the first seed
    root: str | None = None  # folder of the data, for data sets that take a root and give none

    def __post_init__(self) -> None:
        _check_decay(self.ema)
        if not self.seeds or len({seed for seed in self.seeds if 0 <= seed < 2**32}) < len(self.seeds):
            raise UsageError(f"seeds: expected a list of different integers of at least 0, got {self.seeds}")
        # Names of cells contain six digits.
        if not self.fractions or len({f"{x:g}" for x in self.fractions if 0 < x <= 1}) < len(self.fractions):
            found = f"numbers in (0, 1] that differ in six digits, got {self.fractions}"
            raise UsageError(f"fractions: expected a list of {found}")
        if isinstance(self.match.to, str) and self.match.to not in self.models:
            raise UsageError(f"match: to: expected a number or one of {list(self.models)}, got {self.match.to!r}")
        if unknown := set(self.trainer) - set(_TRAINER):
            raise UsageError(f"trainer: expected some of {list(_TRAINER)}, got {sorted(unknown)}")
        if self.trainer.get("devices", 1) != 1:
            raise UsageError(f"trainer.devices: cells train on one device, got {self.trainer['devices']!r}")

    @property
    def reference(self) -> str:
        """Name of the model that the others are matched to, unless they are matched to a number."""
        return self.match.to if isinstance(self.match.to, str) else next(iter(self.models))

    def cells(self) -> list[Cell]:
        """List all cells: every model for the first seed, then for the next seed."""
        shares = [float(fraction) for fraction in self.fractions]
        return [Cell(model, share, seed) for seed in self.seeds for share in shares for model in self.models]

    def decay(self, model: ModelSettings) -> float | None:
        """Return the decay of the averages of a model's weights; None for weights that are not averaged."""
        return (self.ema if model.ema is None else model.ema) or None

    def key(self, cell: Cell, model: ModelSettings) -> str:
        """Return a digest of all settings that determine the result of a cell; ``model`` has its final width."""
        settings = dataclasses.asdict(self)
        if self.budget.clock == "wall":  # keeps the keys of cells from before the option existed
            del settings["budget"]["clock"]
        content = {
            "format": _FORMAT,
            "cell": [cell.fraction, cell.seed],
            "model": {**model.network, "group": model.group, "optimizer": model.optimizer},
            **{name: settings[name] for name in _COMMON},
        }
        if self.match.by != "parameters":  # likewise
            content["match"] = self.match.by
        if (decay := self.decay(model)) is not None:
            content["ema"] = decay
        return digest_of_json(content)


def read_settings(paths: Sequence[str | Path], root: str | None = None, changes: Sequence[str] = ()) -> Settings:
    """Read configuration files: a base, and others that change some of its settings.

    Sections are merged at any depth. Other values, and objects with another ``class_path``, replace the values of
    earlier files. The settings in the files are replaced by ``changes`` such as ``"data.batch_size=16"``, with values
    in YAML, and by the folder ``root`` of the data. UsageError is raised if a file cannot be read, or a setting is
    unknown, missing or out of range.
    """
    check_arguments(read_settings, locals())
    content: dict[str, Any] = {}
    for path in paths:
        content = _merged(content, read_yaml(path, "sections task, models, data and budget"))
    for change in changes:
        path, equals, text = change.partition("=")
        names = path.split(".")
        if not equals or not isinstance(_at(content, names[:-1], {}), dict):
            raise UsageError(f"--{path}: expected a setting, or SECTION.SETTING of sections that exist")
        try:
            content = _merged(content, _nested(names, parse_yaml(f"--{path}", text)))
        except ValueError as error:
            raise UsageError(str(error)) from error
    try:
        return settings_from({**content, **({} if root is None else {"root": root})})
    except ValueError as error:
        raise UsageError(f"{', '.join(map(str, paths))}: {error}") from error


def _check_decay(ema: float | None) -> None:
    if ema is not None and not 0 <= ema < 1:
        raise UsageError(f"ema: expected a number in [0, 1), got {ema}")


def _merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        present = merged.get(key)
        if isinstance(present, dict) and isinstance(value, dict):
            same = present.get("class_path") == value.get("class_path", present.get("class_path"))
            value = _merged(present, value) if same else value
        merged[key] = value
    return merged


def _path(content: Any, name: str) -> list[str]:
    """Return the keys that lead to an argument such as ``network.channels``, also through ``init_args``."""
    keys: list[str] = []
    for part in name.split("."):
        inside = isinstance(content, dict) and "class_path" in content and part != "init_args"
        keys += ["init_args"] * inside + [part]
        content = _at(content, ["init_args", part] if inside else [part])
    return keys


def _nested(names: Sequence[str], value: Any) -> dict[str, Any]:
    """``{first: {second: value}}``."""
    return reduce(lambda inner, name: {name: inner}, reversed(names), value)


def _at(content: Any, names: Sequence[str], missing: Any = None) -> Any:
    """Return ``content[first][second]``, or None if ``content`` or ``content[first]`` is not a section."""
    return reduce(lambda inner, name: inner.get(name, missing) if isinstance(inner, dict) else None, names, content)


def settings_from(content: Mapping[str, Any]) -> Settings:
    """Build settings from the sections of files; UsageError is raised as by :func:`read_settings`."""
    content = dict(content)
    models = content.pop("models", {})
    if not isinstance(models, dict) or not models:
        raise UsageError(f"models: expected names with a class_path each, got {models!r}")
    for name in models:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(f"models: expected names of letters, digits, spaces and .+()-_, got {name!r}")
    if len({name.replace(" ", "_").casefold() for name in models}) < len(models):
        raise UsageError(f"models: names must differ in more than case and spaces, got {list(models)}")
    models = {name: _parsed(ModelSettings, model, f"models.{name}: ") for name, model in models.items()}
    kinds: dict[str, Any] = {"data": DataSettings, "budget": BudgetSettings, "match": MatchSettings}
    kinds["equivariance"] = EquivarianceSettings
    parts: dict[str, Any] = {name: _parsed(kind, content.pop(name, {}), f"{name}: ") for name, kind in kinds.items()}
    return _parsed(Settings, content, models=models, **parts)


def _parsed(kind: type[T], content: Any, where: str = "", **given: Any) -> T:
    """Build a dataclass from a section of the files; jsonargparse checks types and fills in defaults.

    The message of a UsageError begins with ``where``. The arguments in ``given`` are passed on and not read.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, skip=set(given))
    known = [entry.name for entry in dataclasses.fields(kind)]  # type: ignore[arg-type]
    try:
        if not isinstance(content, dict):
            raise UsageError(f"expected settings, got {content!r}")
        if unknown := [key for key in content if key not in known]:
            raise UsageError(f"unknown setting {unknown[0]!r}; expected some of {', '.join(known)}")
        return kind(**given, **vars(parser.parse_object(content)))
    except (ArgumentError, ValueError) as error:
        raise UsageError(f"{where}{short_message(error)}") from error
