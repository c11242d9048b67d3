"""Run the kernels of the pattern ``"pooled"`` on the threads that torch may use; see ``kernels/_calls.py``."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lieattn.geometry import Neighbors
from lieattn.ops.kernels._calls import (
    PartGradients,
    check_lists,
    cut_targets,
    cut_with_windows,
    largest_degree,
    list_addresses,
    record,
    run,
    scratch_addresses,
)
from lieattn.ops.kernels._heads import lanes_of
from lieattn.ops.kernels._memory import NUMPY_TYPES
from lieattn.ops.kernels.pooled._kernels import (
    PooledOperands,
    PooledSizes,
    pooled_backward,
    pooled_forward,
    pooled_scratch,
)

_SIGNALS = ("query", "key", "value")

Operands = tuple[Tensor | None, ...]
"""In the order of :class:`PooledOperands`."""


def run_forward(operands: Operands, neighbors: Neighbors, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output ``[points, outs, heads, width]`` and logarithms of the sums ``[blocks, points, outs, lanes]``."""
    layout, lists = _prepare(operands, neighbors, index)
    sizes, value = layout.sizes, layout.value
    out = value.new_zeros(layout.blocks, neighbors.num_points, sizes.outs, sizes.width, layout.lanes)
    top = value.new_zeros(layout.blocks, neighbors.num_points, sizes.outs, layout.lanes)
    total = torch.ones_like(top)
    parts = cut_targets(neighbors.row_ptr, torch.get_num_threads())
    scratch, addresses = layout.scratch(layout.blocks * len(parts))
    calls = []
    for (block, part), own in zip(itertools.product(range(layout.blocks), parts), addresses, strict=True):
        results = (tensor[block].data_ptr() for tensor in (out, top, total))
        given = layout.addresses(block, layout.packed), record(sizes), lists
        calls.append((*given, *part, *results, own, layout.vector))
    run(pooled_forward, calls)
    del scratch  # held until the kernels are done
    return layout.unpack(out), total.log_().add_(top)


def run_backward(
    operands: Operands, neighbors: Neighbors, index: Tensor | None, grad_out: Tensor, out: Tensor, norm: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of the operands, empty tensors for those absent."""
    layout, lists = _prepare(operands, neighbors, index)
    norm, grad, result = norm.contiguous(), layout.pack(grad_out), layout.pack(out)
    parts, windows = cut_with_windows(neighbors.row_ptr, neighbors.source, torch.get_num_threads())
    results = PartGradients(layout.packed, layout.zeros, windows, index is not None)
    scratch, addresses = layout.scratch(layout.blocks * len(parts))
    calls = []
    for (block, number), own in zip(itertools.product(range(layout.blocks), range(len(parts))), addresses, strict=True):
        given = layout.addresses(block, layout.packed), record(layout.sizes), lists
        slopes = (tensor[block].data_ptr() for tensor in (result, norm, grad))
        window = windows[number][0] if number else 0
        grads = layout.addresses(block, results.of_parts[number])
        calls.append((*given, *parts[number], *slopes, grads, window, own, layout.vector))
    run(pooled_backward, calls)
    del scratch
    return tuple(layout.gradient(name, total) for name, total in results.total().items())


class _Layout:
    """Operands packed for the kernels, a vector of heads innermost: ``[blocks, rows, frames, dim, lanes]``."""

    def __init__(self, operands: dict[str, Tensor | None], indexed: bool, degree: int) -> None:
        value, query = cast(Tensor, operands["value"]), cast(Tensor, operands["query"])
        self.operands, self.value = operands, value
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
        return (NUMPY_TYPES[self.value.dtype](0),) * self.lanes

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
            return self.value.new_empty(self.blocks, 0)
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

    def zeros(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Memory set to zero."""
        return self.value.new_zeros(shape)

    def scratch(self, calls: int) -> tuple[Tensor, list[Any]]:
        """Scratch memory for so many calls, and the addresses of its parts for each of them."""
        needed = pooled_scratch(self.sizes)
        memory = self.value.new_empty(calls, sum(needed), self.lanes)
        return memory, scratch_addresses(needed, memory, self.lanes)


def _prepare(operands: Operands, neighbors: Neighbors, index: Tensor | None) -> tuple[_Layout, Any]:
    named = dict(zip(PooledOperands._fields, operands, strict=True))
    check_lists(neighbors, index, operands[len(_SIGNALS) :])
    layout = _Layout(named, index is not None, largest_degree(neighbors.row_ptr))
    return layout, list_addresses(neighbors.row_ptr, neighbors.source, index)
