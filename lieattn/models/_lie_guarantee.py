"""What a network on lifted points promises, in words."""

from __future__ import annotations

from typing import Any

from lieattn.geometry import FiniteFrames, GivenFrames, PrincipalFrames, SampledFrames
from lieattn.spaces import Euclidean, HomogeneousSpace


def guarantee(space: HomogeneousSpace, frames: Any, coordinates: str = "smooth") -> str:
    """Which motions of the points leave the outputs alone, exactly or on average."""
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
    return text
