"""How a planar group moves a square kernel of pixels: in integers, once, never by rotating floats."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lieattn._checks import check_count
from lieattn.groups import FiniteGroup, check_group


def check_lattice_group(argument: str, group: FiniteGroup) -> None:
    """Refuse groups that do not map the square lattice of pixels and its square windows to themselves."""
    check_group(argument, group)
    entries = group.elements.round().abs()
    integer = bool((group.elements.abs() - entries).abs().max() < 1e-9)
    moves = integer and bool((entries.sum(dim=-1) == 1).all())
    if group.dim != 2 or not moves:
        raise ValueError(
            f"{argument}: expected a planar group of quarter turns and mirrors along rows, columns or diagonals, such "
            f"as cyclic(4) or dihedral(4), got {group.name}; for other groups use the layers on point clouds"
        )


def moved_cells(group: FiniteGroup, size: int) -> Tensor:
    """Cell of a size x size window that h⁻¹ brings to each cell: ``[order, size²]`` int64, cell h⁻¹p for cell p.

    Cells are numbered row by row from the top, and the group acts about the center of the window, between cells if
    ``size`` is even. Its matrices act on (right, up), the coordinates of
    :func:`lieattn.geometry.pixel_positions`.
    """
    steps = 2 * torch.arange(size) - (size - 1)
    row, column = torch.meshgrid(steps, steps, indexing="ij")
    place = torch.stack([column, -row], dim=-1).reshape(-1, 2)
    inverse = group.elements[group.inverse_index].round().to(torch.int64)
    right, up = torch.einsum("hij,pj->hpi", inverse, place).unbind(-1)
    return (size - 1 - up) // 2 * size + (size - 1 + right) // 2


def lifting_taps(group: FiniteGroup, size: int) -> Tensor:
    """Entry of a planar kernel for each pose and cell, ``[order, size²]`` int64 into the size² entries."""
    check_lattice_group("group", group)
    check_count("size", size)
    return moved_cells(group, size)


def group_taps(group: FiniteGroup, size: int) -> Tensor:
    """Entry (h⁻¹h̃, h⁻¹p) of a kernel on the group, ``[order, order, size²]`` int64 into its order · size² entries."""
    cells = lifting_taps(group, size)
    return group.relative_index[:, :, None] * size**2 + cells[:, None]


class _PermutedCopies(torch.autograd.Function):
    """Copies of the last axis in several orders.

    Torch would add up the gradient entry by entry; since every order is a permutation, it can be read in the inverse
    order and summed.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, orders: Tensor) -> Tensor:
        ctx.save_for_backward(orders)
        return weight.index_select(-1, orders.flatten()).unflatten(-1, orders.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (orders,) = ctx.saved_tensors
        copies, entries = orders.shape
        starts = entries * torch.arange(copies, device=orders.device)[:, None]
        places = (orders.argsort(dim=1) + starts).flatten()
        return grads[0].flatten(-2).index_select(-1, places).unflatten(-1, orders.shape).sum(dim=-2), None


def permuted_copies(weight: Tensor, orders: Tensor) -> Tensor:
    """``weight[..., orders]`` ``[*, copies, entries]``, where each row of ``orders`` ``[copies, entries]`` permutes."""
    copies: Tensor = _PermutedCopies.apply(weight, orders)
    return copies


def moved_kernels(weight: Tensor, taps: Tensor, size: int) -> Tensor:
    """Kernels of all output poses.

    Parameters
    ----------
    weight
        ``[out, in, (fiber,) size, size]``.
    taps
        ``[order, (fiber,) size²]`` int64, see :func:`lifting_taps` and :func:`group_taps`.
    size
        Side of the kernel.

    Returns
    -------
    Tensor
        ``[out, order, in, fiber, size, size]``, with a fiber of 1 for planar kernels.
    """
    moved = permuted_copies(weight.flatten(2), taps.flatten(1))
    return moved.unflatten(-1, (-1, size, size)).transpose(1, 2)


def published_measure(group: FiniteGroup, *, attentive: bool = False) -> float:
    """Weight of the sum over the input fiber in the authors' code.

    2π/n for n rotations. With mirrors the plain layer takes it twice (π on p4m), while the attentive layers
    take 2π/|H| (π/4 on p4m); the two agree on rotations. Groups without rotations, and those of other dimensions, have
    weight 1.
    """
    rotations = int((torch.linalg.det(group.elements) > 0).sum())
    if group.dim != 2 or rotations == 1:
        return 1.0
    if attentive:
        return 2 * math.pi / group.order
    return 2 * math.pi / rotations * (group.order // rotations)
