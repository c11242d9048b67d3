"""The benchmarks run and compare equivalent computations. No test asserts a time."""

import copy
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lieattn.bench import (
    _attention,
    _epochs,
    _fibers,
    _gsa_net,
    _measure,
    _peers,
    _roofline,
    _scaling,
    _threads,
    _whole_clouds,
)
from lieattn.cli import main
from lieattn.groups import cyclic
from lieattn.models import GSANet
from lieattn.testing import randomize


@pytest.fixture
def small(monkeypatch):
    others = {
        _peers: {"PEERS": {"missing": "a_package_that_is_missing"}},
        _threads: {"_TURNS": 1, "fresh_process": lambda: ThreadPoolExecutor(1)},
    }
    for module in (_attention, _scaling, _peers, _roofline, _threads, _whole_clouds, _epochs, _fibers):
        for name, value in {**module.SMALL, **others.get(module, {})}.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("lieattn.bench._measure.peak_memory", lambda build: 1.0)


@pytest.mark.parametrize(
    "name",
    [
        *("attention", "scaling", "peers", "roofline", "threads", "whole-clouds", "fibers"),
        pytest.param("epochs", marks=pytest.mark.slow),
    ],
)
def test_benchmark_runs(name, small, tmp_path, capsys):
    path = tmp_path / "records.json"
    assert main(["bench", name, "--json", str(path), "--repeats", "1"]) == 0
    records = json.loads(path.read_text())
    assert records
    for record in records:
        assert record["case"]
        assert record["way"]
        assert record["step_ms"] > 0
    printed = capsys.readouterr().out
    assert str(records[0]["case"]) in printed
    if name == "scaling":
        assert "exponent of time in points" in printed
    if name == "peers":
        assert "skipped missing: not installed" in printed


def test_a_memory_that_is_not_told_is_null(small, monkeypatch, tmp_path):
    """JSON has no NaN, and readers other than Python's refuse it."""
    monkeypatch.setattr("lieattn.bench._measure.peak_memory", lambda build: float("nan"))
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
    assert main(["bench", "threads", "--device", "cuda"]) == 2
    assert "threads measures the cores of this machine" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["bench", "attention", "--device", "cuda"]) == 2
        assert "torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["attention", "scaling", "roofline", "whole-clouds", "epochs"])
def test_benchmark_runs_on_a_gpu(name, small, capsys):
    assert main(["bench", name, "--device", "cuda", "--repeats", "1"]) == 0


@pytest.mark.slow
def test_gpu_day_has_a_dry_run(tmp_path):
    pytest.importorskip("triton")
    script = Path(__file__).parents[1] / "examples" / "gpu_day.sh"
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
    script = Path(__file__).parents[1] / "examples" / "gpu_day.sh"
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
    for module in (_attention, _roofline, _threads):
        for name in module.SMALL:
            monkeypatch.setattr(module, name, getattr(module, name))  # restored after the test
    monkeypatch.setattr(_measure, "_TOYS", [])
    _measure.use_toy_sizes([_roofline.__name__, *_roofline.SHRINKS])
    with _measure.fresh_process() as process:
        assert process.submit(_sizes).result() == _sizes() == (1, 64)


def _sizes():
    return _attention.IMAGES["cpu"], _roofline._MATRIX["cpu"]


def test_memory_that_was_not_measured_is_a_dash():
    known = _measure.Record("case", "way", 2.0, 1.0, float("nan"), 0.0, 1, 1)
    assert _measure.table([known]).splitlines()[-1].split() == ["case", "way", "2.0", "1.0", "-", "0%", "1.0x", "-"]
