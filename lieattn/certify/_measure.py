"""The measurement itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lieattn._checks import check_count
from lieattn.certify._certificate import Certificate, Row
from lieattn.certify._elements import elements_of, outside_of
from lieattn.certify._images import clouds_of_images, images_of_clouds
from lieattn.certify._kinds import Kind, kinds_of_inputs, kinds_of_outputs
from lieattn.certify._moves import Move, motion, permutation, raster_motion
from lieattn.groups import FiniteGroup, Group

TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest error allowed per dtype, in units of max(1, largest output)."""


def certify(
    network: nn.Module,
    data: Batch | Data | Sequence[Data] | Tensor,
    group: Group | None = None,
    *,
    inputs: Mapping[str, Kind] | None = None,
    outputs: Kind | Mapping[str, Kind] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64),
    tolerances: Mapping[torch.dtype, float] | None = None,
    elements: int = 8,
    rotations: int = 4,
    permute: bool | None = None,
    seed: int = 0,
) -> Certificate:
    """Measure the equivariance of a network's outputs.

    The points x_i of each cloud are moved to A x_i + t, vectors and other inputs turn along, and the outputs are
    compared with what they should become. A runs over a finite group, with translations t of about the size of the
    cloud drawn for each cloud; of a Lie group, elements are drawn, and special ones added (near the identity, half
    turns, reflections), with translations if the group has any: SE(3) has, SO(3) has none. Moves are computed in
    float64 and rounded to the dtype tested, so an error in float32 includes that of the coordinates. Images are moved
    twice, with their pixels in the order they had and, where the lattice is kept, in raster order. The network is
    measured in eval mode on a copy: its own mode, dtype and weights stay as they are.

    What a network promises is read from its attributes, all optional: ``guarantee`` (in words), ``symmetry`` (a
    ``FiniteGroup``, together with the translations, or a ``LieGroup``; None for nothing exactly) or else ``group``,
    ``vector_inputs`` (names of attributes of the data that turn along), ``kind`` (of its outputs) and ``sees_order``
    (true where the order of the points matters).

    Parameters
    ----------
    network
        Called with a ``Batch``; returns ``[clouds, *]`` or ``[points, *]``, or a mapping or named tuple of such.
    data
        Clouds with ``pos`` ``[points, dim]``; or images ``[images, channels, rows, columns]``, with which the network
        is called then.
    group
        The group to test; by default what the network promises.
    inputs
        Kinds of attributes of the data by name, beside ``vector_inputs`` and the vectors of a periodic ``cell``: see
        ``outputs``.
    outputs
        Kind of the outputs, for several by name: ``"invariant"``, ``"vector"``, ``"pseudovector"``,
        ``"pseudoscalar"``, ``"tensor"`` (matrices), ``"position"``, a :class:`lieattn.reps.Representation`, or a tuple
        of kinds whose components follow each other. By default ``network.kind``, or invariant.
    dtypes
        Floating dtypes of weights and inputs.
    tolerances
        Largest error per dtype in units of max(1, largest output); :data:`TOLERANCES` by default.
    elements
        Number of random elements of a Lie group.
    rotations
        Number of random rotations outside of the group (reflections, if all rotations are in it), measured for
        comparison.
    permute
        Whether to reorder the points of each cloud. By default unless the clouds are images: their ``grid``
        says that the points are in raster order. For a network that ``sees_order`` nothing is promised.
    seed
        Seed of elements, translations, permutations and rotations.

    Raises
    ------
    TypeError
        If a dtype is no floating dtype with a tolerance, or something is no group or kind.
    ValueError
        If there is no group or no cloud, dimensions differ, or outputs or inputs do not have the shape of their kind.

    Examples
    --------
    >>> from lieattn.groups import SE, cyclic
    >>> from torch_geometric.nn import global_mean_pool
    >>> class MeanRadius(nn.Module):
    ...     def forward(self, data):
    ...         return global_mean_pool(data.pos.norm(dim=1, keepdim=True), data.batch)
    >>> cloud = Data(pos=torch.tensor([[1.0, 2.0], [3.0, -1.0]]))
    >>> certify(MeanRadius(), cloud, cyclic(4)).passed  # distances from the origin see translations
    False
    >>> class Center(nn.Module):
    ...     def forward(self, data):
    ...         return global_mean_pool(data.pos, data.batch)
    >>> certify(Center(), cloud, SE(2), outputs="position").passed
    True
    """
    as_images = isinstance(data, Tensor)
    clouds = clouds_of_images(data) if isinstance(data, Tensor) else _clouds(data)
    group, exact = _promised(network, group)
    kinds = kinds_of_inputs(network, inputs)
    dim = _dimension(group, clouds, kinds["pos"])
    check_count("elements", elements)
    limits = {**TOLERANCES, **(tolerances or {})}
    for dtype in dtypes:
        if not dtype.is_floating_point or dtype not in limits:
            raise TypeError(f"dtypes: expected floating dtypes with a tolerance, got {dtype}")
    generator = torch.Generator().manual_seed(seed)
    if as_images:
        moves = list(_image_moves(group, clouds, generator))
    else:
        ordered = permute is None and bool(getattr(network, "sees_order", False))
        permute = all(cloud.get("grid") is None for cloud in clouds) if permute is None else permute
        moves = list(_motions(group, dim, clouds, elements, generator))
        if permute:
            moves.append(permutation(clouds, dim, exact and not ordered, generator))
        still = outside_of(group, dim, rotations, generator)
        moves += [motion("outside", element, clouds, False, generator) for element in still]
    measurement = _Measurement(network, clouds, moves, kinds, outputs, exact, as_images)
    rows: list[Row] = []
    spread = 0.0
    for dtype in dtypes:
        measured, spread = measurement.rows(dtype, limits[dtype])
        rows += measured
    return Certificate(
        guarantee=str(getattr(network, "guarantee", "the network states no guarantee")),
        group=None if group is None else group.name,
        order=group.order if isinstance(group, FiniteGroup) else None,
        clouds=len(clouds),
        points=sum(int(cloud.num_nodes or 0) for cloud in clouds),
        spread=spread,
        seed=seed,
        rows=tuple(rows),
    )


def _motions(
    group: Group | None, dim: int, clouds: list[Data], count: int, generator: torch.Generator
) -> Iterator[Move]:
    for element in () if group is None else elements_of(group, count, generator):
        move = motion("element", element, clouds, True, generator)
        yield move
        written = raster_motion("raster", move, clouds)
        if written is not None and any(
            len(order) > 1 and bool((order.diff() != 1).any()) for order in written.orders or ()
        ):
            yield written


def _image_moves(group: Group | None, clouds: list[Data], generator: torch.Generator) -> Iterator[Move]:
    if not isinstance(group, FiniteGroup):
        raise ValueError(
            f"group: images as a tensor are moved by finite groups, got {group}; give the pixels as points for others"
        )
    for element in elements_of(group, 0, generator):
        move = raster_motion("element", motion("element", element, clouds, True, generator), clouds)
        if move is None:
            raise ValueError(
                f"group: element {element.label} of {group.name} does not keep the pixels' lattice, so images as a "
                f"tensor would have to be resampled; give their pixels as points"
            )
        yield move


class _Measurement:
    """Outputs of the network on the clouds and on the moved clouds."""

    def __init__(
        self,
        network: nn.Module,
        clouds: list[Data],
        moves: list[Move],
        inputs: Mapping[str, Kind],
        outputs: Kind | Mapping[str, Kind] | None,
        exact: bool,
        as_images: bool,
    ) -> None:
        self.network, self.clouds, self.moves = network, clouds, moves
        self.inputs, self.kinds, self.exact, self.as_images = inputs, outputs, exact, as_images
        self.sizes = torch.tensor([int(cloud.num_nodes or 0) for cloud in clouds])

    def rows(self, dtype: torch.dtype, tolerance: float) -> tuple[list[Row], float]:
        """Rows of one dtype, and the spread of the outputs."""
        network = copy.deepcopy(self.network).to(dtype).eval()
        outputs = partial(self._outputs, network, dtype)
        reference = outputs(self.clouds)
        for name, value in reference.items():
            _check_rows(name, value, len(self.clouds), int(self.sizes.sum()))
        kinds = kinds_of_outputs(network, self.kinds, reference)
        name_of_dtype = str(dtype).removeprefix("torch.")
        rows = []

        def compare(check: str, label: str, promised: bool, found: Mapping[str, Tensor], move: Move | None) -> None:
            for name, value in reference.items():
                expected = value if move is None else move.expected(name, kinds[name], value, self.sizes)
                allowed = tolerance * max(1.0, float(value.abs().max())) if promised else None
                rows.append(_row(check, label, name, name_of_dtype, found.get(name), expected, allowed))

        for move in self.moves:
            changed = move.apply(self.clouds, self.inputs)
            try:
                found = outputs(changed)
            except ValueError:
                if move.promised:
                    raise
                rows += [
                    Row(move.check, f"{move.label}, refused", name, name_of_dtype, math.nan, math.nan, None, None)
                    for name in reference
                ]
            else:
                compare(move.check, move.label, move.promised, found, move)
        if len(self.clouds) > 1:
            parts = [outputs([cloud]) for cloud in self.clouds]
            alone = {name: torch.cat([part[name] for part in parts]) for name in reference}
            compare("alone", "", self.exact, alone, None)
        spread = max(float((value.amax(dim=0) - value.amin(dim=0)).max()) for value in reference.values())
        return rows, spread

    def _outputs(self, network: nn.Module, dtype: torch.dtype, clouds: Sequence[Data]) -> dict[str, Tensor]:
        device = next((weight.device for weight in network.parameters()), torch.device("cpu"))
        cast = [_cast(cloud, dtype) for cloud in clouds]
        given = images_of_clouds(cast) if self.as_images else Batch.from_data_list(cast)
        with torch.no_grad():
            return _named(network(given.to(device)))


def _row(
    check: str, label: str, name: str, dtype: str, found: Tensor | None, expected: Tensor, allowed: float | None
) -> Row:
    if found is None or found.shape != expected.shape:
        got = "none" if found is None else tuple(found.shape)
        raise ValueError(
            f"network: outputs {name} of clouds that were moved, or are alone, should be {tuple(expected.shape)} "
            f"as before, got {got}"
        )
    difference = found - expected
    error, size = float(difference.abs().max()), float(expected.norm())
    relative = float(difference.norm()) / size if size else math.inf if error else 0.0
    return Row(check, label, name, dtype, error, relative, allowed, None if allowed is None else error <= allowed)


def _named(outputs: Any) -> dict[str, Tensor]:
    """Outputs by name, in float64 on the CPU; the name of a single one is empty."""
    if hasattr(outputs, "_asdict"):
        outputs = outputs._asdict()
    named = dict(outputs) if isinstance(outputs, Mapping) else {"": outputs}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"network: expected a tensor, or a mapping or named tuple of tensors, got {type(value).__name__} "
                f"{name}".rstrip()
            )
    if not named:
        raise ValueError("network: expected outputs, got an empty mapping")
    return {name: value.detach().double().cpu() for name, value in named.items()}


def _check_rows(name: str, value: Tensor, clouds: int, points: int) -> None:
    if value.ndim == 0 or len(value) not in (clouds, points) or value.numel() == 0:
        raise ValueError(
            f"network: expected outputs {name} [clouds, *] or [points, *] with {clouds} clouds and {points} points, "
            f"got {tuple(value.shape)}"
        )


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


def _promised(network: nn.Module, given: Group | None) -> tuple[Group | None, bool]:
    """Group to measure, and whether anything is promised."""
    if given is None:
        stated = hasattr(network, "symmetry")
        given = network.symmetry if stated else getattr(network, "group", None)  # type: ignore[assignment]
        if given is None:
            if stated:
                return None, False
            raise ValueError("group: the network has no attribute `symmetry` or `group`, give the group to test")
    if not isinstance(given, Group):
        raise TypeError(f"group: expected a FiniteGroup or a LieGroup, got {given!r}")
    return given, True


def _dimension(group: Group | None, clouds: list[Data], kind: Kind) -> int:
    width = int(clouds[0].pos.shape[1])
    dim = width if group is None else group.dim
    for cloud in clouds:
        if kind == "position" and cloud.pos.shape[1] != dim:
            acts = "the first cloud has" if group is None else f"{group.name} acts on"
            raise ValueError(
                f"group: {acts} {dim} coordinates, the clouds have {cloud.pos.shape[1]}; where pos is more than a "
                f"position, say so: inputs={{'pos': ('position', 'vector')}}"
            )
    return dim


def _cast(cloud: Data, dtype: torch.dtype) -> Data:
    return cloud.apply(lambda value: value.to(dtype) if value.is_floating_point() else value)
