"""The one kind of choice that every strategy makes: an integer in a closed range.

A scene is a function of such choices, so that a list of integers *is* a case: a covering row and a
corpus entry are the first integers of one, mutation changes some, and Hypothesis shrinks them. Low
integers are the plain ones. `Drawn` makes choices from a list and then from a generator of its own,
without Hypothesis, in microseconds; `FromHypothesis` makes them through `draw`.

The generator is the counter hash of `kvfuzz.model.fill`, so that a random number means the same
choices under every Python, Hypothesis and environment.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvfuzz.model.fill import GOLDEN, MASK, mix

T = TypeVar("T")

RARELY = 6
"""What happens at times happens once in so many draws."""
MAX_FILL_SEED = (1 << 32) - 1


class Choices(Protocol):
    """Where a strategy gets its integers from."""

    def integer(self, low: int, high: int) -> int:
        """An integer of `low`..`high`, both included; low ones are plainer."""


class Choice(NamedTuple):
    """One choice that was made, and between which bounds."""

    value: int
    low: int
    high: int


class Drawn:
    """Choices from `first`, then uniform ones from the random number `seed`; all are recorded.

    A given integer outside the bounds that are asked for becomes the nearer bound.
    """

    def __init__(self, seed: int, first: Sequence[int] = ()) -> None:
        self._first = first
        self._state = mix((seed + GOLDEN) & MASK)
        self.made: list[Choice] = []

    def integer(self, low: int, high: int) -> int:
        """The next integer."""
        at = len(self.made)
        if at < len(self._first):
            value = min(max(self._first[at], low), high)
        else:
            # A range of 2**k values takes the top k bits; the bias elsewhere is below 2**-32.
            self._state = (self._state + GOLDEN) & MASK
            value = low + (mix(self._state) * (high - low + 1) >> 64)
        self.made.append(Choice(value, low, high))
        return value

    @property
    def values(self) -> tuple[int, ...]:
        """The integers so far: given as `first`, they make the same scene again."""
        return tuple(choice.value for choice in self.made)


@cache
def _integers(low: int, high: int) -> SearchStrategy[int]:
    return st.integers(low, high)


class FromHypothesis:
    """Choices that Hypothesis makes, and shrinks."""

    def __init__(self, draw: DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        """The next integer."""
        return self._draw(_integers(low, high))


def number(choices: Choices, low: int, high: int) -> int:
    """An integer of `low`..`high`; no choice is made where there is only one."""
    return low if low == high else choices.integer(low, high)


def pick(choices: Choices, options: Sequence[T]) -> T:
    """One of `options`, the first being the plainest."""
    return options[number(choices, 0, len(options) - 1)]


def chance(choices: Choices, one_in: int) -> bool:
    """True once in `one_in` draws."""
    return choices.integer(0, one_in - 1) == one_in - 1


def distinct(choices: Choices, count: int, below: int) -> list[int]:
    """`count` different integers of `range(below)` in any order; plainest is 0, 1, 2, …

    A Fisher-Yates shuffle of the range, of which only the moved places are kept.
    """
    moved: dict[int, int] = {}
    drawn = []
    for place in range(count):
        at = number(choices, place, below - 1)
        drawn.append(moved.get(at, at))
        moved[at] = moved.get(place, place)
    return drawn


def rarely(choices: Choices, usual: int, rare: int) -> int:
    """0 to `usual`; once in a few times 0 to `rare`."""
    if rare > usual and chance(choices, RARELY):
        return number(choices, 0, rare)
    return number(choices, 0, usual)


def fill_seed(choices: Choices) -> int:
    """The seed of a case's bytes."""
    return choices.integer(0, MAX_FILL_SEED)
