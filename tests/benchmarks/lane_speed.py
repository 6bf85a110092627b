"""How fast the cpu lane is, beside Triton's interpreter and beside NumPy by hand. Prints JSON.

    python tests/benchmarks/lane_speed.py [--quick] [--kernel NAME] [--source vllm=DIR]

Every kernel at three sizes: the median case of a campaign, about 260 and about 3,000 programs.
Times are the least of several rounds in which all variants take turns, in milliseconds of the
processor for a warm launch on one thread. The interpreter runs in a child process, since
TRITON_INTERPRET must be set before triton is imported, and its outputs are compared with the
lane's. Nothing is asserted about speed: compare two commits on one machine.
"""

import argparse
import json
import math
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]
# One thread, so that times of the processor are times of the work. Read when NumPy is imported.
os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")

INTERPRETER_PROGRAMS = 200
"""How many programs the interpreter runs of the largest grid, which would take it minutes."""
SCENES = 300
"""Scenes drawn for each op to find the median case."""
GOALS = {"untracked_to_numpy": 2.5, "tracked_to_untracked": 2.0}


def gate_case(scenes: int) -> dict[str, Any]:
    """The median scene of both ops, drawn as a campaign does."""
    from kvfuzz.kernels.resolve import resolve
    from kvfuzz.model.target import TargetSpec
    from kvfuzz.strategies import drawn_scene, space
    from kvfuzz.strategies.choices import Drawn

    drawn: list[tuple[int, int, int]] = []
    for op in ("gather_cache", "reshape_and_cache"):
        within = space(op, resolve(TargetSpec(f"builtin:{op}")).info.domain)
        for seed in range(scenes):
            scene = drawn_scene(Drawn(seed), within)
            page = scene.attention.geometry
            programs = scene.batch.num_rows * page.num_kv_heads
            drawn.append((programs, page.num_kv_heads, page.head_size))
    programs, heads, head_size = (int(statistics.median(each)) for each in zip(*drawn, strict=True))
    return {
        "programs": programs,
        "num_kv_heads": heads,
        "head_size": head_size,
        "how": f"medians over {len(drawn)} scenes, {scenes} each of builtin:gather_cache and "
        "builtin:reshape_and_cache, drawn from their whole domains; "
        "a program is a row times a head",
    }


def timed(call: Callable[[], None]) -> float:
    """Milliseconds of the processor for one call, whoever else wanted it meanwhile."""
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def rounds(calls: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    """The least time of each call, in rounds where they take turns, for about `seconds`."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 3:
        for name, call in calls.items():
            times[name].append(timed(call))
    return {name: min(each) for name, each in times.items()}


def on_lane(lane: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """The same tensors over allocations of the lane; views of one storage stay so."""
    import torch

    buffers: dict[int, Any] = {}
    moved = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in buffers:
            buffer = lane.allocate(name, storage.nbytes())
            buffer.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
            buffers[storage.data_ptr()] = buffer
        whole = buffers[storage.data_ptr()].view(tensor.dtype)
        at = whole.storage_offset() + tensor.storage_offset()
        moved[name] = whole.as_strided(tensor.shape, tensor.stride(), at)
    return moved


def output_bytes(workload: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """The outputs as the interpreter's process hands them over: fp32, or the bits if exact."""
    import torch

    if workload.exact:
        return {
            name: tensors[name].contiguous().view(torch.uint8).numpy() for name in workload.outputs
        }
    return {name: tensors[name].float().numpy() for name in workload.outputs}


class Bench:
    """Measures kernels on one active lane."""

    def __init__(self, sizes: dict[str, Any], tree: Path | None, seconds: float) -> None:
        from kvfuzz.cpu import CpuLane

        self.sizes, self.tree, self.seconds = sizes, tree, seconds
        self.lane = CpuLane()
        self.lane.activate()

    def measure(self, kernel: str, size_name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Times of one kernel at one size, and the lane's outputs at the interpreter's size."""
        from lane_workloads import KERNELS

        size = self.sizes[size_name]
        workload = KERNELS[kernel](size, self.tree)
        tensors = on_lane(self.lane, workload.tensors)

        def untracked() -> None:
            workload.call(tensors)

        def tracked() -> None:
            with self.lane.observe():
                workload.call(tensors)

        with self.lane.observe() as access:
            workload.call(tensors)
        if access.strays:
            raise SystemExit(f"{kernel}: the benchmark's inputs are wrong: {access.strays[0]}")
        calls = {"tracked_ms": tracked, "untracked_ms": untracked}
        numpy_call = workload.in_numpy
        if numpy_call is not None:
            self._same_as_numpy(kernel, workload, tensors)
            calls["numpy_ms"] = lambda: numpy_call(tensors)
        row: dict[str, Any] = {
            "programs": sum(math.prod(launch.grid) for launch in access.launches),
            "launches": len(access.launches),
            **rounds(calls, self.seconds),
        }
        self.lane.release_all()
        return row, self._outputs_for_interpreter(kernel, size_name)

    def _same_as_numpy(self, kernel: str, workload: Any, tensors: dict[str, Any]) -> None:
        from_lane = {name: tensors[name].clone() for name in workload.outputs}
        for name in workload.outputs:
            tensors[name].zero_()
        workload.in_numpy(tensors)
        by_hand = {name: tensors[name].clone() for name in workload.outputs}
        for name in workload.outputs:
            tensors[name].zero_()
        workload.call(tensors)
        for name in workload.outputs:
            same = bool((tensors[name] == by_hand[name]).all())
            if not same or not from_lane[name].any():
                raise SystemExit(f"{kernel}: NumPy by hand does not give the lane's {name}")

    def _outputs_for_interpreter(self, kernel: str, size_name: str) -> dict[str, Any]:
        from lane_workloads import KERNELS

        workload = KERNELS[kernel](interpreter_size(self.sizes[size_name]), self.tree)
        tensors = on_lane(self.lane, workload.tensors)
        with self.lane.observe() as access:
            workload.call(tensors)
        outputs = output_bytes(workload, tensors)
        self.lane.release_all()
        programs = sum(math.prod(launch.grid) for launch in access.launches)
        return {"programs": programs, "exact": workload.exact, "outputs": outputs}


def interpreter_size(size: Any) -> Any:
    """What the interpreter is given in place of `size`."""
    if size.programs <= 1000:
        return size
    return type(size)(INTERPRETER_PROGRAMS, size.num_kv_heads, size.head_size)


def child(mode: str, request: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Run this script again in `mode`; what it prints last is the answer."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--child", mode],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the {mode} process failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def interpret(request: dict[str, Any]) -> dict[str, Any]:
    """In the child: run each kernel in Triton's interpreter, save its outputs, return its times."""
    import numpy as np
    from lane_workloads import KERNELS, Size

    tree = Path(request["tree"]) if request["tree"] else None
    times = {}
    for key, kernel, size in request["runs"]:
        workload = KERNELS[kernel](interpreter_size(Size(**size)), tree)
        spent = [timed(lambda: workload.call(workload.tensors))]  # noqa: B023
        if spent[0] < request["repeat_below_ms"]:
            spent += [timed(lambda: workload.call(workload.tensors)) for _ in range(2)]  # noqa: B023
        times[key] = min(spent)
        np.savez(Path(request["into"]) / f"{key}.npz", **output_bytes(workload, workload.tensors))
    return times


def forget_peak() -> None:
    """Let the peak resident size start over, so that the compiler's does not hide a launch's."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_kib() -> int:
    """The peak resident size: Linux's own figure, which can start over, else getrusage's."""
    with suppress(OSError):
        match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if match:
            return int(match[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_memory(request: dict[str, Any]) -> dict[str, Any]:
    """In the child: how far the peak resident size of a warm lane grows in one tracked launch."""
    from lane_workloads import KERNELS, Size

    from kvfuzz.cpu import CpuLane

    tree = Path(request["tree"]) if request["tree"] else None
    lane = CpuLane()
    lane.activate()
    make = KERNELS[request["kernel"]]
    small, large = (Size(**request[which]) for which in ("small", "large"))
    for size in (small, large):
        lane.release_all()
        workload = make(size, tree)
        tensors = on_lane(lane, workload.tensors)
        forget_peak()
        before = peak_kib()
        with lane.observe():
            workload.call(tensors)
        growth = peak_kib() - before
    storages = [each.untyped_storage() for each in tensors.values()]
    inputs = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
    return {"growth_mib": round(growth / 1024, 1), "buffers_mib": round(inputs / 2**20, 1)}


def compared(name: str, mine: dict[str, Any], theirs: Any) -> str:
    """How the interpreter's outputs compare; leaves with a message where they do not."""
    import numpy as np

    worst = 0.0
    for output, values in mine["outputs"].items():
        if mine["exact"]:
            if not np.array_equal(values, theirs[output]):
                raise SystemExit(f"{name}: {output} differs from the interpreter's")
            continue
        worst = max(worst, float(np.abs(values - theirs[output]).max()))
        if not np.allclose(values, theirs[output], rtol=4e-3, atol=4e-3):
            raise SystemExit(f"{name}: {output} is off the interpreter's by {worst}")
    return "byte for byte" if mine["exact"] else f"within 4e-3, largest difference {worst:.1e}"


def add_ratios(row: dict[str, Any]) -> None:
    """The ratios of one row's times."""
    row["tracked_to_untracked"] = row["tracked_ms"] / row["untracked_ms"]
    if "numpy_ms" in row:
        row["untracked_to_numpy"] = row["untracked_ms"] / row["numpy_ms"]
    row["speedup_tracked"] = row["interpreter_ms"] / row["tracked_ms"]
    row["speedup_untracked"] = row["interpreter_ms"] / row["untracked_ms"]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means and extremes over all kernels and sizes."""
    of: dict[str, Any] = {"goals": GOALS}
    for name in (
        "speedup_tracked",
        "speedup_untracked",
        "tracked_to_untracked",
        "untracked_to_numpy",
    ):
        values = [row[name] for row in rows if name in row]
        if values:
            mean = math.exp(statistics.fmean(map(math.log, values)))
            of[name] = {"geometric_mean": mean, "min": min(values), "max": max(values)}
    return of


def rounded(value: Any) -> Any:
    """Numbers to four digits, at any depth."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def vllm_tree(source: str | None) -> Path | None:
    """The tree to take vLLM's kernels from: as given, else a fetched 0.33.0 or 0.24.0."""
    if source:
        return Path(source.removeprefix("vllm="))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("KVFUZZ_SOURCES") or cache / "kvfuzz" / "sources")
    found = [folder / f"vllm-{release}" for release in ("0.33.0", "0.24.0")]
    return next((tree for tree in found if tree.is_dir()), None)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer scenes and shorter rounds")
    parser.add_argument("--kernel", help="one kernel, by its name or a part of it")
    parser.add_argument("--source", metavar="vllm=DIR", help="a tree of vLLM")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child](json.load(sys.stdin))))
        return
    print(json.dumps(rounded(run(options)), indent=1))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole report."""
    import numpy as np
    import triton
    from lane_workloads import KERNELS, Size

    gate = gate_case(50 if options.quick else SCENES)
    sizes = {
        "gate": Size(gate["programs"], gate["num_kv_heads"], gate["head_size"]),
        "260": Size(260, 2, 64),
        "3000": Size(3000, 2, 64),
    }
    tree = vllm_tree(options.source)
    wanted = [name for name in KERNELS if not options.kernel or options.kernel in name]
    absent = [name for name in wanted if name.startswith("vllm:") and tree is None]
    wanted = [name for name in wanted if name not in absent]
    bench = Bench(sizes, tree, 0.3 if options.quick else 2.0)
    measured = {(kernel, name): bench.measure(kernel, name) for kernel in wanted for name in sizes}
    bench.lane.deactivate()
    as_json = {name: asdict(size) for name, size in sizes.items()}
    where = str(tree) if tree else ""
    rows = []
    with tempfile.TemporaryDirectory() as into:
        keys = {each: f"{number}" for number, each in enumerate(measured)}
        runs = [(key, kernel, as_json[name]) for (kernel, name), key in keys.items()]
        request = {"runs": runs, "tree": where, "into": into, "repeat_below_ms": 2000}
        times = child("interpret", request, TRITON_INTERPRET="1")
        for (kernel, name), (row, mine) in measured.items():
            key = keys[kernel, name]
            with np.load(Path(into) / f"{key}.npz") as theirs:
                agreement = compared(kernel, mine, theirs)
            row["interpreter_ms"] = times[key] * row["programs"] / mine["programs"]
            row["interpreter_programs"] = mine["programs"]
            row["interpreter_agrees"] = agreement
            add_ratios(row)
            if name == "3000":
                shapes = {"small": as_json["260"], "large": as_json["3000"]}
                row["peak_rss"] = child("memory", {"kernel": kernel, "tree": where, **shapes})
            rows.append({"kernel": kernel, "size": name, **row})
    return {
        "rows": rows,
        "summary": summary(rows),
        "gate_case": gate,
        "absent": absent,
        "notes": {
            "times": "milliseconds of the processor (time.process_time) for one warm launch on one "
            "thread, the least of several interleaved rounds",
            "tracked": "inside lane.observe(): every byte marked, strays recorded",
            "untracked": "no observation; bounds are still enforced",
            "numpy": "the same elements by whole-batch fancy indexing, no checks",
            "interpreter": "one launch at interpreter_programs programs, times scaled linearly",
            "peak_rss": "growth of the peak in the first tracked launch; buffers_mib are inputs",
        },
        "machine": {
            "triton": triton.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "vllm": tree.name if tree else None,
        },
    }


CHILDREN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "interpret": interpret,
    "memory": peak_memory,
}

if __name__ == "__main__":
    main()
