"""Damaged and hostile files for every loader of lieattn_datasets."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import os
import pickle
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests.fuzz._data_sets import CASES, Case
from tests.fuzz._target import Finding, Target, Verdict, named

_SECONDS, _KIBIBYTES = 5.0, 300_000  # limits for reading a small file
_MARK = "MARK"  # name of the file that executed code would create
_EVENTS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "pickle.find_class")

_watched: list[str] | None = None


def _watch(event: str, _: Any) -> None:
    if _watched is not None and event in _EVENTS:
        _watched.append(event)


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Record the audit events of Python that a loader never causes: processes, connections, unpickled names."""
    global _watched
    if not getattr(watched, "installed", False):
        sys.addaudithook(_watch)
        watched.installed = True  # type: ignore[attr-defined]
    _watched = []
    try:
        yield _watched
    finally:
        _watched = None


class Hostile:
    """An object that creates a file if it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {_MARK}",)


Damage = Callable[[random.Random, bytes], bytes]


def _truncate(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content))] if content else b""


def _flip(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 8])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _splice(draw: random.Random, content: bytes) -> bytes:
    size = draw.randint(1, max(1, len(content) // 4))
    source, target = (draw.randrange(len(content)) for _ in range(2))
    return content[:target] + content[source : source + size] + content[target + size :]


def _insert(draw: random.Random, content: bytes) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + draw.randbytes(draw.randint(1, 9)) + content[at:]


def _delete(draw: random.Random, content: bytes) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + content[at + draw.randint(1, 9) :]


def _header(draw: random.Random, content: bytes) -> bytes:
    at, size = draw.randrange(min(len(content), 200)), draw.choice([1, 2, 4, 8])
    return content[:at] + draw.choice([b"\xff", b"\0", b"\x7f", b"\x80"]) * size + content[at + size :]


def _number(draw: random.Random, content: bytes) -> bytes:
    places = list(re.finditer(rb"-?\d[\d.]*", content[:2000]))
    if not places:
        return _header(draw, content)
    place = draw.choice(places)
    number = draw.choice([b"-1", b"0", b"99999999999", b"nan", b"inf", b"1e400", b"1e200", b"", b"4294967295"])
    return content[: place.start()] + number + content[place.end() :]


def _other(draw: random.Random, _: bytes) -> bytes:
    case = CASES[draw.choice(list(CASES))]
    return (case.folder / draw.choice(case.files)).read_bytes()


def _text(draw: random.Random, _: bytes) -> bytes:
    return draw.choice([b"", b"\n", b"<html>404</html>\n", b"OFF\n", b"\0" * 5000, b"1 2 3\n" * 50, b"\xff\xfe\xfd"])


def _pickle(draw: random.Random, _: bytes) -> bytes:
    payload = draw.choice([Hostile(), [Hostile()], {"data": Hostile(), "labels": [0]}, np.array([Hostile()])])
    return pickle.dumps(payload, protocol=draw.randrange(6))


def _torch(draw: random.Random, _: bytes) -> bytes:
    stream = io.BytesIO()
    payload = draw.choice([Hostile(), [{"z": Hostile()}]])
    torch.save(payload, stream, _use_new_zipfile_serialization=draw.random() < 0.5)
    return stream.getvalue()


@functools.cache
def _zeros(mebibytes: int) -> bytes:
    """Return concatenated gzip members of zeros."""
    return gzip.compress(bytes(1 << 24)) * (mebibytes // 16)


def _bomb(draw: random.Random, content: bytes) -> bytes:
    """Return an archive that unpacks to two gibibytes or states a wrong size; gzip files keep or lose their content."""
    if content[:2] == b"\x1f\x8b":
        return draw.choice([content, b""]) + _zeros(2048)
    names = [f"{name}.npy" for name in _arrays(content)] or ["a/test/b.off", "x"]
    stream = io.BytesIO()
    with zipfile.ZipFile(
        stream, "w", draw.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    ) as archive:
        archive.writestr(draw.choice(names), bytes(1 << 22))
    packed = stream.getvalue()
    size = (1 << 22).to_bytes(4, "little")
    return packed.replace(size, draw.choice([1 << 31, (1 << 32) - 2, 10]).to_bytes(4, "little"))


def _arrays(content: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of an npz archive, or an empty dictionary for other files."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return {key: value for key, value in archive.items() if isinstance(value, np.ndarray)}
    except Exception:
        return {}


def _array(draw: random.Random, content: bytes) -> bytes:
    """Change one array of an archive: objects, another type or shape, numbers out of range."""
    arrays = _arrays(content)
    if not arrays:
        return _number(draw, content)
    key = draw.choice(list(arrays))
    stream = io.BytesIO()
    with contextlib.suppress(ValueError, TypeError), np.errstate(all="ignore"):
        arrays[key] = draw.choice(_ARRAYS)(arrays[key])
    if draw.random() < 0.1:
        del arrays[key]
    np.savez(stream, **arrays)
    return stream.getvalue()


_ARRAYS: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
    lambda array: np.full(array.shape or 1, Hostile()),
    lambda array: array.astype(object),
    lambda array: array.astype(np.float64) * np.nan,
    lambda array: array.astype(np.float64) * 1e308,
    lambda array: array.astype(np.float16),
    lambda array: array.astype(">f8"),
    lambda array: array.astype(np.int64) - 5,
    lambda array: array.astype(np.int64) * 10**9,
    lambda array: array.astype(np.uint64) + np.uint64(2**63),
    lambda array: array.astype(np.complex128),
    lambda array: array.astype("S3"),
    lambda array: array.astype(bool),
    lambda array: array[:0],
    lambda array: array[:1],
    lambda array: array[..., None],
    lambda array: array[0],
    lambda array: np.concatenate([array, array]),
    lambda array: np.asfortranarray(array),
    lambda array: array.view([("field", array.dtype)]),
    lambda array: np.array("text"),
)


def _promise(draw: random.Random, content: bytes) -> bytes:
    """Replace the header of one array of an archive by one that promises far too much, or is invalid."""
    arrays = _arrays(content)
    if not arrays:
        return _header(draw, content)
    victim, stream = draw.choice(list(arrays)), io.BytesIO()
    shape = draw.choice(["(1000000000000,)", "(-1,)", "(2, 0, 99999999999)", "()", "((", "(" * 500, "'x'"])
    kind = draw.choice(["<f8", "|u1", "|O", "<U1000000000", "|V8", "<M8[s]", "nonsense"])
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    with zipfile.ZipFile(stream, "w") as archive:
        for key, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array)
            made = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)
            archive.writestr(f"{key}.npy", made if key == victim else member.getvalue())
        if draw.random() < 0.2:
            archive.writestr("../../../tmp/lieattn_escaped.npy", b"")
    return stream.getvalue()


def _word(draw: random.Random, content: bytes) -> bytes:
    """Write a word of an extended XYZ file in another way, which must be refused or mean the same."""
    old, new = draw.choice(_WORDS)
    return re.sub(old, new, content, count=draw.choice([0, 1]), flags=re.MULTILINE)


_WORDS = (
    (rb"\bProperties=", b"properties="),
    (rb"\bLattice=", b"LATTICE="),
    (rb"\bLattice=", b"It's Lattice="),
    (rb"\bpbc=", b"PBC="),
    (rb"\benergy=\S+", b"energy=T"),
    (rb"\benergy=\S+", b"energy"),
    (rb"species:S:1", b"species:I:1"),
    (rb"species:S:1", b"Species:S:1"),
    (rb"pos:R:3", b"pos:R"),
    (rb"^Si ", b"14 "),
    (rb"^Si ", b"si "),
    (rb"^(Si .*)$", rb"\1 7"),
    (rb"$", b" \r"),
)

DAMAGES: dict[str, Damage] = {
    "truncated": _truncate,
    "flipped bits": _flip,
    "spliced": _splice,
    "inserted": _insert,
    "deleted": _delete,
    "header": _header,
    "number": _number,
    "other format": _other,
    "text": _text,
    "hostile pickle": _pickle,
    "hostile torch file": _torch,
    "bomb": _bomb,
    "other array": _array,
    "false promise": _promise,
    "other words": _word,
}
_NOTICED = {"truncated", "flipped bits", "spliced", "inserted", "deleted", "header"}  # detected by checksums


@st.composite
def _cases(draw: st.DrawFn) -> tuple[str, str, str, int]:
    name = draw(st.sampled_from(sorted(CASES)))
    damage = draw(st.sampled_from([*DAMAGES, "truncated", "flipped bits", "flipped bits", "number"]))
    return name, draw(st.sampled_from(CASES[name].files)), damage, draw(st.integers(0, 2**32))


def _check(case: tuple[str, str, str, int]) -> Finding | Verdict:
    name, file, damage, seed = case
    valid = CASES[name]
    content = DAMAGES[damage](random.Random(seed), (valid.folder / file).read_bytes())
    return judge(valid, file, content, damage, str(case))


def judge(valid: Case, file: str, content: bytes, damage: str, about: str) -> Finding | Verdict:
    """Judge the outcome of a loader if one of its files has this content."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        root = Path(folder, "root")
        shutil.copytree(valid.folder, root)
        (root / file).write_bytes(content)
        expected = valid.values
        error, began = None, time.perf_counter()
        with watched() as events:
            try:
                values = valid.read(root)
            except Exception as raised:
                error = raised
        took = time.perf_counter() - began
        if Path(_MARK).exists() or (root / _MARK).exists() or events:
            return Finding(Verdict.EXECUTED, f"{about}: {events}")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if took > _SECONDS or grown > _KIBIBYTES:
        return Finding(Verdict.HANG, f"{about}: {took:.1f} s, {grown / 1024:.0f} MiB")
    if error is not None:
        if named(error, *(Path(each).name for each in valid.files)):
            return Verdict.NAMED
        return Finding(Verdict.UNNAMED, f"{about}: {type(error).__name__}: {str(error)[:200]}")
    return _compare(valid, values, expected, damage, about)


def _compare(valid: Case, values: Any, expected: Any, damage: str, about: str) -> Finding | Verdict:
    """Judge values: they must be correct, unless the format cannot detect the damage."""
    same = len(values) == len(expected) and all(map(np.array_equal, values, expected))
    if same:
        return Verdict.CORRECT
    if (valid.checksums and damage in _NOTICED) or (valid.counts and damage == "truncated") or damage == "other words":
        return Finding(Verdict.SILENT, f"{about}: values differ from those before the damage")
    if not all(np.isfinite(array).all() for array in values if array.dtype.kind == "f"):
        return Finding(Verdict.SILENT, f"{about}: numbers that are not finite")
    return Verdict.CORRECT


TARGETS = {"data-files": Target("damaged data files", _cases(), _check, long=10_000, quick=100)}
