"""The runner of a campaign, with a worker that answers by a list."""

import pytest

from kvfuzz.engine.journal import Journal
from kvfuzz.engine.runner import Runner
from kvfuzz.model.coverage import Coverage
from kvfuzz.model.lower import lower
from kvfuzz.model.verdict import PropertyResult, Verdict, Violation


def _failing(name, message):
    return Verdict((PropertyResult(name, "failed", violation=Violation(message)),))


class _Answers:
    def __init__(self, *verdicts):
        self._left = list(verdicts)

    def check(self, case, *, in_turn=False, explain=False):
        return self._left.pop(0)


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (_failing("oracle", "explained"), "explained"),
        (_failing("crash", "raised"), "first"),
        (Verdict((PropertyResult("oracle", "passed"),)), "first"),
    ],
)
def test_a_case_that_fails_otherwise_when_it_is_explained_keeps_its_verdict(
    tmp_path, gather_scene, again, message
):
    worker = _Answers(_failing("oracle", "first"), again)
    runner = Runner(worker, Journal(tmp_path), "builtin:gather_cache", Coverage())
    (failed,) = runner.explained(lower(gather_scene)).failed
    assert (failed.name, failed.violation.message) == ("oracle", message)
