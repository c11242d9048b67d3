"""Short names of classes in settings, such as ``cyclic`` for ``lieattn.groups.cyclic``."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, get_args

from torch import Tensor

from lieattn._core.checks import annotations_of

_PACKAGES = (
    *("lieattn.models", "lieattn.models.irreps", "lieattn.train", "lieattn.geometry", "lieattn.groups"),
    *("lieattn.spaces", "lieattn.reps", "lieattn_datasets"),
)
_FOREIGN = ("torch.optim", "torch.optim.lr_scheduler", "torch.nn.modules")  # jsonargparse finds names of their classes
_OWNERS = ("lieattn", "lieattn_datasets", "torch", "torch_geometric")  # of classes whose names stand in settings
_NEAR = 0.75  # similarity of a misspelled name


def full_names(value: Any, place: str = "", annotation: Any = None, *, imports: bool = False) -> Any:
    """Return settings in which short names of this library, such as ``cyclic``, are full class paths.

    ValueError, which names the place and the nearest names, is raised for a misspelled class or function, and for an
    argument that its class does not have. Classes of other modules are left to jsonargparse, unless the modules have
    been imported, or ``imports`` says that they may be.
    """

    def inside(parts: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
        named = ((key, part, hints.get(str(key).rstrip("+"))) for key, part in parts.items())
        return {key: full_names(part, f"{place}.{key}".lstrip("."), hint, imports=imports) for key, part, hint in named}

    if isinstance(value, str):
        return _full(value, place) if _names_class(annotation) else value
    if isinstance(value, list):
        return [full_names(part, place, annotation, imports=imports) for part in value]
    if not isinstance(value, Mapping):
        return value
    if not isinstance(name := value.get("class_path"), str):
        return inside(value, dict.fromkeys(map(str, value), annotation))
    path, given = _full(name, place), value.get("init_args")
    if isinstance(given, Mapping):
        if imports:
            with suppress(Exception):  # jsonargparse imports it again, and reports what is wrong
                importlib.import_module(path.rpartition(".")[0])
        known = _arguments(_found(path))
        if known is not None and (wrong := [str(key) for key in given if str(key).rstrip("+") not in known]):
            raise ValueError(f"{place}: {path} has no argument {wrong[0]!r}{_advice(wrong[0], known)}")
        given = inside(given, known or {})
    return {**value, "class_path": path} | ({"init_args": given} if "init_args" in value else {})


def _full(name: str, place: str) -> str:
    """Return the full path of a class; other texts are returned as they are."""
    if not all(map(str.isidentifier, name.split("."))):
        return name
    module, _, last = name.rpartition(".")
    if not module:
        if (names := _public()).get(name) or any(_found(f"{home}.{name}") for home in _FOREIGN):
            return names.get(name, name)
        if near := difflib.get_close_matches(name, names, 3, _NEAR):
            raise ValueError(f"{place}: there is no {name}; is it {' or '.join(names[one] for one in near)}?")
    elif module in _PACKAGES and _found(name) is None:
        raise ValueError(f"{place}: {module} has no {last}{_advice(last, importlib.import_module(module).__all__)}")
    return name


def _advice(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known := sorted(known))
    return f"; is it {' or '.join(near)}?" if near else f"; it has {', '.join(known) or 'none'}"


@cache
def _public() -> dict[str, str]:
    """Return the full path of each public name."""
    return {name: f"{home}.{name}" for home in _PACKAGES for name in importlib.import_module(home).__all__}


def _found(path: str) -> Any:
    """Return the class or function of a path; None if its module has not been imported or does not have it."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module) if module in _PACKAGES else sys.modules.get(module), name, None)


@cache
def _arguments(of: Callable[..., Any] | None) -> dict[str, Any] | None:
    """Return the annotations of the arguments of a class or function; None if they are unknown, or it takes any."""
    try:
        parameters = inspect.signature(of).parameters if of is not None else {}
    except (TypeError, ValueError):  # of what cannot be called, and of classes in C
        return None
    if of is None or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return None
    return dict.fromkeys(parameters) | annotations_of(of)


def _names_class(annotation: Any) -> bool:
    """Return whether texts for an annotation are names of classes: it allows objects, but no texts of its own."""
    parts = _parts(annotation)
    if any(part is str or isinstance(part, str) for part in parts):
        return False
    return any(getattr(part, "__module__", "").split(".")[0] in _OWNERS and part is not Tensor for part in parts)


def _parts(annotation: Any) -> list[Any]:
    """Return the classes, and the values of ``Literal``, of which an annotation consists."""
    inner = annotation if isinstance(annotation, list) else get_args(annotation)
    return [part for one in inner for part in _parts(one)] or [annotation]
