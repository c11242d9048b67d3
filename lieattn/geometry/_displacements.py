"""Displacements repeat: a 28 x 28 image with 5 x 5 neighborhoods has 19,000 edges and 25 of them."""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDING_STEPS = 16


def distinct_displacements(displacements: Tensor, extent: Tensor) -> tuple[Tensor, Tensor | None]:
    """Find the distinct rows, up to the rounding of the coordinates they were computed from.

    Two displacements count as the same if they fall into one bin of at most 16 rounding steps of the largest
    coordinate of their cloud, so a turned grid is recognized too, and what is shared differs by rounding alone.
    Bins are powers of two wide and shared by clouds of the same width only: how finely a cloud is resolved does
    not depend on the clouds beside it.

    Parameters
    ----------
    displacements
        ``[edges, dim]`` floating.
    extent
        ``[edges]`` largest absolute coordinate of the cloud of each edge.

    Returns
    -------
    rows
        ``[types]`` int64, an edge for each distinct displacement.
    index
        ``[edges]`` int64, the type of each edge; None if fewer than half of the edges repeat: then rows is
        all edges.
    """
    edges = len(displacements)
    everything = torch.arange(edges, device=displacements.device)
    _, exponent = torch.frexp(_ROUNDING_STEPS / 2 * torch.finfo(displacements.dtype).eps * extent.double())
    # Half a step off, since grids like to sit on multiples of it.
    bins = torch.floor(torch.ldexp(displacements.detach().double(), -exponent[:, None]) + 0.5).to(torch.int64)
    key = torch.zeros_like(everything)
    types = 1
    for axis in (exponent, *bins.unbind(dim=1)):
        values, axis_key = torch.unique(axis, return_inverse=True)
        # Both factors are at most the number of edges, so the product fits int64.
        key = key * len(values) + axis_key
        distinct, key = torch.unique(key, return_inverse=True)
        types = len(distinct)
        if 2 * types > edges:
            return everything, None
    first = torch.full((types,), edges, dtype=torch.int64, device=key.device)
    first.scatter_reduce_(0, key, everything, reduce="amin")
    return first, key
