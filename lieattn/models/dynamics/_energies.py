"""Networks that are differentiated as energies: what they state about their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import kind
from lieattn.models._base.network import EquivariantModule
from lieattn.models._base.rescaled import Rescaled
from lieattn.models._base.tied_options import pool_of
from lieattn.models._base.wrapper import Wrapper
from lieattn.nn import Heads

_ONE = "one energy per cloud, [clouds] or [clouds, 1]"


def energy_among(outputs: Any, argument: str = "model") -> Any:
    """Return the output named energy of several outputs by name, or a single output; ValueError if there is none."""
    if not isinstance(outputs, Mapping):
        return outputs
    if "energy" not in outputs or not outputs.keys().isdisjoint(("force", "stress", "virial")):
        what = "an output 'energy', and none with the names of its derivatives, force, stress and virial"
        raise ValueError(f"{argument}: expected {what}, got {sorted(outputs)}")
    return outputs["energy"]


def check_energies(argument: str, model: Any) -> None:
    """Raise ValueError if a model states other outputs than one energy per cloud; otherwise the first call does."""
    energy_among(getattr(model, "kind", None), argument)
    if Rescaled.turning(model, ("energy",)):
        raise ValueError(f"{argument}: expected {_ONE}, got outputs that change under rotations")
    while isinstance(model, Wrapper):
        model = model.wrapped
    if not isinstance(model, EquivariantModule):  # what follows the head of another network is not known
        return
    head = getattr(model, "head", None)
    head = head.heads["energy"] if isinstance(head, Heads) else head
    found = (getattr(head, name, None) for name in ("outputs", "out_channels", "out_features"))
    count = next((number for number in found if isinstance(number, int)), 1)
    if count != 1:
        raise ValueError(f"{argument}: expected {_ONE}, got a network with {count} outputs")
    if pool_of(head) == "none":
        raise ValueError(f"{argument}: expected {_ONE}, got a network with outputs at the points, pool='none'")


def per_cloud(values: Any, clouds: int | None = None, argument: str = "model") -> Float[Tensor, " clouds"]:
    """Return one energy for each cloud, ``[clouds]``; TypeError or ValueError is raised for other values."""
    if not isinstance(values, Tensor):
        raise TypeError(f"{argument}: expected {_ONE}, got {kind(values)}")
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.ndim != 1:
        raise ValueError(f"{argument}: expected {_ONE}, got {tuple(values.shape)}")
    if clouds is not None and len(values) != clouds:
        raise ValueError(f"{argument}: expected one energy for each of {clouds} clouds, got {len(values)}")
    return values
