"""Floating-point arithmetic and conversions.

fp16 and bf16 are computed in fp32 and rounded once to their type, which for + - * / and sqrt is
what a unit of that width gives. Nothing is fused that the IR does not fuse: contracting a*b+c is a
freedom of code generation that this lane does not take. fp8 has conversions and the absolute value
only: Triton 3.9's AMD backend cannot compile any other arithmetic or comparison of it either.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.errors import UnsupportedOp
from kvfuzz.cpu.ir import FLOAT_BITS, INTEGER_BITS, Op
from kvfuzz.cpu.machine import Machine, Step
from kvfuzz.cpu.numerics import FORMATS, convert, decode, encode, fused_multiply_add
from kvfuzz.cpu.ops_integer import signed, unsigned
from kvfuzz.cpu.values import STORAGE

Array = NDArray[Any]
Binder = Callable[[Op], Step]


def reject_fp8(op: Op, element: str) -> None:
    """Raise `UnsupportedOp` where arithmetic in fp8 would have to be defined."""
    if FLOAT_BITS.get(element) == 8:
        raise UnsupportedOp(f"{op.name} on {element}", op.location.name, op.location.line)


def elementwise(compute: Callable[..., Array]) -> Binder:
    """A binder for ops whose operands and result have one floating-point type."""

    def bind(op: Op) -> Step:
        element = op.type.element
        reject_fp8(op, element)
        if element in ("f32", "f64"):
            return lambda _, *values: compute(*values)

        def step(_: Machine, *values: Array) -> Array:
            return encode(compute(*[decode(value, element) for value in values]), element)

        return step

    return bind


def _by_sign(clear: bool) -> Binder:
    """Sign changes touch one bit, so that NaN payloads stay."""

    def bind(op: Op) -> Step:
        dtype = np.dtype(STORAGE[op.type.element])
        kind = np.dtype(f"u{dtype.itemsize}").type
        sign = kind(1 << (8 * dtype.itemsize - 1))
        if not clear:
            reject_fp8(op, op.type.element)
        if clear:
            return lambda _, a: (a.view(kind) & ~sign).view(dtype)
        return lambda _, a: (a.view(kind) ^ sign).view(dtype)

    return bind


_ORDERED: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "ne": np.not_equal,
}


def _either_nan(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


def _predicate(word: str) -> Callable[[Array, Array], Array]:
    if word == "ord":
        return lambda a, b: ~_either_nan(a, b)
    if word == "uno":
        return _either_nan
    compute = _ORDERED[word[1:]]
    if word == "one":
        return lambda a, b: (a != b) & ~_either_nan(a, b)
    if word[0] == "u" and word != "une":
        return lambda a, b: compute(a, b) | _either_nan(a, b)
    return compute


def _compare(op: Op) -> Step:
    compute = _predicate(op.words[0])
    element = op.operand_types[0].element
    reject_fp8(op, element)
    return lambda _, a, b: compute(decode(a, element), decode(b, element))


def _convert(op: Op) -> Step:
    source, target = op.operand_types[0].element, op.type.element
    rounding = str(op.attributes.get("rounding", "rtne"))
    if rounding not in ("rtne", "rtz"):
        raise UnsupportedOp(f"{op.name} {rounding}", op.location.name, op.location.line)
    if target == "f32" and source in FORMATS:
        return lambda _, a: decode(a, source)
    return lambda _, a: convert(a, source, target, rounding)


def _from_integer(is_unsigned: bool) -> Binder:
    def bind(op: Op) -> Step:
        view = unsigned if is_unsigned else signed
        target = op.type.element
        reject_fp8(op, target)
        dtype = STORAGE[target]
        if target in ("f32", "f64"):
            return lambda _, a: view(a).astype(dtype)
        if INTEGER_BITS[op.operand_types[0].element] < 64:
            return lambda _, a: encode(view(a).astype(np.float64), target)
        return lambda _, a: encode(_sticky(view(a)), target)

    return bind


def _sticky(value: Array) -> Array:
    """A 64-bit integer as fp64, its low bits folded into one so that rounding again is safe."""
    folded = value >> 11 << 11 | ((value & 2047) != 0).astype(value.dtype) << 11
    small = (value >> 52 == 0) | (
        value >> 52 == value.dtype.type(-1 if value.dtype.kind == "i" else 0)
    )
    return np.where(small, value, folded).astype(np.float64)


def _to_integer(is_unsigned: bool) -> Binder:
    """Toward zero. Beyond the range (undefined in MLIR) a 32- or 64-bit register saturates, NaN
    gives 0, as AMD's conversion instructions do; a narrower integer keeps the low bits of that.
    """

    def bind(op: Op) -> Step:
        source, target = op.operand_types[0].element, op.type.element
        reject_fp8(op, source)
        dtype = STORAGE[target]
        bits = 64 if INTEGER_BITS[target] == 64 else 32
        info = np.iinfo(f"{'u' if is_unsigned else 'i'}{bits // 8}")

        def step(_: Machine, a: Array) -> Array:
            wide = np.trunc(decode(a, source).astype(np.float64))
            wide = np.where(np.isnan(wide), 0.0, wide)
            over, under = wide >= float(info.max), wide <= float(info.min)
            inner = np.where(over | under, 0.0, wide)
            whole = inner.astype(np.uint64 if is_unsigned else np.int64)
            whole = np.where(over, info.max, np.where(under, info.min, whole)).astype(info.dtype)
            return (whole & 1).astype(np.bool_) if target == "i1" else whole.astype(dtype)

        return step

    return bind


def _signed_zeros(compute: Callable[[Array, Array], Array], sign: int) -> Binder:
    """Minimum or maximum in which -0 is less than +0, whatever NumPy's vector units do."""

    def ordered(a: Array, b: Array) -> Array:
        result = compute(a, b)
        if (result == 0).any():
            zeros = sign * (sign * a + sign * b)
            result = np.where((a == 0) & (b == 0), zeros, result)
        return result

    return elementwise(ordered)


def _clamp(op: Op) -> Step:
    keeps_nan = op.attributes.get("propagateNan") == "all"

    def compute(x: Array, low: Array, high: Array) -> Array:
        if keeps_nan:
            return np.minimum(np.maximum(x, low), high)
        return np.fmin(np.fmax(x, low), high)

    return elementwise(compute)(op)


def _divide(a: Array, b: Array) -> Array:
    return a / b


def _reciprocal_root(a: Array) -> Array:
    return (1.0 / np.sqrt(a.astype(np.float64))).astype(a.dtype)


def _in_double(compute: Callable[..., Array]) -> Callable[..., Array]:
    """A function that libm gives to within an ulp, taken in fp64 and rounded."""
    return lambda *values: compute(*[v.astype(np.float64) for v in values]).astype(values[0].dtype)


def _erf(values: Array) -> Array:
    import math

    flat = [math.erf(float(value)) for value in values.ravel()]
    return np.array(flat, np.float64).reshape(values.shape)


FLOAT_OPS: dict[str, Binder] = {
    "arith.addf": elementwise(np.add),
    "arith.subf": elementwise(np.subtract),
    "arith.mulf": elementwise(np.multiply),
    "arith.divf": elementwise(_divide),
    "tt.precise_divf": elementwise(_divide),
    "arith.remf": elementwise(np.fmod),
    "arith.negf": _by_sign(clear=False),
    "math.absf": _by_sign(clear=True),
    "arith.maxnumf": _signed_zeros(np.fmax, 1),
    "arith.minnumf": _signed_zeros(np.fmin, -1),
    "arith.maximumf": _signed_zeros(np.maximum, 1),
    "arith.minimumf": _signed_zeros(np.minimum, -1),
    "arith.cmpf": _compare,
    "arith.extf": _convert,
    "arith.truncf": _convert,
    "tt.fp_to_fp": _convert,
    "arith.sitofp": _from_integer(False),
    "arith.uitofp": _from_integer(True),
    "arith.fptosi": _to_integer(False),
    "arith.fptoui": _to_integer(True),
    "tt.clampf": _clamp,
    "tt.precise_sqrt": elementwise(np.sqrt),
    "math.sqrt": elementwise(np.sqrt),
    "math.rsqrt": elementwise(_reciprocal_root),
    "math.exp": elementwise(_in_double(np.exp)),
    "math.exp2": elementwise(_in_double(np.exp2)),
    "math.log": elementwise(_in_double(np.log)),
    "math.log2": elementwise(_in_double(np.log2)),
    "math.sin": elementwise(_in_double(np.sin)),
    "math.cos": elementwise(_in_double(np.cos)),
    "math.tanh": elementwise(_in_double(np.tanh)),
    "math.erf": elementwise(_in_double(_erf)),
    "math.powf": elementwise(_in_double(np.power)),
    "math.floor": elementwise(np.floor),
    "math.ceil": elementwise(np.ceil),
    "math.trunc": elementwise(np.trunc),
    "math.roundeven": elementwise(np.rint),
    "math.fma": elementwise(fused_multiply_add),
}
