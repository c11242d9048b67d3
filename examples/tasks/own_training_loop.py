"""Your own training loop over clouds of different sizes: noisy triangles, squares and circles in any orientation."""

import torch
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

from lieattn.geometry import FiniteFrames, PrincipalFrames, sign_group
from lieattn.models import FramewiseTransformer


def outline(label: int, turned: bool) -> Data:
    """Return 20 to 40 points on an outline, which is rotated by a random angle if ``turned``."""
    angle = 2 * torch.pi * torch.rand(int(torch.randint(20, 41, ())))
    side = torch.pi / (3, 4, 360)[label]  # half the angle at the center over one side: the circle has 360 sides
    radius = torch.cos(torch.tensor(side)) / torch.cos(angle % (2 * side) - side)
    angle = angle + 2 * torch.pi * torch.rand(()) * turned
    pos = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) + 0.03 * torch.randn(len(angle), 2)
    return Data(x=torch.ones(len(angle), 1), pos=pos, y=label)


def main(clouds: int = 600, epochs: int = 12) -> float:
    """Train on upright outlines, and return the accuracy on rotated ones."""
    torch.manual_seed(0)
    train = DataLoader([outline(i % 3, turned=False) for i in range(clouds)], batch_size=32, shuffle=True)
    test = Batch.from_data_list([outline(i % 3, turned=True) for i in range(300)])
    frames = FiniteFrames(sign_group(2), PrincipalFrames())  # principal axes, and both of their directions
    network = FramewiseTransformer(frames, 1, 3, channels=32, layers=2, heads=4)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for batch in train:
            loss = torch.nn.functional.cross_entropy(network(batch), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss of the last batch {loss.item():.3f}")
    with torch.no_grad():
        accuracy = (network(test).argmax(dim=1) == test.y).float().mean().item()
    print(f"accuracy on rotated outlines: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
