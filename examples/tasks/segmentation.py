"""Segmentation with a rare class: batches with offsets as in Pointcept, balanced weights, and the IoU of each class."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lieattn.geometry import PrincipalFrames, Radius
from lieattn.groups import SO
from lieattn.models import FramewiseTransformer
from lieattn.train import PointSetClassifier
from lieattn.transforms import from_offsets


def scene(turn: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a floor (80 % of the points), a ball (16 %) and a post (4 %), which represent your own scenes."""
    kind = torch.arange(3).repeat_interleave((torch.tensor([160, 32, 8]) * (0.5 + torch.rand(3))).long())
    shapes = [2 * torch.rand(len(kind), 3) - 1, torch.randn(len(kind), 3), torch.rand(len(kind), 3) - 0.5]
    shapes[0][:, 2], shapes[1], shapes[2][:, :2] = -0.3, 0.3 * F.normalize(shapes[1]), 0
    places = F.pad(torch.tensor([[0.0], [1.2], [1.2]]) * (torch.rand(3, 2) - 0.5), (0, 1))
    coord = torch.stack(shapes)[kind, torch.arange(len(kind))] + places[kind] + 0.03 * torch.randn(len(kind), 3)
    return {"coord": coord @ turn.T, "feat": torch.ones(len(kind), 1), "segment": kind}


def collate(items: list[dict[str, torch.Tensor]]) -> Any:
    """Concatenate scenes as Pointcept does, and convert them."""
    offset = torch.tensor([len(item["coord"]) for item in items]).cumsum(0)
    return from_offsets({"offset": offset} | {name: torch.cat([item[name] for item in items]) for name in items[0]})


def main(scenes: int = 200, epochs: int = 3, weights: Any = "balanced") -> list[float]:
    """Train on upright scenes, and return the IoU of each class on turned ones."""
    torch.manual_seed(0)
    train = [scene(torch.eye(3)) for _ in range(scenes)]
    test = [scene(turn) for turn in SO(3).sample(scenes // 2).float()]
    loader: Any = partial(DataLoader, batch_size=8, collate_fn=collate)
    local: dict[str, Any] = {"neighborhood": Radius(0.4), "pool": "none"}
    network = FramewiseTransformer(PrincipalFrames(), 1, 3, channels=16, layers=2, heads=2, length=0.3, **local)
    task = PointSetClassifier(network, 3, partial(torch.optim.AdamW, lr=0.01), per="point", class_weights=weights)
    if weights == "balanced":
        task.measure(list(loader(train)))
    trainer = Trainer(max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(task, loader(train, shuffle=True))
    (figures,) = trainer.test(task, loader(test), verbose=False)
    iou = [figures[f"test/iou_{kind}"] for kind in range(3)]
    print(f"class_weights={weights}: IoU of floor, ball, post: {', '.join(f'{value:.1%}' for value in iou)}")
    return iou


if __name__ == "__main__":
    main(weights=None)
    main()
