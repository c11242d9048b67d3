"""Between the tensors of the operator and those of the kernels, where a vector of heads is innermost.

A signal ``[rows, fiber, heads, dim]`` becomes ``[blocks, rows, fiber, dim, lanes]``: its heads are cut into blocks of
as many lanes as a vector has, the last one filled up with zeros. A kernel works on one block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lieattn.ops.kernels._problem import EXP_MEAN, MEAN, NONE, SOFTMAX, Operands, Sizes, record

NORMALIZATIONS = {"softmax": SOFTMAX, "exp-mean": EXP_MEAN, "mean": MEAN, "none": NONE}
_SCRATCH_BYTES = 2**19


@dataclass(frozen=True)
class Arguments:
    """What the operator is called with, the query scaled; see :func:`lieattn.ops.group_attention`."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    positional_key: Tensor | None
    displacement_bias: Tensor | None
    fiber_key: Tensor | None
    fiber_bias: Tensor | None
    psi: Tensor | None
    beta: Tensor | None
    pattern: str
    normalize: str

    @property
    def queries(self) -> int:
        """Query frames."""
        if self.query is not None:
            return self.query.shape[1]
        if self.pattern == "framewise":
            return self.value.shape[1]
        # Without queries, frames are told apart by the tables alone.
        frames = 1 if self.fiber_bias is None else self.fiber_bias.shape[0]
        return frames if self.pattern == "query_sum" else max(frames, self._table_frames)

    @property
    def outs(self) -> int:
        """Output frames."""
        return self._table_frames if self.pattern == "query_sum" else self.queries

    @property
    def _table_frames(self) -> int:
        tables = (self.positional_key, self.displacement_bias, self.psi, self.beta)
        return max((table.shape[1] for table in tables if table is not None), default=1)

    def tables(self) -> dict[str, Tensor | None]:
        """Signals and tables by their names among the operands of a kernel."""
        return {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "rho": self.positional_key,
            "bias": self.displacement_bias,
            "fiber_key": self.fiber_key,
            "fiber_bias": self.fiber_bias,
            "psi": self.psi,
            "beta": self.beta,
        }


class Layout:
    """How the operands of one call lie in memory, and the way back for their gradients."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        value = arguments.value
        self.heads = value.shape[2]
        self.lanes = lanes_of(self.heads, value.dtype)
        self.blocks = -(-self.heads // self.lanes)
        self.packed = {name: self._pack_table(name, table) for name, table in arguments.tables().items()}

    @property
    def vector(self) -> tuple[np.floating[Any], ...]:
        """Tuple whose type tells a kernel the type and number of lanes."""
        scalar = np.float32(0) if self.arguments.value.dtype == torch.float32 else np.float64(0)
        return (scalar,) * self.lanes

    def pack(self, signal: Tensor) -> Tensor:
        """``[rows, fiber, heads, dim]`` to ``[blocks, rows, fiber, dim, lanes]``."""
        rows, fiber, heads, dim = signal.shape
        turned = signal.transpose(2, 3)
        if heads == self.lanes:
            return turned.contiguous()[None]
        make = signal.new_empty if heads % self.lanes == 0 else signal.new_zeros
        packed = make(self.blocks, rows, fiber, dim, self.lanes)
        for block, part in enumerate(turned.split(self.lanes, dim=-1)):
            packed[block, ..., : part.shape[-1]] = part
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """The inverse of :meth:`pack`, contiguous."""
        blocks, rows, fiber, dim, lanes = packed.shape
        heads = packed.permute(1, 2, 0, 4, 3).reshape(rows, fiber, blocks * lanes, dim)
        return heads[:, :, : self.heads].contiguous()

    def operands(self, block: int, tensors: dict[str, Tensor]) -> Any:
        """Addresses of one block."""
        return record(Operands(**{name: tensor[block].data_ptr() for name, tensor in tensors.items()}))

    def zeros(self, name: str, rows: int | None = None) -> Tensor:
        """Zeros like a packed operand, or like so many of its rows."""
        like = self.packed[name]
        return like.new_zeros(like.shape if rows is None else (like.shape[0], rows, *like.shape[2:]))

    def gradient(self, name: str, packed: Tensor) -> Tensor:
        """Gradient of a tensor the operator was called with, from that of its packed form."""
        given = self.arguments.tables()[name]
        if given is None:
            return packed.new_empty(0)
        if name == "rho" and self._shares(given):
            return packed.sum(0)[:, :, None].sum_to_size(given.shape).contiguous()
        grad = self.unpack(packed)
        if name == "fiber_bias":
            grad = grad[..., 0]
        elif name == "bias":
            grad = grad.transpose(2, 3)
        elif name in ("psi", "beta"):
            grad = grad[:, :, None]
        return grad.sum_to_size(given.shape).contiguous()

    def sizes(self, max_degree: int, indexed: bool, dropout: float) -> Sizes:
        """Sizes for the kernels, with chunks of edges that fit the cache."""
        a, packed = self.arguments, self.packed
        outs, queries, keys = a.outs, a.queries, a.value.shape[1]
        tied_out, tied_key = a.pattern != "query_sum", a.pattern == "framewise"
        shared = a.positional_key is not None and self._shares(a.positional_key)
        (rho_type, rho_out), (bias_type, bias_out), (psi_type, psi_out), (beta_type, beta_out) = (
            _steps(packed[name]) for name in ("rho", "bias", "psi", "beta")
        )
        full = a.displacement_bias is not None and a.displacement_bias.shape[2] > 1
        scoreless = a.query is None and a.displacement_bias is None and a.fiber_bias is None
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
            has_fiber_key=int(a.fiber_key is not None),
            has_fiber_bias=int(a.fiber_bias is not None),
            has_rho=int(a.positional_key is not None),
            rho_shared=int(shared),
            rho_type=rho_type,
            rho_out=rho_out,
            has_bias=int(a.displacement_bias is not None),
            bias_type=bias_type,
            bias_out=bias_out,
            bias_key=self.lanes if full else 0,
            has_psi=int(a.psi is not None),
            psi_type=psi_type,
            psi_out=psi_out,
            has_beta=int(a.beta is not None),
            beta_type=beta_type,
            beta_out=beta_out,
            constant=int(scoreless and a.normalize in ("mean", "exp-mean", "none")),
            chunk=1,
            threshold=int(dropout * 2**32),
        )
        edge = sizes.queries * (sizes.columns + sizes.width + 2) + 2 * sizes.pairs
        room = _SCRATCH_BYTES // (edge * self.lanes * a.value.element_size())
        return sizes._replace(chunk=max(1, min(max_degree, max(4, room))))

    def _shares(self, rho: Tensor) -> bool:
        return rho.shape[2] == 1 and self.heads > 1

    def _pack_table(self, name: str, table: Tensor | None) -> Tensor:
        a = self.arguments
        if table is None:
            return a.value.new_empty(self.blocks, 0)
        depth = 0 if a.query is None else a.query.shape[-1]
        if name == "rho":
            table = table.expand(-1, -1, -1, depth)
            if self._shares(table):
                return table[None, :, :, 0].contiguous().expand(self.blocks, -1, -1, -1)
        elif name == "fiber_key":
            table = table.expand(a.queries, a.value.shape[1], self.heads, depth)
        elif name == "fiber_bias":
            table = table[..., None].expand(a.queries, a.value.shape[1], self.heads, 1)
        elif name == "bias":
            table = table.transpose(2, 3).expand(-1, -1, self.heads, -1)
        elif name in ("psi", "beta"):
            table = table[:, :, 0].expand(-1, -1, self.heads, a.value.shape[-1])
        return self.pack(table)


def lanes_of(heads: int, dtype: torch.dtype) -> int:
    """Lanes of a vector: few choices, since each is compiled for itself."""
    if dtype == torch.float64:
        return 4
    return 8 if heads <= 8 else 16


def _steps(packed: Tensor) -> tuple[int, int]:
    """Strides of the types and of the output frames of a packed table; 0 where one frame serves all."""
    if packed.ndim < 3:
        return 0, 0
    frame = math.prod(packed.shape[3:])
    return packed.shape[2] * frame, frame if packed.shape[2] > 1 else 0


def norm_shape(arguments: Arguments, points: int) -> tuple[int, ...]:
    """Shape of the logarithms of the sums that the backward pass needs."""
    if arguments.normalize != "softmax":
        return (0,)
    heads = arguments.value.shape[2]
    lanes = lanes_of(heads, arguments.value.dtype)
    pairs = arguments.queries if arguments.pattern != "query_sum" else arguments.outs * arguments.queries
    return (-(-heads // lanes), points, pairs, lanes)


def block_seed(seed: int, block: int) -> int:
    """Seed of a block of heads, 64 bits: blocks drop different weights."""
    return (seed + block * 0xD1B54A32D192ED03) % 2**64
