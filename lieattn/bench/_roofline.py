"""The attention kernel's operations and bytes over time, against what the machine can do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer

from lieattn.bench import _attention
from lieattn.bench._measure import compare

_MATRIX, _COPY = 1536, 2**26


@dataclass(frozen=True)
class Roof:
    """One pass of the kernel against the ceilings; counted is what the mathematics needs, not what a way does."""

    case: str
    way: str
    pass_: str  # "forward" or "backward"
    step_ms: float  # of the pass
    gflops: float
    gbytes: float  # a second, as well
    compute: float  # fraction of the speed of a large matrix product
    bandwidth: float  # fraction of that of a large copy


def ceilings() -> tuple[float, float]:
    """Billions of float32 operations a second of a matrix product, and of bytes a second of a copy."""
    a, b = torch.randn(_MATRIX, _MATRIX), torch.randn(_MATRIX, _MATRIX)
    x, y, threads = torch.randn(_COPY), torch.empty(_COPY), torch.get_num_threads()
    product = Timer("torch.mm(a, b)", globals={"a": a, "b": b}, num_threads=threads).blocked_autorange().median
    copy = Timer("y.copy_(x)", globals={"x": x, "y": y}, num_threads=threads).blocked_autorange().median
    return 2 * _MATRIX**3 / product / 1e9, 2 * 4 * _COPY / copy / 1e9


def run(repeats: int = 5) -> list[Roof]:
    """Both passes of the cases of the ``attention`` benchmark, for ``plain`` and ``fused``."""
    flops, bandwidth = ceilings()
    rows = []
    for record in compare(_attention.cases(), repeats=repeats, memory=False):
        work, traffic = _work(int(record.case.removeprefix("H")))
        # Backward, the products are made again, and for each of the two products its two gradients.
        passes = (("forward", record.forward_ms, 1, 1), ("backward", record.step_ms - record.forward_ms, 2.5, 2))
        for name, milliseconds, products, signals in passes:
            gflops, gbytes = products * work / milliseconds / 1e6, signals * traffic / milliseconds / 1e6
            share = gflops / flops, gbytes / bandwidth
            rows.append(Roof(record.case, record.way, name, milliseconds, gflops, gbytes, *share))
    return rows


def table(rows: list[Roof]) -> str:
    """Aligned text."""
    head = f"{'case':8}{'way':10}{'pass':10}{'ms':>10}{'Gflop/s':>10}{'GB/s':>8}{'of product':>12}{'of copy':>10}"
    lines = [
        f"{r.case:8}{r.way:10}{r.pass_:10}{r.step_ms:>10.1f}{r.gflops:>10.1f}{r.gbytes:>8.2f}"
        f"{r.compute:>12.1%}{r.bandwidth:>10.1%}"
        for r in rows
    ]
    return "\n".join([head, "-" * len(head), *lines])


def _work(order: int) -> tuple[float, float]:
    """Operations of the forward pass (products of scores and of values), and bytes of its tensors."""
    side, reach = _attention.SIDE, _attention.SIZE // 2
    along = sum(min(side, i + reach + 1) - max(0, i - reach) for i in range(side))
    edges = _attention.IMAGES * along**2
    products = 2 * edges * _attention.HEADS * order * order * _attention.DIM * 2
    signals = 4 * 4 * _attention.IMAGES * side**2 * order * _attention.HEADS * _attention.DIM
    return float(products), float(signals)
