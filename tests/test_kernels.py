"""The fused kernel against the plain implementation: values, gradients, second derivatives, and backend selection."""

import errno
import gc
import itertools
import logging
import math
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import get_ident

import pytest
import torch

from lieattn.cli import _machine
from lieattn.geometry import AllPairs, Neighbors, Radius
from lieattn.ops import (
    RelativeTerms,
    _backend,
    _edges,
    backend,
    edge_kernels,
    edge_messages,
    edge_moments,
    edge_units,
    explain,
    group_attention,
    head_networks,
)
from lieattn.ops._terms import ROW_TABLES
from tests.test_ops import DIM, HEADS, VALUE, problem

pytest.importorskip("numba")
from lieattn.ops.kernels import _attentive as attentive_launch
from lieattn.ops.kernels import _calls, _compiled, _threads
from lieattn.ops.kernels import _dense as few_channels_launch
from lieattn.ops.kernels import _edges as edges_launch
from lieattn.ops.kernels import _head_networks as head_networks_launch
from lieattn.ops.kernels.attention import _launch, _operator

NAMES = ("positional_key", "displacement_bias", "fiber_key", "fiber_bias", "psi", "beta")
TERMS = {
    "none": (),
    "positional key": ("positional_key",),
    "bias of the displacement": ("displacement_bias",),
    "pair bias": ("pair_bias",),
    "frames": ("fiber_key", "fiber_bias"),
    "affine values": ("psi", "beta"),
    "all": ("positional_key", "displacement_bias", "fiber_key", "fiber_bias", "psi", "beta"),
}
CASES = [
    (pattern, normalize, terms)
    for pattern, normalize, terms in itertools.product(
        ("joint", "framewise", "query_sum"), ("softmax", "exp-mean", "mean", "none"), TERMS
    )
    if not (pattern == "query_sum" and (normalize in ("mean", "none") or terms == "pair bias"))
]


def results(signals, neighbors, terms, index, name, *, direction=None, **options):
    """Return output and all gradients, computed by one backend."""
    with backend(name):
        given = {n: t.detach().requires_grad_() for n, t in terms.tables().items()}
        signals = [s.detach().requires_grad_() for s in signals]
        out, _ = group_attention(*signals, neighbors, terms=RelativeTerms(**given, row=index), **options)
        leaves = [*signals, *given.values()]
        direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        return [out, *torch.autograd.grad(out, leaves, direction, materialize_grads=True)]


def assert_same(found, wanted, tolerance=1e-12):
    for ours, theirs in zip(found, wanted, strict=True):
        scale = 1 + theirs.detach().abs().max().item() if theirs.numel() else 1
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(("pattern", "normalize", "terms"), CASES)
def test_fused_equals_plain(pattern, normalize, terms):
    signals, neighbors, tables, index = problem(pattern, TERMS[terms])
    options = {"pattern": pattern, "normalize": normalize}
    assert explain(*signals, terms=tables, **options).backend == "numba"
    assert_same(*(results(signals, neighbors, tables, index, name, **options) for name in ("numba", "plain")))
    tables = tables.tables()
    rows = RelativeTerms(**{name: table[index] if name in ROW_TABLES else table for name, table in tables.items()})
    assert_same(*(results(signals, neighbors, rows, None, name, **options) for name in ("numba", "plain")))


POOLED = {
    "none": (),
    "shifts": ("positional_key", "beta", "displacement_bias"),
    "one psi for all frames": ("psi", "key_psi"),
    "psi of frames": ("key_psi_pairs", "positional_key", "psi_pairs", "beta"),
    "keys alone": ("key_psi_pairs", "displacement_bias"),
}


@pytest.mark.parametrize("heads", [1, 17])
@pytest.mark.parametrize("terms", POOLED)
def test_pooled_equals_plain(terms, heads):
    signals, neighbors, tables, index = problem("pooled", POOLED[terms])
    signals = [torch.randn(*s.shape[:2], heads, s.shape[3], dtype=s.dtype) for s in signals]
    given = tables.tables()
    for name, table in given.items():  # tables of one head serve all heads
        axis = {"positional_key": 2, "displacement_bias": 3}.get(name, 3)
        given[name] = table.narrow(axis, 0, 1).repeat_interleave(heads if name == "psi" else 1, dim=axis)
    options = {"pattern": "pooled"}
    for rows, at in ((given, index), ({name: table[index] for name, table in given.items()}, None)):
        terms = RelativeTerms(**rows)
        assert explain(*signals, terms=terms, **options).backend == "numba"
        for queries in (slice(None), slice(1)):  # a query of one frame serves all
            some = [signals[0][:, queries], *signals[1:]]
            assert_same(*(results(some, neighbors, terms, at, name, **options) for name in ("numba", "plain")))
    single = RelativeTerms(**{name: table.float() for name, table in given.items()})
    signals = [s.float() for s in signals]
    assert_same(*(results(signals, neighbors, single, index, name, **options) for name in ("numba", "plain")), 1e-5)


@pytest.mark.parametrize(
    "names", [("key_psi_pairs", "positional_key", "psi_pairs", "beta_pairs"), ("key_psi", "pair_bias")]
)
def test_keys_of_elements_equal_plain(names):
    """Joint attention with keys that have a factor for each pair of frames."""
    signals, neighbors, tables, index = problem("joint", names)
    assert explain(*signals, neighbors, terms=tables).backend == "numba"
    rows = RelativeTerms(**{name: table[index] for name, table in tables.tables().items()})
    for terms, at in ((tables, index), (rows, None)):
        ours, theirs = (results(signals, neighbors, terms, at, n, pattern="joint") for n in ("numba", "plain"))
        assert_same(ours, theirs)


@pytest.mark.parametrize("pattern", ["joint", "framewise", "query_sum"])
@pytest.mark.parametrize(("heads", "dim", "fiber"), [(1, 5, 1), (7, 6, 5), (9, 4, 8), (17, 3, 2)])
def test_sizes(pattern, heads, dim, fiber):
    neighbors = Radius(1.0)(torch.randn(12, 2))
    signals = [torch.randn(12, fiber, heads, width, dtype=torch.float64) for width in (dim, dim, dim + 1)]
    terms = RelativeTerms(
        positional_key=torch.randn(neighbors.num_edges, fiber, 1, dim, dtype=torch.float64),
        displacement_bias=torch.randn(neighbors.num_edges, 1, 1, heads, dtype=torch.float64),
        fiber_key=torch.randn(fiber, fiber, 1, dim, dtype=torch.float64),
        psi=torch.randn(neighbors.num_edges, 1, 1, heads, 1, dtype=torch.float64),
    )
    assert_same(*(results(signals, neighbors, terms, None, name, pattern=pattern) for name in ("numba", "plain")))
    single = [signal.float() for signal in signals]
    terms = RelativeTerms(**{n: t.float() for n, t in terms.tables().items()})
    assert_same(*(results(single, neighbors, terms, None, name, pattern=pattern) for name in ("numba", "plain")), 1e-5)


@pytest.mark.parametrize("normalize", ["softmax", "exp-mean"])
@pytest.mark.parametrize("pattern", ["joint", "query_sum"])
def test_long_lists_in_chunks(pattern, normalize, monkeypatch):
    signals, _, tables, _ = problem(pattern, TERMS["all"])
    signals = [torch.randn(40, *signal.shape[1:], dtype=torch.float64) for signal in signals]
    signals[0] *= 10  # so that the running maximum jumps
    neighbors = AllPairs()(torch.randn(40, 2))
    index = torch.arange(neighbors.num_edges) % 4
    options = {"pattern": pattern, "normalize": normalize}
    wanted = results(signals, neighbors, tables, index, "plain", **options)
    for room in (1, 2**14):
        monkeypatch.setattr(_launch, "_SCRATCH_BYTES", room)
        assert_same(results(signals, neighbors, tables, index, "numba", **options), wanted, 1e-11)


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize(("pattern", "names"), [("query_sum", TERMS["all"]), ("pooled", POOLED["psi of frames"])])
def test_threads_change_rounding_only(pattern, names, threads, indexed, monkeypatch):
    signals, _, tables, _ = problem(pattern, names)
    signals = [torch.randn(40, *s.shape[1:], dtype=s.dtype) for s in signals]
    neighbors = Radius(0.9)(torch.randn(40, 2), torch.arange(40) // 10)
    index = torch.arange(neighbors.num_edges) % 4
    given = tables.tables()
    rows = {name: table if indexed or name not in ROW_TABLES else table[index] for name, table in given.items()}
    problem_of = signals, neighbors, RelativeTerms(**rows), index if indexed else None
    wanted = results(*problem_of, "plain", pattern=pattern)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(_calls, "_MOST_WINDOWS", 2)
    found = [results(*problem_of, "numba", pattern=pattern) for _ in range(2)]
    assert_same(found[0], wanted)
    assert all(torch.equal(ours, first) for ours, first in zip(found[1], found[0], strict=True))


class Guarded:
    """Memory of kernels that is not a number at first, between numbers that they must not change."""

    def __init__(self):
        self.given = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        assert all((edge == 7).all() for memory in self.given for edge in (memory[:64], memory[-64:]))

    def empty(self, dtype, *shape):
        inner = torch.full((math.prod(shape),), torch.nan, dtype=dtype)
        self.given.append(torch.nn.functional.pad(inner, (64, 64), value=7))
        return self.given[-1][64:-64].view(shape)

    def zeros(self, dtype, *shape):
        return self.empty(dtype, *shape).zero_()


def draw(*shapes):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def calls_of_kernels():
    """Return functions that call kernels, by name, and their operands."""
    lists = Radius(2.0)(torch.randn(12, 2), torch.arange(12) // 5)
    edges = lists.num_edges
    calls = {}
    for pattern, heads in itertools.product(("joint", "framewise", "query_sum"), (3, 6)):
        shapes = [(12, 3, heads, width) for width in (DIM, DIM, VALUE)]
        shapes += [(edges, 3, 1, DIM), (edges, 3, 1, heads), (3, 3, heads, DIM), (3, 3, heads), (edges, 3, 1, heads, 1)]

        def attend(query, key, value, *tables, pattern=pattern):
            terms = RelativeTerms(**dict(zip(NAMES, tables, strict=False)))
            return group_attention(query, key, value, lists, pattern=pattern, terms=terms)[:1]

        calls[f"attention, {pattern}, {heads} heads"] = attend, draw(*shapes)

    def pool(query, key, value, key_psi, psi):
        terms = RelativeTerms(key_psi=key_psi, psi=psi)
        return group_attention(query, key, value, lists, pattern="pooled", terms=terms)[:1]

    shapes = [(12, 3, 3, width) for width in (DIM, DIM, VALUE)]
    calls["attention, pooled"] = pool, draw(*shapes, (edges, 3, 3, 1, DIM), (edges, 3, 3, 3, VALUE))

    def attend_to_clouds(query, key, value):
        clouds = AllPairs()(torch.zeros(12, 2), torch.arange(12) // 5)
        return group_attention(query, key, value, clouds, pattern="framewise")[:1]

    calls["few channels"] = attend_to_clouds, draw((12, 3, 2, 3), (12, 3, 2, 3), (12, 3, 2, 4))

    def evaluate_networks(rows, *parameters):
        weights, biases = parameters[::2], parameters[1::2]
        return head_networks(rows, weights, biases), head_networks(rows.detach(), weights, biases)

    layers = [(2, 4, 8), (2, 8), (2, 8, 8), (2, 8), (2, 8, 3), (2, 3)]
    calls["networks of heads"] = evaluate_networks, draw((97, 4), *layers)

    def send(seen, shared, weight, first, second, bias, last, x, arrows):
        units = edge_units(seen.detach(), shared, weight, first, (second, bias))
        kernels = edge_kernels(seen, shared, weight, first, (second, bias), [last])
        moments = edge_moments(arrows.detach(), kernels[0][:, 0].repeat(1, 8), lists)
        return units, *kernels, edge_messages(units, last, x, lists), *moments

    shapes = [(edges, 3, 5), (edges, 8), (edges,), (8, 5), (8, 8), (8,), (5, 8), (12, 3, 5), (edges, 3)]
    calls["edges"] = send, draw(*shapes)
    return calls


def test_kernels_keep_to_their_memory_and_read_nothing_that_they_have_not_written(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(_edges, "_CACHED", 0)
    found = {}
    for name, (call, operands) in calls_of_kernels().items():
        found[name] = []
        for way in ("plain", "auto"):
            with backend(way), monkeypatch.context() as patch, Guarded() as memory:
                for module in (_launch, edges_launch, few_channels_launch, head_networks_launch):
                    patch.setattr(module, "Workspace", lambda memory=memory: memory)
                    patch.setattr(module, "new_empty", memory.empty)
                outs = call(*operands)
                pulled = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out) for out in outs]
                found[name].append([*outs, *torch.autograd.grad(outs, operands, pulled, allow_unused=True)])
                assert bool(memory.given) == (way == "auto"), name
    for wanted, ours in found.values():
        wanted, ours = ([tensor for tensor in tensors if tensor is not None] for tensors in (wanted, ours))
        assert_same(ours, wanted, 1e-11)


def test_not_a_number_is_passed_on():
    signals, neighbors, _, _ = problem("joint", ())
    signals[1][int(neighbors.source[0])] = torch.nan
    out, _ = group_attention(*signals, neighbors)
    assert out[int(neighbors.target[0])].isnan().all()


def call_with(names, neighbors, index, **options):
    def call(query, key, value, *terms):
        tables = RelativeTerms(**dict(zip(names, terms, strict=True)), row=index)
        return group_attention(query, key, value, neighbors, terms=tables, **options)[0]

    return call


DERIVED = [
    *itertools.product(("joint", "framewise"), ("softmax", "exp-mean", "mean"), [NAMES], [0.4]),
    *itertools.product(["query_sum"], ("softmax", "exp-mean"), [NAMES], [0.4]),
    ("query_sum", "softmax", NAMES, 0.0),
    ("pooled", "softmax", POOLED["psi of frames"], 0.0),
]


@pytest.mark.parametrize(("pattern", "normalize", "names", "dropout"), DERIVED)
def test_differentiable_twice(pattern, normalize, names, dropout):
    signals, neighbors, tables, index = problem(pattern, names, fiber=2, points=5)
    tables = tables.tables()
    given = [s.requires_grad_() for s in (*signals, *tables.values())]
    call = call_with(tables, neighbors, index, pattern=pattern, normalize=normalize, dropout=dropout)

    def seeded(*arguments):
        torch.manual_seed(3)
        return call(*arguments)

    with backend("numba"):
        assert torch.autograd.gradcheck(seeded, given, fast_mode=True)
        assert torch.autograd.gradgradcheck(seeded, given, fast_mode=True)


@pytest.mark.parametrize("pattern", ["joint", "framewise", "query_sum"])
def test_dropout_follows_the_seed(pattern):
    signals, neighbors, tables, index = problem(pattern, ("positional_key",))
    call = call_with(("positional_key",), neighbors, index, pattern=pattern, dropout=0.5)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(call(*signals, tables.positional_key))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("pattern", ["joint", "framewise", "query_sum", "pooled"])
def test_single_precision_with_large_scores(pattern):
    """Gradients of scores are small differences of weights, so weights must not share a rounding error."""
    neighbors = AllPairs()(torch.randn(40, 2))
    signals = [torch.randn(40, 1, 3, width, dtype=torch.float64) for width in (2, 2, VALUE)]
    signals[0] *= 30
    signals[2] += 10  # a common part of the values, which does not affect the gradients of scores
    terms = RelativeTerms(positional_key=torch.randn(neighbors.num_edges, 1, 1, 2, dtype=torch.float64))
    exact = results(signals, neighbors, terms, None, "plain", pattern=pattern)
    single = [s.float() for s in signals]
    terms = RelativeTerms(positional_key=terms.positional_key.float())
    errors = []
    for name in ("numba", "plain"):
        found = results(single, neighbors, terms, None, name, pattern=pattern)
        errors.append([(ours - theirs).detach().abs().max().item() for ours, theirs in zip(found, exact, strict=True)])
    assert all(ours <= 3 * theirs for ours, theirs in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", ["joint", "framewise", "query_sum", "pooled"])
def test_lowest_scores_have_weights(pattern, dtype):
    """Scores as low as the smallest number of their dtype are not treated as masked keys."""
    least = torch.finfo(dtype).min
    neighbors = AllPairs()(torch.randn(5, 2))
    signals = [torch.randn(5, 2, 3, width, dtype=dtype) for width in (DIM, DIM, VALUE)]
    for level in (0.2 * least, 1e-3 * least, -0.2 * least):
        bias = level * torch.linspace(1, 1.1, 150, dtype=dtype).reshape(25, 1, 2, 3)
        bias = bias if pattern in ("joint", "query_sum") else bias[:, :, :1]
        terms = RelativeTerms(displacement_bias=bias)
        ours, theirs = (results(signals, neighbors, terms, None, name, pattern=pattern) for name in ("numba", "plain"))
        assert_same(ours, theirs, 1e-5 if dtype == torch.float32 else 1e-12)


QUICK_CHECKS = ("test_schema", "test_faketensor")  # shapes, strides and dtypes are those that are promised


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chosen", [{"test_utils": QUICK_CHECKS}, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_registration_with_torch(chosen, dtype):
    signals, neighbors, tables, index = problem("query_sum", TERMS["all"], fiber=2, points=5)
    given = [*(s.to(dtype).requires_grad_() for s in (*signals, *(getattr(tables, name) for name in NAMES))), None]
    lists = (neighbors.row_ptr, neighbors.source, neighbors.target, index)
    options = (torch.tensor(0), "query_sum", "softmax", 0.0)
    torch.library.opcheck(_operator._forward, (*given, *lists, *options), **chosen)
    out, norm = _operator._forward(*given, *lists, *options)
    arguments = (torch.randn_like(out), norm.detach(), *given, *lists, *options)
    torch.library.opcheck(_operator._backward, arguments, **chosen)
    absent = (*given[:3], *(None,) * 7, *lists[:3], None, *options)
    torch.library.opcheck(_operator._forward, absent, test_utils=QUICK_CHECKS)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # which its last reference closes
def test_interrupted_calls_wait_for_all_threads_and_keep_no_memory(monkeypatch):
    """300 interrupts at random moments of a call; waiting must not deadlock with a thread that has finished."""
    threads, draw, running, left_over, interrupts = torch.get_num_threads(), random.Random(0), set(), set(), 0
    files = os.listdir("/proc/self/fd") if _threads._ADAPTS else []
    before, main = signal.signal(signal.SIGALRM, signal.default_int_handler), get_ident()
    monkeypatch.setattr(_calls, "_free", [])

    def kernel(number):
        if get_ident() == main:  # an interrupt can end a kernel that is written in Python
            time.sleep(1e-4)
            return
        running.add(number)
        time.sleep(3e-4)
        running.discard(number)

    def call():
        try:
            with _calls.Workspace() as memory:
                memory.empty(torch.float32, 1000)
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 6e-4))
                _threads.run(kernel, [(number,) for number in range(3)])
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            left_over.update(running)

    torch.set_num_threads(3)
    gc.disable()  # callbacks of objects left by other tests would swallow interrupts
    try:
        for _ in range(300):
            try:
                call()
            except KeyboardInterrupt:
                interrupts += 1
                assert _calls._free == []
            _calls.release_memory()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
        torch.set_num_threads(threads)
    assert interrupts > 50
    assert not left_over
    assert len(os.listdir("/proc/self/fd") if _threads._ADAPTS else []) == len(files)


def test_errors_of_other_threads_are_raised():
    def kernel(number):
        if number == 2:
            raise ZeroDivisionError

    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ZeroDivisionError):
            _threads.run(kernel, [(number,) for number in range(3)])
    finally:
        torch.set_num_threads(threads)


def test_threads_of_a_fork_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(_threads, "IMPORTED_BY", os.getpid() + 1)
    seen = set()
    _threads.run(lambda number: seen.add((number, get_ident())), [(0,), (1,)])
    assert seen == {(0, get_ident()), (1, get_ident())}
    _threads.adapt_waiting()


_FORK = """
import os, signal, torch
torch.set_num_threads(2)
from lieattn.geometry import AllPairs
from lieattn.ops import group_attention
torch.randn(400, 400).exp().sum()  # starts the threads, before any kernel is called
if os.fork() == 0:
    signal.alarm(60)
    x = torch.randn(40, 1, 2, 4)
    group_attention(x, x, x, AllPairs()(torch.randn(40, 3)))
    os._exit(0)
raise SystemExit(os.wait()[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kernels_that_are_first_called_in_a_fork_do_not_wait_for_threads_of_the_parent():
    assert subprocess.run([sys.executable, "-c", _FORK], timeout=100, check=False).returncode == 0


@pytest.mark.skipif(not _threads._ADAPTS, reason="libgomp only")
def test_threads_spin_again_when_the_machine_is_no_longer_busy(monkeypatch):
    clock, lost = iter((0, 1, 1.05, 1.2, 3, 4.3)), iter((0.5, 1.0, 1.0, 1.04, 1.05))
    monkeypatch.setattr(_threads.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(_threads, "_lost", lambda: next(lost))
    waiting, sleeping = _threads._Waiting(), []
    for _ in range(5):
        waiting.adapt(2)
        sleeping.append(waiting.idle is not None)
    assert sleeping == [True, True, True, True, False]  # half a second, too early to look, and three seconds of calm


@pytest.mark.skipif(not _threads._ADAPTS, reason="libgomp only")
def test_a_process_without_files_to_open_computes_on():
    resource = pytest.importorskip("resource")
    assert _threads._lost() > 0
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = _threads._lost()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == 0


def test_report_of_threads_and_instructions(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(_threads, "waiting_setting", lambda: "GOMP_SPINCOUNT=7")
    assert "GOMP_SPINCOUNT=7" in _threads.threads_report()
    monkeypatch.setattr(_compiled.numba.config, "CPU_FEATURES", "+sse2,+avx,+avx2,-avx512f")
    monkeypatch.setattr(_compiled.numba.config, "CPU_NAME", "haswell")
    assert _compiled.instruction_set() == "AVX2 (haswell)"


def test_memory_of_others_is_not_read():
    signals, neighbors, tables, index = problem("joint", ("positional_key",))
    for wrong in (index + 4, index - 4):
        with backend("numba"), pytest.raises(ValueError, match=r"terms\.row: expected numbers from 0 to 3"):
            group_attention(*signals, neighbors, terms=replace(tables, row=wrong))
    astray = Neighbors(neighbors.row_ptr, neighbors.source + 7, neighbors.target)
    with backend("numba"), pytest.raises(ValueError, match="neighbors: source: expected numbers from 0 to 6"):
        group_attention(*signals, astray)
    for place, step in ((slice(None), 1), (0, -1), (-1, 1)):
        row_ptr = neighbors.row_ptr.clone()
        row_ptr[place] += step
        short = Neighbors(row_ptr, neighbors.source, neighbors.target)
        with backend("numba"), pytest.raises(ValueError, match="neighbors: row_ptr must ascend from 0"):
            group_attention(*signals, short)


def test_signals_tables_lists_and_gradients_may_have_gaps_in_memory():
    signals, neighbors, tables, index = problem("joint", TERMS["all"])
    found = []
    for place in (lambda tensor: tensor, lambda tensor: torch.stack([tensor, tensor + 7], dim=-1)[..., 0]):
        lists = Neighbors(*map(place, (neighbors.row_ptr, neighbors.source, neighbors.target)))
        leaves = [t.detach().requires_grad_() for t in (*signals, *(getattr(tables, name) for name in NAMES))]
        call = call_with(NAMES, lists, place(index), pattern="joint")
        with backend("numba"):
            out = call(*map(place, leaves))
        pulled = place(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
        found.append([out, *torch.autograd.grad(out, leaves, pulled)])
    assert_same(*found)


def test_the_choice_is_explained():
    (q, k, v), _, tables, _ = problem("query_sum", ("psi_pairs",))
    assert explain(q, k, v).backend == "numba"
    assert explain(q, k, v).obstacles == {}
    for options, reason in (
        ({"return_weights": True}, "it cannot return weights"),
        ({"terms": tables}, "terms.psi that depends on the key frame"),
        ({"terms": RelativeTerms(fiber_key=torch.randn(3, 3, 3, 1, DIM)), "pattern": "query_sum"}, "cubic"),
        ({"terms": RelativeTerms(displacement_bias=torch.randn(4, 3, 3, 1)), "pattern": "query_sum"}, "cubic"),
        ({"pattern": "query_sum", "normalize": "mean"}, "normalize='mean'"),
    ):
        choice = explain(q, k, v, **options)
        assert choice.backend in ("plain", "scatter")
        assert reason in str(choice)
    assert "on meta" in str(explain(*(s.to("meta") for s in (q, k, v))))
    assert "without queries" in str(explain(None, None, v, pattern="pooled"))
    assert "normalize='mean'" in str(explain(q, k, v, pattern="pooled", normalize="mean"))
    with backend("plain"):
        assert "was asked for" in str(explain(q, k, v))
    with pytest.raises(ValueError, match="name: expected one of"), backend("fast"):
        pass


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("pattern", ["joint", "pooled"])
def test_the_explained_choice_is_the_one_taken(pattern, dropout, monkeypatch):
    """Kernels evaluate exactly the cases that `explain` attributes to them."""
    calls = []
    forward = _operator._forward
    monkeypatch.setattr(_operator, "_forward", lambda *a: calls.append(a) or forward(*a))
    x, neighbors = torch.randn(7, 3, 2, 4), Radius(4.0)(torch.randn(7, 2))
    choice = explain(x, x, x, neighbors, pattern=pattern, dropout=dropout)
    group_attention(x, x, x, neighbors, pattern=pattern, dropout=dropout)
    assert (choice.backend == "numba") == bool(calls)
    if pattern == "pooled" and dropout:
        assert choice.obstacles["numba"] == "it does not support dropout with pattern 'pooled'"


def test_overlapping_blocks_of_two_threads():
    """Blocks may end in any order; at the end none is active."""
    before = _backend._State.asked
    first, second = backend("plain"), backend("numba")
    with ThreadPoolExecutor(2) as pool:
        pool.submit(first.__enter__).result()
        assert _backend._State.asked == "plain"
        pool.submit(second.__enter__).result()
        assert _backend._State.asked == "numba"
        pool.submit(first.__exit__, None, None, None).result()
        assert _backend._State.asked == "numba"
        pool.submit(second.__exit__, None, None, None).result()
    assert _backend._State.asked == before


def test_numba_is_absent(monkeypatch):
    monkeypatch.setitem(_backend._INSTALLED, "numba", False)
    signals, neighbors, _, _ = problem("joint", ())
    assert "not installed" in str(explain(*signals))
    with pytest.raises(ValueError, match="not installed"), backend("numba"):
        pass
    group_attention(*signals, neighbors)


def double(x):
    return 2 * x


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return a folder of compiled functions with ``double`` in it."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_compiled, "_told", set())
    assert _compiled.compiled(double)(1) == 2
    return tmp_path


DAMAGE = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "a flipped bit": lambda content: content[:100] + bytes([content[100] ^ 4]) + content[101:],
    "not by this library": lambda content: content[:-32],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_of_compiled_kernels(kept, damage):
    (path,) = kept.rglob("*.nbc")
    good = path.read_bytes()
    path.write_bytes(DAMAGE[damage](good))
    with pytest.warns(UserWarning, match=rf"{path.name}: this compiled kernel is damaged"):
        assert _compiled.compiled(double)(1) == 2
    assert len(path.read_bytes()) > len(good) // 2
    again = _compiled.compiled(double)
    assert again(1) == 2
    assert sum(again.stats.cache_hits.values()) == 1


def test_compiled_kernels_of_other_versions_are_not_used(kept, monkeypatch):
    """After a change of their source, kernels are compiled again, and the old files are replaced."""
    files = list(kept.rglob("*.nbc"))
    with monkeypatch.context() as patch:
        patch.setattr(_compiled, "_source_stamp", lambda: "another")
        for hits in (0, 1):
            again = _compiled.compiled(double)
            assert again(1) == 2
            assert sum(again.stats.cache_hits.values()) == hits
    assert list(kept.rglob("*.nbc")) == files
    again = _compiled.compiled(double)
    assert again(1) == 2
    assert not again.stats.cache_hits


def test_kernels_that_processes_write_at_once_are_not_mixed_up(kept):
    """Each process reads the index before the other has written, so neither knows the types of the other."""
    first, second = (_compiled.compiled(double)._cache._cache_file for _ in range(2))
    assert [first.load("A"), second.load("B")] == [None, None]
    first.save("A", "of A")
    second.save("B", "of B")
    assert [second.load("A"), first.load("B")] == ["of A", "of B"]


@_compiled.part
def _twice(x):
    return 2 * x


def _four_times(x, times):
    for _ in range(times):
        x = _twice(_twice(x))
    return x


def test_parts_of_kernels(kept):
    """Parts have no machine code of their own, are not cached, and cannot be called."""
    kernel = _compiled.compiled(_four_times)
    assert [kernel(3, 2), kernel(0.5, 1)] == [48, 2.0]
    assert len(_twice.overloads) == 2
    assert not list(kept.rglob("*_twice*"))
    with pytest.raises(TypeError, match="_twice can be called by other kernels only"):
        _twice(1)


def test_compiled_kernels_that_cannot_be_written(kept, monkeypatch):
    """A full disk or a missing folder costs time, but calls work; the log names the problem once."""

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    first, second, third = (_compiled.compiled(double) for _ in range(3))
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.warns(UserWarning, match=r"No space left.*NUMBA_CACHE_DIR") as told:
            assert [first(1.0), second(1.0)] == [2.0, 2.0]
    assert len(told) == 1
    assert str(kept) in str(told[0].message)
    for path in kept.iterdir():
        shutil.rmtree(path)
        path.write_text("a file where the folder was")
    assert third(1) == 2
    assert [path.is_file() for path in kept.iterdir()] == [True]


def test_no_folder_for_compiled_kernels(monkeypatch):
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    monkeypatch.setattr(_compiled, "_told", set())
    with pytest.warns(UserWarning, match=r"kernels: compiled kernels cannot be stored here.*NUMBA_CACHE_DIR") as told:
        assert [_compiled.compiled(double)(1) for _ in range(2)] == [2, 2]
    assert len(told) == 1


def test_the_variable_of_the_environment_is_checked(monkeypatch):
    monkeypatch.setenv("LIEATTN_BACKEND", "fast")
    with pytest.raises(ValueError, match="LIEATTN_BACKEND: expected one of"):
        runpy.run_path(_backend.__file__, run_name=_backend.__name__)


def test_location_scores_on_several_threads(monkeypatch):
    """Without keys, each part of the targets contributes to the values within its window."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    neighbors = Radius(1.0)(torch.randn(30, 2))
    value = torch.randn(30, 3, HEADS, VALUE, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(neighbors.num_edges, 3, 3, HEADS, dtype=torch.float64, requires_grad=True)
    found = []
    for name in ("numba", "plain"):
        with backend(name):
            out, _ = group_attention(None, None, value, neighbors, terms=RelativeTerms(displacement_bias=bias))
            found.append([out, *torch.autograd.grad(out.square().sum(), (value, bias))])
    assert_same(*found)


@pytest.mark.parametrize("case", _machine._CASES)
def test_warm_up_reaches_the_kernels_forward_and_backward(case, monkeypatch):
    launched = []
    kernels = {
        "attention": [(_launch, "run_forward"), (_launch, "run_backward")],
        "networks of heads": [(head_networks_launch, "run_forward"), (head_networks_launch, "run_backward")],
        "networks of edges": [
            *((edges_launch, name) for name in ("run_units", "run_units_backward")),
            *((edges_launch, name) for name in ("run_messages", "run_messages_backward")),
        ],
        "few channels": [(few_channels_launch, "run_forward"), (few_channels_launch, "run_backward")],
        "attentive": [(attentive_launch, "run_forward"), (attentive_launch, "run_backward")],
    }
    for kernel, steps in kernels.items():
        for step in steps:
            original, entry = getattr(*step), (kernel, step[1])
            monkeypatch.setattr(*step, lambda *a, f=original, e=entry: launched.append(e) or f(*a))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(logging.getLogger("lieattn"), "setLevel", lambda level: None)
    assert _machine.compile_case(case, "float32") > 0
    (kernel,) = (name for name in kernels if case.startswith(name))
    assert set(launched) == {(kernel, step[1]) for step in kernels[kernel]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_warm_up_compiles_every_length_that_attentive_convolution_takes(dtype):
    warm = {attentive_launch._lanes(2 * outputs, dtype) for outputs in _machine._ATTENTIVE.values()}
    assert warm == {attentive_launch._lanes(outs, dtype) for outs in range(1, 200)}


def test_a_first_call_says_once_that_kernels_are_compiled(records):
    _compiled._announce.cache_clear()
    _compiled._announce()
    _compiled._announce()
    (record,) = records
    assert "lieattn warm-up" in record.getMessage()
