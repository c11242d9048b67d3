"""The benchmarks run and compare equivalent computations. No test asserts a time."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lieattn.bench import BENCHMARKS, _literal, _measure, _operators
from lieattn.cli import main
from lieattn.groups import cyclic
from lieattn.models import GSANet
from lieattn.testing import randomize
from tests.cases import some

ROOT = Path(__file__).parents[1]
REMARKS = {
    "scaling": "exponent of time in points",
    "attentive": "2x2p4: with attention a step takes",
    "epochs": "an epoch of GSA-Net R4, step: 1250 steps",
}


@pytest.fixture
def memory(monkeypatch):
    """Measure no memory, which takes a process for each way."""
    monkeypatch.setattr(_measure, "peak_memory", lambda build: 1.0)


@pytest.mark.filterwarnings("ignore::lieattn.geometry.DegenerateFramesWarning")  # small clouds are nearly symmetric
@pytest.mark.parametrize("name", some(BENCHMARKS, BENCHMARKS.keys() - {"epochs"}))
def test_benchmark_runs(name, memory, tmp_path, capsys):
    path = tmp_path / "records.json"
    assert main(["bench", name, "--small", "--json", str(path)]) == 0
    records = json.loads(path.read_text())
    assert records
    assert all(record["case"] and record["way"] for record in records)
    assert all(record["step_ms"] > 0 for record in records)
    printed = capsys.readouterr().out
    assert str(records[0]["case"]) in printed
    assert REMARKS.get(name, "") in printed


def test_a_memory_that_is_not_told_is_null(monkeypatch, tmp_path, capsys):
    """JSON has no NaN, and readers other than Python's refuse it."""
    monkeypatch.setattr(_measure, "peak_memory", lambda build: float("nan"))
    path = tmp_path / "records.json"
    assert main(["bench", "whole-clouds", "--small", "--json", str(path)]) == 0
    assert {record["peak_mb"] for record in json.loads(path.read_text(), parse_constant=pytest.fail)} == {None}
    assert capsys.readouterr().out.splitlines()[-2].split()[4::3] == ["-", "-"]


@pytest.mark.parametrize("order", [1, 4])
def test_cubic_formula_computes_the_same(order):
    network = GSANet.rot_mnist(cyclic(order), size=3, heads=2, channels=6)
    network = randomize(network.double(), spread=0.3)
    batch = _literal.images_of(1, 28)
    batch.x, batch.pos = batch.x.double(), batch.pos.double()
    cubic = _literal.literal(copy.deepcopy(network))
    with torch.no_grad():
        torch.testing.assert_close(cubic(batch), network(batch), rtol=1e-10, atol=1e-10)


def test_ways_of_attention_compute_the_same():
    sizes = BENCHMARKS["attention"].small
    images = [next(_operators.on_images(4, way, sizes)()) for way in ("plain", "unfold")]
    clouds = [next(_operators.in_frames((3, 7, 2), way, (1, 2))()) for way in ("scatter", "torch", "dense", "kernel")]
    for losses in (images, clouds):
        for loss in losses[1:]:
            torch.testing.assert_close(loss, losses[0], rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["attention", "scaling", "whole-clouds", "epochs"])
def test_benchmark_runs_on_a_gpu(name, capsys):
    assert main(["bench", name, "--small", "--device", "cuda"]) == 0


def run_gpu_day(*arguments):
    command = [str(ROOT / "examples" / "gpu_day.sh"), *map(str, arguments)]
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_gpu_day_has_a_dry_run(tmp_path):
    pytest.importorskip("triton")
    done = run_gpu_day("--dry-run", tmp_path)
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
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_day_needs_a_gpu(tmp_path):
    done = run_gpu_day(tmp_path)
    assert done.returncode == 2
    assert "torch finds no CUDA device here" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such"], "invalid choice: 'no-such'"),
        (["attention", "--repeats", "0"], "--repeats: expected an integer of at least 1, got '0'"),
        (["fibers", "--device", "cuda"], "fibers measures the cores of this machine"),
        (["attention", "--device", "cuda"], "torch finds no CUDA device"),
    ],
)
def test_bad_usage(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
