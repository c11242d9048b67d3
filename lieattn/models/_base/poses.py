"""Random poses of frames in training."""

from __future__ import annotations

from typing import Any

import torch

from lieattn._core.functional import outside_of_transforms
from lieattn.geometry import (
    FiniteFrames,
    Given,
    Neighborhood,
    PointClouds,
    PrincipalFrames,
    SampledFrames,
    lift,
    point_clouds,
)
from lieattn.spaces import HomogeneousSpace


def check_geometry(space: HomogeneousSpace, frames: object, neighborhood: Neighborhood) -> None:
    """Raise ValueError for frames outside the stabilizer of a space, or a neighborhood that does not move along."""
    if isinstance(frames, FiniteFrames) and space.stabilizer is not None:
        space.stabilizer.check("frames", frames.group.elements)
    # Given neighbors and given frames need data. All others are checked as in every lift, with an empty cloud.
    if isinstance(frames, FiniteFrames | PrincipalFrames | SampledFrames) and not isinstance(neighborhood, Given):
        lift(torch.empty(0, len(space.origin), device="cpu"), frames, neighborhood, space)


def without_lattice(data: Any, name: str) -> PointClouds:
    """Return the clouds of data; raise ValueError if they are periodic, for a model that does not support it."""
    clouds = point_clouds(data)
    if clouds.cell is not None:
        raise ValueError(f"data.cell: {name} does not see periodic images; remove the cell")
    return clouds


@outside_of_transforms
def new_generator() -> torch.Generator:
    """Return a generator for the random numbers of training, seeded by torch's default generator."""
    return torch.Generator().manual_seed(int(torch.randint(2**62, ())))
