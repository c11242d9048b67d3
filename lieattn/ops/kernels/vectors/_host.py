"""The length of vectors on the machine that Numba compiles for."""

from __future__ import annotations

from functools import cache

_TILE = 13  # vectors of a tile of products: 2 x 4 sums and 1 + 4 operands
_LONGEST = 16


@cache
def widest_lanes() -> int:
    """Return the largest number of float32 lanes in a vector, given the processor (or ``NUMBA_CPU_FEATURES``)."""
    from numba.core.registry import cpu_target

    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return lanes_on(triple, features)


def lanes_on(triple: str, features: str) -> int:
    """Return the number of lanes with which a tile fits into the registers of a target, so that LLVM spills nothing.

    It is 16 with AVX-512, 8 with AVX and AVX2, 8 with NEON (where a vector is two registers), and 4 with SSE.
    """
    floats, registers = 4, 32
    if triple.startswith("x86_64"):
        present = features.split(",")
        floats, registers = (16, 32) if "+avx512f" in present else (8, 16) if "+avx" in present else (4, 16)
    return min(_LONGEST, floats * (registers // _TILE))
