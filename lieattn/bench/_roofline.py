"""Operations and bytes per second of the attention kernel, compared with the limits of the machine or GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer

from lieattn.bench import _attention
from lieattn.bench._measure import compare

_MATRIX, _COPY = {"cpu": 1536, "cuda": 8192}, {"cpu": 2**26, "cuda": 2**29}
SMALL = {"_MATRIX": {"cpu": 64, "cuda": 64}, "_COPY": {"cpu": 1024, "cuda": 1024}}
SHRINKS = ("lieattn.bench._attention",)


@dataclass(frozen=True)
class Roof:
    """One pass of the kernel relative to the ceilings; counts are for the formula, whatever a way computes."""

    case: str
    way: str
    pass_: str  # "forward" or "backward"
    step_ms: float  # duration of the pass
    gflops: float
    gbytes: float  # per second, as well
    compute: float  # fraction of the speed of a large matrix product
    bandwidth: float  # fraction of the speed of a large copy


def ceilings(device: str = "cpu") -> tuple[float, float]:
    """Billions of float32 operations per second in a matrix product, and of bytes per second in a copy."""
    size, length = _MATRIX[device], _COPY[device]
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    x, y, threads = torch.randn(length, device=device), torch.empty(length, device=device), torch.get_num_threads()
    product = Timer("torch.mm(a, b)", globals={"a": a, "b": b}, num_threads=threads).blocked_autorange().median
    copy = Timer("y.copy_(x)", globals={"x": x, "y": y}, num_threads=threads).blocked_autorange().median
    return 2 * size**3 / product / 1e9, 2 * 4 * length / copy / 1e9


def run(repeats: int = 5, device: str = "cpu") -> list[Roof]:
    """Measure both passes of all cases and ways of the ``attention`` benchmark."""
    flops, bandwidth = ceilings(device)
    rows = []
    for record in compare(_attention.cases(device), repeats=repeats, memory=False, device=device):
        work, traffic = _work(int(record.case.removeprefix("H")), _attention.IMAGES[device])
        # The backward pass computes both products again, and two gradients for each of them.
        passes = (("forward", record.forward_ms, 1, 1), ("backward", record.step_ms - record.forward_ms, 2.5, 2))
        for name, milliseconds, products, signals in passes:
            gflops, gbytes = products * work / milliseconds / 1e6, signals * traffic / milliseconds / 1e6
            share = gflops / flops, gbytes / bandwidth
            rows.append(Roof(record.case, record.way, name, milliseconds, gflops, gbytes, *share))
    return rows


def table(rows: list[Roof]) -> str:
    """Format the rows as aligned text."""
    head = f"{'case':8}{'way':10}{'pass':10}{'ms':>10}{'Gflop/s':>10}{'GB/s':>8}{'of product':>12}{'of copy':>10}"
    lines = [
        f"{r.case:8}{r.way:10}{r.pass_:10}{r.step_ms:>10.1f}{r.gflops:>10.1f}{r.gbytes:>8.2f}"
        f"{r.compute:>12.1%}{r.bandwidth:>10.1%}"
        for r in rows
    ]
    return "\n".join([head, "-" * len(head), *lines])


def _work(order: int, images: int) -> tuple[float, float]:
    """Operations of the forward pass (products of scores and of values), and bytes of its tensors."""
    side, reach = _attention.SIDE, _attention.SIZE // 2
    along = sum(min(side, i + reach + 1) - max(0, i - reach) for i in range(side))
    edges = images * along**2
    products = 2 * edges * _attention.HEADS * order * order * _attention.DIM * 2
    signals = 4 * 4 * images * side**2 * order * _attention.HEADS * _attention.DIM
    return float(products), float(signals)
