"""What to draw next: boundary rows, covering rows, then guided random cases.

Cases that showed something new (three levels together that no case had shown, or an outcome of the
kernel's source that none had) are kept as lists of integers. Guided cases are some of those with a
few integers changed, and fresh ones; of both, rows whose cases are costly are mostly drawn again.
Nothing but the random number and what was learnt decides.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Literal

from kvfuzz.model.fill import MASK, mix
from kvfuzz.strategies.boundaries import boundary_rows
from kvfuzz.strategies.choices import Choice, Drawn, chance
from kvfuzz.strategies.covering import Covering
from kvfuzz.strategies.rows import Row, Space, is_costly

Phase = Literal["boundary", "covering", "random"]

KEPT = 512
"""Cases that showed something new and are mutated, the latest."""
MOST_CHANGES = 3
COSTLY = 8
"""One in so many costly cases is kept: others show more in the same time."""
TRIES = 4
"""Draws for an open combination, until it is taken to be out of reach."""


class Guide:
    """Draws cases of `within` from `random_seed`, and learns what they showed."""

    def __init__(self, within: Space, random_seed: int) -> None:
        self.space = within
        self.covering = Covering(within, random_seed)
        self.phase: Phase = "boundary"
        self._seed = random_seed
        self._count = 0
        self._boundary: Iterator[Row] = boundary_rows(within, Drawn(random_seed))
        self._corpus: deque[tuple[Choice, ...]] = deque(maxlen=KEPT)
        self._tries = 0
        self._last = Drawn(0)

    def draw(self) -> Drawn:
        """The choices of the next case."""
        self._count += 1
        seed = mix((self._seed ^ mix(self._count)) & MASK)
        self._last = Drawn(seed, self._first_choices(Drawn(seed ^ 1)))
        return self._last

    def _first_choices(self, choices: Drawn) -> tuple[int, ...]:
        if self.phase == "boundary":
            row = next(self._boundary, None)
            if row is not None:
                return self.space.integers(row)
            self.phase = "covering"
        if self.phase == "covering":
            if self._tries >= TRIES:
                self.covering.give_up()
                self._tries = 0
            row = self.covering.next_row()
            if row is not None:
                self._tries += 1
                return self.space.integers(row)
            self.phase = "random"
        return self._random(choices)

    def _random(self, choices: Drawn) -> tuple[int, ...]:
        """The choices of a case near one that showed something new, or of any row."""
        is_near = bool(self._corpus) and chance(choices, 2)
        for _ in range(COSTLY):  # a narrow space may have no other rows
            values = self._mutated(choices) if is_near else ()
            drawn = Drawn(choices.integer(0, MASK), values)
            if not is_costly(self.space.drawn_row(drawn)) or chance(choices, COSTLY):
                break
        return values or drawn.values

    def _mutated(self, choices: Drawn) -> tuple[int, ...]:
        made = self._corpus[choices.integer(0, len(self._corpus) - 1)]
        values = [choice.value for choice in made]
        for _ in range(choices.integer(1, MOST_CHANGES)):
            at = choices.integer(0, len(made) - 1)
            values[at] = choices.integer(made[at].low, made[at].high)
        return tuple(values)

    def learn(self, facts: Mapping[str, str], *, new_outcomes: bool = False) -> None:
        """The last case was decided, and showed `facts`; `new_outcomes` of kernel source, too."""
        new = self.covering.mark(facts)
        if not self.covering.asked_in_vain:
            self._tries = 0
        if new or new_outcomes:
            self._corpus.append(tuple(self._last.made))
