"""Measure a trained example on its test data: errors in the units of the literature, and equivariance errors.

    python examples/evaluate.py runs/TASK/checkpoints/best.ckpt [--task TASK] [--clouds 0]

TASK is the name of the folder in ``runs``: qm9_homo, qm9_dipole, rmd17_ethanol, properties, nbody, springs,
constellation, wind or sensors.
The data are the test set of the checkpoint, or its first ``--clouds`` items. The last line contains the results as
JSON. ``equivariance`` is the root mean square difference between the prediction for a randomly rotated cloud and the
rotated prediction, relative to the predictions. ``mse_over_time`` of springs is the error at each step of a roll-out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

from lieattn.groups import SO
from lieattn.models import energy_drift
from lieattn.train import PointSetTask, UsageError, load_data, load_task
from lieattn_datasets import Springs, TransformFields, WindOnSphere, spring_energy

KCAL_MOL = 43.3641153  # meV
ROLL_OUT = 100
BATCH = 50

Figures = dict[str, float | list[float]]


def predictions(task: PointSetTask, items: Sequence[Data], name: str) -> Tensor:
    """Return the predictions of one target for all items, in the units of the data."""
    parts = []
    for batch in DataLoader(list(items), batch_size=BATCH):
        with torch.no_grad():
            out = task(batch)
        parts.append(out[name] if isinstance(out, dict) else out)
    return torch.cat(parts)


def targets(items: Sequence[Data], name: str) -> Tensor:
    """Return one target of all items."""
    return torch.cat([item[name] for item in items])


def equivariance(task: PointSetTask, items: Sequence[Data], name: str, vectors: tuple[str, ...], turns: bool) -> float:
    """Return the relative root mean square difference of predictions for rotated clouds and rotated predictions.

    Predictions are rotated if ``turns`` is True.
    """
    generator = torch.Generator().manual_seed(0)
    moved, expected = [], []
    for item in items:
        dim = item.pos.shape[1]
        matrix = SO(dim).sample(1, generator=generator, dtype=torch.float64)[0]
        still = predictions(task, [item], name).double()
        moved.append(TransformFields(matrix, vectors=vectors)(item))
        expected.append((still.unflatten(-1, (-1, dim)) @ matrix.T).flatten(-2) if turns else still)
    wanted = torch.cat(expected)
    difference = predictions(task, moved, name).double() - wanted
    center = torch.zeros(()).double() if turns else wanted.mean(dim=0)
    return float(difference.norm() / (wanted - center).norm())


def qm9_homo(task: PointSetTask, items: Sequence[Data]) -> Figures:
    """Return the mean absolute error in meV."""
    error = predictions(task, items, "y") - targets(items, "y")
    return {"error_meV": float(error.abs().mean()), "equivariance": equivariance(task, items[:100], "y", (), False)}


def qm9_dipole(task: PointSetTask, items: Sequence[Data]) -> Figures:
    """Return mean absolute errors in debye, and of the direction in degrees for moments of more than 1 D."""
    found, true = predictions(task, items, "dipole"), targets(items, "dipole")
    lengths, long = true.norm(dim=1), true.norm(dim=1) > 1
    angle = torch.rad2deg(torch.cosine_similarity(found[long], true[long]).clamp(-1, 1).acos())
    return {
        "component_D": float((found - true).abs().mean()),
        "norm_D": float((found.norm(dim=1) - lengths).abs().mean()),
        "vector_D": float((found - true).norm(dim=1).mean()),
        "angle_degrees": float(angle.mean()),
        "zero_component_D": float(true.abs().mean()),
        "equivariance": equivariance(task, items[:100], "dipole", (), True),
    }


def rmd17_ethanol(task: PointSetTask, items: Sequence[Data]) -> Figures:
    """Return mean absolute errors of energies and of components of forces."""
    energy = float((predictions(task, items, "energy") - targets(items, "energy")).abs().mean())
    force = float((predictions(task, items, "force") - targets(items, "force")).abs().mean())
    return {
        "energy_kcal_mol": energy,
        "force_kcal_mol_A": force,
        "energy_meV": energy * KCAL_MOL,
        "force_meV_A": force * KCAL_MOL,
        "equivariance": equivariance(task, items[:100], "force", (), True),
    }


def properties(task: PointSetTask, items: Sequence[Data]) -> Figures:
    """Return mean absolute errors in eV, eV/Å, D and e, those of a constant, and changes under rotations."""
    figures: Figures = {}
    units = {"energy": "eV", "force": "eV_A", "dipole": "D", "charge": "e"}
    for name, unit in units.items():
        turns, true = name in ("force", "dipole"), targets(items, name)
        constant = 0.0 if turns else true.mean()
        found = predictions(task, items, name).reshape(true.shape)
        figures[f"{name}_{unit}"] = float((found - true).abs().mean())
        figures[f"constant_{name}_{unit}"] = float((true - constant).abs().mean())
        figures[f"equivariance_{name}"] = equivariance(task, items, name, (), turns)
    return figures


def nbody(task: PointSetTask, items: Sequence[Data]) -> Figures:
    """Return mean squared errors of coordinates, for the network and for motion on straight lines."""
    true = targets(items, "y")
    straight = torch.cat([item.pos + item.time * item.vel for item in items])
    return {
        "mse": float((predictions(task, items, "y") - true).square().mean()),
        "straight_mse": float((straight - true).square().mean()),
        "equivariance": equivariance(task, items[:100], "y", ("vel",), True),
    }


def springs(task: PointSetTask, items: Sequence[Data]) -> Figures:
    """Return mean squared errors over five points and on a roll-out, and drifts of true and learned energies on it."""
    five = predictions(task, items, "y") - targets(items, "y")
    whole = Springs("test", size=min(len(items), 100), chunk=None)
    batch = Batch.from_data_list([whole[index] for index in range(len(whole))])
    true, batch.time = batch.y[:, : ROLL_OUT + 1], batch.time[:, : ROLL_OUT + 1]
    with torch.no_grad():
        found = task.network(batch)
    error = (found - true).square().mean(dim=(0, 2))
    states = found.double().reshape(len(whole), -1, ROLL_OUT + 1, 4).transpose(1, 2).numpy()
    mass, stiffness = batch.x.double().reshape(len(whole), 1, -1, 2).unbind(-1)
    true_energy = spring_energy(mass.numpy(), stiffness.numpy(), states[..., :2], states[..., 2:]).T
    learned = [
        task.network.hamiltonian(  # type: ignore[operator]
            found[:, step, :2], found[:, step, 2:], batch.x[:, 0], batch.x, batch=batch.batch
        ).detach()
        for step in range(ROLL_OUT + 1)
    ]
    return {
        "five_points_mse": float(five.square().mean()),
        f"step_{ROLL_OUT}_mse": float(error[ROLL_OUT]),
        "step_1_mse": float(error[1]),
        "mse_over_time": error.tolist(),
        "true_energy_drift": energy_drift(torch.from_numpy(np.ascontiguousarray(true_energy))).relative,
        "learned_energy_drift": energy_drift(torch.stack(learned)).relative,
    }


def constellation(task: PointSetTask, items: Sequence[Data]) -> Figures:
    """Return the shares of correct counts, of items with four correct counts, and of the most frequent count."""
    right = predictions(task, items, "y").argmax(dim=-1) == targets(items, "y")
    most = max(float((targets(items, "y") == count).float().mean()) for count in range(3))
    return {
        "accuracy": float(right.float().mean()),
        "all_four": float(right.all(dim=1).float().mean()),
        "most_frequent": most,
        "equivariance": equivariance(task, items[:100], "y", (), False),
    }


def wind(task: PointSetTask, items: Sequence[Data]) -> Figures:
    """Return root mean square errors over the area in m/s, for the network, for its input, and for no wind."""
    known = "interpolated" if "interpolated" in items[0] else "wind"
    found, true, before = predictions(task, items, "y"), targets(items, "y"), targets(items, known)
    area = targets(items, "weight").double() * targets(items, "mask")

    def size(vectors: Tensor) -> float:
        return math.sqrt(float((area * vectors.double().square().sum(dim=1)).sum() / area.sum()))

    return {
        "rms_m_s": size(found - true),
        "interpolation_m_s" if known == "interpolated" else "persistence_m_s": size(before - true),
        "none_m_s": size(true),
        "equivariance": equivariance(task, items[:4], "y", WindOnSphere.vectors, True),
    }


FIGURES = (qm9_homo, qm9_dipole, rmd17_ethanol, properties, nbody, springs, constellation, wind)
TASKS: dict[str, Callable[[PointSetTask, Sequence[Data]], Figures]] = {task.__name__: task for task in FIGURES}
TASKS["sensors"] = wind
DATA = {
    "qm9_homo": ("QM9", "QM9Subset"),
    "qm9_dipole": ("QM9GFN2",),
    "rmd17_ethanol": ("RMD17", "RMD17Subset"),
    "properties": ("GFN2Molecules",),
    "nbody": ("NBodySimulated",),
    "springs": ("Springs",),
    "constellation": ("Constellation",),
    "wind": ("WindOnSphere",),
    "sensors": ("WindOnSphere",),
}
UNITS = {"qm9_homo": "meV", "rmd17_ethanol": "kcal/mol"}  # in the names of the results


def main(checkpoint: str, task: str | None = None, clouds: int = 0) -> Figures:
    """Measure, print and return the results."""
    name = Path(checkpoint).resolve().parent.parent.name if task is None else task
    warnings.filterwarnings("ignore", category=UserWarning)
    module = load_task(checkpoint)
    if name not in TASKS:
        place = f"the name of the folder of {checkpoint}, " if task is None else ""
        raise UsageError(f"--task: expected one of {', '.join(sorted(TASKS))}, got {place}{name!r}")
    data: Any = load_data(checkpoint)
    if clouds < 0 or clouds == 1:  # deviations are relative to the spread of the predictions
        raise UsageError(f"--clouds: expected 0, for all, or at least 2, got {clouds}")
    if (found := type(data).__name__) not in DATA[name]:
        raise UsageError(f"--task: {name} measures on {' or '.join(DATA[name])}, got {checkpoint} with {found}")
    if (unit := UNITS.get(name)) and data.target_units != (unit,):
        raise UsageError(f"--task: {name} measures in {unit}, got {checkpoint} in {', '.join(data.target_units)}")
    items = [data[index] for index in range(min(clouds, len(data)) if clouds else len(data))]
    parameters = sum(weight.numel() for weight in module.network.parameters())
    print(f"{name}: {parameters:,} parameters, {len(items):,} test clouds")
    print(f"guarantee: {getattr(module.network, 'guarantee', 'none stated')}")
    figures = {"parameters": float(parameters), **TASKS[name](module, items)}
    for label, value in figures.items():
        print(f"{label:24}{value:.4g}" if isinstance(value, float) else f"{label:24}{len(value)} values")
    print(f"RESULT {json.dumps(figures)}")
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--task", choices=sorted(TASKS))
    parser.add_argument(
        "--clouds", type=int, default=0, help="number of first items of the test set, at least 2; 0 for all"
    )
    try:
        main(**vars(parser.parse_args()))
    except UsageError as error:
        sys.exit(f"evaluate: {error}")
