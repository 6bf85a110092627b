"""How to make something smaller when only trying tells: searches that are told what will do.

A search is a generator. It yields a candidate, is told whether that one will do, and goes on from
it if so; it returns the last one that did. Whoever drives it may stop at any time. None runs for
ever: each candidate that does has fewer items, a lower value or an earlier place than the last.
Where something smaller cannot be made, whoever is to make it returns None.
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import msgspec

S = TypeVar("S")
T = TypeVar("T")

Steps = Generator[S, bool, S]
"""Yields candidates, receives whether each will do, returns the last one that did."""


def fewest(
    whole: S, items: tuple[T, ...], rebuild: Callable[[tuple[T, ...]], S | None], least: int = 0
) -> Steps[S]:
    """Delete from `items`, of which `whole` is made, all but `least`, then halves, then ones."""
    chunk = len(items) - least
    while chunk > 0:
        at = 0
        while at < len(items):
            kept = items[:at] + items[at + chunk :]
            smaller = rebuild(kept) if len(kept) >= least else None
            if smaller is not None and smaller != whole and (yield smaller):
                items, whole = kept, smaller
            else:
                at += chunk
        chunk //= 2
    return whole


def smallest(whole: S, value: int, least: int, rebuild: Callable[[int], S | None]) -> Steps[S]:
    """Lower `value`, which `whole` has, to `least`, or else by bisection.

    The result is one that the next lower value does not do for.
    """
    if value <= least:
        return whole
    lowest = rebuild(least)
    if lowest is not None and lowest != whole and (yield lowest):
        return lowest
    low = least
    while value - low > 1:
        middle = (low + value) // 2
        lower = rebuild(middle)
        if lower is not None and lower != whole and (yield lower):
            value, whole = middle, lower
        else:
            low = middle
    return whole


def first_of(whole: S, candidates: Iterable[S | None]) -> Steps[S]:
    """The first candidate that will do, or `whole`."""
    for candidate in candidates:
        if candidate is not None and candidate != whole and (yield candidate):
            return candidate
    return whole


def until_stable(whole: S, passes: Iterable[Callable[[S], Steps[S]]]) -> Steps[S]:
    """Search after search, again and again, until a round changes nothing."""
    searches = tuple(passes)
    seen: list[S] = []
    while whole not in seen:
        seen.append(whole)
        for each in searches:
            whole = yield from each(whole)
    return whole


M = TypeVar("M", bound=msgspec.Struct)


def fewer_items(name: str, least: int = 0) -> Callable[[Any], Steps[Any]]:
    """The search that deletes from the tuple that attribute `name` of a struct holds."""

    def search(whole: M) -> Steps[M]:
        return fewest(whole, getattr(whole, name), lambda kept: _with(whole, name, kept), least)

    return search


def lower_number(name: str, least: int = 0) -> Callable[[Any], Steps[Any]]:
    """The search that lowers the integer that attribute `name` of a struct holds."""

    def search(whole: M) -> Steps[M]:
        return smallest(whole, getattr(whole, name), least, lambda less: _with(whole, name, less))

    return search


def plainer_value(name: str, *values: object) -> Callable[[Any], Steps[Any]]:
    """The search that sets attribute `name` of a struct to an earlier one of `values`."""

    def search(whole: M) -> Steps[M]:
        now = getattr(whole, name)
        earlier = values[: values.index(now)] if now in values else values
        return first_of(whole, (_with(whole, name, value) for value in earlier))

    return search


def _with(whole: M, name: str, value: object) -> M:
    return msgspec.structs.replace(whole, **{name: value})
