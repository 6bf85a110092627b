"""What a campaign costs: checked launches a second, where the time of a case goes, memory. JSON.

    python tests/benchmarks/campaign_speed.py [--quick] [--cases N] [--long N] [--target NAME ...]

Each target runs twice, in processes of their own. `campaign` is the real thing, parent and worker:
seconds of the processor of both together, for the first cases of a cold process and for the rest,
and the memory of each. `split` is the same campaign with the worker's half in the parent's process
and a clock around its parts, after the first cases. A launch is one kernel launch with every access
recorded, over all variants of a case. `--long` adds one campaign of that many cases for memory.
Nothing is asserted about speed: compare two commits on one machine, and mind `busy`.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
# One thread, so that times of the processor are times of the work. Read when NumPy is imported.
os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")

TARGETS = ("builtin:gather_cache", "builtin:reshape_and_cache")
COLD = 1000
"""Cases of a fresh process that are reported apart."""
CASES = 4000
SAMPLES = 20
GOALS = {"steady_launches_per_cpu_s": 400, "per_case_ms_without_launches": 2.5, "rss_mib": 1024}

Parts = dict[str, float]


class Clock:
    """Seconds of this thread by part; a part does not include the parts that run inside it."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._running = ["draw"]
        self._since = time.thread_time()

    def _turn(self) -> None:
        now = time.thread_time()
        self.spent[self._running[-1]] += now - self._since
        self._since = now

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Time what runs inside as `part`."""
        self._turn()
        self._running.append(part)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def around(self, owner: Any, name: str, part: str) -> None:
        """Time every call of a function or method as `part`."""
        call = getattr(owner, name)

        @wraps(call)
        def timed(*values: Any, **named: Any) -> Any:
            with self.within(part):
                return call(*values, **named)

        setattr(owner, name, timed)

    def restart(self) -> None:
        """Forget what was spent so far."""
        self._turn()
        self.spent.clear()

    stop = _turn


def run_campaign(target: str, cases: int, seen: Callable[[Any], None]) -> Any:
    """A campaign over `target`, to the end even if something fails; returns its summary."""
    from kvfuzz.engine.campaign import Campaign, Options
    from kvfuzz.model.events import Summary
    from kvfuzz.model.target import TargetSpec

    ended: list[Any] = []

    def emit(event: Any) -> None:
        if isinstance(event, Summary):
            ended.append(event)
        seen(event)

    with tempfile.TemporaryDirectory(prefix="kvfuzz-benchmark-") as out:
        options = Options(
            target=TargetSpec(target),
            out=Path(out),
            budget_s=1e6,
            max_cases=cases,
            random_seed=1,
            keep_going=True,
        )
        Campaign(options, emit).run()
    return ended[0]


def of_process(pid: int) -> tuple[float, float]:
    """Seconds of the processor and resident MiB of a process; zeros once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    ticks = os.sysconf("SC_CLK_TCK")
    resident = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return (int(fields[11]) + int(fields[12])) / ticks, resident


def worker_of(pid: int) -> int:
    """The child of a process that has most resident: its worker."""
    children = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            children.append(int(entry.name))
    return max(children, key=lambda child: of_process(child)[1])


def campaign(request: dict[str, Any]) -> dict[str, Any]:
    """The real campaign: processor time of its two processes and their memory, as it goes."""
    from kvfuzz.model.events import Progress

    own, worker = os.getpid(), 0
    samples: list[dict[str, float]] = []

    def seen(event: Any) -> None:
        nonlocal worker
        if not isinstance(event, Progress):
            return
        worker = worker or worker_of(own)
        parent_s, parent_mib = of_process(own)
        worker_s, worker_mib = of_process(worker)
        samples.append(
            {
                "cases": event.cases,
                "wall_s": time.monotonic(),
                "cpu_s": parent_s + worker_s,
                "worker_cpu_s": worker_s,
                "worker_mib": worker_mib,
                "parent_mib": parent_mib,
            }
        )

    summary = run_campaign(request["target"], request["cases"], seen)
    cold = next((each for each in samples if each["cases"] >= request["cold"]), samples[-1])
    half = [each for each in samples if each["cases"] >= request["cases"] / 2]
    every = max(1, len(samples) // SAMPLES)
    return {
        "cases": summary.cases,
        "findings": summary.findings,
        "cold": _between(samples[0], cold),
        "steady": _between(cold, samples[-1]),
        "memory": {
            "worker_mib_at": {
                each["cases"]: round(each["worker_mib"]) for each in samples[::every]
            },
            "worker_peak_mib": max(each["worker_mib"] for each in samples),
            "worker_growth_of_second_half_mib": half[-1]["worker_mib"] - half[0]["worker_mib"],
            "parent_peak_mib": max(each["parent_mib"] for each in samples),
        },
    }


def _between(first: dict[str, float], last: dict[str, float]) -> dict[str, float]:
    cases = last["cases"] - first["cases"]
    if not cases:
        return {"cases": 0}
    spent = {name: last[name] - first[name] for name in ("wall_s", "cpu_s", "worker_cpu_s")}
    per_case = {f"{name[:-2]}_ms_per_case": 1e3 * value / cases for name, value in spent.items()}
    return {"cases": cases, **per_case, "busy": spent["cpu_s"] / max(spent["wall_s"], 1e-9)}


class InProcess:
    """Stands in for the worker process: the same messages to the same judge, in this process."""

    def __init__(self, config: Any, *, case_timeout_s: float) -> None:
        import msgspec

        self._config = msgspec.msgpack.encode(config)

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to stop."""

    def describe(self) -> Any:
        """What the worker says of itself."""
        import msgspec

        from kvfuzz.engine.worker import entry

        return msgspec.msgpack.decode(entry.describe(self._config), type=entry.Description)

    def check(self, case: Any, *, in_turn: bool = False, explain: bool = False) -> Any:
        """The verdict on a case, by way of its messages."""
        import msgspec

        from kvfuzz.engine.worker import entry
        from kvfuzz.model.verdict import Verdict

        found = entry.check(self._config, msgspec.msgpack.encode(case), in_turn, explain)
        return msgspec.msgpack.decode(found, type=Verdict)


def split(request: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds a case by part, once the first cases are over."""
    from triton.runtime.jit import JITFunction

    from kvfuzz.cpu.lane import CpuLane
    from kvfuzz.cpu.loaded import LoadedKernels
    from kvfuzz.engine import campaign as engine
    from kvfuzz.engine import explore
    from kvfuzz.engine.journal import Journal
    from kvfuzz.engine.runner import Runner
    from kvfuzz.engine.tally import Tally
    from kvfuzz.engine.worker import judge
    from kvfuzz.engine.worker.cpu_lane import CheckedCpuLane

    clock = Clock()
    counted = {"cases": 0, "launches": 0, "compiled": 0}

    def count(owner: Any, name: str, what: str) -> None:
        call = getattr(owner, name)

        @wraps(call)
        def counting(*values: Any, **named: Any) -> Any:
            counted[what] += 1
            if what == "cases" and counted[what] == request["cold"]:
                clock.restart()
                counted.update(launches=0, compiled=0)
            return call(*values, **named)

        setattr(owner, name, counting)

    setattr(engine, "Worker", InProcess)  # noqa: B010  (it is another type)
    clock.around(explore, "lower", "lower")
    clock.around(CheckedCpuLane, "observe", "launch")
    clock.around(judge, "execute", "build")
    clock.around(judge.Judge, "verdict", "judge")
    for owner, name in (
        (explore, "facts"),
        (Journal, "about_to_run"),
        (Tally, "count"),
        (Runner, "check"),
    ):
        clock.around(owner, name, "bookkeeping")
    clock.around(JITFunction, "_do_compile", "compile")
    clock.around(LoadedKernels, "decoded", "compile")
    count(CpuLane, "launch", "launches")
    count(JITFunction, "_do_compile", "compiled")
    count(judge.Judge, "verdict", "cases")
    run_campaign(request["target"], request["cases"], lambda event: None)
    cases = counted["cases"] - request["cold"] + 1
    clock.stop()
    parts = {part: 1e3 * spent / cases for part, spent in sorted(clock.spent.items())}
    parts["message"] = message_ms()
    launching = parts["launch"] + parts.get("compile", 0.0)
    return {
        "cases": cases,
        "launches_per_case": counted["launches"] / cases,
        "compiled_per_case": counted["compiled"] / cases,
        "parts_ms_per_case": parts,
        "without_launches_ms_per_case": sum(parts.values()) - launching,
    }


def message_ms() -> float:
    """Milliseconds of this process for one task of the pool that does nothing."""
    from pebble import ProcessPool

    with ProcessPool(max_workers=1) as pool:
        pool.schedule(os.getpid).result()
        start = time.process_time()
        for _ in range(200):
            pool.schedule(os.getpid, timeout=30.0).result()
        return 1e3 * (time.process_time() - start) / 200


CHILDREN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "campaign": campaign,
    "split": split,
}


def child(name: str, **request: Any) -> dict[str, Any]:
    """Run one part in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", name],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name} of {request} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole report."""
    cases, cold = (300, 100) if options.quick else (options.cases, COLD)
    rows = {}
    for target in options.target or TARGETS:
        row = {
            "campaign": child("campaign", target=target, cases=cases, cold=cold),
            "split": child("split", target=target, cases=cases, cold=cold),
        }
        for phase in ("cold", "steady"):
            part = row["campaign"][phase]
            if part["cases"]:
                part["launches_per_cpu_s"] = (
                    1e3 * row["split"]["launches_per_case"] / part["cpu_ms_per_case"]
                )
        rows[target] = row
    report: dict[str, Any] = {"targets": rows, "mix": mix(rows)}
    if options.long:
        target = (options.target or TARGETS)[0]
        report["long"] = child("campaign", target=target, cases=options.long, cold=options.long / 2)
    machine = {"python": platform.python_version(), "cores": os.cpu_count()}
    return {**report, "goals": GOALS, "machine": machine}


def mix(rows: dict[str, Any]) -> dict[str, float]:
    """All targets in equal numbers of cases."""
    launches = [row["split"]["launches_per_case"] for row in rows.values()]
    found = {
        f"{phase}_launches_per_cpu_s": 1e3
        * sum(launches)
        / sum(row["campaign"][phase]["cpu_ms_per_case"] for row in rows.values())
        for phase in ("cold", "steady")
        if all(row["campaign"][phase]["cases"] for row in rows.values())
    }
    rest = [row["split"]["without_launches_ms_per_case"] for row in rows.values()]
    return {**found, "per_case_ms_without_launches": sum(rest) / len(rest)}


def rounded(value: Any) -> Any:
    """Three significant digits are plenty."""
    if isinstance(value, float):
        return float(f"{value:.3g}") if abs(value) < 1000 else round(value)
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return value


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="300 cases of each target")
    parser.add_argument("--cases", type=int, default=CASES, help="cases of each target")
    parser.add_argument("--long", type=int, default=0, help="cases of a campaign for memory")
    parser.add_argument("--target", action="append", help="instead of the two of ours")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child](json.load(sys.stdin))))
        return
    print(json.dumps(rounded(run(options)), indent=1))


if __name__ == "__main__":
    main()
