"""The fills of `kvfuzz.model.fill` as tensors, the same bytes for any device.

All is made on the host, in NumPy's unsigned arithmetic, since of a small case that is most of what
its buffers cost: words a cache's worth at a time, and codes in integers of their own width.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfuzz.model.case import Buffer, Program
from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.fill import (
    FP32_MANTISSA,
    FP32_ONE,
    GOLDEN,
    GROUP_DEPTH,
    GROUP_KINDS,
    GROUP_MANTISSA,
    GROUPS,
    MASK,
    MIX_1,
    MIX_2,
    SMALL_EXPONENT,
    SMALL_GROUP,
    SPREAD,
    TIE_EXPONENTS,
    ZERO_GROUP,
    ByteFill,
    ChoiceFill,
    ElementFill,
    Fill,
    FloatFill,
    GroupFill,
    IntegerFill,
    ScaleFill,
    TieFill,
    group_range,
    group_ties,
    midpoint,
    origin_of,
)
from kvfuzz.model.held import Held, held, held_blocks
from kvfuzz.model.layout import INDEX_ORDER, Field
from kvfuzz.oracles import image
from kvfuzz.oracles.codec import encode

Array = NDArray[Any]

_CHUNK = 1 << 14
"""Words that are mixed at once: with as many for scratch, they stay in a core's cache."""
_COUNTERS = np.arange(_CHUNK, dtype=np.uint64) * np.uint64(GOLDEN)
_ROUNDS = ((np.uint64(30), np.uint64(MIX_1)), (np.uint64(27), np.uint64(MIX_2)))
_LAST_SHIFT = np.uint64(31)


def words(seed: int, buffer: str, count: int, first: int = 0) -> Array:
    """Words `first` to `first + count` of a buffer's stream; uint64 `[count]`."""
    found = np.empty(count, np.uint64)
    scratch = np.empty(min(count, _CHUNK), np.uint64)
    origin = origin_of(seed, buffer) + first * GOLDEN
    for start in range(0, count, _CHUNK):
        z = found[start : start + _CHUNK]
        shifted = scratch[: len(z)]
        np.add(_COUNTERS[: len(z)], np.uint64((origin + start * GOLDEN) & MASK), out=z)
        for shift, factor in _ROUNDS:
            z ^= np.right_shift(z, shift, out=shifted)
            z *= factor
        z ^= np.right_shift(z, _LAST_SHIFT, out=shifted)
    return found


def words_at(seed: int, buffer: str, numbers: Array) -> Array:
    """The words of a buffer's stream with these `numbers`; uint64, the shape of `numbers`."""
    z = numbers.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(origin_of(seed, buffer))
    for shift, factor in _ROUNDS:
        z = (z ^ (z >> shift)) * factor
    found: Array = z ^ (z >> _LAST_SHIFT)
    return found


def filled(fill: Fill, buffer: str, kept: Held, device: torch.device) -> Tensor:
    """The held bytes of a buffer before the first launch; uint8 `[kept.size]`."""
    return torch.from_numpy(_filled(fill, buffer, kept)).to(device)


def _filled(fill: Fill, buffer: str, kept: Held) -> Array:
    if isinstance(fill, ByteFill):  # no other fill is large
        spans = [_span(fill, buffer, start, stop) for start, stop in kept.spans]
        return spans[0] if len(spans) == 1 else np.concatenate(spans)
    if isinstance(fill, IntegerFill):
        codes = np.array([value & MASK for value in fill.values], np.uint64)
        return codes.astype(f"u{itemsize(fill.dtype)}").view(np.uint8)
    dtype = DTYPES["fp32" if isinstance(fill, ScaleFill) else fill.dtype]
    if isinstance(fill, GroupFill):
        return _groups(fill, buffer, kept.nbytes // dtype.itemsize).view(np.uint8)
    return _codes(fill, words(fill.seed, buffer, kept.nbytes // dtype.itemsize)).view(np.uint8)


def before_the_first_launch(case: Program, buffer: Buffer, device: torch.device) -> Tensor:
    """The held bytes of a buffer, with what its fields lay over its own fill."""
    kept = held(case, buffer.name)
    data = filled(buffer.fill, buffer.name, kept, device)
    for field in case.fields:
        if field.buffer == buffer.name and isinstance(field.fill, ElementFill):
            _lay_over(data, case, field, field.fill)
    return data


def _lay_over(data: Tensor, case: Program, field: Field, fill: ElementFill) -> None:
    """Put the elements of a field's own fill over what is there; of a large buffer, those of the
    blocks that are held."""
    along = {
        axis: torch.arange(field.extents[axis]) for axis in INDEX_ORDER if axis in field.extents
    }
    if "block" in along and not held(case, field.buffer).is_whole:
        along["block"] = torch.tensor(held_blocks(case, field))
    coordinates = {
        axis: each.view([-1 if other == axis else 1 for other in along])
        for axis, each in along.items()
    }
    number = torch.zeros((), dtype=torch.int64)
    for axis, each in coordinates.items():
        number = number * field.extents[axis] + each
    words_there = words_at(fill.seed, field.name, number.numpy().ravel())
    codes = torch.from_numpy(_codes(fill, words_there).astype(np.int64)).reshape(number.shape)
    shaped = {axis: each.to(data.device) for axis, each in coordinates.items()}
    at = image.positions(case, field, **shaped)
    image.write(data, at.expand(number.shape), field.dtype, codes.to(data.device))


def _span(fill: ByteFill, buffer: str, start: int, stop: int) -> Array:
    """The bytes `start` to `stop` of a bytes fill; `start` is a multiple of 8."""
    found = words(fill.seed, buffer, -(-(stop - start) // 8), start // 8)
    return found.view(np.uint8)[: stop - start]


def _choices(bits: Array) -> Array:
    """`(word >> 32) % 2**16` of each word; uint16."""
    return bits.view(np.uint16)[2::4]


def _codes(fill: ElementFill, bits: Array) -> Array:
    """The code that each word makes, in unsigned integers of its width."""
    if isinstance(fill, ScaleFill):
        return _scales(fill, bits)
    if isinstance(fill, ChoiceFill):
        codes = np.array(fill.codes, f"u{itemsize(fill.dtype)}")
        chosen: Array = codes[_choices(bits) % np.uint16(len(codes))]
        return chosen
    return _ties(fill, bits) if isinstance(fill, TieFill) else _floats(fill, bits)


def _scales(fill: ScaleFill, bits: Array) -> Array:
    if fill.least == FP32_ONE:
        return np.full(bits.shape, FP32_ONE, np.uint32)
    if fill.least & FP32_MANTISSA == 0:
        return np.uint32(fill.least) + (_choices(bits).astype(np.uint32) % 3 << 23)
    return np.uint32(fill.least) + (bits.view(np.uint32)[::2] & np.uint32(SPREAD - 1))


@lru_cache(maxsize=16)
def _midpoints(cache_dtype: str) -> Array:
    cache = DTYPES[cache_dtype]
    return np.array([midpoint(cache, code) for code in range(cache.max_code)], np.float32)


def _ties(fill: TieFill, bits: Array) -> Array:
    ties = _midpoints(fill.cache_dtype)
    with np.errstate(over="ignore"):
        product = ties[_choices(bits) % len(ties)] * np.float32(DTYPES["fp32"].decode(fill.scale))
    signed = np.where(bits >> np.uint64(63), -product, product)
    codes = encode(torch.from_numpy(signed), DTYPES[fill.dtype]).numpy()
    return codes.astype(f"u{itemsize(fill.dtype)}")


def _groups(fill: GroupFill, buffer: str, count: int) -> Array:
    dtype = DTYPES[fill.dtype]
    unsigned = np.dtype(f"u{dtype.itemsize}").type
    bits = words(fill.seed, buffer, count)
    whole = words(fill.seed, buffer + GROUPS, -(-count // fill.group)).repeat(fill.group)[:count]
    kind, choice = _choices(whole) % GROUP_KINDS, _choices(bits).astype(np.int32)
    magnitude, place = (whole.view(np.uint16)[at::4].astype(np.int32) for at in (0, 1))
    low, high = group_range(dtype)
    top = low + magnitude % (high - low + 1)
    top[kind == SMALL_GROUP] = max(0, dtype.bias + SMALL_EXPONENT)
    depth = choice % (GROUP_DEPTH + 1)
    spare = max(0, dtype.mantissa_bits - GROUP_MANTISSA)
    mantissa = bits.astype(unsigned) & unsigned((1 << dtype.mantissa_bits) - (1 << spare))
    codes: Array = np.maximum(0, top - depth).astype(unsigned) << unsigned(dtype.mantissa_bits)
    codes |= mantissa
    if fill.ties:
        ties = np.array(group_ties(fill), np.float32)
        first, last = TIE_EXPONENTS
        values = ties[choice % len(ties)]
        values[np.arange(count) % fill.group == place % fill.group] = np.float32(fill.largest)
        values = np.ldexp(values, first + magnitude % (last - first + 1))
        tied = encode(torch.from_numpy(values), dtype).numpy().astype(unsigned)
        codes = np.where(kind == SMALL_GROUP, codes, tied)
        depth = np.where(kind == SMALL_GROUP, depth, 0)
    codes[(kind == ZERO_GROUP) | (depth == GROUP_DEPTH)] = 0
    codes[bits >> np.uint64(63) != 0] |= unsigned(dtype.sign_bit)
    return codes


def _floats(fill: FloatFill, bits: Array) -> Array:
    dtype = DTYPES[fill.dtype]
    unsigned = np.dtype(f"u{dtype.itemsize}").type
    parts = bits.view(unsigned).reshape(-1, bits.itemsize // dtype.itemsize)
    exponents = _choices(bits) % np.uint16(fill.high - fill.low + 1) + np.uint16(fill.low)
    codes: Array = exponents.astype(unsigned)
    codes <<= unsigned(dtype.mantissa_bits)
    codes |= parts[:, 0] & unsigned((1 << dtype.mantissa_bits) - 1)
    codes |= parts[:, -1] & unsigned(dtype.sign_bit)
    return codes
