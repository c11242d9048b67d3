"""Run an experiment for every target of QM9, or every molecule of rMD17, and report the errors in their units.

    python examples/papers/every.py examples/papers/homogeneous/qm9_lieconv_t3.yaml
    python examples/papers/every.py examples/papers/homogeneous/rmd17.yaml --values aspirin ethanol

All other arguments are passed to each ``lieattn fit``, for example ``--config examples/papers/small.yaml``. The errors
are those of the weights with the smallest validation error. They are printed, and written to ``errors.json`` in the
folder of the run, which also contains a folder for each value. Errors of other values that are there are kept; for
another seed give another folder, with ``--trainer.default_root_dir``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer
from torch_geometric.loader import DataLoader

from lieattn.cli import main as lieattn
from lieattn.train import UsageError, load_data, load_task
from lieattn_datasets import MD17_MOLECULES

# The argument of each data set that selects a target or molecule, and all its values.
KNOWN = {
    "QM9": ("targets", ("alpha", "gap", "homo", "lumo", "mu", "cv", "g298", "h298", "r2", "u298", "u0", "zpve")),
    "RMD17": ("molecule", MD17_MOLECULES),
}


def main(
    config: str, values: Sequence[str] = (), options: Sequence[str] = (), place: str | None = None
) -> dict[str, dict[str, float | str]]:
    """Train and test the network for each value, in a folder of ``place``; print and return the errors."""
    content = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    data = content["data"]
    if isinstance(data, str):
        data = yaml.safe_load((Path(config).parent / data).read_text(encoding="utf-8"))
    name = data["train"]["class_path"].rpartition(".")[2]
    if name not in KNOWN:
        raise UsageError(f"config: expected a file that trains on {' or '.join(KNOWN)}, got {config} with {name}")
    option, known = KNOWN[name]
    folder, found = Path(place or content["trainer"]["default_root_dir"]), dict[str, dict[str, float | str]]()
    for value in values or known:
        run = folder / value
        chosen = [f"--data.{stage}.{option}={value}" for stage in ("train", "val", "test")]
        if status := lieattn(["fit", "--config", config, *options, *chosen, f"--trainer.default_root_dir={run}"]):
            raise SystemExit(status)
        checkpoint = run / "checkpoints" / "best.ckpt"
        test: Any = load_data(checkpoint)
        quiet: dict[str, Any] = dict.fromkeys(
            ("logger", "enable_progress_bar", "enable_model_summary", "inference_mode"), False
        )
        errors = Trainer(**quiet).test(load_task(checkpoint), DataLoader(test, batch_size=100), verbose=False)[0]
        figures = {name.removeprefix("test/"): error for name, error in errors.items() if "error" in name}
        found[value] = {**figures, "unit": ", ".join(test.target_units)}
        print(f"{value:16}" + ", ".join(f"{name} {error:.4g}" for name, error in figures.items()), found[value]["unit"])
        written = folder / "errors.json"
        before = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
        written.write_text(json.dumps({**before, value: found[value]}, indent=1), encoding="utf-8")
    return found


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style, allow_abbrev=False)
    parser.add_argument("config", help="qm9_*.yaml or rmd17.yaml of examples/papers/homogeneous")
    parser.add_argument("--values", nargs="+", default=(), help="targets or molecules (default: all)")
    parser.add_argument("--trainer.default_root_dir", dest="place", metavar="DIR", help="folder of the run")
    given, others = parser.parse_known_args()
    try:
        main(given.config, given.values, others, given.place)
    except (UsageError, FileNotFoundError) as error:
        sys.exit(f"every: {error}")
