"""Slot mappings: what is planted in our kernel is reduced to what one would write by hand."""

import pytest
from msgspec.structs import replace

from kvfuzz.engine.minimize import alike_of, minimum
from kvfuzz.model.ops.op_case import lower_op
from kvfuzz.model.ops.slots import Request, SlotScene

BIG = SlotScene(
    requests=(
        Request(5, 300, 70, (9, 2, 17)),
        Request(-1, 0, 3),
        Request(2, 0, 1100, (4, 11, 30, 8, 1)),
        Request(0, 40, 0, (6,)),
    ),
    block_size=32,
    num_blocks=70_000,
    num_rows=8,
    table_width=14,
    max_num_tokens=1200,
    split=2,
    cp_size=4,
    cp_rank=1,
    interleave=64,
    spare=3,
    fill_seed=77,
)
TWO_RANKS = replace(
    BIG,
    requests=(
        Request(5, 300, 70, (9, 2, 17)),
        Request(2, 0, 1100, (4, 11, 30, 8, 1, 40, 41, 42, 3)),
    ),
    table_width=18,
    cp_size=2,
)
PLANTED = {
    # by mutant: the property, the smallest number of tokens, requests and ranks
    "owner_by_the_kernel_block": ("oracle", 1, 1, 2),
    # With one rank a kernel may take another path: a case of several keeps two.
    "slot_of_another_request": ("oracle", 1, 1, 2),
    "tail_keeps_old_slots": ("complete", 0, 1, 2),
    "dummies_write_slot_zero": ("oracle", 1, 1, 2),
}


@pytest.mark.parametrize("mutant", PLANTED)
def test_a_big_batch_is_reduced(judge, mutant):
    name, tokens, requests, ranks = PLANTED[mutant]
    judged = judge(f"mutant:{mutant}")
    case = lower_op(BIG if mutant != "owner_by_the_kernel_block" else TWO_RANKS)
    verdict = judged.verdict(case)
    assert alike_of(verdict).property == name
    domain = judged.target.info.domain
    reduction, seen = minimum(case, verdict, judged.verdict, domain=domain, budget_s=600)
    small = reduction.case.scene
    assert name in {each.name for each in seen.failed}
    assert reduction.ended_by == "minimal"
    assert (small.num_tokens, len(small.requests), small.cp_size) == (tokens, requests, ranks)
    assert (small.spare, small.fill_seed) == (0, 0)
    assert small.block_size <= 2


SMALL = SlotScene(
    requests=(Request(0, 0, 8, (0,)),),
    block_size=2,
    num_blocks=1,
    num_rows=1,
    table_width=1,
    max_num_tokens=8,
    cp_size=4,
)


def _partition(judge, target, scene):
    verdict = judge(target).verdict(lower_op(scene))
    return next(each for each in verdict.results if each.name == "partition")


def test_ranks_that_claim_the_same_token_or_leave_one_are_told(judge):
    found = _partition(judge, "mutant:rank_of_the_next_run", SMALL)
    assert found.violation.message == (
        "token 0 of the batch has a slot on ranks 0, 2, and is due on one rank"
    )
    assert found.violation.wrong == found.violation.judged == 8


def test_two_tokens_of_a_rank_in_one_slot_are_told(judge, edited):
    slot = "block * block_size + number % block_size"
    target = edited("kernels/builtin/slot_mapping.py", "slot_mapping", (slot, "block * block_size"))
    found = _partition(judge, target, SMALL)
    said = "tokens 0 and 4 of the batch have the same slot 0 on rank 0"
    assert found.violation.message == said


def test_one_rank_has_nothing_to_agree_with(judge):
    alone = replace(SMALL, cp_size=1, split=4, table_width=4)
    found = _partition(judge, "builtin:slot_mapping", alone)
    assert (found.outcome, found.reason) == ("not_checked", "there is one rank")
