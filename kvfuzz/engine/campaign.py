"""A campaign: replay what is saved, draw until the budget ends, shrink, explain, save.

The parent's half of the engine. It owns the budget, the journal and the output folder, and says
what happens as events; the worker owns the target.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

import kvfuzz
from kvfuzz.engine.explore import Deadline, Exploration
from kvfuzz.engine.journal import Journal
from kvfuzz.engine.pool import Worker
from kvfuzz.engine.store import OutputFolder, read_seed
from kvfuzz.engine.worker.entry import Description, WorkerConfig
from kvfuzz.errors import Exit, NotCheckedError
from kvfuzz.model.axes import AXES, Levels, facts
from kvfuzz.model.case import Case
from kvfuzz.model.events import Event, Found, Progress, Started, Summary
from kvfuzz.model.lower import lower
from kvfuzz.model.scene import Scene
from kvfuzz.model.seed import Expected, Provenance, Seed
from kvfuzz.model.target import TargetSpec
from kvfuzz.model.verdict import Hazard, Verdict
from kvfuzz.strategies import scenes

MOST_REFUSED = 0.05
"""A campaign whose target refuses more of its cases than this has not checked what it claims."""
MOST_HAZARDS = 20


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvfuzz run` was asked for."""

    target: TargetSpec
    out: Path
    where: dict[str, Levels] = {}
    budget_s: float = 60.0
    max_cases: int | None = None
    random_seed: int = 0
    lane: str = "cpu"
    arch: str = "gfx942"
    keep_going: bool = False
    case_timeout_s: float = 30.0
    shrink_s: float = 20.0
    command: str = ""


class Campaign:
    """One run over one target; `emit` receives every event."""

    def __init__(self, options: Options, emit: Callable[[Event], None]) -> None:
        self._options = options
        self._emit = emit
        self._out = OutputFolder(options.out)
        self._journal = Journal(options.out)
        self._deadline = Deadline(options.budget_s, options.max_cases)
        self._last_progress = 0.0
        self._known: set[tuple[str, str]] = set()
        self._hunted: tuple[str, str] | None = None
        self._verdicts: dict[bytes, Verdict] = {}
        self._first_failing_bytes = 0
        self._findings = 0
        self._refused = 0
        self._rejected = 0
        self._executed = 0
        self._facts: dict[str, Counter[str]] = defaultdict(Counter)
        self._passed: Counter[str] = Counter()
        self._not_checked: dict[str, Counter[str]] = defaultdict(Counter)
        self._hazards: Counter[Hazard] = Counter()

    def run(self) -> Exit:
        """Run to the first finding or to the end of the budget.

        Raises the KvfuzzError that keeps the campaign from starting.
        """
        options = self._options
        config = WorkerConfig(options.target, options.lane, options.arch)
        with Worker(config, case_timeout_s=options.case_timeout_s) as worker:
            description = worker.describe()
            self._start(description)
            ended_by = "interrupted"
            try:
                ended_by = self._search(worker, description)
            except KeyboardInterrupt:
                pass
            finally:
                self._emit(self._summary(ended_by))
        self._journal.close()
        if ended_by == "interrupted":
            return Exit.INTERRUPTED
        if self._findings:
            return Exit.FINDING
        if self._refused > MOST_REFUSED * max(self._executed, 1):
            raise NotCheckedError(
                f"the target refused {self._refused} of {self._executed} cases, more than "
                f"{MOST_REFUSED:.0%}; its declared domain is too wide"
            )
        if not self._executed or not self._passed:
            raise NotCheckedError(
                "no case was checked; widen --where, or raise --budget or --max-cases"
            )
        return Exit.CLEAN

    def _start(self, description: Description) -> None:
        options = self._options
        self._deadline = Deadline(options.budget_s, options.max_cases)
        self._emit(
            Started(
                target=description.info,
                command=options.command,
                lane=options.lane,
                arch=options.arch,
                random_seed=options.random_seed,
                budget_s=options.budget_s,
                where=options.where,
                kvfuzz=kvfuzz.__version__,
                triton=description.environment.triton,
                torch=description.environment.torch,
            )
        )

    def _search(self, worker: Worker, description: Description) -> str:
        info = description.info
        domain = info.domain.narrowed(self._options.where)
        for case in self._remembered(info.name, info.op):
            self._progress("seeds")
            verdict = self._check(worker, case)
            if verdict.failed and self._is_new(verdict):
                self._report(worker, description, case, verdict)
                if not self._options.keep_going:
                    return "finding"

        def fails(scene: Scene) -> bool | None:
            case = lower(scene)
            shown = facts(case)
            if domain.refusal(shown) is not None:
                self._rejected += 1
                return None
            self._progress("shrink" if self._hunted else "random")
            verdict = self._check(worker, case)
            if self._hunted is None:
                self._count(shown, verdict)
                if not (verdict.failed and self._is_new(verdict)):
                    return False
                self._hunted = _signature(verdict)
                self._first_failing_bytes = _nbytes(case)
            return bool(verdict.failed) and _signature(verdict) == self._hunted

        exploration = Exploration(
            scenes(info.op, domain),
            fails,
            random_seed=self._options.random_seed,
            size_of=size_of,
        )
        while not self._deadline.reached():
            scene = exploration.next_failure(self._deadline, shrink_s=self._options.shrink_s)
            if scene is None:
                break
            self._hunted = None
            case = lower(scene)
            self._report(worker, description, case, self._check(worker, case))
            if not self._options.keep_going:
                return "finding"
        spent = self._options.max_cases
        return "max_cases" if spent and self._deadline.cases >= spent else "budget"

    def _remembered(self, target: str, op: str) -> list[Case]:
        """Cases whose process died unseen, then the saved seeds of this target."""
        cases = []
        for path, case in self._journal.left_over():
            if case.steps[0].op == op:
                cases.append(case)
            path.unlink(missing_ok=True)
        for path in self._out.saved():
            seed = read_seed(path)
            if seed.target == target:
                cases.append(seed.case)
        return cases

    def _check(self, worker: Worker, case: Case) -> Verdict:
        key = msgspec.msgpack.encode(case)
        if key in self._verdicts:
            return self._verdicts[key]
        self._journal.about_to_run(case)
        verdict = worker.check(case)
        if verdict.failed:
            # Hypothesis runs a failing example again; the answer must not change under it.
            self._verdicts[key] = verdict
        return verdict

    def _is_new(self, verdict: Verdict) -> bool:
        return _signature(verdict) not in self._known

    def _count(self, shown: dict[str, str], verdict: Verdict) -> None:
        self._executed += 1
        if verdict.refused:
            self._refused += 1
            return
        for axis, level in shown.items():
            self._facts[axis][level] += 1
        for result in verdict.results:
            if result.outcome == "passed":
                self._passed[result.name] += 1
            elif result.outcome == "not_checked":
                self._not_checked[result.name][result.reason] += 1
        for hazard in verdict.hazards:
            if hazard in self._hazards or len(self._hazards) < MOST_HAZARDS:
                self._hazards[hazard] += 1

    def _report(
        self, worker: Worker, description: Description, case: Case, verdict: Verdict
    ) -> None:
        options, environment = self._options, description.environment
        self._journal.about_to_run(case)
        explained = worker.check(case, explain=True)
        verdict = explained if explained.failed else verdict
        seed = Seed(
            target=description.info.name,
            op=description.info.op,
            property=verdict.failed[0].name,
            case=case,
            expected=Expected("failed", verdict.digest, verdict.launches),
            provenance=Provenance(
                kvfuzz=kvfuzz.__version__,
                triton=environment.triton,
                torch=environment.torch,
                lane=options.lane,
                arch=options.arch,
                content=description.info.content,
            ),
        )
        path = self._out.save(seed)
        self._known.add(_signature(verdict))
        self._findings += 1
        self._emit(
            Found(
                seed=seed,
                verdict=verdict,
                path=str(path),
                replay=replay_command(path, options),
                shrunk_from_bytes=self._first_failing_bytes or _nbytes(case),
            )
        )

    def _progress(self, phase: str) -> None:
        now = time.monotonic()
        if now - self._last_progress >= 0.1:
            self._last_progress = now
            self._emit(Progress(phase, self._deadline.cases, self._deadline.elapsed_s))

    def _summary(self, ended_by: str) -> Summary:
        return Summary(
            cases=self._executed,
            refused=self._refused,
            rejected=self._rejected,
            findings=self._findings,
            elapsed_s=self._deadline.elapsed_s,
            ended_by=ended_by,
            facts={
                axis.name: {level: self._facts[axis.name][level] for level in axis.levels}
                for axis in AXES
            },
            not_checked={name: dict(reasons) for name, reasons in self._not_checked.items()},
            passed=dict(self._passed),
            hazards=tuple(self._hazards.most_common()),
        )


def _signature(verdict: Verdict) -> tuple[str, str]:
    """What makes two failing verdicts the same finding: the property and the part it is about."""
    first = verdict.failed[0]
    place = first.violation.place if first.violation else None
    return first.name, place.field if place else ""


def _nbytes(case: Case) -> int:
    return sum(buffer.nbytes for buffer in case.buffers)


def size_of(scene: Scene) -> tuple[int, ...]:
    """Smaller is simpler: blocks, heads, tokens, then the sizes of a page."""
    g = scene.geometry
    return (
        g.num_blocks,
        g.num_kv_heads,
        scene.num_tokens + len(scene.padding),
        g.head_size,
        g.block_size,
        len(msgspec.json.encode(scene)),
    )


def replay_command(path: Path, options: Options) -> str:
    """The command line that shows the finding again."""
    parts = ["kvfuzz replay", str(path)]
    if options.target.name.partition(":")[0].endswith(".py"):
        parts.append(f"--target {options.target.name}")
    parts += [f"--source {name}={folder}" for name, folder in options.target.sources.items()]
    if options.arch != "gfx942":
        parts.append(f"--arch {options.arch}")
    if options.lane != "cpu":
        parts.append(f"--lane {options.lane}")
    return " ".join(parts)
