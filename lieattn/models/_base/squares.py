"""Symmetry of networks whose neighborhoods are squares of pixels."""

from __future__ import annotations

from dataclasses import replace

from lieattn._core.checks import permute_axes
from lieattn.geometry import Neighborhood, PixelSquare
from lieattn.groups import FiniteGroup, Group, Translations
from lieattn.models._base.network import Symmetry


def of_squares(promised: Symmetry, neighborhood: Neighborhood | None, window: float | None = None) -> Symmetry:
    """Return the part of a symmetry that holds with neighborhoods, which squares of pixels restrict.

    Only elements that permute and reverse the axes map such a square to itself. If neighbors have no influence beyond
    the distance ``window``, squares that contain all points within it do not restrict the symmetry.
    """
    if not isinstance(neighborhood, PixelSquare) or neighborhood.size == 1:
        return promised
    if window is not None and neighborhood.dilation == 1 and window <= neighborhood.length:
        return promised
    kept = None if promised.group is None else _of_axes(promised.group)
    broken = promised.group if promised.on_average is None else promised.on_average
    if broken is None or broken == kept:
        return promised
    if isinstance(kept, FiniteGroup):
        note = (
            f"{kept.name} are its quarter turns and reflections, which keep the squares; use a Radius for {broken.name}"
        )
    else:
        note = f"pixel squares are symmetric to quarter turns and reflections only, not to {broken.name}; use a Radius"
    return replace(promised, group=kept, on_average=None, notes=(*promised.notes, note))


def _of_axes(group: Group) -> Group | None:
    """Return the elements of a group that keep the squares; of Lie groups, only the translations are returned."""
    if not isinstance(group, FiniteGroup):
        return Translations(group.dim) if group.is_affine else None
    whole = permute_axes(group.elements)
    return group if bool(whole.all()) else FiniteGroup(f"{group.name} on pixels", group.elements[whole])
