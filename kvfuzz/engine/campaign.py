"""A campaign: replay what is saved, draw until the budget ends, shrink, reduce, explain, save.

The parent's half of the engine. It owns the budget, the journal and the output folder, and says
what happens as events; the worker owns the target.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import kvfuzz
from kvfuzz.engine.explore import Deadline, Exploration
from kvfuzz.engine.findings import (
    Signature,
    make_seed,
    replay_command,
    signature,
    size_of,
)
from kvfuzz.engine.journal import Journal
from kvfuzz.engine.pool import Worker
from kvfuzz.engine.reduce import minimum
from kvfuzz.engine.store import OutputFolder, read_seed
from kvfuzz.engine.tally import Tally
from kvfuzz.engine.worker.entry import Description, WorkerConfig
from kvfuzz.errors import Exit, KvfuzzError, NotCheckedError, UsageError
from kvfuzz.model.axes import Domain, Levels, facts
from kvfuzz.model.case import Case
from kvfuzz.model.events import Event, Found, Note, Progress, Started
from kvfuzz.model.lower import lower
from kvfuzz.model.scene import Scene
from kvfuzz.model.target import DEFAULT_ARCH, DEFAULT_LANE, TargetSpec
from kvfuzz.model.verdict import Verdict
from kvfuzz.strategies import scenes

MOST_UNCHECKED = 0.05
"""A campaign that leaves more of its cases undecided than this has not checked what it claims."""
MOST_REJECTED = 1000
"""Draws outside `--where`, without one inside, after which levels are taken to be impossible."""
PROGRESS_INTERVAL_S = 0.1
NEAR_FIRST = 32
"""Cases that are drawn before any that reaches past 2**31."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvfuzz run` was asked for."""

    target: TargetSpec
    out: Path
    where: dict[str, Levels] = {}
    budget_s: float = 60.0
    max_cases: int | None = None
    random_seed: int = 0
    lane: str = DEFAULT_LANE
    arch: str = DEFAULT_ARCH
    keep_going: bool = False
    case_timeout_s: float = 30.0
    shrink_s: float = 20.0
    command: str = ""


def _parts(domain: Domain) -> list[tuple[Domain, float]]:
    """What is drawn from, and up to which number of cases: near the start of the cache first.

    A bug that shows near is found near. Far out it need not shrink to there: block 0 of a far
    range is as wrong as any other, and block 0 of the cache is right.
    """
    levels = domain.levels("reach")
    if "near" not in levels or levels == ("near",):
        return [(domain, math.inf)]
    near = msgspec.structs.replace(domain, allowed={**domain.allowed, "reach": ("near",)})
    return [(near, NEAR_FIRST), (domain, math.inf)]


class Campaign:
    """One run over one target; `emit` receives every event."""

    def __init__(self, options: Options, emit: Callable[[Event], None]) -> None:
        self._options = options
        self._emit = emit
        self._out = OutputFolder(options.out)
        self._journal = Journal(options.out)
        self._deadline = Deadline(options.budget_s, options.max_cases)
        self._tally = Tally()
        self._known: set[Signature] = set()
        self._hunted = ""
        """The property whose failure is being shrunk."""
        self._failing: dict[bytes, Verdict] = {}
        self._last_progress = 0.0
        self._target = options.target.name

    def run(self) -> Exit:
        """Run to the first finding or to the end of the budget.

        Raises the KvfuzzError that keeps the campaign from starting, or says that nothing was
        checked.
        """
        options, tally = self._options, self._tally
        config = WorkerConfig(options.target, options.lane, options.arch)
        with Worker(config, case_timeout_s=options.case_timeout_s) as worker:
            description = worker.describe()
            self._target = description.info.name
            self._deadline = Deadline(options.budget_s, options.max_cases)
            self._emit(self._started(description))
            failure: KvfuzzError | None = None
            try:
                ended_by = self._search(worker, description)
            except KeyboardInterrupt:
                ended_by = "interrupted"
            except KvfuzzError as error:
                ended_by, failure = "error", error
            if failure is None or tally.executed:
                self._emit(tally.summary(elapsed_s=self._deadline.elapsed_s, ended_by=ended_by))
            if failure is not None and not tally.findings:
                raise failure
            if failure is not None:  # what was found is kept, and wins
                self._emit(Note(f"ended early: {failure}"))
        if failure is None:
            self._journal.close()
        if tally.findings:
            return Exit.FINDING
        if ended_by == "interrupted":
            return Exit.INTERRUPTED
        if unchecked := tally.unchecked(MOST_UNCHECKED):
            raise NotCheckedError(unchecked)
        return Exit.CLEAN

    def _started(self, description: Description) -> Started:
        options = self._options
        return Started(
            target=description.info,
            command=options.command,
            lane=description.environment.lane,
            arch=description.environment.arch,
            random_seed=options.random_seed,
            budget_s=options.budget_s,
            where=options.where,
            kvfuzz=kvfuzz.__version__,
            triton=description.environment.triton,
            torch=description.environment.torch,
        )

    def _search(self, worker: Worker, description: Description) -> str:
        """Saved cases, then random ones. Returns what ended it."""
        info, keep_going = description.info, self._options.keep_going
        domain = info.domain.narrowed(info.op, self._options.where)
        for case in self._remembered(info.name):
            shown = facts(case)
            if domain.refusal(shown) is not None:
                continue
            self._progress("seeds")
            verdict = self._check(worker, case)
            self._tally.count(shown, verdict)
            if verdict.failed and signature(case, verdict) not in self._known:
                self._report(worker, description, case, verdict, case.nbytes)
                if not keep_going:
                    return "finding"
        for part, until in _parts(domain):
            exploration = self._exploration(worker, info.op, part)
            while not self._deadline.reached():
                found = exploration.next_failure(
                    self._deadline, shrink_s=self._options.shrink_s, until=until
                )
                if found is None:
                    break
                self._hunted = ""
                case, first = lower(found.smallest), lower(found.first)
                verdict = self._check(worker, case)
                self._report(worker, description, case, verdict, first.nbytes)
                if not keep_going:
                    return "finding"
        if not self._tally.executed and self._tally.rejected >= MOST_REJECTED:
            return "rejected"
        spent = self._options.max_cases
        return "max_cases" if spent and self._deadline.cases >= spent else "budget"

    def _exploration(self, worker: Worker, op: str, domain: Domain) -> Exploration:
        return Exploration(
            scenes(op, domain),
            lambda scene: self._fails(worker, domain, scene),
            random_seed=self._options.random_seed,
            size_of=size_of,
        )

    def _fails(self, worker: Worker, domain: Domain, scene: Scene) -> bool | None:
        """Whether a scene fails in a new way, of the property being shrunk; None: not to be run."""
        case = lower(scene)
        shown = facts(case)
        if domain.refusal(shown) is not None:
            self._tally.rejected += not self._hunted
            if not self._tally.executed and self._tally.rejected >= MOST_REJECTED:
                self._deadline.expire()
            return None
        self._progress("shrink" if self._hunted else "random")
        verdict = self._check(worker, case)
        if not self._hunted:
            self._tally.count(shown, verdict)
        if not verdict.failed or signature(case, verdict) in self._known:
            return False
        # The plainest case that fails the same property, by whatever path of the kernel: the
        # signature is taken on the minimum, and what is known already is no way down.
        self._hunted = self._hunted or verdict.failed[0].name
        return verdict.failed[0].name == self._hunted

    def _remembered(self, target: str) -> list[Case]:
        """Cases of this target whose process died unseen, then its saved seeds."""
        known = []
        for path in self._out.saved():
            try:
                seed = read_seed(path)
            except UsageError as error:
                self._emit(Note(f"left alone: {error}"))
                continue
            if seed.target == target:
                known.append(seed.case)
        return self._journal.left_over(target) + known

    def _check(self, worker: Worker, case: Case) -> Verdict:
        key = msgspec.msgpack.encode(case)
        if key in self._failing:
            # Hypothesis runs a failing example again; the answer must not change under it.
            return self._failing[key]
        self._journal.about_to_run(self._target, case)
        verdict = worker.check(case)
        self._tally.coverage.add(verdict.exercised)
        if verdict.failed:
            self._failing[key] = verdict
        return verdict

    def _report(
        self,
        worker: Worker,
        description: Description,
        case: Case,
        verdict: Verdict,
        shrunk_from_bytes: int,
    ) -> None:
        options = self._options
        case, verdict = self._minimum(worker, description, case, verdict)
        self._journal.about_to_run(self._target, case)
        explained = worker.check(case, explain=True)
        verdict = explained if explained.failed else verdict
        seed = make_seed(case, verdict, description)
        path = self._out.save(seed)
        self._known.add(signature(case, verdict))
        self._tally.findings += 1
        replay = replay_command(path, options.target)
        self._emit(Found(seed, verdict, str(path), replay, shrunk_from_bytes))

    def _minimum(
        self, worker: Worker, description: Description, case: Case, verdict: Verdict
    ) -> tuple[Case, Verdict]:
        """The reduced case of a finding, with its verdict."""

        def check(smaller: Case) -> Verdict:
            self._progress("shrink")
            return self._check(worker, smaller)

        reduction, verdict = minimum(
            case,
            verdict,
            check,
            domain=description.info.domain.narrowed(description.info.op, self._options.where),
            budget_s=self._options.shrink_s,
        )
        return reduction.case, verdict

    def _progress(self, phase: str) -> None:
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_INTERVAL_S:
            self._last_progress = now
            self._emit(Progress(phase, self._tally.executed, self._deadline.elapsed_s))
