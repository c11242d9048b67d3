"""Kinds: how inputs or outputs transform."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lieattn.reps import Pseudovector, Representation

Kind = str | Representation | tuple[Any, ...]
"""``"invariant"``, ``"position"``, ``"vector"``, ``"pseudovector"``, ``"pseudoscalar"``, ``"tensor"`` (matrices
R T Rᵀ), ``"rotation"`` (det(R) R T), a :class:`lieattn.reps.Representation`, or a tuple of kinds whose components
are concatenated in the last axis."""

_KINDS = ("invariant", "position", "vector", "pseudovector", "pseudoscalar", "tensor", "rotation")


def check_kind(argument: str, kind: object) -> None:
    """Raise TypeError or ValueError, naming the argument, unless a value is a :data:`Kind`."""
    expected = f"expected one of {_KINDS}, a Representation or a tuple of those"
    if isinstance(kind, tuple):
        if not kind:
            raise ValueError(f"{argument}: expected kinds in the tuple, got none")
        for part in kind:
            check_kind(argument, part)
        if "tensor" in kind or "rotation" in kind:
            raise ValueError(f"{argument}: a tensor has two axes and cannot be combined with other kinds in a tuple")
    elif isinstance(kind, str) and kind not in _KINDS:
        raise ValueError(f"{argument}: {expected}, got {kind!r}")
    elif not isinstance(kind, str | Representation):
        raise TypeError(f"{argument}: {expected}, got {kind!r}")


def transform(
    argument: str,
    kind: Kind,
    values: Float[Tensor, "*rest components"],
    linear: Float[Tensor, "d d"],
    shift: Float[Tensor, "rows d"],
) -> Float[Tensor, "*rest components"]:
    """Transform values ``[rows, *, components]`` float64 by the motion x ↦ A x + t, with one t ``[d]`` for each row."""
    if kind == "invariant":
        return values
    if kind == "pseudoscalar":
        return values * torch.linalg.det(linear).sign()
    if kind in ("tensor", "rotation"):
        if values.ndim < 3 or values.shape[-2:] != linear.shape:
            size = f"{len(linear)}, {len(linear)}"
            raise ValueError(f"{argument}: expected tensors [rows, *, {size}], got {tuple(values.shape)}")
        return linear @ values @ linear.mT if kind == "tensor" else torch.linalg.det(linear).sign() * linear @ values
    components = _components(kind, len(linear))
    if values.ndim < 2 or values.shape[-1] != components:
        raise ValueError(
            f"{argument}: expected {components} components in the last axis for kind {kind}, got {tuple(values.shape)}"
        )
    if isinstance(kind, tuple):
        parts = values.split([_components(part, len(linear)) for part in kind], dim=-1)
        moved = [transform(argument, one, part, linear, shift) for one, part in zip(kind, parts, strict=True)]
        return torch.cat(moved, dim=-1)
    rep = Pseudovector() if kind == "pseudovector" else kind
    if isinstance(rep, Representation):
        return rep.act(linear, values)
    turned = values @ linear.mT
    return turned + shift.view(len(shift), *[1] * (values.ndim - 2), -1) if kind == "position" else turned


def _components(kind: Kind, dim: int) -> int:
    """Return the number of components in the last axis. In a tuple, each invariant has one component."""
    if isinstance(kind, Representation):
        return kind.dim
    if isinstance(kind, tuple):
        return sum(_components(part, dim) for part in kind)
    return 1 if kind in ("invariant", "pseudoscalar") else dim
