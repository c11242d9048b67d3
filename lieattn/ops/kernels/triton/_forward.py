"""Forward kernel of Triton: a program attends from one target point in one head."""

import triton
import triton.language as tl

from lieattn.ops.kernels.triton._edges import edge_weights, levels, message
from lieattn.ops.kernels.triton._tiles import base_tile, kind_of, norm_places, put_signal, query_tile


@triton.jit
def _measure(p, strides, lists, s, query, base, norm, point, head):  # type: ignore[no-untyped-def]
    """Logarithm of the sum of exponentials for each pair of output and query frame, [P, G], kept in ``norm``."""
    top = tl.full([s.P, s.G], -3.0e38, s.dtype)
    total = tl.zeros([s.P, s.G], s.dtype)
    for edge in range(tl.load(lists.row_ptr + point), tl.load(lists.row_ptr + point + 1)):
        source = tl.load(lists.source + edge)
        _, outer = edge_weights(p, strides, s, query, base, source, kind_of(lists, edge), head)
        level = tl.maximum(top, outer)
        total = total * tl.exp(top - level) + tl.exp(outer - level)
        top = level
    at, exists = norm_places(s, point, head)
    level = top + tl.log(tl.where(total > 0, total, 1.0))
    tl.store(norm + at, level, mask=exists)
    return tl.where(exists, level, float("inf"))


@triton.jit(do_not_specialize=["seed", "threshold"])
def forward(p, strides, lists, s, out, norm, seed, threshold):  # type: ignore[no-untyped-def]
    """Write ``out`` [points, outs, heads, width] and, for the softmax, ``norm``.

    One walk over the edges with a running maximum serves output frames that are query frames. A query sum walks the
    edges twice: with norms that are known it adds up over the query frames right away, where a running maximum would
    have to keep a row of values for each pair of output and query frame.
    """
    point = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    query = query_tile(p, s, point, head)
    base = base_tile(p, strides, s, point, head)
    online: tl.constexpr = s.softmax and s.tied_out
    top = tl.full([s.P, s.G], -3.0e38, s.dtype)
    total = tl.zeros([s.P, s.G], s.dtype)
    result = tl.zeros([s.O, s.W], s.dtype)
    if s.softmax and not s.tied_out:
        top = _measure(p, strides, lists, s, query, base, norm, point, head)
    if not s.softmax:
        top = levels(strides, s, lists, norm, point, head)
    for edge in range(tl.load(lists.row_ptr + point), tl.load(lists.row_ptr + point + 1)):
        source = tl.load(lists.source + edge)
        kind = kind_of(lists, edge)
        inner, outer = edge_weights(p, strides, s, query, base, source, kind, head)
        if online:
            level = tl.maximum(top, outer)
            shrink = tl.exp(top - level)
            total = total * shrink + tl.exp(outer - level)
            result = result * tl.sum(shrink, 0)[:, None]
            top = level
        result += message(p, strides, s, inner, tl.exp(outer - top), source, kind, edge, head, (seed, threshold))
    if online:
        # A point without edges gives zero.
        total = tl.where(total > 0, total, 1.0)
        at, exists = norm_places(s, point, head)
        tl.store(norm + at, top + tl.log(total), mask=exists)
        result = result / tl.sum(total, 0)[:, None]
    put_signal(out, result, point, head, s.outs, s.heads, s.width, s.O, s.W)
