"""Measure how invariant a network is: every element of its group, in every precision, as a table."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

if TYPE_CHECKING:
    from lieattn.groups import FiniteGroup

TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest error allowed per dtype, in units of max(1, largest logit)."""

_HEADER = ("check", "dtype", "max error", "relative L2", "allowed", "verdict")


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes
    ----------
    check
        ``"element"`` (moved by an element of the group and a translation), ``"permutation"`` (points of each
        cloud in another order), ``"alone"`` (each cloud without the rest of its batch) or ``"outside"``
        (turned by a rotation that is not in the group: information, nothing is promised).
    label
        Which element or rotation.
    dtype
        Precision of weights and inputs.
    max_error
        Largest absolute difference of an output.
    relative
        L2 norm of the difference over that of the outputs.
    allowed
        The largest ``max_error`` that passes; None where nothing is promised.
    passed
        Whether ``max_error <= allowed``, which NaN never is; None where nothing is promised.
    """

    check: str
    label: str
    dtype: str
    max_error: float
    relative: float
    allowed: float | None
    passed: bool | None


@dataclass(frozen=True)
class Certificate:
    """What a network promises and what was measured.

    Attributes
    ----------
    guarantee
        The promise in words.
    group
        Name of the group.
    order
        Number of its elements.
    clouds, points
        Size of the data measured on.
    spread
        Largest difference of an output between two of the clouds. An error is small only next to this: a
        network that gives every cloud the same output is invariant to everything.
    seed
        Seed of translations, permutations and rotations.
    rows
        The measurements.
    """

    guarantee: str
    group: str
    order: int
    clouds: int
    points: int
    spread: float
    seed: int
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Whether every promise was kept."""
        return all(row.passed for row in self.rows if row.passed is not None)

    def worst(self, check: str = "element") -> dict[str, float]:
        """Largest error of one kind of check, per dtype; NaN if one of them is NaN."""
        found: dict[str, float] = {}
        for row in self.rows:
            if row.check == check:
                known = found.get(row.dtype, 0.0)
                found[row.dtype] = known if math.isnan(known) or known > row.max_error else row.max_error
        return found

    def table(self) -> str:
        """Return the measurements as a table of aligned text."""
        cells = [_HEADER]
        for row in self.rows:
            verdict = "not promised" if row.passed is None else "ok" if row.passed else "FAILED"
            allowed = "" if row.allowed is None else f"{row.allowed:.1e}"
            name = f"{row.check} {row.label}".rstrip()
            cells.append((name, row.dtype, f"{row.max_error:.1e}", f"{row.relative:.1e}", allowed, verdict))
        widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])

    def to_json(self) -> str:
        """Return everything as JSON; a number that is not finite becomes ``"nan"`` or ``"inf"``."""
        content = {**dataclasses.asdict(self), "passed": self.passed}
        return json.dumps(_finite(content), indent=2, allow_nan=False)


def certify(
    network: nn.Module,
    data: Batch | Data | Sequence[Data],
    group: FiniteGroup | None = None,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64),
    tolerances: Mapping[torch.dtype, float] | None = None,
    rotations: int = 4,
    permute: bool | None = None,
    seed: int = 0,
) -> Certificate:
    """Measure the invariance of a network's outputs.

    For every element h of the group the points x_i of each cloud are moved to h x_i + t, with a translation t
    of about the size of the cloud drawn for each cloud. Moves are computed in float64 and rounded to the dtype
    tested, so an error in float32 includes that of the coordinates. The network is measured in eval mode on a
    copy: its own mode, dtype and weights stay as they are.

    Parameters
    ----------
    network
        Called with a ``Batch``; returns ``[clouds, outputs]``, which should not change.
    data
        Clouds with ``pos`` ``[points, dim]``.
    group
        The group to test; ``network.group`` by default.
    dtypes
        Floating dtypes of weights and inputs.
    tolerances
        Largest error per dtype in units of max(1, largest output); :data:`TOLERANCES` by default.
    rotations
        Number of random rotations outside of the group, measured for comparison.
    permute
        Whether to reorder the points of each cloud. By default unless the clouds are images: their ``grid``
        says that the points are in raster order.
    seed
        Seed of translations, permutations and rotations.

    Raises
    ------
    TypeError
        If a dtype is no floating dtype with a tolerance.
    ValueError
        If there is no group or no cloud, dimensions differ, or the outputs are not ``[clouds, outputs]``.

    Examples
    --------
    >>> from lieattn.groups import cyclic
    >>> from torch_geometric.nn import global_mean_pool
    >>> class MeanRadius(nn.Module):
    ...     def forward(self, data):
    ...         return global_mean_pool(data.pos.norm(dim=1, keepdim=True), data.batch)
    >>> cloud = Data(pos=torch.tensor([[1.0, 2.0], [3.0, -1.0]]))
    >>> certify(MeanRadius(), cloud, cyclic(4)).passed  # distances from the origin see translations
    False
    """
    clouds = _clouds(data)
    group = _group(network, group, clouds)
    limits = {**TOLERANCES, **(tolerances or {})}
    for dtype in dtypes:
        if not dtype.is_floating_point or dtype not in limits:
            raise TypeError(f"dtypes: expected floating dtypes with a tolerance, got {dtype}")
    if permute is None:
        permute = all(cloud.get("grid") is None for cloud in clouds)
    moves = _moves(group, clouds, rotations, permute, torch.Generator().manual_seed(seed))
    rows: list[Row] = []
    spread = 0.0
    for dtype in dtypes:
        measured, spread = _measure(network, clouds, moves, dtype, limits[dtype])
        rows += measured
    return Certificate(
        guarantee=str(getattr(network, "guarantee", "the network states no guarantee")),
        group=group.name,
        order=group.order,
        clouds=len(clouds),
        points=sum(int(cloud.num_nodes or 0) for cloud in clouds),
        spread=spread,
        seed=seed,
        rows=tuple(rows),
    )


@dataclass(frozen=True)
class _Move:
    """A change of the clouds that outputs should survive, or that is measured for comparison."""

    check: str
    label: str
    apply: Callable[[list[Data]], list[Data]]


def _moves(
    group: FiniteGroup, clouds: list[Data], rotations: int, permute: bool, generator: torch.Generator
) -> list[_Move]:
    moves = []
    for index, matrix in enumerate(group.elements):
        shifts = _shifts(clouds, generator)
        moves.append(_Move("element", str(index), partial(_moved, matrix, shifts)))
    if permute:
        orders = [torch.randperm(int(cloud.num_nodes or 0), generator=generator) for cloud in clouds]
        moves.append(_Move("permutation", "", partial(_permuted, orders)))
    for _ in range(rotations):
        matrix, label = _random_rotation(group.dim, generator)
        still = [torch.zeros(group.dim, dtype=torch.float64) for _ in clouds]
        moves.append(_Move("outside", label, partial(_moved, matrix, still)))
    return moves


def _measure(
    network: nn.Module, clouds: list[Data], moves: list[_Move], dtype: torch.dtype, tolerance: float
) -> tuple[list[Row], float]:
    copied = copy.deepcopy(network).to(dtype).eval()
    device = next((weight.device for weight in copied.parameters()), torch.device("cpu"))

    def outputs(changed: list[Data]) -> Tensor:
        with torch.no_grad():
            found = copied(Batch.from_data_list([_cast(cloud, dtype) for cloud in changed]).to(device))
        if found.ndim != 2 or len(found) != len(changed) or found.shape[1] == 0:
            raise ValueError(
                f"network: expected outputs [clouds, outputs] with {len(changed)} clouds, got {tuple(found.shape)}"
            )
        return found.double().cpu()

    reference = outputs(clouds)
    allowed = tolerance * max(1.0, float(reference.abs().max()))
    name = str(dtype).removeprefix("torch.")

    def row(check: str, label: str, found: Tensor) -> Row:
        difference = found - reference
        error = float(difference.abs().max())
        size = float(reference.norm())
        relative = float(difference.norm()) / size if size else math.inf if error else 0.0
        promised = check != "outside"
        return Row(
            check,
            label,
            name,
            error,
            relative,
            allowed if promised else None,
            error <= allowed if promised else None,
        )

    rows = [row(move.check, move.label, outputs(move.apply(clouds))) for move in moves]
    if len(clouds) > 1:
        alone = torch.cat([outputs([cloud]) for cloud in clouds])
        rows.append(row("alone", "", alone))
    return rows, float((reference.amax(dim=0) - reference.amin(dim=0)).max())


def _clouds(data: Batch | Data | Sequence[Data]) -> list[Data]:
    clouds = data.to_data_list() if isinstance(data, Batch) else [data] if isinstance(data, Data) else list(data)
    if not clouds:
        raise ValueError("data: expected at least one cloud, got none")
    for index, cloud in enumerate(clouds):
        pos = cloud.get("pos")
        if pos is None or pos.ndim != 2 or not pos.is_floating_point() or len(pos) == 0:
            found = "none" if pos is None else f"{tuple(pos.shape)} of {pos.dtype}"
            raise ValueError(f"data: cloud {index} needs pos, floating [points, dim] with points, got {found}")
    return clouds


def _group(network: nn.Module, group: FiniteGroup | None, clouds: list[Data]) -> FiniteGroup:
    found: FiniteGroup | None = getattr(network, "group", None) if group is None else group
    if found is None:
        raise ValueError("group: the network has no attribute `group`, give the group to test")
    for cloud in clouds:
        if cloud.pos.shape[1] != found.dim:
            raise ValueError(
                f"group: {found.name} acts on {found.dim} coordinates, the clouds have {cloud.pos.shape[1]}"
            )
    return found


def _cast(cloud: Data, dtype: torch.dtype) -> Data:
    return cloud.apply(lambda value: value.to(dtype) if value.is_floating_point() else value)


def _moved(matrix: Tensor, shifts: list[Tensor], clouds: list[Data]) -> list[Data]:
    moved = [copy.copy(cloud) for cloud in clouds]
    for cloud, shift in zip(moved, shifts, strict=True):
        cloud.pos = cloud.pos.detach().cpu().double() @ matrix.mT + shift
    return moved


def _permuted(orders: list[Tensor], clouds: list[Data]) -> list[Data]:
    permuted = [copy.copy(cloud) for cloud in clouds]
    for cloud, order in zip(permuted, orders, strict=True):
        for key in cloud.node_attrs():
            cloud[key] = cloud[key][order.to(cloud[key].device)]
    return permuted


def _shifts(clouds: list[Data], generator: torch.Generator) -> list[Tensor]:
    shifts = []
    for cloud in clouds:
        pos = cloud.pos.detach().cpu().double()
        extent = float((pos - pos.mean(dim=0)).norm(dim=1).max()) or 1.0
        shifts.append(extent * torch.randn(pos.shape[1], generator=generator, dtype=torch.float64))
    return shifts


def _random_rotation(dim: int, generator: torch.Generator) -> tuple[Tensor, str]:
    if dim == 2:
        angle = 2 * math.pi * float(torch.rand((), generator=generator, dtype=torch.float64))
        cosine, sine = math.cos(angle), math.sin(angle)
        matrix = torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64)
        return matrix, f"{math.degrees(angle):.1f} degrees"
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    q = q * r.diagonal().sign()
    if torch.linalg.det(q) < 0:
        q[:, 0] = -q[:, 0]
    return q, "random rotation"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
