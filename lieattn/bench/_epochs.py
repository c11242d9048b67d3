"""A training step of a main network of each paper.

The data are random, so nothing is downloaded. The geometry is computed in every step, as if no loader prepared it,
except in captured steps of images.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lieattn.bench._measure import Cases, Problem, Record, mean_square, timed
from lieattn.geometry import PrincipalFrames, Radius, pixel_positions
from lieattn.groups import cyclic, trivial
from lieattn.models import AffineSelfConvNet, AttentiveCNN, Captured, FramewiseTransformer, GSANet, LieTransformer

ATOMS, MOLECULES = 18, 100_000
# Network, side and channels of its images (None: molecules), clouds in a batch, clouds in the training set.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int] | None, int, int]] = {
    "GSA-Net R4": (lambda: GSANet.rot_mnist(cyclic(4)), (28, 1), 8, 10_000),
    "LieTransformer": (lambda: LieTransformer.qm9(), None, 128, MOLECULES),
    "ASC-ResNet-29": (lambda: AffineSelfConvNet(trivial(2)), (32, 3), 128, 45_000),
    "alpha-p4-CNN": (lambda: AttentiveCNN(cyclic(4), attention="full"), (28, 1), 128, 12_000),
    "principal frames": (
        lambda: FramewiseTransformer(PrincipalFrames(), 1, 1, channels=96, layers=4, heads=8, neighborhood=Radius(5.0)),
        None,
        128,
        MOLECULES,
    ),
}
SMALL = {"BATCH": 2, "ATOMS": 5}
BATCH: int | None = None  # batch size in place of the ones of the networks


def build(name: str, device: str = "cpu", *, captured: bool = False) -> Problem:
    """Forward pass and loss of a network on a batch of random images or molecules, in training mode."""
    make, image, size, _ = NETWORKS[name]
    torch.manual_seed(0)
    network = (Captured(make()) if captured else make()).to(device)
    clouds = [_image(*image) if image else _molecule() for _ in range(BATCH or size)]
    batch = Batch.from_data_list(clouds).to(device)

    def output() -> Tensor:
        network.zero_grad()
        return network(batch).float()

    return mean_square(output)


def _image(side: int, channels: int) -> Data:
    return Data(x=torch.randn(side**2, channels), pos=pixel_positions(side, side), grid=torch.tensor([[side, side]]))


def _molecule() -> Data:
    kinds = torch.tensor([1, 6, 7, 8, 9])[torch.randint(5, (ATOMS,))]
    return Data(x=kinds[:, None].float(), z=kinds, pos=1.5 * torch.randn(ATOMS, 3))


def cases(device: str = "cpu") -> Cases:
    """Return the way ``step`` of each network, and ``captured`` ones of images on a GPU."""
    problems = {name: {"step": partial(build, name, device)} for name in NETWORKS}
    for name, ways in problems.items():
        if device != "cpu" and NETWORKS[name][1] is not None:
            ways["captured"] = partial(build, name, device, captured=True)
    return problems


def remarks(records: list[Record]) -> list[str]:
    """Say how many seconds the steps of an epoch take for each network, without reading data."""
    sizes = {name: -(-clouds // batch) for name, (_, _, batch, clouds) in NETWORKS.items()}
    return [
        f"an epoch of {r.case}, {r.way}: {sizes[r.case]} steps, {sizes[r.case] * r.step_ms / 1e3:.0f} s"
        for r in records
    ]


BENCHMARK = timed(cases, remarks)
