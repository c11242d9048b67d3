"""Attention of every frame with itself over whole clouds, as rectangles."""

from __future__ import annotations

import math

from torch import Tensor

from lieattn.geometry import Padding
from lieattn.ops._dense import attend


def whole_cloud_attention(
    query: Tensor, key: Tensor, value: Tensor, padding: Padding, *, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Framewise softmax attention over all pairs of each cloud, through torch's scaled dot product attention.

    The same numbers as :func:`group_attention` with ``pattern="framewise"`` on ``AllPairs`` neighborhoods, without
    neighbor lists: for small clouds, and for encodings that are in the queries and keys already. Second derivatives
    go through plain maths.

    Parameters
    ----------
    query, key, value
        ``[points, fiber, heads, dim]``.
    padding
        Layout of the clouds, :func:`lieattn.geometry.padding`.
    dropout
        Probability of dropping a weight.
    scale
        Factor of the products; 1/sqrt(dim) if absent.

    Returns
    -------
    Tensor
        ``[points, fiber, heads, dim]``.
    """
    query = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    return attend(query, key, value, padding, joint=False, dropout=dropout)
