"""Operators of attention beside functions of torch that compute the same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn.bench._literal import window_order
from lieattn.bench._measure import Benchmark, Cases, Problem, Record, Sizes, mean_square
from lieattn.geometry import AllPairs, Nearest, PixelSquare, lift, pixel_positions
from lieattn.groups import cyclic, cyclic_about, octahedral, tetrahedral, trivial
from lieattn.ops import RelativeTerms, backend, explain, group_attention


def on_images(
    order: int, way: Literal["plain", "scatter", "unfold", "auto"], sizes: Sizes, device: str = "cpu"
) -> Problem:
    """Joint attention on images with 5 x 5 neighborhoods, 8 heads of 8, with a positional key.

    The plain evaluation gathers at the edges and scatters to the points, by torch or by torch-scatter. Unfolding copies
    every window to a dense array, which is neighborhood attention (NATTEN) written in torch alone.
    """
    group, side = cyclic(order), sizes["side"]
    generator = torch.Generator().manual_seed(0)
    graph = lift(pixel_positions(side, side).expand(sizes["images"][device], -1, -1), group, PixelSquare(5)).to(device)
    size = (graph.num_points, order, 8, 8)

    def draw(*sides: int) -> Tensor:
        return torch.randn(sides, generator=generator).to(device).requires_grad_()

    query, key, value = draw(*size), draw(*size), draw(*size)
    rho = draw(graph.relative.num_rows, order, 1, 8)
    places = window_order(graph, 5)

    def attend() -> Tensor:
        if way == "unfold":
            return unfolded(query, key, value, rho[places, :, 0], side)
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


def _cases_on_images(sizes: Sizes, device: str) -> Cases:
    ways: dict[str, Any] = {"plain": "plain", "scatter": "scatter", "unfold": "unfold", "fused": "auto"}
    if find_spec("torch_scatter") is None:
        del ways["scatter"]
    return {f"H{n}": {name: partial(on_images, n, way, sizes, device) for name, way in ways.items()} for n in (4, 8)}


ATTENTION = Benchmark(
    "one group attention layer on images: plain PyTorch, torch-scatter, unfolded windows, and the fused kernel",
    {"images": {"cpu": 8, "cuda": 64}, "side": 28},
    {"images": {"cpu": 1, "cuda": 1}, "side": 6},
    _cases_on_images,
)

Way = Literal["scatter", "torch", "flex", "dense", "kernel"]


def in_frames(size: tuple[int, int, int], way: Way, heads: tuple[int, int] = (8, 16), device: str = "cpu") -> Problem:
    """Attention within each frame over ``size``, clouds, points and frames; all ways get the same signals.

    All clouds have the same size, so no way needs padding. FlexAttention is compiled on GPUs.
    """
    clouds, points, frames = size
    generator = torch.Generator().manual_seed(0)
    shape = (clouds * points, frames, *heads)
    query, key, value = (torch.randn(shape, generator=generator).to(device).requires_grad_() for _ in range(3))
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
        return rectangle(*rows).transpose(1, 2).flatten(0, 1).unflatten(1, (frames, heads[0]))

    return mean_square(theirs if neighbors is None else ours)


def _rectangle(way: Way, device: str) -> Callable[..., Tensor]:
    """Return an attention function of torch on ``[clouds, frames * heads, points, dim]``."""
    if way != "flex":
        return F.scaled_dot_product_attention
    from torch.nn.attention.flex_attention import flex_attention

    given: Any = torch.compile(flex_attention) if device == "cuda" else flex_attention
    return cast(Callable[..., Tensor], given)


def _cases_in_frames(sizes: Sizes, device: str) -> Cases:
    """All cases; FlexAttention is left out on CPUs, where it has no gradient."""
    ways: tuple[Way, ...] = tuple(way for way in get_args(Way) if way != "flex" or device == "cuda")
    return {
        "{}x{}".format(*size): {way: partial(in_frames, size, way, sizes["heads"], device) for way in ways}
        for size in sizes["clouds"]
    }


# Clouds, points, frames: molecules as in QM9, and larger clouds.
WHOLE_CLOUDS = Benchmark(
    "framewise attention over whole clouds, compared with FlexAttention and torch's own attention",
    {"clouds": ((128, 18, 4), (16, 256, 4), (4, 1024, 12)), "heads": (8, 16)},
    {"clouds": ((1, 3, 2),), "heads": (1, 2)},
    _cases_in_frames,
)


def of_size(size: tuple[int, int, int], device: str = "cpu") -> Problem:
    """Joint attention of 32 channels in 4 heads on a random cloud in 3D, with a positional key for every edge."""
    points, order, neighbors = size
    group = {1: trivial(3), 12: tetrahedral(), 24: octahedral()}.get(order) or cyclic_about(order)
    generator = torch.Generator().manual_seed(0)
    graph = lift(torch.randn(points, 3, generator=generator).to(device), group, Nearest(neighbors - 1))
    shape = (points, order, 4, 8)

    def draw(*sides: int) -> Tensor:
        return torch.randn(sides, generator=generator).to(device).requires_grad_()

    query, key, value = draw(*shape), draw(*shape), draw(*shape)
    weight = draw(3, 8)

    def attend() -> Tensor:
        rho = (graph.relative.positions @ weight)[:, :, None]
        terms = RelativeTerms(positional_key=rho, row=graph.relative.row)
        return group_attention(query, key, value, graph.neighbors, terms=terms)[0]

    return mean_square(attend)


def _sweeps(sizes: Sizes) -> dict[str, dict[int, tuple[int, int, int]]]:
    """Points, order and neighbors of each problem, where one of them is varied at a time."""
    names = ("points", "order", "neighbors")
    base = {name: sizes["base"][number] for number, name in enumerate(names)}
    return {name: {n: tuple((base | {name: n}).values()) for n in sizes[name]} for name in names}


def _name(points: int, order: int, neighbors: int) -> str:
    return f"N{points}-H{order}-K{neighbors}"


def _cases_of_sizes(sizes: Sizes, device: str) -> Cases:
    """One size is varied at a time, then the largest cloud and group."""
    each = [size for sweep in _sweeps(sizes).values() for size in sweep.values()] + [(sizes["points"][-1], 24, 16)]
    return {_name(*size): {"fused": partial(of_size, size, device)} for size in each}


def _exponents(records: list[Record], sizes: Sizes) -> list[str]:
    """Slopes of log time and log memory against the log of each size by least squares."""
    by_case = {record.case: record for record in records}
    lines = []
    for name, sweep in _sweeps(sizes).items():
        found = {size: by_case[_name(*problem)] for size, problem in sweep.items()}
        time = _slope((size, record.step_ms) for size, record in found.items())
        memory = _slope((size, max(record.peak_mb, 1.0)) for size, record in found.items())
        lines += [f"exponent of time in {name}: {time:.2f}", f"exponent of memory in {name}: {memory:.2f}"]
    return lines


def _slope(pairs: Iterable[tuple[int, float]]) -> float:
    logarithms = ((math.log(size), math.log(value)) for size, value in pairs)
    return statistics.linear_regression(*zip(*logarithms, strict=True)).slope


SCALING = Benchmark(
    "time and memory as functions of the number of points, the group order, and the number of neighbors",
    {
        "points": (1_000, 3_000, 10_000, 30_000, 100_000),
        "order": (1, 4, 8, 12, 24),
        "neighbors": (8, 16, 32, 64),
        "base": (10_000, 4, 16),
    },
    {"points": (50, 100), "order": (1, 4), "neighbors": (4, 8), "base": (50, 4, 4)},
    _cases_of_sizes,
    remarks=_exponents,
    options={"repeats": 3},
)
