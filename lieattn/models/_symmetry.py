"""What frames over the points of a space promise to networks that see relative elements alone."""

from __future__ import annotations

from lieattn.geometry import FiniteFrames, Frames, GivenFrames, PrincipalFrames, SampledFrames, ScaleFrames
from lieattn.groups import Translations
from lieattn.models._network import Symmetry
from lieattn.spaces import Euclidean, HomogeneousSpace


def symmetry_of(space: HomogeneousSpace, frames: Frames | ScaleFrames | None) -> Symmetry:
    """Symmetry of a network on clouds of a space that are lifted with these frames."""
    group = space.group
    shifts = Translations(group.dim) if isinstance(space, Euclidean) else None
    pose = frames.pose if isinstance(frames, FiniteFrames) else None
    if isinstance(frames, PrincipalFrames) or isinstance(pose, PrincipalFrames):
        return Symmetry(group, notes=("frames are principal axes that move along",))
    if isinstance(frames, SampledFrames) or isinstance(pose, SampledFrames):
        drawn = frames if isinstance(frames, SampledFrames) else pose
        notes = () if not isinstance(drawn, SampledFrames) else (f"{drawn.count} frames a {drawn.per}",)
        return Symmetry(shifts, on_average=group, notes=notes)
    if isinstance(frames, FiniteFrames | ScaleFrames) and shifts is not None:
        return Symmetry(frames.group)
    if isinstance(frames, GivenFrames):
        return Symmetry(shifts, notes=(f"to {group.name} if the given frames are moved along",))
    return Symmetry(group if frames is None else shifts)


def sees_order(frames: Frames | ScaleFrames | None) -> bool:
    """Whether outputs depend on the order of the points, because frames are drawn for each place in a cloud."""
    return isinstance(frames, SampledFrames) and frames.per == "point"
