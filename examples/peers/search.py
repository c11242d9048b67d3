"""Search of learning rates for all models of a comparison in the same way, by their results on the validation set.

python peers/search.py --config configs/compare_base.yaml configs/compare_molecules.yaml peers/homo.yaml --root DIR \
    --seconds 8 --models PaiNN EGNN

The search is a comparison of every model, at its matched width, with every rate, with one seed and very few test
clouds. The same command continues an interrupted search. A table is written to the standard output, and the records are
written to ``runs/rates_NAME``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from lieattn.cli import main
from lieattn.compare import Settings, match_models, read_settings
from lieattn.train import UsageError


def searched(settings: Settings, rates: list[float], seconds: float) -> dict[str, Any]:
    """Return the settings of the search in the form of a configuration file."""
    content = dataclasses.asdict(settings)
    models = {}
    for name, (model, _) in match_models(settings).items():
        for rate in rates:
            optimizer = model.optimizer or settings.optimizer or {"class_path": "torch.optim.AdamW"}
            arguments = {**optimizer.get("init_args", {}), "lr": rate}
            changed = {"optimizer": {"class_path": optimizer["class_path"], "init_args": arguments}, "width": None}
            models[f"{name} {rate:g}"] = {**dataclasses.asdict(model), **changed, "adjust": {}}
    budget = {**content["budget"], "steps": None, "seconds": seconds}
    few = {"budget": budget, "seeds": settings.seeds[:1], "memory": False, "equivariance": {"clouds": 1, "elements": 1}}
    limit = {**content["data"]["limit"], "test": 8}
    data = {**content["data"], "limit": limit, "rotate_test": False}
    match = {**content["match"], "tolerance": 0.99}  # models already have their matched widths
    return {**content, **few, "match": match, "data": data, "models": models}


def run() -> None:
    """Read the command line, search, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", nargs="+", required=True)
    parser.add_argument("--root")
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.002, 0.004, 0.008])
    parser.add_argument("--seconds", type=float, default=8)
    options, changes = parser.parse_known_args()
    sys.path.append(os.getcwd())  # class paths name its package `peers`, as in `lieattn compare`
    name = Path(options.config[-1]).stem
    words = iter(change.removeprefix("--") for change in changes)
    changes = [word if "=" in word else f"{word}={next(words, '')}" for word in words]  # --NAME=VALUE or --NAME VALUE
    settings = read_settings(options.config, options.root, changes)
    if unknown := [key for key in options.models or () if key not in settings.models]:
        raise UsageError(f"--models: expected some of {', '.join(settings.models)}, got {unknown[0]!r}")
    chosen = {key: model for key, model in settings.models.items() if key in (options.models or settings.models)}
    folder = Path("runs") / f"rates_{name}"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "search.yaml"
    content = searched(dataclasses.replace(settings, models=chosen), options.rates, options.seconds)
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    command = ["compare", "--config", str(file), "--out", str(folder), "--json", str(folder / "comparison.json")]
    if status := main(command):
        sys.exit(status)
    cells = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        print(f"{cell['model']}: {cell.get('validation')} in {cell.get('steps')} steps")


if __name__ == "__main__":
    try:
        run()
    except UsageError as error:
        sys.exit(f"search: {error}")
