"""Tables and constants of modules, which keep their values and their precision when the module is moved or cast."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from lieattn._checks import check_is, check_tensor


class KeptTables(nn.Module):
    """A module whose buffers outside of the state dict, such as tables of groups, never lose their values.

    Weights that go to the meta device, or that ``to_empty`` allocates, get their values from a state dict. Tables get
    back the values that they had.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = _tables(self)
        super()._apply(fn, recurse)
        for name, moved in _tables(self).items():
            table = before[name]
            if moved is table:
                continue
            if moved.is_meta and not table.is_meta:
                vars(self).setdefault("_kept", {})[name] = table
            table = vars(self).get("_kept", {}).get(name, table) if table.is_meta else table
            if not (moved.is_meta or table.is_meta):
                self._buffers[name] = table.to(moved.device, self._dtype_of(name, moved))
        return self

    def _load_from_state_dict(  # type: ignore[no-untyped-def]
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if local_metadata.get("assign_to_params_buffers"):  # the weights take the place of those on the meta device
            weight = next((value for value in state_dict.values() if isinstance(value, Tensor)), None)
            for name, table in vars(self).get("_kept", {}).items():
                current = self._buffers[name]
                if current is not None and current.is_meta:
                    dtype = self._dtype_of(name, current)
                    self._buffers[name] = table.to(table.device if weight is None else weight.device, dtype)

    def _dtype_of(self, name: str, moved: Tensor) -> Any:
        return moved.dtype


class ExactConstants(KeptTables):
    """A module with float64 buffers that move with the module between devices, but keep their dtype when it is cast.

    Otherwise, ``module.float().double()`` would round them to float32.
    """

    def register_constant(self, name: str, value: Tensor) -> None:
        """Register a float64 buffer that is not part of the state dict."""
        check_is("name", name, str)
        check_tensor("value", value, "a floating tensor")
        self.register_buffer(name, value.double(), persistent=False)
        vars(self).setdefault("_constants", set()).add(name)

    def _dtype_of(self, name: str, moved: Tensor) -> Any:
        return torch.float64 if name in vars(self).get("_constants", ()) else moved.dtype


def _tables(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module, without those of its parts, that are not in its state dict."""
    found = {name: module._buffers[name] for name in sorted(module._non_persistent_buffers_set)}
    return {name: table for name, table in found.items() if table is not None}
