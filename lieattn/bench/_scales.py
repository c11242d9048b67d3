"""What is lost at the ends of a truncated fiber of scales: clouds are dilated by one step, fields compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lieattn.geometry import Radius, ScaleFrames, lift
from lieattn.groups import cyclic
from lieattn.nn import LieBlock, LieSelfAttention
from lieattn.testing import randomize

CHANNELS, HEADS, POINTS, RADIUS = 16, 4, 40, 0.8
GROUP = cyclic(4)
SCALES = ScaleFrames(GROUP, base=2**0.5, levels=7, first=0.5)


@dataclass(frozen=True)
class ScaleError:
    """Root mean square of the field of the dilated cloud on scale k + 1 less that of the cloud on scale k.

    It is relative to the standard deviation of the latter over points.
    """

    case: str  # the layers
    way: str  # the scale k
    error: float
    repeats: int  # number of clouds


def run(repeats: int = 8) -> list[ScaleError]:
    """Records of lifting, followed by none to three layers between group elements, for random clouds of the plane."""
    generator = torch.Generator().manual_seed(0)
    pos = torch.randn(repeats * POINTS, 2, generator=generator, dtype=torch.float64)
    x = torch.randn(repeats * POINTS, CHANNELS, generator=generator, dtype=torch.float64)
    batch = torch.arange(repeats).repeat_interleave(POINTS)
    records = []
    for layers in range(4):
        modules = _network(layers)
        with torch.no_grad():
            small, large = (_field(modules, scale * pos, x, batch) for scale in (1.0, SCALES.base))
        for k in range(SCALES.levels - 1):
            error = (large[:, k + 1] - small[:, k]).square().mean().sqrt()
            spread = (small[:, k] - small[:, k].mean(0)).square().mean().sqrt()
            records.append(ScaleError(f"lifting + {layers}", f"k={k}", float(error / spread), repeats))
    return records


def table(records: list[ScaleError]) -> str:
    """Markdown, as in docs/exactness.md."""
    rows = {"layers": list(dict.fromkeys(record.way for record in records)), "---": ["---"] * (SCALES.levels - 1)}
    for record in records:
        rows.setdefault(record.case, []).append(f"{record.error:.1e}")
    return "\n".join(f"| {' | '.join([name, *cells])} |" for name, cells in rows.items())


def _network(layers: int) -> nn.ModuleList:
    coordinates = GROUP.dim + GROUP.dim**2 + 1
    modules = nn.ModuleList(
        LieBlock(LieSelfAttention(CHANNELS, coordinates, heads=HEADS), CHANNELS) for _ in range(layers + 1)
    )
    randomize(modules)
    return modules.double()


def _field(modules: nn.ModuleList, pos: Tensor, x: Tensor, batch: Tensor) -> Tensor:
    """Field ``[points, levels, fiber, channels]``."""
    lifting, between = (lift(pos, replace(SCALES, reach=reach), Radius(RADIUS), batch=batch) for reach in (0, 1))
    field = lifting.spread(x)[:, None].expand(-1, GROUP.order, -1)
    for number, module in enumerate(modules):
        field = module(field, between if number else lifting)
    return between.by_level(field)
