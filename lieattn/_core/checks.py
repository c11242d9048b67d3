"""Checks of arguments."""

from __future__ import annotations

import inspect
import math
import sys
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
import torch
from jaxtyping import AbstractArray
from torch import Tensor, nn

from lieattn._core.contexts import in_autocast, is_mapped

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest equivariance error allowed, relative to the largest output (or 1, if that is larger)."""

LARGEST = 1e15  # squares are finite in float32, with a margin for sums and weights
_TINY = 1e-9  # entries of orthogonal matrices up to this size count as 0
_SHORT = 60  # largest number of characters of a value in a message
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_LENGTHS = (1e-100, 1e100)  # their squares are neither 0 nor infinite


def axes_of(dim: int) -> str:
    """Return the names of the axes of images (2) and voxels (3), for messages."""
    return "rows, columns" if dim == 2 else "layers, rows, columns"


def kind(value: object) -> str:
    """Return the type of a value in words, and the dtype of a tensor."""
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``"1 cloud"`` and ``"3 clouds"``."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def check_tensor(argument: str, value: object, expected: str, dtype: torch.dtype | None = None) -> None:
    """Raise TypeError unless a value is a tensor of the dtype, or of any floating dtype if it is absent."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() if dtype is None else value.dtype == dtype):
        raise TypeError(f"{argument}: expected {expected}, got {kind(value)}")


def check_last(argument: str, value: object, sizes: tuple[int, ...], of: str) -> None:
    """Raise an error unless a value is a floating tensor whose last axes have these sizes. It can be traced."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"{argument}: expected a floating tensor for {of}, got {kind(value)}")
    if value.shape[-len(sizes) :] != sizes:
        axes = ", ".join(map(str, sizes))
        raise ValueError(f"{argument}: expected [*, {axes}] for {of}, got {tuple(value.shape)}")


def check_broadcast(argument: str, leading: Sequence[int], other: str, others: Sequence[int]) -> None:
    """Raise ValueError unless the leading axes of two tensors broadcast. It can be traced."""
    for one, two in zip(leading[::-1], others[::-1], strict=False):
        if one not in (1, two) and two != 1:
            found = f"{tuple(leading)} and {tuple(others)}"
            raise ValueError(f"{argument}, {other}: expected leading axes that broadcast, got {found}")


def check_alike(argument: str, value: Tensor, other: str, beside: Tensor) -> None:
    """Raise ValueError unless two tensors have one dtype and device. It can be traced."""
    if value.dtype != beside.dtype or value.device != beside.device:
        found = f"{value.dtype} on {value.device} and {beside.dtype} on {beside.device}"
        raise ValueError(f"{argument}, {other}: expected the same dtype and device, got {found}")


def check_has_numbers(argument: str, value: Tensor) -> None:
    """Raise ValueError if a tensor is on the meta device, where tensors have no numbers."""
    if value.device.type == "meta":
        raise ValueError(f"{argument}: expected a tensor with values, got one on the meta device")


def check_device(device: torch.device | str | None) -> None:
    """Raise TypeError or ValueError unless a value is a device or the name of one."""
    if device is not None and not isinstance(device, torch.device | str):
        raise TypeError(f"device: expected a torch.device or its name, got {shown(device)}")
    try:
        torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise ValueError(f"device: expected a torch.device or its name, such as 'cpu', got {device!r}") from error


def check_drawing(
    shape: tuple[int, ...],
    generator: torch.Generator | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> None:
    """Raise an error unless random numbers can be drawn in this shape, with this generator, dtype and device."""
    for size in shape:
        check_count("shape", size, 0)
    if generator is not None:
        check_is("generator", generator, torch.Generator)
    if dtype is not None:
        check_floating("dtype", dtype)
    check_device(device)


def check_count(argument: str, count: int, least: int = 1) -> None:
    """Raise ValueError unless a value is an integer from ``least`` to ``sys.maxsize``."""
    if not isinstance(count, Integral) or isinstance(count, bool) or count < least:
        raise ValueError(f"{argument}: expected an integer of at least {least}, got {count!r}")
    if count > sys.maxsize:
        raise ValueError(f"{argument}: expected an integer of at most {sys.maxsize}, got {count!r}")


def check_counts(least: int = 1, **counts: int) -> None:
    """Raise ValueError, naming the argument, unless all values are integers of at least ``least``."""
    for argument, count in counts.items():
        check_count(argument, count, least)


def check_flag(**flags: bool) -> None:
    """Raise TypeError, naming the argument, unless all values are True or False. It can be traced."""
    for argument, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{argument}: expected True or False, got {shown(flag)}")


def check_positive(**numbers: float) -> None:
    """Raise ValueError, naming the argument, unless all numbers are positive and finite."""
    for argument, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Real) or not 0 < number < math.inf:
            raise ValueError(f"{argument}: expected a positive finite number, got {number!r}")


def check_number(argument: str, number: float) -> None:
    """Raise TypeError or ValueError unless a value is a number whose products are finite."""
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{argument}: expected a number, got {shown(number)}")
    if not abs(number) <= LARGEST:  # true for NaN
        raise ValueError(f"{argument}: expected at most {LARGEST:.0e} in size, got {number}")


def check_choice(argument: str, value: object, allowed: Any) -> None:
    """Raise ValueError unless a value is one of the allowed ones, which are a tuple or a ``Literal`` type."""
    options = get_args(allowed) or allowed
    if not isinstance(value, str | int) or value not in options:
        raise ValueError(f"{argument}: expected one of {options}, got {value!r}")


def check_index(argument: str, index: int | None, count: int) -> None:
    """Raise ValueError unless an index is from 0 to ``count - 1``, or None."""
    if index is not None and not 0 <= index < count:
        raise ValueError(f"{argument}: expected one of 0..{count - 1}, got {index}")


def check_length(argument: str, length: float) -> None:
    """Raise TypeError or ValueError unless a value is a positive finite number."""
    if isinstance(length, bool) or not isinstance(length, Real):
        raise TypeError(f"{argument}: expected a number, got {type(length).__name__}")
    # NumPy would round the limits to the precision of a number in float32, and warn of it.
    if not (math.isfinite(length) and _LENGTHS[0] <= float(length) <= _LENGTHS[1]):
        raise ValueError(f"{argument}: expected a positive finite length (1e-100 to 1e100), got {length}")


_LOOKED_AT = ("cpu",)  # types of devices whose tensors checks may read during a step


def may_read_values(numbers: Tensor) -> bool:
    """Return whether a check may read the values of a tensor during a step.

    It may not on a GPU, where reading waits for all queued work, and not while torch compiles or maps over the tensor.
    """
    if is_mapped(numbers):
        return False
    return numbers.device.type in _LOOKED_AT and not torch.compiler.is_compiling()


def any_negative(numbers: int | Tensor) -> bool:
    """Return whether a number is negative, where a check may look at it."""
    if isinstance(numbers, Tensor):
        return may_read_values(numbers) and bool((numbers < 0).any())
    return numbers < 0


def permute_axes(matrices: Tensor) -> Tensor:
    """Return a mask ``[n]`` of the matrices ``[n, dim, dim]`` that permute and reverse coordinate axes."""
    entries = matrices.abs()
    # Such matrices have a single entry, 1 or -1, in each row.
    return (((entries > _TINY).sum(dim=-1) == 1) & ((entries.sum(dim=-1) - 1).abs() < _TINY)).all(dim=1)


def check_size(argument: str, numbers: Tensor, unit: float = 1.0, *, always: bool = False) -> None:
    """Raise ValueError if numbers, or numbers / unit, are so large that sums of their products overflow float32.

    The limit is the same for all dtypes, because kernels compute scores in float32. Numbers are read where a check may
    look at them, or ``always`` on all devices, for geometry, which reads them anyway.
    """
    unread = torch.compiler.is_compiling() or is_mapped(numbers) if always else not may_read_values(numbers)
    if unread or numbers.numel() == 0:
        return
    check_has_numbers(argument, numbers)
    largest = float(numbers.detach().abs().max()) * max(1.0, 1 / unit)
    if math.isnan(largest):
        raise ValueError(
            f"{argument}: expected finite numbers, got nan; fill in missing values, and mark them by a feature"
        )
    if largest > LARGEST:
        divided = "" if unit >= 1 else f" after division by the length {unit:g}"
        allowed = f"expected at most {LARGEST:.0e} in size, so that products stay finite"
        raise ValueError(f"{argument}: {allowed}, got {largest:.1e}{divided}; use a larger unit")


def check_dropout(argument: str, dropout: float) -> None:
    """Raise ValueError unless a value is a probability below 1."""
    if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0 <= dropout < 1:
        raise ValueError(f"{argument}: expected a probability in [0, 1), got {shown(dropout)}")


def check_floating(argument: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless a dtype is floating."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{argument}: expected a floating dtype, got {dtype}")


def check_neighborhood(neighborhood: object) -> None:
    """Raise TypeError unless a value is a neighborhood such as ``Radius(1.0)``, and not the class ``Radius``."""
    if isinstance(neighborhood, type) or not callable(neighborhood):
        raise TypeError(f"neighborhood: expected a neighborhood such as Radius(1.5), got {neighborhood!r}")
    if not hasattr(neighborhood, "length"):
        expected = "expected a neighborhood such as Radius(1.5), with the attribute length, a number or None"
        raise TypeError(f"neighborhood: {expected}, got {neighborhood!r}")


def check_none(argument: str, where: Tensor, fault: str) -> None:
    """Raise ValueError, with the first index, if the mask ``where`` ``[*]`` is true anywhere.

    A mask that ``torch.func.vmap`` maps over has no values to be checked.
    """
    check_has_numbers(argument, where)
    if not is_mapped(where) and where.any():
        first = where.nonzero()[0].tolist() if where.ndim else []
        place = f"{argument}[{', '.join(map(str, first))}]" if first else argument
        raise ValueError(f"{argument}: {place} {fault}")


def check_is(argument: str, value: object, allowed: type) -> None:
    """Raise TypeError unless a value is an instance of a class."""
    if not isinstance(value, allowed):
        words = "tensor" if allowed is Tensor else allowed.__name__
        raise TypeError(f"{argument}: expected a {words}, got {kind(value)}")


def check_returned(method: str, found: Tensor, what: str, shape: Sequence[int], like: Tensor) -> None:
    """Raise an error that names a method unless it returned a tensor of this shape, in the dtype of its argument."""
    check_is(method, found, Tensor)
    if found.shape != tuple(shape):
        raise ValueError(f"{method}: expected {what} {tuple(shape)}, got {tuple(found.shape)}")
    if found.dtype != like.dtype or found.device != like.device:
        expected = f"{what} in {like.dtype} on {like.device} as its argument"
        raise ValueError(f"{method}: expected {expected}, got {found.dtype} on {found.device}")


def check_default_device() -> None:
    """Raise RuntimeError unless torch's default device is the CPU, on which tables of groups are computed."""
    if not torch.compiler.is_compiling() and (device := torch.get_default_device()).type != "cpu":
        advice = f"construct groups and networks on the CPU, and then move networks: network.to('{device}')"
        raise RuntimeError(f"expected the CPU as torch's default device, got {device}; {advice}")


def check_graph(graph: Any, allowed: type, beside: Tensor, other: str = "x") -> None:
    """Raise an error unless a graph has a class, and the device of another tensor, such as features or weights."""
    check_is("graph", graph, allowed)
    check_is(other, beside, Tensor)
    if graph.pos.device != beside.device:
        raise ValueError(f"graph: expected a graph on {beside.device} like {other}, got one on {graph.pos.device}")


def check_features(
    x: Tensor, weight: Tensor, channels: int | None = None, argument: str = "x", beside: str = "the weights"
) -> None:
    """Raise an error unless features have the dtype and device of the weights, and ``channels`` if that is given.

    Under autocast, any floating dtype is allowed.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{argument}: expected a tensor, got {type(x).__name__}")
    fits = x.dtype == weight.dtype or (in_autocast(weight.device) and x.is_floating_point())
    if x.device != weight.device or not fits:
        found = f"{x.dtype} on {x.device}"
        raise ValueError(f"{argument}: expected {weight.dtype} on {weight.device} like {beside}, got {found}")
    if channels is not None and (x.ndim == 0 or x.shape[-1] != channels):
        raise ValueError(f"{argument}: expected {channels} channels in the last axis, got {tuple(x.shape)}")


def weight_of(argument: str, layer: nn.Linear) -> Tensor:
    """Return the weight of a linear layer that is read in place of a call of the layer.

    TypeError is raised for other layers, such as those that PEFT puts around linear ones: they have the weight of the
    layer inside, but what they add to its outputs would be lost.
    """
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        advice = "whose weight is read without a call; change weights by torch.nn.utils.parametrize"
        raise TypeError(f"{argument}: expected a torch.nn.Linear, {advice}, got {kind(layer)}")
    return layer.weight


def check_field(x: Tensor, graph: Any, channels: int, fiber: int | None = None) -> Tensor:
    """Return a field on a graph, with its fiber or one of another size; ValueError if it has another shape."""
    expected = (graph.num_points, graph.fiber if fiber is None else fiber, channels)
    if x.shape != expected:
        raise ValueError(f"x: expected a field [points, fiber, channels] = {expected}, got {tuple(x.shape)}")
    return x


def is_whole(value: Tensor) -> bool:
    """Return whether a tensor has an integer dtype."""
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def permutation_table(argument: str, given: Any, expected: str) -> Tensor:
    """Return permutations ``[rows, points]`` int64, or raise ValueError unless each row is one of 0..points - 1."""
    try:
        array = isinstance(given, np.ndarray)  # torch does not read negative strides
        table = torch.as_tensor(np.array(given, order="C") if array else given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{argument}: expected {expected}, got {given!r}") from error
    check_has_numbers(argument, table)
    if table.ndim != 2 or not is_whole(table) or 0 in table.shape:
        raise ValueError(f"{argument}: expected {expected}, got shape {tuple(table.shape)} of {table.dtype}")
    table, last = table.long().cpu(), table.shape[1] - 1
    for number, row in enumerate(table.tolist()):
        if sorted(row) != list(range(last + 1)):
            raise ValueError(f"{argument}: row {number} is {row}, not a permutation of 0..{last}")
    return table


def check_arguments(of: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless arguments have the annotated types of a function or dataclass.

    Call it first in the function, ``check_arguments(function, locals())``. In code that torch compiles nothing is
    checked. Floating numbers must not be NaN. Arguments that are not in ``given`` are not checked. Conditions that are
    not part of annotations, such as shapes and bounds, must be checked separately.
    """
    if torch.compiler.is_compiling():
        return
    # beartype's is_bearable is no way to do without _fits: it looks at one random entry of a sequence, so that it takes
    # [1, 1, 1, "2"] for integers three times in four, and it takes True for an integer and NumPy's numbers for none.
    for argument, hint in _hints(of).items():
        if argument not in given:
            continue
        value = given[argument]
        if not _fits(value, hint):
            parts = [part for part in _parts(hint) if part is not NoneType]
            error = ValueError if all(part is int or get_origin(part) is Literal for part in parts) else TypeError
            raise error(f"{argument}: expected {_words(hint)}, got {shown(value)}")
        if isinstance(value, float) and value != value:
            raise ValueError(f"{argument}: expected a finite number, got {value}")


def is_maker(value: object) -> bool:
    """Return whether a value is a function that makes a group, such as ``cyclic``, in place of a group."""
    made = getattr(value, "__annotations__", {}).get("return")
    return not isinstance(value, type) and getattr(made, "__name__", made) == "FiniteGroup"


def shown(value: object) -> str:
    """Return a value in messages: its ``repr`` if that is short, otherwise its type and the types of its entries."""
    if is_maker(value):
        return f"the function {value.__name__} itself: call it, {value.__name__}(...)"  # type: ignore[attr-defined]
    text = "" if isinstance(value, Tensor) else repr(value)
    if 0 < len(text) < _SHORT:
        return text
    entries = dict.fromkeys(map(kind, value)) if isinstance(value, list | tuple) else ()
    return f"{kind(value)} of {', '.join(entries)}" if entries else kind(value)


_WORDS = {  # for the names of classes
    "Callable": "a function",
    "Data": "a torch_geometric.data.Data",
    "FiniteGroup": "a FiniteGroup such as lieattn.groups.cyclic(4)",
    "Frames": "frames such as PrincipalFrames()",
    "Group": "a group such as lieattn.groups.SE(3)",
    "HomogeneousSpace": "a HomogeneousSpace such as Euclidean(SE(3))",
    "Mapping": "a mapping",
    "Module": "a network (torch.nn.Module)",
    "Neighborhood": "a neighborhood such as Radius(1.5)",
    "NoneType": "None",
    "PathLike": "a path",
    "Tensor": "a tensor",
    "bool": "True or False",
    "float": "a number",
    "int": "an integer",
    "str": "a string",
}


@cache
def _hints(of: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotation of each argument that has a name."""
    hints: dict[str, Any] | None = None
    unknown: dict[str, Any] = {}  # names that a module imports only for type checkers are Any
    while hints is None:
        try:
            hints = get_type_hints(of, localns=unknown)
        except NameError as error:
            unknown[str(error.name)] = Any
    parameters = inspect.signature(of).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind not in _VARIADIC and p.name in hints}


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _class(hint: Any) -> Any:
    """Return the class whose instances an annotation allows; that of tensors for a shape."""
    found = dict if is_typeddict(hint) else PathLike if hint is Path else get_origin(hint) or hint
    return found.array_type if isinstance(found, type) and issubclass(found, AbstractArray) else found


def _fits(value: object, hint: Any) -> bool:
    """Return whether an annotation allows a value. Forms that the library does not use allow anything."""
    if len(parts := _parts(hint)) > 1:
        return any(_fits(value, part) for part in parts)
    allowed, entries = _class(hint), get_args(hint)
    if allowed is Literal:
        return isinstance(value, str | int) and value in entries
    if allowed is int or allowed is float:
        return isinstance(value, Integral if allowed is int else Real) and not isinstance(value, bool)
    if getattr(allowed, "_is_protocol", False) and "__call__" not in vars(allowed):
        return True  # those of numpy.typing.ArrayLike
    if allowed is abc.Callable or getattr(allowed, "_is_protocol", False):
        return callable(value) and not isinstance(value, type) and not is_maker(value)
    if not _is_sequence(hint):
        return allowed is Any or not isinstance(allowed, type) or isinstance(value, allowed)
    if not isinstance(value, abc.Sequence) or isinstance(value, str | bytes):
        return False
    if allowed is tuple and Ellipsis not in entries:
        return len(value) == len(entries) and all(map(_fits, value, entries))
    return all(_fits(entry, entries[0]) for entry in value)


def _words(hint: Any) -> str:
    """Return the values that an annotation allows, in words."""
    if len(parts := _parts(hint)) > 1:
        return " or ".join(dict.fromkeys(map(_words, parts)))
    allowed, entries = _class(hint), get_args(hint)
    if allowed is Literal:
        return f"one of {entries}"
    if allowed is tuple and Ellipsis not in entries:
        return f"({', '.join(map(_words, entries))})"
    if _is_sequence(hint):
        return "a sequence" if entries[0] is Any else f"a sequence in which each entry is {_words(entries[0])}"
    return _WORDS.get(allowed.__name__, f"a {allowed.__name__}")


def _is_sequence(hint: Any) -> bool:
    """Return whether an annotation states the entries of a sequence; named tuples are classes like others."""
    return isinstance(origin := get_origin(hint), type) and issubclass(origin, abc.Sequence)
