"""The pattern ``"pooled"`` in plain torch.

Keys and values are affine functions of the whole fiber of a neighbor. The sum over the key fiber is computed first. If
displacements repeat, it is one product for all points and types, so that no tensor of size edges x fiber x fiber x dim
is stored. Targets are processed in portions, which are recomputed for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lieattn._core.contexts import may_recompute
from lieattn.geometry import Neighbors
from lieattn.ops._plain import EdgeLists, contract, edge_lists
from lieattn.ops._terms import Problem

# Number of entries of the largest tensor of a portion, which should fit into the cache.
_PORTION = {"cpu": 2**19, "cuda": 2**25}


def attend(
    problem: Problem,
    drop: Callable[[Tensor], Tensor] | None = None,
    return_weights: bool = False,
    scattered: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Evaluate the pattern ``"pooled"`` on checked operands of one dtype.

    ``drop`` is applied to the weights ``[edges, out, heads]``. Torch-scatter evaluates the sums if ``scattered``.
    """
    row = problem.terms.row
    portions = _portions(problem.neighbors, row, _entries(problem), scattered)
    evaluate = partial(_attend, problem, drop)
    if len(portions) == 1:
        out, weights = evaluate(portions[0])
        return out, weights if return_weights else None
    again = may_recompute()
    parts = [checkpoint(evaluate, portion, use_reentrant=False) if again else evaluate(portion) for portion in portions]
    out = torch.cat([part for part, _ in parts])
    return out, torch.cat([weights for _, weights in parts]) if return_weights else None


class _Portion(NamedTuple):
    """Edges of consecutive targets. ``lists`` begin with the first one; ``source`` is an index of all points."""

    targets: slice
    source: Tensor
    lists: EdgeLists
    row: Tensor
    repeats: bool


def _portions(neighbors: Neighbors, index: Tensor | None, entries: int, scattered: bool) -> list[_Portion]:
    """Divide the targets into portions of limited size, if an edge needs ``entries`` numbers."""
    limit = max(1, _PORTION.get(neighbors.device.type, _PORTION["cuda"]) // max(1, entries))
    points, edges, degree = neighbors.num_points, neighbors.num_edges, neighbors.degree
    bounds, starts = [0, points], [0, edges]
    if edges > limit:
        marks = torch.arange(limit, edges, limit, device=neighbors.device)
        inner = torch.searchsorted(neighbors.row_ptr, marks, right=True) - 1
        bounds[1:1] = sorted(set(inner.tolist()) - {0})
        starts = neighbors.row_ptr[bounds].tolist()
    rows = torch.arange(edges, device=neighbors.device) if index is None else index
    portions = []
    for (first, last), (start, end) in zip(pairwise(bounds), pairwise(starts), strict=True):
        own, near = slice(first, last), slice(start, end)
        lists = edge_lists(neighbors.target[near] - first, degree[own], scattered)
        portions.append(_Portion(own, neighbors.source[near], lists, rows[near], index is not None))
    return portions


def _entries(problem: Problem) -> int:
    """Return the number of entries of an edge in the largest tensor."""
    query, key, value, terms = problem.query, problem.key, problem.value, problem.terms
    outs = [1 if t is None else t.shape[1] for t in (terms.positional_key, terms.beta, query, terms.key_psi, terms.psi)]
    # If each edge has its own tables: their key frames, times the columns of their matrices.
    psis = [] if terms.row is not None else [t for t in (terms.key_psi, terms.psi) if t is not None]
    pairs = [t.shape[2] * (t.shape[5] if t.ndim == 6 else 1) for t in psis]
    width = value.shape[-1] if key is None else max(value.shape[-1], key.shape[-1])
    return max(outs) * max(pairs, default=1) * value.shape[2] * width


def _attend(problem: Problem, drop: Callable[[Tensor], Tensor] | None, part: _Portion) -> tuple[Tensor, Tensor]:
    """Return output ``[targets, out, heads, value_dim]`` and weights ``[edges, out, heads]`` of a portion."""
    terms = problem.terms
    values = _summed(problem.value, terms.psi, part)
    weights = _weights(problem, part, values)
    if terms.beta is not None:
        values = values + terms.beta[:, :, 0].index_select(0, part.row)
    message = (weights if drop is None else drop(weights))[..., None] * values
    return part.lists.sum(message), weights


def _weights(problem: Problem, part: _Portion, values: Tensor) -> Tensor:
    """Return the weights. The sums over the frames of the values are reused if they are also those of the keys."""
    terms, normalize, score = problem.terms, problem.normalize, None
    if problem.query is not None and problem.key is not None:
        query = problem.query[part.targets].index_select(0, part.lists.target)
        same = problem.key is problem.value and terms.key_psi is terms.psi
        keys = values if same else _summed(problem.key, terms.key_psi, part)
        if terms.positional_key is not None:
            keys = keys + terms.positional_key.index_select(0, part.row)
        score = (query * keys).sum(-1)
    if terms.displacement_bias is not None:
        bias = terms.displacement_bias[:, :, 0].index_select(0, part.row)
        score = bias if score is None else score + bias
    heads = problem.value.shape[2]
    if score is None:
        score = values.new_full((), float(normalize != "softmax")).expand(len(part.source), 1, heads)
    else:
        score = score.expand(-1, -1, heads)
    if normalize == "softmax":
        return part.lists.softmax(score)
    if normalize == "none":
        return score
    count = part.lists.degree.index_select(0, part.lists.target).to(score.dtype)[:, None, None]
    return (score.exp() if normalize == "exp-mean" else score) / count


def _summed(signal: Tensor, psi: Tensor | None, part: _Portion) -> Tensor:
    """Sum psi times the signal over key frames, ``[edges, out | 1, heads, dim]``."""
    if psi is not None and (psi.shape[2] > 1 or psi.ndim == 6):
        return contract(psi, signal, part.source, part.row, repeats=part.repeats)
    seen = signal.sum(dim=1).index_select(0, part.source)[:, None]
    return seen if psi is None else seen * psi[:, :, 0].index_select(0, part.row)
