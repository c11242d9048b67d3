"""``lieattn fit``, ``validate``, ``test`` and ``predict``: Lightning's command for the tasks of this library."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import DefaultHelpFormatter, get_loader, set_dumper, set_loader
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveInt, register_type
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lieattn import train
from lieattn._core.machine import usable_accelerator
from lieattn._core.names import full_names
from lieattn.cli import NO_MODEL, short_warnings
from lieattn.cli._predictions import check_alike, load_members, mean_network, write_predictions
from lieattn.io import load
from lieattn.models import EnergyForces, HamiltonianDynamics, Network, transfer_weights

_ROOT = "runs"
_MOST_DEVICES = 512  # every device is a process, even if the machine does not have it
_OF_ONE_CALL = {"model", "data", "config", "ckpt_path", "weights", "trust"}  # sections that do not describe a run
_OF_FIT = ("--weights", "--ema", "--checkpoint_activations", "--compile", "--cuda_graphs")
_GIVE_MODEL = ("--config", "-c", "--model", "--model.class_path", "--model.help", "--print_config", "-h", "--help")
# A callback that the settings of a run may name, and its module. Others write files, or delete them.
_HARMLESS = ("lightning.pytorch.callbacks.EarlyStopping", "lightning.pytorch.callbacks.early_stopping")
_READ = get_loader("yaml")
_LOGGER = logging.getLogger("lieattn.cli")  # of the parser
_LOGGER.setLevel(logging.DEBUG)
_LOGGER.propagate = False


class _HelpFormatter(DefaultHelpFormatter):
    """Help texts without the long lists of known subclasses."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, _, rest = super()._get_help_string(action).partition(", known subclasses: ")
        return f"{text})" if rest else text


class _Parser(LightningArgumentParser):
    """A parser that raises errors, accepts full names of options only and says what it drops."""

    def __init__(self, **options: Any) -> None:
        defaults: dict[str, Any] = {"prog": "lieattn", "allow_abbrev": False, "exit_on_error": False}
        super().__init__(**defaults | {"logger": _LOGGER, "formatter_class": _HelpFormatter} | options)


def run(name: str, arguments: Sequence[str]) -> int:
    """Run ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

    The exit status is 0 for success, 1 if the training diverged, and 128 + n after signal n.
    """
    train.register_types()
    set_dumper("yaml", _dumped)
    set_loader("yaml", _loaded, (yaml.YAMLError,))
    register_type(torch.device)
    arguments = ["--help" if word == "--help-all" else word for word in arguments]
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("-c", "--config", action="append", default=[])
    early.add_argument("--ckpt_path", nargs="*", default=[])
    early.add_argument("--trust", nargs="*", action="extend", default=[])
    given = early.parse_known_args(arguments)[0]
    parts = [part for word in arguments if (part := word.rpartition("=")[2]).endswith((".yaml", ".yml"))]
    _check_files([*given.config, *parts])
    settings, task = (None, None) if given.config else _described(name, arguments, given)
    known = settings is not None or task is not None
    _check_order(name, arguments, known)
    try:
        with short_warnings():
            TrainingCommand(name, arguments, settings, task)
    except train.TrainingInterrupted as stop:
        # Without a configuration, the checkpoint must be given as a file, which says what to train.
        _say(f"lieattn: {stop}\nTo continue: the same command with --ckpt_path {stop.path if known else 'last'}")
        return _status(128 + stop.signum)
    except train.NonFiniteError as error:
        _say(f"lieattn: {error}")
        return _status(1)
    return 0


class TrainingCommand(LightningCLI):
    """LightningCLI with loggers, checkpoints and continuation that need no configuration.

    ``settings`` are those of the checkpoint, which is not trusted, and ``task`` builds what it describes, if the
    arguments have no configuration. With several checkpoints, the networks of all form an ensemble.
    """

    def __init__(self, name: str, arguments: Sequence[str], settings: Any = None, task: Any = None) -> None:
        self._name, self._checked = name, settings is not None
        root = _ROOT if name == "fit" else None  # results of a checkpoint stand with its run, unless a folder is given
        super().__init__(
            task or train.PointSetTask,
            train.PointSetData,
            trainer_class=_Trainer,
            subclass_mode_model=task is None,
            trainer_defaults={"default_root_dir": root, "max_epochs": 100, "inference_mode": False},  # for forces
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_class=_Parser,
            args=[name, *(["--config", json.dumps(settings)] if self._checked else []), *arguments],
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the command that runs; parsers for the other ones would take most of the time to start."""
        return {self._name: {*super().subcommands()[self._name], "ckpt_path"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of this library."""
        parser.add_class_arguments(train.LastCheckpoint, "last")
        add = parser.add_argument
        add("--ckpt_path", nargs="+", default=None, help="last, best or file; several for an ensemble")
        averages = "decay of lieattn.train.AveragedWeights, which fit validates and saves; null for no averages"
        add("--ema", type=ClosedUnitInterval | None, default=None, help=averages)
        source = "trained network, file of lieattn.save or checkpoint with the weights that fit starts from"
        add("--weights", type=str | None, default=None, help=source)
        add("--checkpoint_activations", type=bool, default=False, help="recompute activations in the backward pass")
        add("--compile", type=bool, default=False, help="compile the network with torch.compile")
        add("--cuda_graphs", type=bool, default=False, help="replay training steps as CUDA graphs")
        trusted = "packages whose classes a checkpoint may use, besides this library and torch"
        add("--trust", nargs="+", action="extend", default=[], help=trusted)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, and name the arguments of classes that others replace."""
        _LOGGER.handlers = [_Dropped()]
        try:
            self.config = parser.parse_args(args)
        except argparse.ArgumentError as error:
            raise train.UsageError(train.short_message(error)) from error

    def _parse_ckpt_path(self) -> None:
        """Do nothing; Lightning would change the configuration according to the checkpoint."""

    def before_instantiate_classes(self) -> None:
        """Find the checkpoints, and keep the resolved configuration."""
        settings = self.config[self.subcommand]
        self._paths = _checkpoints(self._name, settings)
        if settings.trainer.default_root_dir is None:
            folder = Path(self._paths[0]).parent if len(self._paths) == 1 else Path()
            settings.trainer.default_root_dir = str(folder.parent if folder.name == "checkpoints" else _ROOT)
        try:
            self._checkpoint = train.read_checkpoint(self._paths[0]) if self._paths else None
        except train.CheckpointError as error:
            best = Path(self._paths[0]).with_name("best.ckpt")
            if self._name == "fit" and best != Path(self._paths[0]) and best.is_file():
                error.add_note(f"to continue from {best}, the best validation before: --ckpt_path best")
            raise
        dumped = yaml.safe_load(self._parser(self.subcommand).dump(settings))
        # There is no model if the checkpoint describes its task.
        self._resolved = {key: dumped[key] for key in ("model", "data") if key in dumped}
        if self._name == "fit":
            self._resolved["run"] = {key: value for key, value in dumped.items() if key not in _OF_ONE_CALL}
        if self._checked:  # a second check, because files named in the configuration have been read by now
            source = f"the command line, or a file that {self._paths[0]} refers to,"
            train.check_trusted(self._resolved, source, [*settings.trust, *_HARMLESS])
        self._members = load_members(self._paths[1:], settings.trust) if self._paths[1:] else {}

    def instantiate_classes(self) -> None:
        """Build all objects; UsageError is raised if an argument does not fit."""
        try:
            super().instantiate_classes()
        except (TypeError, ValueError) as error:
            raise train.UsageError(train.short_message(error)) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer, with loggers, checkpoints and averages."""
        settings = self.config_init[self.subcommand]
        chosen, root, bare = settings.trainer, settings.trainer.default_root_dir, settings.trainer.barebones
        kwargs["accelerator"] = usable_accelerator(chosen.accelerator)
        if not bare and chosen.logger in (None, True):
            # Both loggers have the same version, which is counted by the folder of TensorBoard.
            board = TensorBoardLogger(root, name="tensorboard", default_hp_metric=False)
            kwargs["logger"] = [CSVLogger(root, name="csv"), board]
        if self._name == "fit":
            kwargs["callbacks"] = _callbacks(settings, self.model.monitor)
        try:
            return super().instantiate_trainer(**kwargs)
        except MisconfigurationException as error:
            if chosen.accelerator not in ("auto", "cpu"):
                error.add_note("for a run of another machine: --trainer.accelerator auto takes what this one has")
            raise

    def after_instantiate_classes(self) -> None:
        """Load the weights, and check what would fail or do nothing later."""
        settings = self.config_init[self.subcommand]
        if self._name == "fit":
            _start_from(self.model.network, settings.weights, settings.trust, self._paths)
        if self._checkpoint is not None:
            self.trainer.precision_plugin.convert_module(self.model)  # otherwise float64 weights are rounded
            train.load_weights(self.model, self._checkpoint, "the model of the configuration")
        if self._members:
            check_alike({self._paths[0]: self.model, **self._members})
            if self._name != "predict":
                self.model.network = mean_network(self.model, list(self._members.values()))
                self.model.input_mean = None  # each network of the mean has its own
        if self._name == "fit":
            _change_steps(self.model, settings)
        if self._name == "validate" and self.datamodule.sets["val"] is None:
            raise train.UsageError("data.val: expected a data set to validate on, got none")
        limit = f"limit_{self._name.removesuffix('idate')}_batches"
        if self._name != "fit" and getattr(self.trainer, limit) == 0:
            raise train.UsageError(f"trainer.{limit}: expected at least one batch, got 0")
        self.model.config = self._resolved if "model" in self._resolved else {}

    def fit(self, **kwargs: Any) -> None:
        """Train, from the checkpoint if there is one."""
        self.trainer.fit(ckpt_path=self._paths[0] if self._paths else None, **kwargs)
        best = next((one for one in self.trainer.checkpoint_callbacks if isinstance(one, _Best)), None)
        if best is not None and best.best_model_score is not None:
            path = Path(best.best_model_path)
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            _say(f"best validation: {best.monitor} {float(best.best_model_score):.4g}, kept in {shown}")

    def predict(self, model: Any, **_: Any) -> None:
        """Write classes to ``predictions.csv`` in the folder of the run, other targets to ``predictions_NAME.csv``.

        No file is replaced. A ``fast_dev_run`` writes no files.
        """
        write_predictions(self.trainer, model, list(self._members.values()), self.datamodule)


class _Trainer(Trainer):
    """A trainer that refuses values with which Lightning would fail later, or that it ignores."""

    def __init__(
        self,
        *,
        devices: list[int] | str | int = "auto",
        # Lightning's own annotation may become "float or int", for which 1, one batch, is 1.0, all of them.
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        accumulate_grad_batches: PositiveInt = 1,
        check_val_every_n_epoch: PositiveInt | None = 1,
        gradient_clip_val: NonNegativeFloat | None = None,
        log_every_n_steps: NonNegativeInt | None = None,
        **options: Any,
    ) -> None:
        given = locals()
        if str(devices).isdecimal() and int(str(devices)) > _MOST_DEVICES:
            raise ValueError(f"trainer.devices: expected at most {_MOST_DEVICES}, got {devices}")
        typed = {name: value for name, value in given.items() if name not in ("self", "options", "__class__")}
        super().__init__(**typed, **options)


class _Best(ModelCheckpoint):
    """Keeps the best validation and, of equal ones, such as accuracies of a few clouds, that with the lowest loss."""

    _loss = -math.inf  # of the best validation
    _continues = False  # whether the checkpoint that is loaded is in the folder of this run

    @property
    def state_key(self) -> str:
        """The key of the base class, under which earlier checkpoints have their state."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def check_monitor_top_k(self, trainer: Trainer, current: torch.Tensor | None = None) -> bool:
        """Return whether a validation is to be saved."""
        loss = float(trainer.callback_metrics.get("val/loss", math.inf))
        equal = current is not None and self.best_model_score is not None and bool(current == self.best_model_score)
        saved = (equal and loss < self._loss) or super().check_monitor_top_k(trainer, current)
        self._loss = loss if saved else self._loss
        return saved

    def state_dict(self) -> dict[str, Any]:
        """The state of the base class, and the loss."""
        return {**super().state_dict(), "loss": self._loss}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Note where the checkpoint is, since the folder of a run may have had another name or place."""
        self._continues = Path(trainer.ckpt_path or "").resolve().parent == Path(self.dirpath or "")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue; a state without a loss is of an earlier version, which kept the first one."""
        best = Path(self.dirpath or "", Path(state_dict["best_model_path"]).name)
        if self._continues and best.is_file():  # otherwise a worse validation would replace it
            paths = {"dirpath": self.dirpath, "best_model_path": str(best), "kth_best_model_path": str(best)}
            state_dict = {**state_dict, **paths, "best_k_models": {str(best): state_dict["best_model_score"]}}
        super().load_state_dict(state_dict)
        self._loss = state_dict.get("loss", -math.inf)


class _Dropped(logging.Handler):
    """Tells once which arguments of a class are dropped because another class replaces it."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if "discarding" in (message := record.getMessage()) and message not in self._told:
            self._told.add(message)
            _say(f"lieattn: warning: {message}")


class _Dumper(yaml.SafeDumper):
    """Writes members of enumerations, which are defaults of Lightning's callbacks, as their values."""


_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))


def _loaded(text: str) -> Any:
    """Read YAML, in which classes may have short names; jsonargparse itself knows those of subclasses only."""
    content = _READ(text)
    with suppress(ValueError):  # about misspelled names, for which jsonargparse has its own message
        return full_names(content)
    return content


def _dumped(settings: Any) -> str:
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _check_files(paths: Sequence[str | Path]) -> None:
    """Raise UsageError, naming the file, if a configuration cannot be read or a part of it would be ignored."""
    for path in filter(Path.is_file, map(Path, paths)):
        content = train.read_yaml(path, "settings by name")
        model = content.get("model", {})
        if isinstance(model, dict) and (wrong := model.keys() - {"class_path", "init_args", "dict_kwargs"}):
            raise train.UsageError(f"{path}: model: expected class_path and init_args, got {', '.join(sorted(wrong))}")
        sections = {name: content[name] for name in ("data", "trainer", "last") if name in content}
        for name, value in sections.items():
            if not isinstance(value, dict | str):
                raise train.UsageError(f"{path}: {name}: expected settings by name, or a file with them, got {value!r}")
        _check_files([path.parent / value for value in sections.values() if isinstance(value, str)])


def _check_order(name: str, arguments: Sequence[str], known: bool) -> None:
    """Raise UsageError if no model is given, or options come before it or belong to another command."""
    names = [word[:2] if word.startswith("-c") else word.partition("=")[0] for word in arguments]  # -cFILE
    first = next((word for word in names if word in _GIVE_MODEL or word.startswith("--model.")), None)
    if first is None and not known and not any(word.endswith(".help") for word in names):
        raise train.UsageError(NO_MODEL)
    if first not in (None, *_GIVE_MODEL) and not known:
        raise train.UsageError(f"{first}: expected after --config FILE or --model CLASS, whose settings it changes")
    if name != "fit" and (given := [word for word in names if word in _OF_FIT]):  # in a file, they are of its training
        found = f"{name}, which uses the network and the weights of --ckpt_path"
        raise train.UsageError(f"{given[0]}: expected none for {found}")


def _described(
    name: str, arguments: Sequence[str], given: argparse.Namespace
) -> tuple[dict[str, Any] | None, Callable[[], train.PointSetTask] | None]:
    """The settings in the checkpoint of the arguments, or a function that builds the task that it describes.

    Both are None if the arguments name no file of a checkpoint. The settings of the run are among them for ``fit``
    only, since other commands may run on another machine. CheckpointError is raised if the checkpoint names classes or
    functions that are not trusted.
    """
    path = next(iter(given.ckpt_path), "last")
    if path in ("last", "best") or any(word.startswith(("-h", "--help", "--print_config")) for word in arguments):
        return None, None
    if settings := train.read_checkpoint(path)["lieattn"].get("config"):
        settings = {key: value for key, value in settings.items() if key != "run"} | (
            _run_of(settings.get("run"), path) if name == "fit" else {}
        )
        train.check_trusted(settings, path, [*given.trust, *_HARMLESS])
        return settings, None
    if any(word.startswith("--model") for word in arguments):
        return None, None

    def task() -> train.PointSetTask:
        return train.load_task(path, given.trust)

    task.__qualname__ = f"task_{id(task)}"  # the parser makes one class for each name
    return None, task


def _run_of(run: Any, path: str) -> dict[str, Any]:
    """The settings of the run of a checkpoint. Its folder is among them only if the checkpoint is still there."""
    if not isinstance(run, dict) or not isinstance(run.get("trainer"), dict):
        return {}  # a checkpoint without these settings
    trainer, last, folder = dict(run["trainer"]), dict(run.get("last") or {}), Path(path).resolve().parent
    if Path(trainer.get("default_root_dir") or "", "checkpoints").resolve() != folder:
        trainer.pop("default_root_dir", None)
    if last.get("dirpath") and Path(last["dirpath"]).resolve() != folder:
        last.pop("dirpath", None)
    return {**run, "trainer": trainer, "last": last}


def _folder(settings: Any) -> Path:
    """Folder of the checkpoints."""
    return Path(settings.last.dirpath or Path(settings.trainer.default_root_dir or _ROOT) / "checkpoints")


def _callbacks(settings: Any, monitor: tuple[str, str]) -> list[Callback]:
    """The callbacks of the settings, averages of the weights, and the checkpoints ``best`` and ``last``."""
    trainer, given = settings.trainer, settings.trainer.callbacks or []
    callbacks: list[Callback] = list(given) if isinstance(given, list) else [given]
    if settings.ema is not None:
        callbacks.append(train.AveragedWeights(settings.ema))
    if trainer.enable_checkpointing is False or trainer.barebones or trainer.fast_dev_run:
        return callbacks
    if settings.data.sets["val"] is not None and not any(isinstance(one, ModelCheckpoint) for one in callbacks):
        options: dict[str, Any] = {"monitor": monitor[0], "mode": monitor[1], "enable_version_counter": False}
        callbacks.append(_Best(_folder(settings), "best", **options))
    return [*callbacks, settings.last]


def _checkpoints(command: str, settings: Any) -> list[str]:
    """The files of the checkpoints, which may be named ``last`` and ``best``."""
    given = [settings.ckpt_path] if isinstance(settings.ckpt_path, str) else settings.ckpt_path or []
    paths = [str(_folder(settings) / f"{name}.ckpt") if name in ("last", "best") else name for name in given]
    if absent := [path for path, name in zip(paths, given, strict=True) if path != name and not Path(path).is_file()]:
        found = ", ".join(sorted(file.name for file in _folder(settings).glob("*.ckpt")))
        raise train.CheckpointError(f"there is no checkpoint {absent[0]}; its folder has {found or 'none'}")
    if not paths and command != "fit":
        raise train.CheckpointError(f"{command} needs trained weights: use --ckpt_path best, last, or FILE")
    if command == "fit" and len(paths) > 1:
        raise train.UsageError(f"--ckpt_path: expected one checkpoint, since fit continues one run, got {len(paths)}")
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise train.UsageError(f"--ckpt_path: expected different files, got {' '.join(paths)}")
    return paths


def _start_from(network: torch.nn.Module, source: str | None, trust: Sequence[str], paths: Sequence[str]) -> None:
    """Copy the weights of a trained network by name, a file of ``lieattn.save`` or a checkpoint, into a new run."""
    if source is None:
        return
    if paths:
        _say(f"{source} is not read: training continues from the weights of the checkpoint")
        return
    try:
        # Without a suffix it may be a misspelled name, and the error of `load` lists the names.
        saved = source.startswith("hf:") or Path(source).is_dir() or Path(source).suffix in ("", ".safetensors")
        new = transfer_weights(network, load(source, trust) if saved else train.load_network(source, trust))
    except (OSError, ValueError) as error:
        reason = f"{source}: {error.strerror}" if isinstance(error, OSError) and error.strerror else error
        raise train.UsageError(f"weights: {reason}") from error
    _say(f"training starts from the weights of {source}; new weights: {', '.join(new) or 'none'}")


def _change_steps(task: train.PointSetTask, options: Any) -> None:
    """Recompute activations, compile the network or capture its steps, as the options say."""
    network = task.network
    if options.compile and options.cuda_graphs:
        raise train.UsageError("compile, cuda_graphs: expected one of them, got both")
    if options.checkpoint_activations:
        if not (networks := [module for module in network.modules() if isinstance(module, Network)]):
            name = type(network).__name__
            raise train.UsageError(f"checkpoint_activations: expected a lieattn.models.Network, got {name}")
        for part in networks:
            part.checkpoint_activations()
    if options.compile:
        for module in network.modules():
            if isinstance(module, HamiltonianDynamics):
                reason = "its losses need two derivatives, and torch differentiates compiled functions only once"
                _say(f"compile: HamiltonianDynamics runs uncompiled, including its network, because {reason}")
        forces: list[Any] = [module for module in network.modules() if isinstance(module, EnergyForces)]
        for module in forces or [network]:
            module.compile()
    if options.cuda_graphs:
        task.capture()


@rank_zero_only
def _say(message: str) -> None:
    """Print a note for the user; of several processes, only the first one does."""
    sys.stdout.flush()
    sys.stderr.write(message + "\n")


def _status(status: int) -> int:
    """Exit status of this process after all processes have stopped; only the first one reports an error.

    As soon as another process ends with an error, Lightning kills the first one, which may still be writing.
    """
    return 0 if getattr(rank_zero_only, "rank", 0) else status
