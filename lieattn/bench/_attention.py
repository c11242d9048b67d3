"""Group self-attention on images as points.

The plain evaluation gathers at the edges and scatters to the points. Unfolding copies every window to a dense array,
which is neighborhood attention (NATTEN) written in torch alone.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn.bench._gsa_net import window_order
from lieattn.bench._measure import Cases, Problem, mean_square, timed
from lieattn.geometry import PixelSquare, lift, pixel_positions
from lieattn.groups import cyclic
from lieattn.ops import RelativeTerms, backend, group_attention

IMAGES = {"cpu": 8, "cuda": 64}
SIDE, SIZE, HEADS, DIM = 28, 5, 8, 8
SMALL = {"IMAGES": {"cpu": 1, "cuda": 1}, "SIDE": 6}


def build(order: int, way: Literal["plain", "unfold", "auto"], device: str = "cpu") -> Problem:
    """Joint attention on 8 images of 28 x 28 (64 on GPUs), 5 x 5 neighborhoods, 8 heads of 8, with a positional key."""
    group = cyclic(order)
    generator = torch.Generator().manual_seed(0)
    graph = lift(pixel_positions(SIDE, SIDE).expand(IMAGES[device], -1, -1), group, PixelSquare(SIZE)).to(device)
    size = (graph.num_points, order, HEADS, DIM)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    query, key, value = draw(*size), draw(*size), draw(*size)
    rho = draw(graph.relative.num_rows, order, 1, DIM)
    places = window_order(graph, SIZE)

    def attend() -> Tensor:
        if way == "unfold":
            return unfolded(query, key, value, rho[places, :, 0], SIDE)
        with backend(way):
            terms = RelativeTerms(positional_key=rho, row=graph.relative.row)
            return group_attention(query, key, value, graph.neighbors, terms=terms)[0]

    return mean_square(attend)


def unfolded(query: Tensor, key: Tensor, value: Tensor, rho: Tensor, side: int) -> Tensor:
    """Compute the same attention on square images over copied windows; ``rho`` is ``[places, fiber, dim]``."""
    _, order, heads, dim = value.shape
    size = round(len(rho) ** 0.5)

    def windows(signal: Tensor) -> Tensor:
        planes = signal.flatten(1).unflatten(0, (-1, side, side)).permute(0, 3, 1, 2)
        return F.unfold(planes, size, padding=size // 2).view(len(planes), order, heads, dim, size * size, -1)

    inside = F.unfold(value.new_ones(1, 1, side, side), size, padding=size // 2)[0] > 0  # [places, pixels]
    q = query.unflatten(0, (-1, side * side)) / dim**0.5
    content = torch.einsum("bpged,bmedkp->bpegmk", q, windows(key))
    score = content + torch.einsum("bpged,kgd->bpegk", q, rho)[..., None, :]
    score = score.masked_fill(~inside.T[None, :, None, None, None], float("-inf"))
    weight = score.flatten(-2).softmax(-1).view_as(score)
    return torch.einsum("bpegmk,bmedkp->bpged", weight, windows(value)).flatten(0, 1)


def cases(device: str = "cpu") -> Cases:
    """Return the cases H4 and H8, with the ways ``plain``, ``unfold`` and ``fused``."""
    ways: tuple[tuple[str, Literal["plain", "unfold", "auto"]], ...]
    ways = (("plain", "plain"), ("unfold", "unfold"), ("fused", "auto"))
    return {f"H{n}": {name: partial(build, n, way, device) for name, way in ways} for n in (4, 8)}


BENCHMARK = timed(cases)
