"""Train a GSA-Net on rotated MNIST with a small budget, and test it.

The folder contains either the original files of Larochelle et al. (``mnist_rotation_new.zip`` or the two .amat files)
or ``mnist_rot_recipe.npz``, a re-creation from MNIST whose results are close to published ones but not comparable with
them. The output names the data. By default the images are averaged over 2 x 2 pixels, to 14 x 14 points, so that
training takes only minutes on two cores; ``--network paper`` trains the network of the paper on 28 x 28.

    python examples/rotated_mnist.py --root DIR [--group C4] [--epochs 9] [--train 10000] [--test 10000]

Ctrl-C saves the state of the training; the same command with ``--ckpt_path FILE`` continues from it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar

from lieattn.geometry import Radius
from lieattn.groups import FiniteGroup, cyclic, dihedral, trivial
from lieattn.models import GSANet, GSAOptions, GSAReadout
from lieattn.train import LastCheckpoint, PointSetClassifier, PointSetData, TrainingInterrupted, WarmupCosine
from lieattn_datasets import ImagePoints, RotatedMNIST, RotatedMNISTRecipe, Standardize

Split = Literal["train", "valid", "test"]
GROUPS = {"Z2": trivial(2), "C4": cyclic(4), "C8": cyclic(8), "D4": dihedral(4)}
LEAST = {"epochs": 0, "train": 1, "test": 1, "batch_size": 1, "seed": 0}


@dataclass(frozen=True)
class Config:
    """Settings of a run."""

    root: str = "data"
    group: str = "C4"
    network: str = "small"
    epochs: int = 9
    train: int = 10_000
    test: int = 10_000
    batch_size: int = 32
    rate: float = 0.01
    seed: int = 0
    out: str = "runs/rotated_mnist"
    ckpt_path: str = ""


def check(config: Config) -> None:
    """Raise ValueError, naming the setting, if a number is too small."""
    for name, least in LEAST.items():
        if getattr(config, name) < least:
            raise ValueError(f"{name}: expected an integer of at least {least}, got {getattr(config, name)}")


def load(config: Config) -> tuple[dict[str, ImagePoints], str]:
    """Return training, validation and test images, and the name of the data."""
    recipe = (Path(config.root) / "mnist_rot_recipe.npz").exists()
    source = RotatedMNISTRecipe if recipe else RotatedMNIST
    counts: tuple[tuple[Split, int], ...] = (("train", config.train), ("valid", 2_000), ("test", config.test))
    sets: dict[str, ImagePoints] = {}
    for split, count in counts:
        images: ImagePoints = source(config.root, split)
        images = images.subset(range(min(count, len(images))))
        sets[split] = images if config.network == "paper" else averaged(images)
    standardize = Standardize(*sets["train"].statistics())
    name = "re-creation of rotated MNIST (mnist_rot_recipe.npz)" if recipe else "rotated MNIST of Larochelle et al."
    return {split: images.with_transform(standardize) for split, images in sets.items()}, name


def averaged(images: ImagePoints) -> ImagePoints:
    """Average 28 x 28 images over 2 x 2 pixels to 14 x 14, which commutes with quarter turns."""
    height, width = images.image_shape
    stacked = np.stack(
        [images[i].x.reshape(height // 2, 2, width // 2, 2).mean(dim=(1, 3)) for i in range(len(images))]
    )
    return ImagePoints(stacked, images.labels, num_classes=images.num_classes)


def build(group: FiniteGroup, network: str) -> GSANet:
    """Build the network of the paper, or a small one with lifting on 14 x 14 points and two blocks on 7 x 7."""
    if network == "paper":
        return GSANet.rot_mnist(group)
    if network != "small":
        raise ValueError(f"network: expected 'small' or 'paper', got {network!r}")
    return GSANet(
        group,
        channels=20,
        blocks=(0, 2),
        heads=4,
        neighborhood=Radius(2.1),
        readout=GSAReadout("mean"),
        options=GSAOptions(values=False, pattern="query_sum"),  # see docs/results.md
    )


def main(config: Config) -> dict[str, float | str]:
    """Train and test the network, and return the results."""
    warnings.filterwarnings("ignore", ".*(does not have many workers|Checkpoint directory|LeafSpec.* is deprecated)")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if config.group not in GROUPS:
        raise ValueError(f"group: expected one of {sorted(GROUPS)}, got {config.group!r}")
    check(config)
    Path(config.out).mkdir(parents=True, exist_ok=True)
    seed_everything(config.seed, verbose=False)
    sets, name = load(config)
    print(f"{name}: {', '.join(f'{len(images):,} {split}' for split, images in sets.items())} images")
    network = build(GROUPS[config.group], config.network)
    print(f"{config.group}, {sum(p.numel() for p in network.parameters()):,} parameters: {network.guarantee}")
    module = PointSetClassifier(
        network,
        classes=10,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=config.rate, weight_decay=1e-4),
        schedule=WarmupCosine(warmup_epochs=config.epochs / 6),
    )
    data = PointSetData(
        train=sets["train"], val=sets["valid"], test=sets["test"], batch_size=config.batch_size, eval_batch_size=100
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=config.epochs,
        gradient_clip_val=1.0,
        callbacks=[TQDMProgressBar(refresh_rate=10), LastCheckpoint(dirpath=str(Path(config.out) / "checkpoints"))],
        default_root_dir=config.out,
        logger=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    started = time.perf_counter()
    trainer.fit(module, data, ckpt_path=config.ckpt_path or None)
    minutes = (time.perf_counter() - started) / 60
    measured = trainer.test(module, data, verbose=False)[0]
    result: dict[str, float | str] = {
        "data": name,
        "group": config.group,
        "network": config.network,
        "epochs": config.epochs,
        "accuracy": measured["test/accuracy"],
        "training_minutes": minutes,
        "threads": torch.get_num_threads(),
    }
    print(f"test accuracy {measured['test/accuracy']:.2%} after {minutes:.1f} minutes of training")
    print(f"RESULT {json.dumps(result)}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    try:
        main(Config(**vars(parser.parse_args())))
    except TrainingInterrupted as stop:
        sys.exit(f"rotated_mnist: {stop}\nTo continue: the same command with --ckpt_path {stop.path}")
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"rotated_mnist: {error}")
