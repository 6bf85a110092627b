"""Lossy 32-bit integers and races are findings of their own, and what looks like them is not."""

import pytest

from kvfuzz.model.axes import facts
from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import Sequence

GATHER, WRITE = "kernels/builtin/gather_cache.py", "kernels/builtin/reshape_and_cache.py"
STORE_K = "tl.store(key_cache_ptr + k_at, k.to(key_cache_ptr.dtype.element_ty), mask=inside)"

FAR = {
    "geometry": Geometry(num_blocks=1 << 21, block_size=16, num_kv_heads=2, head_size=32),
    "sequences": (Sequence(((1 << 21) - 2, 3), 13, 6),),
    "padding": (),
}
"""Half the ids reach past 2**31 elements: a block is 1,024 elements of K and of V."""


def _failed(verdict):
    return [result.name for result in verdict.failed]


@pytest.fixture
def far_case(gather_scene, write_scene, scene_with):
    """The case of an op on a cache of 8 GiB."""

    def make(op):
        scene = write_scene if op == "reshape_and_cache" else gather_scene
        case = lower(scene_with(scene, **FAR))
        assert facts(case)["reach"] == "past_2g_elements"
        return case

    return make


@pytest.mark.parametrize(
    ("mutant", "op"),
    [
        ("int32_block_offset", "gather_cache"),
        ("int32_block_offset_write", "reshape_and_cache"),
    ],
)
def test_a_32_bit_address_is_named_as_the_cause(judge, far_case, mutant, op):
    verdict = judge(f"mutant:{mutant}").verdict(far_case(op))
    assert _failed(verdict)[0] == "no_overflow"
    message = verdict.failed[0].violation.message
    assert "an integer loses bits" in message
    assert "64-bit arithmetic gives" in message


@pytest.mark.parametrize("op", ["gather_cache", "reshape_and_cache"])
def test_the_same_far_case_passes_every_property_on_a_correct_kernel(judge, far_case, op):
    verdict = judge(f"builtin:{op}").verdict(far_case(op))
    assert {result.outcome for result in verdict.results} == {"passed"}


def test_a_far_write_that_lands_on_bytes_that_nothing_compares_is_still_seen(
    judge, edited, far_case
):
    """Half-way down a cache of 8 GiB no block is named; a store there changes no held byte."""
    spilling = STORE_K + "\n    tl.store(key_cache_ptr + (1 << 30) + dim, k.to(tl.bfloat16))"
    spilling = spilling.replace("k.to(tl.bfloat16)", "k.to(key_cache_ptr.dtype.element_ty)")
    target = edited(WRITE, "reshape_and_cache", (STORE_K, spilling))
    verdict = judge(target).verdict(far_case("reshape_and_cache"))
    frame = next(result for result in verdict.failed if result.name == "frame")
    assert "far from every block that the batch names" in frame.violation.message
    assert frame.violation.place.byte == 2 << 30


def test_a_race_that_the_order_of_programs_repairs_is_seen_by_no_race_alone(judge, write_scene):
    verdict = judge("mutant:stores_next_head_too").verdict(lower(write_scene))
    assert _failed(verdict) == ["no_race"]
    violation = verdict.failed[0].violation
    assert "program (1, 1, 0)" in violation.message
    assert "program (1, 0, 0)" in violation.message
    assert violation.place.coordinate["head"] == 1


def test_two_programs_that_store_equal_bytes_do_not_race(judge, edited, write_scene):
    """Each head's program also stores the token's scale-free head 0, the same bytes as its own."""
    twice = STORE_K + "\n    " + STORE_K
    verdict = judge(edited(WRITE, "reshape_and_cache", (STORE_K, twice))).verdict(
        lower(write_scene)
    )
    assert _failed(verdict) == []


def test_a_wrap_that_reaches_no_address_is_no_overflow(judge, edited, gather_scene):
    unused = (
        "wrapped = (row + 1) * 1610612736 * 2\n    k_at = k_at + tl.where(wrapped == 7, 0, 0)\n    "
    )
    load = "k = tl.load(key_cache_ptr + k_at, mask=inside)"
    target = edited(GATHER, "gather_cache", (load, unused + load))
    assert _failed(judge(target).verdict(lower(gather_scene))) == []
