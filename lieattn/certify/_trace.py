"""Features of all modules of a network before or after a change of the clouds."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data

from lieattn.certify._moves import Move, raster_motion, still
from lieattn.certify._probe import Probe
from lieattn.geometry import pixel_positions
from lieattn.groups import FiniteGroup

_MOST_ROWS = 4096  # tensors with more rows are only compared in their order
_IRREPS = 1e-6  # accuracy of the matrices of e3nn in every dtype


class Call(NamedTuple):
    """One call of a module.

    ``inputs`` and ``outputs`` are all tensors among its inputs and outputs, float64 or int64 on the CPU. ``coarsest``
    is the floating dtype with the fewest digits among the results of all operations in the call.
    """

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    coarsest: torch.dtype


@dataclass(frozen=True)
class Change:
    """The difference between the original and the changed clouds.

    Attributes
    ----------
    move
        The motion of the clouds.
    sizes
        Number of points of each original cloud, int64 ``[clouds]``.
    tolerance
        Largest difference between equal features, relative to the largest value (or 1).
    group, element
        The finite group that contains ``linear``, if there is one, and the index of the element.
    as_images
        Whether the network takes images instead of points.
    alone
        Index of the cloud that is alone after the change, or None if all clouds remain.
    irreps
        Actions of the motion on features of e3nn irreps, by their dimension, see :func:`irreps_of`.
    """

    move: Move
    sizes: Tensor
    tolerance: float
    group: FiniteGroup | None = None
    element: int = 0
    as_images: bool = False
    alone: int | None = None
    irreps: dict[int, list[Callable[[Tensor], Tensor]]] = field(default_factory=dict)

    @property
    def order(self) -> Tensor | None:
        """The former index of the point at each place, int64 ``[points]``, or None if points are not reordered."""
        return self.move.order(self.sizes)


class _Recorder(TorchDispatchMode):
    """Records the calls of modules in the order in which they end, and the coarsest precision in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._inputs: list[tuple[Tensor, ...]] = []
        self._coarsest: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, tuple | list) else (found,):
            if isinstance(value, Tensor) and value.is_floating_point() and self._coarsest:
                self._coarsen(value.dtype)
        return found

    def _coarsen(self, dtype: torch.dtype) -> None:
        self._coarsest[-1] = max(self._coarsest[-1], dtype, key=lambda one: torch.finfo(one).eps)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs.append(tuple(_tensors((args, kwargs))))
        self._coarsest.append(torch.float64)

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        coarsest = self._coarsest.pop()
        if self._coarsest:
            self._coarsen(coarsest)
        self.calls.append(Call(name, module, self._inputs.pop(), tuple(_tensors(output)), coarsest))


def record(probe: Probe, clouds: Sequence[Data]) -> list[Call]:
    """Call the network once, and return the calls of its modules in the order in which they ended.

    The list is empty for a plain function.
    """
    if not isinstance(probe.network, nn.Module):
        return []
    recorder, hooks = _Recorder(), []
    for name, module in probe.network.named_modules():
        hooks.append(module.register_forward_pre_hook(recorder.enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(recorder.leave, name)))
    try:
        with recorder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            probe(clouds)
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.calls


def law(first: Tensor, second: Tensor, change: Change) -> str | None:
    """Return the law of transformation of a floating tensor, in words, or None if it follows no known law."""
    if first.ndim == 0 or second.ndim == 0:
        return "invariant" if _close(first, second, change) else None
    for before, after in _arranged(first, second, change):
        if _close(before, after, change):
            return "invariant"
        for name, one in _laws(before, after, change):
            if before.shape == after.shape and one:
                return name
    return None


def edges_law(first: Tensor, second: Tensor, change: Change) -> bool:
    """Return whether indices ``[2, edges]`` or ``[points, k]`` denote the same pairs of points as before."""
    order = change.order
    if order is None or first.ndim != 2 or first.numel() == 0 or len(first) not in (2, len(order)):
        return True
    highest = max(int(first.max()), int(second.max()) if second.numel() else 0)
    if highest >= len(order):
        return True  # these are indices of something other than points
    first, second = first.long(), second.long()
    if len(first) == 2:
        pairs = [{(int(a), int(b)) for a, b in edges.T} for edges in (first, order[second])]
        return pairs[0] == pairs[1]
    return torch.equal(first[order].sort(dim=1).values, order[second].sort(dim=1).values)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested values, except those of the clouds themselves, which every change affects."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided and value.numel():
            value = value.detach()
            yield (value.double() if value.is_floating_point() else value).cpu().clone()
    elif isinstance(value, Data):
        return
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Fields without an argument keep what follows from the others, with rows in any order.
        yield from _tensors([getattr(value, part.name) for part in dataclasses.fields(value) if part.init])


def _arranged(first: Tensor, second: Tensor, change: Change) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs to compare: the first tensor with its rows or pixels in the new order, and the second tensor."""
    if change.alone is not None:
        yield from _of_one_cloud(first, second, change, change.alone)
        return
    order = change.order
    dim = len(change.move.linear)
    if change.as_images and first.ndim >= 2 + dim:
        pixels = _pixels(tuple(first.shape[-dim:]), change.move.linear)
        if pixels is not None:
            order, new = pixels
            yield first.flatten(-dim)[..., order].unflatten(-1, new), second
        return
    if first.shape != second.shape:
        return
    if order is not None and len(first) == len(order):
        yield first[order], second
    else:
        yield first, second
    numbers = (len(change.sizes), int(change.sizes.sum()))
    if order is not None and len(first) not in numbers and len(first) <= _MOST_ROWS:
        before, after = (edges.reshape(len(edges), -1).sort(dim=0).values for edges in (first, second))
        yield before, after  # values of edges, whose order may differ


def _of_one_cloud(first: Tensor, second: Tensor, change: Change, cloud: int) -> Iterator[tuple[Tensor, Tensor]]:
    points, size, start = int(change.sizes.sum()), int(change.sizes[cloud]), int(change.sizes[:cloud].sum())
    if first.ndim == second.ndim and (len(first), len(second)) == (len(change.sizes), 1):
        # There is one row for each cloud, which may be padded to the size of the largest cloud.
        yield first[cloud : cloud + 1][tuple(slice(length) for length in second.shape)], second
    elif (len(first), len(second)) == (points, size):
        yield first[start : start + size], second
    elif first.shape[1:] == second.shape[1:] and len(second) <= len(first) <= _MOST_ROWS:
        apart = torch.cdist(
            second.reshape(len(second), -1), first.reshape(len(first), -1), compute_mode="donot_use_mm_for_euclid_dist"
        )
        yield first[apart.argmin(dim=1)], second


def _laws(first: Tensor, second: Tensor, change: Change) -> Iterator[tuple[str, bool]]:
    if first.shape != second.shape:
        return
    dim = len(change.move.linear)
    for axis in range(first.ndim - 1, 0, -1):
        if first.shape[axis] == dim and not change.as_images:
            turned = (first.movedim(axis, -1) @ change.move.linear.mT).movedim(-1, axis)
            yield "vectors", _close(turned, second, change)
    if not change.as_images and first.ndim > 1:
        yield "positions or vectors, beside invariants", _columns(first, second, change)
    for act in change.irreps.get(first.shape[-1], ()):
        yield "irreps", _close(act(first), second, change, _IRREPS)
    if change.group is not None and change.group.order > 1:
        order = change.group.order
        seats = change.group.translate(change.element, torch.arange(order).double()[None, :, None]).long().flatten()
        for axis in range(1, first.ndim):
            length = first.shape[axis]
            for size in {order, length // order} if length % order == 0 else ():
                grouped = [t.unflatten(axis, (length // size, size)) for t in (first, second)]
                inner = axis + 1 if size == order else axis
                yield "fibers permuted", _close(grouped[0].index_select(inner, seats), grouped[1], change)
    if first.ndim == 3 and 1 < first.shape[1] <= 64:
        yield "frames in another order", _close(first.sort(dim=1).values, second.sort(dim=1).values, change)


def _columns(first: Tensor, second: Tensor, change: Change) -> bool:
    """Return whether the last axis consists of invariants, vectors and positions."""
    dim, columns = len(change.move.linear), first.shape[-1]
    shift = None
    if len(first) in (len(change.sizes), int(change.sizes.sum())):
        per_cloud = len(first) == len(change.sizes)
        shift = change.move.shifts if per_cloud else change.move.shifts.repeat_interleave(change.sizes, dim=0)
        shift = shift.view(len(first), *[1] * (first.ndim - 2), dim)
    column = 0
    while column < columns:
        here = slice(column, column + dim)
        turned = first[..., here] @ change.move.linear.mT if column + dim <= columns else None
        if _close(first[..., column], second[..., column], change):
            column += 1
        elif turned is not None and (
            _close(turned, second[..., here], change)
            or (shift is not None and _close(turned + shift, second[..., here], change))
        ):
            column += dim
        else:
            return False
    return True


def _close(first: Tensor, second: Tensor, change: Change, least: float = 0.0) -> bool:
    if first.shape != second.shape:
        return False
    if first.numel() == 0:
        return True
    size = max(1.0, float(first.abs().max()))
    return bool(((first - second).abs() <= max(change.tolerance, least) * size).all())


def _pixels(sides: tuple[int, ...], linear: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """Return the order of the pixels of a rotated image in its new raster, and the sides of the new raster.

    None is returned if the rotated pixels are not a raster.
    """
    image = Data(pos=pixel_positions(*sides), grid=torch.tensor([sides]))
    found = raster_motion("", replace(still("", [image], len(linear)), linear=linear), [image])
    return None if found is None or not found.orders or not found.grids else (found.orders[0], found.grids[0])


def irreps_of(network: Callable[..., Any], linear: Tensor) -> dict[int, list[Callable[[Tensor], Tensor]]]:
    """Return functions that apply ``linear`` to features of e3nn irreps, by the dimension of the features.

    The irreps are the attributes ``irreps_...`` of the modules of the network.
    """
    found: dict[str, Any] = {}
    modules: Iterable[nn.Module] = network.modules() if isinstance(network, nn.Module) else ()
    for module in modules:
        for name, value in vars(module).items():
            if name.startswith("irreps_") and hasattr(value, "D_from_matrix"):
                found[str(value)] = value
    actions: dict[int, list[Callable[[Tensor], Tensor]]] = {}
    for irreps in found.values():
        actions.setdefault(irreps.dim, []).append(partial(torch.matmul, other=irreps.D_from_matrix(linear).mT))
    return actions
