"""Evaluators of the operator against its definition: outputs, weights, gradients and second derivatives."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import astuple, dataclass
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from lieattn.geometry import AllPairs, Neighbors
from lieattn.ops import RelativeTerms, backend, group_attention, reference_attention
from lieattn.ops.kernels.attention import _launch
from tests.fuzz._target import Finding, Target, Verdict

_PATTERNS = ("joint", "framewise", "pooled", "query_sum")
_NORMALIZATIONS = ("softmax", "softmax", "mean", "exp-mean", "none")
_EXACT = 1e-9  # relative to the largest entry, in float64
_TIMES = 10  # as far from the definition as plain maths in float32 may a faster evaluator be
_FEW = 16 * torch.finfo(torch.float32).eps
_MOST = 60  # loops of the definition


@dataclass(frozen=True)
class Case:
    """What is drawn; the rest follows from the seed."""

    seed: int
    pattern: str
    normalize: str
    dtype: torch.dtype
    gradients: bool

    def __repr__(self) -> str:
        return f"Case{astuple(self)}"


_CASES = st.builds(
    Case,
    st.binary(min_size=8, max_size=8).map(lambda drawn: int.from_bytes(drawn) % 2**62),
    st.sampled_from(_PATTERNS),
    st.sampled_from(_NORMALIZATIONS),
    st.sampled_from((torch.float32, torch.float64)),
    st.booleans(),
)


class Drawn:
    """Operands of a case: random sizes, strides, broadcast axes, terms, lists and magnitudes."""

    def __init__(self, case: Case) -> None:
        self.case, self.toss = case, random.Random(case.seed)
        self.generator = torch.Generator().manual_seed(case.seed)
        pattern, choice = case.pattern, self.toss.choice
        self.fiber = choice((1, 1, 2, 2, 3, 3, 4, 4, 6, 8, 12) if self.chance(0.95) else (24,))
        self.heads = choice((1, 1, 2, 3, 4, 5, 8, 9, 17))
        self.depth, self.width = choice((1, 2, 3, 5)), choice((1, 2, 4, 5))
        self.with_query = self.chance(0.8)
        tied = pattern in ("joint", "framewise")
        self.queries = self.fiber if tied else self.of(self.fiber)
        free = pattern == "query_sum" or (pattern == "pooled" and self.queries == 1)
        self.outs = choice((1, 2, 3, 4)) if free else self.queries
        loops = self.outs * (self.queries if pattern == "query_sum" else 1)
        self.points = min(choice((0, 1, 2, 3, 5, 7, 30)), max(1, _MOST // loops))
        self.neighbors = self._neighbors()
        types = choice((1, 2, 5))
        edges = self.neighbors.num_edges
        self.row = self._indices(types, edges) if self.chance(0.5) else None
        self.types = edges if self.row is None else types
        self.options = {"pattern": pattern, "normalize": case.normalize}
        if self.chance(0.2):
            self.options["scale"] = choice((0.0, 1.0, -0.5, 1e-6))
        self.operands = self._operands()

    def chance(self, probability: float) -> bool:
        return self.toss.random() < probability

    def of(self, size: int) -> int:
        """The size of an axis, or 1, for all entries."""
        return size if self.chance(0.7) else 1

    def _indices(self, end: int, *shape: int) -> Tensor:
        return torch.randint(max(end, 1), shape, generator=self.generator)

    def _neighbors(self) -> Neighbors:
        points = self.points
        kind = self.toss.choice(("whole", "whole", "clouds", "others", "random", "random", "one list", "none"))
        if kind == "whole" or (kind in ("clouds", "others") and points == 0):
            return AllPairs()(torch.zeros(points, 1))
        if kind in ("clouds", "others"):
            size = self.toss.choice((1, 2, 3))
            return AllPairs(include_self=kind == "clouds")(torch.zeros(points, 1), torch.arange(points) // size)
        degree = torch.zeros(points, dtype=torch.int64)
        if kind == "random":  # points without neighbors, and sources more than once, as in periodic boxes
            degree = self._indices(4, points) * self._indices(2, points)
        elif kind == "one list" and points:
            degree[self.toss.randrange(points)] = self.toss.choice((1, 20, 200))
        row_ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        target = torch.arange(points).repeat_interleave(degree)
        source = self._indices(points, len(target))
        order = (target * max(points, 1) + source).argsort(stable=True)
        return Neighbors(row_ptr, source[order], target)

    def _draw(self, *shape: int, times: float = 1.0) -> Tensor:
        """Normal numbers whose strides may be those of a transposed, a sliced or an expanded tensor."""
        kind = self.toss.choice(("contiguous", "contiguous", "transposed", "sliced", "expanded"))

        def normal(*shape: int) -> Tensor:
            numbers = torch.randn(*shape, generator=self.generator, dtype=torch.float64) * times
            return numbers.to(self.case.dtype)

        if kind == "transposed":
            return normal(*reversed(shape)).permute(*reversed(range(len(shape))))
        if kind == "sliced":
            return normal(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]
        if kind == "expanded":
            axis = self.toss.randrange(len(shape))
            return normal(*(1 if i == axis else size for i, size in enumerate(shape))).expand(shape)
        return normal(*shape)

    def _operands(self) -> dict[str, Tensor | None]:
        """Signals and terms by their names, those that are absent left out."""
        pattern, n, heads, depth, width, of = self.case.pattern, self.fiber, self.heads, self.depth, self.width, self.of
        outs, types, queries = self.outs, self.types, self.queries
        loud = self.toss.choice((1.0, 1.0, 1.0, 1e-3, 5.0, 30.0 if self.case.normalize == "softmax" else 1.0))
        pairs = 1 if pattern == "framewise" else n
        added = n if pattern in ("joint", "query_sum") else 1
        given = {"value": self._draw(self.points, n, heads, width)}
        shapes = {
            "displacement_bias": lambda: (types, of(outs), of(added), of(heads)),
            "psi": lambda: (types, of(outs), of(pairs), of(heads), of(width)),
            "beta": lambda: (types, of(outs), of(added), of(heads), of(width)),
        }
        if pattern != "pooled":
            shapes["fiber_bias"] = lambda: (of(queries), of(n), of(heads))
        if self.with_query:
            given["query"] = self._draw(self.points, queries, heads, depth, times=loud)
            given["key"] = self._draw(self.points, n, heads, depth)
            shapes["positional_key"] = lambda: (types, of(outs), of(heads), of(depth))
            if pattern in ("pooled", "framewise"):
                shapes["key_psi"] = lambda: (types, of(outs), of(pairs), of(heads), of(depth))
            if pattern != "pooled":
                cubic = (of(outs),) if pattern == "query_sum" and self.chance(0.1) else ()
                shapes["fiber_key"] = lambda: (*cubic, of(queries), of(n), of(heads), of(depth))
        share = self.toss.choice((0.0, 0.25, 0.5, 0.9))
        for name, shape in shapes.items():
            if self.chance(share):
                given[name] = self._draw(*shape(), times=loud if name == "displacement_bias" else 1.0)
        if "displacement_bias" in given and self.case.normalize == "softmax" and self.chance(0.15):
            bias = given["displacement_bias"]
            masked = torch.rand(bias.shape, generator=self.generator) < 0.3
            given["displacement_bias"] = bias.masked_fill(masked, -torch.inf)
        if (
            self.with_query and self.width == self.depth and self.chance(0.2)
        ):  # one signal, and one ψ, may serve as both
            given["key"] = given["value"]
            if "psi" in given and "key_psi" in given:
                given["key_psi"] = given["psi"]
        return given

    def __repr__(self) -> str:
        shapes = {name: tuple(t.shape) for name, t in self.operands.items()}
        return f"{self.case} {self.options} {self.neighbors} {shapes} row={self.row is not None}"

    def direction(self, out: Tensor) -> Tensor:
        """What outputs are multiplied with before gradients are taken, the same for every evaluator."""
        generator = torch.Generator().manual_seed(self.case.seed + 1)
        return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)


Outcome = list[list[Tensor]]  # the output, its gradients, and their gradients: what is measured against one another


def _evaluate(drawn: Drawn, evaluate: Callable[..., Tensor], dtype: torch.dtype, twice: bool) -> Outcome:
    leaves = {name: t.to(dtype).detach().requires_grad_(drawn.case.gradients) for name, t in drawn.operands.items()}
    for one, other in (("key", "value"), ("key_psi", "psi")):
        if one in leaves and drawn.operands[one] is drawn.operands.get(other):
            leaves[one] = leaves[other]
    signals = [leaves.get(name) for name in _SIGNALS]
    tables = {name: t for name, t in leaves.items() if name not in _SIGNALS}
    out = evaluate(*signals, drawn.neighbors, terms=RelativeTerms(**tables, row=drawn.row), **drawn.options)
    if not drawn.case.gradients:
        return [[out]]
    through = list(dict.fromkeys(leaves.values()))
    first = _gradients(out, through, drawn.direction(out), twice)
    if not twice:
        return [[out], first]
    total = sum(grad.square().sum() for grad in first)
    return [[out], first, _gradients(total, through, torch.ones_like(total), False)]


def _gradients(out: Tensor, through: list[Tensor], direction: Tensor, twice: bool) -> list[Tensor]:
    """Gradients, zero where there are none."""
    if not out.requires_grad:
        return [torch.zeros_like(leaf) for leaf in through]
    options = {"create_graph": twice, "materialize_grads": True, "allow_unused": True}
    return list(torch.autograd.grad(out, through, direction, **options))


def _distance(found: Outcome, wanted: Outcome) -> float:
    """Largest difference, relative to the largest entry of its kind or one before; infinite if a number is missing."""
    farthest, scale = 0.0, 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        pairs = [(a.detach().double(), b.detach()) for a, b in zip(ours, theirs, strict=True) if b.numel()]
        scale = max([scale, *(float(b.nan_to_num(0, 0, 0).abs().max()) for _, b in pairs)])
        for a, b in pairs:
            if not torch.equal(a.isfinite(), b.isfinite()):
                return math.inf
            difference = float((a - b).nan_to_num(0, 0, 0).abs().max())
            if difference:
                farthest = max(farthest, difference / scale if scale else math.inf)
        if not all(bool(b.isfinite().all()) for _, b in pairs):
            break  # a point whose keys are all masked: how far its gradients are no numbers is nobody's to say
    return farthest


def _check(case: Case) -> Finding | Verdict:
    drawn = Drawn(case)
    single, toss = case.dtype == torch.float32, drawn.toss
    loops = drawn.points * drawn.outs * drawn.queries
    twice = case.gradients and not single and loops < 20 and drawn.chance(0.1)
    wanted = _evaluate(drawn, reference_attention, torch.float64, twice)
    threads, room = toss.choice((1, 1, 2)), toss.choice((2**19, 2**19, 1))
    names = [
        "plain",
        "numba",
        *(["dense"] if drawn.neighbors.whole_clouds else []),
        *(["auto"] if drawn.chance(0.2) else []),
    ]
    allowed = _EXACT
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name in names:
            with backend(name), mock.patch.object(_launch, "_SCRATCH_BYTES", room):
                found = _evaluate(drawn, lambda *a, **k: group_attention(*a, **k)[0], case.dtype, twice)
            shapes, expected = ([[t.shape for t in kind] for kind in kinds] for kinds in (found, wanted))
            if shapes != expected:
                return Finding(Verdict.SILENT, f"{name}: shapes {shapes}, not {expected}, of {drawn}")
            distance = _distance(found, wanted)
            if name == "plain" and single:
                allowed = _TIMES * distance + _FEW
            elif distance > allowed:
                return Finding(
                    Verdict.SILENT, f"{name}: {distance:.1e} from the definition, allowed {allowed:.1e}: {drawn}"
                )
    finally:
        torch.set_num_threads(before)
    return Verdict.CORRECT


_SIGNALS = ("query", "key", "value")

TARGETS = {"kernels": Target("kernel configurations", _CASES, _check, long=100_000)}
