"""The pair-of-frames table that the authors of GSA-Nets published, for importing weights trained with it."""

from __future__ import annotations

import torch
from torch import Tensor

from lieattn.groups import FiniteGroup, cyclic, dihedral


def published_table(group: FiniteGroup) -> Tensor:
    """Rows of the frame encoding in the authors' code, for ``(output, query, key)`` frames.

    Eq. 16 and the code act on the relative frame with the output frame once more, although it is invariant
    already; the layer that results is not equivariant. The code's index of a frame is that of its inverse
    here (it encodes A_h (x_j - x_i) at h), and so is its row of the encoding.

    Parameters
    ----------
    group
        C_n as made by :func:`lieattn.groups.cyclic`, or any group with the tables of C_n or D_n.

    Returns
    -------
    Tensor
        ``[order, order, order]`` int64.

    Raises
    ------
    ValueError
        For other groups, of which the code knows nothing.
    """
    order = group.order
    k = torch.arange(order)
    h, g, m = k[:, None, None], k[None, :, None], k[None, None, :]
    if torch.equal(group.cayley, cyclic(order).cayley):
        theirs = (h + m - g) % order
    elif order % 2 == 0 and torch.equal(group.cayley, dihedral(order // 2).cayley):
        # The shift runs along the query axis there, forward or backward as the mirrored parts agree or not.
        n = order // 2
        mirrored = (g // n + h // n) % 2
        turned = torch.where(mirrored == 0, g % n + h % n, g % n - h % n) % n
        theirs = group.cayley[m.expand(order, order, order), group.inverse_index[mirrored * n + turned]]
    else:
        raise ValueError(f"group: the published table is for C_n and D_n only, got {group.name}")
    inverse = group.inverse_index
    return inverse[theirs[inverse][:, inverse][:, :, inverse]]
