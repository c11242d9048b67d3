"""Files without surprises: complete or absent, of trusted classes."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


class UsageError(ValueError):
    """Settings that are incomplete or contradict each other; reported in one line, without a traceback."""


class CheckpointError(UsageError):
    """A file of a network or a training that cannot be read, or does not belong to the network."""


def check_format(name: str | Path, number: int, newest: int) -> None:
    """Raise CheckpointError if a file has a newer format than this version of the library knows."""
    if number > newest:
        raise CheckpointError(
            f"{name} has format {number}, but this version reads formats up to {newest}: pip install --upgrade lieattn"
        )


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces ``path`` if the block ends without an error.

    The temporary file is in the folder of ``path``, which is created if it is missing. In the same folder, replacement
    is a single step, so a process that is killed leaves either the old or the new file. It may also leave the temporary
    file, which always has the same name and is replaced by the next call. If ``path`` is a symbolic link, the file that
    it leads to is replaced. OSError names ``path``. ValueError is raised for null characters in it.
    """
    path = Path(path)
    if "\0" in str(path):
        raise ValueError(f"path: expected a path without null characters, got {str(path)!r}")
    if not path.name:  # "." and "/"
        raise IsADirectoryError(errno.EISDIR, f"cannot write: {os.strerror(errno.EISDIR)}", str(path))
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror or error}", str(path)) from error
    finally:
        with suppress(OSError):  # such as on a disk that is read-only, where even a missing file cannot be removed
            part.unlink(missing_ok=True)


def replace_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8 with :func:`replacing`."""
    with replacing(path) as part:
        part.write_bytes(text.encode())


def digest(value: Any) -> str:
    """Return the SHA-256 of nested mappings, sequences, tensors and plain values.

    Of any other object, only the type is included. Of a tensor whose elements share memory, only dtype and shape are
    included, unless it was created by ``expand``.
    """
    found = hashlib.sha256()
    _feed(value, found.update)
    return found.hexdigest()


def digest_of_json(content: Any) -> str:
    """Return the SHA-256 of a value as JSON with sorted keys; other objects than plain ones are taken as texts."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _feed(value: Any, add: Callable[[Any], None]) -> None:
    """Add bytes that differ for different values, because each part begins with its kind and its length."""
    if type(value) in _PLAIN:
        text = repr(value)
        add(f"{type(value).__name__} {len(text)}:{text}".encode())
    elif type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        add(f"{value.dtype} {list(value.shape)}:".encode())
        for axis, stride in enumerate(value.stride()):  # an expanded axis may have billions of equal entries
            value = value.narrow(axis, 0, min(1, value.shape[axis])) if stride == 0 else value
        if value.nbytes <= value.untyped_storage().nbytes():
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            add(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        add(f"mapping {len(value)}:".encode())
        for pair in value.items():
            _feed(pair, add)
    elif isinstance(value, list | tuple):
        add(f"sequence {len(value)}:".encode())
        for item in value:
            _feed(item, add)
    else:
        add(f"{type(value).__name__} 0:".encode())


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
_TEXTS = (str, Path, NoneType)  # annotations of arguments that no class or function is imported for


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
    return {key for key, kinds in parts.items() if all(part in _TEXTS for part in kinds)}


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
