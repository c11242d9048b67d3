"""Weights that belong to one group."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lieattn._core.kept_tables import KeptTables
from lieattn._core.values import plain_text

_UNCHECKED = ", or load dict(state_dict) to skip this check"


class TiedWeights(KeptTables):
    """A module whose state dicts contain, as metadata, the group and geometry that the weights belong to.

    If the module has another group or geometry, ``load_state_dict`` raises RuntimeError with the difference. To skip
    this check, pass ``dict(state_dict)``, which has no metadata.
    """

    def tied_to(self) -> dict[str, str]:
        """Return the properties that the weights depend on besides their shapes, as texts by name: the finite group."""
        return tied_to_group(getattr(self, "group", None))

    def decide(self, tied_to: Mapping[str, str]) -> None:
        """Take over from weights a choice that was left open at construction. This base class has none."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["geometry"] = _plain(self.tied_to())

    def _load_from_state_dict(  # type: ignore[no-untyped-def]
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        saved = _plain(local_metadata.get("geometry", {}))
        self.decide(saved)
        for name, own in _plain(self.tied_to()).items():
            fault = f"{name}: the weights are for {saved.get(name, own)}, the module has {own}"
            # The network has already reported this difference, so its layers do not repeat it.
            if saved.get(name, own) != own and not any(fault in message for message in error_msgs):
                advice = _UNCHECKED if self._fits(state_dict, prefix) else ""
                error_msgs.append(f"{prefix}{fault}; build the module with the {name} of the weights{advice}.")

    def _fits(self, weights: Mapping[str, Any], prefix: str) -> bool:
        """Return whether weights have all names and shapes of the module, so that they load without the check."""
        shapes = {name: getattr(value, "shape", None) for name, value in self.state_dict(prefix=prefix).items()}
        found = {name: getattr(value, "shape", None) for name, value in weights.items() if name.startswith(prefix)}
        return found == shapes


def _plain(tied_to: Mapping[str, str]) -> dict[str, str]:
    return {name: plain_text(text) for name, text in tied_to.items()}


def first_fault(error: Exception) -> str:
    """Return the first reason why ``load_state_dict`` refused weights, and the number of further ones.

    The advice to skip the check is left out, since the user who reads the reason has not called ``load_state_dict``.
    """
    first, *others = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
    return first.replace(_UNCHECKED, "") + (f" (and {len(others)} more)" if others else "")


def settle(module: nn.Module) -> None:
    """Fix all choices that a module and its parts have left open to their current values."""
    for part in module.modules():
        if isinstance(part, TiedWeights):
            part.decide(part.tied_to())


def tied_to_group(group: Any) -> dict[str, str]:
    """Return digests of the table and the matrices of a finite group; an empty dictionary for anything else."""
    if not hasattr(group, "cayley"):
        return {}
    table = zlib.crc32(group.cayley.numpy().tobytes())
    rounded = zlib.crc32((group.elements * 1e6).round().to(torch.int64).numpy().tobytes())
    return {
        "group": f"{group!r} with the table {table:08x}",
        "axes": f"matrices {rounded:08x} of {group.name}",
    }
