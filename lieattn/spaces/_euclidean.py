"""R^d under the translations and whatever else keeps them: SE(d), E(d), Sim(d), and semidirect products of yours."""

from __future__ import annotations

from torch import Tensor

from lieattn.groups import FiniteGroup, Group, SemidirectProduct, Translations, check_group
from lieattn.spaces._space import HomogeneousSpace


class Euclidean(HomogeneousSpace):
    """R^d under R^d ⋊ H: the origin is 0, its stabilizer H, the section translates.

    Parameters
    ----------
    group
        ``SE(d)``, ``E(d)``, ``Sim(d)``, ``Translations(d)`` or another ``SemidirectProduct``; a finite group H is short
        for ``SemidirectProduct(H)``.

    Raises
    ------
    TypeError
        If it is another group.
    """

    def __init__(self, group: Group) -> None:
        check_group("group", group, Group)
        if isinstance(group, FiniteGroup):
            group = SemidirectProduct(group)
        if not isinstance(group, SemidirectProduct | Translations):
            raise TypeError(
                f"group: expected Translations or a SemidirectProduct such as SE(3), got {group!r}; "
                "a group that fixes 0 has Orbits"
            )
        stabilizer = group.stabilizer if isinstance(group, SemidirectProduct) else None
        super().__init__(f"R^{group.dim} under {group.name}", group, group.dim, stabilizer)

    def section(self, x: Tensor) -> Tensor:
        """Translations by x, ``[*, d + 1, d + 1]``; smooth."""
        return Translations(self.dim).element(x)
