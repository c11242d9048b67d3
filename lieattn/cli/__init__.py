"""The command ``lieattn``: one table of subcommands, each imported when it is called."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["COMMANDS", "Command", "main"]

_TRAIN_PACKAGES = ("lightning", "jsonargparse", "tensorboard")


@dataclass(frozen=True)
class Command:
    """A subcommand: its line in the help, the module with its ``run(name, arguments)``, and the packages it needs."""

    help: str
    module: str
    packages: tuple[str, ...] = _TRAIN_PACKAGES


COMMANDS = {
    "fit": Command("train a network", "lieattn.cli._fit"),
    "validate": Command("loss and accuracy of a checkpoint on the validation set", "lieattn.cli._fit"),
    "test": Command("loss and accuracy of a checkpoint on the test set", "lieattn.cli._fit"),
    "predict": Command("write a checkpoint's predictions to a table", "lieattn.cli._fit"),
    "certify": Command("measure how equivariant a network is, and find what breaks it", "lieattn.cli._certify"),
    "picture": Command("draw the network of a checkpoint, or figures of the papers", "lieattn.cli._picture"),
    "compare": Command("train several models under one budget and compare them", "lieattn.cli._compare"),
    "bench": Command("measure speed and memory on this machine", "lieattn.cli._bench", ()),
    "models": Command("list the models, their data and their guarantees", "lieattn.cli._catalog", ()),
    "datasets": Command("list the data sets and what they need", "lieattn.cli._catalog", ()),
    "warm-up": Command("compile the kernels for CPUs in advance", "lieattn.cli._warm_up", ()),
    "info": Command("show versions, and the backend that evaluates each operation", "lieattn.cli._info", ()),
}


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
    from lieattn._core.memory import keep_freed_memory
    from lieattn.cli._options import asks_for_help, import_catalog, importable_folder, printable_output, report

    keep_freed_memory()
    try:
        with importable_folder(), printable_output():
            if COMMANDS[name].packages and not asks_for_help(rest):  # their configurations name classes
                import_catalog()
            status: int = importlib.import_module(COMMANDS[name].module).run(name, rest)
    except (KeyboardInterrupt, SystemExit) as stop:
        # Lightning turns an interrupt into an exit with status 1.
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, KeyboardInterrupt):  # after --help
            return stop.code if isinstance(stop.code, int) else 1
        sys.stdout.flush()
        sys.stderr.write(f"lieattn {name}: interrupted\n")
        return 128 + signal.SIGINT
    except Exception as error:
        return report(name, error)
    return status


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}\n" for name, command in COMMANDS.items()]
    more = "lieattn SUBCOMMAND --help lists the options of a subcommand, lieattn --version prints the version."
    return f"usage: lieattn SUBCOMMAND [options]\n\n{''.join(lines)}\n{more}"
