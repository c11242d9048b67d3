"""Your own meshes: classify the files of a folder with given classes, in any orientation."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import trimesh
from torch_geometric.loader import DataLoader

from lieattn.geometry import PrincipalFrames
from lieattn.models import FramewiseTransformer
from lieattn_datasets import MeshFolder

SHAPES = {
    "box": lambda size: trimesh.creation.box(extents=size),
    "ball": lambda size: trimesh.creation.icosphere(radius=1.0).apply_scale(size),
    "ring": lambda size: trimesh.creation.torus(major_radius=size[0] / 2, minor_radius=size[1] / 8),
}


def write(root: Path, count: int) -> dict[str, str]:
    """Write upright solids of random sizes, which represent your own meshes, and return the class of each file."""
    labels: dict[str, str] = {}
    for number in range(count):
        labels[f"{number}.stl"] = name = list(SHAPES)[number % len(SHAPES)]
        SHAPES[name](0.7 + 0.8 * torch.rand(3).numpy()).export(root / f"{number}.stl")
    return labels


def main(count: int = 300, epochs: int = 12) -> float:
    """Train on upright meshes, and return the accuracy on randomly rotated test meshes."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as root:
        options: dict[str, Any] = {"labels": write(Path(root), count), "points": 128, "shares": (0.75, 0.0)}
        train, test = MeshFolder(root, "train", **options), MeshFolder(root, "test", rotate="SO3", **options)
    # The points have no features: the inputs of the network are their positions and normals.
    network = FramewiseTransformer(PrincipalFrames(), 1, 3, channels=32, layers=2, vector_inputs=["normal"], length=0.5)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in DataLoader(train, batch_size=16, shuffle=True):
            loss = torch.nn.functional.cross_entropy(network(batch), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    batch = next(iter(DataLoader(test, batch_size=len(test))))
    with torch.no_grad():
        accuracy = (network(batch).argmax(dim=1) == batch.y).float().mean().item()
    print(f"accuracy on {len(test)} rotated meshes: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
