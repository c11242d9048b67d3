"""What a network on lifted points promises, in words and for programs."""

from __future__ import annotations

from typing import Any

from lieattn.geometry import FiniteFrames, GivenFrames, PrincipalFrames, SampledFrames
from lieattn.groups import Group, Translations
from lieattn.spaces import Euclidean, HomogeneousSpace


def guarantee(space: HomogeneousSpace, frames: Any, coordinates: str = "smooth", kind: str = "invariant") -> str:
    """Which motions of the points leave the outputs alone, or turn them, exactly or on average."""
    group, euclidean = space.group, isinstance(space, Euclidean)
    exactly = "acting on the points, exactly up to rounding"
    shifts = f"R^{group.dim} acting on the points, exactly up to rounding" if euclidean else "nothing exactly"
    if frames is None:
        text = f"outputs are invariant to {group.name} {exactly}"
    elif isinstance(frames, FiniteFrames) and euclidean:
        text = f"outputs are invariant to R^{group.dim} x| {frames.group.name} {exactly}"
    elif isinstance(frames, PrincipalFrames):
        text = f"outputs are invariant to {group.name} {exactly}, for frames are principal axes that move along"
    elif isinstance(frames, GivenFrames):
        text = f"outputs are invariant to {group.name} {exactly}, if the given frames are moved along; to {shifts}"
    elif isinstance(frames, SampledFrames):
        text = (
            f"outputs are invariant to {shifts}; to {group.name} on average over frames only, with an error that "
            f"shrinks with the {frames.count} frames a {frames.per}"
        )
    else:
        text = f"outputs are invariant to {group.name} {exactly}, as far as its frames move along"
    if coordinates in ("log", "published", "quaternion"):
        text += "; logarithms and quaternions of relative elements jump at an angle of π"
    return text.replace("outputs are invariant", "outputs are equivariant") if kind == "vector" else text


def symmetry(space: HomogeneousSpace, frames: Any, coordinates: str = "smooth") -> Group | None:
    """Group that leaves the outputs alone exactly; a finite one together with all translations, None for no group.

    Given frames do not move along by themselves. Logarithms jump at an angle of π, and so many relative frames are
    half turns that beside translations nothing is promised for networks that see them.
    """
    shifts = Translations(space.group.dim) if isinstance(space, Euclidean) else None
    if frames is None:
        return space.group
    if coordinates in ("log", "published", "quaternion"):
        return shifts
    if isinstance(frames, FiniteFrames) and isinstance(space, Euclidean):
        return frames.group
    return space.group if isinstance(frames, PrincipalFrames) else shifts


def sees_order(frames: Any) -> bool:
    """Whether outputs depend on the order of the points, because frames are drawn for each place in a cloud."""
    return isinstance(frames, SampledFrames) and frames.per == "point"
