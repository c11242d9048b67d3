"""What a network promises."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard

from torch import nn

from lieattn._core.checks import check_arguments, check_choice, permute_axes
from lieattn.geometry import (
    AllPairs,
    FiniteFrames,
    Given,
    GivenFrames,
    Neighborhood,
    PixelSquare,
    PrincipalFrames,
    Radius,
    SampledFrames,
    ScaleFrames,
    smooth_cutoff,
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


JUMPS_OF_POOLINGS = "poolings select other points when points move: use one stage"


def jumps_of_neighbors(neighborhood: Neighborhood | None, window: float | None = None) -> tuple[str, ...]:
    """Return discontinuities where points enter and leave neighborhoods; none if a ``window`` vanishes there."""
    if neighborhood is None or isinstance(neighborhood, AllPairs | Given):
        return ()
    if window is not None and isinstance(neighborhood, Radius):
        if window <= neighborhood.radius:
            return ()
        return (f"the cutoff {window:g} is larger than the radius of {neighborhood}: lower it to the radius",)
    if smooth_cutoff(neighborhood) is not None:
        return ()
    if isinstance(neighborhood, Radius):
        advice = f"use Radius({neighborhood.radius:g}, smooth=True)"
    else:
        advice = "use Radius(..., smooth=True), since the nearest points change"
    return (f"points enter and leave the neighborhoods of {decided(neighborhood)}: {advice}",)


def jumps_of_frames(frames: Any) -> tuple[str, ...]:
    """Return discontinuities of frames that are computed from the points."""
    chosen = frames.pose if isinstance(frames, FiniteFrames) else frames
    if not isinstance(chosen, PrincipalFrames):
        return ()
    return ("principal axes jump where two moments of the cloud become equal: use frames of a finite group",)


def jumps_of(model: object) -> tuple[str, ...] | None:
    """Return the discontinuities that a model or, if it says nothing about them, its parts state; None if none does."""
    stated = _stated(model, "jumps")
    return tuple(dict.fromkeys(jump for jumps in stated for jump in jumps)) if stated else None


def kinks_of(model: object) -> bool:
    """Return whether a model or, if it says nothing about kinks, its parts have some; true if none states it."""
    stated = _stated(model, "has_kinks")
    return any(stated) if stated else True


def _stated(model: object, name: str) -> list[Any]:
    """Return the attribute of a model or, if it has none, those of its parts."""
    stated = getattr(model, name, None)
    if stated is not None:
        return [stated]
    parts = model.children() if isinstance(model, nn.Module) else ()
    return [found for part in parts for found in _stated(part, name)]


Jumps = Literal["refuse", "allow"]


def make_continuous(argument: str, model: object, jumps: Jumps) -> None:
    """Make those radii of an energy model smooth, in the model itself, that do not specify whether they are.

    If the energies are still discontinuous and ``jumps`` is ``"refuse"``, ValueError is raised and the model is not
    changed, because dynamics would not conserve energy.
    """
    check_choice("jumps", jumps, Jumps)
    before = _make_smooth(model)
    found = jumps_of(model)
    if jumps == "refuse" and found:
        for part, neighborhood in before:
            part.neighborhood = neighborhood
        reasons = "; ".join(found)
        raise ValueError(
            f"{argument}: its energies jump. {reasons}; or accept with jumps='allow' that energies are not conserved"
        )


def _make_smooth(model: object) -> list[tuple[Any, Radius]]:
    """Make open radii smooth, and return the changed parts of the model with their former radius."""
    changed = list[tuple[Any, Radius]]()
    parts: Iterable[Any] = model.modules() if isinstance(model, nn.Module) else ()
    for part in parts:
        neighborhood, stated = vars(part).get("neighborhood"), getattr(part, "jumps", None)
        if is_open(neighborhood) and neighborhood.include_self:
            part.neighborhood = replace(neighborhood, smooth=True)
            if stated is not None and jumps_of(part) == stated:  # the part has windows of its own
                part.neighborhood = neighborhood
            else:
                changed.append((part, neighborhood))
    return changed


def is_open(neighborhood: object) -> TypeGuard[Radius]:
    """Whether a neighborhood is a radius that does not specify whether it is smooth."""
    return isinstance(neighborhood, Radius) and neighborhood.smooth is None


def decided(neighborhood: Any, smooth: bool = False) -> Any:
    """Return a neighborhood whose radius is smooth or sharp as given if it was open, and otherwise unchanged."""
    if not is_open(neighborhood):
        return neighborhood
    return replace(neighborhood, smooth=smooth and neighborhood.include_self)
