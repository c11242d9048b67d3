"""The operator of the library: sparse attention on R^d ⋊ H.

Every layer of the four papers computes

    out(g) = Σ_{g' in N(g)} w(g, g') · V(g⁻¹ g') f(g'),    w = normalize over N(g) of score(f(g), f(g'), g⁻¹ g')

for elements g = (x_i, h_a) over the points x_i. ``_reference.py`` implements this formula literally. This file checks
the operands and passes them to the evaluator chosen by ``_backend.py``: plain torch (``_plain.py``, ``_pooled.py``),
matrix products over whole clouds (``_dense.py``), or a fused kernel in ``kernels/``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from numbers import Real

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_flag, kind, may_read_values
from lieattn._core.contexts import SeenWeights, is_watched, show, without_autocast
from lieattn.geometry import Neighbors
from lieattn.ops import _dense as dense
from lieattn.ops import _plain as plain
from lieattn.ops import _pooled as pooled
from lieattn.ops._backend import choose
from lieattn.ops._terms import Normalization, Pattern, Problem, RelativeTerms, check_operands, opposite, turn_pairs
from lieattn.ops.kernels._calls import check_all_lists
from lieattn.ops.kernels._threads import adapt_waiting
from lieattn.ops.kernels.attention import _operator as kernel


def group_attention(
    query: Float[Tensor, "points _ heads width"] | None,
    key: Float[Tensor, "points fiber heads width"] | None,
    value: Float[Tensor, "points fiber heads channels"],
    neighbors: Neighbors,
    *,
    pattern: Pattern = "joint",
    normalize: Normalization = "softmax",
    terms: RelativeTerms | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
) -> tuple[Float[Tensor, "points frames heads channels"], Float[Tensor, " ..."] | None]:
    r"""Attend from every element over a point to the elements over its neighbors.

    If s is the ``scale``, i a query point and j one of its neighbors, the score is

    .. math::
        s \langle q(i, g), k(j, m) + \rho_{h}(x_j - x_i) + \rho(g, m) \rangle + b_{h m}(x_j - x_i) + b(g, m)

    and the value is :math:`\psi(u) v(j, m) + \beta(u)`. The pattern relates the frames g of queries, m of keys and h of
    outputs:

    * ``"joint"``: keys run over all (j, m), and the output frame is the query frame, h = g.
    * ``"framewise"``: every frame attends only to itself, h = g = m.
    * ``"query_sum"``: out(h) = Σ_g (attention from query frame g), each normalized over (j, m), with the
      displacement seen from the output frame h (GSA-Nets, Eq. 16). If the fibers of queries and keys have size 1,
      this is lifting, and the terms provide the output fiber.
    * ``"pooled"``: one weight for a query (i, h) and a neighbor j, whose frames m are summed first; see below.

    With the softmax, the sum over the key fiber is computed first, for every edge and query frame, and the terms of
    the displacement are added afterwards. If c is the part of the score without displacement, p the part with it,
    L = logsumexp_m c and U = Σ_m softmax_m(c) v, then

    .. math::  out(h) = \sum_g \sum_j \operatorname{softmax}_j(p_h + L_g) U_g

    holds exactly, so the query sum costs |H|² per edge instead of |H|³.

    With ``"pooled"`` (Affine Self Convolution, Eqs. 17-20), keys and values are affine functions of a neighbor's
    whole fiber, to which the tables are added once,

    .. math::
        K(i, h; j) = \sum_m \psi^K_{h m}(x_j - x_i) k(j, m) + \rho_h(x_j - x_i), \qquad
        V(i, h; j) = \sum_m \psi_{h m}(x_j - x_i) v(j, m) + \beta_h(x_j - x_i)

    .. math::
        out(i, h) = \sum_j \operatorname{softmax}_j \big( s \langle q(i, h), K(i, h; j) \rangle +
        b_h(x_j - x_i) \big) V(i, h; j)

    where products of vectors are entrywise, and ψ can also be matrices. If the query has one frame, it is used for
    every h. ``"joint"`` and ``"framewise"`` also support :math:`\psi^K`.

    **Equivariance.** If the terms are functions of the relative element u, and the group is affine, then moving the
    points by (t, h) and translating query, key and value by h translates the output by h.

    Parameters
    ----------
    query, key
        ``[points, fiber, heads, dim]``, or both None if ``terms`` alone define the scores.
    value
        ``[points, fiber, heads, value_dim]``.
    neighbors
        Neighbor lists. The output at a point without neighbors is zero.
    pattern
        Relation of the frames of queries, keys and outputs, see above.
    normalize
        ``"softmax"`` over all keys; ``"mean"`` divides scores by the number of keys, or of neighbors for ``"pooled"``;
        ``"exp-mean"`` divides exp(score) by this number; ``"none"`` uses the scores as weights, or 1 if there are no
        scores (convolution).
    terms
        Terms of the relative element.
    scale
        Factor s of the products with the query, by default 1/sqrt(dim).
    dropout
        Probability of dropping a weight, in [0, 1). The other weights are divided by 1 - dropout. With the query sum, a
        key point is dropped with its whole fiber.
    return_weights
        Whether to return the weights as well.

    Returns
    -------
    out
        ``[points, out, heads, value_dim]``. Operands can have different floating dtypes: sums are computed in the
        widest one, but at least in float32. The output has this dtype, or that of ``value`` if it is half precision.
    weights
        None, or (before dropout) ``[edges, fiber, fiber, heads]`` for ``"joint"``, ``[edges, fiber, heads]`` for
        ``"framewise"``, ``[edges, out, heads]`` for ``"pooled"``, ``[edges, out, query, key, heads]`` for
        ``"query_sum"``.
    """
    terms = RelativeTerms() if terms is None else terms
    problem = Problem(query, key, value, neighbors, terms, pattern, normalize, dropout)
    check_operands(problem)
    check_flag(return_weights=return_weights)
    phases, turns_back = terms.rotary, terms.rotary_values
    if phases is not None:
        query, key = (None if signal is None else turn_pairs(signal, phases) for signal in (query, key))
        value = turn_pairs(value, phases) if turns_back else value
        problem = replace(problem, query=query, key=key, value=value)
    problem = replace(problem, query=_scaled(query, scale))
    # Without normalization it is a convolution, whose weights are not shown.
    watched = normalize != "none" and is_watched()
    name, weights = choose(problem, return_weights=return_weights or watched).backend, None
    if value.device.type == "cpu" and not torch.compiler.is_compiling():
        adapt_waiting()
    if name == "dense":
        out = dense.attend(problem)
    elif name in ("plain", "scatter"):
        if may_read_values(value):
            check_all_lists(problem)
        evaluate = pooled.attend if pattern == "pooled" else plain.attend
        drop = partial(F.dropout, p=dropout) if dropout > 0 else None
        with without_autocast(value.device):
            out, weights = evaluate(
                problem.to(problem.common_dtype), drop, return_weights or watched, name == "scatter"
            )
    else:
        out = kernel.attend(problem)
    if value.dtype.itemsize < 4:
        out = out.to(value.dtype)
    keys = value.shape[1]
    frames = keys if pattern in ("joint", "framewise") else out.shape[1]
    if out.shape[1] != frames:  # frames that no operand distinguishes are evaluated once
        out = out.expand(-1, frames, -1, -1)
    if phases is not None and turns_back:
        out = turn_pairs(out, opposite(phases))
    if weights is not None:
        sizes = {"joint": (frames, keys), "query_sum": (frames, -1, keys)}.get(pattern, (frames,))
        weights = weights.expand(-1, *sizes, -1)
        show(SeenWeights(weights, neighbors, pattern, keys))
    return out, weights if return_weights else None


def _scaled(query: Tensor | None, scale: float | None) -> Tensor | None:
    if scale is not None and not isinstance(scale, Real):
        raise TypeError(f"scale: expected a number, got {kind(scale)}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    if query is None:
        return None
    return query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
