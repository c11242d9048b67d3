"""Explicit vectors for Numba: values of a few lanes that LLVM stores in one register.

Numba vectorizes a loop only if it can prove that this is allowed and useful, which it cannot for loops over 8 heads. A
:class:`Vector` is explicit: ``load`` reads lanes from memory, ``+ - * /``, ``multiply_add``, ``maximum`` and ``exp``
operate on all lanes at once, and ``store`` writes them. LLVM splits vectors that are wider than the machine's
registers. The type and number of lanes are those of a tuple, ``lanes = (np.float32(0),) * 8``.

Pointers are addresses of elements of one type, and ``offset`` moves them by elements. Bounds are not checked.
"""

import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, overload, register_model


class Vector(types.Type):
    """Numba type of ``count`` lanes of a floating type."""

    def __init__(self, dtype: types.Float, count: int) -> None:
        self.dtype, self.count = dtype, count
        super().__init__(f"Vector({dtype}, {count})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(_element(fe_type.dtype), fe_type.count))


def _element(dtype: types.Float) -> ir.Type:
    """Return LLVM's type of an element."""
    return ir.FloatType() if dtype.bitwidth == 32 else ir.DoubleType()


def _vector(pointer: Any, lanes: Any) -> Vector:
    """Return the type of vectors of a pointer's elements, with as many lanes as a tuple has entries."""
    return Vector(pointer.dtype, lanes.count)


class _Code(NamedTuple):
    """The builder of LLVM code for an instruction, and the types of its arguments and its result."""

    context: Any
    builder: Any
    signature: Any

    def place(self, pointer: ir.Value, elements: ir.Value, kind: ir.Type | None = None) -> ir.Value:
        """Return the pointer, the first argument, moved by a number of elements and cast to a ``kind`` of value."""
        at = self.builder.gep(pointer, [elements], source_etype=_element(self.signature.args[0].dtype))
        return at if kind is None else self.builder.bitcast(at, kind.as_pointer())

    def call(self, name: str, result: ir.Type, operands: list[ir.Value]) -> ir.Value:
        """Call a function of LLVM."""
        function = ir.FunctionType(result, [operand.type for operand in operands])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, function, name), operands)

    def spread(self, element: ir.Value, count: int) -> ir.Value:
        """Return a vector with an element in all lanes."""
        zero = ir.Constant(ir.IntType(32), 0)
        empty = ir.Constant(ir.VectorType(element.type, count), ir.Undefined)
        index = ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count)
        single = self.builder.insert_element(empty, element, zero)
        return self.builder.shuffle_vector(single, single, index)

    def multiply_add(self, factor: ir.Value, other: ir.Value, summand: ir.Value) -> ir.Value:
        """Return ``factor * other + summand``, rounded once if the machine supports it."""
        kind = factor.type
        name = f"llvm.fmuladd.v{kind.count}{'f32' if isinstance(kind.element, ir.FloatType) else 'f64'}"
        return self.call(name, kind, [factor, other, summand])

    def fold(self, value: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Combine the lower half of the lanes with the upper half until one lane remains."""
        count = value.type.count
        while count > 1:
            count //= 2
            low, high = (
                self.builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(ir.IntType(32), count), list(part)))
                for part in (range(count), range(count, 2 * count))
            )
            value = combine(low, high)
        return self.builder.extract_element(value, ir.Constant(ir.IntType(32), 0))


def _instruction(typed: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Build an intrinsic of Numba from a function of the argument types that returns its signature.

    The decorated function writes the code. Its arguments are a :class:`_Code` and LLVM's values of the arguments.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        def define(typingctx: Any, *given: Any) -> Any:
            def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                result = write(_Code(context, builder, signature), *args)
                return context.get_dummy_value() if result is None else result

            return typed(*given), build

        define.__name__, define.__doc__ = write.__name__, write.__doc__
        define.__signature__ = inspect.signature(write)  # type: ignore[attr-defined]
        return intrinsic(define)

    return decorate


def _same(vector: ir.Value | ir.Type, value: float) -> ir.Constant:
    """Return the same constant in all lanes."""
    kind = vector if isinstance(vector, ir.Type) else vector.type
    return ir.Constant(kind, [value] * kind.count)


@_instruction(lambda: types.void())
def stay_apart(code: _Code) -> None:
    """Prevent LLVM from inlining the function that calls this, which would multiply the compilation time."""
    code.builder.function.attributes.add("noinline")


@_instruction(lambda number, elements: types.CPointer(elements.dtype)(types.int64, elements))
def at_address(code: _Code, number: ir.Value, elements: ir.Value) -> ir.Value:
    """Return a pointer to an address in memory, with the element type of a tuple."""
    return code.builder.inttoptr(number, code.context.get_value_type(code.signature.return_type))


@_instruction(lambda number, elements: types.int64(types.int64, types.int64))
def integer_at(code: _Code, number: ir.Value, elements: ir.Value) -> ir.Value:
    """Return the int64 at an address plus a number of elements."""
    word = ir.IntType(64)
    at = code.builder.gep(code.builder.inttoptr(number, word.as_pointer()), [elements], source_etype=word)
    return code.builder.load(at, typ=word)


@_instruction(lambda pointer, elements: pointer(pointer, types.int64))
def offset(code: _Code, pointer: ir.Value, elements: ir.Value) -> ir.Value:
    """Return a pointer moved by a number of elements."""
    return code.place(pointer, elements)


@_instruction(lambda pointer, elements, lanes: _vector(pointer, lanes)(pointer, types.int64, lanes))
def load(code: _Code, pointer: ir.Value, elements: ir.Value, lanes: ir.Value) -> ir.Value:
    """Return the vector of elements from ``pointer + elements`` on, with as many lanes as ``lanes`` has entries."""
    vector = code.signature.return_type
    kind = ir.VectorType(_element(vector.dtype), vector.count)
    return code.builder.load(code.place(pointer, elements, kind), align=vector.dtype.bitwidth // 8, typ=kind)


@_instruction(lambda pointer, elements, lanes: _vector(pointer, lanes)(pointer, types.int64, lanes))
def load_one(code: _Code, pointer: ir.Value, elements: ir.Value, lanes: ir.Value) -> ir.Value:
    """Return a vector with the element at ``pointer + elements`` in all lanes."""
    vector = code.signature.return_type
    return code.spread(code.builder.load(code.place(pointer, elements), typ=_element(vector.dtype)), vector.count)


@_instruction(lambda pointer, elements, value: types.void(pointer, types.int64, value))
def store(code: _Code, pointer: ir.Value, elements: ir.Value, value: ir.Value) -> None:
    """Write the lanes of a vector from ``pointer + elements`` on."""
    align = code.signature.args[0].dtype.bitwidth // 8
    code.builder.store(value, code.place(pointer, elements, value.type), align=align)


@_instruction(lambda pointer, elements: types.void(pointer, types.int64))
def prefetch(code: _Code, pointer: ir.Value, elements: ir.Value) -> None:
    """Prefetch the cache line of an element. The address may be invalid."""
    reading, kept, data = (ir.Constant(ir.IntType(32), number) for number in (0, 2, 1))
    at = code.place(pointer, elements, ir.IntType(8))
    code.call("llvm.prefetch.p0", ir.VoidType(), [at, reading, kept, data])


@_instruction(lambda pointer, elements, number: types.void(pointer, types.int64, number))
def add_to(code: _Code, pointer: ir.Value, elements: ir.Value, number: ir.Value) -> None:
    """Add a number to the element at ``pointer + elements``."""
    at = code.place(pointer, elements)
    code.builder.store(code.builder.fadd(code.builder.load(at, typ=number.type), number), at)


@_instruction(lambda pointer, number, lanes: _vector(pointer, lanes)(pointer, types.float64, lanes))
def fill(code: _Code, pointer: ir.Value, number: ir.Value, lanes: ir.Value) -> ir.Value:
    """Return a vector with a number in all lanes, with the element type of ``pointer``."""
    vector = code.signature.return_type
    return code.spread(code.context.cast(code.builder, number, types.float64, vector.dtype), vector.count)


@_instruction(lambda pointer: types.float64(pointer))
def lowest(code: _Code, pointer: ir.Value) -> ir.Value:
    """Return the lowest finite number of the element type of ``pointer``."""
    return ir.Constant(ir.DoubleType(), float(np.finfo(str(code.signature.args[0].dtype)).min))


@_instruction(lambda vector: vector.dtype(vector))
def add_up(code: _Code, vector: ir.Value) -> ir.Value:
    """Return the sum of the lanes, computed by halves, so that the order is fixed."""
    return code.fold(vector, code.builder.fadd)


def _operator(python: Any, instruction: str) -> None:
    """Define an operator of Python for vectors of one type."""

    @_instruction(lambda left, right: left(left, right))
    def operate(code: _Code, left: ir.Value, right: ir.Value) -> ir.Value:
        return getattr(code.builder, instruction)(left, right)

    @overload(python)
    def find(left: Any, right: Any) -> Any:
        def both(left: Any, right: Any) -> Any:
            return operate(left, right)

        return both if isinstance(left, Vector) and left == right else None


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")


@_instruction(lambda factor, other, summand: factor(factor, other, summand))
def multiply_add(code: _Code, factor: ir.Value, other: ir.Value, summand: ir.Value) -> ir.Value:
    """Return ``factor * other + summand``, rounded once if the machine supports it."""
    return code.multiply_add(factor, other, summand)


@_instruction(lambda left, right: left(left, right))
def maximum(code: _Code, left: ir.Value, right: ir.Value) -> ir.Value:
    """Return the larger value in each lane, or ``left`` if ``right`` is NaN."""
    return code.builder.select(code.builder.fcmp_ordered(">", right, left), right, left)


# ln 2 as a sum of two numbers, the first of which has trailing zeros, so that its multiples are exact.
_LN2 = {32: (0.693359375, -2.12194440e-4), 64: (6.93147180369123816490e-01, 1.90821492927058770002e-10)}
_MANTISSA = {32: 23, 64: 52}


def _series(degree: int) -> list[float]:
    """Return a nearly optimal polynomial for the exponential between -ln 2 / 2 and ln 2 / 2, constant first."""
    half = math.log(2) / 2
    best = np.polynomial.Chebyshev.interpolate(np.exp, degree, domain=[-half, half])
    return [float(number) for number in best.convert(kind=np.polynomial.Polynomial).coef]


# For float64, Taylor's polynomial is used, since another one would not be more accurate.
_SERIES = {32: _series(6), 64: [1 / math.factorial(degree) for degree in range(14)]}


@_instruction(lambda vector: vector(vector))
def exp(code: _Code, x: ir.Value) -> ir.Value:
    """Return the exponential, within 2 units in the last place, and zero below half the smallest normal number."""
    builder, bits = code.builder, code.signature.return_type.dtype.bitwidth
    mantissa, (high, low) = _MANTISSA[bits], _LN2[bits]
    bias = 2 ** (bits - mantissa - 2) - 1
    # At these limits, the exponent of the power of two is that of zero and of infinity.
    lowest, highest = _same(x, -bias * math.log(2)), _same(x, (bias + 1) * math.log(2))
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
    # Adding 1.5 * 2^mantissa rounds to an integer, which is then in the low bits.
    shift = _same(x, 1.5 * 2.0**mantissa)
    shifted = code.multiply_add(x, _same(x, 1 / math.log(2)), shift)
    power = builder.fsub(shifted, shift)
    rest = code.multiply_add(power, _same(x, -high), x)
    rest = code.multiply_add(power, _same(x, -low), rest)
    *lower, leading = _SERIES[bits]
    series = _same(x, leading)
    for coefficient in reversed(lower):
        series = code.multiply_add(series, rest, _same(x, coefficient))
    integers = ir.VectorType(ir.IntType(bits), x.type.count)
    exponent = builder.add(builder.bitcast(shifted, integers), _same(integers, bias))
    exponent = builder.shl(exponent, _same(integers, mantissa))
    return builder.fmul(series, builder.bitcast(exponent, x.type))


@_instruction(
    lambda pointer, counter, threshold, lanes: _vector(pointer, lanes)(pointer, types.uint64, types.uint64, lanes)
)
def keep_mask(code: _Code, pointer: ir.Value, counter: ir.Value, threshold: ir.Value, lanes: ir.Value) -> ir.Value:
    """Return 1 in lanes to keep and 0 in lanes to drop, for which a hash of counter and lane is below the threshold.

    The hash is the 32-bit finalizer of MurmurHash3, and the threshold is the probability times 2^32.
    """
    builder, vector, word = code.builder, code.signature.return_type, ir.IntType(32)
    count, integers = vector.count, ir.VectorType(word, vector.count)
    value = code.spread(builder.trunc(counter, word), count)
    value = builder.add(value, ir.Constant(integers, [lane * 0x9E3779B9 % 2**32 for lane in range(count)]))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = builder.xor(value, builder.lshr(value, _same(integers, shift)))
        value = builder.mul(value, _same(integers, factor))
    kept = builder.icmp_unsigned(">=", value, code.spread(builder.trunc(threshold, word), count))
    return builder.uitofp(kept, ir.VectorType(_element(vector.dtype), count))


def _pick(comparison: str) -> Any:
    @_instruction(lambda left, right, chosen, other: left(left, right, chosen, other))
    def pick(code: _Code, left: ir.Value, right: ir.Value, chosen: ir.Value, other: ir.Value) -> ir.Value:
        return code.builder.select(code.builder.fcmp_ordered(comparison, left, right), chosen, other)

    return pick


# Return the lanes of ``chosen`` where left > right, or left == right, and the lanes of ``other`` elsewhere.
pick_greater, pick_equal = _pick(">"), _pick("==")


@_instruction(
    lambda pointer, elements, stride, lanes: _vector(pointer, lanes)(pointer, types.int64, types.int64, lanes)
)
def gather(code: _Code, pointer: ir.Value, elements: ir.Value, stride: ir.Value, lanes: ir.Value) -> ir.Value:
    """Return the vector of elements at ``pointer + elements + lane * stride``."""
    builder, vector, word = code.builder, code.signature.return_type, ir.IntType(64)
    element, count, size = _element(vector.dtype), vector.count, vector.dtype.bitwidth // 8
    first = builder.ptrtoint(code.place(pointer, elements), word)
    lane = ir.Constant(ir.VectorType(word, count), [size * number for number in range(count)])
    places = builder.add(code.spread(first, count), builder.mul(code.spread(stride, count), lane))
    places = builder.inttoptr(places, ir.VectorType(element.as_pointer(), count))
    kind, every = ir.VectorType(element, count), ir.Constant(ir.VectorType(ir.IntType(1), count), [1] * count)
    operands = [places, ir.Constant(ir.IntType(32), size), every, ir.Constant(kind, ir.Undefined)]
    return code.call(f"llvm.masked.gather.v{count}f{vector.dtype.bitwidth}.v{count}p0", kind, operands)
