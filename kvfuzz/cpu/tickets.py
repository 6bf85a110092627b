"""Tickets: numbers that stores leave at the elements they write, and the tables they are left in.

A lane never issues a number twice, so that a table needs no clearing between launches, nor between
observations: what stands in it is older than every launch to come. Tables of past observations are
kept for the next ones, since most of what a small launch's record costs is fresh memory.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.reserve import LARGE, zeros

Array = NDArray[Any]

MOST_TICKETS = 2**31 - 2
MOST_KEPT = 32 << 20
"""Bytes of tables that are kept for observations to come."""


class Tickets:
    """The next number of a lane, and its tables that nobody uses; int32, 0 for no ticket."""

    def __init__(self) -> None:
        self.next = 1
        self._spare: dict[int, list[Array]] = {}
        self._kept = 0

    def restart(self) -> None:
        """Begin again at 1. The caller's own tables are void, too."""
        self.next = 1
        self._spare.clear()
        self._kept = 0

    def table(self, count: int) -> Array:
        """At least `count` entries, all of them older than `next`."""
        if 4 * count >= LARGE:
            return zeros(count, np.int32)
        length = 1 << max(count - 1, 0).bit_length()
        spare = self._spare.get(length)
        if not spare:
            return np.zeros(length, np.int32)
        table = spare.pop()
        self._kept -= table.nbytes
        return table

    def give_back(self, table: Array) -> None:
        """Keep a table for later, if it is small and there is room."""
        if table.nbytes < LARGE and self._kept + table.nbytes <= MOST_KEPT:
            self._spare.setdefault(len(table), []).append(table)
            self._kept += table.nbytes
