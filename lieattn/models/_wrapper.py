"""Base class of modules around a network, which state what the network states."""

from __future__ import annotations

from typing import Any

from lieattn.models._jumps import jumps_of
from lieattn.models._network import EquivariantModule, Symmetry


class Wrapper(EquivariantModule):
    """Base class of modules around another one, ``wrapped``, that adopt what it states about inputs and outputs."""

    def __init__(self, wrapped: object) -> None:
        super().__init__()
        self._symmetry = Symmetry(None, notes=("the network states no guarantee",))
        self._wrapped = (wrapped,)  # a tuple, so that torch does not register the module under a second name
        if isinstance(wrapped, EquivariantModule):
            self._symmetry = wrapped.symmetry
            self.vector_inputs, self.cloud_inputs = wrapped.vector_inputs, wrapped.cloud_inputs
            self.sees_order, self.has_kinks = wrapped.sees_order, wrapped.has_kinks

    @property
    def symmetry(self) -> Symmetry:
        return self._symmetry

    @property
    def jumps(self) -> tuple[str, ...]:
        return jumps_of(self._wrapped[0])

    @property
    def kind(self) -> Any:
        """Kind of the outputs of the network."""
        return getattr(self._wrapped[0], "kind", "invariant")
