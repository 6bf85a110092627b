"""What the bytes of a buffer are before the first launch.

Small metadata is written out as integers. Bulk bytes come from a counter-based hash, so that a
case of a few kilobytes describes megabytes and any machine computes the same ones:

    word(seed, stream, i) = mix(mix(seed + stream * GOLDEN) + i * GOLDEN)    (64 bits, wrapping)

where mix is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) and `stream` is a
hash of the buffer's name. Byte `a` of a `bytes` fill is byte `a % 8` (little endian) of word
`a // 8`. Element `i` of a `floats` fill is made of the bits of word `i`: mantissa from the low
bits, sign from bit 63, biased exponent `low + (word >> 32) % 2**16 % (high - low + 1)`. Element
`i` of a `ties` fill is the midpoint above cache code `(word >> 32) % 2**16 % max_code`, times the
scale, rounded to fp32 and then to the element's format, with the sign from bit 63. Element `i` of a
`scales` fill is one where the least scale is one, the least scale times
`2 ** ((word >> 32) % 2**16 % 3)` where that is another power of two, and else its bit pattern plus
the low 24 bits of the word: less than four times as much, with any mantissa. Of a `groups` fill,
group `i // group` has a word `g` of a stream of its own: zero where `g % 8` is 0, else of biased
exponent `E = low + (g >> 32) % 2**16 % (high - low + 1)`. Its element number
`(g >> 16) % 2**16 % group` is the leader. A leader has exponent E, another element
`max(0, E - (word >> 32) % 2**16 % 12)`, both the mantissa of the low bits of their word, or none
where `ties`, when a leader is `largest * 2**k` with that exponent, and another element the midpoint
of codes `c` and `c + 1`, with `c = (word >> 32) % 2**16 % code of largest`, times `2**k`.
This module is the scalar definition; the worker computes the same in tensors, and TEST_VECTORS
hold both to it.
"""

import hashlib
import math
from functools import lru_cache

import msgspec

from kvfuzz.model.dtypes import DTYPES, CacheDtype

ALGORITHM = "splitmix64/1"
"""Name and version that a seed records; a seed with another one is refused."""

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1


class IntegerFill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="integers"):
    """Every element written out, in the format of the tensor that views the buffer.

    For a float format the integers are bit patterns.
    """

    dtype: str
    values: tuple[int, ...]


class ByteFill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="bytes"):
    """Hash bytes: every code of every format occurs, NaN payloads included."""

    seed: int


class FloatFill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="floats"):
    """Elements of `dtype` whose biased exponent lies in `low`..`high`; 0 gives subnormals."""

    seed: int
    dtype: str
    low: int
    high: int


class TieFill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ties"):
    """Elements of `dtype` that land next to a rounding tie of `cache_dtype` when divided by s.

    `scale` is the bit pattern of s. Only there do x / s and x * (1 / s) round apart.
    """

    seed: int
    dtype: str
    cache_dtype: str
    scale: int


class ScaleFill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="scales"):
    """Positive fp32 numbers from `least` (a bit pattern) to less than, or just, four times that.

    One stays one, powers of two stay powers of two.
    """

    seed: int
    least: int


class GroupFill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="groups"):
    """Elements of `dtype` in groups of `group` neighbours, as kernels take them that choose a scale
    for each group: its largest magnitude becomes `largest` of `cache_dtype`.

    The biased exponent of that magnitude is in `low`..`high`, and some groups are zero. With `ties`
    it is `largest` times a power of two, so that the scale is one, and the other elements lie on
    rounding ties of the quotient.
    """

    seed: int
    dtype: str
    cache_dtype: str
    group: int
    largest: float
    low: int
    high: int
    ties: bool = False


Fill = IntegerFill | ByteFill | FloatFill | TieFill | ScaleFill | GroupFill

GROUP_STREAM = "/groups"
"""What a buffer's name ends with in the name of the stream that has a word for each group."""
ZERO_GROUPS = 8
"""One group in so many is zero."""
OCTAVES = 12
"""How far below its group's largest element another is, at most, in powers of two."""

FP32_ONE, FP32_MANTISSA = 0x3F800000, (1 << 23) - 1
SPREAD = 1 << 24
"""Bit patterns from a positive fp32 to four times as much."""

LARGE = 1 << 26
"""Bytes from which on a buffer is filled and compared in part only (`kvfuzz.model.held`)."""


def mix(word: int) -> int:
    """The finaliser of SplitMix64 on 64 bits."""
    word = ((word ^ (word >> 30)) * MIX_1) & MASK
    word = ((word ^ (word >> 27)) * MIX_2) & MASK
    return word ^ (word >> 31)


@lru_cache(maxsize=256)
def stream_of(buffer: str) -> int:
    """The stream number of a buffer: the first 8 bytes of the SHA-256 of its name."""
    return int.from_bytes(hashlib.sha256(buffer.encode()).digest()[:8], "little")


def origin_of(seed: int, buffer: str) -> int:
    """The counter at which the words of a buffer start."""
    return mix((seed + stream_of(buffer) * GOLDEN) & MASK)


def word(seed: int, buffer: str, index: int) -> int:
    """Word `index` of a buffer's stream."""
    return mix((origin_of(seed, buffer) + index * GOLDEN) & MASK)


def byte_at(fill: ByteFill, buffer: str, address: int) -> int:
    """The byte that `fill` puts at `address` of a buffer."""
    return (word(fill.seed, buffer, address // 8) >> (8 * (address % 8))) & 0xFF


def midpoint(cache: CacheDtype, code: int) -> float:
    """The value halfway between a positive code and the next: where rounding changes sides."""
    return (cache.decode(code) + cache.decode(code + 1)) / 2


def scale_at(fill: ScaleFill, stream: str, index: int) -> int:
    """The bit pattern of scale `index` that `fill` puts into a stream."""
    bits = word(fill.seed, stream, index)
    if fill.least == FP32_ONE:
        return fill.least
    if fill.least & FP32_MANTISSA == 0:
        return fill.least + ((bits >> 32) % (1 << 16) % 3 << 23)
    return fill.least + bits % SPREAD


def power_of(fill: GroupFill, exponent: int) -> float:
    """`2**k`, so that `largest * 2**k` has the biased `exponent` in the elements' format."""
    return 2.0 ** (exponent - DTYPES[fill.dtype].bias - (math.frexp(fill.largest)[1] - 1))


def _group_code(fill: GroupFill, buffer: str, index: int) -> int:
    of_group = word(fill.seed, buffer + GROUP_STREAM, index // fill.group)
    bits, dtype = word(fill.seed, buffer, index), DTYPES[fill.dtype]
    sign = dtype.sign_bit if bits >> 63 else 0
    if of_group % ZERO_GROUPS == 0:
        return sign
    exponent = fill.low + (of_group >> 32) % (1 << 16) % (fill.high - fill.low + 1)
    leads = (of_group >> 16) % (1 << 16) % fill.group == index % fill.group
    choice = (bits >> 32) % (1 << 16)
    if fill.ties:
        cache, power = DTYPES[fill.cache_dtype], power_of(fill, exponent)
        value = fill.largest if leads else midpoint(cache, choice % cache.encode(fill.largest))
        return sign | dtype.encode(value * power)
    exponent = exponent if leads else max(0, exponent - choice % OCTAVES)
    return sign | exponent << dtype.mantissa_bits | bits & ((1 << dtype.mantissa_bits) - 1)


def code_at(fill: FloatFill | TieFill | ScaleFill | GroupFill, buffer: str, index: int) -> int:
    """The code of element `index` that `fill` puts into a buffer."""
    if isinstance(fill, GroupFill):
        return _group_code(fill, buffer, index)
    if isinstance(fill, ScaleFill):
        return scale_at(fill, buffer, index)
    dtype, bits = DTYPES[fill.dtype], word(fill.seed, buffer, index)
    if isinstance(fill, TieFill):
        fp32, cache = DTYPES["fp32"], DTYPES[fill.cache_dtype]
        tie = midpoint(cache, (bits >> 32) % (1 << 16) % cache.max_code)
        product = fp32.decode(fp32.encode(tie * fp32.decode(fill.scale)))
        return dtype.encode(-product if bits >> 63 else product)
    exponent = fill.low + (bits >> 32) % (1 << 16) % (fill.high - fill.low + 1)
    mantissa = bits & ((1 << dtype.mantissa_bits) - 1)
    sign = dtype.sign_bit if bits >> 63 else 0
    return sign | (exponent << dtype.mantissa_bits) | mantissa


TEST_VECTORS: tuple[tuple[int, str, int, int], ...] = (
    (0, "kv_cache", 0, 0x44E73E2D4BFBB615),
    (0, "kv_cache", 1, 0x53FE48266868C0C9),
    (1, "kv_cache", 0, 0x727F4DBC652D587B),
    (0, "key", 1 << 20, 0x278DC1D84F1A2DBA),
    (MASK, "value", 12345, 0x21AA754EB0FE4A55),
)
"""(seed, buffer, index, word)."""
