"""The counts of a campaign: cases, facts, outcomes per property, hazards, kernel coverage."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from kvfuzz.model.axes import AXIS
from kvfuzz.model.coverage import Coverage
from kvfuzz.model.events import Combinations, Summary
from kvfuzz.model.verdict import Hazard, Verdict

MOST_HAZARDS = 20


class Tally:
    """Counts verdicts; only cases that were drawn to search count, not those of shrinking."""

    def __init__(self) -> None:
        self.executed = 0
        self.refused = 0
        self._last_refusal = ""
        self.undecided = 0
        """Cases of which no property was checked, refused ones not counted."""
        self.findings = 0
        self._facts: dict[str, Counter[str]] = defaultdict(Counter)
        self._passed: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._not_checked: dict[str, Counter[str]] = defaultdict(Counter)
        self._hazards: Counter[Hazard] = Counter()
        self.coverage = Coverage()

    def unchecked(self, most: float, rejected: int) -> str:
        """Why a campaign without a finding is not clean, or nothing.

        `most` is the share of cases that may be refused, or left undecided, at most; `rejected`
        counts draws outside the domain.
        """
        if self.refused > most * self.executed:
            return (
                f"the target refused {self.refused} of {self.executed} cases, more than {most:.0%} "
                f"({self._last_refusal}); narrow its domain, or --where"
            )
        if self.undecided > most * self.executed:
            reason = next(iter(next(iter(self._not_checked.values()))))
            return (
                f"no property was checked of {self.undecided} of {self.executed} cases, more than "
                f"{most:.0%} ({reason}); narrow --where to what can be"
            )
        if not self._passed:
            return (
                f"no case was checked: {self.executed} executed, {rejected} draws outside "
                "--where; raise --budget or --max-cases"
            )
        return ""

    def count(self, shown: Mapping[str, str], verdict: Verdict) -> None:
        """Add a case with the facts `shown`. Hazards of a failing case are part of its failure."""
        self.executed += 1
        if verdict.refused:
            self.refused += 1
            self._last_refusal = verdict.refused
            return
        if all(result.outcome == "not_checked" for result in verdict.results):
            self.undecided += 1
        else:
            for axis, level in shown.items():
                self._facts[axis][level] += 1
        for result in verdict.results:
            if result.outcome == "passed":
                self._passed[result.name] += 1
            elif result.outcome == "failed":
                self._failed[result.name] += 1
            else:
                self._not_checked[result.name][result.reason] += 1
        if not verdict.failed:
            for hazard in verdict.hazards:
                if hazard in self._hazards or len(self._hazards) < MOST_HAZARDS:
                    self._hazards[hazard] += 1

    def summary(
        self, *, elapsed_s: float, ended_by: str, rejected: int, combinations: Combinations
    ) -> Summary:
        """The counts as the last event of a campaign."""
        return Summary(
            cases=self.executed,
            refused=self.refused,
            undecided=self.undecided,
            rejected=rejected,
            findings=self.findings,
            elapsed_s=elapsed_s,
            ended_by=ended_by,
            facts={
                name: {level: counts[level] for level in AXIS[name].levels}
                for name, counts in self._facts.items()
            },
            not_checked={name: dict(reasons) for name, reasons in self._not_checked.items()},
            passed=dict(self._passed),
            failed=dict(self._failed),
            hazards=tuple(self._hazards.most_common()),
            exercised=self.coverage.all(),
            combinations=combinations,
        )
