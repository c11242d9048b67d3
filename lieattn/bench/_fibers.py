"""A training step with different numbers of frames at equal total width."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lieattn.bench._measure import Cases, Problem, timed
from lieattn.geometry import FiniteFrames, Nearest, PrincipalFrames, Radius
from lieattn.groups import SE, FiniteGroup, icosahedral, octahedral, tetrahedral
from lieattn.models import FramewiseTransformer, LieTransformer
from lieattn.models.frames import FramewiseOptions
from lieattn.ops import RelativeTerms, group_attention
from lieattn.spaces import Euclidean

Clouds = Literal["molecules", "shapes"]

WIDTHS, LAYERS, FEATURES = (96, 192), 4, 8
SIZES: dict[str, tuple[int, int]] = {"molecules": (32, 18), "shapes": (16, 64)}  # clouds, points of each
SMALL: dict[str, object] = {"SIZES": {"molecules": (2, 6), "shapes": (2, 6)}, "WIDTHS": (48,), "LAYERS": 1}
FRAMES: dict[str, FiniteGroup | PrincipalFrames] = {
    "exact": PrincipalFrames(),
    "T": tetrahedral(),
    "O": octahedral(),
    "I": icosahedral(),
}
_FIBERS = {"exact": 4, "T": 12, "O": 24, "I": 60}


def batch(kind: Clouds) -> Data:
    """Clouds with the density of molecules, in Å, with types of atoms; or points on a sphere with normals."""
    clouds, points = SIZES[kind]
    generator = torch.Generator().manual_seed(0)
    pos = torch.randn(clouds * points, 3, generator=generator)
    if kind == "shapes":
        pos = pos / pos.norm(dim=1, keepdim=True)
    kinds = torch.randint(FEATURES, (len(pos),), generator=generator)
    x, of_cloud = nn.functional.one_hot(kinds, FEATURES).float(), torch.arange(clouds).repeat_interleave(points)
    scale = torch.tensor([2.0, 1.6, 1.2]) if kind == "molecules" else 1.0
    return Data(x=x, pos=scale * pos, normal=pos, batch=of_cloud)


def network(kind: Clouds, frames: str, width: int) -> FramewiseTransformer:
    """Four blocks in which channels times frames are closest to the width."""
    torch.manual_seed(0)
    channels = 2 * max(1, round(width / (2 * _FIBERS[frames])))
    if kind == "shapes":
        return FramewiseTransformer(
            FRAMES[frames], FEATURES, 1, channels=channels, layers=LAYERS, vector_inputs=("normal",), length=0.8
        )
    near, options = Radius(4.0), FramewiseOptions(positions=False)
    sizes: dict[str, Any] = {"channels": channels, "layers": LAYERS, "length": 1.5}
    return FramewiseTransformer(FRAMES[frames], FEATURES, 1, neighborhood=near, options=options, **sizes)


def joint(width: int) -> nn.Module:
    """Joint attention of the same width, over the pairs of the 24 frames of four neighbors."""
    torch.manual_seed(0)
    channels = 2 * max(1, round(width / 48))
    frames, near = FiniteFrames(octahedral()), Nearest(4)
    given: dict[str, Any] = {"space": Euclidean(SE(3)), "frames": frames, "neighborhood": near}
    return LieTransformer(FEATURES, 1, channels=channels, layers=LAYERS, heads=2, **given)


def step(kind: Clouds, make: Callable[[], nn.Module]) -> Problem:
    """Forward pass, backward pass and optimizer of a network."""
    data, model = batch(kind), make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def problem() -> Iterator[Tensor]:
        optimizer.zero_grad()
        yield model(data).square().mean()
        optimizer.step()

    return problem


def part(name: str, frames: str, width: int) -> Problem:
    """One part of a step on molecules, forward and backward, for inputs that need gradients."""
    data, model = batch("molecules"), network("molecules", frames, width)
    graph, positions, local = model.geometry(data)
    blocks: Any = model.blocks
    block = blocks[0]
    edges, lifting = model.edges, model.lifting
    if local is None or edges is None or lifting is None or model.phases is None:
        raise RuntimeError("network: expected one with a neighborhood and attention")
    near, maps = local, [lifting.output, *(one.messages.kernel for one in blocks)]
    channels = len(block.norm1.weight)
    query, key, value = (torch.randn(graph.num_points, graph.fiber, 1, channels, requires_grad=True) for _ in range(3))
    x = query[:, :, 0]
    kernel = torch.randn(near.neighbors.num_edges, graph.fiber, channels, requires_grad=True)
    terms = RelativeTerms(rotary=model.phases(positions).detach(), rotary_values=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    runs: dict[str, Callable[[], Any]] = {
        "geometry": lambda: model.geometry(data),
        "edge networks": lambda: torch.stack([made.square().mean() for made in edges.kernels(maps, near, data.x)]),
        "attention": lambda: group_attention(query, key, value, graph.neighbors, pattern="framewise", terms=terms)[0],
        "projections": lambda: torch.cat([block.attention.projection(x), block.attention.output(x)], dim=-1),
        "messages": lambda: block.messages(x, replace(near, terms=kernel)),
        "feed forward": lambda: block.linear2(nn.functional.gelu(block.linear1(x))),
        "norms": lambda: block.norm1(x) + block.norm2(x),
        "optimizer": lambda: optimizer.step(),
    }

    def problem() -> Iterator[Tensor]:
        made = runs[name]()
        if isinstance(made, Tensor):
            yield made.square().mean()

    return problem


PARTS = ("geometry", "edge networks", "projections", "attention", "messages", "feed forward", "norms", "optimizer")


def cases(device: str = "cpu") -> Cases:
    """Return steps, with exact frames first, and the parts of a step, with one block's parts."""
    steps: dict[str, dict[str, Callable[[], Problem]]] = {
        f"{kind} {width}": {name: partial(step, kind, partial(network, kind, name, width)) for name in FRAMES}
        for kind in ("molecules", "shapes")
        for width in WIDTHS
    }
    steps[f"molecules {WIDTHS[0]}"]["joint O"] = partial(step, "molecules", partial(joint, WIDTHS[0]))
    parts = {name: {frames: partial(part, name, frames, WIDTHS[0]) for frames in FRAMES} for name in PARTS}
    return {**steps, **parts}


BENCHMARK = replace(
    timed(cases, repeats=7, threads=1, memory=False, clock=time.process_time),
    remarks=lambda records: [f"CPU time; parts are those of one block of width {WIDTHS[0]} on molecules"],
    on_gpus=False,
)
