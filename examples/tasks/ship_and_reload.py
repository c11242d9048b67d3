"""Train with your own Trainer, save one file, and load it elsewhere, with outputs in the units of the data."""

from pathlib import Path

import lightning
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

import lieattn
from lieattn.geometry import Radius
from lieattn.groups import tetrahedral
from lieattn.models import FramewiseTransformer
from lieattn.train import PointSetData, PointSetRegressor


class Clouds(torch.utils.data.Dataset[Data]):
    """Clouds of eight points with one target: the sum of all distances, in thousandths."""

    def __init__(self, seeds: range) -> None:
        self.seeds = seeds

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: int) -> Data:
        pos = torch.randn(8, 3, generator=torch.Generator().manual_seed(self.seeds[index]))
        return Data(x=torch.ones(8, 1), pos=pos, y=1000 * torch.pdist(pos).sum()[None, None])


def main(folder: str = "runs/ship_and_reload", clouds: int = 256, epochs: int = 20) -> float:
    """Train, save and reload; return the mean absolute error relative to the standard deviation of the targets."""
    lightning.seed_everything(0)
    train, test = Clouds(range(clouds)), Clouds(range(clouds, clouds + 64))
    network = FramewiseTransformer(tetrahedral(), 1, 1, channels=16, layers=2, neighborhood=Radius(2.0))
    task = PointSetRegressor(network, optimizer=lambda weights: torch.optim.Adam(weights, lr=4e-3))
    trainer = lightning.Trainer(max_epochs=epochs, default_root_dir=folder, accelerator="cpu", logger=False)
    trainer.fit(task, PointSetData(train, batch_size=32))
    path = Path(folder) / "network.safetensors"
    lieattn.save(task.model, path)

    again = lieattn.load(path)  # also in another program or on another machine
    batch = next(iter(DataLoader(test, batch_size=len(test))))
    error = ((again(batch) - batch.y).abs().mean() / batch.y.std()).item()
    print(f"{path}: {again.guarantee}\nerror {error:.2f} times the standard deviation of the targets")
    return error


if __name__ == "__main__":
    main()
