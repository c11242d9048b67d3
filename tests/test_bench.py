"""The benchmarks run and compare equivalent computations. No test asserts a time."""

import copy
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lieattn.bench import BENCHMARKS, _attention, _gsa_net, _measure, _whole_clouds
from lieattn.cli import main
from lieattn.groups import cyclic
from lieattn.models import GSANet
from lieattn.testing import randomize
from tests.cases import some

MODULES = {name: importlib.import_module(f"lieattn.bench._{name.replace('-', '_')}") for name in BENCHMARKS}
ROOT = Path(__file__).parents[1]


@pytest.fixture
def small(monkeypatch):
    """Toy sizes, and no processes in which memory is measured."""
    for module in MODULES.values():
        for name, value in module.SMALL.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(_measure, "peak_memory", lambda build: 1.0)


REMARKS = {
    "scaling": "exponent of time in points",
    "fibers": "parts are those of one block",
    "attentive": "2x2p4: with attention a step takes",
    "epochs": "an epoch of GSA-Net R4, step: 1250 steps",
}


@pytest.mark.filterwarnings("ignore::lieattn.geometry.DegenerateFramesWarning")  # small clouds are nearly symmetric
@pytest.mark.parametrize("name", some(BENCHMARKS, BENCHMARKS.keys() - {"epochs", "lifts", "scales"}))
def test_benchmark_runs(name, small, tmp_path, capsys):
    path = tmp_path / "records.json"
    assert main(["bench", name, "--json", str(path), "--repeats", "1"]) == 0
    records = json.loads(path.read_text())
    assert records
    assert all(record["case"] and record["way"] for record in records)
    assert name in ("lifts", "scales") or all(record["step_ms"] > 0 for record in records)
    printed = capsys.readouterr().out
    assert str(records[0]["case"]) in printed
    assert REMARKS.get(name, "") in printed


def test_a_memory_that_is_not_told_is_null(small, monkeypatch, tmp_path):
    """JSON has no NaN, and readers other than Python's refuse it."""
    monkeypatch.setattr(_measure, "peak_memory", lambda build: float("nan"))
    path = tmp_path / "records.json"
    assert main(["bench", "whole-clouds", "--json", str(path), "--repeats", "1"]) == 0
    assert {record["peak_mb"] for record in json.loads(path.read_text(), parse_constant=pytest.fail)} == {None}


@pytest.mark.parametrize("order", [1, 4])
def test_cubic_formula_computes_the_same(order, monkeypatch):
    monkeypatch.setattr(_gsa_net, "SIDE", 28)
    monkeypatch.setattr(_gsa_net, "IMAGES", 1)
    network = GSANet.rot_mnist(cyclic(order), size=3, heads=2, channels=6)
    network = randomize(network.double(), spread=0.3)
    batch = _gsa_net.images()
    batch.x, batch.pos = batch.x.double(), batch.pos.double()
    cubic = _gsa_net.literal(copy.deepcopy(network))
    with torch.no_grad():
        torch.testing.assert_close(cubic(batch), network(batch), rtol=1e-10, atol=1e-10)


def test_unfolded_windows_compute_the_same(small):
    found = {way: next(_attention.build(4, way)()) for way in ("plain", "unfold")}
    torch.testing.assert_close(found["unfold"], found["plain"], rtol=1e-5, atol=1e-6)


def test_whole_clouds_compute_the_same(small):
    losses = [next(_whole_clouds.build(3, 7, 2, way)()) for way in ("scatter", "torch", "dense", "kernel")]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-5, atol=1e-6)


def test_devices(capsys):
    assert main(["bench", "fibers", "--device", "cuda"]) == 2
    assert "fibers measures the cores of this machine" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["bench", "attention", "--device", "cuda"]) == 2
        assert "torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["attention", "scaling", "whole-clouds", "epochs"])
def test_benchmark_runs_on_a_gpu(name, small, capsys):
    assert main(["bench", name, "--device", "cuda", "--repeats", "1"]) == 0


@pytest.mark.slow
def test_gpu_day_has_a_dry_run(tmp_path):
    pytest.importorskip("triton")
    script = ROOT / "examples" / "gpu_day.sh"
    environment = os.environ | {"PYTHON": sys.executable}
    command = [str(script), "--dry-run", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_day.json").read_text())
    assert list(report["steps"]) == ["info", "tests", "bench-whole-clouds"]
    assert all(step["status"] == 0 for step in report["steps"].values())
    table = (tmp_path / "gpu_day.md").read_text()
    records = report["steps"]["bench-whole-clouds"]["records"]
    assert records
    for record in records:
        assert f"| {record['case']} | {record['way']}" in table
    assert " passed" in (tmp_path / "tests.log").read_text()


@pytest.mark.slow
def test_gpu_day_needs_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    script = ROOT / "examples" / "gpu_day.sh"
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run([str(script), str(tmp_path)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "torch finds no CUDA device here" in done.stderr


def test_bad_usage(capsys):
    for arguments in (["no-such"], ["attention", "--repeats", "0"]):
        assert main(["bench", *arguments]) == 2
    assert "--repeats: expected an integer of at least 1, got '0'" in capsys.readouterr().err


@pytest.mark.slow
def test_toy_sizes_are_those_of_processes_too(monkeypatch):
    """The memory was measured at full size, beside times of the toy size."""
    for name in _attention.SMALL:
        monkeypatch.setattr(_attention, name, getattr(_attention, name))  # restored after the test
    monkeypatch.setattr(_measure, "_TOYS", [])
    _measure.use_toy_sizes(_attention.__name__)
    monkeypatch.setattr(_measure, "_peak", _sizes)
    assert _measure.peak_memory(None) == _sizes(None, 1) == 6


def _sizes(build, threads):
    return _attention.SIDE


def test_memory_that_was_not_measured_is_a_dash():
    known = _measure.Record("case", "way", 2.0, 1.0, float("nan"), 0.0, 1, 1)
    assert _measure.table([known]).splitlines()[-1].split() == ["case", "way", "2.0", "1.0", "-", "0%", "1.0x", "-"]
