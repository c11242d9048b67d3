"""The interface of frames, the elements of the stabilizer over each point.

A choice of frames is a small callable value. :func:`lift` calls it with the clouds, and it returns elements of the
stabilizer of the space, ``[points, fiber, k, k]``, or :class:`GroupFrames`. docs/exactness.md has measured errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from lieattn.geometry._clouds import PointClouds
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.groups import FiniteGroup, Group
from lieattn.spaces import HomogeneousSpace


class GroupFrames(NamedTuple):
    """Frames that are the elements of a finite group H, optionally rotated by one pose for each cloud.

    The elements are multiplied from the left by the ``pose`` ``[points, k, k]``, which is equal for all points of a
    cloud.
    """

    group: FiniteGroup
    pose: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Sites:
    """The arguments of a choice of frames: clouds, their neighbor lists, and their space.

    ``weights`` ``[points]`` are used by frames that average over points. Random frames are drawn from the
    ``generator``. ``vectors`` ``[points, count, dim]`` are input vectors that rotate with the points. They provide axes
    that the points do not determine.
    """

    clouds: PointClouds
    neighbors: Neighbors
    space: HomogeneousSpace
    weights: Tensor | None = None
    generator: torch.Generator | None = None
    vectors: Tensor | None = None

    @property
    def stabilizer(self) -> Group:
        """Group that the frames belong to. ValueError is raised if it is trivial."""
        if self.space.stabilizer is None:
            what = f"the stabilizer of {self.space.name} is trivial"
            raise ValueError(f"frames: expected None, since {what}")
        return self.space.stabilizer


@runtime_checkable
class Frames(Protocol):
    """Interface of choices of frames, which are callable with :class:`Sites`."""

    def __call__(self, sites: Sites) -> Tensor | GroupFrames:
        """Return elements of the stabilizer of the space, ``[points, fiber, k, k]``, or all of a finite group."""
