"""The benchmarks run and compare like with like. Nothing here asserts a time."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lieattn.bench import _attention, _gsa_net, _peers, _roofline, _scaling, _threads
from lieattn.cli import main
from lieattn.groups import cyclic
from lieattn.models import GSANet
from lieattn.testing import randomize


@pytest.fixture
def small(monkeypatch):
    for module, sizes in (
        (_attention, {"IMAGES": 1, "SIDE": 6}),
        (_scaling, {"POINTS": (50, 100), "ORDERS": (1, 4), "NEIGHBORS": (4, 8)}),
        (_peers, {"SIZES": (20,), "PEERS": {"missing": "a_package_that_is_missing"}}),
        (_roofline, {"_MATRIX": 64, "_COPY": 1024}),
        (_threads, {"IMAGES": 2, "BUSY": (0, 1), "_TURNS": 1, "_process": lambda: ThreadPoolExecutor(1)}),
    ):
        for name, value in sizes.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(_scaling, "BASE", {"points": 50, "order": 4, "neighbors": 4})
    monkeypatch.setattr(_scaling.run, "__kwdefaults__", {"largest": 100})
    monkeypatch.setattr("lieattn.bench._measure.peak_memory", lambda build: 1.0)


@pytest.mark.parametrize("name", ["attention", "scaling", "peers", "roofline", "threads"])
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


def test_bad_usage(capsys):
    for arguments in (["no-such"], ["attention", "--repeats", "0"]):
        assert main(["bench", *arguments]) == 2
    assert "--repeats: expected an integer of at least 1, got '0'" in capsys.readouterr().err
