"""Channels that a finite group permutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lieattn._core.checks import check_is, permutation_table
from lieattn.groups import FiniteGroup
from lieattn.reps._representation import Representation


@dataclass(frozen=True)
class Permutation(Representation):
    """Channels that the elements of a finite group permute: four cameras around a robot, the faces of a cube.

    Element g moves channel i to channel p_g(i): component p_g(i) of ρ(g) v is component i of v. ρ is defined for the
    elements of this group alone, so the frames of a network with such inputs must be this group or a subgroup.

    Parameters
    ----------
    group
        Finite group of orthogonal matrices.
    permutations
        p, integers ``[order, channels]`` in the order of the elements.
    points
        In place of ``permutations``: places ``[channels, dim]`` of the channels, such as the directions of the cameras.
        Each element of the group must map every place to a place.

    Raises
    ------
    ValueError
        If not exactly one of ``permutations`` and ``points`` is given, if a row is no permutation, if p_gh is not p_g
        after p_h (the message names the elements), or if an element maps a point to no other one.

    Examples
    --------
    >>> from lieattn.groups import cyclic
    >>> cameras = Permutation(cyclic(4), points=[(1, 0), (0, 1), (-1, 0), (0, -1)])  # front, left, back, right
    >>> cameras.act(cyclic(4).elements[1], torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([4., 1., 2., 3.])
    """

    group: FiniteGroup
    permutations: Sequence[Sequence[int]] | Tensor | None = None
    points: Sequence[Sequence[float]] | Tensor | None = None

    @torch.inference_mode(False)  # otherwise its matrices could never be used in training
    def __post_init__(self) -> None:
        check_is("group", self.group, FiniteGroup)
        if self.group.is_orthogonal is not True:
            raise ValueError(f"group: expected orthogonal matrices, got {self.group.name} with others")
        if (self.permutations is None) == (self.points is None):
            got = "none" if self.points is None else "both"
            raise ValueError(f"permutations, points: expected one of them, got {got}")
        given = _of_points(self.group, self.points) if self.permutations is None else self.permutations
        table = _checked(self.group, given)
        matrices = torch.nn.functional.one_hot(table, table.shape[1]).mT.double()
        vars(self).update(permutations=tuple(map(tuple, table.tolist())), points=None, _matrices=matrices)

    @property
    def name(self) -> str:
        return f"Permutation({self.group.name}, {self.dim} channels)"

    @property
    def dim(self) -> int:
        return len(vars(self)["_matrices"][0])

    @property
    def space_dim(self) -> int:
        return self.group.dim

    @property
    def domain(self) -> FiniteGroup:  # type: ignore[override]
        """The group, for whose elements ρ is defined."""
        return self.group

    def _evaluate(self, rotation: Tensor) -> Tensor:
        elements = self.group.matrices(rotation)
        nearest = (rotation[..., None, :, :] - elements).abs().amax(dim=(-2, -1)).argmin(dim=-1)
        matrices: Tensor = vars(self)["_matrices"]
        return matrices.to(rotation)[nearest]


def _of_points(group: FiniteGroup, given: Any) -> Tensor:
    """Return the permutations ``[order, points]`` of places by the group."""
    try:
        points = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"points: expected numbers [channels, {group.dim}], got {given!r}") from error
    if points.ndim != 2 or points.shape[1] != group.dim or not len(points) or not points.isfinite().all():
        raise ValueError(f"points: expected finite [channels, {group.dim}] for {group.name}, got {tuple(points.shape)}")
    moved = points @ group.elements.mT  # [order, channels, dim]
    distance, nearest = (moved[:, :, None] - points).abs().amax(dim=-1).min(dim=-1)
    missed = distance > max(1e-6, group.tolerance) * max(1.0, float(points.abs().max()))
    if missed.any():
        g, i = missed.nonzero()[0].tolist()
        place = [round(x, 6) for x in moved[g, i].tolist()]
        raise ValueError(
            f"points: expected whole orbits of {group.name}, but element {g} maps point {i} to {place}, where none is"
        )
    return nearest


def _checked(group: FiniteGroup, given: Any) -> Tensor:
    """Return permutations int64 ``[order, channels]``; ValueError unless they are a representation of the group."""
    expected = f"integers [order={group.order}, channels], a permutation for each element of {group.name}"
    table = permutation_table("permutations", given, expected)
    if len(table) != group.order:
        raise ValueError(f"permutations: expected {expected}, got shape {tuple(table.shape)}")
    composed = table[:, table]  # [g, h, i] is p_g(p_h(i))
    broken = (composed != table[group.cayley]).any(dim=-1)
    if broken.any():
        g, h = broken.nonzero()[0].tolist()
        gh = int(group.cayley[g, h])
        found, stated = composed[g, h].tolist(), table[gh].tolist()
        raise ValueError(
            f"permutations: expected that of g h to be that of g after that of h, but for elements g = {g} and h = {h} "
            f"of {group.name}, with g h = {gh}, these are {stated} and {found}"
        )
    return table
