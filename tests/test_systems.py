"""Windows, macOS and clusters, as far as Linux can pretend to be them: encodings, missing functions, closed folders."""

from __future__ import annotations

import ast
import dataclasses
import errno
import io
import os
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.accelerators import MPSAccelerator

from lieattn.cli import _machine, main, report
from lieattn.compare._build import make_trainer
from lieattn.compare._settings import settings_from
from lieattn.geometry import Radius
from lieattn.ops.kernels import _compiled
from lieattn.train import UsageError
from tests.cases import short_training
from tests.test_cli import folder_of_user

pytestmark = short_training

ROOT = Path(__file__).parent.parent
SETS = {name: {"class_path": "X"} for name in ("train", "val", "test")}


def test_text_files_are_opened_with_their_encoding():
    """Otherwise it is that of the system, and on Windows not UTF-8."""
    found = []
    paths = [path for folder in ("lieattn", "datasets", "examples") for path in (ROOT / folder).rglob("*.py")]
    for path in paths:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or any(key.arg in ("encoding", None) for key in call.keywords):
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            modes = {arg.value for arg in call.args if isinstance(arg, ast.Constant)}
            text = isinstance(call.func, ast.Attribute) and name in ("read_text", "write_text")
            opened = name in ("open", "fdopen") and modes & {"r", "w", "a", "x"}
            temporary = name in ("NamedTemporaryFile", "TemporaryFile") and modes & {"w", "w+"}
            if text or opened or temporary or (isinstance(call.func, ast.Name) and name == "open" and not modes):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert found == []


def test_lists_are_printed_in_any_encoding(monkeypatch):
    """Signs that the encoding of a file or pipe lacks are escaped."""
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", pipe)
    assert main(["models"]) == 0
    pipe.flush()
    assert b"R^d \\u22ca H" in pipe.buffer.getvalue()


def raised(text: str) -> KeyError:
    """Return an error with a traceback."""
    try:
        raise KeyError(text)
    except KeyError as error:
        return error


def test_tracebacks_with_any_characters_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = os.fsdecode(b"energ\xff")  # of a file, not in UTF-8
    assert report("fit", raised(f"{name} ⋊")) == 1
    (written,) = tmp_path.iterdir()
    assert "⋊" in written.read_text(encoding="utf-8")
    assert f"traceback: {written}" in capsys.readouterr().err


def test_tracebacks_are_shown_if_no_folder_is_writable(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert report("fit", raised("energy")) == 1
    told = capsys.readouterr().err
    assert told.startswith("lieattn fit: KeyError: 'energy'\n")
    assert "traceback: Traceback (most recent call last)" in told


class OnApplesGPU(torch.Tensor):
    """A tensor that pretends to be there."""

    @staticmethod
    def __new__(cls, here):
        return torch.Tensor._make_wrapper_subclass(cls, here.shape, device="mps", dtype=here.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")


def test_points_on_a_device_without_float64():
    with pytest.raises(NotImplementedError, match="pos: geometry is computed in float64, which device mps lacks; move"):
        Radius(1.0)(OnApplesGPU(torch.zeros(3, 2)))


def test_automatic_devices_have_float64(tmp_path, monkeypatch, capsys):
    """Lightning would choose Apple's GPU, if there is one."""
    folder_of_user(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    content = yaml.safe_load((tmp_path / "run.yaml").read_text(encoding="utf-8"))
    del content["trainer"]["accelerator"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    assert main(["fit", "--config", "run.yaml"]) == 0
    settings = settings_from(
        {"models": {"a": {"class_path": "X"}}, "task": {"class_path": "X"}, "data": SETS, "budget": {"steps": 1}}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a GPU that is not used, as in `lieattn compare`
        assert make_trainer(settings).strategy.root_device.type == "cpu"
    with pytest.raises(UsageError, match="quantum"):
        make_trainer(dataclasses.replace(settings, trainer={"accelerator": "quantum"}))


def test_jobs_do_not_exceed_the_cases(monkeypatch, capsys):
    """Windows allows at most 61 processes."""
    asked = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, jobs, mp_context):
            asked.append(jobs)
            super().__init__(1)

    monkeypatch.setattr(_machine, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(_machine, "compile_case", lambda case, dtype: 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    assert main(["warm-up", "--jobs", "128"]) == 0
    assert main(["warm-up"]) == 0
    assert asked == [len(_machine._CASES), 3]


def test_kernels_that_another_process_replaces(tmp_path, monkeypatch):
    """Windows refuses access to a file in use. That says nothing about the folder."""
    cache = _compiled._Cache.__new__(_compiled._Cache)
    cache._cache_path = str(tmp_path)
    monkeypatch.setattr(_compiled, "_WINDOWS", True)
    monkeypatch.setattr(_compiled, "_told", set())
    with cache._guard_against_spurious_io_errors():
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.warns(UserWarning, match="cannot be stored here"), cache._guard_against_spurious_io_errors():
        raise OSError(errno.ENOSPC, "No space left on device")
