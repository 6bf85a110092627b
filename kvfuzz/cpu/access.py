"""What the kernels of one observation did to memory: bytes read and written, and what was amiss."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.errors import LaneError
from kvfuzz.cpu.races import Race, Races
from kvfuzz.cpu.reserve import marked_in, pages_of, zeros
from kvfuzz.cpu.space import AddressSpace, Allocation
from kvfuzz.cpu.tickets import Tickets

Array = NDArray[Any]
Kind = Literal["read", "write"]
Reached = Literal["address", "mask", "branch", "bound"]

ORIGIN_SHIFT = 48  # an origin is one int64: allocation number, then byte offset
NO_ORIGIN = -1
_ALL_MARKED = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}


@dataclass(frozen=True, slots=True)
class Stray:
    """Active accesses of one op outside one allocation; the first of them, and how many.

    `file` is a base name; `program` the program ids (x, y, z); `offset` is in bytes from the start
    of `allocation` and may be negative; `nbytes` is the width of one access. `allocation` is `?`
    for an address that belongs to none, and then `offset` is the address.
    """

    kind: Kind
    kernel: str
    file: str
    line: int
    program: tuple[int, int, int]
    allocation: str
    offset: int
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Overflow:
    """A narrow integer that lost bits and decided an access; the first element, and how many.

    `line` is where it reached an address, a mask, a branch or the bound of a loop, `lost_line`
    where it lost its bits. For an address, `offset` is the byte offset in `allocation` that was
    used and `exact` the one that 64-bit arithmetic gives; for a bound they are the two bounds, for
    a mask or a branch the two truth values.
    """

    reached: Reached
    kernel: str
    file: str
    line: int
    lost_file: str
    lost_line: int
    program: tuple[int, int, int]
    allocation: str
    offset: int
    exact: int
    count: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: `grid` (x, y, z); `constexprs` by name; compile `options` by name."""

    kernel: str
    grid: tuple[int, int, int]
    constexprs: dict[str, Any]
    options: dict[str, Any]


@dataclass(slots=True)
class Marks:
    """The byte sets of one allocation, made when the first byte is marked.

    `views` holds a set as bool `[nbytes]` (size 0) and, by item size, as wider integers. For a
    large allocation `pages` holds the numbers of the pages that have a mark.
    """

    allocation: Allocation
    origin: Array | None = None
    views: dict[tuple[Kind, int], Array] = field(default_factory=dict)
    pages: dict[Kind, set[int]] = field(default_factory=lambda: {"read": set(), "write": set()})

    def of(self, kind: Kind) -> Array:
        """The bytes that were read or written; bool `[nbytes]`."""
        marks = self.views.get((kind, 0))
        if marks is None:
            marks = zeros(self.allocation.nbytes, np.bool_)
            self.views[kind, 0] = marks
        return marks

    def any(self, kind: Kind) -> bool:
        """Whether anything was read or written at all."""
        return (kind, 0) in self.views

    def note(self, kind: Kind, offset: Array, size: int, index: Array | None) -> None:
        """Mark elements of `size` bytes at byte offsets; `index` is their `index_of`, and offsets
        do not matter beside it unless the allocation is large."""
        if self.allocation.is_large:
            self.pages[kind] |= pages_of(offset)
            if index is None:  # an element may lie on two pages
                self.pages[kind] |= pages_of(offset + (size - 1))
        if index is not None:
            self._view(kind, size)[index] = _ALL_MARKED[size]
        else:
            for byte in range(size):
                self._view(kind, 1)[offset + byte] = 1

    def bytes_of(self, kind: Kind) -> Array:
        """The offsets of all marked bytes, ascending; int64."""
        if self.allocation.is_large:
            return marked_in(self.of(kind), self.pages[kind])
        return np.flatnonzero(self.of(kind))

    def _view(self, kind: Kind, size: int) -> Array:
        view = self.views.get((kind, size))
        if view is None:
            marks = self.of(kind)
            whole = len(marks) // size * size
            view = marks[:whole].view(np.uint8).view(f"u{size}")
            self.views[kind, size] = view
        return view


class Access:
    """The record of one observation. Byte sets are bool arrays, one entry per byte."""

    def __init__(
        self,
        space: AddressSpace,
        tickets: Tickets,
        *,
        trace_origins: bool = False,
        readers: bool = False,
    ) -> None:
        self.trace_origins = trace_origins
        self.races = Races(tickets, readers)
        self.launches: list[Launch] = []
        self.synchronising: list[str] = []
        """`kernel (file:line)` of the kernels that use what an atomic access returned, or wait for
        memory: their order is their own, and their races are not looked for."""
        self._space = space
        self._strays: dict[tuple[int, Kind, int], Stray] = {}
        self._overflows: dict[tuple[int, Reached], Overflow] = {}
        self._marks: dict[int, Marks] = {}
        self._by_name: dict[str, int] = {}

    @property
    def strays(self) -> list[Stray]:
        """One record per op, kind and allocation, in the order of their first instance."""
        return list(self._strays.values())

    @property
    def overflows(self) -> list[Overflow]:
        """One record per op and what was reached, in the order of their first instance."""
        return list(self._overflows.values())

    @property
    def found_races(self) -> list[Race]:
        """One record per op, allocation and kind, in the order of their first instance."""
        return list(self.races.found.values())

    @property
    def crossed(self) -> list[str]:
        """Allocations of which some byte was both read and written, in any launches."""
        crossed = (each.allocation.name for each in self._marks.values() if _crossed(each))
        return list(dict.fromkeys(crossed))

    @property
    def names(self) -> list[str]:
        """Names of the allocations that were touched, `tensor:<argument>` ones included."""
        return list(self._by_name)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the allocations that were touched."""
        return list(self._marks)

    def touched(self, name: str, kind: Kind) -> bool:
        """Whether any byte of allocation `name` was read, or written."""
        number = self._by_name.get(name)
        return number is not None and self._marks[number].any(kind)

    def read(self, name: str) -> Array:
        """Bytes of allocation `name` that active lanes read; bool `[nbytes]`."""
        return self._named(name).of("read")

    def written(self, name: str) -> Array:
        """Bytes of allocation `name` that active lanes wrote; bool `[nbytes]`."""
        return self._named(name).of("write")

    def bytes_of(self, name: str, kind: Kind) -> Array:
        """Offsets of the bytes of `name` that were read or written, ascending; int64."""
        return self._named(name).bytes_of(kind)

    def origin(self, name: str) -> tuple[Array, Array]:
        """Where each byte of `name` came from: allocation number int32, byte offset int64.

        For a converted element all bytes name the first byte of its source. -1 where a byte was
        not written or holds no loaded value. A value computed from several loads names the widest
        operand's, the first of equals. Raises `LaneError` without `trace_origins`.
        """
        origin = self._origins(name, slice(None))
        known = origin != NO_ORIGIN
        offsets = np.where(known, origin & ((1 << ORIGIN_SHIFT) - 1), -1)
        return np.where(known, origin >> ORIGIN_SHIFT, -1).astype(np.int32), offsets

    def origin_of(self, name: str, byte: int) -> tuple[int, int] | None:
        """The allocation number and the byte that `byte` of `name` came from, if it was loaded."""
        found = int(self._origins(name, byte))
        if found == NO_ORIGIN:
            return None
        return found >> ORIGIN_SHIFT, found & ((1 << ORIGIN_SHIFT) - 1)

    def _origins(self, name: str, at: int | slice) -> Any:
        """The origins of some bytes, `NO_ORIGIN` where there is none."""
        marks = self._named(name)
        if marks.origin is None:
            raise LaneError("origins were not traced; use lane.observe(trace_origins=True)")
        # Large records are zeroed, so that an origin is kept plus one there.
        return marks.origin[at] - int(marks.allocation.is_large)

    def allocation_name(self, number: int) -> str:
        """The name of an allocation by its number in `origin`."""
        return next(name for name, each in self._by_name.items() if each == number)

    def begin_launch(self, launch: Launch, synchronises: str = "") -> None:
        """Note a launch; what its programs do is ordered after all before.

        `synchronises` says where its programs order themselves, if they do.
        """
        self.launches.append(launch)
        self.races.begin_launch(is_silent=bool(synchronises))
        if synchronises and synchronises not in self.synchronising:
            self.synchronising.append(synchronises)

    def marks(self, allocation: Allocation) -> Marks:
        """The byte sets of `allocation`, made on first use."""
        marks = self._marks.get(allocation.number)
        if marks is None:
            marks = Marks(allocation, self._no_origins(allocation))
            self._marks[allocation.number] = marks
            self._by_name[allocation.name] = allocation.number
        return marks

    def _no_origins(self, allocation: Allocation) -> Array | None:
        if not self.trace_origins:
            return None
        if allocation.is_large:
            return zeros(allocation.nbytes, np.int64)
        return np.full(allocation.nbytes, NO_ORIGIN)

    def note_origin(self, allocation: Allocation, at: Array, origin: Array) -> None:
        """Write where the bytes at offsets `at` came from."""
        target = self.marks(allocation).origin
        if target is not None:
            target[at] = origin + int(allocation.is_large)

    def add_stray(self, key: tuple[int, Kind, int], stray: Stray) -> None:
        """Count a stray of the op, kind and allocation in `key`; the first instance stays."""
        first = self._strays.get(key)
        if first is not None:
            stray = replace(first, count=first.count + stray.count)
        self._strays[key] = stray

    def add_overflow(self, key: tuple[int, Reached], overflow: Overflow) -> None:
        """Count an overflow of the op in `key`; the first instance stays."""
        first = self._overflows.get(key)
        if first is not None:
            overflow = replace(first, count=first.count + overflow.count)
        self._overflows[key] = overflow

    def _named(self, name: str) -> Marks:
        allocation = self._space.named(name)
        number = self._by_name.get(name) if allocation is None else allocation.number
        if number in self._marks:
            return self._marks[number]
        if allocation is None:
            raise LaneError(f"name={name!r} was not allocated; known: {', '.join(self._by_name)}")
        return self.marks(allocation)


def _crossed(marks: Marks) -> bool:
    if not (marks.any("read") and marks.any("write")):
        return False
    read, written = marks.of("read"), marks.of("write")
    if marks.allocation.is_large:
        both = marks.pages["read"] & marks.pages["write"]
        return bool(read[marked_in(written, both)].any())
    return bool((read & written).any())
