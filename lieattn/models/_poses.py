"""Poses: one frame for each cloud, which the cloud is turned into before a network of a finite group sees it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lieattn.geometry import Neighbors, PointClouds, PrincipalFrames, SampledFrames
from lieattn.groups import SE, E, FiniteGroup, SemidirectProduct
from lieattn.spaces import Euclidean

Poses = PrincipalFrames | SampledFrames


class Posing:
    """Chooses a pose V for each cloud, so that the frames over its points are V h with h in H; a value.

    Principal axes are determined up to signs. If H contains these, another choice of signs permutes the frames, and
    what does not depend on their order is exactly equivariant to all rotations (of O(d), if H has improper elements).
    Sampled poses are equivariant in distribution: new in every training step, in eval mode functions of their seed.

    Parameters
    ----------
    group
        H.
    poses
        ``PrincipalFrames(of="cloud")`` or ``SampledFrames(1, per="cloud")``.

    Raises
    ------
    TypeError, ValueError
        If it is none of these, or H lacks the signs.
    """

    def __init__(self, group: FiniteGroup, poses: Poses) -> None:
        proper = bool((torch.linalg.det(group.elements) > 0).all())
        self.poses = poses
        self.motions: SemidirectProduct = (SE if proper else E)(group.dim)
        if isinstance(poses, SampledFrames):
            if poses.count != 1 or poses.per != "cloud":
                raise ValueError(f"poses: expected one for each cloud, SampledFrames(1, per='cloud'), got {poses}")
        elif isinstance(poses, PrincipalFrames):
            if poses.of != "cloud" or poses.improper not in (None, not proper):
                raise ValueError(f"poses: expected principal axes of clouds, PrincipalFrames(), got {poses}")
            if not _contains_signs(group, proper):
                raise ValueError(
                    f"poses: principal axes are determined up to signs, and {group.name} does not contain all "
                    f"{'proper ' if proper else ''}diagonal matrices of signs"
                )
        else:
            raise TypeError(f"poses: expected PrincipalFrames or SampledFrames, got {type(poses).__name__}")

    @property
    def exact(self) -> bool:
        """Whether poses turn with the points."""
        return isinstance(self.poses, PrincipalFrames)

    def __call__(self, clouds: PointClouds, *, training: bool) -> Tensor:
        """One orthogonal matrix for each point, the same for all points of a cloud: ``[points, dim, dim]``."""
        generator = None
        if training and not self.exact:
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        none = clouds.batch.new_zeros(0)
        neighbors = Neighbors(clouds.batch.new_zeros(clouds.num_points + 1), none, none)
        frames: Tensor = self.poses(clouds, neighbors, Euclidean(self.motions), generator=generator)
        return frames[:, 0]


def posed(clouds: PointClouds, vectors: Tensor, poses: Tensor) -> tuple[PointClouds, Tensor]:
    """Points and vectors ``[points, names, dim]`` as they are seen in the poses ``[points, dim, dim]``."""
    turned = torch.einsum("pji,pkj->pki", poses, torch.cat([clouds.pos[:, None], vectors], dim=1))
    return replace(clouds, pos=turned[:, 0]), turned[:, 1:]


def _contains_signs(group: FiniteGroup, proper: bool) -> bool:
    signs = torch.cartesian_prod(*[torch.tensor([1.0, -1.0], dtype=torch.float64)] * group.dim).view(-1, group.dim)
    wanted = [torch.diag(row) for row in signs if not proper or row.prod() > 0]
    return all(bool(((group.elements - sign).abs().amax(dim=(1, 2)) < 1e-9).any()) for sign in wanted)
