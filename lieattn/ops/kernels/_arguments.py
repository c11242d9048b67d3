"""What the fused operators are called with, and the shapes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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

    @property
    def has_edge_tables(self) -> bool:
        """Whether there are tables with a row for each type of displacement."""
        return any(t is not None for t in (self.positional_key, self.displacement_bias, self.psi, self.beta))


def lanes_of(heads: int, dtype: torch.dtype) -> int:
    """Lanes of a vector: few choices, since each is compiled for itself."""
    if dtype == torch.float64:
        return 4
    return 4 if heads <= 4 else 8 if heads <= 8 else 16


@dataclass(frozen=True)
class HeadRange:
    """Heads that follow one another, in vectors of one length; ``first`` is a multiple of the longest."""

    first: int
    heads: int
    lanes: int

    @property
    def blocks(self) -> int:
        """Vectors that hold them."""
        return -(-self.heads // self.lanes)


def head_ranges(heads: int, dtype: torch.dtype) -> list[HeadRange]:
    """Cut the heads into those that fill vectors and the last few, for which shorter vectors will do."""
    lanes = lanes_of(heads, dtype)
    rest = heads % lanes
    if heads > lanes and rest > 0 and lanes_of(rest, dtype) < lanes:
        return [HeadRange(0, heads - rest, lanes), HeadRange(heads - rest, rest, lanes_of(rest, dtype))]
    return [HeadRange(0, heads, lanes)]


def norm_shape(arguments: Arguments, points: int) -> tuple[int, ...]:
    """Shape of the logarithms of the sums that the backward pass needs, ``[points, pairs, heads]``."""
    if arguments.normalize != "softmax":
        return (0,)
    pairs = arguments.queries if arguments.pattern != "query_sum" else arguments.outs * arguments.queries
    return points, pairs, arguments.value.shape[2]


def block_seed(seed: int, block: int) -> int:
    """Seed of a block of heads, 64 bits: blocks drop different weights."""
    return (seed + block * 0xD1B54A32D192ED03) % 2**64
