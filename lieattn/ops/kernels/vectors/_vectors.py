"""Explicit vectors for Numba: values of a few lanes that LLVM keeps in one register.

Numba vectorizes a loop only where it can tell that this is allowed and worth it, which it cannot for loops over 8
heads. A :class:`Vector` says it outright: ``load`` reads lanes from memory, ``+ - * /``, ``multiply_add``,
``maximum`` and ``exp`` work on all of them at once, ``store`` writes them. LLVM splits what is wider than the
machine's registers. The type and number of lanes are those of a tuple, ``lanes = (np.float32(0),) * 8``.

Pointers are addresses of one element type; ``offset`` moves them by elements. Nothing here checks bounds.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.extending import models, overload, register_model

# A decorated function is called from compiled code with fewer arguments than it declares.
intrinsic: Any = extending.intrinsic


class Vector(types.Type):
    """Numba type of ``count`` lanes of a floating type."""

    def __init__(self, dtype: types.Float, count: int) -> None:
        self.dtype, self.count = dtype, count
        super().__init__(f"Vector({dtype}, {count})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(element_type(fe_type.dtype), fe_type.count))


def element_type(dtype: types.Float) -> ir.Type:
    """LLVM's type of an element."""
    return ir.FloatType() if dtype.bitwidth == 32 else ir.DoubleType()


def _same(vector: ir.Value | ir.Type, value: float) -> ir.Constant:
    """The same constant in all lanes."""
    kind = vector if isinstance(vector, ir.Type) else vector.type
    return ir.Constant(kind, [value] * kind.count)


@intrinsic
def stay_apart(typingctx: Any) -> Any:
    """Keep LLVM from copying the function that says so into its callers, which multiplies the time to compile."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def at_address(typingctx: Any, number: Any, elements: Any) -> Any:
    """Pointer to an address in memory, whose elements are of the type of the entries of a tuple."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(elements.dtype)(types.int64, elements), build


@intrinsic
def integer_at(typingctx: Any, number: Any, elements: Any) -> Any:
    """The int64 so many elements from an address on."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        at = builder.gep(builder.inttoptr(args[0], word.as_pointer()), [args[1]], source_etype=word)
        return builder.load(at, typ=word)

    return types.int64(types.int64, types.int64), build


@intrinsic
def offset(typingctx: Any, pointer: Any, elements: Any) -> Any:
    """Pointer a number of elements further on."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]], source_etype=element_type(signature.args[0].dtype))

    return pointer(pointer, types.int64), build


@intrinsic
def load(typingctx: Any, pointer: Any, elements: Any, lanes: Any) -> Any:
    """Vector of the elements from ``pointer + elements`` on, as many as ``lanes`` has entries."""
    vector = Vector(pointer.dtype, lanes.count)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = element_type(pointer.dtype)
        at = builder.gep(args[0], [args[1]], source_etype=element)
        kind = ir.VectorType(element, vector.count)
        at = builder.bitcast(at, kind.as_pointer())
        return builder.load(at, align=pointer.dtype.bitwidth // 8, typ=kind)

    return vector(pointer, types.int64, lanes), build


@intrinsic
def load_one(typingctx: Any, pointer: Any, elements: Any, lanes: Any) -> Any:
    """Vector with the one element at ``pointer + elements`` in all lanes."""
    vector = Vector(pointer.dtype, lanes.count)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = element_type(pointer.dtype)
        at = builder.gep(args[0], [args[1]], source_etype=element)
        return broadcast(builder, builder.load(at, typ=element), vector.count)

    return vector(pointer, types.int64, lanes), build


@intrinsic
def store(typingctx: Any, pointer: Any, elements: Any, value: Any) -> Any:
    """Write the lanes of a vector from ``pointer + elements`` on."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(args[0], [args[1]], source_etype=element_type(pointer.dtype))
        at = builder.bitcast(at, args[2].type.as_pointer())
        builder.store(args[2], at, align=pointer.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, value), build


@intrinsic
def prefetch(typingctx: Any, pointer: Any, elements: Any) -> Any:
    """Ask for the cache line of an element before it is needed; any address will do."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(args[0], [args[1]], source_etype=element_type(signature.args[0].dtype))
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        reading, kept, data = (ir.Constant(word, number) for number in (0, 2, 1))
        builder.call(function, [builder.bitcast(at, byte), reading, kept, data])
        return context.get_dummy_value()

    return types.void(pointer, types.int64), build


@intrinsic
def add_to(typingctx: Any, pointer: Any, elements: Any, number: Any) -> Any:
    """Add a number to the element at ``pointer + elements``."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = element_type(pointer.dtype)
        at = builder.gep(args[0], [args[1]], source_etype=element)
        builder.store(builder.fadd(builder.load(at, typ=element), args[2]), at)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, number), build


@intrinsic
def fill(typingctx: Any, pointer: Any, number: Any, lanes: Any) -> Any:
    """Vector with a number in all lanes, of the element type of ``pointer``."""
    vector = Vector(pointer.dtype, lanes.count)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.cast(builder, args[1], types.float64, pointer.dtype)
        return broadcast(builder, element, vector.count)

    return vector(pointer, types.float64, lanes), build


def broadcast(builder: Any, element: ir.Value, count: int) -> ir.Value:
    """Vector with an element in all lanes."""
    zero = ir.Constant(ir.IntType(32), 0)
    single = builder.insert_element(ir.Constant(ir.VectorType(element.type, count), ir.Undefined), element, zero)
    index = ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count)
    return builder.shuffle_vector(single, single, index)


@intrinsic
def add_up(typingctx: Any, vector: Any) -> Any:
    """Sum of the lanes, by halves, so that the order is always the same."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fold_halves(builder, args[0], builder.fadd)

    return vector.dtype(vector), build


def _fold_halves(builder: Any, value: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Combine the lower half of the lanes with the upper one until one lane is left."""
    count = value.type.count
    while count > 1:
        count //= 2
        low, high = (
            builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(ir.IntType(32), count), list(part)))
            for part in (range(count), range(count, 2 * count))
        )
        value = combine(low, high)
    return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))


def _arithmetic(instruction: str) -> Any:
    @intrinsic
    def operate(typingctx: Any, left: Any, right: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, instruction)(*args)

        return left(left, right), build

    return operate


def _operator(python: Any, operate: Any) -> None:
    @overload(python)
    def find(left: Any, right: Any) -> Any:
        def both(left: Any, right: Any) -> Any:
            return operate(left, right)

        return both if isinstance(left, Vector) and left == right else None


_operator(operator.add, _arithmetic("fadd"))
_operator(operator.sub, _arithmetic("fsub"))
_operator(operator.mul, _arithmetic("fmul"))
_operator(operator.truediv, _arithmetic("fdiv"))


@intrinsic
def multiply_add(typingctx: Any, factor: Any, other: Any, summand: Any) -> Any:
    """``factor * other + summand``, rounded once where the machine can."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _multiply_add(builder, *args)

    return factor(factor, other, summand), build


def _multiply_add(builder: Any, factor: ir.Value, other: ir.Value, summand: ir.Value) -> ir.Value:
    kind = factor.type
    name = f"llvm.fmuladd.v{kind.count}{'f32' if isinstance(kind.element, ir.FloatType) else 'f64'}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [factor, other, summand])


@intrinsic
def maximum(typingctx: Any, left: Any, right: Any) -> Any:
    """The larger lanes; where ``right`` is not a number, ``left``."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", args[1], args[0]), args[1], args[0])

    return left(left, right), build


# ln 2 as a sum of two numbers of which the first has trailing zeros, so that its multiples are exact.
_LN2 = {32: (0.693359375, -2.12194440e-4), 64: (6.93147180369123816490e-01, 1.90821492927058770002e-10)}
_MANTISSA = {32: 23, 64: 52}


def _series(degree: int) -> list[float]:
    """Polynomial near the best for the exponential between -ln 2 / 2 and ln 2 / 2; the constant first."""
    half = math.log(2) / 2
    best = np.polynomial.Chebyshev.interpolate(np.exp, degree, domain=[-half, half])
    return [float(number) for number in best.convert(kind=np.polynomial.Polynomial).coef]


# For float64 there is nothing to gain on Taylor's polynomial: its coefficients are exact.
_SERIES = {32: _series(6), 64: [1 / math.factorial(degree) for degree in range(14)]}


@intrinsic
def exp(typingctx: Any, vector: Any) -> Any:
    """Exponential, within 2 units in the last place; zero from half the smallest normal number down."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _exp(builder, args[0], vector.dtype.bitwidth)

    return vector(vector), build


def _exp(builder: Any, x: ir.Value, bits: int) -> ir.Value:
    mantissa, (high, low) = _MANTISSA[bits], _LN2[bits]
    bias = 2 ** (bits - mantissa - 2) - 1
    # At these ends the exponent of the power of two is that of zero and of infinity.
    lowest, highest = _same(x, -bias * math.log(2)), _same(x, (bias + 1) * math.log(2))
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
    # Adding 1.5 * 2^mantissa rounds to an integer and leaves it in the low bits.
    shift = _same(x, 1.5 * 2.0**mantissa)
    shifted = _multiply_add(builder, x, _same(x, 1 / math.log(2)), shift)
    power = builder.fsub(shifted, shift)
    rest = _multiply_add(builder, power, _same(x, -high), x)
    rest = _multiply_add(builder, power, _same(x, -low), rest)
    *lower, leading = _SERIES[bits]
    series = _same(x, leading)
    for coefficient in reversed(lower):
        series = _multiply_add(builder, series, rest, _same(x, coefficient))
    integers = ir.VectorType(ir.IntType(bits), x.type.count)
    exponent = builder.add(builder.bitcast(shifted, integers), _same(integers, bias))
    exponent = builder.shl(exponent, _same(integers, mantissa))
    return builder.fmul(series, builder.bitcast(exponent, x.type))


@intrinsic
def keep_mask(typingctx: Any, pointer: Any, counter: Any, threshold: Any, lanes: Any) -> Any:
    """1 in lanes to keep and 0 in lanes to drop: a hash of counter and lane, dropped if below the threshold.

    The hash is the finalizer of MurmurHash3, on 32 bits; the threshold is the probability times 2^32.
    """
    vector = Vector(pointer.dtype, lanes.count)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, count = ir.IntType(32), vector.count
        integers = ir.VectorType(word, count)
        value = broadcast(builder, builder.trunc(args[1], word), count)
        value = builder.add(value, ir.Constant(integers, [lane * 0x9E3779B9 % 2**32 for lane in range(count)]))
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            value = builder.xor(value, builder.lshr(value, _same(integers, shift)))
            value = builder.mul(value, _same(integers, factor))
        bound = broadcast(builder, builder.trunc(args[2], word), count)
        kept = builder.icmp_unsigned(">=", value, bound)
        return builder.uitofp(kept, ir.VectorType(element_type(pointer.dtype), count))

    return vector(pointer, types.uint64, types.uint64, lanes), build


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
            def extreme(low: ir.Value, high: ir.Value) -> ir.Value:
                return builder.select(builder.fcmp_ordered(comparison, high, low), high, low)

            return _fold_halves(builder, args[0], extreme)

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
