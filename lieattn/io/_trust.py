"""The classes that a file may name."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from lieattn.io._files import CheckpointError

_OURS = ("geometry", "groups", "models", "nn", "reps", "spaces", "train", "transforms")
_TRUSTED = (
    *(f"lieattn.{part}" for part in _OURS),
    "lieattn_datasets",
    "torch.nn",
    "torch.optim",
    "torch._C._nn",  # defines some functions of torch.nn
    "torch_geometric.transforms",
)
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_PLAIN = (str, Path, NoneType)  # annotations of arguments that no class or function is imported for


def check_trusted(config: Any, path: str | Path, trust: Iterable[str]) -> None:
    """Raise CheckpointError if the content of a file names classes or functions of packages that are not trusted."""
    for name in untrusted_names(config, trust):
        package = name.partition(".")[0]
        raise CheckpointError(
            f"{path} names {name}, which would be imported and called. If the code is yours or you trust it: "
            f"--trust {package}, in Python trust=[{package!r}]"
        )


def untrusted_names(config: Any, packages: Iterable[str] = ()) -> Iterator[str]:
    """Yield the import paths in a configuration that lead to objects of packages that are not trusted.

    Trusted packages are this library, parts of torch and PyTorch Geometric, and the ``packages``. All strings that can
    be the import path of a class or function are tested. An object belongs to the package that defines it, whatever its
    path is: ``lieattn.train.os.system`` does not belong to this library. Packages that are not trusted are not
    imported. Arguments of trusted classes that are annotated as texts or files, such as ``mols.csv``, are not tested.
    """
    trusted = (*_TRUSTED, *packages)
    for name in _texts(config, trusted):
        if _IMPORT_PATH.fullmatch(name) and _can_be_imported(name) and not _is_within(name, trusted):
            yield name


def _texts(config: Any, trusted: tuple[str, ...]) -> Iterator[str]:
    if isinstance(config, Mapping):
        plain = _plain_arguments(config.get("class_path"), trusted)
        for key, value in config.items():
            if key == "init_args" and isinstance(value, Mapping):
                value = {name: None if name in plain and isinstance(one, str) else one for name, one in value.items()}
            yield from _texts((key, value), trusted)
    elif isinstance(config, list | tuple):
        for item in config:
            yield from _texts(item, trusted)
    elif isinstance(config, str):
        yield config


def _plain_arguments(name: Any, trusted: tuple[str, ...]) -> set[str]:
    """Return the arguments of a trusted class that are annotated as texts or files, and as nothing else."""
    if not (isinstance(name, str) and _IMPORT_PATH.fullmatch(name) and _is_within(name, trusted)):
        return set()
    try:
        hints = get_type_hints(pkgutil.resolve_name(name).__init__)
    except (ImportError, AttributeError, NameError, TypeError):
        return set()
    parts = {key: get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint] for key, hint in hints.items()}
    return {key for key, kinds in parts.items() if all(part in _PLAIN for part in kinds)}


def _can_be_imported(name: str) -> bool:
    package = name.partition(".")[0]
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _is_within(name: str, packages: tuple[str, ...]) -> bool:
    if not _starts(name, packages):
        return False
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return True  # there is nothing to call, and constructing the object raises an error
    return _starts(getattr(found, "__module__", None) or "", packages)


def _starts(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)
