"""Reading and writing elements at byte offsets of an allocation, aligned to the element or not."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.space import Allocation

Array = NDArray[Any]


def shift_of(size: int) -> int:
    """log2 of an element size."""
    return size.bit_length() - 1


def in_bounds(offset: Array, highest: int) -> bool:
    """Whether all offsets lie in `0..highest`; one pass, negative ones read as huge."""
    return highest >= 0 and (not offset.size or int(offset.view(np.uint64).max()) <= highest)


def misaligned(offset: Array, size: int) -> bool:
    """Whether any byte offset is no multiple of `size`."""
    return bool(int(np.bitwise_or.reduce(offset, axis=None)) & (size - 1))


def gather(allocation: Allocation, offset: Array, dtype: np.dtype[Any]) -> Array:
    """Elements at byte offsets that are all in bounds."""
    size = dtype.itemsize
    if dtype == np.bool_:
        truths: Array = allocation.bytes[offset] != 0
        return truths
    if size == 1 or not misaligned(offset, size):
        return allocation.typed(dtype.type).take(offset >> shift_of(size))
    bytes_ = allocation.bytes[offset[..., None] + np.arange(size)]
    return bytes_.view(dtype)[..., 0]


def scatter(allocation: Allocation, offset: Array, value: Array) -> None:
    """Write elements `[n]` at byte offsets `[n]` that are all in bounds; of equal ones the last
    stays.

    One dimension: NumPy goes through it in order, where it may reorder several.
    """
    size = value.dtype.itemsize
    if size == 1 or not misaligned(offset, size):
        allocation.typed(value.dtype.type)[offset >> shift_of(size)] = value
        return
    bytes_ = np.ascontiguousarray(value)[..., None].view(np.uint8)
    for byte in range(size):
        allocation.bytes[offset + byte] = bytes_[..., byte]


def as_bits(value: Array) -> Array:
    """Elements as unsigned integers, so that equal means the same bits."""
    return value.view(f"u{value.dtype.itemsize}")


def as_bytes(value: Array) -> Array:
    """The bytes of elements `[n]`: uint8 `[n, itemsize]`."""
    flat = np.ascontiguousarray(value).view(np.uint8)
    return flat.reshape(len(value), value.dtype.itemsize)
