"""What is run by day, and what waits for the night: pytest skips it unless `-m nightly` asks."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest


def by_night(*values: object, id: str | None = None) -> Any:
    """Parameters of a test that waits."""
    return pytest.param(*values, marks=pytest.mark.nightly, id=id)


def first_by_day(values: Sequence[Any], count: int) -> list[Any]:
    """The first `count` values by day, the others by night."""
    return [*values[:count], *map(by_night, values[count:])]


def more_by_night(rows: Sequence[Any], day: int, night: int) -> list[Any]:
    """Tuples of parameters with how many cases each has: `day`, and at night `night`.

    What waits anyway has `night` alone.
    """
    found: list[Any] = []
    for row in rows:
        waits = hasattr(row, "marks")
        values = row.values if waits else row
        found += [] if waits else [(*values, day)]
        found.append(by_night(*values, night))
    return found


def all_but(waiting: Collection[str], cases: Mapping[str, Any]) -> list[Any]:
    """Cases by id; those of `waiting` wait."""
    return [
        by_night(case, id=name) if name in waiting else pytest.param(case, id=name)
        for name, case in cases.items()
    ]


def newest_by_day(rows: Sequence[tuple[str, ...]]) -> list[Any]:
    """Rows (target, release, ...), of each target those of its newest release by day."""
    newest: dict[str, tuple[int, ...]] = {}
    for target, release, *_ in rows:
        newest[target] = max(newest.get(target, ()), _number(release))
    return [row if _number(row[1]) == newest[row[0]] else by_night(*row) for row in rows]


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
