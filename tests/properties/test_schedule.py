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
    unchecked = {each.name: each.reason for each in verdict.results if each.outcome != "passed"}
    assert unchecked.pop("scale_homogeneity") == "a cache that is not fp8 has no scale"
    # A gather of one sequence has a block table of one row.
    expected = {} if op == "gather_cache" else {"size1_stride": "no dimension has size 1"}
    assert unchecked == expected


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


def test_a_program_that_stores_twice_does_not_race(judge, edited, write_scene):
    twice = STORE_K + "\n    " + STORE_K
    verdict = judge(edited(WRITE, "reshape_and_cache", (STORE_K, twice))).verdict(
        lower(write_scene)
    )
    assert _failed(verdict) == []


@pytest.mark.parametrize(("added", "is_lost"), [("(wrapped & 31)", False), ("wrapped", True)])
def test_a_wrap_is_an_overflow_only_where_its_lost_bits_reach_an_address(
    judge, edited, gather_scene, added, is_lost
):
    """2**31 per row: in 32 bits every other one is 0, and the low bits of all are."""
    load = "k = tl.load(key_cache_ptr + k_at, mask=inside)"
    wrapping = f"wrapped = (row + 1) * block_size * 134217728\n    k_at = k_at + {added}\n    "
    target = edited(GATHER, "gather_cache", (load, wrapping + load))
    failed = _failed(judge(target).verdict(lower(gather_scene)))
    assert ("no_overflow" in failed) == is_lost
    assert is_lost or failed == []


NEIGHBOUR = "key_cache_ptr + k_at + k_head_stride"
OTHERS = f"tl.load({NEIGHBOUR}, mask=inside & (head + 1 < tl.num_programs(1)), volatile=True)"


def test_reading_what_another_program_writes_is_a_hazard_while_nobody_can_tell(
    judge, edited, write_scene
):
    target = edited(WRITE, "reshape_and_cache", (STORE_K, OTHERS + "\n    " + STORE_K))
    verdict = judge(target).verdict(lower(write_scene))
    assert _failed(verdict) == []
    assert "read_race" in {hazard.kind for hazard in verdict.hazards}


def test_reading_what_another_program_writes_is_a_finding_once_it_decides_a_byte(
    judge, edited, write_scene
):
    stored = STORE_K.replace("k.to(", "tl.where(head == 0, others, k).to(")
    wrong = f"others = {OTHERS}.to(k.dtype)\n    {stored}"
    verdict = judge(edited(WRITE, "reshape_and_cache", (STORE_K, wrong))).verdict(
        lower(write_scene)
    )
    (race,) = [result for result in verdict.failed if result.name == "no_race"]
    assert "changes while the other reads it" in race.violation.message


LAUNCH = "    reshape_and_cache_kernel[(num_rows, num_kv_heads)]("
SLOTS = "    v_scale_ptr,\n    key_row_stride: tl.int64"
DUMP = (
    (LAUNCH, "    dump = torch.zeros(64, dtype=key.dtype)\n" + LAUNCH),
    (
        "        v_scale,\n        *key.stride()",
        "        v_scale,\n        dump,\n        *key.stride()",
    ),
    (SLOTS, SLOTS.replace("key_row", "dump_ptr,\n    key_row")),
)
"""Memory that the target allocates itself, for its kernel."""


def test_rows_that_are_dumped_on_each_other_where_nobody_reads_are_a_hazard(
    judge, edited, write_scene
):
    dumped = (
        STORE_K + "\n    tl.store(dump_ptr + dim, k.to(dump_ptr.dtype.element_ty), mask=inside)"
    )
    target = edited(WRITE, "reshape_and_cache", *DUMP, (STORE_K, dumped))
    verdict = judge(target).verdict(lower(write_scene))
    assert _failed(verdict) == []
    assert "write_race" in {hazard.kind for hazard in verdict.hazards}


def test_what_programs_dump_on_each_other_is_a_race_once_it_decides_a_byte(
    judge, edited, write_scene
):
    dumped = (
        STORE_K + "\n    tl.store(dump_ptr + dim, k.to(dump_ptr.dtype.element_ty), mask=inside)"
    )
    stored = "    key_cache[0, 0, 0, 0] = dump[0].to(key_cache.dtype)\n"
    end = "MAX=FP8_MAX.get(key_cache.dtype, 0.0),\n    )\n"
    target = edited(WRITE, "reshape_and_cache", *DUMP, (STORE_K, dumped), (end, end + stored))
    verdict = judge(target).verdict(lower(write_scene))
    assert "no_race" in _failed(verdict)


def test_torch_code_that_writes_far_from_the_batch_is_seen_too(judge, edited, far_case):
    far = "    key_cache[key_cache.shape[0] // 2, 1, 1, 3] = 1.0\n" + LAUNCH
    target = edited(WRITE, "reshape_and_cache", (LAUNCH, far))
    verdict = judge(target).verdict(far_case("reshape_and_cache"))
    assert "frame" in _failed(verdict)


def test_torch_code_that_reads_far_from_the_batch_changes_nothing(judge, edited, far_case):
    read = "    assert not key_cache[key_cache.shape[0] // 2].any()\n" + LAUNCH
    target = edited(WRITE, "reshape_and_cache", (LAUNCH, read))
    assert _failed(judge(target).verdict(far_case("reshape_and_cache"))) == []


@pytest.mark.parametrize("given", range(0, 24, 3))
def test_memory_that_cannot_be_reserved_decides_nothing(judge, far_case, monkeypatch, given):
    """After `given` large pieces there is no more address space, at whatever point that is."""
    import kvfuzz.cpu.reserve as reserve
    from kvfuzz.cpu import OutOfAddressesError

    plenty, left = reserve._reserved, [given]

    def reserved(nbytes):
        left[0] -= 1
        if left[0] < 0:
            raise OutOfAddressesError("no more address space")
        return plenty(nbytes)

    monkeypatch.setattr(reserve, "_reserved", reserved)
    verdict = judge("builtin:reshape_and_cache").verdict(far_case("reshape_and_cache"))
    assert {result.outcome for result in verdict.results} <= {"passed", "not_checked"}
    if given == 0:
        assert {result.outcome for result in verdict.results} == {"not_checked"}
