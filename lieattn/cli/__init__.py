"""The command ``lieattn``: one table of subcommands, their common options, one message for an error."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import signal
import sys
import sysconfig
import tempfile
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["COMMANDS", "Command", "main"]

_OURS = (f"{os.sep}lieattn{os.sep}", f"{os.sep}lieattn_datasets{os.sep}")
_LIGHTNING = f"{os.sep}lightning{os.sep}"
_TRAIN_PACKAGES = ("lightning", "jsonargparse", "tensorboard")
_SECTIONS = {  # of the settings of a training, whose class is fixed
    "data": "lieattn.train.PointSetData",
    "trainer": "lightning.pytorch.Trainer",
    "last": "lieattn.train.LastCheckpoint",
}
CATALOG = {"models": ("lieattn.models", "lieattn.models.irreps"), "datasets": ("lieattn_datasets",)}
"""The packages with models and data sets."""

_NO_NETWORK = "expected a network: the name of a trained one such as digits-c8, a checkpoint, or package.module:name"
NO_MODEL = "no model was given: use --config FILE, or --ckpt_path with a checkpoint of lieattn fit"


@dataclass(frozen=True)
class Command:
    """A subcommand: its line in the help, the module with its ``run(name, arguments)``, and the packages it needs.

    ``alone`` is its answer to no arguments, without the imports, if it needs some.
    """

    help: str
    module: str
    packages: tuple[str, ...] = _TRAIN_PACKAGES
    alone: str = ""


COMMANDS = {
    "fit": Command("train a network", "lieattn.cli._training", alone=NO_MODEL),
    "validate": Command(
        "loss and accuracy of a checkpoint on the validation set", "lieattn.cli._training", alone=NO_MODEL
    ),
    "test": Command("loss and accuracy of a checkpoint on the test set", "lieattn.cli._training", alone=NO_MODEL),
    "predict": Command("write a checkpoint's predictions to a table", "lieattn.cli._training", alone=NO_MODEL),
    "certify": Command(
        "measure how equivariant a network is, and find what breaks it", "lieattn.cli._certify", alone=_NO_NETWORK
    ),
    "picture": Command(
        "draw a network, its training, or figures of the papers",
        "lieattn.cli._picture",
        alone=f"{_NO_NETWORK}; or the folder of a run",
    ),
    "compare": Command(
        "train several models under one budget and compare them",
        "lieattn.cli._compare",
        alone="no settings were given: use --config FILE",
    ),
    "bench": Command("measure speed and memory on this machine", "lieattn.cli._machine", ()),
    "models": Command("list the models, their data and their guarantees", "lieattn.cli._catalog", ()),
    "datasets": Command("list the data sets and what they need", "lieattn.cli._catalog", ()),
    "warm-up": Command("compile the kernels for CPUs in advance", "lieattn.cli._machine", ()),
    "info": Command("show versions, and the backend that evaluates each operation", "lieattn.cli._machine", ()),
}


_TRAINING = """usage: lieattn {name} [--config FILE] [--SECTION.OPTION VALUE ...]

{what}. Settings are given in YAML files or on the command line, where dots
separate sections; later settings override earlier ones. examples/configs has a file for each kind of data,
examples/papers one for each experiment of the papers.

what is trained
  --model CLASS                    the task, lieattn.train.PointSetClassifier or lieattn.train.PointSetRegressor
  --model.network CLASS            the network, one of `lieattn models`, or your own by its import path
  --model.network.OPTION VALUE     an argument of its class, such as --model.network.channels 32
  --model.optimizer CLASS          the optimizer, such as torch.optim.AdamW with --model.optimizer.lr 0.01
  --model.schedule CLASS           schedule of the learning rate: WarmupCosine, MultiStep or Plateau of lieattn.train
data
  --data.train CLASS               the training set, one of `lieattn datasets`, or your own: mydata.Clouds of mydata.py
  --data.train.OPTION VALUE        an argument of its class, such as --data.train.root DIR
  --data.val, --data.test, --data.predict    the other data sets, likewise
  --data.batch_size N              clouds per batch (8); also .eval_batch_size, .workers, .seed, .shuffle, .standardize
run
  --trainer.max_epochs N           number of passes over the training set (100)
  --trainer.default_root_dir DIR   folder for logs, checkpoints and predictions (runs)
  --trainer.accelerator NAME       cpu, gpu or auto; also --trainer.devices, .precision, .gradient_clip_val, ...
  --trainer.fast_dev_run true      run one batch of everything as a check; nothing is written
  --ckpt_path last|best|FILE       the checkpoint to load; `fit` continues its run. The others take several checkpoints
                                   and use the mean of the networks; `predict` also writes the standard deviation
  --last.every_n_train_steps N     also save the state within an epoch, every N steps
  --weights NAME|FILE              `fit` starts from the weights of a trained network; a head with other outputs is new
  --ema DECAY                      validate and save moving averages of the weights; 0.999 averages about 1000 steps
  --checkpoint_activations true    recompute activations in the backward pass, which saves memory and takes more time
  --compile true                   compile the network with torch.compile; faster on GPUs, and for forces on CPUs too
  --cuda_graphs true               replay training steps on a GPU, for clouds that all have one geometry, such as images
  --seed_everything N              seed of weights, order and transforms (0)
  --trust PACKAGE ...              packages whose classes a checkpoint may use, besides this library and torch
  -c FILE, --config FILE           settings; without it, those of the checkpoint (of the run itself only for `fit`)
  --print_config                   print all settings with their defaults as YAML, and exit

the arguments of a class, and all options of training (hundreds of lines):
  lieattn {name} --model.help lieattn.train.PointSetClassifier
  lieattn {name} --model PointSetClassifier --model.network.help lieattn.models.GSANet
  lieattn {name} --data.train.help lieattn_datasets.Digits
  lieattn {name} --help-all"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``lieattn SUBCOMMAND ...`` with the given arguments, by default the arguments of the process.

    Return the exit status: 0 for success; 1 for a failure, for example of a certificate, or for an exception in this
    library or in the user's code; 2 for bad usage; 128 + n after signal n. Errors are reported on stderr.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        if not arguments:
            print("lieattn: a subcommand is missing", file=sys.stderr)
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"lieattn {importlib.metadata.version('lieattn')}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"lieattn: unknown subcommand {name!r}, expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    missing = [package for package in COMMANDS[name].packages if importlib.util.find_spec(package) is None]
    if missing:
        print(f'lieattn {name} needs {", ".join(missing)}: pip install "lieattn[train]"', file=sys.stderr)
        return 2
    sys.path.append(folder := os.getcwd())  # class paths may name its modules; it is searched after all packages
    try:
        return _run(name, rest)
    except (KeyboardInterrupt, SystemExit) as stop:
        # Lightning turns an interrupt into an exit with status 1.
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, KeyboardInterrupt):  # after --help
            return stop.code if isinstance(stop.code, int) else 1
        sys.stdout.flush()
        sys.stderr.write(f"lieattn {name}: interrupted\n")
        return 128 + signal.SIGINT
    finally:
        del sys.path[-1 - sys.path[::-1].index(folder)]  # the last entry, since the folder may have been there before


def _run(name: str, arguments: Sequence[str]) -> int:
    """Run a subcommand, and report its errors."""
    asks_for_help = not {"-h", "--help"}.isdisjoint(arguments)
    if asks_for_help and COMMANDS[name].module == "lieattn.cli._training":  # without an import of torch
        print(_TRAINING.format(name=name, what=COMMANDS[name].help.capitalize()))
        return 0
    if not arguments and COMMANDS[name].alone:
        return report(name, argparse.ArgumentError(None, COMMANDS[name].alone))
    if isinstance(sys.stdout, io.TextIOWrapper):  # files and pipes may lack mathematical symbols
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if COMMANDS[name].packages and not asks_for_help:
            arguments = _with_full_names(name, arguments)
            import_catalog()
        command = importlib.import_module(COMMANDS[name].module)
        if "torch" in sys.modules:
            from lieattn._core.machine import keep_freed_memory

            keep_freed_memory()
        status: int = command.run(name, arguments)
    except Exception as error:
        return report(name, error)
    return status


def _with_full_names(command: str, arguments: Sequence[str]) -> list[str]:
    """Replace short names of classes by full ones; ArgumentError is raised if one, or an argument, is misspelled.

    It takes less time than the imports that follow. What it cannot read is left to them.
    """
    from lieattn._core.names import full_names

    words, tree, places = list(arguments), _read_settings(arguments), list[tuple[list[str], int, str]]()
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        path = [part for part in name.removeprefix("--").split(".") if part not in ("init_args", "class_path")]
        if name.startswith("--") and path[0] in ("model", *_SECTIONS) and path[-1] != "help":
            places.append((path, index if equals else index + 1, f"{name}=" if equals else ""))
            _put(tree, path, value if equals else "".join(words[index + 1 : index + 2]))
    try:
        if COMMANDS[command].module == "lieattn.cli._training":
            tree |= {key: {"class_path": kind, "init_args": tree.get(key)} for key, kind in _SECTIONS.items()}
            tree["model"] = full_names(tree.get("model"), "model", "Task")
        tree = full_names(tree)
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from error
    for path, index, prefix in places:
        found: Any = tree
        for key in path:
            found = (found.get("init_args") or found).get(key) if isinstance(found, dict) else None
        full = found.get("class_path") if isinstance(found, dict) else found
        if isinstance(full, str) and full.endswith(f".{words[index].removeprefix(prefix)}"):
            words[index] = prefix + full
    return words


def _read_settings(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the settings of all YAML files among the arguments, whose later sections replace earlier ones."""
    import yaml

    tree = dict[str, Any]()
    for file in (Path(word.rpartition("=")[2]) for word in arguments if word.endswith((".yaml", ".yml"))):
        content = None
        with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):  # they are reported when it is read again
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        for key, section in content.items() if isinstance(content, dict) else ():
            both = isinstance(section, dict) and isinstance(tree.get(key), dict) and "class_path" not in section
            tree[key] = {**tree[key], **section} if both else section
    return tree


def _put(tree: dict[str, Any], path: Sequence[str], value: str) -> None:
    """Set a value of a tree of settings, in the arguments of a class where there is one."""
    for key in path[:-1]:
        inner = tree.get(key)
        tree[key] = inner = (
            {"class_path": inner} if isinstance(inner, str) else inner if isinstance(inner, dict) else {}
        )
        if "class_path" in inner and not isinstance(inner.get("init_args"), dict):
            inner["init_args"] = {}
        tree = inner.get("init_args", inner)
    tree[path[-1]] = value


def import_catalog() -> None:
    """Import the packages with models and data sets, whose classes may be named without their package."""
    for packages in CATALOG.values():
        for name in packages:
            importlib.import_module(name)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}\n" for name, command in COMMANDS.items()]
    more = "lieattn SUBCOMMAND --help lists the options of a subcommand, lieattn --version prints the version."
    return f"usage: lieattn SUBCOMMAND [options]\n\n{''.join(lines)}\n{more}"


@contextmanager
def short_warnings() -> Iterator[None]:
    """Print warnings of the library and of Lightning as one line; others also name a line of the user's code.

    Lightning's advice about intended choices, such as no workers for small data, and its information are not printed.
    """
    from lightning.fabric.utilities.warnings import PossibleUserWarning

    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    before, show, told = warnings.formatwarning, warnings.showwarning, set[str]()

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        theirs = filename != sys.argv[0] and not any(part in filename for part in (*_OURS, _LIGHTNING))
        return before(message, category, filename, lineno, line) if theirs else f"lieattn: warning: {message}\n"

    def shown(message: Warning | str, *place: Any, **options: Any) -> None:
        if str(message) not in told:  # Python forgets what it has shown whenever a filter changes
            told.add(str(message))
            show(message, *place, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")  # its own use of torch
        logger.setLevel(logging.WARNING)
        warnings.formatwarning, warnings.showwarning = formatted, shown
        try:
            yield
        finally:
            warnings.formatwarning = before
            logger.setLevel(level)


def report(command: str, error: Exception) -> int:
    """Print one message about an error, and return the exit status: 2 for errors that the user can correct, else 1.

    With status 1, the message names the line of the user's code, or else of this library, in which the error was
    raised. The traceback is written to a file.
    """
    if isinstance(error, BrokenPipeError):  # for example from `| head`; Python would report it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
    message, status = _usage_message(error), 2
    if message is None:
        frames = traceback.extract_tb(error.__traceback__)
        foreign = ("site-packages", sysconfig.get_path("stdlib"), *_OURS)
        users = [frame for frame in frames if not any(part in frame.filename for part in foreign)]
        ours = [frame for frame in frames if any(part in frame.filename for part in _OURS)]
        place = (users or ours or frames)[-1]
        notes += f"\n  in {place.filename}, line {place.lineno}: {place.line}\n  traceback: {_written_traceback(error)}"
        message, status = f"{type(error).__name__}: {error}", 1
    sys.stdout.flush()
    sys.stderr.write(f"lieattn {command}: {message}{notes}\n")
    return status


def _written_traceback(error: Exception) -> str:
    """Write a traceback to a temporary file, and return its path; the traceback itself if no folder is writable."""
    text = "".join(traceback.format_exception(error))
    options: Any = {"prefix": "lieattn-", "suffix": ".txt", "delete": False}
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="backslashreplace", **options) as file:
            file.write(text)
    except OSError:
        return text.rstrip()
    return file.name


def _usage_message(error: Exception) -> str | None:
    """The message for an error that the user can correct; None for other errors, which need a traceback.

    The user can correct errors about files, and errors that are raised by a ``raise`` statement of this library, or of
    Lightning about its settings. A ValueError that Python raises inside the code of this library is a bug.
    """
    if isinstance(error, argparse.ArgumentError):
        return str(error).strip()
    from lieattn.train import UsageError

    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if _is_raised_in(error, (_LIGHTNING,)):
        return f"trainer: {str(error).strip()}"
    ours = isinstance(error, ValueError | TypeError | NotImplementedError | ImportError) and _is_raised_in(error, _OURS)
    return str(error).strip() if ours or isinstance(error, UsageError) else None


def _is_raised_in(error: Exception, folders: Sequence[str]) -> bool:
    """Whether an error was raised by a ``raise`` statement in one of these folders."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return any(part in last.filename for part in folders) and (last.line or "").startswith("raise ")


class ArgumentParser(argparse.ArgumentParser):
    """A parser that raises ``argparse.ArgumentError``, which is reported without a usage page.

    Options cannot be abbreviated, as in ``lieattn fit``.
    """

    def __init__(self, **options: Any) -> None:
        wide = partial(argparse.HelpFormatter, max_help_position=32, width=110)
        super().__init__(allow_abbrev=False, **{"formatter_class": wide, **options})

    def error(self, message: str) -> NoReturn:
        """Raise ``argparse.ArgumentError``."""
        raise argparse.ArgumentError(None, message)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    return natural(text, least=1)


def natural(text: str, least: int = 0) -> int:
    """Parse an integer from ``least`` to 2^63 - 1, such as a seed."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not least <= value < 2**63:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
    return value


def output_file(text: str) -> Path:
    """Parse a path, and check that a file can be written there before the work begins."""
    path = Path(text)
    folder = next((parent for parent in path.absolute().parents if parent.exists()), path)  # "/" has no parents
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        fault = "it is a folder" if path.is_dir() else f"{folder} is not a writable folder"
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {fault}")
    return path


def package(text: str) -> str:
    """Parse the name of a package."""
    if not all(part.isidentifier() for part in text.split(".")):
        raise argparse.ArgumentTypeError(f"expected the name of a package, got {text!r}")
    return text


def take_settings(arguments: Sequence[str], names: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Split the arguments into settings, such as ``"data.batch_size=16"`` for ``--data.batch_size 16``, and others.

    Settings are the options with a dot, as in ``lieattn fit``, and the options in ``names``.
    """
    settings, others = [], list[str]()
    words = iter(arguments)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or ("." not in name and name not in names):
            others.append(word)
            continue
        if not equals and (value := next(words, "--")).startswith("--"):
            raise argparse.ArgumentError(None, f"argument --{name}: expected one argument")
        settings.append(f"{name}={value}")
    return settings, others
