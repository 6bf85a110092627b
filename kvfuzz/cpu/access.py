"""What the kernels of one observation did to memory: bytes read and written, strays, launches."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.errors import LaneError
from kvfuzz.cpu.space import AddressSpace, Allocation

Array = NDArray[Any]
Kind = Literal["read", "write"]

ORIGIN_SHIFT = 48  # an origin is one int64: allocation number, then byte offset
NO_ORIGIN = -1


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
class Launch:
    """One kernel launch: `grid` (x, y, z); `constexprs` by name; compile `options` by name."""

    kernel: str
    grid: tuple[int, int, int]
    constexprs: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Marks:
    """The byte sets of one allocation (bool `[nbytes]`), and their wider views by item size."""

    allocation: Allocation
    read: Array
    written: Array
    origin: Array | None
    wide: dict[tuple[Kind, int], Array] = field(default_factory=dict)

    def view(self, kind: Kind, size: int) -> Array:
        """The byte set seen in elements of `size` bytes, aligned to the allocation's start."""
        view = self.wide.get((kind, size))
        if view is None:
            marks = self.read if kind == "read" else self.written
            whole = len(marks) // size * size
            view = marks[:whole].view(np.uint8).view(f"u{size}")
            self.wide[kind, size] = view
        return view


class Access:
    """The record of one observation. Byte sets are bool arrays, one entry per byte."""

    def __init__(self, space: AddressSpace, *, trace_origins: bool = False) -> None:
        self.trace_origins = trace_origins
        self._space = space
        self.launches: list[Launch] = []
        self._strays: dict[tuple[int, Kind, int], Stray] = {}
        self._marks: dict[int, Marks] = {}
        self._by_name: dict[str, int] = {}

    @property
    def strays(self) -> list[Stray]:
        """One record per op, kind and allocation, in the order of their first instance."""
        return list(self._strays.values())

    @property
    def names(self) -> list[str]:
        """Names of the allocations that were touched, `tensor:<argument>` ones included."""
        return list(self._by_name)

    def read(self, name: str) -> Array:
        """Bytes of allocation `name` that active lanes read; bool `[nbytes]`."""
        return self._named(name).read

    def written(self, name: str) -> Array:
        """Bytes of allocation `name` that active lanes wrote; bool `[nbytes]`."""
        return self._named(name).written

    def origin(self, name: str) -> tuple[Array, Array]:
        """Where each byte of `name` came from: allocation number int32, byte offset int64.

        For a converted element all bytes name the first byte of its source. -1 where a byte was
        not written or holds no loaded value. A value computed from several loads names the widest
        operand's, the first of equals. Raises `LaneError` without `trace_origins`.
        """
        origin = self._named(name).origin
        if origin is None:
            raise LaneError("origins were not traced; use lane.observe(trace_origins=True)")
        known = origin != NO_ORIGIN
        offsets = np.where(known, origin & ((1 << ORIGIN_SHIFT) - 1), -1)
        return np.where(known, origin >> ORIGIN_SHIFT, -1).astype(np.int32), offsets

    def allocation_name(self, number: int) -> str:
        """The name of an allocation by its number in `origin`."""
        return next(name for name, each in self._by_name.items() if each == number)

    def marks(self, allocation: Allocation) -> Marks:
        """The byte sets of `allocation`, made on first use."""
        marks = self._marks.get(allocation.number)
        if marks is None:
            origin = np.full(allocation.nbytes, NO_ORIGIN) if self.trace_origins else None
            read = np.zeros(allocation.nbytes, np.bool_)
            marks = Marks(allocation, read, np.zeros_like(read), origin)
            self._marks[allocation.number] = marks
            self._by_name[allocation.name] = allocation.number
        return marks

    def add_stray(self, key: tuple[int, Kind, int], stray: Stray) -> None:
        """Count a stray of the op, kind and allocation in `key`; the first instance stays."""
        first = self._strays.get(key)
        if first is not None:
            stray = Stray(
                first.kind,
                first.kernel,
                first.file,
                first.line,
                first.program,
                first.allocation,
                first.offset,
                first.nbytes,
                first.count + stray.count,
            )
        self._strays[key] = stray

    def _named(self, name: str) -> Marks:
        number = self._by_name.get(name)
        if number is not None:
            return self._marks[number]
        allocation = self._space.named(name)
        if allocation is None:
            raise LaneError(f"name={name!r} was not allocated; known: {', '.join(self._by_name)}")
        return self.marks(allocation)
