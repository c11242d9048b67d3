"""Group self-attention on images as points: plain maths against the fused kernel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lieattn.bench._measure import Cases, Problem, Record, compare
from lieattn.geometry import PixelSquare, lift, pixel_positions
from lieattn.groups import cyclic
from lieattn.ops import RelativeTerms, backend, group_attention

IMAGES, SIDE, SIZE, HEADS, DIM = 8, 28, 5, 8, 8


def build(order: int, way: Literal["plain", "auto"]) -> Problem:
    """Joint attention on 8 images of 28 x 28, 5 x 5 neighborhoods, 8 heads of 8, with a positional key."""
    group = cyclic(order)
    generator = torch.Generator().manual_seed(0)
    graph = lift(pixel_positions(SIDE, SIDE).expand(IMAGES, -1, -1), group, PixelSquare(SIZE))
    size = (graph.num_points, order, HEADS, DIM)
    query, key, value = (torch.randn(size, generator=generator, requires_grad=True) for _ in range(3))
    rho = torch.randn(graph.relative.num_rows, order, 1, DIM, generator=generator, requires_grad=True)

    def problem() -> Iterator[Tensor]:
        with backend(way):
            terms = RelativeTerms(positional_key=rho, row=graph.relative.row)
            out, _ = group_attention(query, key, value, graph.neighbors, terms=terms)
        yield out.square().mean()

    return problem


def cases() -> Cases:
    """Cases H4 and H8, ways ``plain`` and ``fused``."""
    return {f"H{n}": {"plain": partial(build, n, "plain"), "fused": partial(build, n, "auto")} for n in (4, 8)}


def run(repeats: int = 5) -> list[Record]:
    """Records of all cases."""
    return compare(cases(), repeats=repeats)
