"""Train GSA-Nets on upright handwritten digits as point sets, and test them on rotated ones.

Three networks of the same size are trained on scikit-learn's digits (8 x 8 pixels, 1,797 images), which are upright.
They are equivariant to translations (Z2), also to quarter turns (C4), or also to rotations by 45 degrees (C8). The
point sets of the test are rotated exactly, without resampling. The output is a table, the paths of the pictures, and a
last line ``RESULT {json}``.

    python examples/rotated_digits.py [--epochs 12] [--out runs/rotated_digits]
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from lieattn import viz
from lieattn.geometry import Radius
from lieattn.groups import FiniteGroup, cyclic, trivial
from lieattn.models import GSANet, GSAOptions
from lieattn.train import PointSetClassifier, PointSetData, WarmupCosine
from lieattn_datasets import Digits, ImagePoints, RotatePoints, Standardize


@dataclass(frozen=True)
class Config:
    """Settings of a run. With the defaults it takes a few minutes on two cores."""

    epochs: int = 12
    channels: int = 20
    heads: int = 8
    radius: float = 1.5
    batch_size: int = 32
    rate: float = 0.01
    digits: int = 0
    seed: int = 0
    out: str = "runs/rotated_digits"


GROUPS = {"Z2": trivial(2), "C4": cyclic(4), "C8": cyclic(8)}
SIXTEENTHS = tuple(k * math.pi / 8 for k in range(16))
BATCH = 120
LEAST = {"epochs": 1, "batch_size": 1, "digits": 0, "seed": 0}


class History(Callback):
    """Records the validation accuracy and the seconds of every epoch."""

    def __init__(self) -> None:
        self.accuracy: list[float] = []
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        """Stop the clock, since the validation is not part of the training."""
        if not trainer.sanity_checking:
            self.seconds.append(time.perf_counter() - self._started)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        """Record the accuracy."""
        if not trainer.sanity_checking:
            self.accuracy.append(float(trainer.callback_metrics["val/accuracy"]))


def check(config: Config) -> None:
    """Raise ValueError, naming the setting, if a number is too small."""
    for name, least in LEAST.items():
        if getattr(config, name) < least:
            raise ValueError(f"{name}: expected an integer of at least {least}, got {getattr(config, name)}")


def build(group: FiniteGroup, config: Config) -> GSANet:
    """Build a network: lifting on the 8 x 8 pixels, max pooling to 4 x 4, and two blocks of group self-attention."""
    return GSANet(
        group,
        channels=config.channels,
        blocks=(0, 2),
        heads=config.heads,
        neighborhood=Radius(config.radius),
        options=GSAOptions(values=False),  # pixels differ, so positions are needed only in the scores
    )


def train(network: GSANet, sets: Mapping[str, ImagePoints], config: Config, folder: Path) -> History:
    """Train the network in place on upright digits."""
    history = History()
    module = PointSetClassifier(
        network,
        classes=10,
        label_smoothing=0.1,  # against overfitting to about a thousand digits
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=config.rate, weight_decay=1e-4),
        schedule=WarmupCosine(warmup_epochs=config.epochs / 6),
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=config.epochs,
        gradient_clip_val=1.0,
        callbacks=[history, TQDMProgressBar(refresh_rate=5)],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    data = PointSetData(
        train=sets["train"], val=sets["valid"], batch_size=config.batch_size, eval_batch_size=BATCH, seed=config.seed
    )
    trainer.fit(module, data)
    return history


@torch.no_grad()
def logits_at(network: GSANet, digits: list[Data], angles: Tensor) -> Tensor:
    """Return logits ``[clouds, classes]`` of digits that are rotated by ``angles`` ``[clouds]`` in radians."""
    network.eval()
    turned = [RotatePoints(float(angle))(digit) for digit, angle in zip(digits, angles, strict=True)]
    return torch.cat([network(batch) for batch in DataLoader(turned, batch_size=BATCH)])


def evaluate(
    network: GSANet, group: FiniteGroup, test: ImagePoints, config: Config
) -> tuple[dict[str, float], list[float]]:
    """Return the results of one network with this group, and its accuracy at every angle of ``SIXTEENTHS``."""
    digits = [test[number] for number in range(len(test))]
    labels = torch.cat([digit.y for digit in digits])
    logits = [logits_at(network, digits, torch.full((len(digits),), angle)) for angle in SIXTEENTHS]
    correct = [float((turned.argmax(1) == labels).double().mean()) for turned in logits]
    generator = torch.Generator().manual_seed(config.seed)
    random = [logits_at(network, digits, 2 * math.pi * torch.rand(len(digits), generator=generator)) for _ in range(2)]
    own = range(0, len(SIXTEENTHS), len(SIXTEENTHS) // group.order)
    eighths = range(0, len(SIXTEENTHS), 2)

    def change(angles: range) -> float:
        return max(float((logits[k] - logits[0]).abs().max()) for k in angles)

    figures = {
        "accuracy_upright": correct[0],
        "accuracy_group_angles": sum(correct[k] for k in own) / len(own),
        "accuracy_45_degrees": sum(correct[k] for k in eighths) / len(eighths),
        "accuracy_random_angles": float(torch.stack([(r.argmax(1) == labels) for r in random]).double().mean()),
        "equivariance_error": change(own),
        "change_45_degrees": change(eighths),
    }
    return figures, correct


def table(results: dict[str, dict[str, float]]) -> str:
    """Return an aligned table with one line for each network."""
    head = (
        f"{'group':6}{'parameters':>11}{'upright':>9}{'group angles':>14}{'multiples of 45°':>18}{'random':>8}"
        f"{'equivariance error':>20}{'s/epoch':>9}"
    )
    lines = [
        f"{name:6}{r['parameters']:>11,.0f}{r['accuracy_upright']:>9.1%}{r['accuracy_group_angles']:>14.1%}"
        f"{r['accuracy_45_degrees']:>18.1%}{r['accuracy_random_angles']:>8.1%}{r['equivariance_error']:>20.1e}"
        f"{r['seconds_per_epoch']:>9.2f}"
        for name, r in results.items()
    ]
    return "\n".join([head, "-" * len(head), *lines])


def main(config: Config) -> dict[str, dict[str, float]]:
    """Train and test all networks, save the pictures, and return the results for each group."""
    warnings.filterwarnings("ignore", ".*(does not have many workers|LeafSpec.* is deprecated)")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    check(config)
    started, out = time.perf_counter(), Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    plain = {split: Digits(split) for split in ("train", "valid", "test")}
    standardize = Standardize(*plain["train"].statistics())
    sets = {split: digits.with_transform(standardize) for split, digits in plain.items()}
    if config.digits:
        sets = {split: digits.subset(range(min(config.digits, len(digits)))) for split, digits in sets.items()}
    results: dict[str, dict[str, float]] = {}
    curves, histories, pictures = {}, {}, {}
    for name, group in GROUPS.items():
        seed_everything(config.seed, verbose=False)
        network = build(group, config)
        print(f"\n{name}: training on {len(sets['train'])} upright digits", flush=True)
        history = train(network, sets, config, out)
        figures, by_angle = evaluate(network, group, sets["test"], config)
        results[name] = {
            "parameters": sum(p.numel() for p in network.parameters()),
            **figures,
            "seconds_per_epoch": sorted(history.seconds)[len(history.seconds) // 2],
        }
        curves[name] = ((*SIXTEENTHS, 2 * math.pi), (*by_angle, by_angle[0]))
        histories[name] = history.accuracy
        if group.order == 8:
            seen = viz.Microscope(network, sets["test"][0], turns=[math.pi / 4, math.pi / 2, math.pi / 6])
            pictures[f"features_{name}"] = seen.picture("field")
            pictures[f"attention_{name}"] = seen.picture("attention")
    pictures["accuracy_by_angle"] = viz.accuracy_by_angle(curves)
    pictures["training"] = viz.training_curves(histories, "validation accuracy")
    print(f"\nGSA-Nets on {len(sets['test'])} test digits, trained upright\n\n{table(results)}\n")
    for name, figure in pictures.items():
        print(f"picture: {viz.save(figure, out / f'{name}.png')}")
    print(f"{time.perf_counter() - started:.0f} s on {torch.get_num_threads()} threads")
    print(f"RESULT {json.dumps(results)}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    try:
        main(Config(**vars(parser.parse_args())))
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"rotated_digits: {error}")
