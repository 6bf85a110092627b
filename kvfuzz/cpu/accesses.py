"""Who makes an access: its active elements with their lanes and programs, and the stores so far."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.ir import Location, Op

Array = NDArray[Any]
Ids = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The active elements of one access of `op`: byte offsets `[n]`, their `index_of`, and the
    lane of each.

    `lanes` counts over `[programs, *shape]`; None stands for all of them in order. `per_program`
    is the number of lanes of a program, `start` the first program's number in the grid, and `ids`
    turns a program's number within the access into its ids. `is_uniform` says that several
    programs make the access alike; the first one stands for them.
    """

    op: Op
    kernel: str
    at: Array
    index: Array | None
    lanes: Array | None
    per_program: int
    start: int
    ids: Callable[[int], Ids]
    is_uniform: bool = False

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

    def only(self, positions: Array) -> "Chosen":
        """The elements at some positions, ascending."""
        return replace(
            self,
            at=self.at[positions],
            index=None if self.index is None else self.index[positions],
            lanes=positions if self.lanes is None else self.lanes[positions],
        )


@dataclass(frozen=True, slots=True)
class Store:
    """One store of a launch: its first program and the place in the source."""

    start: int
    ids: Callable[[int], Ids]
    place: Location


@dataclass
class Stores:
    """The stores of a launch in order, found again by the tickets that they left."""

    _stores: list[Store] = field(default_factory=list)
    _rows: Array = field(default_factory=lambda: np.zeros((4, 64), np.int64))
    """First ticket, first program, lanes of a program, 1 for atomic; a column a store."""

    def clear(self) -> None:
        """Forget them."""
        self._stores.clear()

    def add(self, first: int, chosen: Chosen, atomic: bool) -> None:
        """Note the store whose tickets start at `first`."""
        count = len(self._stores)
        if count == self._rows.shape[1]:
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)), axis=1)
        self._rows[:, count] = first, chosen.start, chosen.per_program, atomic
        self._stores.append(Store(chosen.start, chosen.ids, chosen.op.location))

    def at(self, number: int) -> Store:
        """The store of a number."""
        return self._stores[number]

    def of(self, tickets: Array) -> tuple[Array, Array, Array]:
        """Per ticket: the number of its store, its program in the grid, whether it was atomic."""
        firsts, starts, widths, atomic = self._rows[:, : len(self._stores)]
        which = np.searchsorted(firsts, tickets, side="right") - 1
        programs = starts[which] + (tickets - firsts[which]) // widths[which]
        return which, programs, atomic[which] != 0
