"""The definition of the operator, written like its formula. Every evaluator is tested against it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_arguments
from lieattn.geometry import Neighbors
from lieattn.ops._terms import ROW_TABLES, Normalization, Pattern, Problem, RelativeTerms, check_operands

# Weights of all keys, [keys, heads], from their scores.
_NORMALIZE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda score: score.softmax(0),
    "mean": lambda score: score / len(score),
    "exp-mean": lambda score: score.exp() / len(score),
    "none": lambda score: score,
}


def reference_attention(
    query: Float[Tensor, "points _ heads width"] | None,
    key: Float[Tensor, "points fiber heads width"] | None,
    value: Float[Tensor, "points fiber heads channels"],
    neighbors: Neighbors,
    *,
    pattern: Pattern = "joint",
    normalize: Normalization = "softmax",
    terms: RelativeTerms | None = None,
    scale: float | None = None,
) -> Float[Tensor, "points frames heads channels"]:
    """Evaluate :func:`group_attention` literally, for reading and for tests.

    The evaluation is slow, and stores a score and a value for every edge and every output, query and key frame. The
    parameters, the output ``[points, out, heads, value_dim]`` and the errors are those of :func:`group_attention`.
    """
    check_arguments(reference_attention, locals())
    terms = RelativeTerms() if terms is None else terms
    check_operands(Problem(query, key, value, neighbors, terms, pattern, normalize))
    i, j, row = neighbors.target, neighbors.source, terms.row
    # Axes: [edges, output frame, query frame, key frame, heads, channels]; scores have no channels. Only the query sum
    # has separate query frames. In other patterns they are the output frames, and the query axis has size 1.
    alone = 1 if pattern == "query_sum" else 2

    def term(name: str, absent: float) -> Tensor | float:
        table: Tensor | None = getattr(terms, name)
        if table is None:
            return absent
        if name in ROW_TABLES:
            table = (table if row is None else table[row])[:, :, None]
            return table[:, :, :, None] if name == "positional_key" else table
        return table[None] if table.ndim == 5 else table[None].unsqueeze(alone)

    scored = query is not None or terms.displacement_bias is not None or terms.fiber_bias is not None
    if query is None or key is None:
        query = key = value.new_zeros(len(value), 1, value.shape[2], 1)
    q = query[i][:, :, None].unsqueeze(alone)
    k, v = (_times(term(name, 1), signal[j][:, None, None]) for name, signal in (("key_psi", key), ("psi", value)))
    if pattern == "pooled":
        k, v = k.sum(3, keepdim=True), v.sum(3, keepdim=True)
    k = k + term("positional_key", 0) + term("fiber_key", 0)
    v = v + term("beta", 0)
    score = (1 / sqrt(query.shape[-1]) if scale is None else scale) * (q * k).sum(-1)
    score = score + term("displacement_bias", 0) + term("fiber_bias", 0) + (0 if scored else 1)
    frames = value.shape[1] if pattern in ("joint", "framewise") else 1
    shape = torch.broadcast_shapes(score.shape, v.shape[:-1], (1, frames, 1, 1, 1))
    score, v = score.expand(shape), v.expand(*shape, -1)
    out = value.new_zeros(len(value), shape[1], *value.shape[2:])
    for point, h, g in product(range(len(out)), range(shape[1]), range(shape[2])):
        near = slice(int(neighbors.row_ptr[point]), int(neighbors.row_ptr[point + 1]))
        m = slice(h, h + 1) if pattern == "framewise" else slice(None)
        weight = _NORMALIZE[normalize](score[near, h, g, m].flatten(0, 1))
        out[point, h] += (weight[..., None] * v[near, h, g, m].flatten(0, 1)).sum(0)
    return out


def _times(psi: Tensor | float, signal: Tensor) -> Tensor:
    if isinstance(psi, Tensor) and psi.ndim > signal.ndim:  # a matrix of the channels of all heads
        return torch.einsum("...hdc,...c->...hd", psi, signal.flatten(-2))
    return psi * signal
