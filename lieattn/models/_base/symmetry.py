"""Symmetries that networks state."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from lieattn._core.checks import check_arguments, permute_axes
from lieattn.geometry import (
    FiniteFrames,
    GivenFrames,
    Neighborhood,
    PixelSquare,
    PrincipalFrames,
    SampledFrames,
    ScaleFrames,
)
from lieattn.groups import SE, SO, FiniteGroup, Group, O, Translations, linear_part
from lieattn.spaces import Euclidean, HomogeneousSpace


@dataclass(frozen=True)
class Symmetry:
    """Symmetry of a network: the motions of the input under which its outputs are invariant or equivariant.

    Attributes
    ----------
    group, translations
        Group of motions for which the symmetry is exact up to rounding, or None; a finite group is combined with all
        translations if ``translations``.
    acting
        Object that the group acts on, in words.
    on_average
        Group for which the symmetry holds only on average over random frames.
    moving_axes
        Whether the frames are principal axes. Points on a line do not determine these, so the symmetry does not hold
        for tensor outputs of such clouds, nor for any outputs if tensors are inputs.
    origin
        Whether positions relative to the origin are inputs, so that the group acts about the origin and translations
        change the outputs.
    notes
        Further sentences about the limits of the symmetry and their reasons.
    """

    group: Group | None
    acting: str = "the points"
    translations: bool = True
    on_average: Group | None = None
    moving_axes: bool = False
    notes: tuple[str, ...] = ()
    origin: bool = False

    def __post_init__(self) -> None:
        check_arguments(Symmetry, vars(self))

    def __str__(self) -> str:
        parts = ["outputs have no exact symmetry"]
        if self.group is not None:
            parts = [f"outputs are equivariant to {self.name} acting on {self.acting}, exactly up to rounding"]
        if self.on_average is not None:
            parts.append(f"to {self.on_average.name} on average over frames only")
        return "; ".join([*parts, *self.notes])

    @classmethod
    def stated_by(cls, network: object) -> Symmetry:
        """Return the symmetry in the attribute ``symmetry`` of any network: a symmetry, or a group with translations.

        If the attribute is absent, None or of another kind, the result has no group, and a note says why.
        """
        stated = getattr(network, "symmetry", None)
        if isinstance(stated, Group):
            return cls(stated)
        return stated if isinstance(stated, cls) else cls(None, notes=("the network states no guarantee",))

    @classmethod
    def of_frames(cls, space: HomogeneousSpace, frames: Any) -> Symmetry:
        """Return the symmetry of layers that depend on relative elements only, for a space and frames of its points."""
        check_arguments(Symmetry.of_frames, {"space": space})
        group, shifts = space.group, Translations(space.group.dim) if isinstance(space, Euclidean) else None
        frames = FiniteFrames(frames) if isinstance(frames, FiniteGroup) else frames
        chosen = frames.pose or frames.group if isinstance(frames, FiniteFrames) else frames
        if chosen is None:
            return cls(group)
        if isinstance(chosen, ScaleFrames):
            what = f"dilations by {chosen.base:g} shift the field by one of {chosen.levels} scales, except at the ends"
            return cls(chosen.group, notes=(what,))
        if isinstance(chosen, FiniteGroup) and shifts is not None:
            return cls(chosen)
        if isinstance(chosen, PrincipalFrames):
            undetermined = "tensors are undetermined for points on a line or at one place"
            notes = (f"frames are principal axes, which move with the points; {undetermined}",)
            proper = frames.group.is_proper if isinstance(frames, FiniteFrames) else frames.improper is False
            if proper and (linear := linear_part(group)).has_reflections:  # such frames are not those of mirror images
                kept = (SE if group.is_affine else SO)(group.dim) if isinstance(linear, O) else shifts
                return cls(kept, moving_axes=True, notes=(*notes, f"to {group.name} only with improper frames"))
            return cls(group, moving_axes=True, notes=notes)
        if isinstance(chosen, SampledFrames):
            error = f"the error decreases with the number of frames per {chosen.per}, here {chosen.count}"
            return cls(shifts, on_average=group, notes=(error,))
        along = "given frames" if isinstance(chosen, GivenFrames) else "frames"
        return cls(shifts, notes=(f"to {group.name} as far as the {along} move with the points",))

    @property
    def all_translations(self) -> bool:
        """Whether all translations of the points belong to the symmetry, so that only displacements matter."""
        group = self.group
        return group is not None and (group.is_affine or (isinstance(group, FiniteGroup) and self.translations))

    def seeing(self, vectors: Container[str]) -> Symmetry:
        """Return the part that remains with these vector inputs: the elements that keep the origin if one is ``pos``.

        Spaces without translations, such as spheres, have all their elements about the origin.
        """
        if "pos" not in vectors or not self.all_translations:
            return self
        group, average = (None if one is None else linear_part(one) for one in (self.group, self.on_average))
        group, average = (None if one is None or one.is_affine else one for one in (group, average))
        return replace(self, group=group, on_average=average, translations=False, origin=True)

    @property
    def name(self) -> str:
        """Name of the group, including the translations if they belong to the symmetry."""
        if self.group is None:
            return "no group"
        with_shifts = isinstance(self.group, FiniteGroup) and self.translations
        name = f"R^{self.group.dim} x| {self.group.name}" if with_shifts else self.group.name
        return f"{name} about the origin" if self.origin else name


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
