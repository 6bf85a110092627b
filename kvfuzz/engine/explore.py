"""Draw cases until something fails or the budget ends, then shrink what failed."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvfuzz.engine.guide import Guide
from kvfuzz.engine.shrink import shrunk
from kvfuzz.errors import KvfuzzError
from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.axes import Domain, facts
from kvfuzz.strategies import cases, drawn_case, space

MOST_REJECTED = 1000
"""Draws outside the domain, without one inside, after which it is taken to be impossible."""


class Trial(NamedTuple):
    """What came of a case: whether it failed, whether anything could be decided about it, and
    whether it reached an outcome of the kernel's source that no case had."""

    failed: bool
    decided: bool = True
    news: bool = False


Try = Callable[[AnyCase, Mapping[str, str]], Trial]
"""Executes a case, of which the facts are at hand."""


class Failure(NamedTuple):
    """A failing case as it was drawn, the smallest one that fails in the same way, and what ended
    the way down to it early: the failure is to be kept all the same."""

    first: AnyCase
    smallest: AnyCase
    interruption: KvfuzzError | KeyboardInterrupt | None = None


class Deadline:
    """When to stop: after `max_cases` cases were run, or `budget_s` seconds."""

    def __init__(self, budget_s: float, max_cases: int | None) -> None:
        self.started = time.monotonic()
        self._end = self.started + budget_s
        self._max_cases = max_cases
        self.cases = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def reached(self) -> bool:
        """Whether the budget has ended."""
        spent = self._max_cases is not None and self.cases >= self._max_cases
        return spent or time.monotonic() >= self._end


class Exploration:
    """Draws cases of `op` inside `domain`; `attempt` executes them.

    Raises UsageError where the domain leaves nothing to draw.
    """

    def __init__(
        self,
        op: str,
        domain: Domain,
        attempt: Try,
        *,
        random_seed: int,
        size_of: Callable[[AnyCase], tuple[int, ...]],
    ) -> None:
        self.guide = Guide(space(op, domain), random_seed)
        self._op = op
        self._domain = domain
        self._attempt = attempt
        self._size_of = size_of
        self.rejected = 0
        """Draws that fell outside the domain and were never run."""

    def next_failure(
        self, deadline: Deadline, *, shrink_s: float, stop: Callable[[], bool] = lambda: False
    ) -> Failure | None:
        """The next failure, shrunk for at most `shrink_s`, or None when the deadline has passed,
        `stop()` says so, or nothing can be drawn."""
        while not deadline.reached() and not stop():
            choices = self.guide.draw()
            case = drawn_case(choices, self.guide.space)
            shown = facts(case)
            if self._domain.refusal(shown) is not None:
                self.rejected += 1
                if self.rejected >= MOST_REJECTED and not deadline.cases:
                    return None
                continue
            deadline.cases += 1
            tried = self._attempt(case, shown)
            if tried.decided:
                self.guide.learn(shown, new_outcomes=tried.news)
            if tried.failed:
                return self._shrunk(case, choices.values, shrink_s)
        return None

    def _shrunk(self, case: AnyCase, values: tuple[int, ...], seconds: float) -> Failure:
        def fails(smaller: AnyCase) -> bool:
            shown = facts(smaller)
            return self._domain.refusal(shown) is None and self._attempt(smaller, shown).failed

        found = shrunk(
            cases(self._op, self._domain), values, fails, size_of=self._size_of, seconds=seconds
        )
        return Failure(case, found.case or case, found.interruption)
