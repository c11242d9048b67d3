"""The examples run, offline, on little data."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from lieattn_datasets import ImagePoints

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


def test_rotated_digits(tmp_path, capsys):
    example = load("rotated_digits")
    results = example.main(example.Config(epochs=1, digits=32, channels=8, heads=2, out=str(tmp_path)))
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1].startswith("RESULT ")
    assert json.loads(lines[-1].removeprefix("RESULT ")) == results
    assert set(results) == {"Z2", "C4", "C8"}
    for name, angles in (("C4", "accuracy_group_angles"), ("C8", "accuracy_45_degrees")):
        assert results[name][angles] == results[name]["accuracy_upright"]
        assert results[name]["equivariance_error"] < 1e-4
    assert results["Z2"]["change_45_degrees"] > 1e-3
    sizes = [result["parameters"] for result in results.values()]
    assert max(sizes) < 1.03 * min(sizes)
    pictures = [line.removeprefix("picture: ") for line in lines if line.startswith("picture: ")]
    assert len(pictures) == 4
    assert all(Path(path).stat().st_size > 10_000 for path in pictures)


def test_affine_self_convolution(monkeypatch, capsys, tmp_path):
    example = load("affine_self_convolution")
    images = np.random.default_rng(0).integers(256, size=(12, 8, 8, 3), dtype=np.uint8)
    dataset = ImagePoints(images, np.arange(12) % 10)
    monkeypatch.setattr(example, "load", lambda config: (dataset, dataset))
    config = example.Config(epochs=2, networks="ResNet,p4 ASC", batch_size=6, out=str(tmp_path))
    results = example.main(config)
    assert json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT ")) == results
    assert list(results) == ["ResNet", "p4 ASC"]
    assert results["p4 ASC"]["unchanged_by_quarter_turn"] == 1.0
