"""Which levels are left of each axis once some are chosen: generalised arc consistency.

A level stays while every rule that is about its axis has a combination of levels that are left and
include it (Mackworth, "Consistency in networks of relations", 1977, for rules of any number of
axes). What is left may still not go together; what is not never does. A search that asks first does
not try out all rows to learn that some levels exclude each other by way of a third axis.
"""

from collections.abc import Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

Table = tuple[tuple[int, ...], Set[tuple[int, ...]]]
"""The axes of a rule, and the combinations of their levels that it allows; all are indices."""


class Filter:
    """The rules among axes with so many levels."""

    def __init__(self, levels: Sequence[Sequence[str]], tables: Sequence[Table]) -> None:
        self._sizes = [len(each) for each in levels]
        self._tables = [
            (axes, np.array(list(allowed), dtype=np.intp).reshape(len(allowed), len(axes)))
            for axes, allowed in tables
        ]
        self._about: list[list[int]] = [[] for _ in levels]
        for number, (axes, _) in enumerate(self._tables):
            for axis in axes:
                self._about[axis].append(number)

    def left(self, chosen: Mapping[int, int]) -> list[Set[int]] | None:
        """The levels that are left of each axis where some axes have one level, or None where an
        axis has none."""
        open_ = [np.ones(size, dtype=bool) for size in self._sizes]
        for axis, level in chosen.items():
            open_[axis] = np.arange(self._sizes[axis]) == level
        waiting = set(range(len(self._tables)))
        while waiting:
            axes, allowed = self._tables[waiting.pop()]
            kept = np.ones(len(allowed), dtype=bool)
            for column, axis in enumerate(axes):
                kept &= open_[axis][allowed[:, column]]
            for column, axis in enumerate(axes):
                found = _with(self._sizes[axis], allowed[kept, column])
                if not found.any():
                    return None
                if found.sum() < open_[axis].sum():
                    open_[axis] = found
                    waiting.update(self._about[axis])
        return [set(np.flatnonzero(each).tolist()) for each in open_]


def _with(size: int, levels: NDArray[np.intp]) -> NDArray[np.bool_]:
    found = np.zeros(size, dtype=bool)
    found[levels] = True
    return found
