"""How long the vectors of the kernels are on the machine that Numba compiles for."""

from __future__ import annotations

from functools import cache

_TILE = 13  # vectors of a tile of products: 2 x 4 sums and 1 + 4 operands
_LONGEST = 16


@cache
def widest_lanes() -> int:
    """Most lanes of float32 in a vector, by the features of the processor (or ``NUMBA_CPU_FEATURES``)."""
    from numba.core.registry import cpu_target

    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return lanes_on(triple, features)


def lanes_on(triple: str, features: str) -> int:
    """Lanes with which a tile stays in the registers of a target: LLVM spills what does not fit in every product.

    16 with AVX-512, 8 with AVX and AVX2, 8 with NEON (a vector is two registers), 4 with SSE.
    """
    floats, registers = 4, 32
    if triple.startswith("x86_64"):
        present = features.split(",")
        floats, registers = (16, 32) if "+avx512f" in present else (8, 16) if "+avx" in present else (4, 16)
    return min(_LONGEST, floats * (registers // _TILE))
