"""Where outputs of networks jump as points move, in words, and who refuses that."""

from __future__ import annotations

from typing import Any, Literal

from lieattn._checks import check_choice
from lieattn.geometry import AllPairs, FiniteFrames, Given, Neighborhood, PrincipalFrames, Radius


def jumps_of_neighbors(neighborhood: Neighborhood | None, window: float | None = None) -> tuple[str, ...]:
    """Jumps where points enter and leave neighborhoods, unless a network has a ``window`` that vanishes before."""
    if neighborhood is None or isinstance(neighborhood, AllPairs | Given):
        return ()
    if window is not None and isinstance(neighborhood, Radius):
        if window <= neighborhood.radius:
            return ()
        return (f"the cutoff {window:g} is beyond {neighborhood}, where neighbors end: lower it to the radius",)
    if getattr(neighborhood, "cutoff", None) is not None:
        return ()
    if isinstance(neighborhood, Radius):
        advice = f"give Radius({neighborhood.radius:g}, smooth=True)"
    else:
        advice = "the nearest are others when points move: take Radius(..., smooth=True)"
    return (f"points enter and leave the neighborhoods of {neighborhood}: {advice}",)


def jumps_of_frames(frames: Any) -> tuple[str, ...]:
    """Jumps of frames that are made of the points."""
    chosen = frames.pose if isinstance(frames, FiniteFrames) else frames
    if not isinstance(chosen, PrincipalFrames):
        return ()
    return ("principal axes jump where moments of the cloud cross: take frames of a finite group",)


Jumps = Literal["refuse", "allow"]


def check_continuous(argument: str, model: object, jumps: Jumps) -> None:
    """Raise ValueError for a model whose energies jump, and so are not conserved, unless they are allowed to."""
    check_choice("jumps", jumps, Jumps)
    found = getattr(model, "jumps", ())
    if jumps == "refuse" and found:
        reasons = "; ".join(found)
        raise ValueError(
            f"{argument}: its energies jump. {reasons}; or accept that they are not conserved: jumps='allow'"
        )
