"""Tables of modules that keep their values when the module is cast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from lieattn._core.checks import check_default_device, check_is, check_tensor


class KeptTables(nn.Module):
    """A module whose buffers outside of the state dict, such as tables of groups, never lose their values.

    Weights that go to the meta device, or that ``to_empty`` allocates, get their values from a state dict. Tables get
    back the values that they had. RuntimeError is raised if torch's default device is not the CPU.
    """

    def __init__(self, *parts: Any) -> None:
        check_default_device()
        super().__init__(*parts)

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


class WideStatistics(nn.Module):
    """A module whose own buffers, such as shifts and scales, stay in float32 when it is cast to half precision.

    Those called ``references_*`` keep their dtype: sums of energies of atoms need float64.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, moved in self._buffers.items():
            if moved is not None and moved.is_floating_point():
                earlier = cast(Tensor, before[name])
                kept = earlier.dtype if name.startswith("references_") else torch.float32
                if moved.itemsize < kept.itemsize:
                    self._buffers[name] = earlier.to(moved.device, kept)
        return self


def first_dtype(module: nn.Module, weights: Mapping[str, Tensor], prefix: str = "") -> torch.dtype | None:
    """Return the dtype of a module's first floating weight that is no buffer; without one, of its first buffer.

    The names of its weights have the prefix. None is returned if no weight is floating.
    """
    buffers = {f"{prefix}{name}" for name, _ in module.named_buffers()}
    found = {
        name: value.dtype for name, value in weights.items() if name.startswith(prefix) and value.is_floating_point()
    }
    trained = (dtype for name, dtype in found.items() if name not in buffers)
    return next(trained, next(iter(found.values()), None))


def _tables(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module, without those of its parts, that are not in its state dict."""
    found = {name: module._buffers[name] for name in sorted(module._non_persistent_buffers_set)}
    return {name: table for name, table in found.items() if table is not None}
