"""Discontinuities of outputs as points move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, TypeGuard

from torch import nn

from lieattn._core.checks import check_choice
from lieattn.geometry import AllPairs, FiniteFrames, Given, Neighborhood, PrincipalFrames, Radius, smooth_cutoff

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
