"""Races of a launch: bytes that two programs write differently, or one reads and another changes.

Every store leaves a *ticket* at each element: a number that says which store it was and which of
its lanes. Finding another ticket of the same launch there means that the element was written
before; finding another right after one's own means that two lanes of one store met. Both are
rare, and only then is it worked out who they were and whether their bytes differ: an equal
rewrite is no race. What a program reads and another one changes is looked for only on request,
since it needs a second table.

Atomic accesses leave no tickets: they are ordered.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.elements import as_bits, as_bytes, gather, index_of, shift_of
from kvfuzz.cpu.ir import Location, Op
from kvfuzz.cpu.reserve import zeros
from kvfuzz.cpu.space import Allocation

Array = NDArray[Any]
Table = dict[tuple[int, int], Array]  # by allocation number and element size: int32 per element
Ids = tuple[int, int, int]

_MANY = np.int32(2**31 - 1)
_MOST_TICKETS = 2**31 - 2


@dataclass(frozen=True, slots=True)
class Race:
    """Accesses of two programs to one byte, in one launch, without an order; the first, and how
    many elements.

    `line` and `program` (x, y, z) are of the later access here, `other_line` and `other_program`
    of the earlier one; the two programs are one where lanes of one store disagree, and
    `other_program` is None where several programs read the byte. `offset` is in bytes.
    """

    kind: Literal["write/write", "read/write"]
    kernel: str
    file: str
    line: int
    program: Ids
    other_line: int
    other_program: Ids | None
    allocation: str
    offset: int
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """The active elements of one access of `op`: byte offsets `[n]`, their `index_of`, and the
    lane of each.

    `lanes` counts over `[programs, *shape]`; None stands for all of them in order. `per_program`
    is the number of lanes of a program, `start` the first program's number in the grid, and `ids`
    turns a program's number within the access into its ids.
    """

    op: Op
    kernel: str
    at: Array
    index: Array | None
    lanes: Array | None
    per_program: int
    start: int
    ids: Callable[[int], Ids]

    def lane(self, position: int) -> int:
        """The lane of the element at `position`."""
        return position if self.lanes is None else int(self.lanes[position])

    def programs(self) -> Array:
        """The number of each element's program in the grid."""
        lanes = np.arange(len(self.at)) if self.lanes is None else self.lanes
        return self.start + lanes // self.per_program

    def of_bytes(self, size: int) -> "Chosen":
        """The same access as single bytes."""
        lanes = np.arange(len(self.at)) if self.lanes is None else self.lanes
        within = np.arange(size)
        at = (self.at[:, None] + within).ravel()
        return replace(
            self,
            at=at,
            index=at,
            lanes=(lanes[:, None] * size + within).ravel(),
            per_program=self.per_program * size,
        )


@dataclass(frozen=True, slots=True)
class _Store:
    """Whose tickets from `first` on are."""

    first: int
    start: int
    per_program: int
    ids: Callable[[int], Ids]
    place: Location


@dataclass
class Races:
    """The tickets of one observation. `readers` asks for reads to be noted, too."""

    readers: bool = False
    found: dict[tuple[int, int, str], Race] = field(default_factory=dict)
    _tickets: Table = field(default_factory=dict)
    _read: Table = field(default_factory=dict)
    _changed: Table = field(default_factory=dict)
    _written: set[tuple[int, int]] = field(default_factory=set)
    """Allocations, with the element size, that the launch has written."""
    _stores: list[_Store] = field(default_factory=list)
    _next: int = 1
    _launch: int = 1

    def begin_launch(self) -> None:
        """Accesses from here on are ordered after all before."""
        if self._next > _MOST_TICKETS // 2:
            self._tickets.clear()
            self._next = 1
        self._launch = self._next
        self._stores.clear()
        self._written.clear()
        self._read.clear()
        self._changed.clear()

    def wrote(self, chosen: Chosen, allocation: Allocation, value: Array) -> None:
        """Note a store of `value` `[n]` that is about to be made; programs in ascending order."""
        size = value.dtype.itemsize
        index = chosen.index
        if index is None:
            chosen, value, size = chosen.of_bytes(size), as_bytes(value).ravel(), 1
            index = chosen.at
        lanes = len(chosen.at) if chosen.lanes is None else int(chosen.lanes[-1]) + 1
        first, self._next = self._next, self._next + lanes
        if self._next > _MOST_TICKETS:  # a launch of two billion stored elements
            self.begin_launch()
            first, self._next = self._next, self._next + lanes
        mine = (
            np.arange(first, first + lanes, dtype=np.int32)
            if chosen.lanes is None
            else (chosen.lanes + first).astype(np.int32)
        )
        table = self._table(self._tickets, allocation, size)
        fresh = (allocation.number, size) not in self._written
        self._written.add((allocation.number, size))
        before = None if fresh else table.take(index)
        table[index] = mine
        after = table.take(index)
        self._stores.append(
            _Store(first, chosen.start, chosen.per_program, chosen.ids, chosen.op.location)
        )
        if before is not None and int(before.max(initial=0)) >= self._launch:
            self._against_earlier(chosen, allocation, value, before, slice(0, size))
        if (after != mine).any():
            self._within(chosen, allocation, value, after - first)
        for other in self._other_sizes(self._written, allocation, size):
            for part in range(0, size, other):
                known = self._tickets[allocation.number, other].take(
                    (chosen.at + part) >> shift_of(other)
                )
                if int(known.max(initial=0)) >= self._launch:
                    span = slice(part, part + min(other, size))
                    self._against_earlier(chosen, allocation, value, known, span)
        if self.readers:
            self._changes(chosen, allocation, value)

    def read(self, chosen: Chosen, allocation: Allocation, size: int) -> None:
        """Note a load; only with `readers`."""
        index = chosen.index
        if index is None:
            chosen, size = chosen.of_bytes(size), 1
            index = chosen.at
        mine = (chosen.programs() + 1).astype(np.int32)
        for known, _ in self._at(self._changed, chosen.at, allocation, size):
            self._report_readers(chosen, allocation, size, known, mine)
        table = self._table(self._read, allocation, size)
        known = table.take(index)
        new = np.where((known == 0) | (known == mine), mine, _MANY)
        table[index] = new
        met = table.take(index) != new
        table[index[met]] = _MANY

    def _table(self, tables: Table, allocation: Allocation, size: int) -> Array:
        table = tables.get((allocation.number, size))
        if table is None:
            table = zeros(-(-allocation.nbytes // size), np.int32)
            tables[allocation.number, size] = table
        return table

    def _other_sizes(
        self, tables: Iterable[tuple[int, int]], allocation: Allocation, size: int
    ) -> list[int]:
        return [s for number, s in tables if number == allocation.number and s != size]

    def _at(
        self, tables: Table, at: Array, allocation: Allocation, size: int
    ) -> list[tuple[Array, slice]]:
        """What the tables of every element size hold for elements of `size`, part by part."""
        found = []
        for other in (size, *self._other_sizes(tables, allocation, size)):
            table = tables.get((allocation.number, other))
            if table is None:
                continue
            for part in range(0, size, other):
                entries = table.take((at + part) >> shift_of(other))
                found.append((entries, slice(part, part + min(other, size))))
        return found

    def _within(self, chosen: Chosen, allocation: Allocation, value: Array, winner: Array) -> None:
        """Lanes of one store that met: `winner` is the lane whose value stays, per element."""
        bits = as_bits(value)
        position = winner if chosen.lanes is None else np.searchsorted(chosen.lanes, winner)
        differ = np.flatnonzero(bits != bits[position])
        if len(differ):
            first = int(differ[0])
            other = chosen.ids(int(winner[first]) // chosen.per_program)
            self._add("write/write", chosen, allocation, value.dtype.itemsize, differ,
                      chosen.op.location, other)  # fmt: skip

    def _against_earlier(
        self, chosen: Chosen, allocation: Allocation, value: Array, tickets: Array, span: slice
    ) -> None:
        """Elements that an earlier store of this launch wrote; `span` of their bytes, at least."""
        met = np.flatnonzero(tickets >= self._launch)
        firsts = np.array([store.first for store in self._stores])
        which = np.searchsorted(firsts, tickets[met], side="right") - 1
        starts = np.array([store.start for store in self._stores])
        widths = np.array([store.per_program for store in self._stores])
        theirs = starts[which] + (tickets[met] - firsts[which]) // widths[which]
        foreign = theirs != chosen.programs()[met]
        met, which = met[foreign], which[foreign]
        at = chosen.at[met]
        known = gather(allocation, at, value.dtype, index_of(at, value.itemsize))
        old = as_bytes(known)[:, span]
        differ = (old != as_bytes(value[met])[:, span]).any(axis=1)
        if differ.any():
            store = self._stores[int(which[differ][0])]
            lane = int(tickets[met[differ][0]]) - store.first
            other = store.ids(lane // store.per_program)
            self._add("write/write", chosen, allocation, value.dtype.itemsize, met[differ],
                      store.place, other)  # fmt: skip

    def _changes(self, chosen: Chosen, allocation: Allocation, value: Array) -> None:
        """With `readers`: who read what this store changes, and that it changes it."""
        size = value.dtype.itemsize
        old = as_bits(gather(allocation, chosen.at, value.dtype, chosen.index))
        changed = np.flatnonzero(old != as_bits(value))
        if not len(changed):
            return
        kept = replace(
            chosen,
            at=chosen.at[changed],
            index=None if chosen.index is None else chosen.index[changed],
            lanes=changed if chosen.lanes is None else chosen.lanes[changed],
        )
        mine = (kept.programs() + 1).astype(np.int32)
        for known, _ in self._at(self._read, kept.at, allocation, size):
            self._report_readers(kept, allocation, size, known, mine)
        self._table(self._changed, allocation, size)[kept.at >> shift_of(size)] = mine

    def _report_readers(
        self, chosen: Chosen, allocation: Allocation, size: int, known: Array, mine: Array
    ) -> None:
        foreign = np.flatnonzero((known != 0) & (known != mine))
        if not len(foreign):
            return
        number = int(known[foreign[0]])
        other = None if number == _MANY else chosen.ids(number - 1 - chosen.start)
        self._add("read/write", chosen, allocation, size, foreign, None, other)

    def _add(
        self,
        kind: Literal["write/write", "read/write"],
        chosen: Chosen,
        allocation: Allocation,
        size: int,
        elements: Array,
        other_place: Location | None,
        other_program: Ids | None,
    ) -> None:
        key = (id(chosen.op), allocation.number, kind)
        known = self.found.get(key)
        if known is not None:
            self.found[key] = replace(known, count=known.count + len(elements))
            return
        first = int(elements[0])
        self.found[key] = Race(
            kind,
            chosen.kernel,
            chosen.op.location.name,
            chosen.op.location.line,
            chosen.ids(chosen.lane(first) // chosen.per_program),
            other_place.line if other_place else 0,
            other_program,
            allocation.name,
            int(chosen.at[first]),
            size,
            len(elements),
        )
