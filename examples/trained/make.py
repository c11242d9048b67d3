"""Train one of the small networks that are included in the library, and write its file and its card.

    python examples/trained/make.py qm9-homo                          # first trains with examples/trained/qm9-homo.yaml
    python examples/trained/make.py qm9-homo --checkpoint FILE --minutes 8.5    # uses a checkpoint of a finished run

The command writes NAME.safetensors, which ``lieattn.load`` reads, and the card NAME.json. The card describes the
network, its training and its data, and contains the results on test data, the measurements of ``lieattn.certify``, and
one prediction. The configurations read ``data/`` in the folder where the command runs (see examples/README.md).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

import lieattn
from lieattn import train
from lieattn.certify import TOLERANCES, Certificate, certify
from lieattn.models import Preprocessed, Rescaled

HERE = Path(__file__).parent
MNIST = "CC BY-SA 3.0, derived from MNIST (LeCun, Cortes, Burges); a re-creation of rotated MNIST"
QM9 = "CC0; Ramakrishnan, Dral, Rupp, von Lilienfeld, Sci. Data 1, 140022 (2014)"
RMD17 = "CC0; Christensen and von Lilienfeld, revised MD17, arXiv 2007.09593 (2020)"
IMAGE = (
    "pixels as points: x [points, 1] in [0, 1], pos [points, 2], grid [images, 2], as lieattn_datasets.image_to_data"
)
ATOMS = "z [atoms] nuclear charges int64, pos [atoms, 3] in angstrom"


@dataclass(frozen=True)
class About:
    """Information on a network that is not in its checkpoint, and options of its tests."""

    task: str
    inputs: str
    outputs: str
    terms: str
    config: str = ""  # its configuration, if that has another name
    test: int | None = None  # number of first items of the test set; None for all
    clouds: int = 2  # clouds of the certificate
    single: float = TOLERANCES[torch.float32]  # tolerance of the certificate in float32


ABOUT = {
    "digits-c8": About(
        "handwritten digits, trained upright, also rotated by multiples of 45 degrees",
        f"{IMAGE}, 8 x 8 pixels",
        "10 logits",
        "CC BY 4.0; Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI; from scikit-learn",
    ),
    "rot-mnist-p4": About(
        "rotated handwritten digits on the grid of pixels (p4-CNN)",
        f"{IMAGE}, 28 x 28 pixels",
        "10 logits",
        MNIST,
        test=5_000,
    ),
    "rot-mnist-alpha-f-p4": About(
        "rotated handwritten digits on the grid of pixels "
        "(p4-CNN with attention to the input, trained as in the paper)",
        f"{IMAGE}, 28 x 28 pixels",
        "10 logits",
        MNIST,
        config="../papers/attentive/rot_mnist_p4_alpha_f.yaml",
        test=5_000,
    ),
    "rot-mnist-r4": About(
        "rotated handwritten digits as point sets, averaged to 14 x 14 points",
        f"{IMAGE}, 28 x 28 pixels in raster order",
        "10 logits",
        MNIST,
        test=2_000,
    ),
    "rot-mnist-c8": About(
        "rotated handwritten digits as sets of 28 x 28 points; also turned by multiples of 45 degrees",
        f"{IMAGE}, 28 x 28 pixels in raster order",
        "10 logits",
        MNIST,
        config="../configs/rotated_mnist.yaml",
    ),
    "qm9-homo": About(
        "energy of the highest occupied orbital of small organic molecules", f"{ATOMS}; H, C, N, O", "meV [1]", QM9
    ),
    "qm9-homo-o": About(
        "energy of the highest occupied orbital of small organic molecules, continuous",
        f"{ATOMS}; H, C, N, O",
        "meV [1]",
        QM9,
    ),
    "aspirin-forces": About(
        "forces on the atoms of aspirin at 500 K, not the gradient of an energy",
        f"{ATOMS}; those of aspirin, in any order",
        "kcal/(mol angstrom) [atoms, 3]",
        RMD17,
        single=5e-5,  # errors reach 1.1e-3, and the default allows 8.9e-4; the reason may be that bonds are stiff
    ),
    "ethanol-energy": About(
        "energy of ethanol at 500 K, and forces on its atoms as the gradient, for dynamics that conserve energy",
        f"{ATOMS}; those of ethanol, in any order",
        "energy meV [1], less the mean of the training frames, and force meV/angstrom [atoms, 3]",
        RMD17,
    ),
    "aspirin-energy": About(
        "energy of aspirin at 500 K, and forces on its atoms as the gradient, for dynamics that conserve energy",
        f"{ATOMS}; those of aspirin, in any order",
        "energy meV [1], less the mean of the training frames, and force meV/angstrom [atoms, 3]",
        RMD17,
        single=1e-4,  # rounding changes energies by 4e-3 meV and forces by 7e-2 meV/angstrom; float64 has 1e-10
    ),
    "springs": About(
        "six particles on springs: the vector field of the dynamics, trajectories",
        "x [points, 2] (mass, spring constant), pos, momentum [points, 2], time [clouds, times]",
        "positions and momenta [points, times, 4]",
        "made from a seed, no rights",
    ),
    "nbody": About(
        "five charged particles one unit of time later",
        "x [points, 1] charges +-1, pos, vel [points, 3]",
        "positions [points, 3]",
        "made from a seed, no rights",
    ),
    "shapes": About(
        "sixteen kinds of solids as 64 points with normals, trained upright, tested rotated",
        "pos [points, 3] in the unit sphere about the mean, normal [points, 3]",
        "16 logits, of lieattn_datasets.SHAPE_CLASSES",
        "made from a seed, no rights",
    ),
}


def main(name: str, out: Path, checkpoint: Path | None, minutes: float | None, machine: str) -> dict[str, Any]:
    """Train if no checkpoint is given, write both files, and return the card."""
    about = ABOUT[name]
    config = (HERE / (about.config or f"{name}.yaml")).resolve()
    command = f"lieattn fit --config examples/{config.relative_to(HERE.parent.resolve())}"
    if checkpoint is None and minutes is not None:
        raise train.UsageError(f"--minutes: a training without --checkpoint is measured, got {minutes}")
    out.mkdir(parents=True, exist_ok=True)
    if checkpoint is None:
        checkpoint, minutes = trained(name, config)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*(does not have many workers|LeafSpec.* is deprecated)")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    task, saved = train.load_task(checkpoint), train.read_checkpoint(checkpoint)
    data = saved["lieattn"]["config"]["data"]
    check_source(name, checkpoint, saved, config)
    test: Any = train.load_data(checkpoint, "test")
    network = model(task, test.transform)
    figures = tested(task, test if about.test is None else test.subset(range(min(about.test, len(test)))))
    plain = test.with_transform(None)
    tolerances = {**TOLERANCES, torch.float32: about.single}
    certificate = certify(network, [plain[index] for index in range(about.clouds)], tolerances=tolerances)
    print(certificate)
    lieattn.save(network, out / f"{name}.safetensors")
    network = lieattn.load(out / f"{name}.safetensors")
    card = {
        "name": name,
        "task": about.task,
        "inputs": about.inputs,
        "outputs": about.outputs,
        "network": saved["lieattn"]["config"]["model"]["init_args"]["network"],
        "parameters": sum(weight.numel() for weight in task.network.parameters()),
        "transform": repr(network.transform) if isinstance(network, Preprocessed) else None,
        "guarantee": certificate.guarantee,
        "group": certificate.group,
        "data": described(cast(Any, train.load_data(checkpoint, "train")), data["train"], about.terms),
        "training": {
            "command": command,
            "seed": 0,
            "epochs": saved["epoch"] + 1,
            "steps": saved["global_step"],
            "minutes": None if minutes is None else round(minutes, 1),
            "machine": machine,
        },
        "test": figures,
        "certificate": summary(certificate, tolerances),
        "version": importlib.metadata.version("lieattn"),
        "example": example(network, plain[0]),
    }
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in card.items())
    (out / f"{name}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"{name}: {figures}, {(out / f'{name}.safetensors').stat().st_size:,} bytes")
    return card


def check_source(name: str, checkpoint: Path, saved: dict[str, Any], config: Path) -> None:
    """Raise UsageError if a checkpoint was trained on other data or with another network than a configuration.

    The weights of the checkpoint have to fit the network of the configuration, with its group and geometry.
    """
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    data = content["data"]
    data = yaml.safe_load((config.parent / data).read_text(encoding="utf-8")) if isinstance(data, str) else data
    expected, found = data["train"]["class_path"], saved["lieattn"]["config"]["data"]["train"]["class_path"]
    if expected.rpartition(".")[2] != found.rpartition(".")[2]:
        raise train.UsageError(f"--checkpoint: {name} is trained on {expected}, {checkpoint} on {found}")
    train.load_weights(configured(config), saved, f"--checkpoint: {checkpoint} for {name}", "network.")


def configured(config: Path) -> nn.Module:
    """Return the network of a configuration, with random weights."""
    spec = yaml.safe_load(config.read_text(encoding="utf-8"))["model"]["init_args"]["network"]
    return train.build(nn.Module, spec, str(config))


def trained(name: str, config: Path) -> tuple[Path, float]:
    """Train with a configuration; return the best checkpoint on the validation set and minutes of processor time."""
    root = Path("runs") / "trained" / name
    command = [sys.executable, "-m", "lieattn", "fit", "--config", str(config), "--trainer.default_root_dir", str(root)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    folder = root / "checkpoints"
    best = folder / "best.ckpt"
    return best if best.exists() else folder / "last.ckpt", (used.ru_utime + used.ru_stime) / 60


def model(task: train.PointSetTask, transform: Any) -> nn.Module:
    """Return the network in its final form, with raw inputs and outputs in the units of the data."""
    found = task.model
    if isinstance(found, Rescaled):
        units = [number for name in found.names for number in found.units(name)]
        if all(bool((number == standard).all()) for number, standard in zip(units, (1, 0) * len(units), strict=False)):
            found = found.network
    return found if transform is None else Preprocessed(found, transform)


def tested(task: train.PointSetTask, test: Dataset[Any]) -> dict[str, float]:
    """Return the results on test data, in their units, and the number of items."""
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        inference_mode=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    found = trainer.test(task, train.PointSetData(test=test, eval_batch_size=100), verbose=False)[0]
    figures = {name.removeprefix("test/"): float(f"{value:.4g}") for name, value in found.items()}
    return {**figures, "items": len(cast(Any, test))}


def described(dataset: Any, spec: dict[str, Any], terms: str) -> dict[str, Any]:
    """Describe the training set: its arguments, the digest of its items without transforms, and its terms."""
    plain = dataset.with_transform(None)
    found = hashlib.sha256()
    for index in range(len(plain)):
        for name, value in sorted(plain[index].to_dict().items()):
            found.update(f"{name} {value.dtype} {list(value.shape)}:".encode())
            found.update(value.contiguous().numpy().tobytes())
    arguments = {name: value for name, value in spec["init_args"].items() if name not in ("transform", "root")}
    return {
        "class": spec["class_path"],
        "arguments": arguments,
        "items": len(plain),
        "sha256": found.hexdigest(),
        "terms": terms,
    }


def summary(certificate: Certificate, tolerances: Mapping[torch.dtype, float]) -> dict[str, Any]:
    """Return the verdict, and the largest errors of each check for each dtype."""
    checks = dict.fromkeys(row.check for row in certificate.rows)
    return {
        "verdict": certificate.verdict,
        "clouds": certificate.clouds,
        "points": certificate.points,
        "seed": certificate.seed,
        "spread": float(f"{certificate.spread:.3g}"),
        "tolerances": {str(dtype).removeprefix("torch."): value for dtype, value in tolerances.items()},
        "errors": {
            check: {dtype: rounded(error) for dtype, error in certificate.worst(check).items()} for check in checks
        },
        "relative": dict(_relative(certificate)),
    }


def rounded(error: float) -> float | None:
    """Round to two digits. Return None if the network refuses the input, such as images rotated off their lattice."""
    return None if math.isnan(error) else float(f"{error:.2g}")


def _relative(certificate: Certificate) -> Iterator[tuple[str, float | None]]:
    """Yield the largest change under the group and outside of it, relative to the outputs, in float32."""
    for check in ("element", "outside"):
        found = [row.relative for row in certificate.rows if row.check == check and row.dtype == "float32"]
        if found:
            yield check, rounded(max(found))


def example(network: nn.Module, item: Data) -> dict[str, Any]:
    """Return one item of the test set as lists, and the output of the network for it."""
    given = {name: listed(value) for name, value in item.to_dict().items() if isinstance(value, Tensor)}
    return {"input": given, "output": listed(network(Batch.from_data_list([item])))}


def listed(value: Any) -> Any:
    """Convert a tensor, or each of several by name, to nested lists with as many digits as float32 needs."""
    if not isinstance(value, Tensor):
        return {name: listed(one) for name, one in value._asdict().items()}
    value = value.detach()
    if not value.is_floating_point():
        return value.tolist()
    return json.loads(json.dumps(np.vectorize(lambda number: float(str(np.float32(number))))(value.numpy()).tolist()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(ABOUT))
    parser.add_argument("--out", type=Path, default=HERE.parent.parent / "lieattn" / "trained")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint of a finished training, instead of a new one")
    parser.add_argument("--minutes", type=float, help="processor time of that training")
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores, one thread")
    try:
        main(**vars(parser.parse_args()))
    except (train.UsageError, OSError) as error:
        sys.exit(f"make: {error}")
    except subprocess.CalledProcessError as error:  # the training has said why
        sys.exit(error.returncode)
