"""3D scans: classify scans of single solids, and the points of scans of scenes, trained upright and tested turned."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.loader import DataLoader

from lieattn.cli import main as lieattn
from lieattn.train import load_task
from lieattn_datasets import MeshFolder, ProceduralScenes, ProceduralShapes, ShapePoints

CONFIGS = Path(__file__).parent.parent / "configs"
SOLIDS = ("box", "cylinder", "cone", "torus", "bowl", "vase", "star", "bracket")
PARTS = ["ball", "box", "cone", "torus", "tube", "star"]
CHOICES: tuple[dict[str, Any], ...] = ({"points": 64}, {"points": 128, "labels": PARTS})


def scan(path: Path, shapes: ShapePoints, index: int) -> None:
    """Write what a scanner sees of a shape from one side, with noise, without a fifth of the points, as an XYZ file."""
    rng, data = np.random.default_rng(index), shapes[index]
    angle, count = rng.uniform(0, 2 * np.pi), len(data.pos)
    facing = data.normal.numpy() @ [np.cos(angle), np.sin(angle), 0.5]
    pos, label = data.pos.numpy() + rng.normal(scale=0.01, size=(count, 3)), np.broadcast_to(data.y.numpy(), count)
    table = np.column_stack([pos, facing + rng.normal(scale=0.05, size=count), label])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savetxt(path, table[(facing > 0) & (rng.uniform(size=count) > 0.2)], "%.4f", header="x y z intensity label")


def main(solids: int = 960, scenes: int = 300, epochs: tuple[int, int] = (10, 6)) -> list[float]:
    """Train, and return the accuracies on upright and turned solids, and on points of upright and turned scenes."""
    single, many = ProceduralShapes(size=solids, kinds=SOLIDS), ProceduralScenes(size=scenes, kinds=PARTS, points=512)
    for index in range(solids):
        scan(Path("data/scans", SOLIDS[index % len(SOLIDS)], f"{index}.xyz"), single, index)
    for index in range(scenes):
        scan(Path("data/scan_scenes", f"{index}.xyz"), many, index)
    found = []
    for name, count, choice in zip(("scans", "scan_scenes"), epochs, CHOICES, strict=True):
        lieattn(["fit", "--config", str(CONFIGS / f"{name}.yaml"), "--trainer.max_epochs", str(count)])
        task = load_task(f"runs/{name}/checkpoints/best.ckpt")
        for rotate in ("none", "SO3"):
            test = MeshFolder(f"data/{name}", "test", shares=(0.6, 0.1), rotate=rotate, **choice)
            with torch.no_grad():
                right = [task.network(batch).argmax(dim=1) == batch.y for batch in DataLoader(test, batch_size=20)]
            found.append(torch.cat(right).float().mean().item())
    print("accuracy of solids, upright {:.1%}, turned {:.1%}; of points {:.1%}, {:.1%}".format(*found))
    return found


if __name__ == "__main__":
    main()
