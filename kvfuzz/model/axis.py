"""What an axis of a case space is: a question with a closed list of answers."""

from collections.abc import Callable
from typing import Any

import msgspec

from kvfuzz.model.vocabulary import Levels


class Axis(msgspec.Struct, frozen=True):
    """A named question with all its possible answers, and how to read the answer off a case.

    The case is of the family that the axis is of: `level_of` takes no other.
    """

    name: str
    levels: Levels
    level_of: Callable[[Any], str]
    by_op: dict[str, Levels] = {}
    """The levels that can occur for an op, where those are not all."""

    def levels_for(self, op: str) -> Levels:
        """The levels that a case of `op` can show."""
        return self.by_op.get(op, self.levels)


COUNTS: Levels = ("1", "2", "3+")
"""How many there are of something, where more than two are several."""


def count_level(number: int) -> str:
    """The level of COUNTS of a number."""
    return str(number) if number < 3 else "3+"


def only(ops: Levels, *levels: str) -> dict[str, Levels]:
    """The levels that cases of some ops can show, where those are not all: for `Axis.by_op`."""
    return dict.fromkeys(ops, levels)
