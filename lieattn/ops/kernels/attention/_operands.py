"""What a kernel is told: sizes and strides, where the operands lie as vectors of heads, and its scratch memory."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lieattn.ops._terms import Problem

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


def operands_of(problem: Problem) -> dict[str, Tensor | None]:
    """Signals and tables by their names among the operands of a kernel."""
    t = problem.terms
    signals = {"query": problem.query, "key": problem.key, "value": problem.value}
    shared = {"fiber_key": t.fiber_key, "fiber_bias": t.fiber_bias}
    return {**signals, "rho": t.positional_key, "bias": t.displacement_bias, **shared, "psi": t.psi, "beta": t.beta}


class ForwardScratch(NamedTuple):
    """Parts of the scratch memory, as numbers of vectors or as addresses."""

    base: int
    inner: int
    masked: int
    stage: int
    sums: int
    values: int  # this and what follows for each edge of a chunk
    mass: int
    shares: int
    outer: int


def forward_scratch(s: Sizes) -> ForwardScratch:
    """Vectors of scratch that the forward pass needs."""
    square = s.queries * s.columns
    return ForwardScratch(
        base=square,
        inner=square,
        masked=square,
        stage=s.outs * s.depth,
        sums=s.pairs * s.width,
        values=s.chunk * (s.queries * s.width + 1),
        mass=s.chunk * s.queries,
        shares=s.chunk * s.queries,
        outer=s.chunk * (s.pairs + 1),
    )


class BackwardScratch(NamedTuple):
    """Parts of the scratch memory, as numbers of vectors or as addresses."""

    base: int
    masked: int
    slope: int
    slopes: int
    stage: int
    turn: int
    mean: int
    level: int
    pulled: int
    shift: int
    back: int
    small: int
    inner: int  # this and what follows for each edge of a chunk
    values: int
    shares: int
    outer: int
    slant: int


def backward_scratch(s: Sizes) -> BackwardScratch:
    """Vectors of scratch that the backward pass needs."""
    square, outs, chunk = s.queries * s.columns, s.outs, s.chunk
    return BackwardScratch(
        base=square,
        masked=square,
        slope=square,
        slopes=square,
        stage=outs * s.depth,
        turn=outs * s.depth,
        mean=s.pairs,
        level=s.pairs,
        pulled=outs * s.width,
        shift=outs,
        back=s.queries * s.width,
        small=s.queries,
        inner=chunk * square,
        values=chunk * s.queries * s.width,
        shares=chunk * s.queries,
        outer=chunk * s.pairs,
        slant=chunk * s.pairs,
    )
