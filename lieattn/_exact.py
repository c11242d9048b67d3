"""Constants of modules that keep their precision when the module is cast."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from lieattn._checks import check_is, check_tensor


class ExactConstants(nn.Module):
    """A module with float64 buffers that move with the module between devices, but keep their dtype when it is cast.

    Otherwise, ``module.float().double()`` would round them to float32.
    """

    def register_constant(self, name: str, value: Tensor) -> None:
        """Register a float64 buffer that is not part of the state dict."""
        check_is("name", name, str)
        check_tensor("value", value, "a floating tensor")
        self.register_buffer(name, value.double(), persistent=False)
        vars(self).setdefault("_constants", set()).add(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        kept = {name: self._buffers[name] for name in vars(self).get("_constants", ())}
        super()._apply(fn, recurse)
        for name, exact in kept.items():
            moved = self._buffers[name]
            if exact is not None and moved is not None:
                self._buffers[name] = exact.to(moved.device)
        return self
