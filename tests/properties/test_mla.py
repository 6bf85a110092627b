"""Decode over MLA's latent: what is planted in our kernel is reduced to a case that says it."""

import pytest
import torch
from nights import by_night

from kvfuzz.engine.minimize import alike_of, minimum
from kvfuzz.model.ops.mla import MlaScene
from kvfuzz.model.ops.op_case import lower_op
from kvfuzz.model.plan import Batch, Sequence

MOST_RUNS = 150
THREE_TENTHS = 0x3E99999A


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _big():
    """Three sequences over forty blocks, in the second of three layers, twenty heads, fp8."""
    ids = [(block * 17 + 5) % 39 for block in range(39)]
    return MlaScene(
        num_blocks=40,
        block_size=16,
        latent_size=48,
        rope_size=16,
        cache_dtype="e4m3fnuz",
        model_dtype="bf16",
        batch=Batch(
            tuple(Sequence(tuple(ids[at : at + 13]), 150 + at, 1) for at in (0, 13, 26)), (), 20
        ),
        layers=3,
        layer=1,
        page_padding=64,
        scale=THREE_TENTHS,
        num_query_heads=20,
        softmax_scale=0x3E000000,
        softcap=30,
        lse_dtype="bf16",
        row_gap=16,
        spare_rows=2,
        spare_entries=3,
        margin=1000,
        fill_seed=12345,
    )


PLANTED = {
    # mutant: (property, blocks, sequences, heads); why there is no smaller one
    # Block 0 is right under any stride.
    "mla_decode_page_is_block": ("oracle", 2, 1, 1),
    # The second sequence.
    "mla_decode_first_sequence": ("oracle", 2, 2, 1),
    "mla_decode_no_rope": ("oracle", 1, 1, 1),
    "mla_decode_no_scale": ("oracle", 1, 1, 1),
    # A head that the first program does not have.
    "mla_decode_sixteen_heads": ("oracle", 1, 1, 20),
    # Two parts.
    "mla_decode_merge_by_nothing": ("oracle", 1, 1, 1),
    "mla_decode_lse_base_two": ("oracle", 1, 1, 1),
}


IN_CI = ("mla_decode_page_is_block", "mla_decode_no_scale")


@pytest.mark.parametrize("mutant", [each if each in IN_CI else by_night(each) for each in PLANTED])
def test_a_big_case_is_reduced_to_the_smallest_but_one(judge, mutant):
    name, blocks, sequences, heads = PLANTED[mutant]
    judged = judge(f"mutant:{mutant}")
    case = lower_op(_big())
    verdict = judged.verdict(case)
    assert alike_of(verdict).property == name
    domain = judged.target.info.domain
    reduction, seen = minimum(case, verdict, judged.verdict, domain=domain, budget_s=600)
    small = reduction.case.scene
    assert name in {each.name for each in seen.failed}
    assert reduction.ended_by == "minimal"
    assert reduction.runs <= MOST_RUNS
    assert small.num_blocks <= blocks + 1
    assert len(small.batch.sequences) == sequences
    assert (small.num_query_heads, small.layers) == (heads, 1)
    assert (small.softcap, small.margin, small.row_gap, small.lse_dtype) == (0, 0, 0, "fp32")
