"""The counts of a campaign: cases, facts, outcomes per property, hazards."""

from collections import Counter, defaultdict

from kvfuzz.model.axes import AXES
from kvfuzz.model.events import Summary
from kvfuzz.model.verdict import Hazard, Verdict

MOST_HAZARDS = 20


class Tally:
    """Counts verdicts; only cases that were drawn to search count, not those of shrinking."""

    def __init__(self) -> None:
        self.executed = 0
        self.refused = 0
        self.rejected = 0
        """Draws outside `--where` or the domain, never run."""
        self.findings = 0
        self._facts: dict[str, Counter[str]] = defaultdict(Counter)
        self._passed: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._not_checked: dict[str, Counter[str]] = defaultdict(Counter)
        self._hazards: Counter[Hazard] = Counter()

    @property
    def decided_nothing(self) -> bool:
        """Whether no property of any case passed or failed."""
        return not self._passed and not self.findings

    def count(self, shown: dict[str, str], verdict: Verdict) -> None:
        """Add a case with the facts `shown`. Hazards of a failing case are part of its failure."""
        self.executed += 1
        if verdict.refused:
            self.refused += 1
            return
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

    def summary(self, *, elapsed_s: float, ended_by: str) -> Summary:
        """The counts as the last event of a campaign."""
        return Summary(
            cases=self.executed,
            refused=self.refused,
            rejected=self.rejected,
            findings=self.findings,
            elapsed_s=elapsed_s,
            ended_by=ended_by,
            facts={
                axis.name: {level: self._facts[axis.name][level] for level in axis.levels}
                for axis in AXES
            },
            not_checked={name: dict(reasons) for name, reasons in self._not_checked.items()},
            passed=dict(self._passed),
            failed=dict(self._failed),
            hazards=tuple(self._hazards.most_common()),
        )
