"""How tight the error bound of attention is, and how near to it kernels come; prints JSON.

`python tests/benchmarks/attention_bound.py [TARGET...] [--cases N]`

Of drawn cases of each target:

    wrong_token     of those with at most 64 keys a query: in how many a token that is read from
                    another one's slot (K and V, or its row of MLA) puts some number beyond its
                    bound; apart, in how many the exact result, rounded, is the same
    observed        of those with 256 keys and more, of merges all: the median, and the largest, of
                    the largest distance from the exact result in bounds
    bounded         how many numbers have no bound

No kernel runs for the first; the second is of the cpu lane.
"""

import argparse
import json
import statistics
from typing import Any

import torch
from torch import Tensor

from kvfuzz.engine.worker.cpu_lane import CheckedCpuLane
from kvfuzz.engine.worker.execute import execute
from kvfuzz.kernels.adapter import Adapter
from kvfuzz.kernels.resolve import resolve_kernel
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import word
from kvfuzz.model.ops.attention import ATTENTION_OPS
from kvfuzz.model.ops.merge import MERGE_OP
from kvfuzz.model.ops.mla import MLA_OP
from kvfuzz.model.ops.op_case import OpCase
from kvfuzz.model.round_trip import runs
from kvfuzz.model.target import DEFAULT_ARCH, TargetSpec
from kvfuzz.oracles import image
from kvfuzz.oracles.codec import decode
from kvfuzz.oracles.expectation import Expectation, expect
from kvfuzz.oracles.memory import Elements
from kvfuzz.strategies.cases import drawn_case
from kvfuzz.strategies.choices import Drawn
from kvfuzz.strategies.rows import space

FEW_KEYS, MANY_KEYS = 64, 256
SEED = 1 << 40
OURS = [f"builtin:{op}" for op in (*ATTENTION_OPS, MLA_OP, MERGE_OP)]


def ratio(of: Expectation, images: dict[str, Tensor]) -> float:
    """The largest distance from the exact result, in bounds, of numbers in `images`."""
    worst = 0.0
    for stored in of.stored:
        if stored.within is not None:
            codes = image.read(images[stored.field.buffer], stored.at, stored.field.dtype)
            found = decode(codes, DTYPES[stored.field.dtype]).double()
            off = (found - stored.within.value).abs()
            # What is exact has the bound zero.
            off = torch.where(found == stored.within.value, 0.0, off / stored.within.bound)
            worst = max(worst, float(off.nan_to_num(nan=torch.inf).max()))
    return worst


def sides(of: Expectation) -> list[tuple[Elements, ...]]:
    """What of a cache the reference read: one entry a sequence, both sides of its tokens."""
    read = {
        name: [each for each in of.loaded if each.parameter == name]
        for name in ("key_cache", "value_cache", "cached_latent", "cached_rope")
    }
    return list(zip(*filter(None, read.values()), strict=True))


def with_a_wrong_token(
    case: OpCase, before: dict[str, Tensor], of: Expectation
) -> dict[str, Tensor] | None:
    """Memory in which a token of some sequence is what another is; None without two tokens."""
    usable = [pair for pair in sides(of) if len(pair[0].at) > 1]
    if not usable:
        return None
    pair = usable[word(case.scene.fill_seed, "sequence", 0) % len(usable)]
    count = len(pair[0].at)
    token = word(case.scene.fill_seed, "token", 0) % count
    other = (token + 1 + word(case.scene.fill_seed, "other", 0) % (count - 1)) % count
    images = dict(before)
    for side in pair:
        name = side.field.buffer
        images[name] = images[name].clone()
        codes = image.read(before[name], side.at[other], side.field.dtype)
        image.write(images[name], side.at[token], side.field.dtype, codes)
    return images


def keys(case: OpCase) -> int:
    """The keys of the longest sequence; a merge, which sees none, counts as one of many."""
    step = case.steps[0]
    has_keys = "seq_lens" in step.tensors
    return max(len(run) for run in runs(case, step)) if has_keys else MANY_KEYS


def measured(target: Adapter, lane: CheckedCpuLane, cases: int) -> dict[str, Any]:
    """The record of one target."""
    within = space(target.info.op, target.info.domain)
    seen = few = same = unbounded = numbers = 0
    ratios: list[float] = []
    for number in range(cases):
        case = drawn_case(Drawn(SEED + number), within)
        assert isinstance(case, OpCase)
        longest = keys(case)
        run, _ = execute(case, {"target": target}, lane, target.info.quantise)
        unbounded += run.expectation.unbounded
        numbers += sum(each.codes.numel() for each in run.expectation.stored)
        if longest <= FEW_KEYS:
            images = with_a_wrong_token(case, run.before, run.expectation)
            if images is not None:
                wrong = expect(case, images, target.info.quantise, target.info.precision)
                if all(image.same(wrong.images[n], run.expectation.images[n]) for n in wrong.must):
                    same += 1
                else:
                    few += 1
                    seen += ratio(run.expectation, wrong.images) > 1
        if longest >= MANY_KEYS:
            ratios.append(ratio(run.expectation, run.after))
    return {
        "target": target.info.name,
        "cases": cases,
        "wrong_token": {
            "cases": few,
            "exceeds": seen,
            "share": round(seen / max(few, 1), 4),
            "same_result": same,
        },
        "observed": {
            "cases": len(ratios),
            "median": round(statistics.median(ratios), 5) if ratios else None,
            "largest": round(max(ratios), 5) if ratios else None,
        },
        "without_bound": {"numbers": unbounded, "of": numbers},
    }


def main() -> None:
    """Print one record a target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=OURS)
    parser.add_argument("--cases", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lane = CheckedCpuLane(DEFAULT_ARCH)
    for name in arguments.targets:
        target = resolve_kernel(TargetSpec(name), arch=DEFAULT_ARCH)
        print(json.dumps(measured(target, lane, arguments.cases)), flush=True)


if __name__ == "__main__":
    main()
