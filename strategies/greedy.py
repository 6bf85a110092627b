"""A row that closes many open combinations: the best of a few greedy ones, each improved in place.

A candidate takes, axis by axis, the level that closes most beside those it has (the idea of AETG:
Cohen, Dalal, Fredman and Patton, IEEE TSE 1997), and then changes one level at a time for as long
as that closes more. Candidates after the first go by noisy figures, so that they differ.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from kvfuzz.model.fill import GOLDEN, MASK, MIX_1, MIX_2, mix
from kvfuzz.strategies.rows import Space

NOISE = 1.7
"""How far from 1 the factors of the later candidates' figures are, at most."""
PASSES = 2
"""How often every axis is tried for a better level."""


class Noise:
    """Uniform random numbers from the counter hash of `kvfuzz.model.fill`.

    NumPy's own generators may give others in another version.
    """

    def __init__(self, seed: int) -> None:
        self._counter = mix(seed & MASK)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """`count` numbers from 0 up to 1."""
        word = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        word += np.uint64(self._counter)
        self._counter = (self._counter + count * GOLDEN) & MASK
        for shift, factor in ((30, MIX_1), (27, MIX_2)):
            word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor)
        word ^= word >> np.uint64(31)
        found: NDArray[np.float64] = (word >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return found


class Gains:
    """How many open combinations each level would close beside the levels held.

    Levels are numbered over all axes, `first[axis]` being the first of an axis; `combinations` is
    true at `[i, j, k]` where the three are open, in every order.
    """

    def __init__(self, combinations: NDArray[np.bool_], held: Iterable[int]) -> None:
        self._open = combinations.view(np.uint8)
        self._third = np.zeros(combinations.shape[1:], np.uint8)
        """At `[i, j]`: how many levels held complete i and j to an open combination."""
        self.held: list[int] = []
        self.each: NDArray[np.int64] = np.zeros(len(combinations), np.int64)
        for level in held:
            self.add(level)

    def add(self, level: int) -> None:
        """Hold one level more."""
        self.each += self._third[level]
        self._third += self._open[level]
        self.held.append(level)

    def remove(self, level: int) -> None:
        """Hold one level less."""
        self.held.remove(level)
        self._third -= self._open[level]
        self.each -= self._third[level]


def best_row(
    within: Space,
    combinations: NDArray[np.bool_],
    wanted: Mapping[int, int],
    random: Noise,
    *,
    candidates: int,
) -> list[int] | None:
    """A row with the levels `wanted` (axis to level), or None where no row has them."""
    best, most = None, -1
    for number in range(candidates):
        noise = NOISE if number else 0.0
        weights = 1.0 + noise * (2 * random.uniform(len(combinations)) - 1)
        candidate = _Candidate(within, combinations, wanted)
        if not candidate.found(weights):
            return None
        candidate.improve(random)
        if candidate.closed > most:
            best, most = candidate.row, candidate.closed
    return best


class _Candidate:
    """A row in the making, and what its levels close."""

    def __init__(
        self, within: Space, combinations: NDArray[np.bool_], wanted: Mapping[int, int]
    ) -> None:
        self._space, self._wanted, self._first = within, wanted, within.first
        self._gains = Gains(combinations, [self._first[a] + n for a, n in wanted.items()])
        self.row: list[int] = []
        self._counted: list[int] = []
        """The levels of the row that are held; those wanted are from the start."""

    @property
    def closed(self) -> int:
        """Three times the open combinations that the row shows."""
        return int(self._gains.each[self._gains.held].sum())

    def found(self, weights: NDArray[np.float64]) -> bool:
        """Complete the row axis by axis; False where no row has the levels wanted."""

        def prefer(row: list[int], possible: tuple[int, ...]) -> list[int]:
            self._count(row)
            options = np.array(possible) + self._first[len(row)]
            figures = self._gains.each[options] * weights[options] + weights[options] / 2
            return [possible[place] for place in np.argsort(-figures, kind="stable")]

        row = self._space.completed(self._wanted, prefer)
        if row is None:
            return False
        self._count(row)
        self.row = row
        return True

    def _count(self, row: list[int]) -> None:
        """Hold the levels of `row`; what was held beyond a dead end goes."""
        counted = self._counted
        while counted != row[: len(counted)]:
            axis = len(counted) - 1
            level = counted.pop()
            if axis not in self._wanted:
                self._gains.remove(self._first[axis] + level)
        for axis in range(len(counted), len(row)):
            if axis not in self._wanted:
                self._gains.add(self._first[axis] + row[axis])
            counted.append(row[axis])

    def improve(self, random: Noise) -> None:
        """Change one level at a time to one that closes more, in a random order of the axes."""
        free = [axis for axis in range(len(self.row)) if axis not in self._wanted]
        for _ in range(PASSES):
            order = np.argsort(random.uniform(len(free)), kind="stable")
            if not sum(self._changed(free[place]) for place in order):
                return

    def _changed(self, axis: int) -> bool:
        """Whether another level of `axis` closes more, and the rules allow it: then take it."""
        first, old = self._first[axis], self.row[axis]
        # Two levels of one axis complete nothing together, so that the old one may stay meanwhile.
        figures = self._gains.each[first : first + len(self._space.levels[axis])]
        if figures.max() <= figures[old]:
            return False
        for level in np.argsort(-figures, kind="stable"):
            if figures[level] <= figures[old]:
                break
            self.row[axis] = int(level)
            if self._space.allows(self.row, axis):
                self._gains.remove(first + old)
                self._gains.add(first + int(level))
                return True
        self.row[axis] = old
        return False
