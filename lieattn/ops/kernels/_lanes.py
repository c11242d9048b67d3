"""Vectors for Numba, continued: choices lane by lane, and the lanes against each other."""

from typing import Any

from llvmlite import ir

from lieattn.ops.kernels._vectors import intrinsic


def _choice(comparison: str) -> Any:
    @intrinsic
    def choose(typingctx: Any, left: Any, right: Any, chosen: Any, other: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.select(builder.fcmp_ordered(comparison, args[0], args[1]), args[2], args[3])

        return left(left, right, chosen, other), build

    return choose


# ``pick_greater(left, right, chosen, other)``: the lanes of ``chosen`` where left > right, else of ``other``.
pick_greater, pick_equal = _choice(">"), _choice("==")


def _extreme(comparison: str) -> Any:
    @intrinsic
    def reduce(typingctx: Any, vector: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value, count = args[0], vector.count
            while count > 1:
                count //= 2
                low, high = (
                    builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(ir.IntType(32), count), list(part)))
                    for part in (range(count), range(count, 2 * count))
                )
                value = builder.select(builder.fcmp_ordered(comparison, high, low), high, low)
            return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

        return vector.dtype(vector), build

    return reduce


# Largest and smallest of the lanes.
largest_lane, smallest_lane = _extreme(">"), _extreme("<")


@intrinsic
def count_lanes(typingctx: Any, vector: Any) -> Any:
    """Vector 0, 1, 2, ... of the type of another."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(args[0].type, [float(lane) for lane in range(vector.count)])

    return vector(vector), build
