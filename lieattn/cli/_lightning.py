"""``lieattn fit``, ``validate``, ``test`` and ``predict``: LightningCLI with this library's classes."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from argparse import Action
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from jsonargparse import DefaultHelpFormatter, Namespace
from jsonargparse.typing import Path as ConfigurationPath
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lieattn import train
from lieattn._core.machine import usable_accelerator
from lieattn._core.suggestions import suggested
from lieattn.cli._announced import Announcements, say
from lieattn.cli._certify import is_network
from lieattn.cli._continued import RUN_CLASSES, of_checkpoint, one_checkpoint, option, plain, written
from lieattn.cli._earlier import EarlierBest
from lieattn.cli._ensemble import EnsemblePredictions, check_alike, load_members, mean_network
from lieattn.cli._options import (
    check_built,
    check_classes,
    check_trainer,
    command_line,
    output_file,
    package,
    short_warnings,
)
from lieattn.cli._tables import PointCounts, prediction_tables, write_tables
from lieattn.cli._together import Together, is_lost, status_of
from lieattn.io import check_sections, load, replace_text
from lieattn.models import EnergyForces, HamiltonianDynamics, LieTransformer, Network, transfer_weights

# Inference mode is off because forces are gradients.
_DEFAULTS = {"default_root_dir": "runs", "max_epochs": 100, "inference_mode": False}
_READ = ConfigurationPath.read_text
_BATCHES = tuple(f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict"))
_NAMED = ("last", "best")  # checkpoints
_SECTIONS = ("data", "trainer", "last")
_OF_ONE_CALL = {"model", "data", "config", "ckpt_path", "weights", "trust"}  # sections that do not describe a run
_OF_FIT = ("weights", "ema", "checkpoint_activations", "compile", "cuda_graphs")
_GIVE_MODEL = ("--config", "-c", "--model", "--model.class_path", "--model.help")
_OF_CALLBACKS = ("Early stopping conditioned on", "Found more than one stateful callback")  # errors of Lightning
_NO_MODEL = re.compile(r"the following arguments are required: \w+\.model")
# Warnings of Lightning about intended choices: no workers for small data, the same folder of checkpoints for a run and
# its continuation, evaluation without the callbacks of the training, no validation set, another precision than that of
# the printed size, and a loss that is already reduced; and about its own use of other packages.
_EXPECTED = (
    ".*does not have many workers",
    ".*Checkpoint directory .* exists and is not empty",
    ".*callbacks used to create the checkpoint need to be provided",
    ".*(have no `val_dataloader`|is not supported by the model summary)",
    ".*when logging on epoch level in distributed setting",
    ".*LeafSpec.* is deprecated",
    r"\s*.*(JsonargparseDeprecationWarning|was deprecated in v4)",
)


def run(name: str, arguments: Sequence[str]) -> int:
    """Run ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

    The exit status is 0 for success, 1 if the training diverged, and 128 + n after signal n. Of several processes with
    an error, one raises it, and all have its status.
    """
    with Together() as processes:
        try:
            return _run(name, arguments, processes)
        except Exception as error:
            if not is_lost(error):
                if processes.is_first(error):
                    raise
                return status_of(error)
            if (found := processes.reported()) is None:
                lost = "another process of this training has ended, or cannot be reached"
                again = "to continue from the last checkpoint: --ckpt_path last"
                sys.stderr.write(f"lieattn {name}: {lost}; {again}\n  {error}\n")
            return found or 1


def _run(name: str, arguments: Sequence[str], *callbacks: Callback) -> int:
    arguments = ["--help" if word == "--help-all" else word for word in arguments]
    train.register_types()
    trust = option(arguments, "--trust", type=package, nargs="+", action="extend", default=[])[0]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_no_advertisement)
    arguments, others = one_checkpoint(name, arguments)
    try:
        with without_warnings(), Announcements() as lines, tempfile.TemporaryDirectory(prefix="lieattn-") as folder:
            config, task = of_checkpoint(name, arguments, trust)
            _PointSetCLI(
                name,
                config is not None,
                others,
                (lines, *callbacks),
                task or train.PointSetTask,
                train.PointSetData,
                subclass_mode_model=task is None,
                trainer_defaults=_DEFAULTS,
                seed_everything_default=0,
                save_config_kwargs={"overwrite": True},
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                parser_class=_Parser,
                args=[name, *written(config, Path(folder)), *arguments],
            )
    except train.TrainingInterrupted as stop:
        rest = option(arguments, "--ckpt_path", nargs="?")[1]
        # Without a configuration, the checkpoint must be given as a file, which says what to train.
        state = "last" if config is None and task is None else str(stop.path)
        again = command_line(["lieattn", name, *rest, "--ckpt_path", state])
        say(f"lieattn: {stop}\nTo continue: {again}")
        return _status(128 + stop.signum)
    except train.NonFiniteError as error:
        say(f"lieattn: {error}")
        return _status(1)
    except RuntimeError as error:
        if not str(error).startswith(_OF_CALLBACKS):
            raise
        raise train.UsageError(f"trainer.callbacks: {error}") from error
    return 0


@contextmanager
def without_warnings(*others: str) -> Iterator[None]:
    """Ignore the warnings that are expected from Lightning, or that match one of ``others``, and shorten the rest."""
    with warnings.catch_warnings(), short_warnings():
        for message in (*_EXPECTED, *others):
            warnings.filterwarnings("ignore", message)
        yield


class _HelpFormatter(DefaultHelpFormatter):
    """Help texts without the long lists of known subclasses."""

    def _get_help_string(self, action: Action) -> str:
        text, _, rest = super()._get_help_string(action).partition(", known subclasses: ")
        return f"{text})" if rest else text


class _Parser(LightningArgumentParser):
    """A parser that raises exceptions instead of printing a usage page, and accepts full names of options only."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        defaults: dict[str, Any] = {"prog": "lieattn", "formatter_class": _HelpFormatter, "allow_abbrev": False}
        super().__init__(*arguments, **defaults | options)

    def add_class_arguments(self, theclass: Any, nested_key: str | None = None, *arguments: Any, **options: Any) -> Any:
        """Add the arguments of a class; limits of batches stay integers, since 1 is one batch and 1.0 all of them."""
        if theclass is not Trainer:
            return super().add_class_arguments(theclass, nested_key, *arguments, **options)
        added = super().add_class_arguments(theclass, nested_key, *arguments, skip={*_BATCHES}, **options)
        for name in _BATCHES:
            # The first type that fits is taken, and typing keeps the order of a union that is first seen in a process.
            self.add_argument(
                f"--{nested_key}.{name}",
                type=int | float | None,
                help="number of batches (int) or fraction of them (float)",
            )
        return added

    def parse_args(self, *arguments: Any, **options: Any) -> Namespace:  # type: ignore[override]
        """Parse arguments, and the files that they name, which are in UTF-8 on every system."""
        setattr(ConfigurationPath, "read_text", _read_utf8)  # noqa: B010 - mypy would refuse a method
        try:
            return super().parse_args(*arguments, **options)
        finally:
            setattr(ConfigurationPath, "read_text", _READ)  # noqa: B010

    def save(self, cfg: Namespace, path: str | Path, *, overwrite: bool, multifile: bool, **options: Any) -> None:
        """Write the configuration of a run to one file, in UTF-8 on every system."""
        replace_text(path, self.dump(cfg, **options))

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if _NO_MODEL.fullmatch(message):
            message = "no model was given: use --config FILE, or --ckpt_path with a checkpoint of `lieattn fit`"
        raise train.UsageError(train.short_message(ValueError(suggested(message, self)))) from ex


def _read_utf8(path: ConfigurationPath) -> str:
    file = Path(path.absolute)
    if not file.is_file():
        return _READ(path)
    text = file.read_text(encoding="utf-8")
    try:
        check_sections(text)
    except ValueError as error:
        raise train.UsageError(f"{path.relative}: {error}") from error
    return text


class _PointSetCLI(LightningCLI):
    """LightningCLI with loggers, checkpoints and continuation that need no configuration.

    ``name`` is the command. ``checked`` says that the configuration comes from the checkpoint, which is not trusted.
    ``others`` are further checkpoints, whose networks form an ensemble with the network of the first one. The
    callbacks ``first`` come before all others.
    """

    def __init__(
        self,
        name: str,
        checked: bool,
        others: Sequence[str],
        first: Sequence[Callback],
        *arguments: Any,
        **options: Any,
    ) -> None:
        self._name, self._checked, self._others, self._first = name, checked, others, first
        super().__init__(*arguments, **options)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the command that runs; parsers for the other ones would take most of the time to start."""
        return {self._name: super().subcommands()[self._name]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(train.LastCheckpoint, "last")
        averages = "decay of lieattn.train.AveragedWeights, which fit validates and saves; null for no averages"
        parser.add_argument("--ema", type=float | None, default=None, help=averages)
        source = "trained network, file of lieattn.save or checkpoint with the weights that fit starts from"
        parser.add_argument("--weights", type=str | None, default=None, help=source)
        again = "fit stores only the fields between the blocks, and recomputes the rest in the backward pass"
        parser.add_argument("--checkpoint_activations", type=bool, default=False, help=again)
        compiled = "fit compiles the network with torch.compile, which takes a minute and makes steps on GPUs faster"
        parser.add_argument("--compile", type=bool, default=False, help=compiled)
        graphs = "fit replays training steps on a GPU as CUDA graphs, for clouds of one geometry, such as images"
        parser.add_argument("--cuda_graphs", type=bool, default=False, help=graphs)
        named = "packages whose classes a checkpoint may use, besides this library and torch"
        parser.add_argument("--trust", nargs="+", type=package, default=[], help=named)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        names = [word[:2] if word.startswith("-c") else word.partition("=")[0] for word in args]  # -cFILE
        first = next((name for name in names if name in _GIVE_MODEL or name.startswith("--model.")), "--model")
        if first not in _GIVE_MODEL:
            raise train.UsageError(f"{first}: expected after --config FILE or --model CLASS, whose settings it changes")
        self._of_fit = [name for name in _OF_FIT if f"--{name}" in names]
        for path in option(args, "--config", "-c", action="append", default=[])[0]:
            if Path(path).is_file():  # an error then names the file
                content = train.read_yaml(path, "a configuration")
                check_classes(content, path)
                for section in _SECTIONS:
                    value = content.get(section, {})
                    if isinstance(value, str) and (file := Path(path).parent / value).is_file():
                        train.read_yaml(file, f"the settings of {section!r} by name")
                    elif not isinstance(value, dict):
                        named = "settings by name, or a file with them"
                        raise train.UsageError(f"{path}: {section}: expected {named}, got {value!r}")
        self.config = plain(parser.parse_args(args))

    def _parse_ckpt_path(self) -> None:
        """Do nothing; Lightning would change the configuration according to the checkpoint."""

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            raise train.UsageError(f"seed_everything: {error}") from error

    def before_instantiate_classes(self) -> None:
        """Turn the checkpoint ``last`` or ``best`` into a file, and keep the resolved configuration."""
        settings = self.config[self.subcommand]
        named = settings.ckpt_path
        if self._of_fit and self.subcommand != "fit":  # in a file, they are those of its training
            found = f"{self.subcommand}, which uses the network and the weights of --ckpt_path"
            raise train.UsageError(f"{self._of_fit[0]}: expected none for {found}")
        if named is None and self.subcommand != "fit":
            raise train.CheckpointError(f"{self.subcommand} needs trained weights: use --ckpt_path best, last, or FILE")
        settings.ckpt_path = None if named is None else self._file(settings, named)
        self._checkpoint = None if settings.ckpt_path is None else train.read_checkpoint(settings.ckpt_path)
        dumped = yaml.safe_load(self._parser(self.subcommand).dump(settings))
        check_built(dumped)
        # There is no model if the checkpoint describes its task.
        self._resolved = {key: dumped[key] for key in ("model", "data") if key in dumped}
        if self._checked:  # a second check, because files named in the configuration have been read by now
            source = f"the command line, or a file that {settings.ckpt_path} refers to,"
            train.check_trusted(self._resolved, source, settings.trust)
        if self.subcommand == "fit":
            run = {key: value for key, value in dumped.items() if key not in _OF_ONE_CALL}
            if self._checked:
                train.check_trusted(run, source, (*settings.trust, *RUN_CLASSES))
            self._resolved["run"] = run
        self._path = str(settings.ckpt_path)
        paths = [self._file(settings, name) for name in self._others]
        if len({Path(path).resolve() for path in (self._path, *paths)}) <= len(paths):
            raise train.UsageError(f"--ckpt_path: expected different files, got {self._path} {' '.join(paths)}")
        self._members = load_members(paths, settings.trust)
        if self._members:
            settings.ckpt_path = None  # otherwise Lightning would load the weights of one checkpoint into all members

    def _file(self, settings: Any, name: str) -> str:
        """The file of a checkpoint; the name may be ``last`` or ``best``."""
        if name not in _NAMED:
            return name
        path = _folder(settings) / f"{name}.ckpt"
        if not path.is_file():
            hint = "start without --ckpt_path" if self.subcommand == "fit" else "train first, or name a file"
            if (path.parent / "last.ckpt").is_file():  # of a run without a validation
                hint = "use --ckpt_path last, since no validation chose a best one"
            raise train.CheckpointError(f"there is no checkpoint {path}: {hint}")
        return str(path)

    def instantiate_classes(self) -> None:
        """Build all objects; UsageError is raised if an argument does not fit."""
        try:
            super().instantiate_classes()
        except (TypeError, ValueError) as error:
            raise train.UsageError(train.short_message(error)) from error

    def _change_steps(self, options: Any) -> None:
        """Recompute activations, compile the network or capture its steps, as the options say."""
        network = self.model.network
        if options.compile and options.cuda_graphs:
            raise train.UsageError("compile, cuda_graphs: expected one of them, got both")
        if options.checkpoint_activations:
            networks = [module for module in network.modules() if isinstance(module, Network)]
            if not networks:
                name = type(network).__name__
                raise train.UsageError(f"checkpoint_activations: expected a lieattn.models.Network, got {name}")
            for part in networks:
                part.checkpoint_activations()
        if options.compile:
            self._check_compiler()
            _say_what_is_not_compiled(network)
            network.compile()
        if options.cuda_graphs:
            self.model.capture()

    def _check_compiler(self) -> None:
        """Raise UsageError if torch.compile would fail in the first step."""
        for part in self.model.network.modules():
            if isinstance(part, LieTransformer) and part.lifting.piece:
                advice = "use piece=None, which accepts the same weights"
                raise train.UsageError(f"compile: Lifting(piece={part.lifting.piece}) cannot be compiled; {advice}")
        compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # those of torch
        on_cpu = self.trainer.strategy.root_device.type == "cpu"
        if on_cpu and sys.platform != "win32" and shutil.which(compiler) is None:
            advice = "install it, name another one in the environment variable CXX, or train without compile"
            raise train.UsageError(f"compile: torch.compile needs the C++ compiler {compiler}, found none; {advice}")

    def after_instantiate_classes(self) -> None:
        if self.subcommand == "fit":
            self._start_from(self.config_init[self.subcommand].weights, self.config_init[self.subcommand].trust)
        if self._checkpoint is not None:
            train.load_weights(self.model, self._checkpoint, "the model of the configuration")
            self._checkpoint = None
        if self._members:
            check_alike({self._path: self.model, **self._members})
            if self.subcommand != "predict":
                self.model.network = mean_network(self.model, list(self._members.values()))
        if self.subcommand == "fit":
            self._change_steps(self.config_init[self.subcommand])
        if self.subcommand == "validate" and self.datamodule.sets["val"] is None:
            raise train.UsageError("data.val: expected a data set to validate on, got none")
        limit = f"limit_{self._name.removesuffix('idate')}_batches"
        if self.subcommand != "fit" and getattr(self.trainer, limit) == 0:
            raise train.UsageError(f"trainer.{limit}: expected at least one batch, got 0")
        self.model.config = self._resolved if "model" in self._resolved else {}

    def _start_from(self, source: str | None, trust: Sequence[str]) -> None:
        """Copy the weights of a trained network by name, a file of ``lieattn.save`` or a checkpoint, into a new run."""
        if source is None:
            return
        if self._checkpoint is not None:
            say(f"{source} is not read: training continues from the weights of the checkpoint")
            return
        try:
            # Without a suffix it may be a misspelled name, and the error of `load` lists the names.
            saved = is_network(source) or not Path(source).suffix
            network = load(source, trust) if saved else train.load_network(source, trust)
            new = transfer_weights(self.model.network, network)
        except (OSError, ValueError) as error:
            reason = f"{source}: {error.strerror}" if isinstance(error, OSError) and error.strerror else error
            raise train.UsageError(f"weights: {reason}") from error
        say(f"training starts from the weights of {source}; new weights: {', '.join(new) or 'none'}")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self.config_init[self.subcommand]
        root = settings.trainer.default_root_dir
        check_trainer(settings.trainer)
        kwargs["accelerator"] = usable_accelerator(settings.trainer.accelerator)
        if kwargs["accelerator"] != settings.trainer.accelerator:  # Lightning would recommend the GPU
            warnings.filterwarnings("ignore", ".*GPU available but not used")
        logger = settings.trainer.logger
        bare = settings.trainer.barebones
        if not bare and (logger is None or logger is True):
            # Both loggers have the same version, which is counted by the folder of TensorBoard.
            board = TensorBoardLogger(root, name="tensorboard", default_hp_metric=False)
            kwargs["logger"] = [CSVLogger(root, name="csv"), board]
        saves = settings.trainer.enable_checkpointing is not False and not (bare or settings.trainer.fast_dev_run)
        given = settings.trainer.callbacks or []
        callbacks: list[Callback] = list(given) if isinstance(given, list) else [given]
        if self.subcommand == "fit" and settings.ema is not None:
            try:
                callbacks.append(train.AveragedWeights(settings.ema))
            except ValueError as error:
                raise train.UsageError(f"ema: {error}") from error
            kwargs["callbacks"] = callbacks
        if self.subcommand == "fit" and saves:
            if settings.data.sets["val"] is not None and not any(isinstance(c, ModelCheckpoint) for c in callbacks):
                monitor, mode = self.model.monitor
                # A run of less than an epoch has no validation yet.
                missing = rf".*ModelCheckpoint\(monitor={re.escape(repr(monitor))}\)` could not find the monitored key"
                warnings.filterwarnings("ignore", missing)
                options = {"monitor": monitor, "mode": mode, "enable_version_counter": False}
                callbacks.append(ModelCheckpoint(_folder(settings), "best", **options))
            kwargs["callbacks"] = [*callbacks, settings.last]
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (ImportError, ValueError) as error:
            raise train.UsageError(f"trainer: {error}") from error
        trainer.callbacks[:0] = self._first  # type: ignore[attr-defined]
        return trainer

    def before_fit(self) -> None:
        """Say that checkpoints of an earlier run in the same folder will be replaced, unless that run continues."""
        settings = self.config_init["fit"]
        folder = _folder(settings)
        saves = settings.last in self.trainer.callbacks  # type: ignore[attr-defined]
        continues = settings.ckpt_path is not None and Path(settings.ckpt_path).resolve().parent == folder.resolve()
        if saves and not continues and any((folder / f"{name}.ckpt").is_file() for name in _NAMED):
            say(f"{folder}: checkpoints of an earlier run will be replaced; to continue that run: --ckpt_path last")
            self.trainer.callbacks.append(EarlierBest(folder / "best.ckpt"))  # type: ignore[attr-defined]

    def predict(self, **kwargs: Any) -> None:
        """Write class scores to ``predictions.csv`` in the root folder, other targets to ``predictions_NAME.csv``.

        No file is replaced. A ``fast_dev_run`` writes no files.
        """
        if self.trainer.world_size > 1:
            found = self.trainer.world_size
            raise train.UsageError(f"trainer.devices: expected 1, since one process writes the table, got {found}")
        root = Path(self.trainer.default_root_dir)
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            try:
                output_file(str(root / "predictions.csv"))
            except argparse.ArgumentTypeError as error:
                raise train.UsageError(f"trainer.default_root_dir: {error}") from error
        sets = self.datamodule.sets
        data = sets["test"] if sets["predict"] is None else sets["predict"]
        if isinstance(data, Sized) and not len(data):  # loggers make folders when predicting begins
            raise train.UsageError("data.predict: expected at least one item, got an empty data set")
        kwargs["return_predictions"] = True
        self.trainer.callbacks.append(counts := PointCounts())  # type: ignore[attr-defined]
        if self._members:
            kwargs["model"] = EnsemblePredictions([self.model, *self._members.values()])
        batches = list[Any](self.trainer.predict(**kwargs) or [])
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        means, deviations = zip(*batches, strict=True) if self._members else (batches, [])
        tables = prediction_tables(means, deviations, counts.batches, data, getattr(self.model, "per", None))
        for path, rows in write_tables(root, tables):
            say(f"predictions, {rows} rows: {path}")


def _folder(settings: Any) -> Path:
    """Folder of the checkpoints."""
    return Path(settings.last.dirpath or Path(settings.trainer.default_root_dir) / "checkpoints")


def _no_advertisement(record: logging.LogRecord) -> bool:
    return "Tip:" not in record.getMessage()


def _status(status: int) -> int:
    """Exit status of this process after all processes have stopped; only the first one reports an error.

    As soon as another process ends with an error, Lightning kills the first one, which may still be writing.
    """
    return 0 if getattr(rank_zero_only, "rank", 0) else status


def _say_what_is_not_compiled(network: torch.nn.Module) -> None:
    for kind in (EnergyForces, HamiltonianDynamics):
        if any(isinstance(module, kind) for module in network.modules()):
            reason = "losses on forces need two derivatives, and torch differentiates compiled functions only once"
            say(f"compile: {kind.__name__} runs uncompiled, including its network, because {reason}")
