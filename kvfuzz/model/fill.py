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
the low 24 bits of the word: less than four times as much, with any mantissa. Element `i` of a
`choices` fill is code `(word >> 32) % 2**16 % len(codes)` of those listed. A `groups` fill is
defined by `GroupFill` and `group_code_at`.
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
    """Elements of `dtype` for a quantiser that maps the absmax of each group to `largest`.

    A group is `group` consecutive elements. One in `GROUP_KINDS` is all zeros, and one is small:
    below 1e-6, so that what a quantiser keeps its scale above shows (fp16 has no normal numbers
    there, and stays below 1e-4). Elements of the others spread over `GROUP_DEPTH` binades below a
    magnitude that differs from group to group by up to 2**60 (2**29 in fp16), some being zeros.
    Where `ties`, they have one element of `largest` times a power of two, either sign, and the
    rest on rounding ties of `cache_dtype` times the same: x / s is exact, and a tie.

    An fp32 has 16 bits of mantissa here, so that no absmax lies so near to `largest` times a power
    of two, and not on it, that a log2 that is rounded to fp32 would not tell.
    """

    seed: int
    dtype: str
    cache_dtype: str
    group: int
    largest: float
    ties: bool = False


class ChoiceFill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="choices"):
    """Elements of `dtype` that are each one of a few `codes`, which are listed as often as they are
    to occur."""

    seed: int
    dtype: str
    codes: tuple[int, ...]


Fill = IntegerFill | ByteFill | FloatFill | TieFill | ScaleFill | GroupFill | ChoiceFill
ElementFill = FloatFill | TieFill | ScaleFill | ChoiceFill
"""A fill each element of which is made of the word with its number."""

FP32_ONE, FP32_TWO, FP32_THREE = 0x3F800000, 0x40000000, 0x40400000
"""Bit patterns; the reciprocal of 3.0 is not exact."""
FP32_MANTISSA = (1 << 23) - 1
SPREAD = 1 << 24
"""Bit patterns from a positive fp32 to four times as much."""

GROUPS = " groups"
"""What the name of a buffer ends with in the stream of its groups."""
GROUP_KINDS, ZERO_GROUP, SMALL_GROUP = 8, 0, 1
GROUP_DEPTH = 22
GROUP_EXPONENTS = 30
"""The greatest magnitudes of groups are within 2**-30 and 2**30, as far as the format has them."""
SMALL_EXPONENT = -21
TIE_EXPONENTS = (-8, 7)
"""The least and the greatest power of two that ties are multiplied by: exact in every format."""
GROUP_MANTISSA = 16
"""Bits of mantissa that an element has at most."""

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


def group_ties(fill: GroupFill) -> tuple[float, ...]:
    """The ties of the cache format below `largest`, from zero up."""
    cache = DTYPES[fill.cache_dtype]
    return tuple(midpoint(cache, code) for code in range(cache.encode(fill.largest)))


def group_range(dtype: CacheDtype) -> tuple[int, int]:
    """The biased exponents that the magnitudes of spread groups are in."""
    top = (1 << dtype.exponent_bits) - 2
    return max(1, dtype.bias - GROUP_EXPONENTS), min(top, dtype.bias + GROUP_EXPONENTS)


def group_code_at(fill: GroupFill, buffer: str, index: int) -> int:
    """The code of element `index` of a groups fill.

    The group's word has its kind in bits 32 to 47, its magnitude in bits 0 to 15 and the place of
    its absmax in bits 16 to 31; the element's own has a sign in bit 63, a tie, or a depth below
    that magnitude, in bits 32 to 47, and a mantissa in the lowest ones.
    """
    dtype, bits = DTYPES[fill.dtype], word(fill.seed, buffer, index)
    whole = word(fill.seed, buffer + GROUPS, index // fill.group)
    kind, magnitude, place = whole >> 32 & 0xFFFF, whole & 0xFFFF, whole >> 16 & 0xFFFF
    choice, sign = bits >> 32 & 0xFFFF, dtype.sign_bit if bits >> 63 else 0
    if kind % GROUP_KINDS == ZERO_GROUP:
        return sign
    if fill.ties and kind % GROUP_KINDS != SMALL_GROUP:
        low, high = TIE_EXPONENTS
        ties = group_ties(fill)
        is_largest = index % fill.group == place % fill.group
        value = fill.largest if is_largest else ties[choice % len(ties)]
        return sign | dtype.encode(math.ldexp(value, low + magnitude % (high - low + 1)))
    low, high = group_range(dtype)
    top = low + magnitude % (high - low + 1)
    if kind % GROUP_KINDS == SMALL_GROUP:
        top = max(0, dtype.bias + SMALL_EXPONENT)
    depth = choice % (GROUP_DEPTH + 1)
    if depth == GROUP_DEPTH:
        return sign
    spare = max(0, dtype.mantissa_bits - GROUP_MANTISSA)
    mantissa = (bits & ((1 << dtype.mantissa_bits) - 1)) >> spare << spare
    return sign | (max(0, top - depth) << dtype.mantissa_bits) | mantissa


def code_at(fill: ElementFill | GroupFill, buffer: str, index: int) -> int:
    """The code of element `index` that `fill` puts into a buffer."""
    if isinstance(fill, GroupFill):
        return group_code_at(fill, buffer, index)
    if isinstance(fill, ScaleFill):
        return scale_at(fill, buffer, index)
    dtype, bits = DTYPES[fill.dtype], word(fill.seed, buffer, index)
    if isinstance(fill, ChoiceFill):
        return fill.codes[(bits >> 32) % (1 << 16) % len(fill.codes)]
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
