"""A stray read is a finding when it matters and a hazard when it does not; NaNs are bits in copies.

The correct kernels here look like the wrong ones beside them.
"""

import dataclasses

import pytest

from kvfuzz.model.lower import lower
from kvfuzz.model.plan import Sequence
from kvfuzz.oracles.access import OTHER_POISONS
from kvfuzz.oracles.properties import BASE
from kvfuzz.oracles.stored_bytes import immutable

GATHER, WRITE = "kernels/builtin/gather_cache.py", "kernels/builtin/reshape_and_cache.py"
LOAD_K = "k = tl.load(key_cache_ptr + k_at, mask=inside)"


def _results(verdict):
    return {result.name: result for result in verdict.results}


def test_a_stray_read_that_is_thrown_away_is_a_hazard(judge, edited, gather_scene):
    target = edited(
        GATHER,
        "gather_cache",
        (LOAD_K, "tl.load(key_cache_ptr - 64 - dim, volatile=True)\n    " + LOAD_K),
    )
    verdict = judge(target).verdict(lower(gather_scene))
    assert verdict.failed == ()
    assert [hazard.kind for hazard in verdict.hazards] == ["stray_read"]
    assert "outside of kv_cache" in verdict.hazards[0].message


def test_a_stray_read_that_reaches_the_result_fails_bounds(judge, edited, gather_scene):
    target = edited(GATHER, "gather_cache", (LOAD_K, "k = tl.load(key_cache_ptr - 64 - dim)"))
    bounds = _results(judge(target).verdict(lower(gather_scene)))["bounds"]
    assert bounds.outcome == "failed"
    assert "what is there changes the result" in bounds.violation.message


def test_a_masked_over_read_is_neither(judge, edited, gather_scene):
    masked = "beyond = tl.load(key_cache_ptr - 64 - dim, mask=dim < 0)\n    " + LOAD_K
    verdict = judge(edited(GATHER, "gather_cache", (LOAD_K, masked))).verdict(lower(gather_scene))
    assert (verdict.failed, verdict.hazards) == ((), ())


def test_the_fills_outside_an_allocation_differ_from_each_other_and_from_the_first():
    assert len({0xA5, *OTHER_POISONS.values()}) == 1 + len(OTHER_POISONS)


QUIETENED = (
    "tl.store(key_ptr + key_at, k.to(key_ptr.dtype.element_ty), mask=inside)",
    "k = tl.where(k == k, k, float('nan')).to(key_ptr.dtype.element_ty)\n"
    "    tl.store(key_ptr + key_at, k, mask=inside)",
)


def test_a_copy_that_changes_nan_payloads_fails_oracle(judge, edited, gather_scene, scene_with):
    target = edited(GATHER, "gather_cache", QUIETENED)
    scene = scene_with(gather_scene, sequences=(Sequence((3, 1), 0, 32),))  # some NaNs for sure
    assert _results(judge(target).verdict(lower(scene)))["oracle"].outcome == "failed"


def test_behind_a_conversion_any_nan_is_right(judge, edited, gather_scene, scene_with):
    target = edited(
        GATHER,
        "gather_cache",
        (QUIETENED[0], QUIETENED[1].replace("float('nan')", "-float('nan')")),
    )
    scene = scene_with(gather_scene, cache_dtype="e4m3fnuz")
    assert judge(target).verdict(lower(scene)).failed == ()


@pytest.mark.parametrize(("buffer", "broken"), [("kv_cache", True), ("key_out", False)])
def test_a_broken_guard_of_a_buffer_that_is_only_read_fails_immutable(
    judge, gather_scene, buffer, broken
):
    from kvfuzz.oracles.properties import Variant

    run, _ = judge("builtin:gather_cache")._run(Variant(lower(gather_scene)))
    spilled = dataclasses.replace(run, guards_broken={buffer: -1})
    found = immutable({BASE: spilled})
    assert (found is not None) is broken


def test_a_program_that_reads_and_rewrites_its_own_bytes_is_only_a_hazard(
    judge, edited, write_scene
):
    store = "tl.store(key_cache_ptr + k_at, k.to(key_cache_ptr.dtype.element_ty), mask=inside)"
    again = (
        "other = key_cache_ptr + dim\n"
        "    mine = inside & (tl.program_id(0) == 1) & (tl.program_id(1) == 0)\n"
        "    tl.store(other, tl.load(other, mask=mine), mask=mine)\n    " + store
    )
    verdict = judge(edited(WRITE, "reshape_and_cache", (store, again))).verdict(lower(write_scene))
    assert verdict.failed == ()
    assert [hazard.kind for hazard in verdict.hazards] == ["rewrite", "dead_read"]
