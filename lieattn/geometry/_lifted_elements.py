"""Point sets lifted to a Lie group: elements over every point, and their relative coordinates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lieattn._checks import check_floating, check_length, check_neighborhood
from lieattn.geometry._clouds import check_indices
from lieattn.geometry._lifted_graph import Neighborhood, find_neighbors
from lieattn.geometry._lifts import Lift, gram_matrix
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import Nearest, PixelSquare, Radius
from lieattn.geometry._point_clouds import PointClouds, collate_clouds, point_clouds
from lieattn.geometry._relative import Coordinates, relative_coordinates
from lieattn.groups import Translations
from lieattn.spaces import HomogeneousSpace


@dataclass(frozen=True, eq=False, kw_only=True)
class LiftedElements(PointClouds):
    """Point clouds lifted to n group elements g_ia over each point x_i. Make them with :func:`lift_elements`.

    A field on the elements is a tensor ``[points, fiber, channels]``, and every layer is ``layer(x, graph) -> x``.
    Everything is a differentiable function of the points.

    Attributes
    ----------
    pos, batch, num_clouds, grid, cell, pbc
        The clouds, see :class:`PointClouds`; ``pos`` are points of the space.
    space
        X with its group G.
    elements
        ``[points, fiber, m, m]``, g_ia.
    invariants
        ``[points, q]``, what tells the orbit of each point from others; q = 0 if G is transitive.
    neighbors
        Neighbor lists of the points, sorted by target.
    scale
        Length by which the translation parts of relative elements are divided.
    coordinates
        Kind of the relative coordinates.
    relative_coordinates
        ``[edges, fiber, fiber, k]``, coordinates of g_ia⁻¹ g_jb for each edge from j to i, then the invariants of i
        and those of j. ``"smooth"`` coordinates are the translation as it is seen from g_ia, then those of the linear
        part (entries of its matrix; nothing for translations); ``"log"`` ones are those of the Lie algebra.
    """

    space: HomogeneousSpace
    elements: Tensor
    invariants: Tensor
    neighbors: Neighbors
    scale: float
    coordinates: Coordinates
    relative_coordinates: Tensor

    @property
    def fiber(self) -> int:
        """Number of elements over each point."""
        return self.elements.shape[1]

    @property
    def frames(self) -> Tensor:
        """Linear parts of the elements, ``[points, fiber, dim, dim]``: what turns vectors of a frame into space."""
        return self.space.group.linear(self.elements)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> LiftedElements:
        """Same elements on another device."""
        return self._map(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> LiftedElements:
        """Same elements in page-locked memory, from which copies to a GPU overlap with work."""
        return self._map(lambda part: part.pin_memory())

    def astype(self, dtype: torch.dtype) -> LiftedElements:
        """Same elements rounded to a floating dtype."""
        check_floating("dtype", dtype)
        names = ("pos", "elements", "invariants", "relative_coordinates")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})

    def subset(self, kept: Tensor, neighborhood: Neighborhood) -> LiftedElements:
        """Some of the points with the elements over them, and neighbor lists of their own, on the same scale.

        Parameters
        ----------
        kept
            ``[points kept]`` int64 indices, for example of :func:`farthest_points`.
        neighborhood
            Of the points that are kept.
        """
        check_indices("kept", kept, dim=1, device=self.device)
        clouds = PointClouds(
            pos=self.pos[kept], batch=self.batch[kept], num_clouds=self.num_clouds, cell=self.cell, pbc=self.pbc
        )
        _check_invariant(self.space, neighborhood)
        neighbors = _search(clouds, self.space, neighborhood)
        return _assemble(clouds, self.space, self.elements[kept], neighbors, self.scale, self.coordinates)

    def _map(self, move: Callable[[Any], Any]) -> LiftedElements:
        moved = {
            field.name: move(value) if isinstance(value := getattr(self, field.name), Tensor | Neighbors) else value
            for field in fields(self)
        }
        return LiftedElements(**moved)

    @staticmethod
    def collate(parts: Sequence[LiftedElements]) -> LiftedElements:
        """Disjoint union of lifted clouds in one space, with fibers, scales and coordinates alike, in their order.

        Raises
        ------
        ValueError
            If there are none, or they differ in any of that, in dtype or device.
        """
        clouds = collate_clouds("parts", parts, ("space", "fiber", "scale", "coordinates"))
        first = parts[0]
        return LiftedElements(
            **{field.name: getattr(clouds, field.name) for field in fields(clouds)},
            space=first.space,
            elements=torch.cat([part.elements for part in parts]),
            invariants=torch.cat([part.invariants for part in parts]),
            neighbors=Neighbors.collate([part.neighbors for part in parts]),
            scale=first.scale,
            coordinates=first.coordinates,
            relative_coordinates=torch.cat([part.relative_coordinates for part in parts]),
        )


def lift_elements(
    points: Any,
    space: HomogeneousSpace,
    frames: Lift | None,
    neighborhood: Neighborhood,
    *,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    mask: Tensor | None = None,
    cell: Tensor | None = None,
    pbc: Tensor | None = None,
    scale: float | None = None,
    coordinates: Coordinates = "smooth",
    weights: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> LiftedElements:
    """Lift point clouds to a Lie group: over each point x stand the elements s(x) h, with frames h of the lift.

    **Equivariance.** Moving points and frames by g in G multiplies all elements by g from the left and leaves neighbor
    lists and relative coordinates alone. Whether frames move with the points is up to the lift: see
    :class:`PrincipalFrames` (exact, up to the order of the fiber), :class:`SampledFrames` (in distribution only),
    :class:`FiniteFrames` and :class:`GivenFrames`.

    Parameters
    ----------
    points
        Point clouds in any of the forms that :func:`point_clouds` takes; points of the space, so for positions with
        directions 6 numbers each.
    space
        For example ``Euclidean(SE(3))``, ``Orbits(SO(3))`` or ``Sphere()``.
    frames
        The lift; None where the stabilizer is trivial, and only there.
    neighborhood
        For example ``Radius(1.5)``, or ``AllPairs()``; of the positions, where points have directions too.
    batch, ptr, mask, cell, pbc
        See :func:`point_clouds`. Clouds can repeat where the group has translations.
    scale
        Length by which translations of relative elements are divided; the neighborhood's own if absent, or 1.
    coordinates
        ``"smooth"`` or ``"log"``, see :class:`LiftedElements`. Logarithms jump where an angle is π; they are here for
        weights that were trained with them.
    weights
        ``[points]`` nonnegative weights, such as masses, for lifts that average over points.
    generator
        Where random lifts draw from; their own seed if absent.

    Raises
    ------
    TypeError, ValueError
        If shapes, dtypes, devices, batch indices or the dimension do not fit, a point is none of the space (such as
        0 under rotations), frames are no elements of the stabilizer, or the group does not preserve the distances
        that the neighborhood is made of.

    Examples
    --------
    >>> import torch
    >>> from lieattn.geometry import AllPairs, PrincipalFrames, lift_elements
    >>> from lieattn.groups import SE
    >>> from lieattn.spaces import Euclidean
    >>> graph = lift_elements(torch.randn(5, 3), Euclidean(SE(3)), PrincipalFrames(), AllPairs())
    >>> graph.elements.shape, graph.relative_coordinates.shape
    (torch.Size([5, 4, 4, 4]), torch.Size([25, 4, 4, 12]))
    """
    if not isinstance(space, HomogeneousSpace):
        raise TypeError(f"space: expected a homogeneous space such as Euclidean(SE(3)), got {space!r}")
    check_neighborhood(neighborhood)
    clouds = point_clouds(points, batch=batch, ptr=ptr, mask=mask, cell=cell, pbc=pbc)
    space.check("points", clouds.pos)
    _check_invariant(space, neighborhood)
    if clouds.cell is not None and not space.group.is_affine:
        raise ValueError(f"cell: {space.name} has no translations, so its clouds cannot repeat")
    if scale is None:
        scale = 1.0 if neighborhood.scale is None else neighborhood.scale
    check_length("scale", scale)
    neighbors = _search(clouds, space, neighborhood)
    # Geometry keeps its precision under autocast.
    with torch.autocast(clouds.device.type, enabled=False):
        chosen = _choose(frames, clouds, neighbors, space, weights, generator)
        return _assemble(clouds, space, space.lift(clouds.pos, chosen), neighbors, float(scale), coordinates)


def _choose(
    frames: Lift | None,
    clouds: PointClouds,
    neighbors: Neighbors,
    space: HomogeneousSpace,
    weights: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor | None:
    """Frames of the lift; None where there are none to choose."""
    if frames is not None:
        if isinstance(frames, type) or not callable(frames):
            raise TypeError(f"frames: expected a lift such as PrincipalFrames(), got {frames!r}")
        return frames(clouds, neighbors, space, weights=weights, generator=generator)
    if space.stabilizer is not None:
        raise TypeError(f"frames: expected a lift, since points of {space.name} have frames in {space.stabilizer.name}")
    return None


def _assemble(
    clouds: PointClouds,
    space: HomogeneousSpace,
    elements: Tensor,
    neighbors: Neighbors,
    scale: float,
    coordinates: Coordinates,
) -> LiftedElements:
    invariants = space.invariants(clouds.pos)
    return LiftedElements(
        **{field.name: getattr(clouds, field.name) for field in fields(PointClouds)},
        space=space,
        elements=elements,
        invariants=invariants,
        neighbors=neighbors,
        scale=scale,
        coordinates=coordinates,
        relative_coordinates=relative_coordinates(space, elements, invariants, neighbors, scale, coordinates),
    )


def _search(clouds: PointClouds, space: HomogeneousSpace, neighborhood: Neighborhood) -> Neighbors:
    # Of positions with directions, the group acts on the positions as on R^dim.
    return find_neighbors(replace(clouds, pos=clouds.pos[:, : space.group.dim]), neighborhood)


def _check_invariant(space: HomogeneousSpace, neighborhood: Neighborhood) -> None:
    """Refuse distances that the group does not preserve."""
    check_neighborhood(neighborhood)
    if not isinstance(neighborhood, Radius | Nearest | PixelSquare):
        return
    gram = gram_matrix(space.group)
    if gram is None:
        return  # its user knows
    if isinstance(neighborhood, Nearest):
        gram = gram / gram.diagonal().mean()  # distances may all change alike
    unit = torch.eye(len(gram), dtype=gram.dtype)
    if (gram - unit).abs().max() > 1e-9:
        raise ValueError(
            f"neighborhood: {space.group.name} does not preserve distances, so {neighborhood} would not move along; "
            "take AllPairs, or Nearest where all distances change alike"
        )
    if isinstance(neighborhood, PixelSquare) and not isinstance(space.group, Translations):
        raise ValueError(f"neighborhood: {neighborhood} does not turn with {space.group.name}; take a Radius")
