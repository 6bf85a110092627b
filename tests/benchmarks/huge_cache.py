"""What a checked case on a huge cache costs in memory: prints JSON.

    python tests/benchmarks/huge_cache.py [GIB ...]

Each size runs in a child process of its own: our gather and our writer, all properties, on a cache
of that many GiB whose last blocks are in use. `peak_mib` is the most that was resident, torch and
Triton included; `idle_mib` is what the same process has after a case on a small cache.
"""

import json
import resource
import subprocess
import sys
import time
from typing import Any

GIB = (1, 16, 64)
BLOCK_BYTES = 2 * 16 * 8 * 128 * 2  # K and V of 16 tokens, 8 heads of 128, bf16


def peak_mib() -> float:
    """The most that this process had resident, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def case(op: str, num_blocks: int) -> Any:
    """Two runs of tokens in the last blocks of a cache."""
    from kvfuzz.model.layout import Geometry
    from kvfuzz.model.lower import lower
    from kvfuzz.model.plan import AttentionLayer, Batch, Plan, Sequence
    from kvfuzz.model.scene import Scene

    geometry = Geometry(num_blocks, 16, 8, 128)
    layer = AttentionLayer("layer.0", "kv_cache", "blocks_first", "nhd", geometry, "bf16")
    last = num_blocks - 1
    batch = Batch((Sequence((last, last - 2), 13, 12), Sequence((last - 3,), 0, 16)), table_width=3)
    unit = 0x3F800000
    return lower(Scene(op, "layer.0", Plan((layer,)), batch, "bf16", unit, unit, fill_seed=7))


def measured(gib: int) -> dict[str, Any]:
    """One size, in this process."""
    from kvfuzz.engine.worker.cpu_lane import CheckedCpuLane
    from kvfuzz.engine.worker.judge import Judge
    from kvfuzz.kernels.resolve import resolve
    from kvfuzz.model.target import TargetSpec

    lane = CheckedCpuLane("gfx942")
    targets = {
        op: resolve(TargetSpec(f"builtin:{op}")) for op in ("gather_cache", "reshape_and_cache")
    }
    judges = {
        "gather_cache": Judge(targets["gather_cache"], targets["reshape_and_cache"], lane),
        "reshape_and_cache": Judge(targets["reshape_and_cache"], targets["gather_cache"], lane),
    }
    row: dict[str, Any] = {"gib": gib}
    for op, judge in judges.items():
        judge.verdict(case(op, 8))
    row["idle_mib"] = round(peak_mib(), 1)
    for op, judge in judges.items():
        judge.verdict(case(op, (gib << 30) // BLOCK_BYTES))  # compiles for large strides
        start = time.perf_counter()
        verdict = judge.verdict(case(op, (gib << 30) // BLOCK_BYTES))
        row[op] = {
            "ms": round((time.perf_counter() - start) * 1e3, 1),
            "outcomes": sorted({result.outcome for result in verdict.results}),
        }
    row["peak_mib"] = round(peak_mib(), 1)
    return row


def main(sizes: list[int]) -> None:
    """Print a row for each size."""
    rows = []
    for gib in sizes:
        command = [sys.executable, __file__, "--one", str(gib)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout))
    print(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measured(int(sys.argv[2]))))
    else:
        main([int(each) for each in sys.argv[1:]] or list(GIB))
