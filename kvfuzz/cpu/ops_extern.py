"""Library functions that kernels call by symbol: AMD's ocml and ockl, and Triton's own for HIP.

What is exact in the library (rounding, signs, remainders, fma) is exact here. The others are taken
in fp64 and rounded once, which is nearer to the true value than the library promises to be.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvfuzz.cpu.errors import UnsupportedOp
from kvfuzz.cpu.ir import Op
from kvfuzz.cpu.machine import Step
from kvfuzz.cpu.numerics import decode, encode, fused_multiply_add
from kvfuzz.cpu.ops_float import in_double, scalar
from kvfuzz.cpu.ops_integer import unsigned

Array = NDArray[Any]
Compute = Callable[..., Array]

_INT_MIN, _INT_MAX = -(1 << 31), (1 << 31) - 1


def _round_half_away(a: Array) -> Array:
    whole = np.trunc(a)
    step = np.copysign((np.abs(a - whole) >= 0.5).astype(a.dtype), a)
    rounded: Array = whole + step
    return rounded


def _flag(compute: Compute) -> Compute:
    return lambda a: compute(a).astype(np.int32)


def _exponent(a: Array) -> Array:
    """ilogb: of zero the smallest int32, of infinities and NaN the largest."""
    exponent = np.frexp(a)[1].astype(np.int32) - np.int32(1)
    exponent = np.where(np.isfinite(a), exponent, np.int32(_INT_MAX))
    return np.where(a == 0, np.int32(_INT_MIN), exponent)


def _torch(compute: Callable[[torch.Tensor], torch.Tensor]) -> Compute:
    def step(a: Array) -> Array:
        result: Array = compute(torch.from_numpy(np.array(a, np.float64))).numpy()
        return result

    return step


# Computed in the argument's own width (fp16 in fp32): exact, or rounded once.
_EXACT: dict[str, Compute] = {
    "rint": np.rint,
    "nearbyint": np.rint,
    "round": _round_half_away,
    "trunc": np.trunc,
    "floor": np.floor,
    "ceil": np.ceil,
    "fabs": np.abs,
    "sqrt": np.sqrt,
    "copysign": np.copysign,
    "fmod": np.fmod,
    "fmax": np.fmax,
    "fmin": np.fmin,
}

# The same, with an int32 result.
_CLASSES: dict[str, Compute] = {
    "isnan": _flag(np.isnan),
    "isinf": _flag(np.isinf),
    "isfinite": _flag(np.isfinite),
    "signbit": _flag(np.signbit),
    "ilogb": _exponent,
}

# Computed in fp64, to within an ulp of it.
_IN_DOUBLE: dict[str, Compute] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "exp10": lambda a: np.power(10.0, a),
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "hypot": np.hypot,
    "pow": np.power,
    "pown": np.power,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "rcbrt": lambda a: 1.0 / np.cbrt(a),
    "cbrt": np.cbrt,
    "erf": scalar(math.erf, math.nan),
    "erfc": scalar(math.erfc, math.nan),
    "lgamma": scalar(math.lgamma, math.inf),
}

# Good to some ulps of fp64 only, so there is no fp64 form of them.
_NARROW: dict[str, Compute] = {
    "erfcx": _torch(torch.special.erfcx),
    "erfinv": _torch(torch.special.erfinv),
    "i0": _torch(torch.special.i0),
    "i1": _torch(torch.special.i1),
    "j0": _torch(torch.special.bessel_j0),
    "j1": _torch(torch.special.bessel_j1),
    "y0": _torch(torch.special.bessel_y0),
    "y1": _torch(torch.special.bessel_y1),
}


def _halved(compute: Compute, rounds: bool) -> Compute:
    """fp16 arguments as fp32; fp16 results too if it `rounds`."""

    def step(*values: Array) -> Array:
        wide = [decode(value, "f16") if value.dtype == np.uint16 else value for value in values]
        result = compute(*wide)
        return encode(result, "f16") if rounds else result

    return step


def _in_double_then_half(compute: Compute) -> Compute:
    return _halved(lambda *values: compute(*[v.astype(np.float64) for v in values]), True)


def _next_after(bits: str) -> Compute:
    dtype = np.dtype(bits)
    return lambda a, b: np.nextafter(a, b, dtype=dtype)


def _leading_zeros(bits: int) -> Compute:
    def step(a: Array) -> Array:
        rest, width = unsigned(a).copy(), np.zeros(a.shape, a.dtype)
        for shift in (32, 16, 8, 4, 2, 1):
            if shift < bits:
                high = rest >> rest.dtype.type(shift)
                width += np.where(high > 0, shift, 0).astype(a.dtype)
                rest = np.where(high > 0, high, rest)
        return (bits - width - (rest > 0)).astype(a.dtype)

    return step


_LOG2_E = np.float32(1.4426950408889634)


def _fast_exp(a: Array) -> Array:
    """The product is rounded to fp32; the power of two that the instruction approximates is not."""
    return np.exp2((a * _LOG2_E).astype(np.float64)).astype(np.float32)


def _fast_divide(a: Array, b: Array) -> Array:
    """The product with the reciprocal, which the instruction gives to within an ulp."""
    return a * (1.0 / b.astype(np.float64)).astype(np.float32)


def _fast_tanh(a: Array) -> Array:
    one, two = np.float32(1), np.float32(2)
    positive = one - two / (_fast_exp(two * np.abs(a)) + one)
    return positive * np.where(a < 0, -one, one)


def _to_integer(a: Array) -> Array:
    """Rounded to the nearest int64; beyond it the conversion saturates, and NaN gives 0."""
    whole = np.where(np.isnan(a), 0.0, np.rint(a).astype(np.float64))
    over, under = whole >= 2.0**63, whole < -(2.0**63)
    inner = np.where(over | under, 0.0, whole).astype(np.int64)
    limits = np.iinfo(np.int64)
    return np.where(over, limits.max, np.where(under, limits.min, inner))


SYMBOLS: dict[str, Compute] = {
    **{f"__ocml_{n}_{w}": f for n, f in (_EXACT | _CLASSES).items() for w in ("f32", "f64")},
    **{f"__ocml_{n}_f16": _halved(f, True) for n, f in _EXACT.items()},
    **{f"__ocml_{n}_f16": _halved(f, False) for n, f in _CLASSES.items()},
    **{f"__ocml_{n}_{w}": in_double(f) for n, f in _IN_DOUBLE.items() for w in ("f32", "f64")},
    **{f"__ocml_{n}_f16": _in_double_then_half(f) for n, f in _IN_DOUBLE.items()},
    **{f"__ocml_{n}_f32": in_double(f) for n, f in _NARROW.items()},
    **{f"__ocml_{n}_f16": _in_double_then_half(f) for n, f in _NARROW.items()},
    "__ocml_fma_f32": fused_multiply_add,
    "__ocml_fma_f64": fused_multiply_add,
    "__ocml_nextafter_f32": _next_after("f4"),
    "__ocml_nextafter_f64": _next_after("f8"),
    "__ocml_ldexp_f32": np.ldexp,
    "__ocml_ldexp_f64": np.ldexp,
    "__ockl_clz_u32": _leading_zeros(32),
    "__ockl_clz_u64": _leading_zeros(64),
    "__ockl_popcount_u32": lambda a: np.bitwise_count(unsigned(a)).astype(np.int32),
    "__ockl_popcount_u64": lambda a: np.bitwise_count(unsigned(a)).astype(np.int32),
    "__triton_hip_iabs": np.abs,
    "__triton_hip_fabs": np.abs,
    "__triton_hip_rint": np.rint,
    "__triton_hip_llrint": _to_integer,
    "__triton_hip_fast_expf": _fast_exp,
    "__triton_hip_fast_fdividef": _fast_divide,
    "__triton_hip_fast_tanhf": _fast_tanh,
}


def bind_extern(op: Op) -> Step:
    """`tt.extern_elementwise` of a known symbol."""
    strings: Any = op.attributes.get("strings", ())
    symbol = next((text for text in strings if text.startswith("__")), "")
    compute = SYMBOLS.get(symbol)
    if compute is None:
        raise UnsupportedOp(f"{op.name} {symbol}", op.location.name, op.location.line)
    given = {type_.element for type_ in op.operand_types if type_.is_float}
    if symbol[-4:] in ("_f16", "_f32", "_f64") and given != {symbol[-3:]}:
        raise UnsupportedOp(
            f"{op.name} {symbol} on {', '.join(sorted(given))}", op.location.name, op.location.line
        )
    return lambda _, *values: compute(*values)
