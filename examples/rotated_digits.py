"""Train transformers on handwritten digits as point sets, and test them on rotated ones.

Three networks of the same size are trained on scikit-learn's digits (8 x 8 pixels, 1,797 images), which are upright
or, with probability one half, slanted by at most 22.5 degrees. They are equivariant to translations (Z2), also to
quarter turns (C4), or also to rotations by 45 degrees (C8). A fourth network has the weights of the third, and turns
each digit into the principal axes of its ink first, so that it is invariant to all rotations. The point sets are
rotated exactly, without resampling. The output is a table, the paths of the pictures, and a last line
``RESULT {json}``.

    python examples/rotated_digits.py [--epochs 6] [--out runs/rotated_digits]
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import sys
import time
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import Compose

from lieattn import viz
from lieattn.geometry import Nearest, PrincipalFrames, Radius, lift
from lieattn.groups import FiniteGroup, cyclic, trivial
from lieattn.models import ImageTransformer, Preprocessed
from lieattn.train import Muon, PointSetClassifier, PointSetData, WarmupCosine
from lieattn_datasets import Digits, ImagePoints, RandomRotatePoints, RotatePoints, Standardize


@dataclass(frozen=True)
class Config:
    """Settings of a run. With the defaults it takes about two minutes on two cores."""

    epochs: int = 6
    radius: float = 1.5
    batch_size: int = 32
    rate: float = 0.015
    slant: float = 22.5
    digits: int = 0
    seed: int = 0
    out: str = "runs/rotated_digits"


# The groups, and the channels per frame with which the networks have the same number of parameters, within 1 %.
GROUPS = {"Z2": (trivial(2), (13, 24)), "C4": (cyclic(4), (7, 12)), "C8": (cyclic(8), (6, 8))}
SIXTEENTHS = tuple(k * math.pi / 8 for k in range(16))
BATCH = 120
LEAST = {"epochs": 1, "batch_size": 1, "digits": 0, "seed": 0}


class History(Callback):
    """Records the accuracy on the training digits in percent, and the processor seconds of every epoch."""

    def __init__(self) -> None:
        self.accuracy: list[float] = []
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        """Start the clock."""
        self._started = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        """Stop the clock, and record the accuracy."""
        self.seconds.append(time.process_time() - self._started)
        self.accuracy.append(100 * float(trainer.callback_metrics["train/accuracy"]))


class Slant(RandomRotatePoints):
    """Slants of handwriting."""

    def __call__(self, data: Data) -> Data:
        """Rotate a digit by a small random angle, with probability one half."""
        return super().__call__(data) if torch.rand(()) < 0.5 else data


def in_principal_axes(digits: Data) -> Data:
    """Turn digits into the principal axes of their ink, which are determined up to half turns, elements of C8."""
    ink = digits.x[:, 0] - digits.x.min()  # the background is 0
    axes = lift(digits, PrincipalFrames(), Nearest(1), weights=ink).frames[:, 0]
    turned = copy.copy(digits)
    turned.pos = (digits.pos[:, None] @ axes)[:, 0]
    return turned


def check(config: Config) -> None:
    """Raise ValueError, naming the setting, if a number is too small."""
    for name, least in LEAST.items():
        if getattr(config, name) < least:
            raise ValueError(f"{name}: expected an integer of at least {least}, got {getattr(config, name)}")


def build(group: FiniteGroup, channels: tuple[int, int], config: Config) -> ImageTransformer:
    """Build a network: group convolutions on the 8 x 8 pixels, and on 4 x 4 also attention within each frame."""
    return ImageTransformer(
        group,
        in_channels=1,
        out_channels=10,
        neighborhood=Radius(config.radius),
        channels=channels,
        blocks=(1, 1),
        heads=2,
    )


def train(network: nn.Module, digits: Dataset[Data], config: Config, folder: Path) -> History:
    """Train the network in place."""
    history = History()
    module = PointSetClassifier(
        network,
        classes=10,
        label_smoothing=0.1,  # against overfitting to about a thousand digits
        optimizer=lambda parameters: Muon(parameters, lr=config.rate, weight_decay=0.03, smallest=6),
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
    )
    trainer.fit(module, PointSetData(train=digits, batch_size=config.batch_size, seed=config.seed))
    return history


@torch.no_grad()
def logits_at(network: nn.Module, digits: list[Data], angles: Tensor) -> Tensor:
    """Return logits ``[clouds, classes]`` of digits that are rotated by ``angles`` ``[clouds]`` in radians."""
    network.eval()
    turned = [RotatePoints(float(angle))(digit) for digit, angle in zip(digits, angles, strict=True)]
    return torch.cat([network(batch) for batch in DataLoader(turned, batch_size=BATCH)])


def evaluate(network: nn.Module, own: range, test: ImagePoints, config: Config) -> tuple[dict[str, float], list[float]]:
    """Return the results of a network that is invariant at its ``own`` angles of ``SIXTEENTHS``, and all accuracies."""
    digits = [test[number] for number in range(len(test))]
    labels = torch.cat([digit.y for digit in digits])
    logits = [logits_at(network, digits, torch.full((len(digits),), angle)) for angle in SIXTEENTHS]
    correct = [float((turned.argmax(1) == labels).double().mean()) for turned in logits]
    random = 2 * math.pi * torch.rand(len(digits), generator=torch.Generator().manual_seed(config.seed))
    eighths = range(0, len(SIXTEENTHS), 2)

    def change(angles: range) -> float:
        return max(float((logits[k] - logits[0]).abs().max()) for k in angles)

    figures = {
        "accuracy_upright": correct[0],
        "accuracy_group_angles": sum(correct[k] for k in own) / len(own),
        "accuracy_45_degrees": sum(correct[k] for k in eighths) / len(eighths),
        "accuracy_random_angles": float((logits_at(network, digits, random).argmax(1) == labels).double().mean()),
        "accuracy_worst_angle": min(correct),
        "equivariance_error": change(own),
        "change_45_degrees": change(eighths),
    }
    return figures, correct


def table(results: dict[str, dict[str, float]]) -> str:
    """Return an aligned table with one line for each network."""
    head = (
        f"{'network':11}{'parameters':>11}{'upright':>9}{'own angles':>12}{'multiples of 45°':>18}{'random':>8}"
        f"{'worst':>7}{'equivariance error':>20}{'CPU s/epoch':>13}"
    )
    lines = [
        f"{name:11}{r['parameters']:>11,.0f}{r['accuracy_upright']:>9.1%}{r['accuracy_group_angles']:>12.1%}"
        f"{r['accuracy_45_degrees']:>18.1%}{r['accuracy_random_angles']:>8.1%}{r['accuracy_worst_angle']:>7.1%}"
        f"{r['equivariance_error']:>20.1e}{r['seconds_per_epoch']:>13.2f}"
        for name, r in results.items()
    ]
    return "\n".join([head, "-" * len(head), *lines])


def main(config: Config) -> dict[str, dict[str, float]]:
    """Train and test all networks, save the pictures, and return the results for each group."""
    warnings.filterwarnings("ignore", ".*(does not have many workers|no `val_dataloader`|LeafSpec.* is deprecated)")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    check(config)
    started, out = time.perf_counter(), Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    raw = {split: Digits(split) for split in ("train", "valid", "test")}
    if config.digits:
        raw = {split: digits.subset(range(min(config.digits, len(digits)))) for split, digits in raw.items()}
    standardize = Standardize(*raw["train"].statistics())
    slanted = Compose([standardize, Slant(config.seed, math.radians(config.slant))])
    # No choice is made by validation, so its digits are trained on, too.
    digits = raw["train"].with_transform(slanted) + raw["valid"].with_transform(slanted)
    test = raw["test"].with_transform(standardize)
    results: dict[str, dict[str, float]] = {}
    curves, histories, pictures = {}, {}, {}

    def record(name: str, network: nn.Module, own: range, seconds: float) -> None:
        figures, by_angle = evaluate(network, own, test, config)
        size = sum(p.numel() for p in network.parameters())
        results[name] = {"parameters": size, **figures, "seconds_per_epoch": seconds}
        curves[name] = ((*SIXTEENTHS, 2 * math.pi), (*by_angle, by_angle[0]))

    for name, (group, channels) in GROUPS.items():
        seed_everything(config.seed, verbose=False)
        network = build(group, channels, config)
        print(f"\n{name}: training on {len(digits)} digits, half of them slanted", flush=True)
        history = train(network, digits, config, out)
        histories[name] = history.accuracy
        seconds = sorted(history.seconds)[len(history.seconds) // 2]
        record(name, network, range(0, len(SIXTEENTHS), len(SIXTEENTHS) // group.order), seconds)
    record("C8 in axes", Preprocessed(network, in_principal_axes), range(len(SIXTEENTHS)), 0.0)
    seen = viz.Microscope(network, test[0], turns=[math.pi / 4, math.pi / 2, math.pi / 6])
    pictures["features_C8"] = seen.picture("field")
    pictures["attention_C8"] = seen.picture("attention")
    title = f"Digits, trained with slants of at most {config.slant:g}°"
    pictures["accuracy_by_angle"] = viz.accuracy_by_angle(curves, title)
    pictures["training"] = viz.training_curves(histories, "accuracy on training digits (%)")
    print(f"\nNetworks on {len(test)} test digits\n\n{table(results)}\n")
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
