"""Reduce a failing case: the smallest and plainest one that fails in the same way.

A finding of forty blocks is a chore. Whatever Hypothesis has shrunk, or cannot shrink (saved seeds,
a case that killed its process), is edited through its scene and lowered again, for as long as it
shows the same symptom: the same property, on the side of K or of V. What only the case has
(further steps) is dropped from the case. Nothing is returned that did not fail.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from typing import Literal

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model import case as cases
from kvfuzz.model.axes import Domain, facts
from kvfuzz.model.case import Case, Step
from kvfuzz.model.lower import lower
from kvfuzz.model.scene import Scene
from kvfuzz.model.search import Steps, fewest
from kvfuzz.model.simpler import simplifications
from kvfuzz.model.steps import check_steps
from kvfuzz.model.verdict import PropertyResult, Verdict

MOST_RUNS = 1000
"""Candidates that are run, at most; a big case takes one to two hundred."""
CONFIRMATIONS = 3
"""How many of the last results are run again before a case that fails at times is left alone."""

SIDES: dict[str, str] = {
    **dict.fromkeys(("k", "key", "key_out"), "key"),
    **dict.fromkeys(("v", "value", "value_out"), "value"),
}
"""By field, whether it is about K or V; a field of state, or no field, is about neither."""

Check = Callable[[Case], Verdict]


class Symptom(msgspec.Struct, frozen=True):
    """How a case fails: what a smaller one must share with it."""

    property: str
    side: str
    """`key` or `value` where the first wrong byte is of one of them, else empty."""
    with_it: frozenset[str]
    """Everything that failed: nothing else may come before `property` in its place."""

    def shown_by(self, verdict: Verdict) -> bool:
        """Whether a verdict fails the same property on the same side, named as the finding is."""
        for result in verdict.failed:
            if result.name == self.property:
                return not self.side or _side(result) == self.side
            if result.name not in self.with_it:
                return False
        return False


def symptom_of(verdict: Verdict, name: str = "") -> Symptom | None:
    """The symptom of a failing verdict: of the property `name`, or of the first that failed.

    None where that did not fail.
    """
    for result in verdict.failed:
        if name in ("", result.name):
            failed = frozenset(each.name for each in verdict.failed)
            return Symptom(result.name, _side(result), failed)
    return None


def _side(result: PropertyResult) -> str:
    place = result.violation.place if result.violation else None
    return SIDES.get(place.field, "") if place else ""


class Reduction(msgspec.Struct, frozen=True):
    """The smallest case that was found, and why it is no smaller."""

    case: Case
    runs: int
    ended_by: Literal["minimal", "time", "runs"]


def reduced(
    case: Case,
    still_fails: Callable[[Case], bool],
    *,
    domain: Domain,
    budget_s: float,
    max_runs: int = MOST_RUNS,
) -> Reduction:
    """Reduce `case`, which fails, for at most `budget_s` seconds and `max_runs` runs.

    A run is never broken off, so that the last one may end late. The same case and answers give the
    same result. A case that fails at times only comes back as far as its last results still fail.
    """
    trial = _Trial(still_fails, domain, time.monotonic() + budget_s, max_runs)
    recent: deque[Case] = deque(maxlen=CONFIRMATIONS)
    ended_by: Literal["minimal", "time", "runs"] = "minimal"
    try:
        for smaller in _search(case, trial):
            recent.append(smaller)
    except _Spent as spent:
        ended_by = "time" if spent.by_time else "runs"
    for last in reversed(recent):
        trial.runs += 1
        if still_fails(last):
            return Reduction(last, trial.runs, ended_by)
    return Reduction(case, trial.runs, ended_by)


def minimum(
    case: Case,
    verdict: Verdict,
    check: Check,
    *,
    domain: Domain,
    budget_s: float,
    is_new: Callable[[Case, Verdict], bool] = lambda case, verdict: True,
) -> tuple[Case, Verdict]:
    """The reduced case of a finding, with its verdict, which `verdict` is for `case`.

    `is_new` says which failures are no finding that is known already.
    """
    symptom = symptom_of(verdict)
    if symptom is None:
        return case, verdict
    last: dict[str, Verdict] = {}

    def still_fails(candidate: Case) -> bool:
        seen = check(candidate)
        fails = symptom.shown_by(seen) and is_new(candidate, seen)
        if fails:
            last[_key(candidate)] = seen
        return fails

    smallest = reduced(case, still_fails, domain=domain, budget_s=budget_s).case
    return smallest, last.get(_key(smallest), verdict)


def _search(case: Case, trial: "_Trial") -> Iterator[Case]:
    """Every smaller case that will do, each smaller than the one before."""
    lowered = lower(case.scene)
    if lowered != case:
        if not trial.will_do(lowered):
            # Its scene does not say why it fails: what can go is steps.
            yield from _accepted(fewest(case, case.steps, partial(_with_steps, case), 1), trial)
            return
        yield lowered
    yield from _accepted(_lowered(simplifications(case.scene)), trial)


def _accepted(search: Steps[Case], trial: "_Trial") -> Iterator[Case]:
    """Drive `search`, and pass on what will do."""
    answer = None
    while True:
        try:
            candidate = search.send(answer) if answer is not None else next(search)
        except StopIteration:
            return
        answer = trial.will_do(candidate)
        if answer:
            yield candidate


def _lowered(search: Steps[Scene]) -> Steps[Case]:
    """A search over scenes as one over their cases; an impossible scene will not do."""
    answer = None
    while True:
        try:
            scene = search.send(answer) if answer is not None else next(search)
        except StopIteration as end:
            return lower(end.value)
        try:
            case = lower(scene)
        except UsageError:
            answer = False
        else:
            answer = yield case


def _with_steps(case: Case, steps: tuple[Step, ...]) -> Case:
    """`case` with fewer steps, without the tensors and buffers that only the others bind."""
    bound = {name for step in steps for name in step.tensors.values()}
    tensors = tuple(tensor for tensor in case.tensors if tensor.name in bound)
    kept = {tensor.buffer for tensor in tensors}
    return msgspec.structs.replace(
        case,
        steps=steps,
        tensors=tensors,
        fields=tuple(field for field in case.fields if field.buffer in kept),
        buffers=tuple(buffer for buffer in case.buffers if buffer.name in kept),
    )


class _Spent(Exception):  # noqa: N818  (no error: the search ends)
    def __init__(self, *, by_time: bool) -> None:
        self.by_time = by_time


class _Trial:
    """Whether a candidate will do; each is run once, and none outside the domain."""

    def __init__(
        self, still_fails: Callable[[Case], bool], domain: Domain, until: float, max_runs: int
    ) -> None:
        self._still_fails, self._domain = still_fails, domain
        self._until, self._max_runs = until, max_runs
        self._known: dict[str, bool] = {}
        self.runs = 0

    def will_do(self, case: Case) -> bool:
        """Raises _Spent where nothing more may be run."""
        if time.monotonic() >= self._until:
            raise _Spent(by_time=True)
        key = _key(case)
        if key not in self._known:
            self._known[key] = self._is_possible(case) and self._run(case)
        return self._known[key]

    def _is_possible(self, case: Case) -> bool:
        try:
            cases.check(case)
            check_steps(case)
        except UsageError:
            return False
        return self._domain.refusal(facts(case)) is None

    def _run(self, case: Case) -> bool:
        if self.runs >= self._max_runs:
            raise _Spent(by_time=False)
        self.runs += 1
        return self._still_fails(case)


def _key(case: Case) -> str:
    """What decides a verdict: the case without the scene that rides along."""
    lowered = (case.buffers, case.fields, case.tensors, case.steps)
    return sha256(msgspec.msgpack.encode(lowered, order="deterministic")).hexdigest()
