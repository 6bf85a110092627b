"""Races of a launch: bytes that two programs write differently, or one reads and another changes.

Every store leaves a *ticket* at each element: a number that says which store it was and which of
its lanes. Finding another ticket of the same launch there means that the element was written
before; finding another one right after one's own means that two lanes of one store met. Both are
rare, and only then is it worked out who they were and whether their bytes differ.

An element that several programs have written equally is *shared*, and one that its program has
rewritten differently is *changed*: whoever else writes there later races, whichever program
happened to come first. Without either, an equal rewrite is no race. Atomic accesses are ordered
among themselves, and not against plain ones. What a program reads and another one changes is looked
for on request only, since it needs more tables.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.accesses import Chosen, Ids, Stores
from kvfuzz.cpu.elements import as_bits, as_bytes, gather, index_of, shift_of
from kvfuzz.cpu.ir import NOWHERE, Location
from kvfuzz.cpu.readers import Readers
from kvfuzz.cpu.reserve import zeros
from kvfuzz.cpu.space import Allocation
from kvfuzz.cpu.tickets import MOST_TICKETS, Tickets

Array = NDArray[Any]
Key = tuple[int, int]  # allocation number and element size
RaceKind = Literal["write/write", "read/write"]

_SHARED, _CHANGED = np.uint8(1), np.uint8(2)


@dataclass(frozen=True, slots=True)
class Race:
    """Accesses of two programs to one byte, in one launch, without an order; the first, and how
    many elements.

    `file`, `line` and `program` (x, y, z) are of the later access here, the `other` ones of the
    earlier access, 0 and None where they are not known. Within one store, `program` is whose value
    is lost and `other_program` whose stays; they are one where its own lanes disagree. `offset` is
    in bytes.
    """

    kind: RaceKind
    kernel: str
    file: str
    line: int
    program: Ids
    other_file: str
    other_line: int
    other_program: Ids | None
    allocation: str
    offset: int
    nbytes: int
    count: int


@dataclass
class Races:
    """The tickets of one observation. `with_readers` asks for reads to be noted, too."""

    tickets: Tickets
    with_readers: bool = False
    found: dict[tuple[int, int, RaceKind], Race] = field(default_factory=dict)
    is_silent: bool = False
    """Whether the programs of the launch order themselves, so that nothing is noted."""
    _tables: dict[Key, Array] = field(default_factory=dict)
    _flags: dict[Key, Array] = field(default_factory=dict)
    _written: set[Key] = field(default_factory=set)
    """What the launch has written; only there can a ticket be one of its own."""
    _stores: Stores = field(default_factory=Stores)
    _readers: Readers = field(default_factory=Readers)
    _launch: int = 1

    def begin_launch(self, *, is_silent: bool = False) -> None:
        """Accesses from here on are ordered after all before."""
        if self.tickets.next > MOST_TICKETS // 2:
            self._tables.clear()
            self.tickets.restart()
        self.is_silent = is_silent
        self._launch = self.tickets.next
        self._forget_launch()

    def end(self) -> None:
        """Give the tables back and let go of the machines; what was found stays."""
        for table in self._tables.values():
            self.tickets.give_back(table)
        self._tables.clear()
        self._forget_launch()

    def _forget_launch(self) -> None:
        self._stores.clear()
        self._written.clear()
        self._flags.clear()
        self._readers.clear()

    def wrote(
        self, chosen: Chosen, allocation: Allocation, value: Array, *, atomic: bool = False
    ) -> None:
        """Note a store of `value` `[n]` that is about to be made; programs in ascending order."""
        if self.is_silent:
            return
        size, index = value.dtype.itemsize, chosen.index
        if index is None:
            chosen, value, size = chosen.of_bytes(size), as_bytes(value).ravel(), 1
            index = chosen.at
        first = self._take_tickets(chosen)
        if chosen.lanes is None:
            mine = np.arange(first, first + len(index), dtype=np.int32)
        else:
            mine = chosen.lanes.astype(np.int32)
            mine += np.int32(first)
        key = (allocation.number, size)
        fresh = key not in self._written
        self._written.add(key)
        table = self._table(key, allocation)
        before = None if fresh else table.take(index)
        table[index] = mine
        after = table.take(index)
        self._stores.add(first, chosen, atomic)
        if before is not None and int(before.max(initial=0)) >= self._launch:
            self._against_earlier(chosen, allocation, value, before, size, 0, atomic)
        if (after != mine).any():
            self._within(chosen, allocation, value, after - first, atomic)
        if chosen.is_uniform:
            self._flag(key, allocation)[index] |= _SHARED
        for number, other in list(self._written):
            if number == allocation.number and other != size:
                self._across_sizes(chosen, allocation, value, other, atomic)
        if self.with_readers:
            for race_with in self._readers.changes(chosen, allocation, value):
                self._add("read/write", chosen, allocation, size, *race_with)

    def read(self, chosen: Chosen, allocation: Allocation, size: int) -> None:
        """Note a load; only `with_readers`."""
        if self.is_silent:
            return
        if chosen.index is None:
            chosen, size = chosen.of_bytes(size), 1
        for race_with in self._readers.reads(chosen, allocation, size):
            self._add("read/write", chosen, allocation, size, *race_with)

    def _take_tickets(self, chosen: Chosen) -> int:
        count = len(chosen.at) if chosen.lanes is None else int(chosen.lanes[-1]) + 1
        if self.tickets.next + count > MOST_TICKETS:  # a launch of two billion stored elements
            self.tickets.next = MOST_TICKETS
            self.begin_launch()
        first = self.tickets.next
        self.tickets.next += count
        return first

    def _table(self, key: Key, allocation: Allocation) -> Array:
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self.tickets.table(-(-allocation.nbytes // key[1]))
        return table

    def _flag(self, key: Key, allocation: Allocation) -> Array:
        flags = self._flags.get(key)
        if flags is None:
            flags = self._flags[key] = zeros(-(-allocation.nbytes // key[1]), np.uint8)
        return flags

    def _across_sizes(
        self, chosen: Chosen, allocation: Allocation, value: Array, other: int, atomic: bool
    ) -> None:
        """Elements that this launch wrote with another width."""
        for part in range(0, value.dtype.itemsize, other):
            index = (chosen.at + part) >> shift_of(other)
            tickets = self._tables[allocation.number, other].take(index)
            if int(tickets.max(initial=0)) >= self._launch:
                self._against_earlier(chosen, allocation, value, tickets, other, part, atomic)

    def _within(
        self, chosen: Chosen, allocation: Allocation, value: Array, winner: Array, atomic: bool
    ) -> None:
        """Lanes of one store that met: `winner` is the lane whose value stays, per element."""
        position = winner if chosen.lanes is None else np.searchsorted(chosen.lanes, winner)
        bits, programs = as_bits(value), chosen.programs()
        differ = np.flatnonzero(bits != bits[position])
        if len(differ) and not atomic:
            other = chosen.ids(int(winner[differ[0]]) // chosen.per_program)
            self._add("write/write", chosen, allocation, value.dtype.itemsize,
                      differ, chosen.op.location, other)  # fmt: skip
        met = np.flatnonzero(programs != programs[position])
        if len(met):
            size = value.dtype.itemsize
            flags = self._flag((allocation.number, size), allocation)
            flags[chosen.at[met] >> shift_of(size)] |= _SHARED

    def _against_earlier(
        self,
        chosen: Chosen,
        allocation: Allocation,
        value: Array,
        tickets: Array,
        other_size: int,
        part: int,
        atomic: bool,
    ) -> None:
        """Elements that this launch wrote before, in elements of `other_size` bytes; compared are
        the bytes of `value` from `part` on that both have."""
        met = np.flatnonzero(tickets >= self._launch)
        which, theirs, ordered = self._stores.of(tickets[met])
        if atomic and ordered.any():
            met, which, theirs = met[~ordered], which[~ordered], theirs[~ordered]
        if not len(met):
            return
        flags = self._flag((allocation.number, other_size), allocation)
        at = (chosen.at[met] + part) >> shift_of(other_size)
        known = flags[at]
        # Of an access that all programs make, at least one is foreign to any other.
        foreign = (theirs != chosen.programs()[met]) | (known & _SHARED != 0) | chosen.is_uniform
        span = slice(part, part + min(other_size, value.dtype.itemsize))
        own_at = chosen.at[met]
        old = gather(allocation, own_at, value.dtype, index_of(own_at, value.itemsize))
        differ = (as_bytes(old)[:, span] != as_bytes(value[met])[:, span]).any(axis=1)
        raced = foreign & (differ | (known & _CHANGED != 0))
        if raced.any():
            first = int(np.flatnonzero(raced)[0])
            store = self._stores.at(int(which[first]))
            other = None if known[first] & _SHARED else store.ids(int(theirs[first]) - store.start)
            self._add("write/write", chosen, allocation, value.dtype.itemsize,
                      met[raced], store.place, other)  # fmt: skip
        flags[at] |= np.where(foreign, _SHARED, np.where(differ, _CHANGED, np.uint8(0)))
        own_key = (allocation.number, value.dtype.itemsize)
        if own_key[1] != other_size:
            own = self._flag(own_key, allocation)
            own[own_at >> shift_of(own_key[1])] |= np.where(foreign, _SHARED, np.uint8(0))

    def _add(
        self,
        kind: RaceKind,
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
        place, other = chosen.op.location, other_place or NOWHERE
        self.found[key] = Race(
            kind,
            chosen.kernel,
            place.name,
            place.line,
            chosen.ids(chosen.lane(first) // chosen.per_program),
            other.name if other_place else "",
            other.line,
            other_program,
            allocation.name,
            int(chosen.at[first]),
            size,
            len(elements),
        )
