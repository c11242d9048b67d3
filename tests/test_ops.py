"""The operator, tested against its definition, :func:`lieattn.ops.reference_attention`."""

import itertools
import math
import re
import zlib
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from lieattn.geometry import AllPairs, Neighbors, Radius
from lieattn.groups import cyclic, dihedral, tetrahedral
from lieattn.ops import RelativeTerms, _plain, _pooled, backend, group_attention, reference_attention, tied_linear
from tests.cases import each, some

HEADS, DIM, VALUE = 2, 3, 4
PATTERNS = ("joint", "framewise", "query_sum", "pooled")
AFFINE_KEYS = ("key_psi", "key_psi_pairs", "key_psi_matrix")
# If output and query frame are the same, a table of three frames is refused; test_errors has all such errors.
REFUSED = {
    "joint": ("fiber_key_3",),
    "framewise": ("fiber_key_3", "key_psi_matrix", "psi_matrix"),
    "query_sum": AFFINE_KEYS,
    "pooled": ("fiber_key", "fiber_key_3", "fiber_bias"),
}
NORMALIZATIONS = ("softmax", "mean", "exp-mean", "none")
TERMS = {
    "none": (),
    "positional key": ("positional_key",),
    "bias of the displacement": ("displacement_bias",),
    "pair bias": ("pair_bias",),
    "frames": ("fiber_key", "fiber_bias"),
    "table of three frames": ("fiber_key_3",),
    "affine values": ("psi", "beta"),
    "affine values of pairs": ("psi_pairs", "beta_pairs"),
    "affine keys": ("key_psi", "positional_key"),
    "affine keys of pairs": ("key_psi_pairs", "psi_pairs", "beta"),
    "matrices": ("key_psi_matrix", "psi_matrix", "beta"),
    "all": ("positional_key", "pair_bias", "fiber_key", "fiber_bias", "psi", "beta_pairs", "key_psi_pairs"),
}


@pytest.fixture(params=["plain", "scatter"])
def scatter(request, monkeypatch):
    """Use both ways to sum over lists of neighbors; torch-scatter is called in one of them only."""
    calls = []
    if request.param == "scatter":
        pytest.importorskip("torch_scatter", reason="torch-scatter is not installed: it needs a C++ compiler")
    if find_spec("torch_scatter"):
        segment_csr = import_module("torch_scatter").segment_csr
        monkeypatch.setattr("torch_scatter.segment_csr", lambda *a, **k: calls.append(a) or segment_csr(*a, **k))
    with backend(request.param):
        yield request.param
    assert bool(calls) == (request.param == "scatter")


def problem(pattern, names, fiber=3, points=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(zlib.crc32(" ".join((pattern, *names)).encode()))

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    pos = draw(points, 2)
    batch = torch.tensor([0, 1, 0, 0, 2, 1, 0])[:points]
    neighbors = Radius(4.0, include_self=False)(pos, batch)
    assert (neighbors.degree == 0).any(), "a point without neighbors must be part of the test"
    assert neighbors.num_edges >= 4
    types = 4
    index = torch.randint(types, (neighbors.num_edges,), generator=generator)
    keys = 1 if pattern == "framewise" else fiber
    added = 1 if pattern == "pooled" else keys
    tables = {
        "positional_key": ("positional_key", (types, fiber, 1, DIM)),
        "displacement_bias": ("displacement_bias", (types, fiber, 1, HEADS)),
        "pair_bias": ("displacement_bias", (types, fiber, added, HEADS)),
        "fiber_key": ("fiber_key", (fiber, fiber, HEADS, DIM)),
        "fiber_key_3": ("fiber_key", (fiber, fiber, fiber, 1, DIM)),
        "fiber_bias": ("fiber_bias", (fiber, fiber, HEADS)),
        "psi": ("psi", (types, fiber, 1, HEADS, VALUE)),
        "beta": ("beta", (types, fiber, 1, 1, VALUE)),
        "psi_pairs": ("psi", (types, fiber, keys, HEADS, VALUE)),
        "beta_pairs": ("beta", (types, fiber, added, HEADS, VALUE)),
        "key_psi": ("key_psi", (types, fiber, 1, HEADS, DIM)),
        "key_psi_pairs": ("key_psi", (types, fiber, keys, 1, DIM)),
        "psi_matrix": ("psi", (types, fiber, keys, HEADS, VALUE, HEADS * VALUE)),
        "key_psi_matrix": ("key_psi", (types, fiber, keys, HEADS, DIM, HEADS * DIM)),
    }
    names = [name for name in names if name not in REFUSED.get(pattern, ())]
    terms = RelativeTerms(**{tables[name][0]: draw(*tables[name][1]) for name in names}, row=index)
    signals = [draw(points, fiber, HEADS, width) for width in (DIM, DIM, VALUE)]
    return signals, neighbors, terms, index


COMBINATIONS = [
    (pattern, terms)
    for pattern, terms in itertools.product(PATTERNS, TERMS)
    if not TERMS[terms] or set(TERMS[terms]) - set(REFUSED[pattern])
]


@pytest.mark.parametrize("evaluation", ["plain", "auto"])
@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@each("pattern, terms", COMBINATIONS)
def test_evaluators_equal_the_reference(pattern, normalize, terms, evaluation):
    (q, k, v), neighbors, tables, _ = problem(pattern, TERMS[terms])
    with backend(evaluation):
        out, _ = group_attention(q, k, v, neighbors, pattern=pattern, normalize=normalize, terms=tables)
    expected = reference_attention(q, k, v, neighbors, pattern=pattern, normalize=normalize, terms=tables)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("evaluation", ["plain", "numba", "dense"])
@pytest.mark.parametrize("names", [("pair_bias",), ("displacement_bias", "psi"), ("fiber_bias", "beta_pairs"), ()])
@each("pattern", PATTERNS)
def test_terms_alone(pattern, names, evaluation):
    """Without queries, the tables determine the numbers of frames, and axes of size 1 serve all of them."""
    (_, _, v), neighbors, tables, index = problem(pattern, names)
    for rows in (tables.tables(), {name: table[..., :1] for name, table in tables.tables().items()}):
        for normalize in ("softmax", "none"):
            given = {"pattern": pattern, "normalize": normalize, "terms": RelativeTerms(**rows, row=index)}
            expected = reference_attention(None, None, v, neighbors, **given)
            with backend(evaluation):
                out, _ = group_attention(None, None, v, neighbors, **given)
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_the_reference_at_one_element():
    """One output element with every term, computed with scalars."""
    names = ("positional_key", "pair_bias", "fiber_key", "fiber_bias", "psi", "beta_pairs")
    (q, k, v), neighbors, t, index = problem("query_sum", names)
    out = reference_attention(q, k, v, neighbors, pattern="query_sum", terms=t, scale=0.7)
    i, h, e, d = int(neighbors.degree.argmax()), 1, 1, 2
    edges = range(int(neighbors.row_ptr[i]), int(neighbors.row_ptr[i + 1]))
    total = 0.0
    for g in range(3):
        weights, values = [], []
        for edge, m in itertools.product(edges, range(3)):
            j, u = int(neighbors.source[edge]), int(index[edge])
            keys = [k[j, m, e, c] + t.positional_key[u, h, 0, c] + t.fiber_key[g, m, e, c] for c in range(DIM)]
            score = 0.7 * sum(q[i, g, e, c] * keys[c] for c in range(DIM))
            weights.append(math.exp(score + t.displacement_bias[u, h, m, e] + t.fiber_bias[g, m, e]))
            values.append(t.psi[u, h, 0, e, d] * v[j, m, e, d] + t.beta[u, h, m, e, d])
        total += sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
    torch.testing.assert_close(out[i, h, e, d], total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_with_and_without_torch_scatter(scatter, pattern):
    (q, k, v), neighbors, tables, _index = problem(pattern, TERMS["all"])
    signals = [s.requires_grad_() for s in (q, k, v)]
    out, _ = group_attention(*signals, neighbors, pattern=pattern, terms=tables)
    expected = reference_attention(*signals, neighbors, pattern=pattern, terms=tables)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), signals)
    wanted = torch.autograd.grad((expected * weights).sum(), signals)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_differentiable_twice(pattern, normalize):
    signals, neighbors, tables, index = problem(pattern, TERMS["all"], fiber=2, points=5)
    names = list(tables.tables())
    given = [s.requires_grad_() for s in (*signals, *(getattr(tables, name) for name in names))]

    def call(query, key, value, *terms):
        return group_attention(
            query,
            key,
            value,
            neighbors,
            pattern=pattern,
            normalize=normalize,
            terms=RelativeTerms(**dict(zip(names, terms, strict=True)), row=index),
        )[0]

    with backend("plain"):
        assert torch.autograd.gradcheck(call, given, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@pytest.mark.parametrize("entries", [1, 200, 2000])
@pytest.mark.parametrize("indexed", [True, False], ids=["types", "edges"])
def test_pooled_in_portions(entries, indexed, monkeypatch):
    """Evaluation in portions of targets, recomputed for the gradient, gives the same results."""
    signals, _, tables, _ = problem("pooled", ("key_psi_pairs", "positional_key", "psi_pairs", "beta"))
    signals = [torch.randn(40, *signal.shape[1:], dtype=signal.dtype) for signal in signals]
    neighbors = Radius(0.9, include_self=False)(torch.randn(40, 2), torch.arange(40) % 2)
    index = torch.arange(neighbors.num_edges) % 4
    given = {name: table if indexed else table[index] for name, table in tables.tables().items()}
    leaves = [t.requires_grad_() for t in (*signals, *given.values())]

    def call():
        out, weights = group_attention(
            *signals,
            neighbors,
            pattern="pooled",
            terms=RelativeTerms(**given, row=index if indexed else None),
            return_weights=True,
        )
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return out, weights, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    wanted = call()
    monkeypatch.setitem(_pooled._PORTION, "cpu", entries)
    assert len(_pooled._portions(neighbors, index, 24, False)) > 1
    for ours, theirs in zip(call(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_pooled_keys_that_are_the_values():
    """If keys and values use the same affine map, it is evaluated once; a query with one frame serves all frames."""
    (query, _, value), neighbors, tables, index = problem("pooled", ("psi_pairs", "beta"))
    beta = tables.beta.expand(-1, -1, -1, HEADS, -1)
    shared = RelativeTerms(psi=tables.psi, beta=beta, key_psi=tables.psi, positional_key=beta[:, :, 0], row=index)
    split, other = replace(shared, key_psi=tables.psi.clone()), replace(shared, key_psi=2 * tables.psi)
    query = torch.randn(*query.shape[:-1], VALUE, dtype=query.dtype)[:, :1]
    options = {"pattern": "pooled"}
    ours, _ = group_attention(query, value, value, neighbors, terms=shared, **options)
    theirs, _ = group_attention(query.expand(-1, 3, -1, -1), value.clone(), value, neighbors, terms=split, **options)
    torch.testing.assert_close(ours, theirs)
    with backend("plain"):
        found, _ = group_attention(query, value, value, neighbors, terms=other, **options)
    expected = reference_attention(query.expand(-1, 3, -1, -1), value, value, neighbors, terms=other, **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_weights_are_those_used(pattern):
    (q, k, v), neighbors, tables, _index = problem(pattern, ("positional_key", "fiber_bias"))
    out, weights = group_attention(q, k, v, neighbors, pattern=pattern, terms=tables, return_weights=True)
    rules = {"joint": "eabh,ebhd->eahd", "framewise": "eah,eahd->eahd", "pooled": "eah,ebhd->eahd"}
    message = torch.einsum(rules.get(pattern, "eogmh,emhd->eohd"), weights, v[neighbors.source])
    rebuilt = torch.zeros_like(out).index_add(0, neighbors.target, message)
    torch.testing.assert_close(rebuilt, out)
    sums = torch.zeros(neighbors.num_points, *weights.shape[1:], dtype=weights.dtype)
    sums = sums.index_add(0, neighbors.target, weights)
    sums = {"joint": lambda s: s.sum(2), "query_sum": lambda s: s.sum(3)}.get(pattern, lambda s: s)(sums)
    reached = neighbors.degree > 0
    torch.testing.assert_close(sums[reached], torch.ones_like(sums[reached]))


@pytest.mark.parametrize("evaluation", ["plain", "numba", "dense"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("fiber", [1, 3])
def test_keys_masked_by_infinite_biases(pattern, fiber, evaluation):
    """A bias of minus infinity removes a key, or all frames of a point; only a point without keys has output 0."""
    neighbors = AllPairs()(torch.randn(5, 2))
    shapes = [(5, fiber, HEADS, width) for width in (DIM, DIM, VALUE)]
    bias = torch.randn(25, fiber, fiber if pattern in ("joint", "query_sum") else 1, HEADS, dtype=torch.float64)
    bias[torch.rand(bias.shape) < 0.3] = -math.inf
    bias[[1, 7]] = -math.inf  # two keys
    found = []
    for evaluate in (lambda *a, **k: group_attention(*a, **k)[0], reference_attention):
        torch.manual_seed(1)
        leaves = [*(torch.randn(shape, dtype=torch.float64) for shape in shapes), bias.clone()]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        with backend(evaluation):
            out = evaluate(*leaves[:3], neighbors, pattern=pattern, terms=RelativeTerms(displacement_bias=leaves[3]))
        found.append([out, *torch.autograd.grad(out[:2].square().sum(), leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, equal_nan=True)
    bias[20:] = -math.inf
    with backend(evaluation), torch.no_grad():
        terms = RelativeTerms(displacement_bias=bias)
        out, _ = group_attention(*leaves[:3], neighbors, pattern=pattern, terms=terms)
    assert out[4].isnan().all()


def bad_operands():
    """Return cases by the name of the fault, with the changed arguments and the expected message."""
    x, rows = torch.randn(4, 3, HEADS, DIM), torch.zeros(16, dtype=torch.int64)
    neighbors = AllPairs()(torch.randn(4, 2))
    pointers, source, target = neighbors.row_ptr, neighbors.source, neighbors.target
    psi = torch.randn(4, 1, 1, 1, 1)
    return {
        "list": ({"query": [1.0]}, "query: expected a floating tensor, got list"),
        "none": ({"value": None}, "value: expected a floating tensor, got NoneType"),
        "bool": ({"value": x > 0}, "value: expected a floating tensor, got a tensor of torch.bool"),
        "complex": ({"key": x + 0j}, "key: expected a floating tensor"),
        "sparse": ({"value": x.to_sparse()}, "value: expected a dense tensor"),
        "8 bits": ({"value": x.to(torch.float8_e5m2)}, "value: expected float64, float32, bfloat16 or float16"),
        "axes": ({"value": x[0]}, "value: expected [points=4, fiber, heads, dim] as in neighbors, got (3, 2, 3)"),
        "no channels": ({"query": x[..., :0], "key": x[..., :0]}, "query: expected at least one channel"),
        "no fiber": ({"value": x[:, :0]}, "value: expected a fiber of at least one frame, got (4, 0, 2, 3)"),
        "device": ({"query": x.to("meta")}, "query: expected a tensor on cpu like neighbors, got one on meta"),
        "neighbors": ({"neighbors": neighbors.edge_index}, "neighbors: expected Neighbors"),
        "source": ({"neighbors": Neighbors(pointers, source + 9, target)}, "neighbors: source: expected numbers"),
        "target": ({"neighbors": Neighbors(pointers, source, target.flip(0))}, "neighbors: target must hold"),
        "pointers": ({"neighbors": Neighbors(pointers + 1, source, target)}, "neighbors: row_ptr must ascend"),
        "terms": ({"terms": {}}, "terms: expected RelativeTerms, got dict"),
        "row": ({"terms": RelativeTerms(psi=psi, row=rows + 4)}, "terms.row: expected numbers from 0 to 3"),
        "row dtype": ({"terms": RelativeTerms(psi=psi, row=rows.int())}, "terms.row: expected an int64 tensor"),
        "term": ({"terms": RelativeTerms(psi=psi.long(), row=rows)}, "terms.psi: expected a floating tensor"),
        "term device": ({"terms": RelativeTerms(psi=psi.to("meta"), row=rows)}, "terms.psi: expected a tensor on cpu"),
        "no frames": (
            {"terms": RelativeTerms(psi=psi[:, :0], row=rows), "pattern": "query_sum"},
            "terms.psi: expected",
        ),
        "phases": ({"terms": RelativeTerms(rotary=torch.ones(4, 3, HEADS, 1, 2))}, "terms.rotary: expected [points"),
        "scale": ({"scale": "1"}, "scale: expected a number, got str"),
        "infinite scale": ({"scale": math.inf}, "scale: expected a finite number, got inf"),
        "NaN as scale": ({"scale": math.nan}, "scale: expected a finite number, got nan"),
        "dropout": ({"dropout": None}, "dropout: expected a number, got NoneType"),
        "dropout of all": ({"dropout": 1.0}, "dropout: expected a probability in [0, 1), got 1.0"),
        "pattern": ({"pattern": ["joint"]}, "pattern: expected one of"),
    }


@pytest.mark.parametrize("wrong", bad_operands())
def test_bad_operands_are_named(wrong):
    changes, message = bad_operands()[wrong]
    x = torch.randn(4, 3, HEADS, DIM)
    given = {"query": x, "key": x, "value": x, "neighbors": AllPairs()(torch.randn(4, 2)), **changes}
    with backend("plain"), pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        group_attention(**given)


@pytest.mark.parametrize("pattern", ["joint", "query_sum"])
@pytest.mark.parametrize("evaluation", ["auto", "plain"])
def test_weights_sum_to_one_however_large_scores_are(evaluation, pattern):
    """A constant added to all scores has no effect, because weights do not contain the rounding of the log-sum."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(6, 4, 2, 4) for _ in range(3))
    query[..., 0], key[..., 0] = 1, 1e4
    with backend(evaluation):
        out, _ = group_attention(query, key, torch.ones_like(value), AllPairs()(torch.randn(6, 3)), pattern=pattern)
    total = 1.0 if pattern == "joint" else 4.0
    torch.testing.assert_close(out, torch.full_like(out, total), rtol=2e-6, atol=0)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_values_without_channels_give_outputs_without_channels(pattern):
    x, neighbors = torch.randn(5, 2, HEADS, DIM), AllPairs()(torch.randn(5, 2))
    for query in (x, None):
        out, _ = group_attention(query, query, x[..., :0], neighbors, pattern=pattern)
        assert out.shape == (*group_attention(query, query, x, neighbors, pattern=pattern)[0].shape[:-1], 0)


@pytest.mark.parametrize("pattern", some(PATTERNS, ("joint", "pooled")))
def test_dropout_keeps_the_mean(pattern):
    (q, k, v), neighbors, tables, _index = problem(pattern, ("positional_key",))
    options = {"pattern": pattern, "terms": tables}
    exact, _ = group_attention(q, k, v, neighbors, **options)
    draws = torch.stack([group_attention(q, k, v, neighbors, dropout=0.3, **options)[0] for _ in range(500)])
    assert not torch.equal(draws[0], draws[1])
    deviation = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - exact).abs() <= 5 * deviation + 1e-12).all()


@pytest.mark.parametrize("evaluation", ["plain", "auto"])
def test_dropout_drops_single_key_frames(evaluation):
    (q, k, _), neighbors, _, _ = problem("joint", ())
    v = torch.eye(3, dtype=q.dtype)[None, :, None].expand(len(q), 3, HEADS, 3)  # a channel for each key frame
    torch.manual_seed(0)
    with backend(evaluation):
        out, _ = group_attention(q, k, v, neighbors, dropout=0.5)
    kept = out[neighbors.degree == 1] != 0
    assert (kept.any(-1) & ~kept.all(-1)).any()


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("pattern", ["joint", "framewise"])
def test_rotary_terms_turn_pairs_of_channels_by_differences_of_angles(pattern, values):
    """Outputs are turned back by the angles of the target, so only differences of angles count."""
    _, neighbors, _, _ = problem(pattern, ())
    q, k, v = (torch.randn(7, 3, HEADS, 4, dtype=torch.float64) for _ in range(3))
    angles = torch.randn(7, 3, 1, 2, dtype=torch.float64)

    def turned(signal, angles):
        pairs = torch.view_as_complex(signal.unflatten(-1, (2, 2)))
        return torch.view_as_real(pairs * torch.exp(1j * angles)).flatten(-2)

    def attended(angles):
        rotary = torch.stack([angles.cos(), angles.sin()], dim=-1)
        terms = RelativeTerms(rotary=rotary, rotary_values=values)
        return group_attention(q, k, v, neighbors, pattern=pattern, terms=terms)[0]

    seen = turned(v, angles) if values else v
    expected, _ = group_attention(turned(q, angles), turned(k, angles), seen, neighbors, pattern=pattern)
    expected = turned(expected, -angles) if values else expected
    torch.testing.assert_close(attended(angles), expected)
    torch.testing.assert_close(attended(angles + 1.0), expected)


@pytest.mark.parametrize("group", [cyclic(5), dihedral(3), tetrahedral()], ids=lambda g: g.name)
def test_tied_linear_commutes(group):
    kernel = torch.randn(group.order, 3, 2, dtype=torch.float64)
    f = torch.randn(group.order, 2, dtype=torch.float64)

    def apply(signal):
        return tied_linear(signal, kernel, group.relative_index)

    for h in range(group.order):
        torch.testing.assert_close(apply(group.translate(h, f)), group.translate(h, apply(f)))
    wrong = kernel[group.cayley[torch.arange(group.order)[:, None], group.inverse_index]].transpose(1, 2)
    turned = [torch.einsum("gohi,hi->go", wrong, group.translate(h, f)) for h in range(group.order)]
    straight = torch.einsum("gohi,hi->go", wrong, f)
    same = all(torch.allclose(t, group.translate(h, straight)) for h, t in enumerate(turned))
    assert same == group.is_abelian, "the control h g⁻¹ may pass abelian groups only"


def test_terms_that_are_joined_share_their_rows():
    row, table, fiber = torch.zeros(5, dtype=torch.int64), torch.randn(2, 1, 1, HEADS), torch.randn(3, 3, HEADS)
    one = RelativeTerms(displacement_bias=table, row=row)
    both = one.plus(RelativeTerms(positional_key=table, row=row))
    assert both.row is row
    assert list(both.tables()) == ["positional_key", "displacement_bias"]
    assert one.plus(RelativeTerms(fiber_bias=fiber)).row is row
    assert RelativeTerms(fiber_bias=fiber).plus(one).row is row
    assert RelativeTerms(psi=table).plus(RelativeTerms(beta=table)).row is None
    with pytest.raises(ValueError, match="row: the displacement tables of both sets"):
        one.plus(RelativeTerms(psi=table))
    with pytest.raises(ValueError, match="row: the displacement tables of both sets"):
        one.plus(RelativeTerms(psi=table, row=row.clone()))


@pytest.mark.parametrize("reduction", ["sum", "softmax"])
def test_torch_scatter_has_all_derivatives(reduction):
    """Forward, batched and second derivatives, with a target without edges."""
    pytest.importorskip("torch_scatter", reason="torch-scatter is not installed: it needs a C++ compiler")
    target, degree = torch.tensor([0, 0, 0, 2, 2, 3]), torch.tensor([3, 0, 2, 1])
    lists = {scattered: _plain.edge_lists(target, degree, scattered) for scattered in (False, True)}
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    call = getattr(lists[True], reduction)
    torch.testing.assert_close(call(x), getattr(lists[False], reduction)(x), atol=1e-14, rtol=0)
    torch.autograd.gradcheck(call, x, check_forward_ad=True, check_batched_grad=True)
    torch.autograd.gradgradcheck(call, x, check_batched_grad=True)
