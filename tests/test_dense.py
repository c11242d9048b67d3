"""Attention over whole clouds through torch's scaled dot product attention, against the plain evaluation."""

import copy
import itertools
import pickle

import pytest
import torch

from lieattn.geometry import AllPairs, Given, Radius
from lieattn.ops import RelativeTerms, backend, explain, group_attention
from lieattn.ops.kernels import _dense as few_channels
from tests.cases import each

PATTERNS = ("joint", "framewise")
CLOUDS = {
    "one": torch.zeros(6, dtype=torch.int64),
    "equal": torch.arange(3).repeat_interleave(4),
    "equal, mixed up": torch.arange(12) % 3,
    "ragged": torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3]),
    "ragged, mixed up": torch.tensor([2, 0, 1, 0, 2, 0, 2]),
    "empty clouds": torch.tensor([1, 1, 4, 4, 4]),
    "single points": torch.arange(4),
}


def problem(batch, fiber=3, heads=2, dim=4, width=5, dtype=torch.float64):
    neighbors = AllPairs()(torch.randn(len(batch), 3), batch)
    signals = [torch.randn(len(batch), fiber, heads, d, dtype=dtype, requires_grad=True) for d in (dim, dim, width)]
    return signals, neighbors


def results(signals, neighbors, name, *, scale=None, **options):
    """Return output and gradients, computed by one backend."""
    with backend(name):
        if name == "dense":
            assert explain(*signals, neighbors, **options).backend == "dense"
        out, _ = group_attention(*signals, neighbors, scale=scale, **options)
        direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        return [out, *torch.autograd.grad(out, signals, direction)]


def assert_same(found, wanted, tolerance=1e-12):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@each("clouds", CLOUDS.keys())
@pytest.mark.parametrize("pattern", PATTERNS)
def test_dense_equals_plain(pattern, clouds, dtype, tolerance):
    signals, neighbors = problem(CLOUDS[clouds], dtype=dtype)
    options = {"pattern": pattern, "scale": 0.7}
    assert_same(*(results(signals, neighbors, name, **options) for name in ("dense", "plain")), tolerance)


def test_the_output_has_the_widest_dtype():
    """As with the other backends: float64 if queries and keys are, unless values are of half precision."""
    (query, key, value), neighbors = problem(CLOUDS["ragged"])
    for dtype, expected in ((torch.float32, torch.float64), (torch.float16, torch.float16)):
        for name in ("dense", "plain"):
            with backend(name):
                assert group_attention(query, key, value.to(dtype), neighbors)[0].dtype == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    generator = torch.Generator().manual_seed(0)
    signals = [(3 * torch.randn(20, 1, 2, 16, generator=generator)).to(dtype) for _ in range(3)]
    neighbors = AllPairs()(torch.randn(20, 3, generator=generator))
    with backend("dense"):
        out, _ = group_attention(*signals, neighbors)
        exact, _ = group_attention(*(signal.float() for signal in signals), neighbors)
    torch.testing.assert_close(out.float(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("clouds", ["equal", "ragged, mixed up"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_differentiable_twice(pattern, clouds):
    signals, neighbors = problem(CLOUDS[clouds], fiber=2, heads=1, dim=2, width=2)

    def call(*given):
        return group_attention(*given, neighbors, pattern=pattern)[0]

    with backend("dense"):
        assert torch.autograd.gradcheck(call, signals, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, signals, fast_mode=True)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_graph_is_kept_if_asked_for(pattern):
    (query, key, value), neighbors = problem(CLOUDS["ragged"])
    with backend("dense"):
        out = group_attention(query.detach(), key, value, neighbors, pattern=pattern)[0].square().sum()
    first = torch.autograd.grad(out, key, retain_graph=True)
    again = torch.autograd.grad(out, (value, key), retain_graph=True)
    twice = torch.autograd.grad(out, key, create_graph=True)
    assert torch.equal(first[0], again[1])
    assert_same(first, twice)
    assert twice[0].requires_grad


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_leak_between_clouds(pattern):
    """NaN in one cloud does not affect other clouds, although clouds are padded to one size."""
    batch = CLOUDS["ragged, mixed up"]
    signals, neighbors = problem(batch)
    for signal in signals:
        with torch.no_grad():
            signal[batch == 2] = torch.nan
    out, *grads = results(signals, neighbors, "dense", pattern=pattern)
    for tensor in (out, *grads):
        assert tensor[batch != 2].isfinite().all()
        assert tensor[batch == 2].isnan().all()


def test_a_cloud_without_points():
    for points in (0, 1):
        signals, neighbors = problem(torch.zeros(points, dtype=torch.int64))
        with backend("dense"):
            out, _ = group_attention(*signals, neighbors, pattern="framewise")
        torch.testing.assert_close(out, signals[2])


def test_which_lists_are_whole():
    pos, batch = torch.randn(10, 2), CLOUDS["ragged"]
    whole = AllPairs()(pos, batch)
    assert whole.whole_clouds is not None
    assert torch.equal(whole.whole_clouds.cloud, batch)
    others = (AllPairs(include_self=False), Radius(100.0), Given(whole.edge_index))
    assert all(neighborhood(pos, batch).whole_clouds is None for neighborhood in others)
    uneven = torch.tensor([0] * 30 + list(range(1, 60)))
    assert AllPairs()(torch.randn(len(uneven), 2), uneven).whole_clouds is None, "filling up would cost too much"


@each("clouds", CLOUDS.keys())
@pytest.mark.parametrize("normalize", ["softmax", "mean", "exp-mean", "none"])
def test_every_normalization_with_a_bias_equals_plain(normalize, clouds):
    signals, neighbors = problem(CLOUDS[clouds])
    terms = RelativeTerms(displacement_bias=torch.randn(neighbors.num_edges, 3, 3, 2, dtype=torch.float64))
    options = {"normalize": normalize, "terms": terms}
    assert_same(*(results(signals, neighbors, name, **options) for name in ("dense", "plain")))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n)), lambda n: n.to("cpu")])
@pytest.mark.parametrize("clouds", ["equal", "ragged"])
def test_copies_stay_whole(copied, clouds):
    signals, neighbors = problem(CLOUDS[clouds])
    assert_same(results(signals, copied(neighbors), "dense"), results(signals, neighbors, "plain"))


@pytest.mark.parametrize("clouds", CLOUDS)
def test_lists_are_made_on_first_use(clouds):
    batch = CLOUDS[clouds]
    neighbors = AllPairs()(torch.randn(len(batch), 2), batch)
    assert neighbors.num_edges == int(torch.bincount(batch).square().sum())
    assert not {"source", "target"} & vars(neighbors).keys()
    target, source = (batch[:, None] == batch).nonzero().unbind(1)
    assert torch.equal(neighbors.target, target)
    assert torch.equal(neighbors.source, source)
    assert "Neighbors(points=" in repr(neighbors)


def test_dropout_within_frames():
    """On CPUs torch drops weights: the mean over many draws is the output without dropout, with two derivatives."""
    (q, k, v), neighbors = problem(CLOUDS["ragged"])
    options = {"pattern": "framewise", "dropout": 0.4}
    assert explain(q, k, v, neighbors, **options).backend == "dense"
    expected, _ = group_attention(q, k, v, neighbors, pattern="framewise")
    draws = torch.stack([group_attention(q, k, v, neighbors, **options)[0] for _ in range(400)])
    assert (draws.mean(0) - expected).abs().max() < 6 * (draws.var(0) / 400).sqrt().max()
    assert draws.std(0).max() > 0.1
    (slope,) = torch.autograd.grad(draws[0].square().sum(), q, create_graph=True)
    assert torch.autograd.grad(slope.square().sum(), k)[0].abs().max() > 0


def test_the_choice_is_explained():
    (q, k, v), neighbors = problem(CLOUDS["ragged"])
    assert str(explain(q, k, v, neighbors)) == "dense"
    for reason, options in {
        "it does not support pattern 'query_sum'": {"pattern": "query_sum"},
        "it does not support normalize='mean'": {"normalize": "mean"},
        "it does not support terms.fiber_bias": {"terms": RelativeTerms(fiber_bias=torch.randn(3, 3, 2))},
        "it cannot return weights": {"return_weights": True},
        "dropout": {"dropout": 0.1},
    }.items():
        choice = explain(q, k, v, neighbors, **options)
        assert reason in choice.obstacles["dense"]
        with backend("dense"):
            assert explain(q, k, v, neighbors, **options).backend in ("plain", "scatter")
            group_attention(q, k, v, neighbors, **options)
    some = Radius(1.0)(torch.randn(10, 3))
    assert "not known that points attend to their whole clouds" in str(explain(q, k, v, some))
    assert "there are no queries" in str(explain(None, None, v, neighbors))
    with backend("numba"):
        assert "was asked for" in explain(q, k, v, neighbors).obstacles["dense"]
    wide = torch.randn(10, 12, 8, 8)
    assert "the fused kernel is faster" in str(explain(wide, wide, wide, neighbors))
    with backend("dense"):
        assert explain(wide, wide, wide, neighbors).backend == "dense"


@pytest.fixture
def launched(monkeypatch):
    """Record the executed passes of the kernel for few channels."""
    names = []
    for name in ("run_forward", "run_backward"):
        original = getattr(few_channels, name)
        monkeypatch.setattr(few_channels, name, lambda *a, f=original, n=name: names.append(n) or f(*a))
    return names


# lanes of single precision on other machines, where each precision would need kernels of its own
PRECISIONS = {
    None: ((torch.float64, 1e-12), (torch.float32, 1e-5)),
    8: ((torch.float64, 1e-12),),
    4: ((torch.float32, 1e-5),),
}


@pytest.mark.parametrize(
    ("clouds", "lanes"), [*((clouds, None) for clouds in CLOUDS), *itertools.product(["ragged", "large"], PRECISIONS)]
)
@pytest.mark.parametrize(("dim", "width"), [(4, 4), (1, 3), (3, 2)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_kernel_for_few_channels_equals_plain(pattern, dim, width, clouds, lanes, launched, monkeypatch):
    if lanes is not None:
        monkeypatch.setattr(few_channels, "widest_lanes", lambda: lanes)
    batch = torch.arange(2).repeat_interleave(40) if clouds == "large" else CLOUDS[clouds]
    for dtype, tolerance in PRECISIONS[lanes]:
        signals, neighbors = problem(batch, heads=3, dim=dim, width=width, dtype=dtype)
        found, wanted = (results(signals, neighbors, name, pattern=pattern, scale=0.7) for name in ("auto", "plain"))
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours - theirs).abs().max() < tolerance * max(1, theirs.abs().max())
    assert launched == ["run_forward", "run_backward"] * len(PRECISIONS[lanes])


def test_the_kernel_for_few_channels_on_several_threads(launched, monkeypatch):
    signals, neighbors = problem(CLOUDS["ragged"], heads=5, width=4)
    one = results(signals, neighbors, "auto", pattern="framewise")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    three = results(signals, neighbors, "auto", pattern="framewise")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(one, three, strict=True))
    assert len(launched) == 4


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_kernel_for_few_channels_can_be_differentiated_twice(pattern, launched):
    signals, neighbors = problem(CLOUDS["ragged"], fiber=2, heads=1, dim=2, width=2)

    def call(*given):
        return group_attention(*given, neighbors, pattern=pattern)[0]

    assert torch.autograd.gradcheck(call, signals, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, signals, fast_mode=True)
    assert "run_backward" in launched


def test_the_kernel_for_few_channels_keeps_large_scores_and_what_is_not_a_number(launched):
    signals, neighbors = problem(CLOUDS["equal"], width=4)
    with torch.no_grad():
        signals[0][:4] *= 1e4
        signals[0][8:] = torch.nan
    found, wanted = (results(signals, neighbors, name, pattern="framewise") for name in ("auto", "plain"))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert launched == ["run_forward", "run_backward"]


def test_many_channels_are_left_to_torch(launched):
    small, neighbors = problem(CLOUDS["equal"], width=9)
    results(small, neighbors, "auto", pattern="framewise")
    results(small, neighbors, "dense", pattern="framewise")
    assert launched == []
