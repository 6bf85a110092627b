"""The hunt: tell new failures from known ones, make them small, and remember what they are.

What is known is frozen from the first failing draw of a hunt to its end, so that the way down never
leads to another finding.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvfuzz.engine.explore import Failure, Trial
from kvfuzz.engine.extent import Extent, extent
from kvfuzz.engine.known import Known, Symptom, mark_of, symptoms
from kvfuzz.engine.reduce import reduced
from kvfuzz.engine.runner import Runner
from kvfuzz.engine.tally import Tally
from kvfuzz.errors import KvfuzzError
from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.axes import Domain, facts
from kvfuzz.model.verdict import Verdict
from kvfuzz.model.vocabulary import Levels
from kvfuzz.strategies import space

TAKING_TURNS = ("covering", "random")
"""The phases of a search that ask a few relations of each case; others ask all of them."""


class Caught(NamedTuple):
    """A new finding: its smallest case, how that fails, and under which levels, where asked."""

    case: AnyCase
    symptom: Symptom
    verdict: Verdict
    extent: dict[str, Levels] | None


class Effort(NamedTuple):
    """Seconds for making a failing case small, and for its extent; none leaves that out."""

    reduce_s: float
    extent_s: float


class Hunt:
    """All hunts of a campaign over cases of `op` inside `domain`."""

    def __init__(
        self,
        runner: Runner,
        tally: Tally,
        op: str,
        domain: Domain,
        *,
        random_seed: int,
        effort: Effort,
        progress: Callable[[str], None],
    ) -> None:
        self._runner = runner
        self._tally = tally
        self._op, self._domain = op, domain
        self._random_seed = random_seed
        self._effort = effort
        self._progress = progress
        self._known: list[Known] = []
        self._hunted: Symptom | None = None
        """The failure that is being made small."""

    def attempt(self, case: AnyCase, shown: Mapping[str, str], phase: str) -> Trial:
        """Execute a case, to search or to shrink: whether it fails in a way that is not known."""
        self._progress("shrink" if self._hunted else phase)
        in_turn = self._hunted is None and phase in TAKING_TURNS
        verdict, news = self._runner.check(case, in_turn=in_turn)
        if self._hunted is None:
            self._tally.count(shown, verdict)
        new = [
            symptom
            for symptom in symptoms(verdict)
            if not any(known.explains(symptom, shown) for known in self._known)
        ]
        if new and self._hunted is None:
            # The plainest case that fails like this, by whatever path of the kernel.
            self._hunted = new[0]
        decided = any(each.outcome != "not_checked" for each in verdict.results)
        return Trial(bool(new) and self._hunted in new, decided, news)

    def settle(self, found: Failure, report: Callable[[Caught], None]) -> None:
        """Report a failure, or widen the finding that it is another case or a consequence of.

        What was found is reported even where the worker is lost, or the user interrupts, while it
        is made smaller and its extent is tried out; then that error is raised.
        """
        hunted = self._hunted
        assert hunted is not None  # noqa: S101  (what failed was hunted)
        case = found.smallest
        where: Extent | None = None
        verdict, _ = self._runner.check(case)
        interruption = found.interruption
        try:
            if interruption is not None:
                raise interruption
            case = self._reduced(case)
            verdict, _ = self._runner.check(case)
            # Of a crash no byte is explained, and how it ended tells it from others.
            if hunted.property != "crash":
                verdict = self._runner.explained(case)
                if self._effort.extent_s:
                    where = self._extent(hunted, facts(case))
        except (KvfuzzError, KeyboardInterrupt) as error:
            interruption = error
        if not self._widened(case, hunted, verdict, where.possible if where else {}):
            report(Caught(case, hunted, verdict, where.seen if where else None))
        self._hunted = None
        self._runner.forget()
        if interruption is not None:
            raise interruption

    def _widened(
        self, case: AnyCase, hunted: Symptom, verdict: Verdict, extent: dict[str, Levels]
    ) -> bool:
        """Note what is known now; True where a finding is widened, False where there is a new one.

        A case is a consequence where a finding explains another of its symptoms, on the same side
        or on none, and where a finding of another property has had its symptom beside its own.
        """
        shown, all_symptoms = facts(case), symptoms(verdict)
        mark = mark_of(case, hunted, verdict)
        beside = [each for each in all_symptoms if each.side in ("", hunted.side)]
        for index, known in enumerate(self._known):
            beside_its_own = hunted in known.symptoms and hunted.property != known.mark.property
            explained = any(known.explains(each, shown) for each in beside)
            if known.mark == mark or explained or beside_its_own:
                self._known[index] = known.wider((hunted,), extent)
                return True
        self._known.append(Known(mark, frozenset({hunted, *all_symptoms}), (extent,)))
        return False

    def _reduced(self, case: AnyCase) -> AnyCase:
        """The smallest case that fails like the one that is hunted."""
        return reduced(
            case,
            lambda smaller: self.attempt(smaller, facts(smaller), "shrink").failed,
            domain=self._domain,
            budget_s=self._effort.reduce_s,
        ).case

    def _extent(self, hunted: Symptom, shown: Mapping[str, str]) -> Extent:
        """Under which levels near its smallest case a finding shows."""

        def fails(case: AnyCase, _: Mapping[str, str]) -> bool:
            self._progress("extent")
            return hunted in symptoms(self._runner.check(case)[0])

        return extent(
            space(self._op, self._domain),
            shown,
            fails,
            random_seed=self._random_seed,
            seconds=self._effort.extent_s,
        )
