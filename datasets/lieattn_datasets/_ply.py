"""PLY files. trimesh reads each binary face as if it had as many corners as the first one, and only some names."""

import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HEADER = re.compile(rb"ply[ \t]*[\r\n]+(.*?[\r\n])end_header[ \t]*(?:\r\n|\r|\n|$)", re.DOTALL)
_ORDERS = {b"ascii": "", b"binary_little_endian": "<", b"binary_big_endian": ">"}
_NAMES = "char uchar short ushort int uint float double int8 uint8 int16 uint16 int32 uint32 float32 float64"
_CODES = {**dict(zip(_NAMES.encode().split(), 2 * "bBhHiIfd", strict=True)), b"int64": "q", b"uint64": "Q"}
_CORNERS = ("vertex_indices", "vertex_index")  # usual names of the list of a face

# The name of a property, the code of its numbers and, for lists, the code of their length.
_Property = tuple[str, str, str]


def read_ply(content: bytes) -> tuple[NDArray[np.float64], Sequence[Sequence[int]]]:
    """Return the vertices ``[vertices, 3]`` and the corners of each face, of a file of text or numbers."""
    header = _HEADER.match(content)
    lines = [line.split() for line in header[1].splitlines()] if header else []
    order = next((_ORDERS.get(line[1]) for line in lines if line[:1] == [b"format"]), None)
    if header is None or order is None:
        raise ValueError("it does not begin with the header of a PLY file, with one of its three formats")
    body, at = content[header.end() :], 0
    rows = [] if order else [line for line in body.splitlines() if line.strip()]
    elements, found = _elements(lines), dict[str, dict[str, Any]]()
    for name, (count, properties) in elements.items():
        if order:
            found[name], at = _read_element(body, at, count, properties, order)
        else:
            found[name], at = _read_rows(name, rows[at : at + count], count, properties), at + count
    if order and at != len(body):
        raise ValueError(f"its header promises {at} bytes, but there are {len(body)}")
    kind = "face" if elements.get("face", (0,))[0] else "tristrips"
    number, properties = elements.get(kind, (0, []))
    if not number:
        return np.empty((0, 3)), []
    if not {*"xyz"} <= {*found.get("vertex", {})}:
        raise ValueError("it has faces, but no vertices with x, y and z")
    lists = [name for name, code, length in properties if length and code not in "fd"]
    usual = [name for name in lists if name in _CORNERS] or lists
    if len(usual) != 1:
        names = ", ".join(lists) or "none"
        raise ValueError(f"expected one list of vertices for each face, as {_CORNERS[0]}, got {names}")
    vertices = np.stack([np.asarray(found["vertex"][axis], dtype=np.float64) for axis in "xyz"], axis=1)
    polygons = found[kind][usual[0]]
    if not order:
        polygons = [[int(word) for word in polygon] for polygon in polygons]
    if kind == "tristrips":
        from trimesh.util import triangle_strips_to_faces

        strips = [np.array(strip, dtype=np.int64) for strip in polygons]
        parts = [part[part >= 0] for strip in strips for part in np.split(strip, np.flatnonzero(strip < 0))]
        polygons = triangle_strips_to_faces([part for part in parts if len(part) > 2])
    return vertices, polygons


def _elements(lines: Sequence[Sequence[bytes]]) -> dict[str, tuple[int, list[_Property]]]:
    """Return the number of rows and the properties of each element of a header."""
    found: dict[str, tuple[int, list[_Property]]] = {}
    properties: list[_Property] = []
    for line in lines:
        if line[:1] == [b"element"]:
            properties = []
            found[line[1].decode()] = int(line[2]), properties
        elif line[:1] == [b"property"]:
            kinds = line[2:-1] if line[1] == b"list" else line[1:-1]
            for unknown in {*kinds} - {*_CODES}:
                raise ValueError(f"the property {line[-1].decode()} has the unknown type {unknown.decode()}")
            codes = [_CODES[kind] for kind in kinds]
            properties.append((line[-1].decode(), codes[-1], codes[0] if len(codes) > 1 else ""))
    return found


def _read_rows(name: str, rows: Sequence[bytes], count: int, properties: Sequence[_Property]) -> dict[str, Any]:
    """Return the column of each property of an element of text. Rows may have further numbers, as those of MeshLab."""
    if len(rows) < count:
        raise ValueError(f"its header promises {count} rows of {name}, but there are {len(rows)}")
    if not count or not properties:
        return {}
    columns: dict[str, Any] = {name: [] for name, _, _ in properties}
    if not any(length for _, _, length in properties):
        table = np.loadtxt(rows, usecols=range(len(properties)), ndmin=2, comments=None)
        return dict(zip(columns, table.T, strict=True))
    for row in rows:
        words, at = row.split(), 0
        for column, _, length in properties:
            first = at + bool(length)
            size = int(words[at]) if length and at < len(words) else 1
            if not first <= (at := first + size) <= len(words):
                raise ValueError(f"a row of {name} has {len(words)} numbers, fewer than its properties need")
            columns[column].append(words[first:at] if length else words[first])
    return columns


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
