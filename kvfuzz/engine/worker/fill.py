"""The fills of `kvfuzz.model.fill` as tensors, the same bytes for any device.

Words are mixed on the host, in NumPy's unsigned arithmetic and a cache's worth at a time, since of
a small case that is most of what its buffers cost. As tensors they are int64, whose
sign bit is bit 63.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kvfuzz.model.case import Buffer, Case
from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.fill import (
    FP32_MANTISSA,
    FP32_ONE,
    GOLDEN,
    MASK,
    MIX_1,
    MIX_2,
    SPREAD,
    ByteFill,
    Fill,
    FloatFill,
    IntegerFill,
    ScaleFill,
    TieFill,
    midpoint,
    origin_of,
)
from kvfuzz.model.held import Held, held
from kvfuzz.model.layout import INDEX_ORDER, Field
from kvfuzz.oracles import image
from kvfuzz.oracles.codec import encode

_INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 14
"""Words that are mixed at once: with as many for scratch, they stay in a core's cache."""
_COUNTERS = np.arange(_CHUNK, dtype=np.uint64) * np.uint64(GOLDEN)
_ROUNDS = ((np.uint64(30), np.uint64(MIX_1)), (np.uint64(27), np.uint64(MIX_2)))
_LAST_SHIFT = np.uint64(31)


def words(seed: int, buffer: str, count: int, device: torch.device, first: int = 0) -> Tensor:
    """Words `first` to `first + count` of a buffer's stream; int64 `[count]`."""
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
    return torch.from_numpy(found.view(np.int64)).to(device)


def filled(fill: Fill, buffer: str, kept: Held, device: torch.device) -> Tensor:
    """The held bytes of a buffer before the first launch; uint8 `[kept.size]`."""
    if not kept.is_whole and isinstance(fill, ByteFill):  # no other fill is large
        return torch.cat([_span(fill, buffer, span, device) for span in kept.spans])
    nbytes = kept.nbytes
    if isinstance(fill, IntegerFill):
        size = itemsize(fill.dtype)
        known = np.array([value & MASK for value in fill.values], np.uint64).astype(f"u{size}")
        return torch.from_numpy(known.view(np.uint8)).to(device)
    if isinstance(fill, ByteFill):
        return words(fill.seed, buffer, -(-nbytes // 8), device).view(torch.uint8)[:nbytes]
    dtype = DTYPES["fp32" if isinstance(fill, ScaleFill) else fill.dtype]
    codes = _codes(fill, words(fill.seed, buffer, nbytes // dtype.itemsize, device))
    return codes.to(_INTEGER_TYPES[dtype.itemsize]).view(torch.uint8)


def before_the_first_launch(case: Case, buffer: Buffer, device: torch.device) -> Tensor:
    """The held bytes of a buffer, with what its fields lay over its own fill."""
    kept = held(case, buffer.name)
    data = filled(buffer.fill, buffer.name, kept, device)
    for field in case.fields:
        if field.buffer == buffer.name and isinstance(field.fill, ScaleFill):
            _lay_over(data, case, field, field.fill)
    return data


def _lay_over(data: Tensor, case: Case, field: Field, fill: ScaleFill) -> None:
    axes = [axis for axis in INDEX_ORDER if axis in field.extents]
    counts = [torch.arange(field.extents[axis], device=data.device) for axis in axes]
    coordinates = dict(zip(axes, torch.meshgrid(*counts, indexing="ij"), strict=True))
    at = image.positions(case, field, **coordinates)
    codes = _codes(fill, words(fill.seed, field.name, at.numel(), data.device))
    image.write(data, at, field.dtype, codes.reshape(at.shape))


def _span(fill: ByteFill, buffer: str, span: tuple[int, int], device: torch.device) -> Tensor:
    """The bytes `start` to `stop` of a bytes fill; `start` is a multiple of 8."""
    start, stop = span
    count = -(-(stop - start) // 8)
    found = words(fill.seed, buffer, count, device, start // 8).view(torch.uint8)
    return found[: stop - start]


def _choices(bits: Tensor) -> Tensor:
    """`(word >> 32) % 2**16` of each word; int64."""
    return bits.view(torch.int16)[2::4].to(torch.int64) & 0xFFFF


def _codes(fill: FloatFill | TieFill | ScaleFill, bits: Tensor) -> Tensor:
    if isinstance(fill, ScaleFill):
        return _scales(fill, bits)
    return _ties(fill, bits) if isinstance(fill, TieFill) else _floats(fill, bits)


def _scales(fill: ScaleFill, bits: Tensor) -> Tensor:
    if fill.least == FP32_ONE:
        return torch.full_like(bits, FP32_ONE)
    if fill.least & FP32_MANTISSA == 0:
        return fill.least + (_choices(bits) % 3 << 23)
    return fill.least + (bits & (SPREAD - 1))


@lru_cache(maxsize=16)
def _midpoints(cache_dtype: str, device: torch.device) -> Tensor:
    cache = DTYPES[cache_dtype]
    above = [midpoint(cache, code) for code in range(cache.max_code)]
    return torch.tensor(above, dtype=torch.float32, device=device)


def _ties(fill: TieFill, bits: Tensor) -> Tensor:
    ties = _midpoints(fill.cache_dtype, bits.device)
    scale = torch.tensor(DTYPES["fp32"].decode(fill.scale), dtype=torch.float32, device=bits.device)
    product = ties[_choices(bits) % len(ties)] * scale
    return encode(torch.where(bits < 0, -product, product), DTYPES[fill.dtype])


def _floats(fill: FloatFill, bits: Tensor) -> Tensor:
    dtype = DTYPES[fill.dtype]
    exponent = fill.low + _choices(bits) % (fill.high - fill.low + 1)
    mantissa = bits & ((1 << dtype.mantissa_bits) - 1)
    codes = (exponent << dtype.mantissa_bits) | mantissa
    return torch.where(bits < 0, codes | dtype.sign_bit, codes)
