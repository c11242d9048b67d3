"""Comparison of kernels with definitions: outputs, weights, gradients and second derivatives.

The operator by all its evaluators, attentive convolution, and the networks of heads and of edges. If the environment
variable TRITON_INTERPRET is 1, kernels for GPUs take part, which takes many times as long.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from lieattn.geometry import AllPairs, Neighbors
from lieattn.ops import (
    RelativeTerms,
    _gated_sums,
    backend,
    edge_kernels,
    edge_messages,
    edge_units,
    group_attention,
    reference_attention,
)
from lieattn.ops._attentive import attentive_convolution
from lieattn.ops._head_networks import head_networks
from lieattn.ops.kernels.attention import _launch
from tests.fuzz._target import Finding, Target, Verdict

_PATTERNS = ("joint", "framewise", "pooled", "query_sum")
_NORMALIZATIONS = ("softmax", "softmax", "mean", "exp-mean", "none")
_EXACT = 1e-9  # relative to the largest entry, in float64
_TIMES = 10  # largest error of a faster evaluator, relative to that of plain operations in float32
_FEW = 16  # number of rounding errors that any result may have, see Numbers.roundings
_MOST = 60  # largest number of loops in the definition
_WEIGHTS = 30_000
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_KERNELS = ["plain", "numba", *(["triton"] if _INTERPRETED else [])]


@dataclass(frozen=True)
class Sized:
    """The drawn properties of a case of a kernel. All others follow from the seed."""

    seed: int
    dtype: torch.dtype
    gradients: bool


@dataclass(frozen=True)
class Case(Sized):
    """The drawn properties of a case of the operator."""

    pattern: str
    normalize: str


_DRAWN = (
    st.binary(min_size=8, max_size=8).map(lambda drawn: int.from_bytes(drawn) % 2**62),
    st.sampled_from((torch.float32, torch.float64)),
    st.booleans(),
)
_SIZED = st.builds(Sized, *_DRAWN)
_CASES = st.builds(Case, *_DRAWN, st.sampled_from(_PATTERNS), st.sampled_from(_NORMALIZATIONS))


class Numbers:
    """Random choices, and numbers with strides of any kind, all from one seed."""

    least = 0.0  # smallest scale to which errors of results are relative
    roundings = 0.0  # errors of large scores and long sums for every evaluator, in units of the precision

    def __init__(self, case: Sized) -> None:
        self.seed, self.dtype, self.gradients = case.seed, case.dtype, case.gradients
        self.toss, self.generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)

    def chance(self, probability: float) -> bool:
        return self.toss.random() < probability

    def draw(self, *shape: int, times: float = 1.0, expanded: bool = True) -> Tensor:
        """Return normal numbers with the strides of a contiguous, transposed, sliced or expanded tensor."""
        kind = self.toss.choice(("contiguous", "contiguous", "transposed", "sliced", "expanded"))

        def normal(*shape: int) -> Tensor:
            numbers = torch.randn(*shape, generator=self.generator, dtype=torch.float64) * times
            return numbers.to(self.dtype)

        if kind == "transposed":
            return normal(*reversed(shape)).permute(*reversed(range(len(shape))))
        if kind == "sliced":
            return normal(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]
        if kind == "expanded" and expanded:
            axis = self.toss.randrange(len(shape))
            return normal(*(1 if i == axis else size for i, size in enumerate(shape))).expand(shape)
        return normal(*shape)

    def direction(self, out: Tensor) -> Tensor:
        """Return the factor of outputs before gradients are computed, which is the same for every evaluator."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)


class Drawn(Numbers):
    """Operands of a case: random sizes, strides, broadcast axes, terms, lists and magnitudes."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.case = case
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
        self.heads = min(self.heads, max(1, _WEIGHTS // max(1, edges * loops * self.fiber)))
        self.row = self._indices(types, edges) if self.chance(0.5) else None
        self.types = edges if self.row is None else types
        self.options = {"pattern": pattern, "normalize": case.normalize}
        if self.chance(0.2):
            self.options["scale"] = choice((0.0, 1.0, -0.5, 1e-6))
        self.operands = self._operands()
        if self.with_query and self.points:  # the rounding error of weights is that of the largest score
            query, key = self.operands["query"].double(), self.operands["key"].double()
            scale = self.options.get("scale", self.depth**-0.5)
            self.roundings = abs(scale) * float(torch.einsum("ighd,jmhd->igjmh", query, key).abs().max())
        if self.row is not None:  # gradients of rows are sequential sums over all their edges
            self.roundings = max(self.roundings, math.sqrt(edges * self.fiber * self.width))

    def of(self, size: int) -> int:
        """Return the size of an axis, or 1 for an axis that is broadcast."""
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
        if kind == "random":  # includes points without neighbors, and repeated sources, as in periodic boxes
            degree = self._indices(4, points) * self._indices(2, points)
        elif kind == "one list" and points:
            degree[self.toss.randrange(points)] = self.toss.choice((1, 20, 200))
        row_ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        target = torch.arange(points).repeat_interleave(degree)
        source = self._indices(points, len(target))
        order = (target * max(points, 1) + source).argsort(stable=True)
        return Neighbors(row_ptr, source[order], target)

    def _operands(self) -> dict[str, Tensor | None]:
        """Return signals and terms by their names, without absent ones."""
        pattern, n, heads, depth, width, of = self.case.pattern, self.fiber, self.heads, self.depth, self.width, self.of
        outs, types, queries = self.outs, self.types, self.queries
        loud = self.toss.choice((1.0, 1.0, 1.0, 1e-3, 5.0, 30.0 if self.case.normalize == "softmax" else 1.0))
        pairs = 1 if pattern == "framewise" else n
        added = n if pattern in ("joint", "query_sum") else 1
        given = {"value": self.draw(self.points, n, heads, width)}

        def psi(size: int) -> tuple[int, ...]:
            if pattern != "framewise" and self.chance(0.1):  # a matrix of the channels of all heads
                return (types, of(outs), of(pairs), heads, size, heads * size)
            return (types, of(outs), of(pairs), of(heads), of(size))

        shapes = {
            "displacement_bias": lambda: (types, of(outs), of(added), of(heads)),
            "psi": lambda: psi(width),
            "beta": lambda: (types, of(outs), of(added), of(heads), of(width)),
        }
        if pattern != "pooled":
            shapes["fiber_bias"] = lambda: (of(queries), of(n), of(heads))
        if self.with_query:
            given["query"] = self.draw(self.points, queries, heads, depth, times=loud)
            given["key"] = self.draw(self.points, n, heads, depth)
            shapes["positional_key"] = lambda: (types, of(outs), of(heads), of(depth))
            if pattern != "query_sum":
                shapes["key_psi"] = lambda: psi(depth)
            if pattern != "pooled":
                cubic = (of(outs),) if pattern == "query_sum" and self.chance(0.1) else ()
                shapes["fiber_key"] = lambda: (*cubic, of(queries), of(n), of(heads), of(depth))
        share = self.toss.choice((0.0, 0.25, 0.5, 0.9))
        for name, shape in shapes.items():
            if self.chance(share):
                given[name] = self.draw(*shape(), times=loud if name == "displacement_bias" else 1.0)
        if "displacement_bias" in given and self.case.normalize == "softmax" and self.chance(0.15):
            bias = given["displacement_bias"]
            masked = torch.rand(bias.shape, generator=self.generator) < 0.3
            given["displacement_bias"] = bias.masked_fill(masked, -torch.inf)
        # Keys and values can share one signal and one ψ.
        if self.with_query and self.width == self.depth and self.chance(0.2):
            given["key"] = given["value"]
            if "psi" in given and "key_psi" in given:
                given["key_psi"] = given["psi"]
        return given

    def __repr__(self) -> str:
        shapes = {name: tuple(t.shape) for name, t in self.operands.items()}
        return f"{self.case} {self.options} {self.neighbors} {shapes} row={self.row is not None}"


Outcome = list[list[Tensor]]  # the output, its gradients, and their gradients, which are compared


def _evaluate(drawn: Drawn, evaluate: Callable[..., Tensor], dtype: torch.dtype, twice: bool) -> Outcome:
    leaves = {name: t.to(dtype).detach().requires_grad_(drawn.gradients) for name, t in drawn.operands.items()}
    for one, other in (("key", "value"), ("key_psi", "psi")):
        if one in leaves and drawn.operands[one] is drawn.operands.get(other):
            leaves[one] = leaves[other]
    signals = [leaves.get(name) for name in _SIGNALS]
    tables = {name: t for name, t in leaves.items() if name not in _SIGNALS}
    out = evaluate(*signals, drawn.neighbors, terms=RelativeTerms(**tables, row=drawn.row), **drawn.options)
    return _outcome(drawn, out, list(dict.fromkeys(leaves.values())), twice)


def _outcome(drawn: Numbers, out: Tensor, through: list[Tensor], twice: bool) -> Outcome:
    if not drawn.gradients:
        return [[out]]
    first = _gradients(out, through, drawn.direction(out), twice)
    if not twice:
        return [[out], first]
    total = sum(grad.square().sum() for grad in first)
    return [[out], first, _gradients(total, through, torch.ones_like(total), False)]


def _gradients(out: Tensor, through: list[Tensor], direction: Tensor, twice: bool) -> list[Tensor]:
    """Return gradients, which are zero for tensors that have no effect."""
    if not out.requires_grad:
        return [torch.zeros_like(leaf) for leaf in through]
    options = {"create_graph": twice, "materialize_grads": True, "allow_unused": True}
    return list(torch.autograd.grad(out, through, direction, **options))


def _distance(found: Outcome, wanted: Outcome, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest entry of its kind or a previous one.

    It is infinite if a number is not finite. Entries smaller than ``least`` are rounding errors of larger numbers that
    cancel.
    """
    farthest, scale = 0.0, least
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
            break  # if all keys of a point are masked, it is not specified which gradients are NaN
    return farthest


def _compare(
    drawn: Numbers, wanted: Outcome, evaluators: list[str], evaluate: Callable[[str], Outcome]
) -> Finding | Verdict:
    """Check that plain operations are exact in float64, and that the other evaluators are similarly accurate."""
    single, allowed = drawn.dtype == torch.float32, _EXACT
    before, threads = torch.get_num_threads(), drawn.toss.choice((1, 1, 2))
    try:
        for name in evaluators:
            torch.set_num_threads(threads if name == "numba" else 1)  # threads of torch wait long if cores are busy
            with backend(name):
                found = evaluate(name)
            shapes, expected = ([[t.shape for t in kind] for kind in kinds] for kinds in (found, wanted))
            if shapes != expected:
                return Finding(Verdict.SILENT, f"{name}: shapes {shapes}, not {expected}, of {drawn}")
            distance = _distance(found, wanted, drawn.least)
            if name == "plain" and single:
                allowed = _TIMES * distance + max(_FEW, drawn.roundings) * torch.finfo(torch.float32).eps
            elif distance > allowed:
                return Finding(
                    Verdict.SILENT, f"{name}: {distance:.1e} from the definition, allowed {allowed:.1e}: {drawn}"
                )
    finally:
        torch.set_num_threads(before)
    return Verdict.CORRECT


def _check(case: Case) -> Finding | Verdict:
    drawn = Drawn(case)
    loops = drawn.points * drawn.outs * drawn.queries
    twice = case.gradients and case.dtype == torch.float64 and loops < 20 and drawn.chance(0.1)
    wanted = _evaluate(drawn, reference_attention, torch.float64, twice)
    names = [
        "plain",
        "numba",
        *(["dense"] if drawn.neighbors.whole_clouds else []),
        *(["auto"] if drawn.chance(0.2) else []),
        *(["triton"] if _INTERPRETED and drawn.neighbors.num_edges * drawn.heads < 200 else []),
    ]

    def evaluate(name: str) -> Outcome:
        return _evaluate(drawn, lambda *a, **k: group_attention(*a, **k)[0], case.dtype, twice)

    limits = {"_SCRATCH_BYTES": drawn.toss.choice((2**19, 2**19, 1)), "_REPEATED_BYTES": drawn.toss.choice((2**20, 0))}
    with mock.patch.multiple(_launch, **limits), _other_kernels(drawn):
        found = _compare(drawn, wanted, names, evaluate)
    return _check_weights(drawn) if found == Verdict.CORRECT and drawn.chance(0.1) else found


def _other_kernels(drawn: Drawn) -> AbstractContextManager[Any]:
    """Let programs of Triton process few edges, and edges in tiles instead of lanes, if they are interpreted."""
    if not _INTERPRETED:
        return nullcontext()
    from lieattn.ops.kernels.triton import _launch as triton_launch

    limits = {"_MOST_EDGES": drawn.toss.choice((256, 1, 3)), "_PAIRS": drawn.toss.choice((32, 32, 0))}
    return mock.patch.multiple(triton_launch, **limits)


def _check_weights(drawn: Drawn) -> Finding | Verdict:
    """Check that the weights have the stated shape and, without ψ and β, give the output."""
    given = dict(drawn.operands)
    signals, terms = [given.pop(name, None) for name in _SIGNALS], RelativeTerms(**given, row=drawn.row)
    out, weights = group_attention(*signals, drawn.neighbors, terms=terms, return_weights=True, **drawn.options)
    bias, frames, edges = given.get("fiber_bias"), out.shape[1], drawn.neighbors.num_edges
    queries = drawn.queries if drawn.with_query else 1 if bias is None else len(bias)
    sizes = {"joint": (drawn.fiber, drawn.fiber), "query_sum": (frames, queries, drawn.fiber)}
    shape = (edges, *sizes.get(drawn.case.pattern, (frames,)), drawn.heads)
    if weights is None or weights.shape != shape:
        return Finding(Verdict.SILENT, f"weights {None if weights is None else weights.shape}, not {shape}, of {drawn}")
    if given.keys() & {"psi", "beta"}:
        return Verdict.CORRECT
    rules = {"joint": "eabh,ebhd->eahd", "framewise": "eah,eahd->eahd", "pooled": "eah,ebhd->eahd"}
    message = torch.einsum(
        rules.get(drawn.case.pattern, "eogmh,emhd->eohd"), weights, signals[2][drawn.neighbors.source]
    )
    rebuilt = torch.zeros_like(out).index_add(0, drawn.neighbors.target, message)
    distance = _distance([[rebuilt]], [[out.double()]])
    good = distance <= (_EXACT if drawn.dtype == torch.float64 else 1e-4)
    return Verdict.CORRECT if good else Finding(Verdict.SILENT, f"weights: {distance:.1e} from the output of {drawn}")


class Gated(Numbers):
    """Operands of attentive convolution."""

    def __init__(self, case: Sized) -> None:
        super().__init__(case)
        choice = self.toss.choice
        out, order, fiber, ins = choice((1, 2, 3)), choice((1, 2, 4)), choice((1, 2, 3, 4)), choice((1, 2, 3, 5, 9))
        size, hidden = choice((1, 2, 3, 5)), choice((1, 2, 3))
        self.options = {
            "measure": choice((1.0, 0.3)),
            "stride": choice((1, 1, 1, 2)),
            "pad": choice((0, 1, 2)),
            "dilation": choice((1, 1, 2)),
            "spatial_dilation": choice((1, 1, 2, 3)),
        }
        least = max(1, self.options["dilation"] * (size - 1) + 1 - 2 * self.options["pad"])
        rows, columns = (least + choice((0, 1, 3, 8)) for _ in range(2))
        loud = choice((1.0, 1.0, 0.01, 10.0))
        # Expanded tensors would have equal maxima, where derivatives are not unique.
        self.operands = {
            "x": self.draw(choice((0, 1, 1, 2, 3)), ins, fiber, rows, columns, times=loud, expanded=False),
            "kernels": self.draw(out, order, ins, fiber, size, size, expanded=False),
        }
        if self.chance(0.7):
            self.operands["first"] = self.draw(out, order, fiber, hidden, ins)
            self.operands["second"] = self.draw(out, order, fiber, ins, hidden)
        if "first" not in self.operands or self.chance(0.6):
            side = choice((1, 3, 5))
            self.operands["spatial"] = self.draw(out, order, fiber, 2, side, side)

    def __repr__(self) -> str:
        shapes = {name: tuple(t.shape) for name, t in self.operands.items()}
        return f"{self.seed} {self.dtype} {self.options} {shapes}"

    def outcome(self, evaluate: Callable[..., Tensor], dtype: torch.dtype, twice: bool) -> Outcome:
        leaves = {name: t.to(dtype).detach().requires_grad_(self.gradients) for name, t in self.operands.items()}
        return _outcome(self, evaluate(**leaves), list(leaves.values()), twice)

    def defined(self, x: Tensor, kernels: Tensor, **tables: Tensor) -> Tensor:
        """Evaluate the definition, and set ``self.gap`` to the distance to the nearest jump of its derivatives."""
        options, self.gap = self.options, math.inf
        x = F.pad(x, (options["pad"],) * 4)
        shifts = torch.arange(kernels.shape[-1]) * options["dilation"]
        steps = [torch.arange(0, side - int(shifts[-1]), options["stride"]) for side in x.shape[-2:]]
        rows, columns = (step[:, None] + shifts for step in steps)
        patches = x[..., rows[:, None, :, None], columns[None, :, None, :]]  # [batch, in, fiber, *, *, size, size]
        t = torch.einsum("bcfyxpq,oscfpq->boscfyx", patches, kernels)
        kept = t
        if "first" in tables:
            pixels, level = t.flatten(-2), torch.zeros(())
            self._note(pixels, -1)
            for part in (pixels.mean(-1), pixels.amax(-1)):
                units = torch.einsum("osfnc,boscf->bosfn", tables["first"], part)
                self.gap = min([self.gap, *units.abs().flatten().tolist()])
                level = level + torch.einsum("osfcn,bosfn->boscf", tables["second"], units * (units > 0))
            kept = torch.sigmoid(level)[..., None, None] * t
        self.least = 1e-6 * float(t.detach().abs().max()) if t.numel() else 0.0  # gates may be 1 up to rounding
        gated = kept
        if "spatial" in tables:
            self._note(kept, 3)
            both = torch.stack([kept.mean(3), kept.amax(3)], dim=4)  # [batch, out, order, fiber, 2, *, *]
            side, step = tables["spatial"].shape[-1], options["spatial_dilation"]
            both = F.pad(both, (step * (side // 2),) * 4)
            shifts = torch.arange(side) * step
            rows, columns = (torch.arange(size)[:, None] + shifts for size in t.shape[-2:])
            patches = both[..., rows[:, None, :, None], columns[None, :, None, :]]
            level = torch.einsum("bosfiyxpq,osfipq->bosfyx", patches, tables["spatial"])
            gated = torch.sigmoid(level)[:, :, :, None] * kept
        return options["measure"] * (t - gated).sum(dim=(3, 4))

    def _note(self, numbers: Tensor, axis: int) -> None:
        if numbers.shape[axis] > 1 and numbers.numel():
            most, next_one = numbers.detach().topk(2, dim=axis).values.unbind(axis)
            self.gap = min(self.gap, float(((most - next_one) / numbers.detach().abs().max()).min()))


def _check_gated(case: Sized) -> Finding | Verdict:
    drawn = Gated(case)
    twice = case.gradients and case.dtype == torch.float64 and drawn.chance(0.1)
    wanted = drawn.outcome(drawn.defined, torch.float64, twice)
    if case.dtype == torch.float32 and drawn.gap < 1e-5:
        drawn.gradients, wanted = False, wanted[:1]

    def attend(x: Tensor, kernels: Tensor, **tables: Tensor) -> Tensor:
        channel = (tables["first"], tables["second"]) if "first" in tables else None
        return attentive_convolution(x, kernels, channel=channel, spatial=tables.get("spatial"), **drawn.options)[0]

    with mock.patch.object(_gated_sums, "_AT_ONCE", drawn.toss.choice((2**24, 1))):
        return _compare(drawn, wanted, _KERNELS, lambda _: drawn.outcome(attend, case.dtype, twice))


def _check_operands(
    case: Sized,
    drawn: Numbers,
    operands: Sequence[Tensor],
    defined: Callable[..., Tensor],
    made: Callable[..., Tensor],
    evaluators: list[str],
    words: str,
) -> Finding | Verdict:
    """Compare a function of these operands with its definition."""
    twice = case.gradients and case.dtype == torch.float64 and drawn.chance(0.1)

    def outcome(evaluate: Callable[..., Tensor], dtype: torch.dtype) -> Outcome:
        leaves = [operand.to(dtype).detach().requires_grad_(case.gradients) for operand in operands]
        return _outcome(drawn, evaluate(*leaves), leaves, twice)

    wanted = outcome(defined, torch.float64)
    found = _compare(drawn, wanted, evaluators, lambda _: outcome(made, case.dtype))
    if isinstance(found, Finding):
        return Finding(found.verdict, f"{found.detail} {case} {words} {[tuple(t.shape) for t in operands]}")
    return found


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda u: u * torch.sigmoid(u),
    "relu": lambda u: u * (u > 0),
    "gelu": lambda u: u * (1 + torch.erf(u / math.sqrt(2))) / 2,
    "elu": lambda u: torch.where(u > 0, u, torch.expm1(u.clamp(max=0))),
    "leaky_relu": lambda u: torch.maximum(u, 0.01 * u),
    "softplus": lambda u: u.clamp(min=0) + torch.log1p(torch.exp(-u.abs())),
    "tanh": torch.tanh,
    "none": lambda u: u,
}


def _check_networks(case: Sized) -> Finding | Verdict:
    drawn = Numbers(case)
    choice = drawn.toss.choice
    name = choice(("silu", "silu", "silu", *_ACTIVATIONS))
    heads, inputs, hidden = choice((1, 2, 3, 8)), choice((1, 2, 3, 5, 17)), choice((1, 2, 3, 8, 16, 33))
    number, outputs = choice((0, 1, 63, 64, 65, 127, 129, 200, 300)), choice((1, 1, 2, 5, 16))
    sizes = ((inputs, hidden), (hidden, hidden), (hidden, outputs))
    parameters = [drawn.draw(heads, *size) for size in sizes] + [drawn.draw(heads, size[1]) for size in sizes]
    operands = [drawn.draw(number, inputs, times=choice((1.0, 1.0, 1e-3, 30.0, 1e3))), *parameters]

    def defined(x: Tensor, *given: Tensor) -> Tensor:
        for weight, bias in zip(given[:3], given[3:], strict=True):
            rule = "nc,hcd->nhd" if x.ndim == 2 else "nhc,hcd->nhd"
            x = _ACTIVATIONS[name](torch.einsum(rule, x, weight) + bias)
        return x.flatten(1)

    def made(x: Tensor, *given: Tensor) -> Tensor:
        return head_networks(x, given[:3], given[3:], name)

    return _check_operands(case, drawn, operands, defined, made, _KERNELS, name)


def _check_edges(case: Sized) -> Finding | Verdict:
    drawn = Numbers(case)
    choice = drawn.toss.choice
    fiber, inputs, hidden = choice((1, 2, 3, 4, 5, 12)), choice((1, 3, 5)), choice((4, 8, 12, 16, 24, 32))
    channels, maps = choice((1, 2, 4, 5, 16, 17, 25)), choice((0, 1, 2, 5))
    points, number = choice((1, 2, 9, 40)), choice((0, 1, 40, 64, 200, 3000 // fiber))
    target = torch.randint(points, (number,), generator=drawn.generator).sort().values
    source = torch.randint(points, (number,), generator=drawn.generator)
    neighbors = Neighbors(torch.searchsorted(target, torch.arange(points + 1)), source, target)
    shapes = (number, fiber, inputs), (number, hidden), (number,), (hidden, inputs), (hidden, hidden), (hidden,)
    operands = [drawn.draw(*shape) for shape in (*shapes, *[(channels, hidden)] * max(1, maps))]
    operands += [drawn.draw(points, fiber, channels)]

    def summed(kernels: Sequence[Tensor], x: Tensor) -> Tensor:
        products = [kernel * x[source] for kernel in kernels]
        return torch.stack([x.new_zeros(x.shape).index_add(0, target, product) for product in products])

    def defined(seen: Tensor, shared: Tensor, weight: Tensor, first: Tensor, *given: Tensor) -> Tensor:
        second, bias, *last, x = given
        y = F.silu(torch.einsum("efi,hi->efh", seen, first) + shared[:, None])
        z = F.silu(torch.einsum("efh,kh->efk", y, second) + bias) * weight[:, None, None]
        return summed([torch.einsum("efk,ck->efc", z, one) for one in last], x)

    def made(seen: Tensor, shared: Tensor, weight: Tensor, first: Tensor, *given: Tensor) -> Tensor:
        second, bias, *last, x = given
        if maps:
            return summed(edge_kernels(seen, shared, weight, first, (second, bias), last), x)
        units = edge_units(seen, shared, weight, first, (second, bias))
        return torch.stack([edge_messages(units, one, x, neighbors) for one in last])

    return _check_operands(case, drawn, operands, defined, made, ["plain", "numba"], f"{maps} {points}")


_SIGNALS = ("query", "key", "value")

TARGETS = {
    "kernels": Target("kernel configurations", _CASES, _check, long=100_000),
    "attentive": Target("attentive convolutions", _SIZED, _check_gated, long=3000),
    "head-networks": Target("networks of heads", _SIZED, _check_networks, long=3000),
    "edges": Target("networks of edges", _SIZED, _check_edges, long=3000),
}
