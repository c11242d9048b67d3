"""Run the kernels of the pattern ``"pooled"`` on the threads that torch may use; see ``_launch.py``."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lieattn.ops.kernels._arguments import lanes_of
from lieattn.ops.kernels._launch import _parts, _run, _windows
from lieattn.ops.kernels._pooled import (
    PooledOperands,
    PooledRoom,
    PooledSizes,
    pooled_backward,
    pooled_forward,
    pooled_room,
)
from lieattn.ops.kernels._problem import Lists, record

_NAMES = PooledOperands._fields
_SIGNALS = ("query", "key", "value")

Operands = tuple[Tensor | None, ...]
"""In the order of :class:`PooledOperands`."""


def run_forward(operands: Operands, row_ptr: Tensor, source: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output ``[points, outs, heads, width]`` and logarithms of the sums ``[blocks, points, outs, lanes]``."""
    layout, lists = _prepare(operands, row_ptr, source, index)
    points, sizes = len(row_ptr) - 1, layout.sizes
    value = cast(Tensor, layout.operands["value"])
    out = value.new_zeros(layout.blocks, points, sizes.outs, sizes.width, layout.lanes)
    top = value.new_zeros(layout.blocks, points, sizes.outs, layout.lanes)
    total = torch.ones_like(top)
    parts = _parts(row_ptr, torch.get_num_threads())
    memory, rooms = layout.rooms(layout.blocks * len(parts))
    calls = []
    for (block, part), room in zip(itertools.product(range(layout.blocks), parts), rooms, strict=True):
        results = (tensor[block].data_ptr() for tensor in (out, top, total))
        given = layout.addresses(block, layout.packed), record(sizes), lists
        calls.append((*given, *part, *results, room, layout.vector))
    _run(pooled_forward, calls)
    del memory  # held until the kernels are done
    return layout.unpack(out), total.log_().add_(top)


def run_backward(
    operands: Operands,
    row_ptr: Tensor,
    source: Tensor,
    index: Tensor | None,
    grad_out: Tensor,
    out: Tensor,
    norm: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of the operands, empty tensors for those absent."""
    layout, lists = _prepare(operands, row_ptr, source, index)
    norm, grad, result = norm.contiguous(), layout.pack(grad_out), layout.pack(out)
    parts, windows = _windows(row_ptr, source, torch.get_num_threads())
    # Without an index every edge has rows of its own, so that no two parts write to the same ones.
    shared = ("query",) if index is not None else ("query", *_NAMES[len(_SIGNALS) :])
    totals = [{name: layout.zeros(name) for name in _NAMES}]
    for low, high in windows[1:]:
        own = {name: layout.zeros(name, high - low) for name in ("key", "value")}
        own |= {name: layout.zeros(name) for name in _NAMES if name not in (*own, *shared)}
        totals.append(own | {name: totals[0][name] for name in shared})
    memory, rooms = layout.rooms(layout.blocks * len(parts))
    calls = []
    for (block, number), room in zip(itertools.product(range(layout.blocks), range(len(parts))), rooms, strict=True):
        given = layout.addresses(block, layout.packed), record(layout.sizes), lists
        slopes = (tensor[block].data_ptr() for tensor in (result, norm, grad))
        window = windows[number][0] if number else 0
        grads = layout.addresses(block, totals[number])
        calls.append((*given, *parts[number], *slopes, grads, window, room, layout.vector))
    _run(pooled_backward, calls)
    del memory
    for (low, high), own in zip(windows[1:], totals[1:], strict=True):
        for name in _NAMES:
            if name in ("key", "value"):
                totals[0][name][:, low:high] += own[name]
            elif name not in shared:
                totals[0][name] += own[name]
    return tuple(layout.gradient(name, totals[0][name]) for name in _NAMES)


class _Layout:
    """Operands packed for the kernels, a vector of heads innermost: ``[blocks, rows, frames, dim, lanes]``."""

    def __init__(self, operands: dict[str, Tensor | None], indexed: bool, degree: int) -> None:
        value, query = cast(Tensor, operands["value"]), cast(Tensor, operands["query"])
        self.operands, self.indexed = operands, indexed
        self.heads, self.lanes = value.shape[2], lanes_of(value.shape[2], value.dtype)
        self.blocks = -(-self.heads // self.lanes)
        self.depth, self.width = query.shape[-1], value.shape[-1]
        self.packed = {name: self._pack_operand(name, table) for name, table in operands.items()}
        outs = [t.shape[1] for name, t in operands.items() if t is not None and name not in ("key", "value")]
        self.sizes = PooledSizes(
            outs=max(outs),
            query_out=self.depth * self.lanes if query.shape[1] > 1 else 0,
            depth=self.depth,
            width=self.width,
            key_frames=cast(Tensor, operands["key"]).shape[1],
            value_frames=value.shape[1],
            **self._strides("key_psi", self.depth, frames=True),
            **self._strides("rho", self.depth),
            **self._strides("psi", self.width, frames=True),
            **self._strides("beta", self.width),
            **self._strides("bias", 1),
            indexed=int(indexed),
            degree=degree,
        )

    @property
    def vector(self) -> tuple[np.floating[Any], ...]:
        """Tuple whose type tells a kernel the type and number of lanes."""
        value = cast(Tensor, self.operands["value"])
        return ((np.float32 if value.dtype == torch.float32 else np.float64)(0),) * self.lanes

    def _strides(self, name: str, width: int, *, frames: bool = False) -> dict[str, int]:
        table = self.operands[name]
        given = table is not None
        outs, keys = (table.shape[1], table.shape[2] if frames else 1) if table is not None else (1, 1)
        frame = width * self.lanes
        found = {f"has_{name}": int(given), f"{name}_type": outs * keys * frame}
        found[f"{name}_out"] = keys * frame if outs > 1 else 0
        return found | ({f"{name}_frame": frame if keys > 1 else 0} if frames else {})

    def _pack_operand(self, name: str, tensor: Tensor | None) -> Tensor:
        if tensor is None:
            return cast(Tensor, self.operands["value"]).new_empty(self.blocks, 0)
        if name in _SIGNALS:
            return self.pack(tensor)
        if name == "bias":
            tensor = tensor[..., None]
        if name == "rho":
            tensor = tensor[:, :, None]
        width = {"bias": 1, "rho": self.depth, "key_psi": self.depth}.get(name, self.width)
        return self.pack(tensor.flatten(1, 2).expand(-1, -1, self.heads, width))

    def pack(self, signal: Tensor) -> Tensor:
        """``[rows, frames, heads, dim]`` to ``[blocks, rows, frames, dim, lanes]``, filled up with zeros."""
        turned = signal.transpose(2, 3)
        if self.heads == self.lanes:
            return turned.contiguous()[None]
        packed = signal.new_zeros(self.blocks, *turned.shape[:3], self.lanes)
        for block, part in enumerate(turned.split(self.lanes, dim=-1)):
            packed[block, ..., : part.shape[-1]] = part
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        blocks, rows, frames, dim, lanes = packed.shape
        heads = packed.permute(1, 2, 0, 4, 3).reshape(rows, frames, blocks * lanes, dim)
        return heads[:, :, : self.heads].contiguous()

    def gradient(self, name: str, packed: Tensor) -> Tensor:
        """Gradient of an operand from that of its packed form; empty for one that is absent."""
        given = self.operands[name]
        if given is None:
            return packed.new_empty(0)
        grad = self.unpack(packed)
        if name not in _SIGNALS:
            grad = grad.unflatten(1, (given.shape[1], grad.shape[1] // given.shape[1]))
        if name == "bias":
            grad = grad[..., 0]
        if name == "rho":
            grad = grad[:, :, 0]
        return grad.sum_to_size(given.shape).contiguous()

    def addresses(self, block: int, tensors: dict[str, Tensor]) -> Any:
        """Addresses of one block."""
        return record(PooledOperands(**{name: tensor[block].data_ptr() for name, tensor in tensors.items()}))

    def zeros(self, name: str, rows: int | None = None) -> Tensor:
        """Zeros like a packed operand, or like so many of its rows."""
        like = self.packed[name]
        return like.new_zeros(like.shape if rows is None else (like.shape[0], rows, *like.shape[2:]))

    def rooms(self, calls: int) -> tuple[Tensor, list[Any]]:
        """Scratch for so many calls, and the addresses of its parts for each of them."""
        room = pooled_room(self.sizes)
        memory = cast(Tensor, self.operands["value"]).new_empty(calls, sum(room), self.lanes)
        starts = list(itertools.accumulate(room, initial=0))[:-1]
        size = memory.element_size() * self.lanes
        return memory, [record(PooledRoom(*(line.data_ptr() + size * at for at in starts))) for line in memory]


def _prepare(
    operands: tuple[Tensor | None, ...], row_ptr: Tensor, source: Tensor, index: Tensor | None
) -> tuple[_Layout, Any]:
    named = dict(zip(_NAMES, operands, strict=True))
    _check_lists(named, row_ptr, source, index)
    degree = int(row_ptr.diff().max()) if len(row_ptr) > 1 else 0
    lists = Lists(row_ptr.data_ptr(), source.data_ptr(), 0 if index is None else index.data_ptr())
    return _Layout(named, index is not None, degree), record(lists)


def _check_lists(operands: dict[str, Tensor | None], row_ptr: Tensor, source: Tensor, index: Tensor | None) -> None:
    """Raise ValueError where a kernel would read memory that is not its own: it does not check."""
    if int(row_ptr[0]) != 0 or int(row_ptr[-1]) != len(source) or bool((row_ptr.diff() < 0).any()):
        raise ValueError(f"neighbors: row_ptr must ascend from 0 to the number of edges, {len(source)}")
    tables = [len(t) for name, t in operands.items() if t is not None and name not in _SIGNALS]
    for name, numbers, limit in (
        ("neighbors: source", source, len(row_ptr) - 1),
        ("terms.row", index, min(tables, default=None)),
    ):
        if numbers is None or limit is None or len(numbers) == 0:
            continue
        low, high = (int(bound) for bound in numbers.aminmax())
        if low < 0 or high >= limit:
            raise ValueError(f"{name}: expected numbers from 0 to {limit - 1}, got {low} to {high}")
