"""Networks on points with frames."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from lieattn._core.contexts import outside_of_transforms
from lieattn.geometry import (
    AllPairs,
    FiniteFrames,
    Frames,
    Given,
    Neighborhood,
    PointClouds,
    PrincipalFrames,
    SampledFrames,
    ScaleFrames,
    lift,
    natural_space,
    point_clouds,
)
from lieattn.groups import FiniteGroup
from lieattn.models._base.inputs import (
    PointInputs,
    VectorInputs,
    check_domains,
    read_fields,
    read_inputs,
    vectors,
)
from lieattn.models._base.network import Network
from lieattn.models._base.symmetry import Symmetry, of_squares
from lieattn.reps import Pseudovector
from lieattn.spaces import Euclidean, HomogeneousSpace


class LiftedNetwork(Network):
    """Base class of networks on points with frames. A finite group is short for its frames.

    The space is that of the frames if absent. ValueError is raised for frames outside the stabilizer of a space, or a
    neighborhood that does not move along with the points.
    """

    space: HomogeneousSpace

    def __init__(
        self,
        frames: FiniteGroup | Frames | ScaleFrames | None,
        in_channels: PointInputs,
        neighborhood: Neighborhood | None,
        space: HomogeneousSpace | None,
        vector_inputs: VectorInputs,
    ) -> None:
        super().__init__()
        self.inputs, self.in_channels, self.cloud_inputs = read_inputs(in_channels)
        self.frames = frames = FiniteFrames(frames) if isinstance(frames, FiniteGroup) else frames
        self.space = natural_space(frames) if space is None else space
        self.vector_inputs, self.field_inputs = read_fields(vector_inputs, self.space.group.dim)
        flat = isinstance(self.space, Euclidean)
        fixed = flat and isinstance(frames, FiniteFrames) and frames.pose is None
        check_domains(self.field_inputs, cast(FiniteFrames, frames).group if fixed else None)
        scales = self.space.group.is_orthogonal is False or isinstance(frames, ScaleFrames)
        for name, rep in self.field_inputs.items():
            if scales and rep.orthogonal_only:
                need = f"a representation of dilations, such as Vector({self.space.group.dim}) or Scalar()"
                raise ValueError(f"vector_inputs[{name!r}]: frames that scale need {need}, got {rep.name}")
        self.neighborhood = neighborhood
        if self.space.stabilizer is not None and frames is None:
            raise TypeError(
                f"frames: expected frames such as PrincipalFrames(), which {self.space.name} needs, got None"
            )
        if isinstance(frames, FiniteFrames) and self.space.stabilizer is not None:
            self.space.stabilizer.check("frames", frames.group.elements)
        # Given neighbors and given frames need data. All others are checked as in every lift, with an empty cloud.
        if isinstance(frames, FiniteFrames | PrincipalFrames | SampledFrames) and not isinstance(neighborhood, Given):
            lift(torch.empty(0, len(self.space.origin), device="cpu"), frames, neighborhood or AllPairs(), self.space)
        self.sees_order = isinstance(frames, SampledFrames) and frames.per == "point"

    @property
    def symmetry(self) -> Symmetry:
        return of_squares(Symmetry.of_frames(self.space, self.frames), self.neighborhood).seeing(self.vector_inputs)

    def seen_vectors(self, data: Any, clouds: PointClouds) -> Tensor | None:
        """Return the vectors and pseudovectors ``[points, names, dim]``, which some frames follow, or None."""
        axial = (name for name, rep in self.field_inputs.items() if rep == Pseudovector())
        if not (names := (*self.vector_inputs, *axial)):
            return None
        return vectors(data, names, replace(clouds, pos=clouds.pos[:, : self.space.group.dim]))


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
