"""Calls of public functions, constructors and methods with one or two bad arguments."""

from __future__ import annotations

import copy
import dataclasses
import linecache
import os
import re
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Data

from lieattn.geometry import AllPairs, LiftedGraph, Neighbors, Radius, lift
from lieattn.groups import FiniteGroup, LieGroup, cyclic, octahedral
from lieattn.train import UsageError
from tests.fuzz._recipes import ALIASES, PLACES, Entrance, entrance, is_exempt
from tests.fuzz._target import Finding, Target, Verdict

_LIBRARY = ("/lieattn/", "/lieattn_datasets/")
_EXPECTED = (ValueError, TypeError, KeyError, IndexError, OSError, NotImplementedError, ImportError)

NAMES = sorted(name for name in PLACES if not is_exempt(name))


def bad_values(valid: Any) -> dict[str, Any]:
    """Return values that differ from the valid one, each with a short name. Some of them are also valid."""
    bad: dict[str, Any] = {
        "None": None,
        "a string": "bad",
        "an empty list": [],
        "a dict": {},
        "an object": object(),
        "a class": Radius,
        "a float": 2.5,
        "True": True,
        "complex": 1j,
        "an array": np.ones(3),
        "a tensor": torch.zeros(3),
        "-1": -1,
        "0": 0,
        "nan": float("nan"),
    }
    if isinstance(valid, Tensor):
        bad |= _bad_tensors(valid)
    elif isinstance(valid, Data):
        bad |= {f"{name} {word}": _with(valid, name, value) for name, word, value in _bad_attributes(valid)}
    elif isinstance(valid, (int, float)):
        bad |= {"inf": float("inf"), "a number as a string": "3", "-7": -7, "1e300": 1e300, "1e-300": 1e-300}
        bad["a tensor of it"] = torch.tensor(valid)
    elif isinstance(valid, str):
        bad |= {"nothing": "", "bytes": b"mean", "as a list": [valid]}
    elif isinstance(valid, (list, tuple)):
        bad |= {"of None": [None], "of strings": ["a", "b"], "nested": [list(valid)], "of nan": [float("nan")] * 2}
        bad |= {"twice as long": list(valid) * 2, "negative": [-1] * len(valid)}
    elif isinstance(valid, dict):
        bad |= {"of None": dict.fromkeys(valid), "other keys": {1: 2}, "of strings": dict.fromkeys(valid, "a")}
    elif isinstance(valid, FiniteGroup | LieGroup):
        bad |= {"a group on another space": octahedral() if valid.dim == 2 else cyclic(4), "its name": valid.name}
        bad["another group"] = cyclic(8)
    elif isinstance(valid, LiftedGraph):
        bad |= {"of another group": lift(valid.pos, cyclic(8), Radius(1.5)) if valid.pos.shape[1] == 2 else None}
        bad |= {"of other points": lift(torch.randn(3, 2), cyclic(4), AllPairs()), "its positions": valid.pos}
        bad |= {"its neighbors": valid.neighbors, "in another dtype": valid.astype(torch.float64)}
        bad["elsewhere"] = valid.to("meta")
    elif isinstance(valid, Neighbors):
        bad |= {"of another cloud": AllPairs()(torch.randn(3, 2)), "edges": valid.edge_index}
        bad["elsewhere"] = valid.to("meta")
    elif isinstance(valid, nn.Module):
        bad |= {"another module": nn.Linear(2, 3), "a function": lambda x: x}
    elif isinstance(valid, torch.dtype):
        bad |= {"int64": torch.int64, "bool": torch.bool}
    return bad


def _bad_tensors(valid: Tensor) -> dict[str, Tensor | Any]:
    bad: dict[str, Any] = {
        "with an axis more": valid[None],
        "empty": valid[:0] if valid.ndim else valid.new_zeros(0),
        "elsewhere": valid.to("meta"),
        "as an array": valid.numpy(),
        "as a list": valid.tolist(),
        "half": valid.half(),
        "bfloat16": valid.bfloat16(),
        "float64": valid.double(),
        "int64": valid.long(),
        "int32": valid.int(),
        "bool": valid.bool(),
        "complex": valid.cfloat(),
        "of numbers below 0": -valid.float() - 1,
        "too large": valid + 1000 if valid.dtype != torch.bool else valid,
        "negative": -valid - 1 if valid.dtype != torch.bool else valid,
    }
    if valid.ndim:
        bad |= {"its first row": valid[0], "a row less": valid[:-1], "twice": torch.cat([valid, valid])}
        bad |= {"narrower": valid[..., :-1], "wider": torch.cat([valid, valid], dim=-1)}
    if valid.ndim > 1:
        bad["transposed"] = valid.transpose(0, -1)
    if valid.is_floating_point():
        bad |= {"of nan": valid * float("nan"), "with inf": valid.clone().index_fill_(0, torch.tensor(0), float("inf"))}
    return bad if valid.ndim else {word: value for word, value in bad.items() if word != "with inf"}


def _bad_attributes(valid: Data) -> Iterator[tuple[str, str, Any]]:
    for name in ("pos", "x", "batch"):
        if isinstance(valid.get(name), Tensor):
            yield name, "absent", None
            yield name, "a string", "bad"
            for word, value in _bad_tensors(valid[name]).items():
                yield name, word, value


def _with(data: Data, name: str, value: Any) -> Data:
    changed = copy.copy(data)
    changed[name] = value
    return changed


@st.composite
def _cases(draw: st.DrawFn) -> tuple[str, dict[str, str]]:
    """Draw the name of an entry point, and names of bad values for one or two of its arguments."""
    name = draw(st.sampled_from(NAMES))
    valid = entrance(name).arguments
    names = draw(st.lists(st.sampled_from(sorted(valid)), min_size=1, max_size=2, unique=True))
    return name, {argument: draw(st.sampled_from(list(bad_values(valid[argument])))) for argument in names}


def check(case: tuple[str, dict[str, str]]) -> Finding | Verdict:
    """Call an entry point with valid arguments except for those of the case, and judge the outcome."""
    name, words = case
    tried = entrance(name)
    replaced = {argument: bad_values(tried.arguments[argument])[word] for argument, word in words.items()}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            found = tried.call({**tried.arguments, **replaced})
        except Exception as error:
            if is_named(error, tried, replaced):
                return Verdict.NAMED
            raise
        finally:
            os.chdir(before)
    if not is_finite([*tried.arguments.values(), *replaced.values()]) or is_finite(found):
        return Verdict.CORRECT
    return Finding(Verdict.SILENT, f"not finite: {case}")


def is_named(error: Exception, tried: Entrance, replaced: Mapping[str, Any]) -> bool:
    """Return whether the library refused the call on purpose, in a message with the name of an argument."""
    text = str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    names = [*replaced, *(alias for argument in replaced for alias in ALIASES.get(argument, ()))]
    given = {**tried.arguments, **replaced}.values()
    entries = [entry for value in given for entry in (value if isinstance(value, list) else [value])]
    files = [str(entry) for entry in entries if isinstance(entry, str | Path) and str(entry)]
    if isinstance(error, OSError | UsageError) and any(file in text for file in files):
        return True
    if any(text.startswith(f"{Path(entry)} is ") for entry in entries if isinstance(entry, str)):  # a file, or "."
        return True
    raised = linecache.getline(frame.filename, frame.lineno or 0).strip().startswith("raise")
    on_purpose = any(part in frame.filename for part in _LIBRARY) and raised
    # A missing file is also a reason to refuse the call.
    if any(isinstance(value, str) and value == "nowhere" for value in tried.arguments.values()):
        names += ["root", "path", "nowhere"]
    if "argument" in tried.arguments:  # a check, whose argument is the name for its messages
        names.append(str({**tried.arguments, **replaced}["argument"]))
    if tried.later:  # a constructor whose object was called: messages may also name the arguments of that call
        names += tried.later
    said = any(re.search(rf"(?<![a-zA-Z_]){re.escape(word)}(?![a-zA-Z_])", text) for word in names)
    return isinstance(error, _EXPECTED) and on_purpose and said


def is_finite(value: Any) -> bool:
    """Return whether all tensors and numbers in a value are finite."""
    if isinstance(value, Tensor):
        return value.device.type == "meta" or not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, float):
        return bool(np.isfinite(value))
    if isinstance(value, np.ndarray) and value.dtype.kind in "fc":
        return bool(np.isfinite(value).all())
    if isinstance(value, Data):
        return all(is_finite(part) for part in value.to_dict().values())
    if isinstance(value, Mapping):
        return all(is_finite(part) for part in value.values())
    if isinstance(value, list | tuple):
        return all(is_finite(part) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(is_finite(getattr(value, field.name, None)) for field in dataclasses.fields(value))
    return True


TARGETS = {"calls": Target("calls of public functions with bad arguments", _cases(), check, long=10_000, unnamed=0.01)}
