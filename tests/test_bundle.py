"""Clouds of equal shape share the vectors of the fused kernel, with the results of the plain implementation."""

from dataclasses import replace

import pytest
import torch

from lieattn.geometry import Neighbors, Radius
from lieattn.ops import RelativeTerms, backend, group_attention, release_memory
from lieattn.ops import _plain as plain
from tests.cases import each, some
from tests.test_kernels import assert_same, results

pytest.importorskip("numba")
from lieattn.ops._terms import Problem
from lieattn.ops.kernels._calls import Workspace, widest_lanes
from lieattn.ops.kernels.attention import _bundle, _launch
from lieattn.ops.kernels.attention._bundle import bundle
from lieattn.ops.kernels.attention._operator import dropout_mask

POINTS, FIBER, DIM, VALUE, TYPES = 6, 3, 3, 5, 4
COPIES = [(2, 1), (4, 3), (4, 2), (6, 9), (8, 6)]  # clouds, heads
NAMES = ("positional_key", "displacement_bias", "fiber_key", "fiber_bias", "psi", "beta")


def copies(clouds, heads, dtype=torch.float64, isolated=True):
    """Return clouds with the same neighbor lists, one point without neighbors, and all tables."""
    generator = torch.Generator().manual_seed(clouds)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    pos = draw(POINTS, 2)
    if isolated:
        pos[2] += 100
    batch = torch.arange(clouds).repeat_interleave(POINTS)
    neighbors = Radius(2.0, include_self=False)(pos.repeat(clouds, 1), batch)
    assert (neighbors.degree == 0).any() == isolated
    index = torch.randint(TYPES, (neighbors.num_edges // clouds,), generator=generator).repeat(clouds)
    signals = [draw(clouds * POINTS, FIBER, heads, dim) for dim in (DIM, DIM, VALUE)]
    terms = RelativeTerms(
        positional_key=draw(TYPES, FIBER, 1, DIM),
        displacement_bias=draw(TYPES, FIBER, 1, heads),
        fiber_key=draw(FIBER, FIBER, heads, DIM),
        fiber_bias=draw(FIBER, FIBER, heads),
        psi=draw(TYPES, FIBER, 1, heads, VALUE),
        beta=draw(TYPES, FIBER, 1, 1, VALUE),
        row=index,
    )
    return signals, neighbors, terms, index


def bundled(signals, neighbors, terms, index):
    return bundle(Problem(*signals, neighbors, replace(terms, row=index), "joint", "softmax")).clouds


@pytest.mark.parametrize("threads", [1, 3])
@each("clouds, heads", COPIES)
@pytest.mark.parametrize("pattern", ["joint", "framewise", "query_sum"])
@pytest.mark.parametrize("normalize", ["softmax", "exp-mean"])
def test_bundled_equals_plain(pattern, normalize, clouds, heads, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    given = copies(clouds, heads)
    assert bundled(*given) > 1
    options = {"pattern": pattern, "normalize": normalize}
    assert_same(*(results(*given, name, **options) for name in ("numba", "plain")))


@pytest.mark.parametrize("widest", some([16, 8, 4], {8, 4, widest_lanes()}))
@pytest.mark.parametrize(("clouds", "heads"), [(8, 9), (1, 20), (4, 5)])
@pytest.mark.parametrize("pattern", ["joint", "query_sum"])
def test_the_last_heads_in_shorter_vectors(pattern, clouds, heads, widest, monkeypatch):
    """72 heads use 4 vectors of 16 and one of 8; 20 heads use one of 16 or two of 8, and one of 4.

    Tables get sums from all. The same weights are dropped on machines with shorter vectors.
    """
    monkeypatch.setattr(_bundle, "widest_lanes", lambda: widest)
    if clouds == 1:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    signals, neighbors, terms, index = copies(clouds, heads, torch.float32)
    terms = RelativeTerms(**{name: getattr(terms, name).float() for name in NAMES}, row=index)
    given = signals, neighbors, terms, index
    assert_same(*(results(*given, name, pattern=pattern) for name in ("numba", "plain")), 1e-5)
    problem = Problem(*signals, neighbors, terms, pattern, "softmax", dropout=0.5)
    together = bundle(problem)
    assert len(together.head_ranges(problem)) == (2 if clouds * heads % widest else 1)
    with backend("numba"):
        torch.manual_seed(3)
        dropped, _ = group_attention(*signals, neighbors, terms=terms, pattern=pattern, dropout=0.5, scale=1.0)
    torch.manual_seed(3)
    mask = dropout_mask(problem, int(torch.randint(2**62, ())), together)
    wanted, _ = plain.attend(problem, lambda weights: weights * (mask if weights.ndim == mask.ndim else mask[..., 0]))
    assert_same([dropped], [wanted], 1e-5)


@pytest.mark.parametrize(("widest", "clouds"), [(16, 8), (8, 4), (4, 2)])
def test_a_few_bundles(widest, clouds, monkeypatch):
    given = copies(8, 6)
    assert bundled(*given) == 2  # 12 heads fill 3 vectors of 4: 4 bundles
    monkeypatch.setattr(_bundle, "widest_lanes", lambda: widest)
    single = [tensor.float() for tensor in given[0]], given[1], RelativeTerms(), given[3]
    assert bundled(*single) == clouds  # in each case their heads fill 3 vectors
    if widest <= widest_lanes():  # others take long to compile, and are used on other machines
        assert_same(*(results(*single, name) for name in ("numba", "plain")), 1e-5)


@pytest.mark.parametrize("clouds", [1, 4])  # heads leave lanes idle, or fill the vectors
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("frames", [1, FIBER])
@pytest.mark.parametrize("pattern", ["joint", "framewise", "query_sum"])
def test_positional_keys_of_all_heads(pattern, frames, shared, clouds, monkeypatch):
    """Large tables are not repeated over the lanes, small ones are; an axis of size one serves all frames."""
    monkeypatch.setattr(_launch, "_REPEATED_BYTES", 0 if shared else 2**30)
    signals, neighbors, terms, index = copies(clouds, 3)
    rho = terms.positional_key[:, :frames]
    terms = RelativeTerms(positional_key=rho, displacement_bias=terms.displacement_bias)
    assert_same(*(results(signals, neighbors, terms, index, name, pattern=pattern) for name in ("numba", "plain")))


def test_lists_that_differ_are_not_bundled():
    signals, neighbors, terms, index = copies(4, 3, isolated=False)
    assert bundled(signals, neighbors, terms, index) == 4
    assert bundled(signals, neighbors, terms, None) == 1  # every edge has its own row of the tables
    assert bundled(signals, neighbors, RelativeTerms(), None) == 4
    other = index.clone()
    other[-1] = (other[-1] + 1) % TYPES
    assert bundled(signals, neighbors, terms, other) == 1
    edges = neighbors.edge_index[:, :-1]
    fewer = Neighbors.from_edge_index(edges, neighbors.num_points)
    assert bundled(signals, fewer, RelativeTerms(), None) == 1
    source = edges.new_tensor([1, 0, 3, 2, 5, 4, 8, 7])
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 7, 8])
    mixed = Neighbors.from_edge_index(torch.stack([source, rows]), 9)
    assert_same(*(results([s[:9] for s in signals], mixed, RelativeTerms(), None, name) for name in ("numba", "plain")))


@pytest.mark.parametrize("pattern", ["joint", "query_sum"])
def test_dropout_is_the_same_in_second_derivatives(pattern):
    signals, neighbors, terms, _index = copies(4, 3)
    options = {"pattern": pattern, "dropout": 0.5}

    def call(*signals):
        torch.manual_seed(5)
        with backend("numba"):
            return group_attention(*signals, neighbors, terms=terms, **options)[0]

    inputs = [signal.requires_grad_() for signal in signals]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)
    assert not torch.equal(call(*inputs), group_attention(*inputs, neighbors, terms=terms)[0])


def test_workspace_is_kept_and_never_handed_out_twice():
    with Workspace() as first:
        tensors = [first.zeros(torch.float32, 100, 3) for _ in range(3)]
        with Workspace() as second:
            tensors += [second.zeros(torch.float64, 7), second.empty(torch.float32, 0)]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        assert all((tensor == number).all() for number, tensor in enumerate(tensors))
        assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors if tensor.numel())
    for _ in range(2):
        with Workspace() as again:
            again.empty(torch.float32, 1000)
    with Workspace() as last:
        assert last.block is again.block
    release_memory()
    with Workspace() as fresh:
        assert fresh.block is not last.block
