"""Framewise attention over whole clouds beside functions of torch that compute the same.

All clouds have the same size, so no way needs padding. FlexAttention is compiled, and measured on GPUs only, because it
has no gradient on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn.bench._measure import Cases, Problem, mean_square, timed
from lieattn.geometry import AllPairs
from lieattn.ops import backend, explain, group_attention

# Clouds, points, frames: molecules as in QM9, and larger clouds.
CASES = {"128x18": (128, 18, 4), "16x256": (16, 256, 4), "4x1024": (4, 1024, 12)}
HEADS, DIM = 8, 16
SMALL = {"CASES": {"1x3": (1, 3, 2)}, "HEADS": 1, "DIM": 2}
Way = Literal["scatter", "torch", "flex", "dense", "kernel"]


def build(clouds: int, points: int, frames: int, way: Way, device: str = "cpu") -> Problem:
    """Attention within each frame, with 8 heads of 16; all ways get the same signals ``[points, frames, *]``."""
    generator = torch.Generator().manual_seed(0)
    size = (clouds * points, frames, HEADS, DIM)
    query, key, value = (torch.randn(size, generator=generator).to(device).requires_grad_() for _ in range(3))
    pos, batch = torch.zeros(len(query), 1, device=device), torch.arange(clouds, device=device)
    neighbors = AllPairs()(pos, batch.repeat_interleave(points)) if way in ("scatter", "dense", "kernel") else None
    rectangle = _rectangle(way, device)
    kernel: Any = explain(query, key, value, pattern="framewise").backend

    def ours() -> Tensor:
        asked: dict[str, Any] = {"scatter": "plain", "dense": "dense"}
        with backend(asked.get(way, kernel)):
            return group_attention(query, key, value, cast(Any, neighbors), pattern="framewise")[0]

    def theirs() -> Tensor:
        rows = (x.unflatten(0, (clouds, points)).flatten(2, 3).transpose(1, 2) for x in (query, key, value))
        return rectangle(*rows).transpose(1, 2).flatten(0, 1).unflatten(1, (frames, HEADS))

    return mean_square(theirs if neighbors is None else ours)


def _rectangle(way: Way, device: str) -> Callable[..., Tensor]:
    """Return an attention function of torch on ``[clouds, frames * heads, points, dim]``."""
    if way != "flex":
        return F.scaled_dot_product_attention
    from torch.nn.attention.flex_attention import flex_attention

    given: Any = torch.compile(flex_attention) if device == "cuda" else flex_attention
    return cast(Callable[..., Tensor], given)


def cases(device: str = "cpu") -> Cases:
    """Return all cases; FlexAttention is left out on CPUs, where it has no gradient."""
    ways: tuple[Way, ...] = tuple(way for way in get_args(Way) if way != "flex" or device == "cuda")
    return {case: {way: partial(build, *sizes, way, device) for way in ways} for case, sizes in CASES.items()}


BENCHMARK = timed(cases)
