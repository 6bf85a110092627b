"""Who has read and who has changed each element of a launch, for races of reads with writes.

Two tables per allocation and element size hold a program's number plus one, `MANY` for several, 0
for none. A store changes an element when it puts other bytes there, and once one has, every later
store of the launch counts as a change: which of equal ones comes first is open.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.accesses import Chosen, Ids
from kvfuzz.cpu.elements import as_bits, gather, shift_of
from kvfuzz.cpu.ir import Location
from kvfuzz.cpu.reserve import zeros
from kvfuzz.cpu.space import Allocation

Array = NDArray[Any]
Table = dict[tuple[int, int], Array]
Met = tuple[Array, Location | None, Ids | None]
"""Positions of an access's elements that met, and where and by whom the other access was made."""

MANY = np.int32(2**31 - 1)


@dataclass
class Readers:
    """The two tables of a launch."""

    _read: Table = field(default_factory=dict)
    _changed: Table = field(default_factory=dict)

    def clear(self) -> None:
        """Forget the launch."""
        self._read.clear()
        self._changed.clear()

    def reads(self, chosen: Chosen, allocation: Allocation, size: int) -> Iterator[Met]:
        """Note a load; yields the elements that another program has changed."""
        mine = _numbers(chosen)
        yield from self._foreign(self._changed, chosen, allocation, size, mine)
        self._note(self._read, chosen, allocation, size, mine)

    def changes(self, chosen: Chosen, allocation: Allocation, value: Array) -> Iterator[Met]:
        """Note a store that is about to be made; yields the elements that another program read."""
        size = value.dtype.itemsize
        old = as_bits(gather(allocation, chosen.at, value.dtype, chosen.index))
        changed = old != as_bits(value)
        for known in _entries(self._changed, chosen.at, allocation, size):
            changed |= known != 0
        positions = np.flatnonzero(changed)
        if not len(positions):
            return
        kept = chosen.only(positions)
        mine = _numbers(kept)
        for met, place, other in self._foreign(self._read, kept, allocation, size, mine):
            yield positions[met], place, other
        self._note(self._changed, kept, allocation, size, mine)

    def _foreign(
        self, tables: Table, chosen: Chosen, allocation: Allocation, size: int, mine: Array
    ) -> Iterator[Met]:
        for known in _entries(tables, chosen.at, allocation, size):
            foreign = np.flatnonzero((known != 0) & ((known != mine) | (known == MANY)))
            if len(foreign):
                number = int(known[foreign[0]])
                other = None if number == MANY else chosen.ids(number - 1 - chosen.start)
                yield foreign, None, other

    def _note(
        self, tables: Table, chosen: Chosen, allocation: Allocation, size: int, mine: Array
    ) -> None:
        key = (allocation.number, size)
        if key not in tables:
            tables[key] = zeros(-(-allocation.nbytes // size), np.int32)
        table, index = tables[key], chosen.at >> shift_of(size)
        known = table.take(index)
        new = np.where((known == 0) | (known == mine), mine, MANY)
        table[index] = new
        met = table.take(index) != new
        table[index[met]] = MANY


def _numbers(chosen: Chosen) -> Array:
    if chosen.is_uniform:
        return np.full(len(chosen.at), MANY)
    numbers: Array = (chosen.programs() + 1).astype(np.int32)
    return numbers


def _entries(tables: Table, at: Array, allocation: Allocation, size: int) -> Iterator[Array]:
    """What the tables of every element size hold for elements of `size`, part by part."""
    for (number, other), table in list(tables.items()):
        if number == allocation.number:
            for part in range(0, size, other):
                yield table.take((at + part) >> shift_of(other))
