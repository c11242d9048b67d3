"""How inputs and outputs transform: kinds by name, representations, and several of them side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lieattn.reps import Pseudovector, Representation

Kind = str | Representation | tuple[Any, ...]
"""``"invariant"``, ``"position"``, ``"vector"``, ``"pseudovector"``, ``"pseudoscalar"``, ``"tensor"`` (matrices), a
:class:`lieattn.reps.Representation`, or a tuple of kinds whose components follow each other in the last axis."""

NAMES = ("invariant", "position", "vector", "pseudovector", "pseudoscalar", "tensor")


def check_kind(argument: str, kind: object) -> None:
    """Raise TypeError or ValueError, naming the argument, for what is no kind."""
    if isinstance(kind, tuple):
        if not kind:
            raise ValueError(f"{argument}: expected kinds in the tuple, got none")
        for part in kind:
            check_kind(argument, part)
            if part == "tensor":
                raise ValueError(f"{argument}: a tensor has two axes and cannot stand beside others in a tuple")
    elif isinstance(kind, str):
        if kind not in NAMES:
            raise ValueError(f"{argument}: expected one of {NAMES}, a Representation or a tuple of those, got {kind!r}")
    elif not isinstance(kind, Representation):
        raise TypeError(f"{argument}: expected one of {NAMES}, a Representation or a tuple of those, got {kind!r}")


def transform(argument: str, kind: Kind, values: Tensor, linear: Tensor, shift: Tensor) -> Tensor:
    """Values of points or clouds that were moved by x ↦ A x + t.

    Parameters
    ----------
    argument
        What messages call the values.
    kind
        How they transform.
    values
        ``[rows, *, components]`` float64; of a ``"tensor"`` ``[rows, *, d, d]``.
    linear
        A ``[d, d]`` float64.
    shift
        t of each row, ``[rows, d]`` float64: only positions see it.

    Raises
    ------
    ValueError
        If the values do not have the components of their kind.
    """
    if kind == "invariant":
        return values
    if kind == "pseudoscalar":
        return values * torch.linalg.det(linear).sign()
    if kind == "tensor":
        if values.ndim < 3 or values.shape[-2:] != linear.shape:
            size = f"{len(linear)}, {len(linear)}"
            raise ValueError(f"{argument}: expected tensors [rows, *, {size}], got {tuple(values.shape)}")
        return linear @ values @ linear.mT
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
    """Entries of the last axis; of what is invariant one, in a tuple."""
    if isinstance(kind, Representation):
        return kind.dim
    if isinstance(kind, tuple):
        return sum(_components(part, dim) for part in kind)
    return 1 if kind in ("invariant", "pseudoscalar") else dim


def kinds_of_inputs(network: Any, given: Mapping[str, Kind] | None) -> dict[str, Kind]:
    """Kinds by attribute of the data: positions, periodic cells, the vectors that a network names, and what is given.

    Raises
    ------
    TypeError, ValueError
        If something given is no kind.
    """
    named: dict[str, Kind] = {name: "vector" for name in getattr(network, "vector_inputs", ())}
    for name, kind in (given or {}).items():
        check_kind(f"inputs[{name!r}]", kind)
    return {"pos": "position", "cell": "vector", **named, **(given or {})}


def kinds_of_outputs(
    network: Any, given: Kind | Mapping[str, Kind] | None, outputs: Mapping[str, Tensor]
) -> dict[str, Kind]:
    """Kind of every output, by name; invariant where neither the caller nor the network says more.

    Raises
    ------
    TypeError, ValueError
        If something is no kind, or names an output that there is not.
    """
    stated = getattr(network, "kind", "invariant") if given is None else given
    if not isinstance(stated, Mapping):
        check_kind("outputs", stated)
        return dict.fromkeys(outputs, stated)
    for name, kind in stated.items():
        check_kind(f"outputs[{name!r}]", kind)
        if name not in outputs:
            known = sorted(outputs) if outputs.keys() != {""} else "one tensor"
            raise ValueError(f"outputs: {name!r} is not among what the network gives, which is {known}")
    return {name: stated.get(name, "invariant") for name in outputs}
