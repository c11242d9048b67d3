"""Weights that belong to one group and one geometry, and do not load into a module with another."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class TiedWeights(nn.Module):
    """A module whose state dicts say, in their metadata, which group and geometry the weights belong to.

    ``load_state_dict`` raises RuntimeError, naming what differs, if the module has another one. To load weights all the
    same, pass ``dict(state_dict)``, which has no metadata.
    """

    def tied_to(self) -> dict[str, str]:
        """What the weights belong to besides their shapes, as texts by name: here the finite group."""
        return tied_to_group(getattr(self, "group", None))

    def _decide(self, tied_to: Mapping[str, str]) -> None:
        """Adopt from weights a choice that was left open when the module was made; here there is none."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["geometry"] = self.tied_to()

    def _load_from_state_dict(  # type: ignore[no-untyped-def]
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        saved = local_metadata.get("geometry", {})
        self._decide(saved)
        for name, own in self.tied_to().items():
            fault = f"{name}: the weights are for {saved.get(name, own)}, the module has {own}"
            # A network reports the difference first; its layers do not repeat it.
            if saved.get(name, own) != own and not any(fault in message for message in error_msgs):
                advice = f"build the module with the {name} of the weights, or load dict(state_dict) to skip this check"
                error_msgs.append(f"{prefix}{fault}; {advice}.")


def settle(module: nn.Module) -> None:
    """Fix the choices that were left open in a module and its parts to what they do now."""
    for part in module.modules():
        if isinstance(part, TiedWeights):
            part._decide(part.tied_to())


def tied_to_group(group: Any) -> dict[str, str]:
    """Digests of the table and of the matrices of a finite group; nothing for other groups, and where there is none."""
    if not hasattr(group, "cayley"):
        return {}
    table = zlib.crc32(group.cayley.numpy().tobytes())
    rounded = zlib.crc32((group.elements * 1e6).round().to(torch.int64).numpy().tobytes())
    return {
        "group": f"{group!r} with the table {table:08x}",
        "axes": f"matrices {rounded:08x} of {group.name}",
    }
