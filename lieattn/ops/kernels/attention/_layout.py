"""Between the tensors of the operator and those of the kernels, where a vector of heads is innermost.

A signal ``[rows, fiber, heads, dim]`` becomes ``[blocks, rows, fiber, dim, lanes]``: its heads are cut into blocks of
as many lanes as a vector has, the last one filled up with zeros. A kernel works on one block.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from lieattn.ops._terms import Problem
from lieattn.ops.kernels._calls import record
from lieattn.ops.kernels._heads import HeadRange, block_seed, lanes_of
from lieattn.ops.kernels._memory import NUMPY_TYPES, Workspace, new_empty
from lieattn.ops.kernels.attention._bundle import SINGLE, Bundle
from lieattn.ops.kernels.attention._operands import EXP_MEAN, MEAN, NONE, SOFTMAX, Operands, Sizes, operands_of
from lieattn.ops.kernels.attention._packing import pack, unpack

NORMALIZATIONS = {"softmax": SOFTMAX, "exp-mean": EXP_MEAN, "mean": MEAN, "none": NONE}
_SCRATCH_BYTES = 2**19
_REPEATED_BYTES = 2**20  # smaller tables are repeated for each lane
_SIGNALS = ("query", "key", "value")


class Layout:
    """How the operands of one call lie in memory, and the way back for their gradients: a range of the heads."""

    def __init__(self, problem: Problem, bundle: Bundle, part: HeadRange, memory: Workspace) -> None:
        self.problem, self.bundle, self.part, self.memory = problem, bundle, part, memory
        self.given = operands_of(problem)
        self.lanes, self.blocks = part.lanes, part.blocks
        self.packed = {name: self._pack_table(name, table) for name, table in self.given.items()}

    @property
    def vector(self) -> tuple[np.floating[Any], ...]:
        """Tuple whose type tells a kernel the type and number of lanes."""
        return (NUMPY_TYPES[self.problem.value.dtype](0),) * self.lanes

    def seed(self, seed: int, block: int) -> np.uint64:
        """Seed of a block: a head drops the same weights however long its vector is."""
        return np.uint64(block_seed(seed, self.part.first // lanes_of(self._heads, self.problem.value.dtype) + block))

    @property
    def _heads(self) -> int:
        """Heads of a bundle, of which this layout has a range."""
        return self.bundle.clouds * self.problem.value.shape[2]

    def pack(self, signal: Tensor) -> Tensor:
        """A signal ``[points, fiber, heads, dim]`` to ``[blocks, rows, fiber, dim, lanes]``, bundled."""
        return pack(signal, self.bundle, self.part, self.memory)

    def unpack(self, packed: Tensor, signal: Tensor) -> None:
        """The inverse of :meth:`pack`: write the heads of this range."""
        unpack(packed, self.bundle, self.part, signal)

    def operands(self, block: int, tensors: dict[str, Tensor]) -> Any:
        """Addresses of one block."""
        return record(Operands(**{name: tensor[block].data_ptr() for name, tensor in tensors.items()}))

    def add_gradient(self, name: str, packed: Tensor, grads: dict[str, Tensor]) -> None:
        """Add this range's part of the gradient of an operand, from that of its packed form."""
        given = self.given[name]
        if given is None:
            return
        if name in _SIGNALS:
            if name not in grads:
                grads[name] = new_empty(given.dtype, *given.shape)
            self.unpack(packed, grads[name])  # which writes other heads in every range
            return
        if name == "rho" and self._shared_rho:
            grad = packed.sum(0)[:, :, None]
        else:
            grad = self._table_gradient(name, packed)
        grad = grad.sum_to_size(given.shape).contiguous()
        grads[name] = grads[name].add_(grad) if name in grads else grad

    def _table_gradient(self, name: str, packed: Tensor) -> Tensor:
        rows, fiber, dim = packed.shape[1:4]
        shape, whole = (rows, fiber, self._heads, dim), self.part.heads == self._heads
        grad = new_empty(packed.dtype, *shape) if whole else packed.new_zeros(shape)
        own = grad.narrow(2, self.part.first, self.part.heads)
        unpack(packed, SINGLE, HeadRange(0, self.part.heads, self.lanes), own)
        if self.bundle.clouds > 1:  # they have the tables in common
            grad = grad.unflatten(2, (self.bundle.clouds, -1)).sum(2)
        if name == "fiber_bias":
            return grad[..., 0]
        if name == "bias":
            return grad.transpose(2, 3)
        return grad[:, :, None] if name in ("psi", "beta") else grad

    def sizes(self, max_degree: int, indexed: bool) -> Sizes:
        """Sizes for the kernels, with chunks of edges that fit the cache."""
        a, t, packed = self.problem, self.problem.terms, self.packed
        outs, queries, keys = a.outs, a.queries, a.value.shape[1]
        tied_out, tied_key = a.pattern != "query_sum", a.pattern == "framewise"
        (rho_type, rho_out), (bias_type, bias_out), (psi_type, psi_out), (beta_type, beta_out) = (
            _steps(packed[name]) for name in ("rho", "bias", "psi", "beta")
        )
        full = t.displacement_bias is not None and t.displacement_bias.shape[2] > 1
        scoreless = a.query is None and t.displacement_bias is None and t.fiber_bias is None
        sizes = Sizes(
            outs=outs,
            queries=queries,
            keys=keys,
            pairs=queries if tied_out else outs * queries,
            columns=1 if tied_key else keys,
            depth=0 if a.query is None else a.query.shape[-1],
            width=a.value.shape[-1],
            tied_out=int(tied_out),
            tied_key=int(tied_key),
            normalize=NORMALIZATIONS[a.normalize],
            indexed=int(indexed),
            has_fiber_key=int(t.fiber_key is not None),
            has_fiber_bias=int(t.fiber_bias is not None),
            has_rho=int(t.positional_key is not None),
            rho_shared=int(self._shared_rho),
            rho_type=rho_type,
            rho_out=rho_out,
            has_bias=int(t.displacement_bias is not None),
            bias_type=bias_type,
            bias_out=bias_out,
            bias_key=self.lanes if full else 0,
            has_psi=int(t.psi is not None),
            psi_type=psi_type,
            psi_out=psi_out,
            has_beta=int(t.beta is not None),
            beta_type=beta_type,
            beta_out=beta_out,
            constant=int(scoreless and a.normalize in ("mean", "exp-mean", "none")),
            chunk=1,
            threshold=int(a.dropout * 2**32),
        )
        edge = sizes.queries * (sizes.columns + sizes.width + 2) + 2 * sizes.pairs
        fitting = _SCRATCH_BYTES // (edge * self.lanes * a.value.element_size())
        return sizes._replace(chunk=max(1, min(max_degree, max(4, fitting))))

    @property
    def _shared_rho(self) -> bool:
        """Whether positional keys lie in memory without lanes: one entry serves all heads."""
        return self.packed["rho"].ndim == 4

    def _pack_table(self, name: str, table: Tensor | None) -> Tensor:
        a = self.problem
        if table is None:
            return a.value.new_empty(self.blocks, 0)
        if name in _SIGNALS:
            return self.pack(table)
        heads, depth = a.value.shape[2], 0 if a.query is None else a.query.shape[-1]
        if name == "rho":
            table = table.expand(-1, -1, -1, depth)
            repeated = table.numel() * self.lanes * table.element_size()
            if table.shape[2] == 1 and self.part.heads > 1 and repeated > _REPEATED_BYTES:
                return table[None, :, :, 0].contiguous().expand(self.blocks, -1, -1, -1)
            table = table.expand(-1, -1, heads, -1)
        elif name == "fiber_key":
            table = table.expand(a.queries, a.value.shape[1], heads, depth)
        elif name == "fiber_bias":
            table = table[..., None].expand(a.queries, a.value.shape[1], heads, 1)
        elif name == "bias":
            table = table.transpose(2, 3).expand(-1, -1, heads, -1)
        else:
            table = table[:, :, 0].expand(-1, -1, heads, a.value.shape[-1])
        table = table.repeat(1, 1, self.bundle.clouds, 1).narrow(2, self.part.first, self.part.heads)
        return pack(table, SINGLE, HeadRange(0, self.part.heads, self.lanes), self.memory)


def _steps(packed: Tensor) -> tuple[int, int]:
    """Strides of the types and of the output frames of a packed table; 0 where one frame serves all."""
    if packed.ndim < 3:
        return 0, 0
    frame = math.prod(packed.shape[3:])
    return packed.shape[2] * frame, frame if packed.shape[2] > 1 else 0
