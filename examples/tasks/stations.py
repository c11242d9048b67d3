"""Temperatures at stations: predict those that do not report from those that do, equivariantly on the sphere."""

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from lieattn.geometry import PrincipalFrames, Radius
from lieattn.models import LieTransformer, Readout
from lieattn.spaces import Sphere
from lieattn_datasets import on_sphere


def weather(rng: np.random.Generator, stations: int = 60) -> Data:
    """Return a smooth field of anomalies in degrees Celsius at random stations, of which half report."""
    latitude, longitude = np.degrees(np.arcsin(rng.uniform(-1, 1, stations))), rng.uniform(-180, 180, stations)
    pos = on_sphere(latitude, longitude)
    centers = on_sphere(np.degrees(np.arcsin(rng.uniform(-1, 1, 6))), rng.uniform(-180, 180, 6))
    field = torch.exp(6 * (pos @ centers.T - 1)) @ torch.from_numpy(rng.normal(0, 8, 6)).float()
    reports = torch.from_numpy(rng.uniform(size=stations) < 0.5)
    return Data(pos=pos, x=torch.stack([field * reports / 4, reports], dim=1), y=field, hidden=~reports)


def main(days: int = 400, epochs: int = 12) -> float:
    """Train, and return the root mean square error in kelvin at the stations that do not report."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    train, test = ([weather(rng) for _ in range(count)] for count in (days, 50))
    space, frames, readout = Sphere(), PrincipalFrames(), Readout(pool="none")
    network = LieTransformer(
        2, 1, space=space, frames=frames, neighborhood=Radius(0.8), channels=32, layers=2, heads=4, readout=readout
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in DataLoader(train, batch_size=16, shuffle=True):
            loss = (4 * network(batch)[:, 0] - batch.y)[batch.hidden].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    held = next(iter(DataLoader(test, batch_size=len(test))))
    with torch.no_grad():
        error = (4 * network(held)[:, 0] - held.y)[held.hidden].square().mean().sqrt().item()
    print(f"error {error:.2f} K; of the prediction 0: {held.y[held.hidden].square().mean().sqrt():.2f} K")
    return error


if __name__ == "__main__":
    main()
