"""Zeroed memory of any length: small pieces from NumPy, large ones reserved and not committed.

A large piece costs address space until a byte of it is touched, and then one page of 4 KiB: a
cache of 64 GiB in which a kernel touches forty pages is forty pages.
"""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PAGE_SHIFT = 12
LARGE = 1 << 26
"""Bytes from which on memory is reserved page by page, and records of it are kept by page."""

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named by Python 3.13, Linux's value
_ALIGNMENT = 256


def zeros(count: int, dtype: Any = np.uint8) -> Array:
    """`count` zeros. Raises MemoryError."""
    nbytes = count * np.dtype(dtype).itemsize
    return np.zeros(count, dtype) if nbytes < LARGE else _reserved(nbytes).view(dtype)


def aligned_zeros(nbytes: int) -> Array:
    """uint8 `[nbytes]`, zeroed, the first at a multiple of 256 bytes. Raises MemoryError."""
    if nbytes >= LARGE:
        return _reserved(nbytes)
    backing = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -backing.ctypes.data % _ALIGNMENT
    return backing[start : start + nbytes]


def _reserved(nbytes: int) -> Array:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, nbytes, flags=flags)
    except OSError as error:
        raise MemoryError(
            f"{nbytes:,} bytes of address space cannot be reserved ({error}); "
            "see ulimit -v and vm.overcommit_memory"
        ) from error
    # Without this one touched byte would cost 2 MiB.
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def pages_of(offsets: Array) -> set[int]:
    """The numbers of the pages that hold the bytes at `offsets`."""
    return set(np.unique(offsets >> PAGE_SHIFT).tolist())


def marked_in(marks: Array, pages: set[int]) -> Array:
    """Positions of the true entries of `marks` (bool) on the given pages, ascending; int64."""
    found = []
    for page in sorted(pages):
        start = page << PAGE_SHIFT
        found.append(np.flatnonzero(marks[start : start + (1 << PAGE_SHIFT)]) + start)
    return np.concatenate(found) if found else np.zeros(0, np.int64)
