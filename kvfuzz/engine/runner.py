"""Run a case: on disk before it is launched, once if it fails, counted towards kernel coverage."""

import msgspec

from kvfuzz.engine.journal import Journal
from kvfuzz.engine.pool import Worker
from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.coverage import Coverage
from kvfuzz.model.verdict import Verdict


class Runner:
    """Cases of `target` through one worker."""

    def __init__(self, worker: Worker, journal: Journal, target: str, coverage: Coverage) -> None:
        self._worker = worker
        self._journal = journal
        self._target = target
        self._coverage = coverage
        self._failing: dict[bytes, Verdict] = {}

    def check(self, case: AnyCase, *, in_turn: bool = False) -> tuple[Verdict, bool]:
        """The verdict on a case, and whether it reached an outcome that none had. With `in_turn` a
        case that passes was asked only some of the properties that take turns."""
        key = msgspec.msgpack.encode(case)
        if key in self._failing:
            # A failing case is run again on its way down; the answer must not change under it.
            return self._failing[key], False
        self._journal.about_to_run(self._target, case)
        verdict = self._worker.check(case, in_turn=in_turn)
        news = self._coverage.add(verdict.exercised)
        if verdict.failed:
            self._failing[key] = verdict
        return verdict, news

    def forget(self) -> None:
        """Drop what is known of failing cases: their hunt is over."""
        self._failing.clear()

    def explained(self, case: AnyCase) -> Verdict:
        """The verdict with whose byte was found, of a case that has failed.

        Of a case that fails in another way when it is run again, the verdict that is known.
        """
        known, _ = self.check(case)
        self._journal.about_to_run(self._target, case)
        explained = self._worker.check(case, explain=True)
        same = [each.name for each in explained.failed] == [each.name for each in known.failed]
        return explained if same else known
