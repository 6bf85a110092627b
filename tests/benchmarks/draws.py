"""What is drawn for each target: every level of every axis, all combinations of three, how fast.

    python tests/benchmarks/draws.py [--draws N] [--sources DIR]

Prints JSON. Per target, over N random draws: levels that the domain allows and no draw showed,
draws that fell outside the domain or showed another row than they were drawn by, and microseconds
a draw, a lowering and its facts. Per target, by covering rows: how many rows show every valid
combination of three levels, as a multiple of the product of the three largest axes, under which no
covering can be where all combinations are valid.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kvfuzz.errors import KvfuzzError
from kvfuzz.kernels.catalogue import SHIPPED
from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.axes import Domain, facts
from kvfuzz.model.lower import lower
from kvfuzz.model.target import TargetSpec
from kvfuzz.strategies import drawn_scene, space
from kvfuzz.strategies.choices import Drawn
from kvfuzz.strategies.covering import Covering

DRAWS = 10_000
RELEASES = ("0.18.0", "0.24.0", "0.33.0")


def statistics(op: str, domain: Domain, draws: int) -> dict[str, Any]:
    """Levels that never occur, draws outside, and where the time of a draw goes."""
    within = space(op, domain)
    shown: Counter[tuple[str, str]] = Counter()
    outside = other_row = 0
    spent = dict.fromkeys(("draw", "lower", "facts"), 0.0)
    for seed in range(draws):
        start = time.process_time()
        scene = drawn_scene(Drawn(seed), within)
        drawn = time.process_time()
        case = lower(scene)
        lowered = time.process_time()
        found = facts(case)
        for name, took in zip(
            spent,
            (drawn - start, lowered - drawn, time.process_time() - lowered),
            strict=True,
        ):
            spent[name] += took
        outside += domain.refusal(found) is not None
        other_row += found != within.drawn_row(Drawn(seed))
        shown.update(found.items())
    missing = [
        f"{axis}={level}"
        for axis, levels in zip(within.axes, within.levels, strict=True)
        for level in levels
        if (axis, level) not in shown
    ]
    return {
        "draws": draws,
        "levels that never occur": missing,
        "outside the domain, %": 100 * outside / draws,
        "another row than asked for, %": 100 * other_row / draws,
        "microseconds": {name: round(1e6 * took / draws) for name, took in spent.items()},
    }


def covering(op: str, domain: Domain) -> dict[str, Any]:
    """Rows until no combination is open, counted by the facts of their cases."""
    within = space(op, domain)
    counted = Covering(within)
    rows, start = 0, time.process_time()
    while (row := counted.next_row()) is not None:
        case = lower(drawn_scene(Drawn(rows, within.integers(row)), within))
        counted.mark(facts(case))
        rows += 1
    return {
        "rows": rows,
        "of the product of the three largest axes": round(rows / counted.bound, 3),
        "combinations shown": counted.shown,
        "open or given up": counted.open + counted.given_up,
        "seconds": round(time.process_time() - start, 1),
    }


def targets(sources: Path | None) -> list[TargetSpec]:
    """Every shipped target; those of vLLM once for each release whose tree there is."""
    found = []
    for listed in SHIPPED:
        if not listed.name.startswith("vllm:"):
            found.append(TargetSpec(listed.name))
        elif sources is not None:
            trees = [sources / f"vllm-{release}" for release in RELEASES]
            found += [TargetSpec(listed.name, {"vllm": str(each)}) for each in trees]
    return found


def main() -> None:
    """Print the figures of all targets as one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--sources", type=Path)
    wanted = parser.parse_args()
    report = {}
    for spec in targets(wanted.sources):
        release = "".join(f" {Path(folder).name}" for folder in spec.sources.values())
        try:
            info = resolve(spec).info
        except KvfuzzError as error:
            report[spec.name + release] = {"absent": str(error)}
            continue
        domain = info.domain.narrowed(info.op)
        report[spec.name + release] = {
            "random": statistics(info.op, domain, wanted.draws),
            "covering": covering(info.op, domain),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
