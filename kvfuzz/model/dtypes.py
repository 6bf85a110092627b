"""The number formats a cache element can have, defined exactly by their bit fields.

The eight-bit floats follow the OCP 8-bit floating point specification (e4m3fn, e5m2) and the
FNUZ formats of AMD's CDNA 3 (e4m3fnuz, e5m2fnuz: one NaN at 0x80, no infinity, no negative zero,
bias one higher); int8 is for caches whose kernels choose the scales. Decoding is exact for every
code; encoding rounds to nearest, ties to even. Both are scalar Python on purpose: they are the
definition that vectorised code is tested against.
"""

import math
from functools import cached_property

import msgspec

INFINITY_AND_NAN = "ieee"
"""The top exponent holds infinity and NaNs."""
FINITE = "fn"
"""No infinity; only the all-ones code of each sign is NaN."""
FINITE_UNSIGNED_ZERO = "fnuz"
"""No infinity, no negative zero; the code of negative zero is the only NaN."""
TWOS_COMPLEMENT = "int"
"""Whole numbers: every code is one, the sign bit weighs minus its value."""


class CacheDtype(msgspec.Struct, frozen=True, dict=True):
    """A number format of `1 + exponent_bits + mantissa_bits` bits; an integer has no exponent."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return (1 + self.exponent_bits + self.mantissa_bits) // 8

    @property
    def is_quantised(self) -> bool:
        """Whether an element is one byte, so that stored = x / scale."""
        return self.itemsize == 1

    @property
    def is_integer(self) -> bool:
        """Whether the codes are whole numbers in two's complement."""
        return self.specials == TWOS_COMPLEMENT

    @property
    def sign_bit(self) -> int:
        """The bit that negates a code."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @cached_property
    def max_code(self) -> int:
        """The code of the largest finite value."""
        all_ones = self.sign_bit - 1
        if self.is_integer:
            return all_ones
        if self.specials == INFINITY_AND_NAN:
            return all_ones - (1 << self.mantissa_bits)
        return all_ones - 1 if self.specials == FINITE else all_ones

    @cached_property
    def max_finite(self) -> float:
        """The largest finite value: 448 for e4m3fn, 240 for e4m3fnuz."""
        return self.decode(self.max_code)

    @property
    def nan_code(self) -> int:
        """The code that encoding a NaN yields (positive, quiet); an integer's is zero."""
        if self.is_integer:
            return 0
        if self.specials == FINITE_UNSIGNED_ZERO:
            return self.sign_bit
        if self.specials == FINITE:
            return self.sign_bit - 1
        return self.max_code + 1 + (1 << (self.mantissa_bits - 1))

    def decode(self, code: int) -> float:
        """The exact value of `code`; a float64 holds every value of every format here."""
        negative, magnitude = bool(code & self.sign_bit), code & (self.sign_bit - 1)
        if self.is_integer:
            return float(code - (code & self.sign_bit) * 2)
        if self.specials == FINITE_UNSIGNED_ZERO:
            if code == self.sign_bit:
                return math.nan
        elif magnitude > self.max_code:
            infinite = self.specials == INFINITY_AND_NAN and magnitude == self.max_code + 1
            return math.copysign(math.inf, -1.0 if negative else 1.0) if infinite else math.nan
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude % (1 << self.mantissa_bits)
        if exponent:
            mantissa += 1 << self.mantissa_bits
        value = math.ldexp(mantissa, max(exponent, 1) - self.bias - self.mantissa_bits)
        return -value if negative else value

    def encode(self, value: float) -> int:
        """The code nearest to `value`, ties to even; beyond the range it saturates.

        NaN gives `nan_code`. Infinities saturate too, as the fp8 conversions of AMD's and NVIDIA's
        hardware do in the mode Triton sets. For the 16- and 32-bit formats overflow is infinity.
        """
        if math.isnan(value):
            return self.nan_code
        if self.is_integer:
            low, high = -self.sign_bit, self.max_code
            return round(min(max(value, low), high)) & (2 * self.sign_bit - 1)
        sign = self.sign_bit if math.copysign(1.0, value) < 0 else 0
        magnitude = abs(value)
        if not self.is_quantised and math.isinf(magnitude):
            return sign | (self.max_code + 1)
        if magnitude >= self.max_finite and self.is_quantised:
            return sign | self.max_code
        # frexp gives magnitude = m * 2**e with m in [0.5, 1): the leading bit weighs 2**(e-1).
        exponent = max(math.frexp(magnitude)[1] - 1 if magnitude else -self.bias, 1 - self.bias)
        quantum = exponent - self.mantissa_bits
        steps = round(math.ldexp(magnitude, -quantum))  # Python rounds half to even
        code = steps + ((exponent + self.bias - 1) << self.mantissa_bits)
        if code > self.max_code:
            code = self.max_code if self.is_quantised else self.max_code + 1
        if code == 0 and self.specials == FINITE_UNSIGNED_ZERO:
            return 0
        return sign | code


DTYPES: dict[str, CacheDtype] = {
    dtype.name: dtype
    for dtype in (
        CacheDtype("fp32", 8, 23, 127, INFINITY_AND_NAN),
        CacheDtype("bf16", 8, 7, 127, INFINITY_AND_NAN),
        CacheDtype("fp16", 5, 10, 15, INFINITY_AND_NAN),
        CacheDtype("e4m3fn", 4, 3, 7, FINITE),
        CacheDtype("e4m3fnuz", 4, 3, 8, FINITE_UNSIGNED_ZERO),
        CacheDtype("e5m2", 5, 2, 15, INFINITY_AND_NAN),
        CacheDtype("e5m2fnuz", 5, 2, 16, FINITE_UNSIGNED_ZERO),
        CacheDtype("int8", 0, 7, 0, TWOS_COMPLEMENT),
    )
}

FLOATS: tuple[str, ...] = tuple(name for name, dtype in DTYPES.items() if not dtype.is_integer)
"""The formats that a value is rounded into as it is, or divided by a scale that is given."""

INTEGER_SIZES: dict[str, int] = {"u8": 1, "i32": 4, "i64": 8}
"""Bytes of one element of the integer formats that metadata and opaque bytes use."""


def itemsize(dtype: str) -> int:
    """Bytes of one element of the format called `dtype`."""
    return INTEGER_SIZES[dtype] if dtype in INTEGER_SIZES else DTYPES[dtype].itemsize


def highest_inside(model: CacheDtype, cache: CacheDtype, scale: float) -> int:
    """The largest biased exponent of `model` at which every quotient by `scale` is inside the range
    of `cache`."""
    top = math.frexp(cache.max_finite * scale)[1] - 1  # 2**top <= max_finite * scale
    return max(0, min(top - 1 + model.bias, (1 << model.exponent_bits) - 2))


def engine_spelling(cache_dtype: str) -> str:
    """vLLM's kv_cache_dtype; fn or fnuz is not part of it, the platform decides that."""
    if not DTYPES[cache_dtype].is_quantised:
        return "auto"
    return "fp8_e5m2" if "e5m2" in cache_dtype else "fp8_e4m3"
