"""Attention over whole clouds with a score for every pair of elements: rectangles and matrix products.

Clouds are filled up to the size of the largest one, and what is filled up is masked. The scores of pairs are as large
as what is given; everything is differentiable as often as one likes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lieattn.geometry import Neighbors, Padding
from lieattn.ops._precision import common_dtype, without_autocast
from lieattn.ops._terms import Normalization


def attend(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    neighbors: Neighbors,
    padding: Padding,
    bias: Tensor,
    index: Tensor | None,
    normalize: Normalization,
) -> Tensor:
    """Evaluate :func:`lieattn.ops.group_attention` with the joint pattern, the query scaled.

    Parameters
    ----------
    query, key, value
        ``[points, fiber, heads, dim]``.
    neighbors
        Lists in which every point attends to all of its cloud.
    padding
        Layout of the clouds; every cloud has a point.
    bias
        ``[types, fiber, fiber, heads]``; an axis of size 1 stands for all its values.
    index
        Type of each edge, if they are not numbered by it.
    normalize
        See :func:`lieattn.ops.group_attention`.
    """
    dtype = common_dtype(query, key, value, bias)
    with without_autocast(value.device):
        query, key = (None if signal is None else signal.to(dtype) for signal in (query, key))
        out = _attend(query, key, value.to(dtype), neighbors, padding, bias.to(dtype), index, normalize)
    return out.to(value.dtype) if value.dtype.itemsize < 4 else out


def _attend(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    neighbors: Neighbors,
    padding: Padding,
    bias: Tensor,
    index: Tensor | None,
    normalize: Normalization,
) -> Tensor:
    fiber, heads = value.shape[1:3]
    score = _squares(bias if index is None else bias.index_select(0, index), neighbors, padding, fiber, heads)
    mask = None if padding.mask is None else padding.mask.repeat_interleave(fiber, dim=1)
    rows = _to_rows(value, padding)
    if query is not None and key is not None:
        score = torch.baddbmm(score, _to_rows(query, padding), _to_rows(key, padding).mT)
    score = score.unflatten(0, (-1, heads))
    if normalize == "softmax":
        if mask is not None:
            score = score.masked_fill(~mask[:, None, None], float("-inf"))
        weight = score.softmax(dim=-1)
    else:
        weight = score.exp() if normalize == "exp-mean" else score
        if mask is not None:
            weight = weight * mask[:, None, None]
        if normalize != "none":
            count = score.shape[-1] if mask is None else mask.sum(dim=1)[:, None, None, None]
            weight = weight / count
    out = (weight.flatten(0, 1) @ rows).unflatten(0, (-1, heads))
    places = out.transpose(1, 2).unflatten(1, (-1, fiber))
    return padding.unpad(places)


def _squares(bias: Tensor, neighbors: Neighbors, padding: Padding, fiber: int, heads: int) -> Tensor:
    """Scores of edges as ``[clouds * heads, places * fiber, places * fiber]``, zero where no edge is."""
    clouds, places = padding.shape
    bias = bias.expand(-1, fiber, fiber, heads)
    if padding.place is None:
        # Edges are sorted by target, then source, so they are the squares already.
        square = bias.unflatten(0, (clouds, places, places))
    else:
        target, source = padding.place[neighbors.target], padding.place[neighbors.source]
        flat = bias.new_zeros(clouds * places * places, *bias.shape[1:])
        square = flat.index_copy(0, target * places + source % places, bias).unflatten(0, (clouds, places, places))
    return square.permute(0, 5, 1, 3, 2, 4).reshape(-1, places * fiber, places * fiber)


def _to_rows(signal: Tensor, padding: Padding) -> Tensor:
    """``[points, fiber, heads, dim]`` to ``[clouds * heads, places * fiber, dim]``."""
    return padding.pad(signal).flatten(1, 2).transpose(1, 2).flatten(0, 1)
