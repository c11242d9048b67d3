"""What a kernel is told: sizes and strides, and where in memory the operands lie as vectors of heads."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

SOFTMAX, EXP_MEAN, MEAN, NONE = range(4)


class Sizes(NamedTuple):
    """Sizes, strides in elements, and switches; all integers, so that Numba compiles each kernel once.

    A stride of 0 stands for an axis of size 1 that serves all entries.
    """

    outs: int
    queries: int
    keys: int  # key frames over a point
    pairs: int  # of output and query frames: their product, or the query frames where these are the output
    columns: int  # key frames over a point that one query frame attends to
    depth: int  # channels of queries and keys
    width: int  # channels of values
    tied_out: int  # the output frame is the query frame
    tied_key: int  # the key frame is the query frame
    normalize: int
    indexed: int  # edges name the row of the displacement tables
    has_fiber_key: int
    has_fiber_bias: int
    has_rho: int
    rho_shared: int  # one entry for all heads, not a vector
    rho_type: int
    rho_out: int
    has_bias: int
    bias_type: int
    bias_out: int
    bias_key: int  # 0 where the bias is the same for all key frames
    has_psi: int
    psi_type: int
    psi_out: int
    has_beta: int
    beta_type: int
    beta_out: int
    constant: int  # added to all scores
    chunk: int  # edges worked on together
    threshold: int  # dropout probability times 2^32


class Operands(NamedTuple):
    """Addresses; the same names serve the gradients. Absent operands are never read."""

    query: int
    key: int
    value: int
    fiber_key: int
    fiber_bias: int
    rho: int
    bias: int
    psi: int
    beta: int


class Lists(NamedTuple):
    """Addresses of the int64 neighbor lists and of the type of each edge."""

    row_ptr: int
    source: int
    kind: int


def record(numbers: Any) -> Any:
    """A named tuple of integers as a structure, which compiled functions pass on by its address.

    Tuples are passed by value, entry by entry, and take several times as long to compile.
    """
    return np.array([tuple(numbers)], dtype=_record_type(numbers._fields))[0]


@cache
def _record_type(names: tuple[str, ...]) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names])
