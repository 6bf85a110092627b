"""Shrink what failed: Hypothesis starts from its choices and makes them fewer and lower.

Hypothesis runs with every setting explicit and no profile, since its CI profile would change them.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.configuration import set_hypothesis_home_dir, storage_directory
from hypothesis.strategies import SearchStrategy

from kvfuzz.engine.provider import use_choices
from kvfuzz.errors import KvfuzzError
from kvfuzz.model.any_case import AnyCase


class Falsified(Exception):  # noqa: N818  (what Hypothesis calls it)
    """The case under test failed in the way that is being shrunk."""


class _Stop(BaseException):
    """The time ended. A BaseException, so that Hypothesis does not take it for a failure."""


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


class Shrunk(NamedTuple):
    """The smallest case that failed, or None where none did again, and what ended it early."""

    case: AnyCase | None
    interruption: KvfuzzError | KeyboardInterrupt | None


def shrunk(
    cases: SearchStrategy[AnyCase],
    values: Sequence[int],
    fails: Callable[[AnyCase], bool],
    *,
    size_of: Callable[[AnyCase], tuple[int, ...]],
    seconds: float,
) -> Shrunk:
    """The smallest case by `size_of` that `fails`, on the way down from the choices `values`.

    What `fails` raises ends the way down, and is returned beside the best so far.
    """
    failing: list[AnyCase] = []
    interruptions: list[KvfuzzError | KeyboardInterrupt] = []
    end = time.monotonic() + seconds

    def test(case: AnyCase) -> None:
        if time.monotonic() >= end:
            raise _Stop
        try:
            failed = fails(case)
        except (KvfuzzError, KeyboardInterrupt) as error:
            interruptions.append(error)
            raise _Stop from None
        if failed:
            failing.append(case)
            raise Falsified

    configured = settings(
        max_examples=2,  # the plainest case, which Hypothesis begins with, and the given one
        phases=(Phase.generate, Phase.shrink),
        backend=use_choices(values),
        database=None,
        derandomize=False,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
        stateful_step_count=1,
        suppress_health_check=list(HealthCheck),
    )
    run = hypothesis.seed(0)(configured(given(cases)(test)))
    try:
        with _home_elsewhere():
            run()
    except (Falsified, _Stop):
        pass
    smallest = min(failing, key=size_of) if failing else None
    return Shrunk(smallest, interruptions[0] if interruptions else None)
