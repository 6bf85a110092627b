"""Floating-point arithmetic, as AMD's instructions do it.

fp16 and bf16 are computed in fp32 and rounded once to their type, which for + - * / and sqrt is
what a unit of that width gives. Nothing is fused that the IR does not fuse: contracting a*b+c is a
freedom of code generation that this lane does not take. fp8 has conversions and the absolute value
only: Triton 3.9's AMD backend cannot compile any other arithmetic or comparison of it either.

Roots, powers, logarithms and trigonometry (`tl.sqrt`, `tl.rsqrt`, `tl.exp`, `tl.log`, `tl.sin` and
their like, not `tl.sqrt_rn`) are not true to the bit: here they are rounded once, on AMD they are
instructions good to about one unit in the last place. `exp2`, `sqrt` and `rsqrt` of fp32 are such
an instruction alone, which takes subnormal numbers for zero.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.arch import Target
from kvfuzz.cpu.errors import UnsupportedOp
from kvfuzz.cpu.ir import FLOAT_BITS, Op
from kvfuzz.cpu.machine import Machine, Step
from kvfuzz.cpu.numerics import decode, fused_multiply_add, fused_to_odd
from kvfuzz.cpu.values import STORAGE

Array = NDArray[Any]
Binder = Callable[[Op, Target], Step]


def reject_fp8(op: Op, element: str) -> None:
    """Raise `UnsupportedOp` where arithmetic in fp8 would have to be defined."""
    if FLOAT_BITS.get(element) == 8:
        raise UnsupportedOp(f"{op.name} on {element}", op.location.name, op.location.line)


def elementwise(compute: Callable[..., Array]) -> Binder:
    """A binder for ops whose operands and result have one floating-point type."""

    def bind(op: Op, target: Target) -> Step:
        element = op.type.element
        reject_fp8(op, element)
        if element in ("f32", "f64"):
            return lambda _, *values: compute(*values)

        def step(_: Machine, *values: Array) -> Array:
            return target.encode(compute(*[decode(value, element) for value in values]), element)

        return step

    return bind


def _by_sign(clear: bool) -> Binder:
    """Sign changes touch one bit, so that NaN payloads stay."""

    def bind(op: Op, _: Target) -> Step:
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


def _compare(op: Op, _: Target) -> Step:
    compute = _predicate(op.words[0])
    element = op.operand_types[0].element
    reject_fp8(op, element)
    return lambda _, a, b: compute(decode(a, element), decode(b, element))


def _ordered(compute: Callable[[Array, Array], Array], sign: int) -> Callable[..., Array]:
    """Minimum or maximum in which -0 is less than +0, whatever NumPy's vector units do."""

    def ordered(a: Array, b: Array) -> Array:
        result = compute(a, b)
        if (result == 0).any():
            zeros = sign * (sign * a + sign * b)
            result = np.where((a == 0) & (b == 0), zeros, result)
        return result

    return ordered


_maximum, _minimum = _ordered(np.fmax, 1), _ordered(np.fmin, -1)


def _median(x: Array, low: Array, high: Array) -> Array:
    """`v_med3` as AMD's manual defines it: the middle one, or with a NaN the least of the others.

    It compares before it picks, so that among zeros of both signs the sign is not the middle one's.
    """
    largest = np.fmax(np.fmax(x, low), high)
    rest = np.where(largest == low, _maximum(x, high), _maximum(x, low))
    result = np.where(largest == x, _maximum(low, high), rest)
    nan = np.isnan(x) | np.isnan(low) | np.isnan(high)
    return np.where(nan, _minimum(_minimum(x, low), high), result)


def _clamp(op: Op, target: Target) -> Step:
    """One `v_med3` for fp32 and fp16, from Triton 3.9 on. `propagateNan = all` asks about the first
    operand only.
    """
    keeps_nan = op.attributes.get("propagateNan") == "all"
    has_median = target.has_median and op.type.element in ("f32", "f16")

    def compute(x: Array, low: Array, high: Array) -> Array:
        within = _median(x, low, high) if has_median else _minimum(_maximum(x, low), high)
        return np.where(np.isnan(x), x, within) if keeps_nan else within

    return elementwise(compute)(op, target)


def _fma(op: Op, target: Target) -> Step:
    """fp16 has an instruction that rounds once; bf16 is that of fp32, then rounded."""
    element = op.type.element
    if element != "f16":
        return elementwise(fused_multiply_add)(op, target)
    return lambda _, *v: target.encode(fused_to_odd(*[decode(each, "f16") for each in v]), "f16")


def _flushed(values: Array) -> Array:
    """fp32 subnormals as zeros of their sign."""
    if values.dtype != np.float32:
        return values
    small = np.abs(values) < np.finfo(np.float32).smallest_normal
    return np.where(small, np.copysign(np.float32(0), values), values)


def _divide(a: Array, b: Array) -> Array:
    return a / b


def _root(a: Array) -> Array:
    root: Array = np.sqrt(_flushed(a))
    return root


def _reciprocal_root(a: Array) -> Array:
    return (1.0 / np.sqrt(_flushed(a).astype(np.float64))).astype(a.dtype)


def _power_of_two(a: Array) -> Array:
    return _flushed(in_double(np.exp2)(a))


def in_double(compute: Callable[..., Array]) -> Callable[..., Array]:
    """A function that libm gives to within an ulp, taken in fp64 and rounded."""
    return lambda *values: compute(*[v.astype(np.float64) for v in values]).astype(values[0].dtype)


def scalar(compute: Callable[[float], float], pole: float) -> Callable[[Array], Array]:
    """A function of Python's `math`, which raises at a pole where the library gives `pole`."""

    def guarded(value: float) -> float:
        try:
            return compute(value)
        except (ValueError, OverflowError):
            return pole

    return lambda a: np.array([guarded(v) for v in a.ravel().tolist()]).reshape(a.shape)


FLOAT_OPS: dict[str, Binder] = {
    "arith.addf": elementwise(np.add),
    "arith.subf": elementwise(np.subtract),
    "arith.mulf": elementwise(np.multiply),
    "arith.divf": elementwise(_divide),
    "tt.precise_divf": elementwise(_divide),
    "arith.remf": elementwise(np.fmod),
    "arith.negf": _by_sign(clear=False),
    "math.absf": _by_sign(clear=True),
    "arith.maxnumf": elementwise(_maximum),
    "arith.minnumf": elementwise(_minimum),
    "arith.maximumf": elementwise(_ordered(np.maximum, 1)),
    "arith.minimumf": elementwise(_ordered(np.minimum, -1)),
    "arith.cmpf": _compare,
    "tt.clampf": _clamp,
    "tt.precise_sqrt": elementwise(np.sqrt),
    "math.sqrt": elementwise(_root),
    "math.rsqrt": elementwise(_reciprocal_root),
    "math.exp": elementwise(in_double(np.exp)),
    "math.exp2": elementwise(_power_of_two),
    "math.log": elementwise(in_double(np.log)),
    "math.log2": elementwise(in_double(np.log2)),
    "math.sin": elementwise(in_double(np.sin)),
    "math.cos": elementwise(in_double(np.cos)),
    "math.tanh": elementwise(in_double(np.tanh)),
    "math.erf": elementwise(in_double(scalar(math.erf, math.nan))),
    "math.powf": elementwise(in_double(np.power)),
    "math.floor": elementwise(np.floor),
    "math.ceil": elementwise(np.ceil),
    "math.trunc": elementwise(np.trunc),
    "math.roundeven": elementwise(np.rint),
    "math.fma": _fma,
}
