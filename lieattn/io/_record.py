"""Networks as data, which all files of networks keep."""

from __future__ import annotations

import inspect
import itertools
import pkgutil
import sys
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lieattn._core.numerics import KeptTables, first_dtype
from lieattn._core.values import plain_text
from lieattn.io._files import CheckpointError, check_trusted

V = TypeVar("V")
_UNCHECKED = ", or load dict(state_dict) to skip this check"
_NOTED = "_made_with"
_PRETRAINED = "_is_pretrained"  # attribute of parts whose weights are those of a file or of another network
_ORIGINAL = "_orig_mod"  # where a compiled module keeps the original
# Types of plain values in files, and the values that they stand for.
_KINDS: tuple[tuple[Any, Any], ...] = ((str, str), (int, Integral), (float, Real))
_PLAIN = (type(None), np.bool_, *(kinds for _, kinds in _KINDS))
_BYTES = (bytes, bytearray, memoryview)


class Recorded:
    """A module that records the arguments of its constructor, so that files can describe how to construct it.

    TypeError is raised for classes with a mixin of huggingface_hub, whose files could not be loaded.
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        if hub := [base.__name__ for base in cls.__mro__ if base.__module__.partition(".")[0] == "huggingface_hub"]:
            reason = "writes a config.json that cannot describe groups and neighborhoods, so it could not be loaded"
            advice = "leave it out, and upload a file of lieattn.save, which lieattn.load reads"
            raise TypeError(f"{cls.__name__}: {hub[0]} {reason}; {advice}")
        made = super().__new__(cls)
        vars(made)[_NOTED] = (_kept(args), _kept(options))
        return made


@dataclass(frozen=True)
class Record:
    """A network as all files keep it: its weights, what they belong to, and how to construct it.

    Attributes
    ----------
    weights
        Weights by name.
    modules
        By name of a module, its version, and the group and geometry of its weights, see :class:`TiedWeights`.
    described
        Class and arguments, as :func:`describe` returns them; None if they are not known.
    """

    weights: Mapping[str, Tensor]
    modules: Mapping[str, dict[str, Any]]
    described: Any = None

    @classmethod
    def of(cls, state: Mapping[str, Tensor], described: Any = None, prefix: str = "") -> Record:
        """Return the record of those weights of a state dict whose names begin with the prefix, which is removed."""
        metadata = getattr(state, "_metadata", {})
        modules = {name[len(prefix) :]: metadata[name] for name in metadata if f"{name}.".startswith(prefix)}
        weights = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        return cls(weights, modules, described)

    def uncompiled(self) -> Record:
        """Return this record with the names that modules and weights have without compilation."""
        return Record(uncompiled_names(self.weights), uncompiled_names(self.modules), self.described)

    def construct(self, path: str | Path, what: str, trust: Iterable[str] = ()) -> Any:
        """Construct what is described, without its weights.

        CheckpointError is raised if the file at the path names classes that are not trusted, or if ``what`` it
        describes cannot be constructed.
        """
        check_trusted(self.described, path, trust)
        try:
            return make(self.described)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{what} cannot be built: {error}") from error

    def restore(self, module: nn.Module, what: str) -> None:
        """Load the weights into a module, which gets their dtypes; errors as in :meth:`load_into`."""
        module.to(first_dtype(module, self.weights))
        for name, own in itertools.chain(module.named_parameters(), module.named_buffers()):
            if name in self.weights:
                own.data = own.data.to(self.weights[name].dtype)
        self.load_into(module, what)

    def load_into(self, module: nn.Module, what: str, new: Collection[str] = ()) -> None:
        """Load the weights into a module; CheckpointError says why they do not fit ``what`` it is.

        Parts that get trained weights are marked for :func:`is_pretrained`. Weights named in ``new`` are untrained.
        """
        weights, modules = OrderedDict(self.weights), self.modules
        if not weights.keys() <= module.state_dict().keys():  # perhaps of a network that was compiled in training
            weights, modules = OrderedDict(uncompiled_names(weights)), uncompiled_names(modules)
        vars(weights)["_metadata"] = modules  # load_state_dict reads this attribute
        try:
            module.load_state_dict(weights)
        except (AttributeError, TypeError, RuntimeError) as error:  # damaged metadata, or weights that do not fit
            raise CheckpointError(f"the weights do not fit {what}: {first_fault(error)}") from error
        for name, part in module.named_modules():
            own = [".".join(filter(None, (name, weight))) for weight, _ in part.named_parameters(recurse=False)]
            if own and not any(weight in new for weight in own):
                vars(part)[_PRETRAINED] = True


def is_pretrained(part: nn.Module) -> bool:
    """Return whether the weights of a part, without its own parts, are those of a file or of another network."""
    return bool(vars(part).get(_PRETRAINED))


def _kept(value: Any) -> Any:
    """Return a value whose lists and dictionaries are copies, which the caller cannot change."""
    if type(value) in (list, tuple):
        return type(value)(_kept(entry) for entry in value)
    return {key: _kept(entry) for key, entry in value.items()} if type(value) is dict else value


def uncompiled(value: Any) -> Any:
    """Return the original of a module that ``torch.compile`` returned, and any other value itself."""
    return getattr(value, _ORIGINAL, value) if isinstance(value, nn.Module) else value


def uncompiled_names(entries: Mapping[str, V]) -> dict[str, V]:
    """Return entries whose keys are names of weights or modules, with the names that they have without compilation."""
    return {".".join(part for part in name.split(".") if part != _ORIGINAL): entry for name, entry in entries.items()}


def describe(value: Any, without: Sequence[str] = ()) -> Any:
    """Describe a value by nested lists and mappings of plain values and tensors, from which :func:`make` rebuilds it.

    An object is described by its ``class_path`` and ``init_args``. These are the recorded arguments of a module, or the
    attributes of another object that have the names of its arguments. Arguments of the outermost object that are named
    in ``without`` are omitted. ValueError is raised, with the reason, if a value cannot be described.
    """
    value = uncompiled(value)
    if (fields := _fields(value)) is not None:
        return _object(value, fields)
    if isinstance(value, _PLAIN):
        return _plain(value)
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {"mapping": [[describe(key), _entry(key, entry)] for key, entry in value.items()]}
    if isinstance(value, Sequence) and not isinstance(value, _BYTES):
        entries = [describe(entry) for entry in value]
        return {"tuple": entries} if isinstance(value, tuple) else entries
    if isinstance(value, type) or (inspect.isroutine(value) and hasattr(value, "__qualname__")):  # partial has none
        return {"name": _import_path(value)}
    arguments = {name: given for name, given in _arguments(value).items() if name not in without}
    head = {"head": value.head} if getattr(value, "_has_other_head", False) else {}
    return _object(value, arguments) | _described(value, head)


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the content of a named tuple or of a member of an enumeration; None for all other values."""
    if isinstance(value, Enum):
        return {"value": value.value}
    return dict(value._asdict()) if isinstance(value, tuple) and hasattr(value, "_asdict") else None


def _plain(value: Any) -> Any:
    """Return a value of Python for one of NumPy, or of a subclass."""
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    return next(kind(value) for kind, kinds in _KINDS if isinstance(value, kinds))


def _object(value: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"class_path": _import_path(type(value)), "init_args": _described(value, arguments)}


def _described(value: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the arguments of a value by name. ValueError names the argument that cannot be described."""
    found = {}
    for name, given in arguments.items():
        try:
            found[name] = describe(given)
        except ValueError as error:
            raise ValueError(f"{type(value).__name__}.{name}: {error}") from error
    return found


def _entry(key: Any, value: Any) -> Any:
    """Describe an entry of a mapping. ValueError names the key of an entry that cannot be described."""
    try:
        return describe(value)
    except ValueError as error:
        raise ValueError(f"[{key!r}]: {error}") from error


def make(described: Any) -> Any:
    """Rebuild a value from the result of :func:`describe`. ValueError is raised if a class is missing.

    Random numbers of the process do not change. Classes are imported and called, so first check whether they can be
    trusted.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return _make(described)


def _make(described: Any) -> Any:
    if isinstance(described, list):
        return [_make(entry) for entry in described]
    if not isinstance(described, dict):
        return described
    if "tuple" in described:
        return tuple(_make(entry) for entry in described["tuple"])
    if "mapping" in described:
        return {_make(key): _make(entry) for key, entry in described["mapping"]}
    if "name" in described:
        return _imported(described["name"])
    cls = _imported(described.get("class_path"))
    if not isinstance(cls, type):
        raise ValueError(f"{described['class_path']} is not a class")
    made = cls(**{name: _make(given) for name, given in described["init_args"].items()})
    return made.with_head(_make(described["head"])) if "head" in described else made


def with_earlier_defaults(described: Any) -> Any:
    """Return a description or configuration of an earlier version with the values of defaults that have changed.

    Before version 0.4, the blocks of a GSANet had the fiber pattern of the paper by default.
    """
    if isinstance(described, list):
        return [with_earlier_defaults(entry) for entry in described]
    if not isinstance(described, dict):
        return described
    found = {key: with_earlier_defaults(entry) for key, entry in described.items()}
    path, given = str(found.get("class_path")), found.get("init_args") or {}
    if path.startswith("lieattn.models.") and path.endswith(".GSANet"):
        options = given.get("options") or {}
        inner = options.get("init_args") or {} if "class_path" in options else options
        named = {"class_path": "lieattn.models.GSAOptions", "init_args": {"pattern": "query_sum", **inner}}
        found["init_args"] = {**given, "options": named}
    return found


def _arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of the constructor by name."""
    noted, signature = getattr(value, _NOTED, None), _signature(value)
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
        part = "a part of a network, such as a head, is constructed by a class of your own derived from FieldModel"
        advice = f"derive its class from lieattn.models.Network; {part}; or save its state_dict with torch.save"
        raise ValueError(f"{type(value).__name__} does not record the arguments of its constructor: {advice}")
    for name, parameter in signature.parameters.items():
        several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if several or (not hasattr(value, name) and parameter.default is parameter.empty):
            raise ValueError(f"{type(value).__name__} does not keep its argument {name!r} as an attribute")
    return {name: getattr(value, name) for name in signature.parameters if hasattr(value, name)}


def _signature(value: Any) -> inspect.Signature:
    """Return the signature of the constructor; ValueError for classes written in C, which do not keep arguments."""
    cls = type(value)
    written_in_c = not hasattr(value, "__dict__") or inspect.isbuiltin(vars(cls).get("__new__"))
    with suppress(ValueError):
        if not written_in_c or inspect.isfunction(cls.__init__):
            return inspect.signature(cls)
    found = f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
    raise ValueError(f"expected plain values, tensors, or objects that keep their arguments, got {found}")


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


class TiedWeights(KeptTables):
    """A module whose state dicts contain, as metadata, the group and geometry that the weights belong to.

    If the module has another group or geometry, ``load_state_dict`` raises RuntimeError with the difference. To skip
    this check, pass ``dict(state_dict)``, which has no metadata.
    """

    earlier: ClassVar[Mapping[str, str]] = {}
    """Values of properties that weights of earlier versions do not name."""

    def tied_to(self) -> dict[str, str]:
        """Return the properties that the weights depend on besides their shapes, as texts by name: the finite group."""
        return tied_to_group(getattr(self, "group", None))

    def decide(self, tied_to: Mapping[str, str]) -> None:
        """Take over from weights a choice that was left open at construction. This base class has none."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["geometry"] = _plain_texts(self.tied_to())

    def _load_from_state_dict(  # type: ignore[no-untyped-def]
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if saved := _plain_texts(local_metadata.get("geometry", {})):
            saved = {**self.earlier, **saved}
        self.decide(saved)
        for name, own in _plain_texts(self.tied_to()).items():
            fault = f"{name}: the weights are for {saved.get(name, own)}, the module has {own}"
            # The network has already reported this difference, so its layers do not repeat it.
            if saved.get(name, own) != own and not any(fault in message for message in error_msgs):
                advice = _UNCHECKED if self._fits(state_dict, prefix) else ""
                error_msgs.append(f"{prefix}{fault}; build the module with the {name} of the weights{advice}.")

    def _fits(self, weights: Mapping[str, Any], prefix: str) -> bool:
        """Return whether weights have all names and shapes of the module, so that they load without the check."""
        shapes = {name: getattr(value, "shape", None) for name, value in self.state_dict(prefix=prefix).items()}
        found = {name: getattr(value, "shape", None) for name, value in weights.items() if name.startswith(prefix)}
        return found == shapes


def _plain_texts(tied_to: Mapping[str, str]) -> dict[str, str]:
    # The sign of a zero depends on the processor.
    return {name: plain_text(text).replace("-0.000000", "0.000000") for name, text in tied_to.items()}


def first_fault(error: Exception) -> str:
    """Return the first reason why ``load_state_dict`` refused weights, and the number of further ones.

    The advice to skip the check is left out, since the user who reads the reason has not called ``load_state_dict``.
    """
    first, *others = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
    return first.replace(_UNCHECKED, "") + (f" (and {len(others)} more)" if others else "")


def settle(module: nn.Module) -> None:
    """Fix all choices that a module and its parts have left open to their current values."""
    for part in module.modules():
        if isinstance(part, TiedWeights):
            part.decide(part.tied_to())


def tied_to_group(group: Any) -> dict[str, str]:
    """Return digests of the table and the matrices of a finite group; an empty dictionary for anything else."""
    if not hasattr(group, "cayley"):
        return {}
    table = zlib.crc32(group.cayley.numpy().tobytes())
    rounded = zlib.crc32((group.elements * 1e6).round().to(torch.int64).numpy().tobytes())
    return {
        "group": f"{group!r} with the table {table:08x}",
        "axes": f"matrices {rounded:08x} of {group.name}",
    }
