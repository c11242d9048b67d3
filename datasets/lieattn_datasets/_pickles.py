"""A reader of pickles that supports only dictionaries, lists, numbers, strings and byte arrays.

Python's own unpickler calls the functions that a file names. Even an unpickler that accepts only NumPy's array passes
it a state from the file, which can point anywhere in memory. Here an array is a shape and bytes, and nothing is
imported or called.
"""

import math
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHOWN = 60  # characters of a name in a message


class ForbiddenError(Exception):
    """Raised if a pickle requests an object that is not allowed. The message names the object."""


class _Name(str):
    """A global name, "module name". Nothing is imported for it."""

    __slots__ = ()


class _Array:
    """A NumPy array of bytes under construction. The instruction BUILD sets its values."""

    values: NDArray[np.uint8]

    def build(self, state: Any) -> None:
        """Set the shape and the bytes from NumPy's state of an array."""
        _, shape, kind, by_columns, raw = state
        content = raw.encode("latin1") if isinstance(raw, str) else raw
        if not isinstance(kind, _Dtype) or not isinstance(content, bytes | bytearray):
            raise ForbiddenError("an array with values other than bytes")
        if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) != len(content):
            raise ValueError(f"{len(content)} bytes for an array of another size")
        self.values = np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if by_columns else "C")


class _Dtype:
    """NumPy's uint8. Its state in a file is ignored."""

    def build(self, _: Any) -> None:
        """Ignore the state, such as a byte order, which single bytes do not have."""


def _shown(value: Any) -> str:
    """Return a short description of a value. The ``repr`` of nested tuples could take forever."""
    return value[:_SHOWN] if isinstance(value, str) else f"a {type(value).__name__}"


def _reconstruct(kind: Any, *_: Any) -> _Array:
    if kind != "numpy ndarray":
        raise ForbiddenError(f"an array of type {_shown(kind)}")
    return _Array()


def _dtype(code: Any, *_: Any) -> _Dtype:
    if code != "u1":
        raise ForbiddenError(f"values of type {_shown(code)!r}")
    return _Dtype()


def _from_buffer(raw: Any, kind: Any, shape: Any, order: Any) -> _Array:
    if order not in ("C", "F"):
        raise ForbiddenError(f"an array in the order {_shown(order)}")
    array = _Array()
    array.build((None, shape, kind, order == "F", raw))
    return array


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if encoding != "latin1" or not isinstance(text, str):
        raise ForbiddenError(f"the encoding {_shown(encoding)}")
    return text.encode("latin1")


_KNOWN: dict[str, Callable[..., Any]] = {
    "numpy.core.multiarray _reconstruct": _reconstruct,
    "numpy._core.multiarray _reconstruct": _reconstruct,
    "numpy.core.numeric _frombuffer": _from_buffer,
    "numpy._core.numeric _frombuffer": _from_buffer,
    "numpy dtype": _dtype,
    "_codecs encode": _encode,
}
_NAMES = {*_KNOWN, "numpy ndarray"}


def read_pickle(content: bytes) -> Any:
    """Return the object in a pickle of protocol 0 to 5. Keys that are bytes, from Python 2, become strings.

    Raises
    ------
    ForbiddenError
        If the pickle contains objects other than byte arrays of NumPy and Python's containers, numbers and strings, or
        if it copies its strings more often than a pickle that contains each of them once.
    Exception
        Of any class, if the pickle is damaged.
    """
    machine = _Machine(len(content))
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "STOP":
            break
        if opcode.name not in _INSTRUCTIONS:
            raise ForbiddenError(f"the instruction {opcode.name}")
        _INSTRUCTIONS[opcode.name](machine, argument)
    (result,) = machine.stack
    return _filled(result)


def _filled(value: Any) -> Any:
    return value.values if isinstance(value, _Array) else value


class _Machine:
    """The stack of a pickle, the positions of its marks, and its memo. It has a method for each kind of instruction."""

    def __init__(self, size: int) -> None:
        self.stack: list[Any] = []
        self._left = size  # bytes of strings that may still be copied
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self, _: Any) -> None:
        self._marks.append(len(self.stack))

    def put(self, place: Any) -> None:
        self._memo[len(self._memo) if place is None else int(place)] = self.stack[-1]

    def get(self, place: Any) -> None:
        self.push(self._memo[int(place)])

    def name(self, name: Any) -> None:
        parts = self.pop(2) if name is None else name.split(" ")
        if not all(isinstance(part, str) for part in parts) or " ".join(parts) not in _NAMES:
            raise ForbiddenError(".".join(map(_shown, parts)))
        self.push(_Name(" ".join(parts)))

    def call(self, _: Any) -> None:
        called, arguments = self.pop(2)
        if not isinstance(called, _Name) or called not in _KNOWN:
            raise TypeError(f"{_shown(called)} is not callable")
        result = _KNOWN[called](*arguments)
        self._count_copies(result, bytes)
        self.push(result)

    def build(self, _: Any) -> None:
        (state,) = self.pop(1)
        self._count_copies(state[-1], str)
        self.top(_Array, _Dtype).build(state)

    def _count_copies(self, value: Any, kind: type[str] | type[bytes]) -> None:
        """Raise ForbiddenError if values of this kind, each of which is a copy, are larger than the file together."""
        self._left -= len(value) if isinstance(value, kind) else 0
        if self._left < 0:
            raise ForbiddenError("copies of its strings that are larger than the file")

    def extend(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    def update(self, items: list[Any]) -> None:
        for key in items[::2]:
            self._count_copies(key, bytes)
        keys = [key.decode("latin1") if isinstance(key, bytes) else key for key in items[::2]]
        if not all(isinstance(key, str) for key in keys):  # the hash of nested tuples could take forever
            raise ForbiddenError("keys that are not strings")
        self.top(dict).update(zip(keys, map(_filled, items[1::2]), strict=True))

    def make_dict(self, _: Any) -> None:
        items = self.pop_to_mark()
        self.push({})
        self.update(items)

    def pop(self, number: int) -> list[Any]:
        items = self.stack[-number:]
        if len(items) < number:
            raise ValueError("it pops from an empty stack")
        del self.stack[-number:]
        return items

    def pop_to_mark(self) -> list[Any]:
        at = self._marks.pop()
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def top(self, *kinds: type) -> Any:
        if not isinstance(self.stack[-1], kinds):
            raise TypeError(f"it adds items to a {type(self.stack[-1]).__name__}")
        return self.stack[-1]


_LITERALS = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    "BYTEARRAY8",
)
_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, _: None),
    **dict.fromkeys(_LITERALS, _Machine.push),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": _Machine.mark,
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.pop(3))),
    "LIST": lambda machine, _: machine.push(machine.pop_to_mark()),
    "DICT": _Machine.make_dict,
    "APPEND": lambda machine, _: machine.extend(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_to_mark()),
    "SETITEM": lambda machine, _: machine.update(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.pop_to_mark()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("GLOBAL", "INST", "STACK_GLOBAL"), _Machine.name),
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
}
