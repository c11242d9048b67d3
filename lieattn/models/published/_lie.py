"""What the authors of LieTransformer chose, translated to ours: kernels, coordinates, networks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lieattn.geometry import AllPairs, FiniteFrames, LiftedGraph, Nearest, SampledFrames
from lieattn.groups import (
    SE,
    SO,
    FiniteGroup,
    Group,
    RotationDilations,
    SemidirectProduct,
    cyclic,
    quaternion_from_rotation,
)
from lieattn.models.lie import AttentionOptions, LieTransformer, Lifting, PairCoordinates, Readout, Species
from lieattn.spaces import Euclidean, HomogeneousSpace

Convention = Literal["log", "quaternion", "grid"]

_HALF_TURN = 1e-7  # how far from -π an angle counts as a half turn

_KERNELS = {
    "mlp": "sum",
    "dot_product_only": "content",
    "location_only": "location",
    "relative_position": "relative_position",
}
_NORMALIZATIONS = {
    "softmax": "softmax",
    "dot_product": "mean",
    "mean": "mean",
    "norm_exp": "exp-mean",
    "exp_mean": "exp-mean",
}
_FEATURES = {"1": "product", "2": "linear", "3": "mixed"}
_LOCATIONS = {"0": "coordinates", "1": "network", "2": "coordinates"}
_FAILURES = (
    ({"0": "leaves the weights undefined"}, "N"),
    (
        {
            "0": "has neither sum nor network to join features and location",
            "1": "adds parts whose shapes do not fit",
            "3": "multiplies parts whose shapes do not fit",
        },
        "C",
    ),
    ({"0": "leaves no features for the network"}, "F"),
)


def published_kernel(kernel: str, *, attention_fn: str = "softmax") -> dict[str, Any]:
    """Options of :class:`lieattn.models.AttentionOptions` for a ``kernel_type`` and ``attention_fn`` of the authors.

    Parameters
    ----------
    kernel
        ``"mlp"``, ``"dot_product_only"``, ``"location_only"``, ``"relative_position"``, or four digits N C F P:
        normalization (1 softmax, 2 mean), combination (2 a network), features (1 dot product, 2 linear maps,
        3 linear maps and a shared one), location (0 and 2 the coordinates, 1 a network of them).
    attention_fn
        ``"softmax"``, ``"dot_product"`` (also ``"mean"``), or ``"norm_exp"`` (also ``"exp_mean"``). A code's first
        digit takes its place, as in the authors' code.

    Returns
    -------
    dict
        ``kernel``, ``normalize`` and, for codes, ``features`` and ``location``.

    Raises
    ------
    ValueError
        For names that do not exist, and for codes that fail in the authors' code; the message says why.

    Examples
    --------
    >>> published_kernel("2232")
    {'kernel': 'combined', 'normalize': 'mean', 'features': 'mixed', 'location': 'coordinates'}
    """
    if kernel in _KERNELS:
        if attention_fn not in _NORMALIZATIONS:
            raise ValueError(f"attention_fn: expected one of {list(_NORMALIZATIONS)}, got {attention_fn!r}")
        return {"kernel": _KERNELS[kernel], "normalize": _NORMALIZATIONS[attention_fn]}
    if len(kernel) != 4 or not kernel.isdigit():
        raise ValueError(f"kernel: expected one of {list(_KERNELS)} or four digits, got {kernel!r}")
    for (reasons, letter), digit in zip(_FAILURES, kernel, strict=False):
        if digit in reasons:
            raise ValueError(f"kernel: {kernel!r} fails in the authors' code too: {letter} = {digit} {reasons[digit]}")
    normalization, combination, features, location = list(kernel)
    if normalization not in "12" or combination != "2" or features not in _FEATURES or location not in _LOCATIONS:
        raise ValueError(
            f"kernel: {kernel!r} is no code; N is 1 or 2, C is 2, F is 1, 2 or 3, and P is 0, 1 or 2 where they run"
        )
    return {
        "kernel": "combined",
        "normalize": "softmax" if normalization == "1" else "mean",
        "features": _FEATURES[features],
        "location": _LOCATIONS[location],
    }


@dataclass(frozen=True)
class PublishedCoordinates(PairCoordinates):
    """Coordinates of relative elements in the conventions of the authors of LieTransformer and LieConv.

    Invariant under g -> u g for all elements, and followed by the invariants of the orbits of both points. They are
    not divided by a length.

    Attributes
    ----------
    convention
        ``"log"``: the logarithm of g_j⁻¹ g_i, angles of the plane in (-π, π]. ``"quaternion"``, for SO(3) and SE(3):
        the quaternion of g_j⁻¹ g_i with w >= 0, and its translation. ``"grid"``, for SE(2) with the same cyclic fiber
        over all points: the translation of g_i⁻¹ g_j and its number of steps, 0 to fiber - 1.
    """

    convention: Convention = "log"

    def __post_init__(self) -> None:
        if self.convention not in get_args(Convention):
            raise ValueError(f"convention: expected one of {get_args(Convention)}, got {self.convention!r}")

    @property
    def continuous(self) -> bool:
        """Whether they depend continuously on the relative element: logarithms and quaternions jump at half turns."""
        return self.convention == "grid"

    def count(self, space: HomogeneousSpace) -> int:
        """How many there are; raises ValueError for spaces that have none."""
        group, rotations = space.group, isinstance(_linear(space.group), SO)
        if self.convention == "log" and isinstance(_linear(group), FiniteGroup):
            raise ValueError(f"convention: {group.name} has no logarithms; give a space such as Euclidean(SE(3))")
        if self.convention == "quaternion" and not (rotations and group.dim == 3):
            raise ValueError(f"convention: 'quaternion' is for SO(3) and SE(3), not for {group.name}")
        if self.convention == "grid" and not (group.is_affine and rotations and group.dim == 2):
            raise ValueError(f"convention: 'grid' is for SE(2) with a cyclic fiber, not for {group.name}")
        own = {"log": group.algebra_dim, "quaternion": 7 if group.is_affine else 4, "grid": 3}
        return own[self.convention] + 2 * space.num_invariants

    def __call__(self, graph: LiftedGraph) -> Tensor:
        """``[rows, fiber, fiber, k]``; raises ValueError for clouds that repeat."""
        if graph.neighbors.shift is not None:
            raise ValueError(f"graph: clouds that repeat have coordinates 'smooth' and 'log', not {self.convention!r}")
        space, row, elements = graph.space, graph.relative.row, graph.elements.contiguous()
        target, source = graph.neighbors.target, graph.neighbors.source
        if row is not None:
            edges = torch.arange(len(row), device=row.device)
            first = row.new_full((graph.relative.num_rows,), len(row)).scatter_reduce(0, row, edges, "amin")
            target, source = target[first], source[first]
        group, fiber = space.group, graph.fiber
        at_target, at_source = elements.index_select(0, target)[:, :, None], elements.index_select(0, source)[:, None]
        if self.convention == "grid":
            relative = group.relative(at_target, at_source)
            turn = group.linear(relative).detach()
            steps = torch.atan2(turn[..., 1, 0], turn[..., 0, 0]) * (fiber / (2 * math.pi))
            parts = [group.translation(relative), (steps.round() % fiber)[..., None]]
        else:
            relative = group.relative(at_source, at_target)
            if self.convention == "log":
                parts = [_log(group, relative)]
            else:
                parts = [quaternion_from_rotation(group.linear(relative))]
                parts += [group.translation(relative)] if group.is_affine else []
        invariants = space.invariants(graph.pos)
        for index in (target, source):
            parts.append(invariants.index_select(0, index)[:, None, None].expand(-1, fiber, fiber, -1))
        return torch.cat(parts, dim=-1)


def _linear(group: Group) -> Group:
    return group.stabilizer if isinstance(group, SemidirectProduct) else group


def _log(group: Group, g: Tensor) -> Tensor:
    """Logarithm ``[*, algebra_dim]`` in which a half turn of the plane is +π, however it was rounded."""
    linear = _linear(group)
    if group.dim != 2 or not isinstance(linear, SO | RotationDilations):
        return group.log(g)
    log = linear.log(group.linear(g))
    angle = log[..., -1:]
    log = torch.cat([log[..., :-1], torch.where(angle < _HALF_TURN - math.pi, angle + 2 * math.pi, angle)], dim=-1)
    if not group.is_affine:
        return log
    shift = linear.inverse_exp_integral(log) @ group.translation(g)[..., None]
    return torch.cat([log, shift[..., 0]], dim=-1)


def published_qm9(out_channels: int = 1, **options: Any) -> LieTransformer:
    """Network for QM9 of the authors' published run: 101.8 M parameters with their quaternions.

    Theirs takes 25 of the nearest 50 *elements*, at random; this one about as many points with all of their frames.
    """
    preset = {
        "frames": SampledFrames(4),
        "neighborhood": Nearest(12),
        "channels": 1504,
        "layers": 11,
        "lifting": Lifting(PublishedCoordinates("quaternion"), bound=True, neighbor_dropout=0.5, local=0),
        "attention": AttentionOptions("combined", normalize="mean", hidden=6, feature_channels=8),
        "readout": Readout(order="point_first"),
    }
    return LieTransformer(Species(), out_channels, **{**preset, **options})


def published_springs(rotations: int = 2, **options: Any) -> LieTransformer:
    """Potential of particles on springs, invariant to R^2 ⋊ C_n: 139,353 parameters. Inputs are (mass, k)."""
    preset = {
        "space": Euclidean(SE(2)),
        "frames": FiniteFrames(cyclic(rotations)),
        "neighborhood": AllPairs(),
        "channels": 80,
        "layers": 3,
        "lifting": Lifting(PublishedCoordinates("grid"), local=0),
        "attention": AttentionOptions(normalize="mean"),
    }
    return LieTransformer(2, 1, **{**preset, **options})
