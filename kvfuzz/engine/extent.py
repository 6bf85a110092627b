"""The extent of a finding: under which levels it shows when one axis at a time is changed.

The row of the smallest case is drawn again and again with another level of one axis and everything
that rows leave open drawn anew. A level under which some draw fails in the same way was *seen* to
fail; one that time did not suffice to try, or that no row near shows, is *open*.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.axes import facts
from kvfuzz.model.fill import MASK, mix
from kvfuzz.model.vocabulary import Levels
from kvfuzz.strategies import drawn_case
from kvfuzz.strategies.choices import Drawn
from kvfuzz.strategies.rows import Row, Space

PROBES = 6
"""Draws of the unchanged row, at most, to see how often it fails."""
ENOUGH = 3
"""Draws in a row that fail, after which it is taken to fail always."""
MOST_TRIES = 8


class Extent(NamedTuple):
    """By axis, where those are not all: the levels that were seen to fail, and those that may."""

    seen: dict[str, Levels]
    possible: dict[str, Levels]
    """What was seen and what is open: a finding explains failures under these."""


def extent(
    within: Space,
    row: Mapping[str, str],
    fails: Callable[[AnyCase, Mapping[str, str]], bool],
    *,
    random_seed: int,
    seconds: float,
) -> Extent:
    """Under which levels a case near `row` fails.

    A smallest case may show levels that no row has together; then the nearest row stands for it.
    """
    end = time.monotonic() + seconds

    def failed(changed: Row, attempt: int) -> bool:
        seed = mix((random_seed + (attempt << 32)) & MASK)
        case = drawn_case(Drawn(seed, within.integers(changed)), within)
        return fails(case, facts(case))

    nearest = _near(within, row, {})
    assert nearest is not None  # noqa: S101  (a space has a row)
    own = nearest
    outcomes: list[bool] = []
    while len(outcomes) < PROBES and outcomes != [True] * ENOUGH:
        outcomes.append(failed(own, len(outcomes)))
    if not any(outcomes):
        alone: dict[str, Levels] = {axis: (row[axis],) for axis in within.axes}
        return Extent(alone, alone)
    tries = min(MOST_TRIES, math.ceil(3 * len(outcomes) / sum(outcomes)))
    seen: dict[str, Levels] = {}
    possible: dict[str, Levels] = {}
    for at, axis in enumerate(within.axes):
        failing, unknown = [], []
        for number, level in enumerate(within.levels[at]):
            changed = own if level == own[axis] else _near(within, own, {at: number})
            if changed is None or time.monotonic() >= end:
                unknown.append(level)
            elif level == own[axis] or any(failed(changed, attempt) for attempt in range(tries)):
                failing.append(level)
        either = {own[axis], *failing, *unknown}
        if not {own[axis], *failing}.issuperset(within.levels[at]):
            seen[axis] = tuple(each for each in within.levels[at] if each in {own[axis], *failing})
        if not either.issuperset(within.levels[at]):
            possible[axis] = tuple(each for each in within.levels[at] if each in either)
    return Extent(seen, possible)


def _near(within: Space, row: Mapping[str, str], wanted: Mapping[int, int]) -> Row | None:
    """A row like `row`, with the levels `wanted` by axis: others change where they must."""
    own = [
        levels.index(row[axis]) if row[axis] in levels else 0
        for axis, levels in zip(within.axes, within.levels, strict=True)
    ]
    found = within.completed(wanted, lambda so_far, levels: _first(own[len(so_far)], levels))
    return None if found is None else within.named(found)


def _first(level: int, possible: tuple[int, ...]) -> list[int]:
    return sorted(possible, key=lambda each: each != level)
