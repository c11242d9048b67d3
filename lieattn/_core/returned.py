"""Calls of methods that may be the user's.

An error names the method that returns a wrong value. Otherwise a wrong shape would broadcast to wrong numbers, or fail
elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lieattn._core.checks import check_is, kind
from lieattn._core.contexts import in_autocast, without_autocast


def returned(group: Any, method: str, *given: Tensor) -> Tensor:
    """Return what a method of a group computes from tensors, in their dtype, also under autocast.

    TypeError or ValueError is raised unless it is a tensor of the shape and dtype that :class:`lieattn.groups.Group`
    documents. Compiled code is not checked.
    """
    call = getattr(group, method)
    if in_autocast(given[0].device):
        with without_autocast(given[0].device):
            found = call(*given)
    else:
        found = call(*given)
    if not torch.compiler.is_compiling():
        axes, what, sizes = _documented(group, method)
        leading = torch.broadcast_shapes(*(tensor.shape[:-axes] for tensor in given))
        check_returned(f"{method} of {group.name}", found, what, (*leading, *sizes), given[0])
    return cast(Tensor, found)


def check_returned(method: str, found: object, what: str, shape: Sequence[int], like: Tensor) -> None:
    """Raise an error that names a method unless it returned a tensor of this shape, in the dtype of its argument."""
    check_is(method, found, Tensor)
    found = cast(Tensor, found)
    if found.shape != tuple(shape):
        raise ValueError(f"{method}: expected {what} {tuple(shape)}, got {tuple(found.shape)}")
    if found.dtype != like.dtype or found.device != like.device:
        expected = f"{what} in {like.dtype} on {like.device} as its argument"
        raise ValueError(f"{method}: expected {expected}, got {found.dtype} on {found.device}")


def checked_faults(of: Any, x: Tensor, axes: int) -> dict[str, Tensor]:
    """Return the faults that a group or space finds in elements or points with this number of axes each.

    TypeError or ValueError is raised unless they are a dictionary of masks ``[*]``.
    """
    method, shape = f"faults of {of.name}", tuple(x.shape[:-axes])
    faults = of.faults(x)
    check_is(method, faults, dict)
    for fault, where in faults.items():
        if not isinstance(where, Tensor) or where.dtype != torch.bool or where.shape != shape:
            found = f"{kind(where)} {tuple(where.shape)}" if isinstance(where, Tensor) else kind(where)
            raise TypeError(f"{method}: expected a boolean tensor {shape} for {fault!r}, got {found}")
    return cast(dict[str, Tensor], faults)


def _documented(group: Any, method: str) -> tuple[int, str, tuple[int, ...]]:
    """Return the axes of one argument, and what a method returns for it, with its sizes."""
    if method in ("hat", "exp"):
        return 1, "matrices", (group.size, group.size)
    if method in ("exp_integral", "inverse_exp_integral"):
        return 1, "matrices", (group.dim, group.dim)
    if method in ("vee", "log"):
        return 2, "coordinates", (group.algebra_dim,)
    if method == "coordinates":
        return 2, "coordinates", (group.num_coordinates,)
    if method == "distance":
        return 2, "distances", ()
    return 2, "elements", (group.size, group.size)
