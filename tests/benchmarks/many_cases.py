"""Very many cases of kernels that should be clean, on all cores: whoever cries wolf does so here.

    python tests/benchmarks/many_cases.py [--cases N] [--where AXIS=LEVEL,...] [TARGET[@RELEASE]...]

Without targets, each of our own kernels. Prints JSON whenever a campaign ends, the record of its
target so far: cases, seconds of all campaigns together, findings with the first words of each,
hazards, what was never checked; what is cut off has lost nothing.
Targets of vLLM need a release, whose source tree must have been fetched.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from upstream_bugs import tree

from kvfuzz.engine.campaign import Campaign, Options
from kvfuzz.kernels.catalogue import SHIPPED
from kvfuzz.model.axes import parse_where
from kvfuzz.model.events import Event, Found, Summary
from kvfuzz.model.plan_case import PLAN_OPS
from kvfuzz.model.target import DEFAULT_LANE, LANES, TargetSpec

SHARD = 500
"""Cases of one campaign, about."""


class Job(NamedTuple):
    """One campaign."""

    target: str
    cases: int
    random_seed: int
    lane: str
    where: str


def ours() -> list[str]:
    """Every kernel of ours."""
    return [
        each.name
        for each in SHIPPED
        if each.name.startswith("builtin:") and each.op not in PLAN_OPS
    ]


def run(job: Job) -> dict[str, Any]:
    """What a campaign ended with."""
    name, _, release = job.target.partition("@")
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as out:
        options = Options(
            target=TargetSpec(name, {"vllm": tree(release)} if release else {}),
            out=Path(out),
            budget_s=36_000,
            max_cases=job.cases,
            random_seed=job.random_seed,
            keep_going=True,
            shrink_s=5.0,
            reduce_s=5.0,
            extent_s=0.0,
            lane=job.lane,
            where=parse_where(job.where),
        )
        Campaign(options, events.append).run()
    (summary,) = [event for event in events if isinstance(event, Summary)]
    found = [event for event in events if isinstance(event, Found)]
    said = [
        f"{each.seed.property}: {result.violation.message}"
        for each in found
        for result in each.verdict.failed
        if result.name == each.seed.property and result.violation
    ]
    return {
        "target": job.target,
        "cases": summary.cases,
        "seconds": round(summary.elapsed_s, 1),
        "refused": summary.refused,
        "findings": said,
        "hazards": sorted({hazard.kind for hazard, _ in summary.hazards}),
        "never_checked": sorted(set(summary.not_checked) - set(summary.passed)),
    }


def joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The records of one target as one."""
    whole = dict(records[0])
    for key in ("cases", "seconds", "refused"):
        whole[key] = round(sum(each[key] for each in records), 1)
    for key in ("findings", "hazards"):
        whole[key] = sorted({said for each in records for said in each[key]})
    whole["never_checked"] = sorted(set.intersection(*(set(r["never_checked"]) for r in records)))
    return whole


def main() -> None:
    """Print one record a target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=ours())
    parser.add_argument("--cases", type=int, default=2000, help="cases of each target")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--lane", choices=LANES, default=DEFAULT_LANE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", type=int, default=SHARD, help="cases of one campaign, about")
    parser.add_argument("--where", default="", help="as of kvfuzz run, for every target")
    arguments = parser.parse_args()
    shards = max(1, arguments.cases // arguments.shard)
    jobs = [
        Job(
            target,
            -(-arguments.cases // shards),
            arguments.seed + shard,
            arguments.lane,
            arguments.where,
        )
        for shard in range(shards)
        for target in arguments.targets
    ]
    spawn = multiprocessing.get_context("spawn")
    records: dict[str, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(arguments.jobs, mp_context=spawn) as pool:
        for done in as_completed([pool.submit(run, job) for job in jobs]):
            record = done.result()
            mine = records.setdefault(record["target"], [])
            mine.append(record)
            whole = joined(mine) | {"campaigns": f"{len(mine)} of {shards}"}
            print(json.dumps(whole), flush=True)


if __name__ == "__main__":
    main()
