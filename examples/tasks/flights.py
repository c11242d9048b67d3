"""Flight paths: predict positions of the next hour from those of the past, equivariantly on the sphere."""

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from lieattn.geometry import AllPairs, PrincipalFrames
from lieattn.models import LieTransformer, Lifting, Readout
from lieattn.spaces import Sphere
from lieattn_datasets import Flights

RADIUS = 6371.0  # km
SPACE = Sphere()


def extrapolated(batch: Data, correction: Tensor | float = 0.0) -> Tensor:
    """Return the positions ahead on the great circle of each flight, or beside it, by the exponential map."""
    vectors = batch.ahead[..., None] * batch.vel[:, None] + 100 / RADIUS * correction
    return SPACE.exponential(batch.pos[batch.ptr[1:] - 1], vectors)


def kilometers(positions: Tensor, batch: Data) -> Tensor:
    """Return the distances along the sphere between predicted and true positions, one for each time ahead."""
    return 2 * RADIUS * torch.asin((positions - batch.y).norm(dim=-1) / 2)


def main(flights: int = 3000, epochs: int = 10, seed: int = 0) -> tuple[list[float], list[float]]:
    """Train, and return the mean errors in km after 15, 30 and 60 minutes, and those of the great circle."""
    torch.manual_seed(seed)
    train, held = Flights("train", flights), next(iter(DataLoader(Flights("test"), batch_size=1000)))
    network = LieTransformer(
        1, 3, space=SPACE, frames=PrincipalFrames(), neighborhood=AllPairs(), vector_inputs=["drift"], channels=32,
        layers=2, heads=4, lifting=Lifting(length=0.1), readout=Readout("vector", pool="none"),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, epochs * (flights // 50))
    for _ in range(epochs):
        for batch in DataLoader(train, batch_size=50, shuffle=True, drop_last=True):
            predicted = extrapolated(batch, network(batch)[batch.ptr[1:] - 1])
            loss = (kilometers(predicted, batch) / batch.ahead).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        corrected = kilometers(extrapolated(held, network(held)[held.ptr[1:] - 1]), held)
    found = [error.mean(dim=0).tolist() for error in (corrected, kilometers(extrapolated(held), held))]
    print("km after 15, 30, 60 minutes: {}; great circle: {}".format(*found))
    return found[0], found[1]


if __name__ == "__main__":
    main()
