"""A campaign: replay what is saved, draw until the budget ends, shrink, explain, save.

The parent's half of the engine. It owns the budget, the journal and the output folder, and says
what happens as events; the worker owns the target.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import kvfuzz
from kvfuzz.engine.explore import Deadline, Exploration, Failure
from kvfuzz.engine.findings import make_seed, replay_command, size_of
from kvfuzz.engine.hunt import Caught, Effort, Hunt
from kvfuzz.engine.journal import Journal
from kvfuzz.engine.pool import Worker
from kvfuzz.engine.runner import Runner
from kvfuzz.engine.store import OutputFolder, read_seed
from kvfuzz.engine.tally import Tally
from kvfuzz.engine.worker.entry import Description, WorkerConfig
from kvfuzz.errors import Exit, KvfuzzError, NotCheckedError, UsageError
from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.axes import facts
from kvfuzz.model.events import Combinations, Event, Found, Note, Progress, Started, Summary
from kvfuzz.model.target import DEFAULT_ARCH, DEFAULT_LANE, TargetSpec
from kvfuzz.model.vocabulary import Levels

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
    """End when every valid combination of three levels was shown; not clean where one was not."""
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
        self._exploration: Exploration | None = None
        self._last_progress = 0.0

    def run(self) -> Exit:
        """Run to the first finding or to the end of the budget.

        Raises the KvfuzzError that keeps the campaign from starting, or says that nothing was
        checked.
        """
        options, tally = self._options, self._tally
        config = WorkerConfig(options.target, options.lane, options.arch, options.where)
        with Worker(config, case_timeout_s=options.case_timeout_s) as worker:
            description = worker.describe()
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
                f"shown, {left.given_up} of them although cases were drawn for them; raise "
                "--budget, or narrow --where to what the target does not refuse"
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
        hunt = Hunt(
            Runner(worker, self._journal, info.name, self._tally.coverage),
            self._tally,
            info.op,
            domain,
            random_seed=options.random_seed,
            effort=Effort(options.reduce_s, options.extent_s if options.keep_going else 0.0),
            progress=self._progress,
        )
        for case, journalled in self._remembered(info.name):
            shown = facts(case)
            if domain.refusal(shown) is not None:
                continue
            failed = hunt.attempt(case, shown, "seeds").failed
            if failed:
                self._settle(hunt, description, Failure(case, case))
            if journalled is not None:
                journalled.unlink(missing_ok=True)
            if failed and not options.keep_going:
                return "finding"
        self._exploration = exploration = Exploration(
            info.op,
            domain,
            lambda case, shown: hunt.attempt(case, shown, exploration.guide.phase),
            random_seed=options.random_seed,
            size_of=size_of,
        )
        guide = exploration.guide
        while not self._deadline.reached():
            found = exploration.next_failure(
                self._deadline,
                shrink_s=options.shrink_s,
                stop=lambda: options.until_coverage and guide.phase == "random",
            )
            if found is None:
                break
            self._settle(hunt, description, found)
            if not options.keep_going:
                return "finding"
        if not self._tally.executed and exploration.rejected:
            return "rejected"
        if options.until_coverage and guide.phase == "random":
            return "coverage"
        spent = options.max_cases
        return "max_cases" if spent and self._deadline.cases >= spent else "budget"

    def _settle(self, hunt: Hunt, description: Description, found: Failure) -> None:
        """Save and tell what a hunt ends with, if that is a new finding."""

        def report(caught: Caught) -> None:
            seed = make_seed(caught.case, caught.symptom.property, caught.verdict, description)
            path = self._out.save(seed)
            self._tally.findings += 1
            replay = replay_command(path, self._options.target)
            first_nbytes = found.first.nbytes
            self._emit(Found(seed, caught.verdict, str(path), replay, first_nbytes, caught.extent))

        hunt.settle(found, report)

    def _remembered(self, target: str) -> list[tuple[AnyCase, Path | None]]:
        """Cases of this target whose process died unseen, with their files, then its seeds."""
        known: list[tuple[AnyCase, Path | None]] = [*self._journal.left_over(target)]
        for path in self._out.saved():
            try:
                seed = read_seed(path)
            except UsageError as error:
                self._emit(Note(f"left alone: {error}"))
                continue
            if seed.target == target:
                known.append((seed.case, None))
        return known

    def _progress(self, phase: str) -> None:
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_INTERVAL_S:
            self._last_progress = now
            self._emit(Progress(phase, self._tally.executed, self._deadline.elapsed_s))
