"""Training steps: of main networks, framewise blocks, different numbers of frames."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lieattn.bench._measure import Benchmark, Cases, Problem, Record, Sizes, mean_square
from lieattn.geometry import AllPairs, FiniteFrames, Nearest, PrincipalFrames, Radius, lift, pixel_positions
from lieattn.groups import SE, FiniteGroup, cyclic, dihedral, icosahedral, octahedral, tetrahedral, trivial
from lieattn.models import (
    AffineSelfConvNet,
    AttentiveCNN,
    Captured,
    DirectionConvNet,
    EnergyForces,
    FramewiseOptions,
    FramewiseTransformer,
    GSANet,
    LieTransformer,
)
from lieattn.nn import FramewiseBlock
from lieattn.nn.relative import RotaryPhases
from lieattn.spaces import Euclidean

# Network, side and channels of its images (None: molecules), clouds in a batch, clouds in the training set.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int] | None, int, int]] = {
    "GSA-Net R4": (lambda: GSANet.rot_mnist(cyclic(4)), (28, 1), 8, 10_000),
    "LieTransformer": (lambda: LieTransformer.qm9(), None, 128, 100_000),
    "ASC-ResNet-29": (lambda: AffineSelfConvNet(trivial(2)), (32, 3), 128, 45_000),
    "alpha-p4-CNN": (lambda: AttentiveCNN(cyclic(4), attention="full"), (28, 1), 128, 12_000),
    "principal frames": (
        lambda: FramewiseTransformer(PrincipalFrames(), 1, 1, channels=96, layers=4, heads=8, neighborhood=Radius(5.0)),
        None,
        128,
        100_000,
    ),
}


def paper_step(name: str, sizes: Sizes, device: str = "cpu", *, captured: bool = False) -> Problem:
    """Forward pass and loss of a main network of a paper on random images or molecules, in training mode.

    The geometry is computed in every step, as if no loader prepared it, except in captured steps of images.
    """
    make, image, size, _ = NETWORKS[name]
    torch.manual_seed(0)
    network = (Captured(make()) if captured else make()).to(device)
    clouds = [_image(*image) if image else _molecule(sizes["atoms"]) for _ in range(sizes["batch"] or size)]
    data = Batch.from_data_list(clouds).to(device)

    def output() -> Tensor:
        network.zero_grad()
        return network(data).float()

    return mean_square(output)


def _image(side: int, channels: int) -> Data:
    return Data(x=torch.randn(side**2, channels), pos=pixel_positions(side, side), grid=torch.tensor([[side, side]]))


def _molecule(atoms: int) -> Data:
    kinds = torch.tensor([1, 6, 7, 8, 9])[torch.randint(5, (atoms,))]
    return Data(x=kinds[:, None].float(), z=kinds, pos=1.5 * torch.randn(atoms, 3))


def _cases_of_papers(sizes: Sizes, device: str) -> Cases:
    """The way ``step`` of each network, and ``captured`` ones of images on a GPU."""
    problems = {name: {"step": partial(paper_step, name, sizes, device)} for name in NETWORKS}
    for name, ways in problems.items():
        if device != "cpu" and NETWORKS[name][1] is not None:
            ways["captured"] = partial(paper_step, name, sizes, device, captured=True)
    return problems


def _epochs(records: list[Record], _: Sizes) -> list[str]:
    """Seconds that the steps of an epoch take for each network, without reading data."""
    steps = {name: -(-clouds // size) for name, (_, _, size, clouds) in NETWORKS.items()}
    return [
        f"an epoch of {r.case}, {r.way}: {steps[r.case]} steps, {steps[r.case] * r.step_ms / 1e3:.0f} s"
        for r in records
    ]


# A batch size is in place of those of the networks.
EPOCHS = Benchmark(
    "training steps of one main network of each paper, at the size of its data",
    {"atoms": 18, "batch": None},
    {"atoms": 5, "batch": 2},
    _cases_of_papers,
    remarks=_epochs,
)

GROUPS = {"C4": cyclic(4), "D4": dihedral(4), "T": tetrahedral(), "O": octahedral(), "I": icosahedral()}


def framewise(group: FiniteGroup, sizes: Sizes, device: str = "cpu") -> Problem:
    """Four blocks on 16 clouds of 32 points, |H| heads; the width is 384, or 360 for the 60 frames of I."""
    channels = _channels(384, group.order)
    torch.manual_seed(0)
    phases = RotaryPhases(group.dim, 1, channels).to(device)
    blocks = nn.ModuleList(FramewiseBlock(group, channels, mlp_ratio=4) for _ in range(sizes["layers"])).to(device)
    batch = torch.arange(sizes["clouds"], device=device).repeat_interleave(sizes["points"])
    graph = lift(torch.randn(len(batch), group.dim).to(device), group, AllPairs(), batch=batch)
    x = torch.randn(len(batch), group.order, channels).to(device)

    def output() -> Tensor:
        blocks.zero_grad()
        y, rotary = x, graph.carrying(terms=phases.terms(graph, values=True))
        for block in blocks:
            y = block(y, rotary)
        return y

    return mean_square(output)


def ordinary(group: FiniteGroup, sizes: Sizes, device: str = "cpu") -> Problem:
    """``torch.nn.TransformerEncoder`` with the same width and numbers of heads, layers, hidden units and tokens."""
    width = group.order * _channels(384, group.order)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        width, group.order, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, sizes["layers"], enable_nested_tensor=False).to(device)
    x = torch.randn(sizes["clouds"], sizes["points"], width).to(device)

    def output() -> Tensor:
        encoder.zero_grad()
        return cast(Tensor, encoder(x))

    return mean_square(output)


def _channels(width: int, frames: int) -> int:
    """The even number of channels per frame with which the total is closest to the width."""
    return 2 * max(1, round(width / (2 * frames)))


def _cases_of_blocks(sizes: Sizes, device: str) -> Cases:
    return {
        name: {"torch": partial(ordinary, group, sizes, device), "framewise": partial(framewise, group, sizes, device)}
        for name, group in GROUPS.items()
    }


FRAMEWISE = Benchmark(
    "a training step of the framewise transformer, compared with torch's TransformerEncoder",
    {"clouds": 16, "points": 32, "layers": 4},
    {"clouds": 2, "points": 4, "layers": 1},
    _cases_of_blocks,
    options={"repeats": 9, "threads": 1},
)

Clouds = Literal["molecules", "shapes"]
FRAMES: dict[str, FiniteGroup | PrincipalFrames] = {
    "exact": PrincipalFrames(),
    "T": tetrahedral(),
    "O": octahedral(),
    "I": icosahedral(),
}
_FIBERS = {"exact": 4, "T": 12, "O": 24, "I": 60}


def batch(kind: Clouds, sizes: Sizes) -> Data:
    """Clouds with the density of molecules, in Å, with types of atoms; or points on a sphere with normals."""
    clouds, points = sizes[kind]
    generator = torch.Generator().manual_seed(0)
    pos = torch.randn(clouds * points, 3, generator=generator)
    if kind == "shapes":
        pos = pos / pos.norm(dim=1, keepdim=True)
    kinds = torch.randint(8, (len(pos),), generator=generator)
    x, of_cloud = nn.functional.one_hot(kinds, 8).float(), torch.arange(clouds).repeat_interleave(points)
    scale = torch.tensor([2.0, 1.6, 1.2]) if kind == "molecules" else 1.0
    return Data(x=x, pos=scale * pos, normal=pos, batch=of_cloud)


def network(kind: Clouds, frames: str, width: int, sizes: Sizes) -> FramewiseTransformer:
    """Four blocks in which channels times frames are closest to the width."""
    torch.manual_seed(0)
    channels, layers = _channels(width, _FIBERS[frames]), sizes["layers"]
    if kind == "shapes":
        return FramewiseTransformer(
            FRAMES[frames], 8, 1, channels=channels, layers=layers, vector_inputs=("normal",), length=0.8
        )
    near, options = Radius(4.0), FramewiseOptions(positions=False)
    given: dict[str, Any] = {"channels": channels, "layers": layers, "length": 1.5}
    return FramewiseTransformer(FRAMES[frames], 8, 1, neighborhood=near, options=options, **given)


def joint(width: int, sizes: Sizes) -> nn.Module:
    """Joint attention of the same width, over the pairs of the 24 frames of four neighbors."""
    torch.manual_seed(0)
    frames, near = FiniteFrames(octahedral()), Nearest(4)
    given: dict[str, Any] = {"space": Euclidean(SE(3)), "frames": frames, "neighborhood": near}
    return LieTransformer(8, 1, channels=_channels(width, 24), layers=sizes["layers"], heads=2, **given)


def step(kind: Clouds, make: Callable[[], nn.Module], sizes: Sizes) -> Problem:
    """Forward pass, backward pass and optimizer of a network."""
    data, model = batch(kind, sizes), make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def problem() -> Iterator[Tensor]:
        optimizer.zero_grad()
        yield model(data).square().mean()
        optimizer.step()

    return problem


def _cases_of_fibers(sizes: Sizes, device: str) -> Cases:
    """Steps, with exact frames first."""
    kinds: tuple[Clouds, ...] = ("molecules", "shapes")
    steps: dict[str, dict[str, Callable[[], Problem]]] = {
        f"{kind} {width}": {
            name: partial(step, kind, partial(network, kind, name, width, sizes), sizes) for name in FRAMES
        }
        for kind in kinds
        for width in sizes["widths"]
    }
    width = sizes["widths"][0]
    steps[f"molecules {width}"]["joint O"] = partial(step, "molecules", partial(joint, width, sizes), sizes)
    return steps


# Clouds and the points of each.
FIBERS = Benchmark(
    "a training step with fibers of 4 to 60 frames at equal width (CPU time)",
    {"molecules": (32, 18), "shapes": (16, 64), "widths": (96, 192), "layers": 4},
    {"molecules": (2, 6), "shapes": (2, 6), "widths": (48,), "layers": 1},
    _cases_of_fibers,
    on_gpus=False,
    options={"repeats": 7, "threads": 1, "memory": False, "clock": time.process_time},
)


@cache
def _energies(name: str, layers: int, training: bool, compiled: bool) -> EnergyForces:
    """A network of about 40,000 parameters for four layers, the same for molecules of all sizes."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"neighborhood": Radius(5.0), "layers": layers, "pool": "sum"}
    frames, of_points = FRAMES[name.split()[-1]], name.startswith("framewise")
    model = EnergyForces(
        FramewiseTransformer(frames, 8, 1, channels=8, length=1.5, **given)
        if of_points
        else DirectionConvNet(frames, 8, 1, channels=_DIRECTION_CHANNELS[name], **given)
    )
    if compiled:
        model.compile()
    return model.train(training).requires_grad_(training)


def energies(name: str, sizes: Sizes, atoms: int, molecules: int, compiled: bool) -> Problem:
    """A training step on energies and forces of molecules, or both alone for one molecule."""
    data = batch("molecules", {"molecules": (molecules, atoms)})
    model = _energies(name, sizes["layers"], molecules > 1, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def problem() -> Iterator[Tensor]:
        optimizer.zero_grad()
        energy, force = cast(tuple[Tensor, Tensor], model(data))
        if molecules > 1:
            yield energy.square().mean() + force.square().mean()
            optimizer.step()

    return problem


_DIRECTION_CHANNELS = {"T": 24, "O": 20, "I": 18}


def _cases_of_forces(sizes: Sizes, device: str) -> Cases:
    return {
        f"{name}, {f'step of {count} x' if count > 1 else 'energy of'} {atoms} atoms": {
            way: partial(energies, name, sizes, atoms, count, way == "compiled") for way in sizes["ways"]
        }
        for name in (*_DIRECTION_CHANNELS, "framewise T")
        for count in (sizes["molecules"], 1)
        for atoms in sizes["atoms"]
    }


# The molecules have the sizes of ethanol and aspirin.
FORCES = Benchmark(
    "energies and forces of molecules: a training step, and one molecule alone, eager and compiled (CPU time)",
    {"atoms": (9, 21), "molecules": 5, "layers": 4, "ways": ("eager", "compiled")},
    {"atoms": (5,), "molecules": 2, "layers": 1, "ways": ("eager",)},
    _cases_of_forces,
    on_gpus=False,
    options={"repeats": 15, "threads": 1, "memory": False, "clock": time.process_time},
)
