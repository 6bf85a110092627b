"""What of a kernel's source the cases of a campaign have exercised, as data that adds up.

A site is a place in kernel source with a few outcomes: a line runs; a branch is taken by some
program and passed by another; of a masked access all, some or none of a program's lanes are
active; a loop goes round 0, 1 or many times.
"""

from collections.abc import Iterable

import msgspec


class Site(msgspec.Struct, frozen=True, order=True):
    """A place in the source of `kernel`; `column` tells several of a kind on one line apart."""

    kernel: str
    file: str
    line: int
    kind: str
    column: int = 0


class Exercised(msgspec.Struct, frozen=True):
    """The outcomes of a site that were seen, and those that it can have beside them."""

    site: Site
    seen: tuple[str, ...]
    missing: tuple[str, ...]


class Coverage:
    """Outcomes over all cases and workers so far."""

    def __init__(self) -> None:
        self._seen: dict[Site, set[str]] = {}
        self._possible: dict[Site, tuple[str, ...]] = {}

    def add(self, exercised: Iterable[Exercised]) -> bool:
        """Add what a case has exercised; returns whether any outcome is new."""
        news = False
        for each in exercised:
            seen = self._seen.setdefault(each.site, set())
            news |= not seen.issuperset(each.seen)
            seen.update(each.seen)
            known = self._possible.get(each.site, ())
            new = [*each.seen, *each.missing]
            self._possible[each.site] = (*known, *[o for o in new if o not in known])
        return news

    def all(self) -> tuple[Exercised, ...]:
        """Every site in the order of the source."""
        return tuple(
            Exercised(
                site,
                tuple(each for each in self._possible[site] if each in self._seen[site]),
                tuple(each for each in self._possible[site] if each not in self._seen[site]),
            )
            for site in sorted(self._seen)
        )
