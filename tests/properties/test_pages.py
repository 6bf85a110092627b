"""Whole pages and states: what breaks a kernel of ours is made as small as by hand.

The same mutants in a cache in use are in test_scripts.py.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from kvfuzz.engine.minimize import alike_of, minimum
from kvfuzz.kernels.mutants.patches import mutants
from kvfuzz.model.layout import Geometry
from kvfuzz.model.ops.op_case import lower_op
from kvfuzz.model.ops.page_scene import PageScene
from kvfuzz.model.ops.states import State, StateScene
from kvfuzz.model.plan import AttentionLayer

MOST_RUNS = 150


class Planted(NamedTuple):
    """A mutant, what finds it first, and the smallest scene that shows it, found by hand."""

    mutant: str
    property: str
    entries: tuple[tuple[int, ...], ...]
    why: str
    shows: Mapping[str, object] = MappingProxyType({})


PLANTED = (
    Planted("copy_on_write_forgotten", "oracle", ((0, 1),), "any pair"),
    Planted("copied_tail_is_stale", "complete", ((0, 1),), "any pair"),
    Planted("copy_into_the_wrong_block", "oracle", ((0, 1), (2, 3)), "two pairs"),
    Planted("copy_of_k_alone", "complete", ((0, 1),), "any pair"),
    Planted(
        "copy_block_stride_is_a_page",
        "oracle",
        ((0, 1),),
        "K of block 1 goes to V of block 0, and with padding V of block 1 does not repair it",
        {"layout": "blocks_first", "page_padding": 16},
    ),
    Planted("copy_through_a_float", "oracle", ((0, 1),), "a NaN", {"cache_dtype": "bf16"}),
    Planted("swapped_by_the_wrong_id", "oracle", ((0, 1),), "ids that differ"),
    Planted(
        "swap_reads_by_the_targets_stride",
        "oracle",
        ((1, 0),),
        "block 1 on the device, whose blocks lie farther apart than the host's",
        {"layout": "blocks_first"},
    ),
    Planted("cleared_tail_is_stale", "complete", ((0,),), "any block"),
    Planted(
        "zero_block_stride_is_a_page",
        "complete",
        ((1,),),
        "as above: block 0 is right, and without padding V of block 1 is cleared in K's place",
        {"layout": "blocks_first", "page_padding": 16},
    ),
    Planted("zero_by_place_in_the_list", "complete", ((1,), (0,)), "ids that go down"),
)


def _big(op):
    """Forty blocks of eight heads between Mamba states, the second of three layers."""
    ids = [(block * 17 + 5) % 39 for block in range(39)]
    entries = {
        "copy_blocks": tuple(zip(ids[:8], ids[8:16], strict=True)),
        "swap_blocks": tuple(zip(ids[:8], (7, 3, 11, 0, 9, 2, 12, 5), strict=True)),
        "zero_blocks": tuple((block,) for block in ids[:8]),
    }[op]
    layer = AttentionLayer(
        "layer", "kv_cache", "hybrid", "hnd", Geometry(40, 16, 8, 80), "bf16", page_padding=48
    )
    scene = PageScene(op, layer, entries, 3, 1, tuple(sorted(ids[36:])), spare=3, fill_seed=12345)
    return replace(scene, host="kv_first", host_blocks=13) if op == "swap_blocks" else scene


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.mutant)
def test_a_big_case_of_pages_is_reduced_to_the_smallest(judge, planted):
    (mutant,) = [each for each in mutants() if each.name == planted.mutant]
    judged = judge(f"mutant:{planted.mutant}")
    case = lower_op(_big(mutant.patches))
    verdict = judged.verdict(case)
    assert planted.property in {each.name for each in verdict.failed}
    domain = judged.target.info.domain
    reduction, seen = minimum(case, verdict, judged.verdict, domain=domain, budget_s=600)
    scene = reduction.case.scene
    assert alike_of(verdict).shown_by(seen)
    assert (reduction.ended_by, reduction.runs <= MOST_RUNS) == ("minimal", True)
    assert scene.entries == planted.entries, planted.why
    assert (scene.layers, scene.state_blocks, scene.spare) == (1, (), 0)
    assert (scene.layer.geometry.num_kv_heads, scene.layer.order) == (1, "nhd")
    plain = {"layout": "kv_first", "page_padding": 0, "cache_dtype": "fp32"}
    for name, value in (plain | dict(planted.shows)).items():
        assert getattr(scene.layer, name) == value
    assert scene.fill_seed < 8


def test_a_big_case_of_states_is_reduced_to_the_smallest(judge):
    judged = judge("mutant:state_block_stride_is_its_size")
    states = (State("bf16", (4, 120)), State("fp32", (3, 8, 11)), State("bf16", (12,)))
    pairs = ((31, 2), (4, 29), (31, 17), (8, 9))
    case = lower_op(StateScene(states, 40, pairs, padding=64, spare=2, fill_seed=777))
    verdict = judged.verdict(case)
    domain = judged.target.info.domain
    reduction, _ = minimum(case, verdict, judged.verdict, domain=domain, budget_s=600)
    small = reduction.case.scene
    # Block 0 is right under any stride: of one pair, a block that begins inside another.
    assert len(small.pairs) == 1
    assert small.num_blocks <= 3
    assert sum(state.nbytes for state in small.states) + small.padding <= 16


def test_a_far_case_of_states_stays_far_while_it_shrinks(judge):
    judged = judge("mutant:state_offset_of_32_bits")
    first = (1 << 33) // 960
    scene = StateScene((State("fp32", (4, 60)),), first + 40, ((first + 3, first + 20),))
    case = lower_op(scene)
    verdict = judged.verdict(case)
    assert verdict.failed[0].name == "no_overflow"
    domain = judged.target.info.domain
    reduction, seen = minimum(case, verdict, judged.verdict, domain=domain, budget_s=600)
    assert seen.failed[0].name == "no_overflow"
    small = reduction.case.scene
    assert small.states == (State("fp32", (1,)),)
    assert small.pairs[0][0] == 1 << 31
