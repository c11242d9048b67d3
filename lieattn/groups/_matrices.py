"""Stacks of matrices: checking them, finding one among others, and the tables of a group made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lieattn._checks import kind


def real_matrices(argument: str, stack: Tensor) -> Tensor:
    """A float64 copy of finite matrices ``[order, dim, dim]``, or an error that names the argument."""
    if not isinstance(stack, Tensor) or stack.is_complex():
        raise TypeError(f"{argument}: expected a real tensor [order, dim, dim], got {kind(stack)}")
    if stack.ndim != 3 or stack.shape[-1] != stack.shape[-2] or 0 in stack.shape:
        expected = "expected shape [order, dim, dim] with order >= 1 and dim >= 1"
        raise ValueError(f"{argument}: {expected}, got {tuple(stack.shape)}")
    infinite = ~torch.isfinite(stack).flatten(1).all(1)
    if infinite.any():
        raise ValueError(f"{argument}: element {int(infinite.nonzero()[0])} has an entry that is not finite")
    return stack.detach().to(device="cpu", dtype=torch.float64).clone()


def checked_matrices(elements: Tensor, name: str) -> Tensor:
    """A copy of matrices that are distinct and invertible."""
    matrices = real_matrices(f"matrices of {name!r}", elements)
    flat = matrices.flatten(1)
    distance = torch.cdist(flat, flat, p=math.inf).fill_diagonal_(math.inf)
    if distance.min() < 1e-6:
        i, j = divmod(int(distance.argmin()), len(flat))
        raise ValueError(f"matrices of {name!r}: elements {i} and {j} are the same")
    singular = torch.linalg.det(matrices).abs() < 1e-9
    if singular.any():
        raise ValueError(f"matrices of {name!r}: element {int(singular.nonzero()[0])} has no inverse")
    return matrices


def permutation_matrices(argument: str, permutations: Sequence[Sequence[int]] | Tensor) -> Tensor:
    """P e_i = e_p(i) for each row of a table of permutations."""
    expected = f"{argument}: expected a table of integers [order, points]"
    try:
        table = torch.as_tensor(permutations)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{expected}, got {permutations!r}") from error
    if table.ndim != 2 or table.is_floating_point() or table.is_complex() or 0 in table.shape:
        raise ValueError(f"{expected}, got shape {tuple(table.shape)} of {table.dtype}")
    table, degree = table.to(torch.int64), table.shape[1]
    for g, row in enumerate(table.tolist()):
        if sorted(row) != list(range(degree)):
            raise ValueError(f"{argument}: row {g} is {row}, not a permutation of 0..{degree - 1}")
    return torch.nn.functional.one_hot(table, degree).mT.double()


def cayley_table(matrices: Tensor, name: str, tolerance: float) -> Tensor:
    """Index of every product of two elements, or an error that names the factors of one that is missing."""
    table = torch.empty(len(matrices), len(matrices), dtype=torch.int64)
    for g, matrix in enumerate(matrices):
        distance, table[g] = torch.cdist((matrix @ matrices).flatten(1), matrices.flatten(1), p=math.inf).min(dim=-1)
        worst = int(distance.argmax())
        if not distance[worst] <= tolerance:
            away = f"{float(distance[worst]):.1e} away from every element (tolerance {tolerance:.0e})"
            what = f"{name!r} is not closed under its product: elements[{g}] @ elements[{worst}] is {away}"
            raise ValueError(f"{what}; give all elements, or generators to FiniteGroup.generate")
    return table


def rows(argument: str, index: int | Tensor, table: Tensor, name: str) -> Tensor:
    """``table[index]``, with an error that names the group if it has no such element."""
    try:
        return table[index]
    except IndexError as error:
        raise ValueError(f"{argument}: expected indices 0..{len(table) - 1} of {name}, got {index}") from error


def new_elements(products: Tensor, found: Tensor) -> Tensor:
    """Those products that are neither found already nor repeated, in their order."""
    fresh: list[Tensor] = []
    known = found.flatten(1)
    for product in products:
        if torch.cdist(product.reshape(1, -1), known, p=math.inf).min() > 1e-6:
            fresh.append(product)
            known = torch.cat([known, product.reshape(1, -1)])
    return torch.stack(fresh) if fresh else products[:0]


def snap(matrices: Tensor) -> Tensor:
    """Make entries that are a half-integer up to rounding exactly that: quarter turns stay exact."""
    halves = torch.round(2 * matrices) / 2
    return torch.where((matrices - halves).abs() < 1e-14, halves, matrices)
