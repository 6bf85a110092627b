"""How long a cache plan takes: to draw, to count out, and to prove for every number of blocks.

    python tests/benchmarks/proofs.py [--plans N]

Prints JSON. Milliseconds of processor time at the median and at most: drawing a plan; counting out
the bytes of its views for its own number of blocks (the peer of a proof in the same run); proving
it; proving presets of at most 64 layers in every layout. `proof_to_count` is the ratio of the two.
`matrix_s` is the time for six orders, interleaved or not, with and without sharing and padding.
Every proof starts with no answer remembered.
"""

import argparse
import itertools
import json
import statistics
import time
from typing import Any

from kvfuzz.engine.worker.plan_judge import PlanJudge
from kvfuzz.engine.worker.proving import prove
from kvfuzz.errors import UsageError
from kvfuzz.kernels.plan_targets import PlanAdapter
from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.axes import Domain
from kvfuzz.model.cache_plan import KV_LAYOUTS
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.preset_plans import LAYOUTS, PresetOptions, plan_of
from kvfuzz.model.presets import presets
from kvfuzz.model.target import TargetSpec
from kvfuzz.oracles import overlap
from kvfuzz.strategies import space
from kvfuzz.strategies.choices import Drawn
from kvfuzz.strategies.plans import drawn_plan_case

PLANS = 1000
MOST_LAYERS = 64


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and largest, in milliseconds."""
    return {
        "median_ms": round(statistics.median(seconds) * 1000, 3),
        "max_ms": round(max(seconds) * 1000, 3),
    }


def cold_proof(target: PlanAdapter, case: PlanCase) -> float:
    """Seconds of a proof that remembers nothing. Raises SystemExit where it does not hold."""
    overlap.forget()
    start = time.process_time()
    proof = prove(target, case)
    took = time.process_time() - start
    if proof.refuted or proof.undecided:
        raise SystemExit(f"not proved: {proof}")
    return took


def drawn(target: PlanAdapter, count: int) -> dict[str, Any]:
    """Plans of the whole domain."""
    within = space("cache_views", Domain())
    judge = PlanJudge(target, None)  # type: ignore[arg-type]  (no lane is asked)
    took: dict[str, list[float]] = {"draw": [], "count": [], "prove": []}
    for seed in range(count):
        start = time.process_time()
        case = drawn_plan_case(Drawn(seed), within)
        took["draw"].append(time.process_time() - start)
        start = time.process_time()
        judge.verdict(case)
        took["count"].append(time.process_time() - start)
        took["prove"].append(cold_proof(target, case))
    ratio = statistics.median(took["prove"]) / statistics.median(took["count"])
    return {name: spread(each) for name, each in took.items()} | {"proof_to_count": round(ratio, 2)}


def of_presets(target: PlanAdapter) -> dict[str, Any]:
    """Every preset in every layout that can place it."""
    took: dict[tuple[str, str], float] = {}
    for key, layout in itertools.product(presets(), LAYOUTS):
        try:
            plan = plan_of(key, PresetOptions(layout=layout))
        except UsageError:
            continue
        if len(plan.layers) <= MOST_LAYERS:
            took[key, layout] = cold_proof(target, PlanCase("cache_views", plan))
    slowest = max(took, key=lambda each: took[each])
    return spread(list(took.values())) | {"plans": len(took), "slowest": " ".join(slowest)}


def matrix(target: PlanAdapter) -> dict[str, Any]:
    """Six orders x interleaved with state or not x sharing x padding, one plan each."""
    start, plans = time.process_time(), 0
    for layout, kinds, sharers, padding in itertools.product(
        KV_LAYOUTS,
        ("full+sliding", "full+mamba"),
        ("none", "several"),
        ("none", "state", "attention"),
    ):
        where = {"kv_layout": (layout,), "kinds": (kinds,), "sharers": (sharers,)}
        domain = Domain(allowed={**where, "page_padding": (padding,)})
        try:
            within = space("cache_views", domain)
        except UsageError:
            continue
        cold_proof(target, drawn_plan_case(Drawn(plans), within))
        plans += 1
    return {"plans": plans, "matrix_s": round(time.process_time() - start, 2)}


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", type=int, default=PLANS)
    wanted = parser.parse_args()
    target = resolve(TargetSpec("builtin:cache_views"))
    if not isinstance(target, PlanAdapter):
        raise SystemExit("builtin:cache_views is no view builder")
    found = {
        "drawn": drawn(target, wanted.plans),
        "presets": of_presets(target),
        "matrix": matrix(target),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
