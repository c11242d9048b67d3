"""Damaged checkpoints (flipped bits, truncated, spliced, edited) and hostile ones: loaded unchanged, or refused."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lieattn.io import add_digests
from lieattn.train import load_network, load_task, read_checkpoint
from tests.fuzz._run import checkpoint, folder
from tests.fuzz._target import Finding, Target, Verdict, named

_WHOLE = 2**31  # places are numbers below it, and relative to the length
_places = st.integers(0, _WHOLE - 1)
_junk = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
    st.sampled_from(
        ["lieattn.groups.cyclic", "os.system", "lieattn.train.load_network", "run.yaml", "torch.nn.Linear"]
    ),
    st.builds(lambda size: torch.full((size,), torch.nan), st.integers(0, 3)),
    st.builds(lambda: torch.zeros(1).expand(10**6)),
)
_HOSTILE = ("os.system", "subprocess.run", "lieattn.train._callbacks.os.system", "builtins.exec", "pathlib.Path")


class _Payload:
    """An object that creates a file if it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@st.composite
def _cases(draw: st.DrawFn):
    kind = draw(
        st.sampled_from(["bits", "bits", "bytes", "cut", "splice", "edit", "edit", "junk", "nan", "pickle", "class"])
    )
    entrance = draw(st.sampled_from(["read", "read", "read", "network", "task"]))
    match kind:
        case "bits":
            how: Any = draw(st.lists(st.tuples(_places, st.integers(0, 7)), min_size=1, max_size=3))
        case "bytes":
            how = draw(_places), draw(st.binary(min_size=1, max_size=64))
        case "cut":
            how = draw(_places), draw(st.sampled_from(["end", "middle"])), draw(st.integers(1, 2000))
        case "splice":
            how = draw(_places), draw(_places), draw(st.integers(1, 500))
        case "junk":
            how = draw(_places), draw(_junk)
        case "class":
            how = draw(_places), draw(st.sampled_from(_HOSTILE))
        case _:
            how = draw(_places)
    return kind, how, entrance


def _check(case) -> Finding | Verdict:
    kind, how, entrance = case
    path, marker = folder() / "damaged.ckpt", folder() / "marker"
    marker.unlink(missing_ok=True)
    written = _write(path, kind, how, marker)
    load: Callable[[Path], Any] = {"read": read_checkpoint, "network": load_network, "task": load_task}[entrance]
    try:
        loaded = load(path)
    except Exception as error:
        if marker.exists():
            return Finding(Verdict.EXECUTED, str(case))
        if named(error, path.name, "the checkpoint"):
            return Verdict.NAMED
        raise
    if marker.exists():
        return Finding(Verdict.EXECUTED, str(case))
    if entrance == "read":
        right = _same(loaded, written) and kind != "edit"
    else:
        prefix = "network." if entrance == "network" else ""
        weights = {f"{prefix}{name}": value for name, value in loaded.state_dict().items()}
        expected = {name: value for name, value in written["state_dict"].items() if name.startswith(prefix)}
        finite = all(bool(value.isfinite().all()) for value in weights.values() if value.is_floating_point())
        right = _same(weights, expected) and finite
    return Verdict.CORRECT if right else Finding(Verdict.SILENT, str(case))


@functools.cache
def _whole() -> tuple[bytes, dict[str, Any]]:
    return checkpoint().read_bytes(), torch.load(checkpoint(), weights_only=True)


def _write(path: Path, kind: str, how: Any, marker: Path) -> dict[str, Any]:
    """Write a damaged checkpoint, and return the content that may be read from it."""
    whole, content = _whole()
    data = bytearray(whole)
    match kind:
        case "bits":
            for place, bit in how:
                data[place * len(data) // _WHOLE] ^= 1 << bit
        case "bytes":
            at = how[0] * len(data) // _WHOLE
            data[at : at + len(how[1])] = how[1]
        case "cut":
            at = how[0] * len(data) // _WHOLE
            del data[at : at + how[2] if how[1] == "middle" else None]
        case "splice":
            source, target = (place * len(data) // _WHOLE for place in how[:2])
            data[target:target] = data[source : source + how[2]]
        case _:
            content = copy.deepcopy(content)
            _change(content, kind, how, marker)
            torch.save(content, path)
            return content
    path.write_bytes(data)
    return content


def _change(content: dict[str, Any], kind: str, how: Any, marker: Path) -> None:
    if kind == "pickle":
        part = _at(list(content), how)
        content[part] = _Payload(str(marker))
        return
    place = how if isinstance(how, int) else how[0]
    if kind == "nan":
        weights = [
            value for name, value in content["state_dict"].items() if value.is_floating_point() and value.numel()
        ]
        _at(weights, place).view(-1)[place % 2] = torch.nan if place % 3 else torch.inf
    elif kind == "edit":
        holder, key = _at(list(_leaves(content)), place)
        holder[key] = _edited(holder[key])
        return
    elif kind == "class":
        config = content["lieattn"]["config"]
        specs = [(h, k) for h, k in _leaves(config, inner=True) if isinstance(h[k], dict) and "class_path" in h[k]]
        holder, key = _at(specs, place)
        command = f"touch {marker}"
        holder[key] = {"class_path": how[1], "init_args": {"command": command, "args": command.split()}}
    else:
        holder, key = _at(list(_leaves(content, inner=True)), place)
        holder[key] = how[1]
    if isinstance(content.get("lieattn"), dict):
        add_digests(content)


def _at(items: list[Any], place: int) -> Any:
    return items[place * len(items) // _WHOLE]


def _leaves(value: Any, *, inner: bool = False):
    """Yield the places of all values as (container, key), including containers if ``inner``."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(pairs):
        holds = isinstance(item, (dict, list))
        if inner or not holds:
            yield value, key
        if holds:
            yield from _leaves(item, inner=inner)


def _edited(value: Any) -> Any:
    if isinstance(value, Tensor):
        changed = value.clone().reshape(-1)
        changed.view(torch.uint8)[:1] ^= 1
        return changed.reshape(value.shape) if value.numel() else torch.zeros(1)
    if isinstance(value, bool) or value is None:
        return not value
    return value + 1 if isinstance(value, (int, float)) else f"{value}x"


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and bool((one.reshape(-1) == other.reshape(-1)).logical_or(one.reshape(-1).isnan()).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other or one != one


TARGETS = {"checkpoints": Target("damaged checkpoints", _cases(), _check, long=2000, quick=40)}
