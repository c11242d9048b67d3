"""Clouds that repeat: lattices, and the search for neighbors among all images."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lieattn._checks import check_tensor
from lieattn.geometry._clouds import first_true
from lieattn.geometry._search import TIE_TOLERANCE, candidates_within

# A cell is refused as flat if its volume, relative to the product of its edges, is smaller.
_FLAT = 1e-8
# Relative; keeps every pair among the candidates, whatever rounding does to their search.
_MARGIN = 1 + 1e-9


def lattices(
    cell: Tensor | None, pbc: Tensor | None, num_clouds: int, points: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Check lattices, see :func:`point_clouds`, and give every cloud its own.

    Returns ``[clouds, dim, dim]`` in the dtype given, and ``[clouds, dim]``; both None if nothing repeats. TypeError or
    ValueError is raised for wrong dtypes, shapes or devices, or vectors that are not finite or span no volume (in the
    directions in which the cloud repeats).
    """
    if cell is None:
        if pbc is not None and (not isinstance(pbc, Tensor) or bool(pbc.any())):
            raise ValueError("pbc: says that clouds repeat, but there is no cell")
        return None, None
    cell, pbc = _checked(cell, pbc, num_clouds, points)
    if not pbc.any():
        return None, None
    used = torch.where(pbc[..., None], cell.detach().double(), 0.0)
    infinite = ~torch.isfinite(used).flatten(1).all(-1)
    if infinite.any():
        raise ValueError(f"cell: expected finite vectors, got {cell[first_true(infinite)].tolist()}")
    lengths = torch.linalg.vector_norm(used, dim=-1)
    units = used / torch.where(lengths == 0, 1.0, lengths)[..., None]
    # The squared volume that the unit vectors span, with 1 in place of those that are not used.
    gram = units @ units.mT + torch.diag_embed((~pbc).double())
    flat = torch.linalg.det(gram) < _FLAT**2
    if flat.any():
        i = first_true(flat)
        got = f"got the cell {cell[i].tolist()} of cloud {i}, whose volume is zero"
        raise ValueError(f"cell: expected vectors that span a volume along pbc={pbc[i].tolist()}, {got}")
    return cell, pbc


def _checked(cell: Tensor, pbc: Tensor | None, num_clouds: int, points: Tensor) -> tuple[Tensor, Tensor]:
    """Dtypes, devices and shapes; one cell for every cloud."""
    dim = points.shape[1]
    check_tensor("cell", cell, "a floating tensor [clouds, dim, dim]")
    if pbc is None:
        pbc = torch.ones(dim, dtype=torch.bool, device=cell.device)
    check_tensor("pbc", pbc, "a bool tensor [clouds, dim]", torch.bool)
    for name, given, own in (("cell", cell, (dim, dim)), ("pbc", pbc, (dim,))):
        if given.device != points.device:
            raise ValueError(f"{name}: expected on {points.device} as the points, got on {given.device}")
        if given.shape not in (own, (num_clouds, *own)):
            raise ValueError(f"{name}: expected {list(own)} or {[num_clouds, *own]}, got {list(given.shape)}")
    return cell.expand(num_clouds, dim, dim), pbc.expand(num_clouds, dim)


def images_within(
    pos: Tensor, cloud: Tensor, radius: float, include_self: bool, cell: Tensor, pbc: Tensor
) -> tuple[Tensor, Tensor]:
    """Find all pairs of a point and an image of another, or of itself, no farther apart than ``radius``.

    However many images that are: the radius may exceed the cell. Points ``[points, dim]``, inside the cell or not, and
    cells are float64; the tolerance is that of :func:`pairs_within`.

    Returns
    -------
    keys
        Sorted ``target * points + source``, int64 ``[edges]``.
    images
        ``[edges, dim]`` int64, how often each lattice vector is added to the source; ascending for equal keys.
    """
    n, dim = pos.shape
    if n == 0:
        return cloud, pos.long()
    complete = complete_cells(cell, pbc)
    radius = radius * (1 + TIE_TOLERANCE)
    fractional, home = _wrap(pos, cloud, complete, pbc)
    owner, image = _ghosts(fractional, cloud, complete, pbc, radius * _MARGIN)
    places = (fractional[owner] + image)[:, None] @ complete[cloud[owner]]
    found = []
    everything = torch.arange(n, device=pos.device)
    for target, row, ghost in candidates_within(places[:, 0], cloud[owner], radius * _MARGIN, everything):
        i, j = target[row], owner[ghost]
        # Relative to the points as given, which may lie outside their cell.
        steps = image[ghost] + home[i] - home[j]
        keep = cloud[i] == cloud[j]
        keep &= _squared_distance(pos, i, j, steps, cell[cloud[i]]) <= radius * radius
        keep &= include_self | (i != j) | (steps != 0).any(1)
        found.append((i[keep] * n + j[keep], steps[keep]))
    keys = torch.cat([pos.new_zeros(0, dtype=torch.int64), *(part for part, _ in found)])
    steps = torch.cat([pos.new_zeros(0, dim, dtype=torch.int64), *(part for _, part in found)])
    order = torch.arange(len(keys), device=keys.device)
    for axis in (*reversed(steps.unbind(1)), keys):
        order = order[axis[order].argsort(stable=True)]
    return keys[order], steps[order]


def complete_cells(cell: Tensor, pbc: Tensor) -> Tensor:
    """Cells ``[clouds, dim, dim]`` whose unused vectors are replaced by unit vectors across the used ones."""
    used = torch.where(pbc[..., None], cell, 0.0)
    # Right singular vectors of vanishing singular values come last and span what the used vectors leave.
    across = torch.linalg.svd(used).Vh
    rank = (~pbc).long().cumsum(1) - 1 + pbc.sum(1, keepdim=True)
    filled = across.gather(1, rank.clamp(min=0)[..., None].expand_as(across))
    return torch.where(pbc[..., None], cell, filled)


def _wrap(pos: Tensor, cloud: Tensor, cell: Tensor, pbc: Tensor) -> tuple[Tensor, Tensor]:
    """Fractional coordinates, in [0, 1) along periodic vectors, and the int64 steps that were taken off."""
    fractional = (pos[:, None] @ torch.linalg.inv(cell)[cloud])[:, 0]
    home = torch.where(pbc[cloud], fractional.floor(), 0.0)
    return fractional - home, home.long()


def _ghosts(fractional: Tensor, cloud: Tensor, cell: Tensor, pbc: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Images that reach within the radius of the cells: the point of each and its steps ``[images, dim]``.

    The points themselves come first.
    """
    reach = radius * torch.linalg.vector_norm(torch.linalg.inv(cell), dim=1)  # in fractions of each height
    most = torch.where(pbc, reach.floor() + 1, 0.0).amax(0, keepdim=True).long()[0]
    everything = torch.arange(len(fractional), device=fractional.device)
    owners, images = [everything], [torch.zeros_like(fractional, dtype=torch.int64)]
    reach, periodic = reach[cloud] * _MARGIN + 1e-9, pbc[cloud]
    for steps in itertools.product(*(range(-m, m + 1) for m in most.tolist())):
        if not any(steps):
            continue
        moved = fractional + fractional.new_tensor(steps)
        inside = (moved >= -reach) & (moved <= 1 + reach) & periodic
        unmoved = ~periodic & torch.tensor([s == 0 for s in steps], device=moved.device)
        kept = (inside | unmoved).all(1).nonzero()[:, 0]
        owners.append(kept)
        images.append(torch.tensor(steps, device=moved.device).expand(len(kept), -1))
    return torch.cat(owners), torch.cat(images)


def _squared_distance(pos: Tensor, i: Tensor, j: Tensor, steps: Tensor, cell: Tensor) -> Tensor:
    # Every operation changes sign exactly when i and j are exchanged, so the lists are symmetric to the last bit.
    shift = (steps.to(pos.dtype)[..., None] * torch.where((steps != 0)[..., None], cell, 0.0)).unbind(1)
    return (pos[j] - pos[i] + sum(shift[1:], start=shift[0])).square().sum(1)
