"""The function ``certify``."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lieattn._core.checks import TOLERANCE, check_arguments, check_count, shown
from lieattn._core.values import agreeing
from lieattn.certify._causes import diagnose, extents_away, known_group, only_coarse
from lieattn.certify._certificate import Certificate, Row
from lieattn.certify._elements import Element, elements_of, outside_of
from lieattn.certify._moves import (
    Kind,
    Move,
    check_kind,
    clouds_of_images,
    is_defined,
    motion,
    other_images,
    permutation,
    raster_motion,
    scrambled,
    sizes_of,
)
from lieattn.certify._probe import FromCalculator, Probe, is_calculator
from lieattn.certify._rows import (
    FORCES,
    Task,
    conservation,
    continuity_rows,
    degenerate_rows,
    kinds_of_outputs,
    move_rows,
    not_finite,
    spreads_of,
)
from lieattn.certify._search import search
from lieattn.groups import E, FiniteGroup, Group, dihedral, full_octahedral
from lieattn.models import EnergyForceStress, Symmetry
from lieattn.nn import Heads

TOLERANCES: Mapping[torch.dtype, float] = TOLERANCE
"""Largest allowed error for each dtype, relative to max(1, largest output), if rounding does not explain more."""


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    """Make GPUs multiply in float32. The default of torch for convolutions is TF32, which has 10 bits."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@torch.inference_mode(False)  # otherwise derivatives are impossible
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
    """Measure the equivariance of a network.

    *Moves.* The points x_i of each cloud are moved to A x_i + t, the other inputs are transformed accordingly, and the
    outputs are compared with the transformed outputs of the original clouds. For a finite group, A runs over all
    elements, and t is random, of about the size of the cloud. For a Lie group, the elements are random, and special
    ones are added (one near the identity, a half turn, a reflection). Translations are included only if the group
    contains them: SE(3) does, SO(3) does not. Moves are computed in float64 and rounded to the tested dtype. Images are
    moved twice: with their pixels in the original order and, if the move maps the lattice to itself, in raster order.

    *Networks.* The measurements use a copy of the network, in eval mode, on the device of its parameters, and without
    TF32 on GPUs. The network may also be a function of a batch, a function of tensors whose arguments have the names of
    attributes of the data (``forward(z, pos, batch)``), or an ASE calculator, which is measured in float64.

    *Periodic clouds.* In clouds with a ``cell``, single points are shifted by vectors of the lattice. This is left out
    if the data have edges, which would change.

    *Search.* With ``group="search"``, the symmetry is searched among translations, rotations and reflections, finite
    groups about the coordinate axes, permutations of the points, periodic images, and scales.

    *Broken promises.* :attr:`Certificate.diagnoses` name the first layer that breaks a symmetry, and the likely cause.

    *Forces.* If the outputs include an energy and forces, the forces must be minus the gradient of the energy.

    *Degenerate clouds.* The moves are also applied to clouds, derived from the last one, in which a frame or a
    direction is not determined: one point, two points, coincident points, points on a line, and a square or an
    octahedron. Outputs of the kind rotation are not judged there, because rotations may map such a cloud to itself.

    *Constant outputs.* A constant output is invariant to everything. So each point is also moved at random. If an
    output never differs between clouds by more than rounding, the verdict is *vacuous*.

    *Continuity.* The smallest cloud is changed along two paths: one of its points crosses the cloud and leaves it, and
    the cloud is stretched until two of its second moments cross. The steps in which an output or its derivative changes
    most are divided repeatedly, until only a jump can remain.

    The promise of a network is read from its attributes, which are all optional: ``guarantee`` (in words), ``symmetry``
    (a :class:`lieattn.models.Symmetry`, or a group; with a finite group, translations are promised too; None if nothing
    is exact), ``vector_inputs`` (names of the attributes of the data that are vectors), ``field_inputs``
    (representations of others by name), ``kind`` (of its outputs),
    ``sees_order`` (whether the outputs depend on the order of the points), ``sees_images`` (whether they depend on
    which periodic image of a point is given; also read from the parts of the network, and for one of several outputs
    from its head), ``jumps`` (where outputs jump, in words; if it is empty, continuity is promised) and ``has_kinks``
    (whether first derivatives jump; true if absent). Modules around a network, such as
    :class:`lieattn.models.EnergyForces`, adopt these attributes.

    Parameters
    ----------
    network
        Called with a ``Batch``, or with its attributes. It returns ``[clouds, *]`` or ``[points, *]``, or a mapping or
        named tuple of such tensors.
    data
        Clouds with ``pos`` ``[points, dim]``, or images ``[images, channels, rows, columns]``, for networks that are
        called with images.
    group
        Group to test, or ``"search"``. By default, this is the symmetry that the network promises.
    inputs
        :data:`Kind` of attributes of the data by name, in addition to ``vector_inputs``, ``field_inputs`` and the
        vectors of a periodic ``cell``.
    outputs
        :data:`Kind` of the output, or of several outputs by name. The default is ``network.kind``, or else invariant.
    dtypes
        Floating dtypes of weights and inputs.
    tolerances
        Largest allowed error for each dtype, relative to max(1, largest output). Defaults to :data:`TOLERANCES`, and in
        dtypes coarser than float64, to what rounding explains if this is more and the network passes in float64.
    elements
        Number of random elements of a Lie group.
    rotations
        Number of random motions outside of the group, see :attr:`Certificate.unique`. These are rotations, one of them
        replaced by a reflection if a finite group has none; or reflections, if the group contains all rotations. For
        finite groups, elements of larger groups that contain them are added unless the number is 0: see
        docs/certify.md.
    permute
        Whether to reorder the points of each cloud, and to renumber them in ``edge_index``, ``face`` and other
        attributes that PyTorch Geometric shifts in batches. By default, points are reordered unless the clouds have a
        ``grid``, which means that they are in raster order. Nothing is promised if the network has ``sees_order``.
    continuity
        Whether to search for jumps, which takes some hundred evaluations. This is done in float64, and only if
        ``dtypes`` contains it.
    seed
        Seed of all random numbers.

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
    >>> certify(MeanRadius(), cloud, cyclic(4)).passed  # distances from the origin change under translations
    False
    >>> class Center(nn.Module):
    ...     def forward(self, data):
    ...         return global_mean_pool(data.pos, data.batch)
    >>> certify(Center(), cloud, SE(2), outputs="position").passed
    True
    """
    check_arguments(certify, locals())
    as_images = isinstance(data, Tensor)
    network, clouds, dtypes = _prepared(network, data, dtypes)
    on_lattice = any(cloud.get("grid") is not None for cloud in clouds)
    kinds = _kinds_of_inputs(network, inputs, clouds)
    check_count("elements", elements)
    check_count("rotations", rotations, least=0)
    limits = _limits(dtypes, tolerances)
    probes = {dtype: Probe(network, dtype, as_images) for dtype in dtypes}
    finest = min(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    probe, limit = probes[finest], limits[finest]
    generator = torch.Generator().manual_seed(seed)
    searched: tuple[Row, ...] = ()
    sees_order = bool(getattr(network, "sees_order", False))
    if isinstance(group, str):
        known = outputs is not None or hasattr(network, "kind")
        stated = kinds_of_outputs(network, outputs, probe(clouds)) if known else None
        promise, outputs, searched, sees_order, sees_images = search(probe, clouds, kinds, stated, limit, generator)
        seeing = None if sees_images else frozenset[str]()
    else:
        promise, seeing = _promised(network, group), _seeing_images(network, probe, clouds)
    group, exact = promise.group, promise.group is not None
    dim = _dimension(group, clouds, kinds["pos"])
    moves = list(_motions(promise, clouds, elements, as_images, generator))
    references = {dtype: one(clouds) for dtype, one in probes.items()}
    returned = kinds_of_outputs(network, outputs, references[finest])
    task = Task(clouds, kinds, returned, promise, limits, generator)
    if not as_images:
        if not on_lattice if permute is None else permute:
            moves.append(permutation(clouds, dim, exact and not (permute is None and sees_order), generator))
        moves += other_images(clouds, dim, exact and seeing is not None, generator, seeing or frozenset())
        outside = list(outside_of(group, dim, rotations, generator))
        if promise.origin and rotations > 0:
            label = f"translation, outside of {promise.name}"
            outside.append(Element(label, torch.eye(dim, dtype=torch.float64), None))
        fields = [*kinds.values(), *returned.values()]
        outside = [element for element in outside if all(is_defined(one, element.linear) for one in fields)]
        moves += [motion("outside", element, clouds, False, generator) for element in outside]
    # Every point is moved at random, once with other distances from the center, once without.
    centered = group is not None and (group.is_affine or isinstance(group, FiniteGroup))
    others = [
        [scrambled(one, kinds["pos"], dim, centered=centered, scaled=scaled, generator=generator) for one in clouds]
        for scaled in (True, False)
    ]
    rows: list[Row] = []
    coarse = {dtype for dtype in dtypes if dtype != torch.float64 and dtype not in (tolerances or {})}
    away = extents_away(clouds, promise)
    rounded = set[torch.dtype]() if away else coarse  # dtypes whose rounding may explain errors
    for dtype, one in probes.items():
        rows += not_finite(one, references[dtype])
        rows += move_rows(one, task, moves, dtype in rounded, references[dtype])
    if continuity and finest == torch.float64 and not on_lattice:
        rows += continuity_rows(probe, task, dim)
    spreads, sizes = spreads_of(probe, clouds, others, references[finest])
    alone = [row.passed for row in rows if row.check == "alone"]
    rows += degenerate_rows(probes, task, sizes, rounded, bool(alone) and all(alone))
    if not as_images and not returned.keys().isdisjoint(FORCES):
        rows += conservation(probe, clouds, returned, exact, generator)
    failed = {row.check for row in rows if row.passed is False and row.dtype == probe.precision}
    if searched:
        # Diagnose everything that is missing to the largest group. Pixels in raster order have no other order.
        failed |= {"element", "alone"} if on_lattice else {"element", "permutation", "image", "alone"}
        largest = E(dim) if not on_lattice else dihedral(4) if dim == 2 else full_octahedral()
        task = replace(task, promise=Symmetry(largest))
    diagnoses = diagnose(probe, task, failed, known_group(network, group if searched else None))
    rounding = TOLERANCES.get(finest, limit)
    no_guarantee = "found by a search" if searched else "the network states no guarantee"
    return Certificate(
        guarantee=str(getattr(network, "guarantee", no_guarantee)),
        group=None if group is None else promise.name if promise.origin else group.name,
        order=group.order if isinstance(group, FiniteGroup) else None,
        clouds=len(clouds),
        points=int(sizes_of(clouds).sum()),
        spread=max(spreads.values()),
        seed=seed,
        rows=(*searched, *rows),
        vacuous=tuple(name for name, spread in spreads.items() if spread <= rounding * max(1.0, sizes[name])),
        device=str(probe.device),
        diagnoses=(*only_coarse(rows, finest, away), *(diagnoses if failed else ())),
    )


def _prepared(
    network: Any, data: Batch | Data | Sequence[Data] | Tensor, dtypes: Sequence[torch.dtype]
) -> tuple[Any, list[Data], Sequence[torch.dtype]]:
    """Return the network as a function of a batch, the clouds, and the dtypes (float64 alone for calculators)."""
    clouds = clouds_of_images(data) if isinstance(data, Tensor) else _clouds(data)
    if is_calculator(network):
        return FromCalculator(network, clouds), clouds, [torch.float64]
    if not callable(network) or isinstance(network, type):
        expected = "a network, a function of a batch, or an ASE calculator"
        raise TypeError(f"network: expected {expected}, got {shown(network)}")
    return network, clouds, dtypes


def _seeing_images(network: Any, probe: Probe, clouds: list[Data]) -> frozenset[str] | None:
    """Return the outputs that depend on the given periodic images of the points, as the network or its parts state.

    None stands for all outputs. Otherwise all outputs have the names of heads or derivatives, and only some of the
    heads state it.
    """
    parts = list(network.modules()) if isinstance(network, nn.Module) else [network]
    heads = [pair for part in parts if isinstance(part, Heads) for pair in part.heads.items()]
    of_heads = {id(part): name for name, head in heads for part in head.modules()}
    found = {of_heads.get(id(part)) for part in parts if getattr(part, "sees_images", False)}
    if found and (None in found or not probe(clouds).keys() <= {*of_heads.values(), *EnergyForceStress._fields}):
        return None
    return frozenset(name for name in found if name is not None)


def _limits(
    dtypes: Sequence[torch.dtype], tolerances: Mapping[torch.dtype, float] | None
) -> Mapping[torch.dtype, float]:
    limits = {**TOLERANCES, **(tolerances or {})}
    for dtype, limit in limits.items():
        if isinstance(limit, bool) or not isinstance(limit, Real) or not limit >= 0:
            raise ValueError(f"tolerances[{dtype}]: expected a number of at least 0, got {limit!r}")
    if not dtypes:
        raise ValueError("dtypes: expected at least one, got none")
    for dtype in dtypes:
        if not dtype.is_floating_point or dtype not in limits:
            raise TypeError(f"dtypes: expected floating dtypes with a tolerance, got {dtype}")
    return limits


def _motions(
    promise: Symmetry, clouds: list[Data], count: int, as_images: bool, generator: torch.Generator
) -> Iterator[Move]:
    """Yield the moves by all tested elements and, if a raster is mapped to itself, the same in raster order."""
    group = promise.group
    if group is None:
        return
    if as_images and not isinstance(group, FiniteGroup):
        raise ValueError(
            f"group: expected a finite group for images as a tensor, got {group}; pass the pixels as points"
        )
    for element in elements_of(group, count, generator, translations=promise.translations):
        move = motion("element", element, clouds, True, generator)
        written = raster_motion("element" if as_images else "raster", move, clouds)
        if as_images and written is None:
            raise ValueError(
                f"group: element {element.label} of {group.name} does not map the lattice of pixels to itself, so "
                f"images as a tensor would have to be resampled; pass their pixels as points"
            )
        if not as_images:
            yield move
        if written is not None and (as_images or any((order.diff() != 1).any() for order in written.orders or ())):
            yield written


def _clouds(data: Batch | Data | Sequence[Data]) -> list[Data]:
    """Return the clouds on the CPU, where they are moved.

    ValueError is raised if positions are missing, or if the clouds differ in their attributes.
    """
    clouds = data.to_data_list() if isinstance(data, Batch) else [data] if isinstance(data, Data) else list(data)
    if not clouds:
        raise ValueError("data: expected at least one cloud, got none")
    for index, cloud in enumerate(clouds):
        pos = cloud.get("pos")
        if pos is None or pos.ndim != 2 or not pos.is_floating_point() or len(pos) == 0:
            found = "none" if pos is None else f"{tuple(pos.shape)} of {pos.dtype}"
            raise ValueError(f"data: cloud {index} needs pos, floating [points, dim] with points, got {found}")
    return agreeing([copy.copy(cloud).cpu() for cloud in clouds])


def _promised(network: Any, given: Group | None) -> Symmetry:
    """Return the symmetry to measure: that of the given group, with translations if it is finite, or of the network."""
    if given is None and not hasattr(network, "symmetry"):
        raise ValueError(
            "group: expected a group, or 'search', since the network has no attribute `symmetry`, got None"
        )
    stated = network.symmetry if given is None else given
    if stated is not None and not isinstance(stated, Symmetry | Group):
        raise TypeError(f"group: expected a FiniteGroup or a LieGroup, got {stated!r}")
    return Symmetry.stated_by(network) if given is None else Symmetry(given)


def _dimension(group: Group | None, clouds: list[Data], kind: Kind) -> int:
    width = int(clouds[0].pos.shape[1])
    dim = width if group is None else group.dim
    for cloud in clouds:
        if kind == "position" and cloud.pos.shape[1] != dim:
            acts = "the first cloud has" if group is None else f"{group.name} acts on"
            raise ValueError(
                f"group: {acts} {dim} coordinates, the clouds have {cloud.pos.shape[1]}; if pos contains more than "
                f"positions, pass for example inputs={{'pos': ('position', 'vector')}}"
            )
    return dim


def _kinds_of_inputs(network: Any, given: Mapping[str, Kind] | None, clouds: list[Data]) -> dict[str, Kind]:
    """Return the kinds of attributes by name: positions, cells, the vectors of the network, and the given ones."""
    vectors = getattr(network, "vector_inputs", ())
    if isinstance(vectors, str):
        raise TypeError(f"network: expected vector_inputs to be a sequence of names, got {vectors!r}")
    named: dict[str, Kind] = {name: "vector" for name in vectors if name != "pos"}  # seen from the origin
    named |= getattr(network, "field_inputs", {})
    for name, kind in (given or {}).items():
        check_kind(f"inputs[{name!r}]", kind)
        for index, cloud in enumerate(clouds):
            if name not in cloud:
                raise ValueError(f"inputs: expected attributes of the clouds, but cloud {index} has no {name!r}")
    return {"pos": "position", "cell": "vector", **named, **(given or {})}
