"""One layer of this library, compared with layers of the same width from other packages.

The layers compute different things (sampled lifts, irreps, invariant distances). The benchmark compares the time of a
layer with 32 channels and 4 heads on one cloud with 16 neighbors.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lieattn.bench._measure import Problem, Record, compare
from lieattn.geometry import Nearest, lift
from lieattn.groups import FiniteGroup, tetrahedral, trivial
from lieattn.nn import GroupSelfAttention, LiftingSelfAttention

CHANNELS, HEADS, NEIGHBORS = 32, 4, 16
SIZES = (64, 256)
SMALL = {"SIZES": (20,)}
GROUPS: dict[str, FiniteGroup] = {"lieattn-H1": trivial(3), "lieattn-T": tetrahedral()}
PEERS = {
    "lie-transformer": "lie_transformer_pytorch",
    "se3-transformer": "se3_transformer_pytorch",
    "equiformer": "equiformer_pytorch",
    "egnn": "egnn_pytorch",
}


def build(way: str, points: int, device: str = "cpu") -> Problem:
    """Make a layer and a random cloud ``[1, points, 3]``, and its forward pass."""
    torch.manual_seed(0)
    x, pos = torch.randn(1, points, CHANNELS).to(device).requires_grad_(), torch.randn(1, points, 3).to(device)
    layer = _ours(GROUPS[way], device) if way in GROUPS else _peer(way, importlib.import_module(PEERS[way]), device)
    mask = torch.ones(1, points, dtype=torch.bool, device=device)

    def problem() -> Iterator[Tensor]:
        out = layer(x, pos, mask=mask)
        yield (out[0] if isinstance(out, tuple) else out).square().mean()

    return problem


def _ours(group: FiniteGroup, device: str) -> Callable[..., Tensor]:
    lifting = LiftingSelfAttention(group, CHANNELS, CHANNELS, heads=HEADS).to(device)
    attention = GroupSelfAttention(group, CHANNELS, CHANNELS, heads=HEADS, pattern="joint").to(device)

    def layer(x: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        graph = lift(pos[0], group, Nearest(NEIGHBORS))
        return attention(lifting(x[0], graph), graph)

    return layer


def _peer(way: str, package: Any, device: str) -> Callable[..., Any]:
    """One layer of a package, called with features, positions and a mask."""
    width = CHANNELS // HEADS
    near: dict[str, Any] = {"depth": 1, "num_degrees": 2, "num_neighbors": NEIGHBORS}
    if way == "egnn":
        layer = package.EGNN(dim=CHANNELS, num_nearest_neighbors=NEIGHBORS).to(device)
        return lambda x, pos, mask: layer(x, pos)
    if way == "equiformer":
        several = {"heads": (HEADS, HEADS), "dim_head": (width, width)}
        layer = package.Equiformer(dim=(CHANNELS, CHANNELS // 2), input_degrees=1, **near, **several).to(device)
        return lambda *cloud, mask: layer(*cloud, mask=mask).type0
    if way == "se3-transformer":
        layer = package.SE3Transformer(dim=CHANNELS, heads=HEADS, dim_head=width, **near).to(device)
        return partial(layer, return_type=0)
    lie = package.LieTransformer(dim=CHANNELS, depth=1, heads=HEADS, dim_head=width, liftsamples=1)
    on_device: Callable[..., Any] = lie.to(device)
    return on_device


def remarks(records: list[Record]) -> list[str]:
    """Return lines of text about the peers that were skipped."""
    measured = {record.way for record in records}
    return [
        f"skipped {way}: not installed (pip install {package.replace('_', '-')})"
        for way, package in PEERS.items()
        if way not in measured
    ]


def run(repeats: int = 5, device: str = "cpu") -> list[Record]:
    """Return the records of the cases N64 and N256, for this library and the installed peers."""
    ways = [*GROUPS, *(way for way, package in PEERS.items() if importlib.util.find_spec(package))]
    cases = {f"N{points}": {way: partial(build, way, points, device) for way in ways} for points in SIZES}
    return compare(cases, repeats=repeats, device=device)
