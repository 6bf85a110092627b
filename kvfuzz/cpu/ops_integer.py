"""Integer arithmetic: two's complement that wraps at its width, division that truncates."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.ir import INTEGER_BITS, Op, Type
from kvfuzz.cpu.machine import Machine, Step
from kvfuzz.cpu.values import STORAGE, choose, rank, raw

Array = NDArray[Any]
Binder = Callable[[Op], Step]


def unsigned(value: Array) -> Array:
    """The same bits as an unsigned integer; i1 as 0 or 1."""
    if value.dtype == np.bool_:
        return value.view(np.uint8)
    return value.view(f"u{value.dtype.itemsize}")


def signed(value: Array) -> Array:
    """The value with its sign; i1 as 0 or -1."""
    return -value.view(np.int8) if value.dtype == np.bool_ else value


def divide_truncating(a: Array, b: Array) -> Array:
    """Quotient rounded toward zero. Division by zero gives 0 (undefined in Triton)."""
    quotient: Array = np.floor_divide(a - np.fmod(a, b), b)
    return quotient


def _binary(compute: Callable[[Array, Array], Array], is_unsigned: bool = False) -> Binder:
    """A binder for same-type integer ops; i1 is computed on one bit of a byte."""

    def plain(_: Machine, a: Array, b: Array) -> Array:
        return compute(a, b)

    def bind(op: Op) -> Step:
        if op.type.element == "i1":
            view = unsigned if is_unsigned else signed
            return lambda _, a, b: (compute(view(a), view(b)) & 1).astype(np.bool_)
        if is_unsigned:
            dtype = STORAGE[op.type.element]
            return lambda _, a, b: compute(unsigned(a), unsigned(b)).view(dtype)
        return plain  # one for all ops: a campaign keeps tens of thousands

    return bind


def _shift(compute: Callable[[Array, Array], Array], is_unsigned: bool = False) -> Binder:
    """Shifts, which look at the low bits of the distance only: 5 for i32, 6 for i64, and 4 for i8
    and i16, whose register is 16 bits wide (`v_lshlrev_b16`).
    """

    def bind(op: Op) -> Step:
        bits = INTEGER_BITS[op.type.element]
        # The distance keeps this width in a copy of the op over wider integers (`overflow`).
        width = int(str(op.attributes.setdefault("distances", max(bits, 16))))
        dtype = STORAGE[op.type.element]
        last = np.dtype(dtype).type(width - 1) if bits > 1 else np.bool_(False)
        if is_unsigned:
            return lambda _, a, b: compute(unsigned(a), unsigned(b & last)).view(dtype)
        return lambda _, a, b: compute(a, b & last)

    return bind


def _bitwise(compute: Callable[[Array, Array], Array]) -> Binder:
    return lambda _op: lambda _, a, b: compute(a, b)


_COMPARISONS: dict[str, tuple[Callable[[Array, Array], Array], bool]] = {
    "eq": (np.equal, False),
    "ne": (np.not_equal, False),
    "slt": (np.less, False),
    "sle": (np.less_equal, False),
    "sgt": (np.greater, False),
    "sge": (np.greater_equal, False),
    "ult": (np.less, True),
    "ule": (np.less_equal, True),
    "ugt": (np.greater, True),
    "uge": (np.greater_equal, True),
}


def _compare(op: Op) -> Step:
    compute, is_unsigned = _COMPARISONS[op.words[0]]
    if is_unsigned:
        return lambda _, a, b: compute(unsigned(a), unsigned(b))
    if op.operand_types[0].element == "i1":
        return lambda _, a, b: compute(signed(a), signed(b))
    return lambda _, a, b: compute(a, b)


def _select(_: Op) -> Step:
    def step(_: Machine, condition: Any, a: Any, b: Any) -> Any:
        condition = raw(condition)
        if condition.ndim <= rank(a):  # a scalar may choose between tensors
            condition = condition.reshape(len(condition), *[1] * rank(a))
        return choose(condition, a, b)

    return step


def cast_integer(source: Type, target: Type, is_unsigned: bool) -> Callable[[Array], Array]:
    """Extend, with the sign or zeros, or truncate to the target's width."""
    dtype = STORAGE[target.element]
    if target.element == "i1":
        return lambda a: (a & 1).astype(np.bool_)
    if is_unsigned:
        return lambda a: unsigned(a).astype(f"u{np.dtype(dtype).itemsize}").view(dtype)
    if source.element == "i1":
        return lambda a: signed(a).astype(dtype)
    return lambda a: a.astype(dtype)


def _cast(is_unsigned: bool) -> Binder:
    def bind(op: Op) -> Step:
        cast = cast_integer(op.operand_types[0], op.type, is_unsigned)
        return lambda _, a: cast(a)

    return bind


def _high_product(is_unsigned: bool) -> Callable[[Op], Callable[[Array, Array], Array]]:
    """The upper half of the double-width product."""

    def bind(op: Op) -> Callable[[Array, Array], Array]:
        bits = INTEGER_BITS[op.type.element]
        dtype = STORAGE[op.type.element]
        if bits == 64:
            return _high_product_64_unsigned if is_unsigned else _high_product_64_signed
        wide = np.uint64 if is_unsigned else np.int64
        view = unsigned if is_unsigned else signed

        def step(a: Array, b: Array) -> Array:
            product = view(a).astype(wide) * view(b).astype(wide)
            return (product >> wide(bits)).astype(dtype)

        return step

    return bind


def _high_product_64_unsigned(a: Array, b: Array) -> Array:
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b = unsigned(a), unsigned(b)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    middle = a_high * b_low + (a_low * b_low >> half)
    other = a_low * b_high + (middle & low)
    high: Array = a_high * b_high + (middle >> half) + (other >> half)
    return high.view(np.int64)


def _high_product_64_signed(a: Array, b: Array) -> Array:
    return _high_product_64_unsigned(a, b) - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)


def _mulhi(op: Op) -> Step:
    high = _high_product(True)(op)
    return lambda _, a, b: high(a, b)


def _extended_product(is_unsigned: bool) -> Binder:
    def bind(op: Op) -> Step:
        high = _high_product(is_unsigned)(op)
        return lambda _, a, b: (a * b, high(a, b))

    return bind


def _extended_sum(op: Op) -> Step:
    dtype = STORAGE[op.type.element]

    def step(_: Machine, a: Array, b: Array) -> tuple[Array, Array]:
        total = unsigned(a) + unsigned(b)
        return total.view(dtype), total < unsigned(a)

    return step


INTEGER_OPS: dict[str, Binder] = {
    "arith.addi": _binary(np.add),
    "arith.subi": _binary(np.subtract),
    "arith.muli": _binary(np.multiply),
    "arith.divsi": _binary(divide_truncating),
    "arith.divui": _binary(np.floor_divide, True),
    "arith.remsi": _binary(np.fmod),
    "arith.remui": _binary(np.remainder, True),
    "arith.floordivsi": _binary(np.floor_divide),
    "arith.ceildivsi": _binary(lambda a, b: -np.floor_divide(-a, b)),
    "arith.ceildivui": _binary(lambda a, b: np.floor_divide(a, b) + (a % b != 0), True),
    "arith.andi": _bitwise(np.bitwise_and),
    "arith.ori": _bitwise(np.bitwise_or),
    "arith.xori": _bitwise(np.bitwise_xor),
    "arith.shli": _shift(np.left_shift),
    "arith.shrsi": _shift(np.right_shift),
    "arith.shrui": _shift(np.right_shift, True),
    "arith.maxsi": _binary(np.maximum),
    "arith.minsi": _binary(np.minimum),
    "arith.maxui": _binary(np.maximum, True),
    "arith.minui": _binary(np.minimum, True),
    "math.absi": lambda _op: lambda _, a: np.abs(a),
    "math.ctpop": lambda op: (
        lambda _, a: np.bitwise_count(unsigned(a)).astype(STORAGE[op.type.element])
    ),
    "arith.cmpi": _compare,
    "arith.select": _select,
    "arith.extsi": _cast(False),
    "arith.extui": _cast(True),
    "arith.trunci": _cast(False),
    "arith.index_cast": _cast(False),
    "arith.index_castui": _cast(True),
    "tt.mulhiui": _mulhi,
    "arith.mului_extended": _extended_product(True),
    "arith.mulsi_extended": _extended_product(False),
    "arith.addui_extended": _extended_sum,
}
