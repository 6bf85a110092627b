"""Exact conversions between floating-point formats, on raw bits.

Narrow floats travel as their raw bits (`uint8`, `uint16`), so that a copy keeps every NaN payload;
only arithmetic and conversions decode them. Narrow sources go through tables, fp32 through integer
arithmetic. Rounding is to nearest, ties to even, unless a conversion asks for `rtz`.

Overflow: fp16 and bf16 round to infinity. The fp8 formats saturate to their largest finite value,
infinities too, because Triton's AMD backend runs with FP16_OVFL set. NaN stays NaN. This is the
general rule; `arch` has what single architectures do otherwise.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Format:
    """A binary format of `exponent` and `mantissa` bits; `largest` is the top finite code."""

    name: str
    exponent: int
    mantissa: int
    bias: int
    largest: int
    saturates: bool
    has_infinity: bool
    unsigned_zero: bool = False

    @property
    def bits(self) -> int:
        """Width of one code in bits, the sign included."""
        return 1 + self.exponent + self.mantissa

    @property
    def storage(self) -> type[np.unsignedinteger[Any]]:
        """The unsigned integer type that holds one code."""
        return np.uint8 if self.bits == 8 else np.uint16


FORMATS = {
    "f8E4M3FN": Format("f8E4M3FN", 4, 3, 7, 0x7E, True, False),
    "f8E4M3FNUZ": Format("f8E4M3FNUZ", 4, 3, 8, 0x7F, True, False, unsigned_zero=True),
    "f8E5M2": Format("f8E5M2", 5, 2, 15, 0x7B, True, True),
    "f8E5M2FNUZ": Format("f8E5M2FNUZ", 5, 2, 16, 0x7F, True, False, unsigned_zero=True),
    "f16": Format("f16", 5, 10, 15, 0x7BFF, False, True),
    "bf16": Format("bf16", 8, 7, 127, 0x7F7F, False, True),
}


def decode(codes: Array, element: str) -> Array:
    """Raw codes of a narrow format to fp32, exactly; fp32 and fp64 pass through unchanged."""
    if element == "bf16":
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if element in FORMATS:
        return decode_table(element).take(codes)
    return codes


def encode(values: Array, element: str, rounding: str = "rtne") -> Array:
    """fp32 or fp64 values to raw codes of `element` (or to fp32, fp64), rounded once."""
    if element == "f64":
        return values.astype(np.float64, copy=False)
    if values.dtype == np.float64:
        if element == "f32":
            return _f64_to_f32(values, rounding)
        values = _narrow_to_odd(values)
    if element == "f32":
        return values
    bits = values.view(np.uint32)
    if FORMATS[element].bits == 8:
        # Rounding to odd at 16 bits keeps all that a later rounding to 4 bits can depend on.
        odd = (bits >> np.uint32(16)).astype(np.uint16)
        odd |= (bits & np.uint32(0xFFFF)) != 0
        return _encode_table("bf16", element, rounding).take(odd)
    if rounding == "rtne":
        return _f32_to_bf16(bits) if element == "bf16" else _f32_to_f16(bits)
    return encode_bits(bits, FORMATS[element], rounding)


def convert(codes: Array, source: str, target: str, rounding: str = "rtne") -> Array:
    """From one floating-point format to another, rounded once."""
    if source == target:
        return codes
    if source in FORMATS and target in FORMATS:
        return _encode_table(source, target, rounding).take(codes)
    return encode(decode(codes, source), target, rounding)


def encode_bits(bits: Array, target: Format, rounding: str = "rtne") -> Array:
    """fp32 bit patterns (`uint32`) to codes of `target`: what all tables are made from."""
    magnitude = (bits & np.uint32(0x7FFFFFFF)).astype(np.int64)
    sign = (bits >> np.uint32(31)).astype(np.int64) << (target.bits - 1)
    exponent = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | np.where(exponent > 0, 0x800000, 0)
    exponent = np.maximum(exponent, 1)
    smallest_normal = 128 - target.bias  # as a biased fp32 exponent
    drop = 23 - target.mantissa + np.clip(smallest_normal - exponent, 0, 25)
    kept = significand >> drop
    if rounding == "rtne":
        rest = significand & ((1 << drop) - 1)
        half = 1 << (drop - 1)
        kept += (rest > half) | ((rest == half) & (kept & 1 == 1))
    code = (np.maximum(exponent - smallest_normal, 0) << target.mantissa) + kept
    infinite = magnitude == 0x7F800000
    if target.saturates:
        code = np.minimum(code, target.largest)
    else:
        toward_zero = rounding == "rtz"
        top = np.where(infinite | (not toward_zero), target.largest + 1, target.largest)
        code = np.minimum(code, top)
    if target.unsigned_zero:
        sign = np.where(code == 0, 0, sign)
    code |= sign
    nan = magnitude > 0x7F800000
    if nan.any():
        code = np.where(nan, sign | _nan_code(magnitude, target), code)
        if target.unsigned_zero:
            code = np.where(nan, 1 << (target.bits - 1), code)
    codes: Array = code.astype(target.storage)
    return codes


def _nan_code(magnitude: Array, target: Format) -> Array | int:
    if not target.has_infinity:
        return 0x7F
    quiet = target.largest + 1 | 1 << (target.mantissa - 1)
    if target.bits == 8:
        return quiet
    payload = (magnitude >> (23 - target.mantissa)) & ((1 << target.mantissa) - 1)
    return payload | quiet


@cache
def decode_table(element: str) -> Array:
    """fp32 value of every code of a narrow format; shape `[256]` or `[65536]`."""
    fmt = FORMATS[element]
    codes = np.arange(1 << fmt.bits, dtype=np.int64)
    field = (codes >> fmt.mantissa) & ((1 << fmt.exponent) - 1)
    fraction = (codes & ((1 << fmt.mantissa) - 1)).astype(np.float64)
    step = np.ldexp(1.0, -fmt.mantissa)
    normal = np.ldexp(1.0 + fraction * step, (field - fmt.bias).astype(np.int32))
    small = np.ldexp(fraction * step, 1 - fmt.bias)
    values = np.where(field > 0, normal, small)
    values = np.where(codes >> (fmt.bits - 1) == 1, -values, values).astype(np.float32)
    magnitude = codes & ((1 << (fmt.bits - 1)) - 1)
    bits = values.view(np.uint32)
    sign = np.where(codes >> (fmt.bits - 1) == 1, 0x80000000, 0).astype(np.uint32)
    if fmt.has_infinity:
        bits[magnitude == fmt.largest + 1] = 0x7F800000
        payload = (codes & ((1 << fmt.mantissa) - 1)).astype(np.uint32)
        payload <<= np.uint32(23 - fmt.mantissa)
        nan = magnitude > fmt.largest + 1
        bits[nan] = (np.uint32(0x7F800000) | payload)[nan]
        special = magnitude > fmt.largest
        bits[special] |= sign[special]
    elif fmt.unsigned_zero:
        bits[1 << (fmt.bits - 1)] = 0x7FC00000
    else:
        bits[magnitude > fmt.largest] = 0x7FC00000
        bits[magnitude > fmt.largest] |= sign[magnitude > fmt.largest]
    decoded: Array = bits.view(np.float32)
    decoded.flags.writeable = False
    return decoded


@cache
def _encode_table(source: str, target: str, rounding: str) -> Array:
    """Codes of `target` for every code of `source`; bf16's also serves round-to-odd fp32."""
    codes = np.arange(1 << FORMATS[source].bits, dtype=FORMATS[source].storage)
    table = encode_bits(decode(codes, source).view(np.uint32), FORMATS[target], rounding)
    table.flags.writeable = False
    return table


def _f32_to_bf16(bits: Array) -> Array:
    top = bits >> np.uint32(16)
    rounded = top & np.uint32(1)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    nan = np.isnan(bits.view(np.float32))
    if nan.any():
        rounded = np.where(nan, top | np.uint32(0x40), rounded)
    return rounded.astype(np.uint16)


def _f32_to_f16(bits: Array) -> Array:
    magnitude = bits & np.uint32(0x7FFFFFFF)
    rounded = magnitude >> np.uint32(13)
    rounded &= np.uint32(1)
    rounded += magnitude
    # Rebias the exponent from 127 to 15; what is too small for it wraps and is replaced below.
    rounded += np.uint32((1 << 32) - (112 << 23) + 0xFFF)
    rounded >>= np.uint32(13)
    np.minimum(rounded, np.uint32(0x7C00), out=rounded)
    small = magnitude < np.uint32(0x38800000)
    if small.any():
        # The last bit of a float next to 0.5 weighs 2**-24, as that of a subnormal fp16 does.
        with np.errstate(invalid="ignore"):  # a signalling NaN
            shifted = (magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32)
        shifted -= np.uint32(0x3F000000)
        np.copyto(rounded, shifted, where=small)
    codes = (bits >> np.uint32(16)).astype(np.uint16)
    codes &= np.uint16(0x8000)
    codes |= rounded.astype(np.uint16)
    nan = magnitude > np.uint32(0x7F800000)
    if nan.any():
        codes[nan] = encode_bits(bits[nan], FORMATS["f16"])
    return codes


def _narrow_to_odd(values: Array) -> Array:
    """fp64 to fp32, the last bit set when anything was lost: safe to round once more."""
    toward_zero = _f64_to_f32(values, "rtz")
    inexact = (toward_zero.astype(np.float64) != values) & ~np.isnan(values)
    odd: Array = (toward_zero.view(np.uint32) | inexact).view(np.float32)
    return odd


def _f64_to_f32(values: Array, rounding: str) -> Array:
    nearest = values.astype(np.float32)
    if rounding != "rtz":
        return nearest
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(values)
    return (nearest.view(np.uint32) - beyond.astype(np.uint32)).view(np.float32)


def fused_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """`a*b + c` rounded once, of fp32 or fp64; fp64 goes through fractions, element by element."""
    if a.dtype == np.float64:
        fused: Array = np.vectorize(_fused_fractions, otypes=[np.float64])(a, b, c)
        return fused
    return fused_to_odd(a, b, c).astype(np.float32)


def fused_to_odd(a: Array, b: Array, c: Array) -> Array:
    """`a*b + c` of fp32 numbers in fp64, its last bit set when anything was lost: `encode` then
    rounds it once.
    """
    product = a.astype(np.float64) * b.astype(np.float64)  # exact: 48 bits
    addend = c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    adjust = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    # The exact sum lies beyond `total` (away from zero) when the error has the sign of `total`.
    step = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + np.where(adjust, step, 0)).view(np.float64)


def _fused_fractions(a: float, b: float, c: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        return float(np.float64(a) * np.float64(b) + np.float64(c))
    if not math.isfinite(c):
        return float(c)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf
