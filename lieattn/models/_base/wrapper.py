"""Base class of modules around a network."""

from __future__ import annotations

from typing import Any

from lieattn.models._base.jumps import jumps_of, kinks_of
from lieattn.models._base.network import EquivariantModule, Symmetry


class Wrapper(EquivariantModule):
    """Base class of modules around another one, ``wrapped``, that adopt what it states about inputs and outputs.

    The other one can be any network. Its attributes are those that :func:`lieattn.certify.certify` reads.
    """

    def __init__(self, wrapped: object) -> None:
        super().__init__()
        self._symmetry = Symmetry.stated_by(wrapped)
        self._inside = (wrapped,)  # a tuple, so that torch does not register the module under a second name
        for name in ("vector_inputs", "cloud_inputs", "sees_order"):
            setattr(self, name, getattr(wrapped, name, getattr(self, name)))
        self.has_kinks = kinks_of(wrapped)

    @property
    def wrapped(self) -> Any:
        """The other module."""
        return self._inside[0]

    @property
    def symmetry(self) -> Symmetry:
        return self._symmetry

    @property
    def guarantee(self) -> str:  # type: ignore[override]
        """The sentence of the network, or else its symmetry as a sentence."""
        return guarantee_of(self.wrapped) if self.symmetry is self._symmetry else super().guarantee

    @property
    def jumps(self) -> tuple[str, ...] | None:
        return jumps_of(self.wrapped)

    @property
    def kind(self) -> Any:
        """Kind of the outputs of the network."""
        return getattr(self.wrapped, "kind", "invariant")


def guarantee_of(network: object) -> str:
    """Return the sentence in which a network states its guarantee, or else its symmetry as a sentence."""
    stated = getattr(network, "guarantee", None)
    return stated if isinstance(stated, str) else str(Symmetry.stated_by(network))
