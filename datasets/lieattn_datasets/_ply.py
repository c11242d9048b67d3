"""Binary PLY files. trimesh reads each face as if it had as many corners as the first one."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ORDERS = {b"binary_little_endian": "<", b"binary_big_endian": ">"}
_NAMES = "char uchar short ushort int uint float double int8 uint8 int16 uint16 int32 uint32 float32 float64"
_CODES = dict(zip(_NAMES.encode().split(), 2 * "bBhHiIfd", strict=True))

# The name of a property, the code of its numbers and, for lists, the code of their length.
_Property = tuple[str, str, str]


def read_binary_ply(content: bytes) -> tuple[NDArray[np.float64], Sequence[Sequence[int]]] | None:
    """Return the vertices ``[vertices, 3]`` and the corners of each face, or None if the file is not binary.

    Raises
    ------
    Exception
        Of any class, if the file is damaged.
    """
    header, _, rest = content.partition(b"end_header")
    lines = [line.split() for line in header.splitlines()]
    order = next((_ORDERS.get(line[1]) for line in lines if line[:1] == [b"format"]), None)
    if order is None:
        return None
    body, at = rest.partition(b"\n")[2], 0
    found: dict[bytes, dict[str, Any]] = {}
    for name, count, properties in _elements(lines):
        found[name], at = _read_element(body, at, count, properties, order)
    if at != len(body):
        raise ValueError(f"its header promises {at} bytes, but there are {len(body)}")
    vertex, face = found[b"vertex"], found.get(b"face", {})
    vertices = np.stack([np.asarray(vertex[axis], dtype=np.float64) for axis in "xyz"], axis=1)
    return vertices, face.get("vertex_indices", face.get("vertex_index", ()))


def _elements(lines: Sequence[Sequence[bytes]]) -> list[tuple[bytes, int, list[_Property]]]:
    """Return the name, the number of rows and the properties of each element of a header."""
    found: list[tuple[bytes, int, list[_Property]]] = []
    for line in lines:
        if line[:1] == [b"element"]:
            found.append((line[1], int(line[2]), []))
        elif line[:1] == [b"property"]:
            count = _CODES[line[2]] if line[1] == b"list" else ""
            found[-1][2].append((line[-1].decode(), _CODES[line[-2]], count))
    return found


def _read_element(
    body: bytes, at: int, count: int, properties: Sequence[_Property], order: str
) -> tuple[dict[str, Any], int]:
    """Return the column of each property, and the end of the element."""
    if not count or not properties:
        return {}, at
    fields: list[Any] = []
    end = at
    for name, code, length in properties:
        size: tuple[int, ...] = ()
        if length:
            size = struct.unpack_from(order + length, body, end)
            fields.append((f"length of {name}", order + length))
        fields.append((name, order + code, size))
        end = at + np.dtype(fields).itemsize
    row = np.dtype(fields)
    if at + count * row.itemsize <= len(body):
        table = np.frombuffer(body, row, count, at)
        lengths = [name for name, _, length in properties if length]
        if all((table[f"length of {name}"] == table[name].shape[1]).all() for name in lengths):
            return {name: table[name] for name, _, _ in properties}, at + count * row.itemsize
    columns: dict[str, list[Any]] = {name: [] for name, _, _ in properties}
    for _ in range(count):
        for name, code, length in properties:
            size = (1,)
            if length:
                size = struct.unpack_from(order + length, body, at)
                at += struct.calcsize(order + length)
            values = struct.unpack_from(f"{order}{size[0]}{code}", body, at)
            at += struct.calcsize(f"{order}{size[0]}{code}")
            columns[name].append(values if length else values[0])
    return columns, at
