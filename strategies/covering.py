"""Covering rows: few rows that show every valid combination of three levels of three axes.

What is open is counted by the facts of the cases that ran, so that a row which was drawn for a
combination and did not show it is asked for again, and random cases count as well. Each row starts
at an open combination and closes many more (`kvfuzz.strategies.greedy`). Which combinations are
valid is found on the way: one that no row of the space completes is struck off.
"""

import itertools
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvfuzz.strategies.greedy import Noise, best_row
from kvfuzz.strategies.rows import Row, Space

CANDIDATES, LATE_CANDIDATES = 4, 24
"""Rows to choose from, while much is open and when it has become hard to close several at once."""
USUAL_BOUND, MOST_GENEROUS = 770, 3
"""The bound of our own ops. In a smaller space there are more rows to choose from, up to so many
times, since each takes less time."""
LATE = 0.06
"""The share of combinations that is open late, about."""


class Covering:
    """The combinations of three levels that no case has shown yet.

    Of rows that are equally good `random_seed` decides, so that two nights draw different ones.
    """

    def __init__(self, within: Space, random_seed: int = 0) -> None:
        self._space = within
        sizes = [len(levels) for levels in within.levels]
        self._axis = np.repeat(np.arange(len(sizes)), sizes)
        # Symmetric, so that a lookup needs no order: each combination stands in six places.
        self._open = _all_different(self._axis)
        self._different = _all_different(np.arange(len(sizes)))
        self._generosity = min(MOST_GENEROUS, max(1, USUAL_BOUND // self.bound))
        self._at_first = int(self._open.sum())
        self._random = Noise(random_seed)
        # Less than one combination each, so that it decides between equals only.
        self._taste = self._random.uniform(len(self._axis)) / 2
        self._asked: tuple[int, int, int] | None = None
        self.given_up = 0
        """Combinations that a row was drawn for again and again, in vain."""
        self._seen = np.zeros_like(self._open)

    @property
    def shown(self) -> int:
        """Combinations that were shown."""
        return int(self._seen.sum()) // 6

    @property
    def open(self) -> int:
        """Combinations that were neither shown nor struck off."""
        return int(self._open.sum()) // 6

    @property
    def bound(self) -> int:
        """The product of the three largest axes: no fewer rows can do, where all is valid."""
        return math.prod(sorted(len(levels) for levels in self._space.levels)[-3:])

    def mark(self, facts: Mapping[str, str]) -> int:
        """Count the facts of a case; returns how many combinations are new.

        A level outside the space counts for nothing.
        """
        at = [
            self._space.first[axis] + levels.index(facts[name])
            for axis, (name, levels) in enumerate(
                zip(self._space.axes, self._space.levels, strict=True)
            )
            if facts[name] in levels
        ]
        block = np.ix_(at, at, at)
        seen, different = self._seen[block], self._valid(at)
        new = int((~seen & different).sum()) // 6
        if new:
            self._seen[block] |= different
            self._open[block] = False
        return new

    def _valid(self, at: list[int]) -> NDArray[np.bool_]:
        """Which places of a block of so many levels are combinations of three axes."""
        return self._different[: len(at), : len(at), : len(at)]

    def next_row(self) -> Row | None:
        """A row that shows an open combination and many more, or None where nothing is open."""
        while (triple := self._open_triple()) is not None:
            row = self._row_with(triple)
            if row is not None:
                self._asked = triple
                return self._space.named(row)
            self._strike(triple)
        return None

    @property
    def asked_in_vain(self) -> bool:
        """Whether the combination that the last row was for is open still."""
        return self._asked is not None and bool(self._open[self._asked])

    def give_up(self) -> None:
        """Close the combination that the last row was for, without having seen it."""
        if self._asked is not None:
            self.given_up += bool(self._open[self._asked])
            self._close(self._asked)

    def _open_triple(self) -> tuple[int, int, int] | None:
        """The open combination of the pair with the most open ones."""
        pairs = self._open.sum(axis=2)
        at = int((pairs + self._taste).argmax())
        first, second = divmod(at, len(self._axis))
        if pairs[first, second] == 0:
            return None
        thirds = np.flatnonzero(self._open[first, second])
        weight = pairs[first, thirds] + pairs[second, thirds] + self._taste[thirds]
        return first, second, int(thirds[weight.argmax()])

    def _row_with(self, triple: tuple[int, int, int]) -> list[int] | None:
        """A row with a combination, which closes many more; None where no row has it."""
        late = self._open.sum() < LATE * self._at_first
        return best_row(
            self._space,
            self._open,
            self._wanted(triple),
            self._random,
            candidates=(LATE_CANDIDATES if late else CANDIDATES) * self._generosity,
        )

    def _wanted(self, numbers: tuple[int, ...]) -> dict[int, int]:
        """Levels numbered over all axes, as axis and level of that axis."""
        axes = [int(self._axis[number]) for number in numbers]
        return {axis: n - self._space.first[axis] for axis, n in zip(axes, numbers, strict=True)}

    def _strike(self, triple: tuple[int, int, int]) -> None:
        """Strike off a combination that no row shows; a pair that none shows, with all thirds."""
        for one, other in ((0, 1), (0, 2), (1, 2)):
            pair = (triple[one], triple[other])
            if self._space.completed(self._wanted(pair), lambda _, levels: list(levels)) is None:
                for a, b in (pair, pair[::-1]):
                    self._open[a, b, :] = self._open[a, :, b] = self._open[:, a, b] = False
                return
        self._close(triple)

    def _close(self, triple: tuple[int, int, int]) -> None:
        for places in itertools.permutations(triple):
            self._open[places] = False


def _all_different(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """At `[i, j, k]`: whether the labels of i, j and k are three different ones."""
    apart = labels[:, None] != labels[None, :]
    found: NDArray[np.bool_] = apart[:, :, None] & apart[:, None, :] & apart[None, :, :]
    return found
