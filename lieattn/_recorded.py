"""Objects as data: modules record the arguments of their constructors, so that they can be constructed again."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn

_NOTED = "_made_with"


class Recorded:
    """A module that records the arguments of its constructor, so that files can describe how to construct it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            setattr(cls, "__init__", _noting(cls.__init__))  # noqa: B010 - type checkers forbid a plain assignment


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that records its arguments, unless a subclass that calls it has recorded its own."""

    @functools.wraps(init)
    def noting(self: Any, *args: Any, **options: Any) -> None:
        vars(self).setdefault(_NOTED, (args, options))
        init(self, *args, **options)

    return noting


def describe(value: Any, without: Sequence[str] = ()) -> Any:
    """Describe a value by nested lists and mappings of plain values and tensors, from which :func:`make` rebuilds it.

    An object is described by its ``class_path`` and ``init_args``. These are the recorded arguments of a module, or the
    attributes of another object that have the names of its arguments. Arguments of the outermost object that are named
    in ``without`` are omitted. ValueError is raised, with the reason, if a value cannot be described.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {"mapping": [[describe(key), describe(entry)] for key, entry in value.items()]}
    if isinstance(value, Sequence):
        entries = [describe(entry) for entry in value]
        return {"tuple": entries} if isinstance(value, tuple) else entries
    if isinstance(value, type) or inspect.isroutine(value):
        return {"name": _import_path(value)}
    described: dict[str, Any] = {"class_path": _import_path(type(value))}
    described["init_args"] = {name: describe(given) for name, given in _arguments(value).items() if name not in without}
    if vars(value).get("_has_other_head", False):
        described["head"] = describe(value.head)
    return described


def make(described: Any) -> Any:
    """Rebuild a value from the result of :func:`describe`. ValueError is raised if a class is missing.

    Classes are imported and called, so first check whether they can be trusted (:mod:`lieattn._trust`).
    """
    if isinstance(described, list):
        return [make(entry) for entry in described]
    if not isinstance(described, dict):
        return described
    if "tuple" in described:
        return tuple(make(entry) for entry in described["tuple"])
    if "mapping" in described:
        return {make(key): make(entry) for key, entry in described["mapping"]}
    if "name" in described:
        return _imported(described["name"])
    cls = _imported(described.get("class_path"))
    if not isinstance(cls, type):
        raise ValueError(f"{described['class_path']} is not a class")
    made = cls(**{name: make(given) for name, given in described["init_args"].items()})
    return made.with_head(make(described["head"])) if "head" in described else made


def _arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of the constructor by name."""
    signature, noted = inspect.signature(type(value)), vars(value).get(_NOTED)
    if noted is not None:
        found = signature.bind(*noted[0], **noted[1]).arguments
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                found.update(found.pop(parameter.name, {}))
            elif parameter.kind is parameter.VAR_POSITIONAL and parameter.name in found:
                raise ValueError(
                    f"{type(value).__name__} takes arguments without names, *{parameter.name}, which cannot be saved"
                )
        return dict(found)
    if isinstance(value, nn.Module):
        advice = "derive its class from lieattn.models.Network, or save its state_dict with torch.save"
        raise ValueError(f"{type(value).__name__} does not record the arguments of its constructor: {advice}")
    for name, parameter in signature.parameters.items():
        several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if several or (not hasattr(value, name) and parameter.default is parameter.empty):
            raise ValueError(f"{type(value).__name__} does not keep its argument {name!r} as an attribute")
    return {name: getattr(value, name) for name in signature.parameters if hasattr(value, name)}


def _import_path(thing: Any) -> str:
    """Return the shortest import path of a class or function in the package that defines it."""
    parts = (getattr(thing, "__module__", None) or "").split(".")
    for count in range(1, len(parts) + 1):
        home = sys.modules.get(".".join(parts[:count]))
        for name in (thing.__qualname__, thing.__name__):
            if getattr(home, name, None) is thing:
                return f"{'.'.join(parts[:count])}.{name}"
    raise ValueError(f"{thing.__qualname__} is not defined at the top level of a module, so it cannot be imported")


def _imported(path: Any) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"cannot import {path}: {error}") from error
