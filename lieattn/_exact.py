"""Constants of modules that keep their precision where the module is cast."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn


class ExactConstants(nn.Module):
    """A module with float64 buffers that keep their dtype when the module is cast, and move to its device.

    Otherwise ``module.float().double()`` would leave them rounded to float32.
    """

    def register_constant(self, name: str, value: Tensor) -> None:
        """Add a buffer that is not part of the state dict."""
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
