"""Reduce a failing case: the smallest and plainest one that fails in the same way.

A finding of forty blocks is a chore. Whatever Hypothesis has shrunk, or cannot shrink (saved seeds,
a case that killed its process), is edited through its scene and lowered again, for as long as it is
the same finding: the same property, on the side of K or of V. What
only the case has (further steps) is dropped from the case. Nothing is returned that did not fail.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from typing import Literal, TypeVar

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model import plan_edits, script_edits
from kvfuzz.model.any_case import AnyCase, check_case
from kvfuzz.model.axes import Domain, facts
from kvfuzz.model.case import Case, Step
from kvfuzz.model.fill import LARGE
from kvfuzz.model.lower import lower
from kvfuzz.model.ops.op_case import OpCase, lower_op
from kvfuzz.model.ops.table import family_of
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.script import ScriptCase
from kvfuzz.model.search import Steps, fewest
from kvfuzz.model.simpler import simplifications

C = TypeVar("C", Case, OpCase, PlanCase, ScriptCase)
S = TypeVar("S")

MOST_RUNS = 1000
"""Candidates that are run, at most; a big case takes one to two hundred."""
CONFIRMATIONS = 3
"""How many of the last results are run again before a case that fails at times is left alone."""


class Reduction(msgspec.Struct, frozen=True):
    """The smallest case that was found, and why it is no smaller."""

    case: AnyCase
    runs: int
    ended_by: Literal["minimal", "time", "runs"]


def reduced(
    case: AnyCase,
    still_fails: Callable[[AnyCase], bool],
    *,
    domain: Domain,
    budget_s: float,
    max_runs: int = MOST_RUNS,
) -> Reduction:
    """Reduce `case`, which fails, for at most `budget_s` seconds and `max_runs` runs.

    A run is never broken off, so that the last one may end late. The same case and answers give the
    same result. A case that fails at times only comes back as far as its last results still fail.
    """
    most_bytes = max(case.nbytes, LARGE)
    trial = _Trial(still_fails, domain, most_bytes, time.monotonic() + budget_s, max_runs)
    recent: deque[AnyCase] = deque(maxlen=CONFIRMATIONS)
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


def _search(case: AnyCase, trial: "_Trial") -> Iterator[AnyCase]:
    """Every smaller case that will do, each smaller than the one before."""
    if isinstance(case, ScriptCase):
        yield from _accepted(script_edits.simplifications(case), trial)
        return
    if isinstance(case, PlanCase):
        yield from _accepted(plan_edits.simplifications(case), trial)
        return
    if isinstance(case, OpCase):
        yield from _accepted(_lowered(family_of(case.scene).simpler(case.scene), lower_op), trial)
        return
    lowered = lower(case.scene)
    if lowered != case:
        if not trial.will_do(lowered):
            # Its scene does not say why it fails: what can go is steps.
            yield from _accepted(fewest(case, case.steps, partial(_with_steps, case), 1), trial)
            return
        yield lowered
    yield from _accepted(_lowered(simplifications(case.scene), lower), trial)


def _accepted(search: Steps[C], trial: "_Trial") -> Iterator[C]:
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


def _lowered(search: Steps[S], lower: Callable[[S], C]) -> Steps[C]:
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
    """Whether a candidate will do; each is run once, and none outside the domain or huge.

    Wider elements or more blocks may be plainer, but not at the price of gigabytes.
    """

    def __init__(
        self,
        still_fails: Callable[[AnyCase], bool],
        domain: Domain,
        most_bytes: int,
        until: float,
        max_runs: int,
    ) -> None:
        self._still_fails, self._domain, self._most_bytes = still_fails, domain, most_bytes
        self._until, self._max_runs = until, max_runs
        self._known: dict[str, bool] = {}
        self.runs = 0

    def will_do(self, case: AnyCase) -> bool:
        """Raises _Spent where nothing more may be run."""
        if time.monotonic() >= self._until:
            raise _Spent(by_time=True)
        key = key_of(case)
        if key not in self._known:
            self._known[key] = self._is_possible(case) and self._run(case)
        return self._known[key]

    def _is_possible(self, case: AnyCase) -> bool:
        try:
            check_case(case)
        except UsageError:
            return False
        return case.nbytes <= self._most_bytes and self._domain.refusal(facts(case)) is None

    def _run(self, case: AnyCase) -> bool:
        if self.runs >= self._max_runs:
            raise _Spent(by_time=False)
        self.runs += 1
        return self._still_fails(case)


def key_of(case: AnyCase) -> str:
    """What decides a verdict: the case without the scene that rides along."""
    lowered: object = case
    if isinstance(case, Case):
        lowered = (case.buffers, case.fields, case.tensors, case.steps)
    return sha256(msgspec.msgpack.encode(lowered, order="deterministic")).hexdigest()
