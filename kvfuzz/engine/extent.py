"""The extent of a finding: under which levels it shows when one axis at a time is changed.

The row of the smallest case is drawn again and again with another level of one axis and everything
that rows leave open drawn anew. A level under which some draw fails in the same way belongs to the
extent; so does one that the time did not suffice to try, or that no row near shows.
"""

import math
import time
from collections.abc import Callable, Mapping

from kvfuzz.model.axes import Levels, facts
from kvfuzz.model.case import Case
from kvfuzz.model.fill import MASK, mix
from kvfuzz.model.lower import lower
from kvfuzz.strategies import drawn_scene
from kvfuzz.strategies.choices import Drawn
from kvfuzz.strategies.rows import Row, Space

PROBES = 6
"""Draws of the unchanged row, at most, to see how often it fails."""
ENOUGH = 3
"""Draws in a row that fail, after which it is taken to fail always."""
MOST_TRIES = 8


def extent(
    within: Space,
    row: Mapping[str, str],
    fails: Callable[[Case, Mapping[str, str]], bool],
    *,
    random_seed: int,
    seconds: float,
) -> dict[str, Levels]:
    """By axis, the levels under which a case near `row` fails, where those are not all."""
    end = time.monotonic() + seconds

    def failed(changed: Row, attempt: int) -> bool:
        seed = mix((random_seed + (attempt << 32)) & MASK)
        case = lower(drawn_scene(Drawn(seed, within.integers(changed)), within))
        return fails(case, facts(case))

    own = dict(row)
    outcomes: list[bool] = []
    while len(outcomes) < PROBES and outcomes != [True] * ENOUGH:
        outcomes.append(failed(own, len(outcomes)))
    if not any(outcomes):
        return {
            axis: (own[axis],)
            for axis, levels in zip(within.axes, within.levels, strict=True)
            if len(levels) > 1
        }
    tries = min(MOST_TRIES, math.ceil(3 * len(outcomes) / sum(outcomes)))
    found: dict[str, Levels] = {}
    for at, axis in enumerate(within.axes):
        levels = tuple(
            level
            for number, level in enumerate(within.levels[at])
            if level == own[axis]
            or time.monotonic() >= end
            or (changed := _near(within, own, at, number)) is None
            or any(failed(changed, attempt) for attempt in range(tries))
        )
        if levels != within.levels[at]:
            found[axis] = levels
    return found


def _near(within: Space, row: Mapping[str, str], at: int, level: int) -> Row | None:
    """A row like `row`, with `level` of axis `at`: other axes change where they must."""
    own = [levels.index(row[axis]) for axis, levels in zip(within.axes, within.levels, strict=True)]
    found = within.completed(
        {at: level}, lambda so_far, possible: _first(own[len(so_far)], possible)
    )
    return None if found is None else within.named(found)


def _first(level: int, possible: tuple[int, ...]) -> list[int]:
    return sorted(possible, key=lambda each: each != level)
