"""Counted multiply-adds: torch operators against hand counts, fused kernels against the plain implementation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lieattn.geometry import Radius, find_neighbors, lift, point_clouds
from lieattn.groups import cyclic
from lieattn.nn import AffineSelfConvolution, GridAttentiveConvolution, LieSelfAttention
from lieattn.nn.relative import FourierFeatures
from lieattn.ops import RelativeTerms, backend, count_operations, explain, group_attention

HEADS, DIM, FIBER = 2, 8, 4


def signals(points: int = 12, fiber: int = FIBER) -> list[torch.Tensor]:
    return [torch.randn(points, fiber, HEADS, DIM, requires_grad=True) for _ in range(3)]


def neighbors(points: int = 12):
    return find_neighbors(point_clouds(torch.randn(points, 2)), Radius(1.2))


def table(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: torch.ones(2, 3) @ torch.ones(3, 5), 30),
        (lambda: torch.ones(2, 3) * torch.ones(3), 6),
        (lambda: 2 * torch.ones(2, 3), 0),
        (lambda: torch.einsum("pij,pjk->pik", torch.ones(4, 2, 3), torch.ones(4, 3, 5)), 120),
        (lambda: F.conv2d(torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3)), 3 * 3 * 3 * 2 * 9),
        (lambda: F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 40, 8)), 2 * 40 * 40 * 16),
        (lambda: nn.Linear(3, 5)(torch.ones(2, 3, requires_grad=True)).sum().backward(), 3 * 30),
        (
            lambda: F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 40, 8, requires_grad=True)).sum().backward(),
            3 * 2 * 40 * 40 * 16,
        ),
    ],
    ids=["product", "entrywise", "number", "einsum", "convolution", "attention", "backward", "backward of attention"],
)
def test_operators_of_torch(work, expected):
    assert count_operations(work) == expected


def efficient_attention():
    """Call the kernel for GPUs on tensors without storage, and its gradient."""
    kernels = torch.ops.aten
    query, key, value, grad = torch.ones(4, 1, 2, 40, 8, device="meta")
    out, logsumexp, *random = kernels._scaled_dot_product_efficient_attention(query, key, value, None, True)
    needed = [True, True, True, False]
    kernels._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, None, out, logsumexp, *random, 0.0, needed
    )


def test_attention_of_torch_counts_the_same_on_gpus():
    assert count_operations(efficient_attention) == 3 * 2 * 40 * 40 * 16


def test_joint_attention_by_hand():
    """A score and a value for every edge and pair of frames, and the second factor of the weights."""
    near, operands = neighbors(), signals()
    with backend("numba"):
        found = count_operations(lambda: group_attention(*operands, near, scale=1.0))
    pairs = near.num_edges * FIBER * FIBER * HEADS
    assert found == pairs * 2 * DIM + near.num_edges * FIBER * HEADS * DIM


@pytest.mark.parametrize("pattern", ["joint", "framewise", "query_sum"])
@pytest.mark.parametrize("terms", ["none", "position", "frames", "values"])
@pytest.mark.parametrize("normalize", ["softmax", "none"])
def test_kernels_count_as_plain_torch(pattern, terms, normalize):
    near, operands = neighbors(), signals()
    edges, given = near.num_edges, {}
    if terms == "position":
        given = {"positional_key": table(edges, FIBER, HEADS, DIM)}
    elif terms == "frames":
        given = {"fiber_key": table(FIBER, FIBER, HEADS, DIM), "fiber_bias": table(FIBER, FIBER, HEADS)}
    elif terms == "values":
        given = {"psi": table(edges, FIBER, 1, HEADS, DIM), "beta": table(edges, FIBER, 1, HEADS, DIM)}
    options = {"pattern": pattern, "normalize": normalize, "terms": RelativeTerms(**given)}

    def step() -> None:
        group_attention(*operands, near, **options)[0].square().sum().backward()

    found = {}
    for name in ("numba", "plain"):
        with backend(name):
            fused = explain(*operands, near, **options).backend
            found[name] = fused, count_operations(step)
    if pattern == "query_sum" and normalize == "none":  # has no kernel
        assert found["numba"][0] in ("plain", "scatter")
        assert found["numba"][1] == found["plain"][1]
        return
    assert (found["numba"][0], found["plain"][0]) == ("numba", "plain")
    assert found["numba"][1] == found["plain"][1] > 2 * edges * FIBER * HEADS * DIM


@pytest.mark.parametrize("keys", [0, 1, FIBER])
def test_pooled_attention_by_hand(keys):
    """A score and a value for every edge and output frame, and factors of ``keys`` frames, if any."""
    near, operands = neighbors(), signals()
    psi = torch.randn(near.num_edges, FIBER, keys, HEADS, DIM) if keys else None
    options = {"pattern": "pooled", "terms": RelativeTerms(psi=psi, key_psi=psi), "scale": 1.0}
    with backend("numba"):
        found = count_operations(lambda: group_attention(*operands, near, **options))
    assert found == near.num_edges * FIBER * HEADS * 2 * DIM * (1 + keys)


def test_dropout_changes_nothing():
    near, operands = neighbors(), signals()
    with backend("numba"):
        found = [count_operations(lambda p=p: group_attention(*operands, near, dropout=p)) for p in (0.0, 0.3)]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["pooled", "per head", "attentive"])
def test_layers_count_as_plain_torch(name):
    group = cyclic(4)
    if name == "attentive":
        layer, inputs = GridAttentiveConvolution(group, 3, 4, size=3), (torch.randn(2, 3, 4, 9, 9),)
    else:
        graph = lift(torch.randn(40, 2), group, Radius(1.0))
        inputs = torch.randn(40, 4, 16), graph
        layer = AffineSelfConvolution(group, 16, 16, FourierFeatures(hidden=6), heads=2)
        if name == "per head":
            layer = LieSelfAttention(16, graph.relative.coordinates.shape[-1], heads=2, kernel="location", hidden=8)
    counts = {}
    for way in ("numba", "plain"):
        with backend(way):
            counts[way] = count_operations(lambda: layer(*inputs).square().sum().backward())
    if name == "pooled":  # the plain implementation evaluates repeated displacements once
        assert 0.5 * counts["plain"] < counts["numba"] < 2 * counts["plain"]
    else:
        assert counts["numba"] == counts["plain"] > 0
