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


def index_of(offset: Array, size: int) -> Array | None:
    """The indices of elements of `size` bytes at byte offsets; None where one is not aligned."""
    if size == 1:
        return offset
    if int(np.bitwise_or.reduce(offset, axis=None)) & (size - 1):
        return None
    index: Array = offset >> shift_of(size)
    return index


def gather(
    allocation: Allocation, offset: Array, dtype: np.dtype[Any], index: Array | None
) -> Array:
    """Elements at byte offsets that are all in bounds; `index` is their `index_of`."""
    if dtype == np.bool_:
        truths: Array = allocation.bytes[offset] != 0
        return truths
    if index is not None:
        return allocation.typed(dtype.type).take(index)
    bytes_ = allocation.bytes[offset[..., None] + np.arange(dtype.itemsize)]
    return bytes_.view(dtype)[..., 0]


def scatter(allocation: Allocation, offset: Array, value: Array, index: Array | None) -> None:
    """Write elements `[n]` at byte offsets `[n]` that are all in bounds; of equal ones the last
    stays. `index` is their `index_of`.

    One dimension: NumPy goes through it in order, where it may reorder several.
    """
    if index is not None:
        allocation.typed(value.dtype.type)[index] = value
        return
    bytes_ = np.ascontiguousarray(value)[..., None].view(np.uint8)
    for byte in range(value.dtype.itemsize):
        allocation.bytes[offset + byte] = bytes_[..., byte]


def as_bits(value: Array) -> Array:
    """Elements as unsigned integers, so that equal means the same bits."""
    return value.view(f"u{value.dtype.itemsize}")


def as_bytes(value: Array) -> Array:
    """The bytes of elements `[n]`: uint8 `[n, itemsize]`."""
    flat = np.ascontiguousarray(value).view(np.uint8)
    return flat.reshape(len(value), value.dtype.itemsize)
