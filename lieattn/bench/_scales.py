"""Errors at the ends of a truncated fiber of scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lieattn.bench._measure import Benchmark
from lieattn.geometry import Radius, ScaleFrames, lift
from lieattn.groups import cyclic
from lieattn.models import GSANet
from lieattn.nn import LieBlock, LieSelfAttention
from lieattn.testing import randomize

CHANNELS, HEADS, POINTS, RADIUS = 16, 4, 40, 0.8
SMALL = {"POINTS": 8}
GROUP = cyclic(4)
SCALES = ScaleFrames(GROUP, base=2**0.5, levels=7, first=0.5)
Field = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ScaleError:
    """Root mean square difference between the field of the dilated cloud on scale k + 1 and of the cloud on scale k.

    It is relative to the standard deviation of the second field over the points.
    """

    case: str  # the layers
    way: str  # the scale k
    error: float
    repeats: int  # number of clouds


def run(repeats: int | None = None, device: str = "cpu") -> list[ScaleError]:
    """Return the records of lifting layers with up to three more layers, for random clouds in the plane.

    They are layers of LieTransformer, and whole GSA-Nets.
    """
    repeats = repeats or 8
    generator = torch.Generator().manual_seed(0)
    pos = torch.randn(repeats * POINTS, 2, generator=generator, dtype=torch.float64)
    x = torch.randn(repeats * POINTS, CHANNELS, generator=generator, dtype=torch.float64)
    batch = torch.arange(repeats).repeat_interleave(POINTS)
    pos, x, batch = pos.to(device), x.to(device), batch.to(device)
    records = []
    for case, field in _cases(device):
        with torch.no_grad():
            small, large = (field(scale * pos, x, batch) for scale in (1.0, SCALES.base))
        for k in range(SCALES.levels - 1):
            error = (large[:, k + 1] - small[:, k]).square().mean().sqrt()
            spread = (small[:, k] - small[:, k].mean(0)).square().mean().sqrt()
            records.append(ScaleError(case, f"k={k}", float(error / spread), repeats))
    return records


def table(records: list[ScaleError]) -> str:
    """Markdown, as in docs/exactness.md."""
    rows = {"layers": list(dict.fromkeys(record.way for record in records)), "---": ["---"] * (SCALES.levels - 1)}
    for record in records:
        rows.setdefault(record.case, []).append(f"{record.error:.1e}")
    return "\n".join(f"| {' | '.join([name, *cells])} |" for name, cells in rows.items())


def _cases(device: str) -> Iterator[tuple[str, Field]]:
    """Names, and fields ``[points, levels, fiber, channels]`` of positions, features and clouds."""
    coordinates = GROUP.dim + GROUP.dim**2 + 1
    for layers in range(4):
        modules = nn.ModuleList(
            LieBlock(LieSelfAttention(CHANNELS, coordinates, heads=HEADS), CHANNELS) for _ in range(layers + 1)
        )
        randomize(modules)
        yield f"lifting + {layers}", partial(_field_of_layers, modules.double().to(device))
    for layers in range(4):
        network = GSANet(
            SCALES, CHANNELS, neighborhood=Radius(RADIUS), channels=CHANNELS, blocks=(layers,), heads=HEADS
        )
        randomize(network)
        yield f"GSA-Net, blocks: {layers}", partial(_field_of_network, network.double().to(device))


def _field_of_layers(modules: nn.ModuleList, pos: Tensor, x: Tensor, batch: Tensor) -> Tensor:
    lifting, between = (lift(pos, replace(SCALES, reach=reach), Radius(RADIUS), batch=batch) for reach in (0, 1))
    field = lifting.spread(x)[:, None].expand(-1, GROUP.order, -1)
    for number, module in enumerate(modules):
        field = module(field, between if number else lifting)
    return between.by_level(field)


def _field_of_network(network: GSANet, pos: Tensor, x: Tensor, batch: Tensor) -> Tensor:
    field, graph = network.field(SimpleNamespace(pos=pos, x=x, batch=batch))
    return graph.by_level(field)


BENCHMARK = Benchmark(run, table)
