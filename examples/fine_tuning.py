"""Fine-tune a trained network on few data, beside the same training from new weights.

``qm9-homo`` was trained on HOMO energies of density functional theory for 10,000 molecules. Here it is the start for
HOMO energies of another method, GFN2-xTB, learned from a few hundred molecules.

    python examples/fine_tuning.py --root DIR [--molecules 100 300 1000] [--seeds 0 1 2]

DIR contains ``qm9_subset.npz`` and ``qm9_subset_gfn2.npz`` (see datasets/README.md). The output is one JSON object for
each training.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
import warnings
from functools import partial

import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import Subset

import lieattn
from lieattn.geometry import PrincipalFrames, Radius
from lieattn.models import DirectionConvNet, transfer_weights
from lieattn.train import AveragedWeights, Muon, PointSetData, PointSetRegressor, WarmupCosine
from lieattn_datasets import QM9GFN2, MoleculeFeatures

BATCH = 32


def trained(root: str, molecules: int, steps: int, seed: int, start: str | None, rate: float) -> dict[str, object]:
    """Train on the first molecules of the training set; return the mean absolute error on the test set in meV."""
    seed_everything(seed, verbose=False)
    features = MoleculeFeatures((1, 6, 7, 8), powers=2)
    read = partial(QM9GFN2, root, targets="homo", energy_unit="meV", transform=features)
    train = read("train")
    if molecules > len(train):
        raise ValueError(f"--molecules: expected at most the {len(train)} of the training set, got {molecules}")
    network = DirectionConvNet(PrincipalFrames(), 8, 1, channels=32, neighborhood=Radius(3.2))
    if start is not None:
        transfer_weights(network, lieattn.load(start))
    task = PointSetRegressor(
        network, optimizer=partial(Muon, lr=rate, weight_decay=0.03), schedule=WarmupCosine(warmup_epochs=1)
    )
    data = PointSetData(
        Subset(train, range(molecules)), test=read("test"), batch_size=BATCH, eval_batch_size=100, seed=seed
    )
    trainer = Trainer(
        max_epochs=math.ceil(steps / math.ceil(molecules / BATCH)),
        accelerator="cpu",
        callbacks=[AveragedWeights(0.99)],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    begin = time.process_time()
    trainer.fit(task, data)
    seconds = time.process_time() - begin
    (found,) = trainer.test(task, data, verbose=False)
    return {
        "molecules": molecules,
        "start": start,
        "rate": rate,
        "seed": seed,
        "steps": trainer.global_step,
        "mae_mev": round(found["test/error"], 1),
        "seconds": round(seconds),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Train with and without the weights of the trained network, for all numbers of molecules and seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder with the data")
    parser.add_argument("--molecules", type=int, nargs="+", default=[100, 300, 1000], help="sizes of the training set")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400, help="training steps with up to 32 molecules")
    parser.add_argument("--rates", type=float, nargs=2, default=[0.016, 0.001], help="for new and for trained weights")
    options = parser.parse_args()
    numbers = {"--molecules": min(options.molecules), "--seeds": min(options.seeds) + 1, "--steps": options.steps}
    if small := [name for name, number in numbers.items() if number < 1]:
        sys.exit(f"fine_tuning: {small[0]}: expected larger integers, got {getattr(options, small[0][2:])}")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers|.*have no `val_dataloader`")
    for molecules in options.molecules:
        for seed in options.seeds:
            for start, rate in zip((None, "qm9-homo"), options.rates, strict=True):
                try:
                    record = trained(options.root, molecules, options.steps, seed, start, rate)
                except (OSError, ValueError) as error:
                    sys.exit(f"fine_tuning: {error}")
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
