"""Compare networks of Affine Self Convolution and of attentive group convolution with their plain counterparts.

The data are ``cifar10_subset.npz`` (2,000 training images, so results are far from those on the full CIFAR-10) or, with
``--data rotated_mnist``, ``mnist_rot_recipe.npz``, a re-creation of rotated MNIST. All networks are trained for the
same number of epochs with the optimizer of the paper. The table contains the number of parameters, the accuracy on the
test images, the share of test images whose class does not change under a quarter turn, and the minutes of training.

    python examples/published_networks.py --root DIR --networks "ResNet,ASC,p4 ResNet,p4 ASC" --epochs 10
    python examples/published_networks.py --root DIR --data rotated_mnist --networks "p4-CNN,p4-CNN alpha_F"
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torch_geometric.loader import DataLoader

from lieattn.groups import cyclic, trivial
from lieattn.models import AffineSelfConvNet, AttentiveAllCNN, AttentiveCNN
from lieattn.train import PointSetClassifier, PointSetData, WarmupCosine
from lieattn_datasets import CIFAR10Subset, ImagePoints, RotatedMNISTRecipe, Standardize

RESIDUAL: dict[str, Any] = {"ResNet": "convolution", "SASA": "stand-alone", "Simple ASC": "simple", "ASC": "affine"}
ATTENTION: dict[str, Any] = {
    "": "none",
    " alpha": "full",
    " alpha_CH": "channel",
    " alpha_F": "input",
    " alpha_RH": "pose",
}
NETWORKS = [turns + name for turns in ("", "p4 ") for name in RESIDUAL] + [
    name + kind for name in ("Z2-CNN", "p4-CNN", "p4 All-CNN") for kind in ATTENTION
]

LEAST = {"epochs": 0, "train": 1, "test": 1, "batch_size": 1, "width": 0, "seed": 0}


@dataclass(frozen=True)
class Config:
    """Settings of a run."""

    root: str = "data"
    data: str = "cifar10"
    networks: str = "ResNet,ASC,p4 ResNet,p4 ASC"
    blocks: int = 1
    width: int = 0
    channels: int = 16
    epochs: int = 20
    train: int = 2_000
    test: int = 1_000
    batch_size: int = 32
    rate: float = 0.05
    seed: int = 0


def check(config: Config) -> None:
    """Raise ValueError, naming the setting, if a number is too small."""
    for name, least in LEAST.items():
        if getattr(config, name) < least:
            raise ValueError(f"{name}: expected an integer of at least {least}, got {getattr(config, name)}")


def check_used(config: Config, names: list[str]) -> None:
    """Raise ValueError, naming the setting, if a number was changed that none of the networks depends on."""
    residual, all_convolutional = any("CNN" not in name for name in names), any("All-CNN" in name for name in names)
    for setting, used in (("blocks", residual), ("width", residual), ("channels", all_convolutional)):
        default = getattr(Config, setting)
        if not used and getattr(config, setting) != default:
            found = f"since {', '.join(names)} ignore it, got {getattr(config, setting)}"
            raise ValueError(f"{setting}: expected the default {default}, {found}")


def load(config: Config) -> tuple[ImagePoints, ImagePoints]:
    """Return standardized training and test images."""
    if config.data not in ("cifar10", "rotated_mnist"):
        raise ValueError(f"data: expected 'cifar10' or 'rotated_mnist', got {config.data!r}")
    source = CIFAR10Subset if config.data == "cifar10" else RotatedMNISTRecipe
    train, test = source(config.root, "train"), source(config.root, "test")
    train = train.subset(range(min(config.train, len(train))))
    test = test.subset(range(min(config.test, len(test))))
    standardize = Standardize(*train.statistics())
    return train.with_transform(standardize), test.with_transform(standardize)


def build(name: str, config: Config, channels: int) -> nn.Module:
    """Build a network from its name in the table."""
    group = cyclic(4) if name.startswith("p4") else trivial(2)
    if "CNN" not in name:
        layer = RESIDUAL[name.removeprefix("p4 ")]
        width = config.width or None
        return AffineSelfConvNet(group, channels, 10, blocks=config.blocks, channels=width, layer=layer)
    base, _, kind = name.partition("CNN")
    attention = ATTENTION[kind]
    if base == "p4 All-":
        return AttentiveAllCNN(group, channels, 10, channels=config.channels, attention=attention)
    return AttentiveCNN(group, channels, 10, channels=10 if group.order > 1 else 20, attention=attention)


def train(network: nn.Module, sets: tuple[ImagePoints, ImagePoints], config: Config) -> float:
    """Train the network in place, and return the minutes of training."""
    module = PointSetClassifier(
        network,
        classes=10,
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=config.rate, momentum=0.9, nesterov=True, weight_decay=1e-4
        ),
        schedule=WarmupCosine(warmup_epochs=config.epochs / 10),
    )
    data = PointSetData(
        train=sets[0], val=sets[1], test=sets[1], batch_size=config.batch_size, eval_batch_size=config.batch_size
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=config.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    started = time.perf_counter()
    trainer.fit(module, data)
    return (time.perf_counter() - started) / 60


@torch.no_grad()
def evaluate(network: nn.Module, images: ImagePoints, batch_size: int) -> tuple[float, float]:
    """Return the accuracy, and the share of images whose class is the same after a quarter turn."""
    network.eval()
    right = same = 0
    turn = cyclic(4)
    for batch in DataLoader(images, batch_size=batch_size):
        found = network(batch).argmax(dim=1)
        batch.pos = turn.act(1, batch.pos)
        right += int((found == batch.y).sum())
        same += int((found == network(batch).argmax(dim=1)).sum())
    return right / len(images), same / len(images)


def main(config: Config) -> dict[str, dict[str, float]]:
    """Train and test all networks, and return the results."""
    warnings.filterwarnings("ignore", ".*(does not have many workers|LeafSpec.* is deprecated)")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    check(config)
    names = [name.strip() for name in config.networks.split(",")]
    for name in names:
        if name not in NETWORKS:
            raise ValueError(f"networks: expected some of {', '.join(NETWORKS)}, got {name!r}")
    check_used(config, names)
    sets = load(config)
    print(f"{config.data}: {len(sets[0]):,} training and {len(sets[1]):,} test images, {config.epochs} epochs each")
    results = {}
    for name in names:
        seed_everything(config.seed, verbose=False)
        network = build(name, config, sets[0].num_channels)
        minutes = train(network, sets, config)
        accuracy, unchanged = evaluate(network, sets[1], config.batch_size)
        size = sum(parameter.numel() for parameter in network.parameters())
        print(
            f"{name:18}  {size:9,} parameters  {accuracy:.2%} correct  {unchanged:.2%} unchanged  "
            f"{minutes:.1f} minutes",
            flush=True,
        )
        results[name] = {
            "parameters": size,
            "accuracy": accuracy,
            "unchanged_by_quarter_turn": unchanged,
            "training_minutes": minutes,
        }
    print(f"RESULT {json.dumps(results)}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    try:
        main(Config(**vars(parser.parse_args())))
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"published_networks: {error}")
