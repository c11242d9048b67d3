"""The examples run, offline, on little data."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

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
