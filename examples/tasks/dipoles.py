"""Dipole moments of molecules, computed by GFN2-xTB: the predicted vectors rotate exactly with the molecule."""

import torch
from torch_geometric.loader import DataLoader

from lieattn.geometry import PrincipalFrames, Radius
from lieattn.models import FramewiseTransformer
from lieattn_datasets import GFN2Molecules, MoleculeFeatures


def main(conformers: int = 8, epochs: int = 30) -> float:
    """Train, and return the mean absolute error of a component in debye on test molecules."""
    torch.manual_seed(0)
    features = MoleculeFeatures(species=[1, 6, 7, 8, 9], powers=1)  # one-hot: 5 channels
    train, test = (GFN2Molecules(split, conformers=conformers, transform=features) for split in ("train", "test"))
    network = FramewiseTransformer(
        PrincipalFrames(),
        5,
        1,
        channels=32,
        layers=3,
        heads=4,
        neighborhood=Radius(4.0),
        length=1.5,
        kind="vector",
        pool="sum",
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in DataLoader(train, batch_size=32, shuffle=True):
            loss = (network(batch) - batch.dipole).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    held = next(iter(DataLoader(test, batch_size=len(test))))
    with torch.no_grad():
        error = (network(held) - held.dipole).abs().mean().item()
    print(f"mean absolute error of a component {error:.3f} D; of the prediction 0: {held.dipole.abs().mean():.3f} D")
    return error


if __name__ == "__main__":
    main()
