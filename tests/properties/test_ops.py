"""Our kernels of ops on other things than K and V pages: nothing is found, and all is decided."""

from collections import Counter

import pytest
from nights import by_night, more_by_night

from kvfuzz.kernels.mutants.patches import BUILTIN
from kvfuzz.model import scene
from kvfuzz.model.axes import Domain
from kvfuzz.model.ops.attention import ATTENTION_OPS
from kvfuzz.model.ops.mla import MLA_OP
from kvfuzz.model.ops.table import BY_OP
from kvfuzz.model.verdict import WAITING
from kvfuzz.strategies import drawn_case, space
from kvfuzz.strategies.choices import Drawn

CASES, CASES_OF_A_COPY = 100, 8
SLOW = (*ATTENTION_OPS, MLA_OP)
CASES_OF_THE_SLOW, BY_NIGHT = 12, 24
"""Of ops of which a case takes a few tenths of a second."""
SLOWEST = ("shared_kv_attention", "paged_attention")
"""What is done with the others by day is done with these by night."""
ALWAYS = ("crash", "no_overflow", "oracle", "complete", "frame", "immutable", "bounds", "no_race")


def _waiting(ops):
    return [by_night(op) if op in SLOWEST else op for op in ops]


QUICK = [op for op in BY_OP if op not in SLOW]


@pytest.mark.parametrize(
    ("op", "count"),
    [
        *((op, CASES) for op in QUICK),
        *more_by_night([(op,) for op in SLOW], CASES_OF_THE_SLOW, BY_NIGHT),
    ],
)
def test_our_kernel_passes_drawn_cases_with_every_property_decided(judge, op, count):
    judged = judge(f"builtin:{op}")
    within = space(op, judged.target.info.domain.narrowed(op))
    decided, asked = Counter(), set()
    for seed in range(count):
        verdict = judged.verdict(drawn_case(Drawn(seed), within))
        assert not verdict.failed, (seed, verdict.failed)
        assert not verdict.refused, (seed, verdict.refused)
        assert verdict.hazards == (), (seed, verdict.hazards)
        judged.lane.rest()
        for result in verdict.results:
            asked.add(result.name)
            decided[result.name] += result.outcome == "passed"
            assert result.reason != WAITING
    assert all(decided[name] == count for name in (*ALWAYS, "dead_bytes", "determinism"))
    assert all(decided[name] for name in asked)


@pytest.mark.parametrize("op", _waiting([*scene.OPS, *BY_OP]))
def test_a_copy_of_our_kernel_is_a_target_that_needs_no_declaration(judge, op, tmp_path):
    """Each file says that it may be copied and changed: unchanged it must be clean."""
    copy = tmp_path / "k.py"
    copy.write_bytes((BUILTIN / f"{op}.py").read_bytes())
    judged = judge(f"{copy}:{op}")
    within = space(op, judged.target.info.domain.narrowed(op))
    for seed in range(CASES_OF_A_COPY):
        verdict = judged.verdict(drawn_case(Drawn(seed), within))
        assert not verdict.failed, (seed, verdict.failed)
        assert not verdict.refused, (seed, verdict.refused)
        judged.lane.rest()


FAR = {"reach": ("past_2g_elements",), "ids": ("past_65535",)}
"""Where an op has caches, blocks lie past 2**31 elements; else ids are past 65,535."""
REACHING = {
    op: {axis.name: FAR[axis.name] for axis in family.axes if axis.name in FAR}
    for op, family in BY_OP.items()
}


@pytest.mark.parametrize("op", _waiting([op for op, far in REACHING.items() if far]))
def test_our_kernel_reaches_past_2_31(judge, op):
    judged = judge(f"builtin:{op}")
    far = REACHING[op]
    domain = Domain(allowed=judged.target.info.domain.allowed | far)
    within = space(op, domain.narrowed(op))
    for seed in range(6):
        verdict = judged.verdict(drawn_case(Drawn(seed), within))
        assert not verdict.failed, (seed, verdict.failed)
