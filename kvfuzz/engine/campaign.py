"""A campaign: replay what is saved, draw until the budget ends, shrink, explain, save.

The parent's half of the engine. It owns the budget, the journal and the output folder, and says
what happens as events; the worker owns the target.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

import kvfuzz
from kvfuzz.engine.explore import Deadline, Exploration, Failure, Trial
from kvfuzz.engine.extent import extent
from kvfuzz.engine.findings import make_seed, replay_command, size_of
from kvfuzz.engine.journal import Journal
from kvfuzz.engine.known import Known, Symptom, mark_of, symptoms
from kvfuzz.engine.pool import Worker
from kvfuzz.engine.reduce import reduced
from kvfuzz.engine.store import OutputFolder, read_seed
from kvfuzz.engine.tally import Tally
from kvfuzz.engine.worker.entry import Description, WorkerConfig
from kvfuzz.errors import Exit, KvfuzzError, NotCheckedError, UsageError
from kvfuzz.model.axes import Levels, facts
from kvfuzz.model.case import Case
from kvfuzz.model.events import Combinations, Event, Found, Note, Progress, Started, Summary
from kvfuzz.model.target import DEFAULT_ARCH, DEFAULT_LANE, TargetSpec
from kvfuzz.model.verdict import Verdict

MOST_UNCHECKED = 0.05
"""A campaign that leaves more of its cases undecided than this has not checked what it claims."""
PROGRESS_INTERVAL_S = 0.1


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
    until_coverage: bool = False
    """End when every valid combination of three levels was shown, and not before."""
    case_timeout_s: float = 30.0
    shrink_s: float = 20.0
    reduce_s: float = 10.0
    extent_s: float = 20.0
    command: str = ""


class Campaign:
    """One run over one target; `emit` receives every event."""

    def __init__(self, options: Options, emit: Callable[[Event], None]) -> None:
        self._options = options
        self._emit = emit
        self._out = OutputFolder(options.out)
        self._journal = Journal(options.out)
        self._deadline = Deadline(options.budget_s, options.max_cases)
        self._tally = Tally()
        self._known: list[Known] = []
        self._hunted: Symptom | None = None
        """The failure that is being shrunk."""
        self._exploration: Exploration | None = None
        self._failing: dict[bytes, Verdict] = {}
        self._last_progress = 0.0
        self._target = options.target.name

    def run(self) -> Exit:
        """Run to the first finding or to the end of the budget.

        Raises the KvfuzzError that keeps the campaign from starting, or says that nothing was
        checked.
        """
        options, tally = self._options, self._tally
        config = WorkerConfig(options.target, options.lane, options.arch, options.where)
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
                self._emit(self._summary(ended_by))
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
        if unchecked := tally.unchecked(MOST_UNCHECKED, self._rejected):
            raise NotCheckedError(unchecked)
        left = self._combinations
        if options.until_coverage and (left.open or left.given_up):
            raise NotCheckedError(
                f"--until-coverage: {left.open + left.given_up} of at most "
                f"{left.shown + left.open + left.given_up} combinations of three levels were not "
                "shown; raise --budget, or narrow --where"
            )
        return Exit.CLEAN

    @property
    def _rejected(self) -> int:
        return self._exploration.rejected if self._exploration else 0

    @property
    def _combinations(self) -> Combinations:
        if self._exploration is None:
            return Combinations()
        covering = self._exploration.guide.covering
        return Combinations(covering.shown, covering.open, covering.given_up)

    def _summary(self, ended_by: str) -> Summary:
        return self._tally.summary(
            elapsed_s=self._deadline.elapsed_s,
            ended_by=ended_by,
            rejected=self._rejected,
            combinations=self._combinations,
        )

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
        """Saved cases, then drawn ones. Returns what ended it."""
        options, info = self._options, description.info
        domain = info.domain.narrowed(info.op, options.where)
        self._exploration = exploration = Exploration(
            info.op,
            domain,
            lambda case, shown: self._attempt(worker, case, shown),
            random_seed=options.random_seed,
            size_of=size_of,
        )
        for case in self._remembered(info.name):
            if domain.refusal(facts(case)) is not None:
                continue
            self._hunted = None
            if self._attempt(worker, case, facts(case), "seeds").failed:
                self._settle(worker, description, Failure(case, case))
                if not options.keep_going:
                    return "finding"
        guide = exploration.guide
        while not self._deadline.reached():
            self._hunted = None
            found = exploration.next_failure(
                self._deadline,
                shrink_s=options.shrink_s,
                stop=lambda: options.until_coverage and guide.phase == "random",
            )
            if found is None:
                break
            self._settle(worker, description, found)
            if not options.keep_going:
                return "finding"
        if not self._tally.executed and exploration.rejected:
            return "rejected"
        if options.until_coverage and guide.phase == "random":
            return "coverage"
        spent = options.max_cases
        return "max_cases" if spent and self._deadline.cases >= spent else "budget"

    def _attempt(
        self, worker: Worker, case: Case, shown: Mapping[str, str], phase: str = ""
    ) -> Trial:
        """Execute a case, to search or to shrink: whether it fails in a way that is not known."""
        hunting = self._hunted is not None
        drawing = self._exploration.guide.phase if self._exploration else ""
        self._progress("shrink" if hunting else phase or drawing)
        verdict, news = self._check(worker, case)
        if not hunting:
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

    def _settle(self, worker: Worker, description: Description, found: Failure) -> None:
        """Report a failure, or widen the finding that it is another case or a consequence of."""
        hunted = self._hunted
        assert hunted is not None  # noqa: S101  (what failed was hunted)
        case = reduced(
            found.smallest,
            lambda smaller: self._attempt(worker, smaller, facts(smaller)).failed,
            domain=description.info.domain.narrowed(description.info.op, self._options.where),
            budget_s=self._options.reduce_s,
        ).case
        verdict = self._explained(worker, case)
        shown, all_symptoms = facts(case), symptoms(verdict)
        mark = mark_of(case, hunted, verdict)
        beside = [each for each in all_symptoms if each.side in ("", hunted.side)]
        where: dict[str, Levels] = {}
        # How a crash ended is a symptom that needs no levels to tell it from others.
        if self._options.keep_going and hunted.property != "crash":
            where = self._extent(worker, hunted, shown)
        for index, known in enumerate(self._known):
            if known.mark == mark or any(known.explains(each, shown) for each in beside):
                self._known[index] = known.wider((hunted,), where)
                return
        self._known.append(Known(mark, frozenset({hunted, *all_symptoms}), (where,)))
        self._report(description, case, hunted, verdict, found.first.nbytes, where)

    def _explained(self, worker: Worker, case: Case) -> Verdict:
        """The verdict with whose byte was found, of a case that has failed."""
        known, _ = self._check(worker, case)
        self._journal.about_to_run(self._target, case)
        explained = worker.check(case, explain=True)
        return explained if explained.failed else known

    def _extent(
        self, worker: Worker, hunted: Symptom, shown: Mapping[str, str]
    ) -> dict[str, Levels]:
        """Under which levels near its smallest case a finding shows."""
        assert self._exploration is not None  # noqa: S101  (something was explored)

        def fails(case: Case, _: Mapping[str, str]) -> bool:
            self._progress("extent")
            return hunted in symptoms(self._check(worker, case)[0])

        return extent(
            self._exploration.guide.space,
            shown,
            fails,
            random_seed=self._options.random_seed,
            seconds=self._options.extent_s,
        )

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

    def _check(self, worker: Worker, case: Case) -> tuple[Verdict, bool]:
        """The verdict on a case, and whether it reached an outcome that none had."""
        key = msgspec.msgpack.encode(case)
        if key in self._failing:
            # Hypothesis runs a failing example again; the answer must not change under it.
            return self._failing[key], False
        self._journal.about_to_run(self._target, case)
        verdict = worker.check(case)
        news = self._tally.coverage.add(verdict.exercised)
        if verdict.failed:
            self._failing[key] = verdict
        return verdict, news

    def _report(
        self,
        description: Description,
        case: Case,
        symptom: Symptom,
        verdict: Verdict,
        shrunk_from_bytes: int,
        where: dict[str, Levels],
    ) -> None:
        seed = make_seed(case, symptom.property, verdict, description)
        path = self._out.save(seed)
        self._tally.findings += 1
        replay = replay_command(path, self._options.target)
        self._emit(Found(seed, verdict, str(path), replay, shrunk_from_bytes, where))

    def _progress(self, phase: str) -> None:
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_INTERVAL_S:
            self._last_progress = now
            self._emit(Progress(phase, self._tally.executed, self._deadline.elapsed_s))
