"""The scratch memory of a call of a kernel."""

from typing import NamedTuple

from lieattn.ops.kernels._problem import Sizes


class ForwardRoom(NamedTuple):
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


def forward_room(s: Sizes) -> ForwardRoom:
    """Vectors of scratch that the forward pass needs."""
    square = s.queries * s.columns
    return ForwardRoom(
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


class BackwardRoom(NamedTuple):
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


def backward_room(s: Sizes) -> BackwardRoom:
    """Vectors of scratch that the backward pass needs."""
    square, outs, chunk = s.queries * s.columns, s.outs, s.chunk
    return BackwardRoom(
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
