"""Zeroed memory of any length: small pieces from NumPy, large ones reserved and not committed.

A large piece costs address space until a byte of it is touched, and then one page of 4 KiB: a
cache of 64 GiB in which a kernel touches forty pages is forty pages.
"""

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.errors import OutOfAddressesError

Array = NDArray[Any]

PAGE_SHIFT = 12
LARGE = 1 << 26
"""Bytes from which on memory is reserved page by page, and records of it are kept by page."""

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named by Python 3.13, Linux's value
_ALIGNMENT = 256
_libc = ctypes.CDLL(None, use_errno=True)


def zeros(count: int, dtype: Any = np.uint8) -> Array:
    """`count` zeros. Raises `OutOfAddressesError`."""
    nbytes = count * np.dtype(dtype).itemsize
    return np.zeros(count, dtype) if nbytes < LARGE else _reserved(nbytes).view(dtype)


def address_of(memory: Array) -> int:
    """The address of an array's first byte; `ndarray.ctypes` makes an object to say it."""
    return int(memory.__array_interface__["data"][0])


def aligned(nbytes: int, *, zeroed: bool = True) -> Array:
    """uint8 `[nbytes]` at a multiple of 256 bytes, of zeros unless the caller fills all of it.
    Raises `OutOfAddressesError`."""
    if nbytes >= LARGE:
        return _reserved(nbytes)
    backing = (np.zeros if zeroed else np.empty)(nbytes + _ALIGNMENT, np.uint8)
    start = -address_of(backing) % _ALIGNMENT
    return backing[start : start + nbytes]


def _reserved(nbytes: int) -> Array:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, nbytes, flags=flags)
    except OSError as error:
        raise OutOfAddressesError(
            f"{nbytes:,} bytes of address space cannot be reserved ({error}); "
            "see ulimit -v and vm.overcommit_memory"
        ) from error
    # Without this one touched byte would cost 2 MiB.
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def keep_freed_memory() -> None:
    """Teach glibc to reuse memory that it would return: faulting pages in costs more than most ops.

    It takes the size of a mapping that is freed for the size up to which it should not make
    mappings (mallopt(3), dynamic mmap threshold, at most 32 MiB). No page of this one is touched.
    """
    np.empty((32 << 20) - (64 << 10), np.uint8)


def give_back_freed_memory() -> None:
    """Return what is free and was kept to the system, where the C library can (malloc_trim(3))."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_pages(memory: Array) -> Array:
    """The numbers of the pages of a large piece that have been touched, ascending; int64.

    Asks the kernel (mincore(2)), so that writes of any code count. Reading touches a page as well.
    """
    count = -(-len(memory) >> PAGE_SHIFT)
    states = np.zeros(-(-count // 8) * 8, np.uint8)
    failed = _libc.mincore(
        ctypes.c_void_p(address_of(memory)),
        ctypes.c_size_t(len(memory)),
        ctypes.c_void_p(address_of(states)),
    )
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    # Few are: look at eight at once first.
    eights = np.flatnonzero(states.view(np.uint64))
    touched = states.reshape(-1, 8)[eights] & 1
    pages: Array = (eights[:, None] * 8 + np.arange(8))[touched != 0]
    return pages


def nonzero_in(memory: Array, pages: Array) -> Array:
    """Offsets of the nonzero bytes of `memory` on the given pages (ascending), ascending; int64."""
    ends = np.flatnonzero(np.diff(pages, append=-1) != 1)
    found, first = [np.zeros(0, np.int64)], 0
    for last in ends:
        start, stop = int(pages[first]) << PAGE_SHIFT, int(pages[last]) + 1 << PAGE_SHIFT
        for at in range(start, stop, LARGE):
            found.append(np.flatnonzero(memory[at : min(at + LARGE, stop)]) + at)
        first = int(last) + 1
    return np.concatenate(found)


def pages_of(offsets: Array) -> set[int]:
    """The numbers of the pages that hold the bytes at `offsets`, which mostly come in runs."""
    pages = (offsets >> PAGE_SHIFT).ravel()
    if not len(pages):
        return set()
    turns = np.flatnonzero(pages[1:] != pages[:-1]) + 1
    return {int(pages[0]), *pages[turns].tolist()}


def marked_in(marks: Array, pages: set[int]) -> Array:
    """Positions of the true entries of `marks` (bool) on the given pages, ascending; int64."""
    found = []
    for page in sorted(pages):
        start = page << PAGE_SHIFT
        found.append(np.flatnonzero(marks[start : start + (1 << PAGE_SHIFT)]) + start)
    return np.concatenate(found) if found else np.zeros(0, np.int64)
