"""Vectors for Numba, continued: choices lane by lane, and the lanes against each other."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from lieattn.ops.kernels._vectors import Vector, broadcast, element_type, intrinsic


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


@intrinsic
def gather(typingctx: Any, pointer: Any, elements: Any, stride: Any, lanes: Any) -> Any:
    """Vector of the elements at ``pointer + elements + lane * stride``."""
    vector = Vector(pointer.dtype, lanes.count)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element, count = element_type(pointer.dtype), vector.count
        word, size = ir.IntType(64), pointer.dtype.bitwidth // 8
        first = builder.ptrtoint(builder.gep(args[0], [args[1]], source_etype=element), word)
        lane = ir.Constant(ir.VectorType(word, count), [size * number for number in range(count)])
        places = builder.add(broadcast(builder, first, count), builder.mul(broadcast(builder, args[2], count), lane))
        places = builder.inttoptr(places, ir.VectorType(element.as_pointer(), count))
        kind, every = ir.VectorType(element, count), ir.Constant(ir.VectorType(ir.IntType(1), count), [1] * count)
        operands = [places, ir.Constant(ir.IntType(32), size), every, ir.Constant(kind, ir.Undefined)]
        name = f"llvm.masked.gather.v{count}f{pointer.dtype.bitwidth}.v{count}p0"
        function = ir.FunctionType(kind, [operand.type for operand in operands])
        return builder.call(cgutils.get_or_insert_function(builder.module, function, name), operands)

    return vector(pointer, types.int64, types.int64, lanes), build
