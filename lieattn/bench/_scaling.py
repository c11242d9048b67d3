"""Growth of cost with the sizes of a problem."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from lieattn.bench._measure import Cases, Problem, Record, mean_square, timed
from lieattn.geometry import Nearest, lift
from lieattn.groups import FiniteGroup, cyclic_about, octahedral, tetrahedral, trivial
from lieattn.ops import RelativeTerms, group_attention

CHANNELS, HEADS = 32, 4
POINTS = (1_000, 3_000, 10_000, 30_000, 100_000)
ORDERS = (1, 4, 8, 12, 24)
NEIGHBORS = (8, 16, 32, 64)
SMALL = {"POINTS": (50, 100), "ORDERS": (1, 4), "NEIGHBORS": (4, 8), "BASE": {"points": 50, "order": 4, "neighbors": 4}}
BASE = {"points": 10_000, "order": 4, "neighbors": 16}


def build(points: int, order: int, neighbors: int, device: str = "cpu") -> Problem:
    """Joint attention of 32 channels in 4 heads on a random cloud in 3D, with a positional key for every edge."""
    group = _group(order)
    generator = torch.Generator().manual_seed(0)
    graph = lift(torch.randn(points, 3, generator=generator).to(device), group, Nearest(neighbors - 1))
    size = (points, order, HEADS, CHANNELS // HEADS)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    query, key, value = draw(*size), draw(*size), draw(*size)
    weight = draw(3, CHANNELS // HEADS)

    def attend() -> Tensor:
        rho = (graph.relative.positions @ weight)[:, :, None]
        terms = RelativeTerms(positional_key=rho, row=graph.relative.row)
        return group_attention(query, key, value, graph.neighbors, terms=terms)[0]

    return mean_square(attend)


def _group(order: int) -> FiniteGroup:
    named = {1: trivial(3), 12: tetrahedral(), 24: octahedral()}
    return named.get(order) or cyclic_about(order)


def _case(points: int, order: int, neighbors: int) -> str:
    return f"N{points}-H{order}-K{neighbors}"


def cases(device: str = "cpu") -> Cases:
    """Return the way ``fused``: one size is varied at a time, then the largest cloud and group."""
    sizes = [(n, BASE["order"], BASE["neighbors"]) for n in POINTS]
    sizes += [(BASE["points"], order, BASE["neighbors"]) for order in ORDERS]
    sizes += [(BASE["points"], BASE["order"], k) for k in NEIGHBORS]
    sizes += [(POINTS[-1], 24, 16)]
    return {_case(*size): {"fused": partial(build, *size, device)} for size in sizes}


def remarks(records: list[Record]) -> list[str]:
    """Fit the slopes of log time and log memory against the log of each size by least squares."""
    by_case = {record.case: record for record in records}
    order, neighbors, points = BASE["order"], BASE["neighbors"], BASE["points"]
    sweeps = {
        "points": [(n, _case(n, order, neighbors)) for n in POINTS],
        "order": [(h, _case(points, h, neighbors)) for h in ORDERS],
        "neighbors": [(k, _case(points, order, k)) for k in NEIGHBORS],
    }
    lines = []
    for name, sweep in sweeps.items():
        found = [(size, by_case[case]) for size, case in sweep if case in by_case]
        if len(found) > 1:
            time = _slope((size, record.step_ms) for size, record in found)
            memory = _slope((size, max(record.peak_mb, 1.0)) for size, record in found)
            lines += [f"exponent of time in {name}: {time:.2f}", f"exponent of memory in {name}: {memory:.2f}"]
    return lines


def _slope(pairs: Iterable[tuple[int, float]]) -> float:
    logarithms = ((math.log(size), math.log(value)) for size, value in pairs)
    return statistics.linear_regression(*zip(*logarithms, strict=True)).slope


BENCHMARK = timed(cases, remarks, repeats=3)
