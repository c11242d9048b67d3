"""The function ``certify``: what is measured, in which order, and what the certificate says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from lieattn._checks import TOLERANCE, check_arguments, check_count, shown
from lieattn.certify._causes import diagnose, known_group
from lieattn.certify._certificate import Certificate, Row
from lieattn.certify._forces import conservation
from lieattn.certify._moves import (
    Kind,
    Move,
    check_kind,
    clouds_of_images,
    elements_of,
    motion,
    outside_of,
    permutation,
    raster_motion,
    scrambled,
    sizes_of,
)
from lieattn.certify._probe import FromCalculator, Probe, is_calculator
from lieattn.certify._rows import (
    continuity_rows,
    degenerate_rows,
    kinds_of_outputs,
    move_rows,
    not_finite,
    spreads_of,
)
from lieattn.certify._search import search
from lieattn.groups import E, FiniteGroup, Group, dihedral, full_octahedral
from lieattn.models import Symmetry

TOLERANCES: Mapping[torch.dtype, float] = TOLERANCE
"""Largest error allowed per dtype, in units of max(1, largest output)."""


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    """Context in which GPUs multiply in float32, not in TF32 with its 10 bits, torch's default for convolutions."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@_without_tf32()
def certify(
    network: Any,
    data: Batch | Data | Sequence[Data] | Tensor,
    group: Group | Literal["search"] | None = None,
    *,
    inputs: Mapping[str, Kind] | None = None,
    outputs: Kind | Mapping[str, Kind] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64),
    tolerances: Mapping[torch.dtype, float] | None = None,
    elements: int = 8,
    rotations: int = 4,
    permute: bool | None = None,
    continuity: bool = True,
    seed: int = 0,
) -> Certificate:
    """Measure the equivariance of a network's outputs.

    *Moves.* The points x_i of each cloud are moved to A x_i + t, other inputs turn along, and the outputs are compared
    with what they should become. For a finite group, A runs over all elements, and t is drawn, of about the size of
    the cloud. For a Lie group, elements are drawn and special ones are added (near the identity, half turns,
    reflections); there are translations only if they belong to the group, as in SE(3) but not in SO(3). Moves are
    computed in float64 and rounded to the dtype tested. Images are moved twice: with their pixels in the order they
    had and, if the move maps the lattice to itself, in raster order.

    *Networks.* A copy of the network is measured, in eval mode and on the device of its parameters, on GPUs without
    TF32. It may also be a function of a batch, a function of tensors whose arguments are named after attributes of the
    data (``forward(z, pos, batch)``), or a calculator of ASE, which is measured in float64.

    *Search.* With ``group="search"`` the symmetry is looked for among translations, rotations and reflections, finite
    groups about the coordinate axes, permutations of the points, and scales.

    *Broken promises.* :attr:`Certificate.diagnoses` name the first layer that breaks a promise, and the likely cause.

    *Forces.* If outputs have both an energy and forces, the forces must be minus the gradient of the energy.

    *Degenerate clouds.* Errors like to hide where a frame or a direction is not determined. So the moves are repeated
    on clouds of one point, of two, of coincident points, of points on a line, and on a square or an octahedron, all
    made from the last cloud. Outputs of the kind rotation are not judged there, since such a cloud may have rotations
    that map it to itself.

    *Constant outputs.* A network whose output never changes is invariant to everything. So the points are also moved
    at random, each by itself. If an output then differs between clouds by no more than rounding, the verdict is
    *vacuous*.

    *Continuity.* The smallest cloud is changed along two paths: one of its points crosses the cloud and leaves it, and
    the cloud is stretched until two of its second moments cross. The steps of a path on which an output or its
    derivative changes most are divided again and again, until only a jump can be left, such as where a point enters a
    neighborhood or a frame turns over.

    What a network promises is read from its attributes, all optional: ``guarantee`` (in words), ``symmetry`` (a
    :class:`lieattn.models.Symmetry`; or a group, if finite together with the translations; None for nothing exactly),
    ``vector_inputs`` (names of attributes of the data that turn along), ``kind`` (of its outputs), ``sees_order``
    (true where the order of the points matters), ``jumps`` (where outputs jump, in words; continuity is promised
    where it is empty) and ``has_kinks`` (whether their first derivatives do).

    Parameters
    ----------
    network
        Called with a ``Batch``, or attributes of it; returns ``[clouds, *]`` or ``[points, *]``, or a mapping or named
        tuple of such.
    data
        Clouds with ``pos`` ``[points, dim]``; or images ``[images, channels, rows, columns]``, with which the network
        is called then.
    group
        The group to test, or ``"search"``; by default what the network promises.
    inputs
        :data:`Kind` of attributes of the data by name, beside ``vector_inputs`` and the vectors of a periodic ``cell``.
    outputs
        :data:`Kind` of the outputs, for several by name. By default ``network.kind``, or invariant.
    dtypes
        Floating dtypes of weights and inputs.
    tolerances
        Largest error per dtype in units of max(1, largest output); :data:`TOLERANCES` by default.
    elements
        Number of random elements of a Lie group.
    rotations
        Number of random motions outside of the group, see :attr:`Certificate.unique`: rotations, one of them a
        reflection if a finite group has none; reflections, if all rotations are in it. If there are any, elements of
        larger groups that hold a finite one are tried, too: see docs/certify.md.
    permute
        Whether to reorder the points of each cloud, and to renumber them in ``edge_index``, ``face`` and other
        attributes that PyTorch Geometric shifts in batches. By default this is done unless the clouds have a
        ``grid``, which says that the points are in raster order. For a network that ``sees_order`` nothing is promised.
    continuity
        Whether to look for jumps, which takes some hundred evaluations; in float64, if that is among the dtypes.
    seed
        Seed of everything that is drawn at random.

    Raises
    ------
    TypeError, ValueError
        If a dtype is not floating or has no tolerance, if there is no cloud, if no group is given and the network has
        no ``symmetry``, if an argument is not a group or kind, or if dimensions and shapes do not fit.

    Examples
    --------
    >>> from lieattn.groups import SE, cyclic
    >>> from torch_geometric.nn import global_mean_pool
    >>> from torch import nn
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
    check_arguments(certify, locals())
    as_images = isinstance(data, Tensor)
    network, clouds, dtypes = _taken(network, data, dtypes)
    lattice = any(cloud.get("grid") is not None for cloud in clouds)
    kinds = _kinds_of_inputs(network, inputs)
    check_count("elements", elements)
    limits = _limits(dtypes, tolerances)
    probes = {dtype: Probe(network, dtype, as_images) for dtype in dtypes}
    finest = min(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    probe, limit = probes[finest], limits[finest]
    generator = torch.Generator().manual_seed(seed)
    searched: tuple[Row, ...] = ()
    ordered = bool(getattr(network, "sees_order", False))
    if isinstance(group, str):
        known = outputs is not None or hasattr(network, "kind")
        stated = kinds_of_outputs(network, outputs, probe(clouds)) if known else None
        promise, outputs, searched, ordered = search(probe, clouds, kinds, stated, limit, generator)
    else:
        promise = _promised(network, group)
    group, exact = promise.group, promise.group is not None
    dim = _dimension(group, clouds, kinds["pos"])
    moves = list(_motions(promise, clouds, elements, as_images, generator))
    if not as_images:
        if not lattice if permute is None else permute:
            moves.append(permutation(clouds, dim, exact and not (permute is None and ordered), generator))
        still = outside_of(group, dim, rotations, generator)
        moves += [motion("outside", element, clouds, False, generator) for element in still]
    others = _scrambled(clouds, kinds["pos"], dim, group, generator)
    rows = [
        row
        for dtype, one in probes.items()
        for row in (*not_finite(one, clouds), *move_rows(one, clouds, moves, kinds, outputs, limits[dtype], exact))
    ]
    if continuity and finest == torch.float64 and not lattice:
        rows += continuity_rows(probe, clouds, dim, limit, generator)
    spreads, sizes = spreads_of(probe, clouds, others)
    rows += degenerate_rows(probes, clouds[-1], kinds, outputs, limits, promise, sizes, generator)
    named = kinds_of_outputs(network, outputs, probe(clouds))
    if not as_images:
        rows += conservation(probe, clouds, named, exact, generator)
    failed = {row.check for row in rows if row.passed is False and row.dtype == probe.precision}
    if searched:
        # All that is missing to the largest group is diagnosed. Pixels in raster order have no other order.
        failed |= {"element", "alone"} if lattice else {"element", "permutation", "alone"}
    asked = Symmetry(_everything(dim, clouds, as_images)) if searched else promise
    had = known_group(network, group if searched else None)
    told = diagnose(probe, clouds, kinds, named, asked, failed, limit, generator, had)
    rounding = TOLERANCES.get(finest, limit)
    stated_guarantee = "found by a search" if searched else "the network states no guarantee"
    return Certificate(
        guarantee=str(getattr(network, "guarantee", stated_guarantee)),
        group=None if group is None else group.name,
        order=group.order if isinstance(group, FiniteGroup) else None,
        clouds=len(clouds),
        points=int(sizes_of(clouds).sum()),
        spread=max(spreads.values()),
        seed=seed,
        rows=(*searched, *rows),
        vacuous=tuple(name for name, spread in spreads.items() if spread <= rounding * max(1.0, sizes[name])),
        device=str(probe.device),
        diagnoses=tuple(told) if failed else (),
    )


def _taken(
    network: Any, data: Batch | Data | Sequence[Data] | Tensor, dtypes: Sequence[torch.dtype]
) -> tuple[Any, list[Data], Sequence[torch.dtype]]:
    """The network as a function of a batch, the clouds, and the dtypes; a calculator of ASE has float64 alone."""
    clouds = clouds_of_images(data) if isinstance(data, Tensor) else _clouds(data)
    if is_calculator(network):
        return FromCalculator(network, clouds), clouds, [torch.float64]
    if not callable(network):
        expected = "a network, a function of a batch, or a calculator of ASE"
        raise TypeError(f"network: expected {expected}, got {shown(network)}")
    return network, clouds, dtypes


def _scrambled(
    clouds: list[Data], kind: Kind, dim: int, group: Group | None, generator: torch.Generator
) -> list[list[Data]]:
    """The clouds with every point moved at random, each by itself: once with their distances changed, once not."""
    centered = group is not None and (group.is_affine or isinstance(group, FiniteGroup))
    return [
        [scrambled(cloud, kind, dim, centered=centered, scaled=scaled, generator=generator) for cloud in clouds]
        for scaled in (True, False)
    ]


def _everything(dim: int, clouds: list[Data], as_images: bool) -> Group:
    """The largest group that a network could have: of what it lacks, the reasons are told."""
    if not as_images and clouds[0].get("grid") is None:
        return E(dim)
    return dihedral(4) if dim == 2 else full_octahedral()


def _limits(
    dtypes: Sequence[torch.dtype], tolerances: Mapping[torch.dtype, float] | None
) -> Mapping[torch.dtype, float]:
    limits = {**TOLERANCES, **(tolerances or {})}
    if not dtypes:
        raise ValueError("dtypes: expected at least one, got none")
    for dtype in dtypes:
        if not dtype.is_floating_point or dtype not in limits:
            raise TypeError(f"dtypes: expected floating dtypes with a tolerance, got {dtype}")
    return limits


def _motions(
    promise: Symmetry, clouds: list[Data], count: int, as_images: bool, generator: torch.Generator
) -> Iterator[Move]:
    """Moves by all elements that are tried: of points and, if a raster maps to itself, also in raster order."""
    group = promise.group
    if group is None:
        return
    if as_images and not isinstance(group, FiniteGroup):
        raise ValueError(
            f"group: expected a finite group for images as a tensor, got {group}; pass the pixels as points for others"
        )
    for element in elements_of(group, count, generator, translations=promise.translations):
        move = motion("element", element, clouds, True, generator)
        written = raster_motion("element" if as_images else "raster", move, clouds)
        if as_images and written is None:
            raise ValueError(
                f"group: element {element.label} of {group.name} does not keep the pixels' lattice, so images as a "
                f"tensor would have to be resampled; pass their pixels as points"
            )
        if not as_images:
            yield move
        if written is not None and (as_images or any((order.diff() != 1).any() for order in written.orders or ())):
            yield written


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


def _promised(network: Any, given: Group | None) -> Symmetry:
    """The symmetry to measure: that of the given group, with translations if it is finite, or the network's own."""
    if given is None and not hasattr(network, "symmetry"):
        raise ValueError("group: must be given, since the network has no attribute `symmetry`")
    stated = network.symmetry if given is None else given
    if isinstance(stated, Symmetry):
        return stated
    if stated is not None and not isinstance(stated, Group):
        raise TypeError(f"group: expected a FiniteGroup or a LieGroup, got {stated!r}")
    return Symmetry(stated)


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


def _kinds_of_inputs(network: Any, given: Mapping[str, Kind] | None) -> dict[str, Kind]:
    """Kinds of positions, periodic cells, the vectors that a network names, and what is given, by attribute."""
    named: dict[str, Kind] = {name: "vector" for name in getattr(network, "vector_inputs", ())}
    for name, kind in (given or {}).items():
        check_kind(f"inputs[{name!r}]", kind)
    return {"pos": "position", "cell": "vector", **named, **(given or {})}
