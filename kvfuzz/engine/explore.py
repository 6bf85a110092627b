"""Draw scenes until something fails or the budget ends, then shrink what failed.

Hypothesis runs with every setting explicit and no profile: under CI variables its own profile
would draw the same examples every night. Examples come in batches, since one long Hypothesis run
keeps every example it has seen.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.configuration import set_hypothesis_home_dir, storage_directory
from hypothesis.strategies import SearchStrategy

from kvfuzz.engine.provider import use_seed
from kvfuzz.model.scene import Scene

BATCH = 500
"""Examples per Hypothesis run; memory stays flat."""


class Falsified(Exception):  # noqa: N818  (what Hypothesis calls it)
    """The scene under test failed in the way that is being shrunk."""


class _Stop(BaseException):
    """The budget ended. A BaseException, so that Hypothesis does not take it for a failure."""


class Failure(NamedTuple):
    """A failing scene as it was drawn, and the smallest one that fails in the same way."""

    first: Scene
    smallest: Scene


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

    def expire(self) -> None:
        """End the budget now."""
        self._end = 0.0

    def reached(self) -> bool:
        """Whether the budget has ended."""
        spent = self._max_cases is not None and self.cases >= self._max_cases
        return spent or time.monotonic() >= self._end


@contextmanager
def _home_elsewhere() -> Iterator[None]:
    """Keep Hypothesis from making `.hypothesis` in the folder that the user happens to be in."""
    home = storage_directory(intent_to_write=False).home_directory
    with tempfile.TemporaryDirectory(prefix="kvfuzz-hypothesis-") as elsewhere:
        set_hypothesis_home_dir(elsewhere)
        try:
            yield
        finally:
            set_hypothesis_home_dir(home)


class Exploration:
    """Draws from `scenes`; `fails(scene)` executes one and says whether it fails.

    `fails` returns None for a scene that is not to be counted (a draw outside `--where`).
    """

    def __init__(
        self,
        scenes: SearchStrategy[Scene],
        fails: Callable[[Scene], bool | None],
        *,
        random_seed: int,
        size_of: Callable[[Scene], tuple[int, ...]],
    ) -> None:
        self._scenes = scenes
        self._fails = fails
        self._random_seed = random_seed
        self._size_of = size_of
        self._batch = 0

    def next_failure(
        self, deadline: Deadline, *, shrink_s: float, until: float = math.inf
    ) -> Failure | None:
        """The next failure, shrunk for at most `shrink_s`, or None when the deadline has passed or
        `until` cases were run."""
        while not deadline.reached() and deadline.cases < until:
            found = self._run_batch(deadline, shrink_s, until)
            if found is not None:
                return found
        return None

    def _run_batch(self, deadline: Deadline, shrink_s: float, until: float) -> Failure | None:
        failing: list[Scene] = []
        shrink_end = 0.0

        def test(scene: Scene) -> None:
            nonlocal shrink_end
            if failing:
                if time.monotonic() >= shrink_end:
                    raise _Stop
            elif deadline.reached() or deadline.cases >= until:
                raise _Stop
            failed = self._fails(scene)
            if failed is None:
                hypothesis.reject()
            if not failing:
                deadline.cases += 1
            if failed:
                if not failing:
                    shrink_end = time.monotonic() + shrink_s
                failing.append(scene)
                raise Falsified

        batch_seed = self._random_seed + (self._batch << 32)
        self._batch += 1
        configured = settings(
            max_examples=BATCH,
            phases=(Phase.generate, Phase.shrink),
            backend=use_seed(batch_seed),
            database=None,
            derandomize=False,
            deadline=None,
            report_multiple_bugs=False,
            print_blob=False,
            verbosity=hypothesis.Verbosity.quiet,
            stateful_step_count=1,
            suppress_health_check=list(HealthCheck),
        )
        run = hypothesis.seed(batch_seed)(configured(given(self._scenes)(test)))
        try:
            with _home_elsewhere():
                run()
        except (Falsified, _Stop):
            pass
        except hypothesis.errors.Unsatisfiable:
            return None
        return Failure(failing[0], min(failing, key=self._size_of)) if failing else None
