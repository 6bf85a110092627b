"""Each property catches a broken kernel that no other one of its group sees.

The five that watch bytes and accesses divide the failures among themselves; a property that never
ran, or cannot fail, would leave its broken kernel green.
"""

import dataclasses

import pytest

import kvfuzz.engine.worker.judge as judging
from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import Sequence
from kvfuzz.oracles.table import PROPERTIES

WATCHING = ("oracle", "complete", "frame", "immutable", "bounds")
ODD_HEAD = Geometry(num_blocks=4, block_size=16, num_kv_heads=1, head_size=80)


ALONE = {
    "oracle": ("mutant:hardcoded_block_stride", "gather_cache", {}),
    "complete": ("mutant:skips_last_dim_write", "reshape_and_cache", {}),
    "frame": (
        "mutant:missing_store_mask_write",
        "reshape_and_cache",
        # One token in the middle of a block: the spill lands on the token after it.
        {"geometry": ODD_HEAD, "sequences": (Sequence((2,), 3, 1),), "padding": ()},
    ),
    "immutable": ("mutant:gather_clears_slot", "gather_cache", {}),
    "bounds": (
        "mutant:missing_store_mask_gather",
        "gather_cache",
        # Every spill but the last row's is overwritten by the next row.
        {"geometry": ODD_HEAD, "sequences": (Sequence((2, 1), 9, 12),)},
    ),
}


@pytest.fixture
def case_of(scene_with, write_scene, gather_scene):
    """The case of an op with parts of the usual scene replaced."""

    def make(op, changes):
        scene = write_scene if op == "reshape_and_cache" else gather_scene
        return lower(scene_with(scene, **changes))

    return make


@pytest.fixture(params=WATCHING)
def watched(request, case_of):
    """(property, broken target, case)."""
    target, op, changes = ALONE[request.param]
    return request.param, target, case_of(op, changes)


def _failed(verdict):
    return {result.name for result in verdict.failed}.intersection(WATCHING)


def test_a_property_catches_its_broken_kernel_alone(judge, watched):
    name, target, case = watched
    assert _failed(judge(target).verdict(case)) == {name}


def test_without_its_judge_the_broken_kernel_goes_unseen(judge, watched, monkeypatch):
    name, target, case = watched
    blind = tuple(
        dataclasses.replace(each, judge=lambda runs: None) if each.name == name else each
        for each in PROPERTIES
    )
    monkeypatch.setattr(judging, "PROPERTIES", blind)
    assert _failed(judge(target).verdict(case)) == set()


@pytest.mark.parametrize("op", ["gather_cache", "reshape_and_cache"])
def test_the_kernel_that_was_broken_passes_every_property_unbroken(judge, case_of, op):
    for target, its_op, changes in ALONE.values():
        if its_op == op:
            verdict = judge(f"builtin:{op}").verdict(case_of(op, changes))
            assert verdict.failed == (), target
            passed = {each.name for each in verdict.results if each.outcome == "passed"}
            assert {*WATCHING, "crash", "no_overflow", "no_race", "roundtrip"} <= passed, target


def test_crash_names_the_exception_and_leaves_the_rest_unchecked(judge, edited, gather_scene):
    target = edited(
        "kernels/builtin/gather_cache.py",
        "gather_cache",
        ("if num_tokens == 0:", 'if num_tokens > 0:\n        raise KeyError("k_scale")'),
    )
    verdict = judge(target).verdict(lower(gather_scene))
    assert [result.name for result in verdict.failed] == ["crash"]
    assert "KeyError: 'k_scale'" in verdict.failed[0].violation.message
    others = [result for result in verdict.results if result.name != "crash"]
    assert {result.outcome for result in others} == {"not_checked"}


def test_determinism_catches_a_kernel_that_remembers_its_calls(judge, edited, gather_scene):
    target = edited(
        "kernels/builtin/gather_cache.py",
        "gather_cache",
        (
            "num_tokens = token_to_batch.shape[0]",
            "CALLS.append(1)\n    num_tokens = token_to_batch.shape[0] - len(CALLS) // 2",
        ),
        ("FP8 = (", "CALLS: list[int] = []\nFP8 = ("),
    )
    verdict = judge(target).verdict(lower(gather_scene))
    assert "determinism" in {result.name for result in verdict.failed}
    assert "oracle" not in {result.name for result in verdict.failed}


def test_roundtrip_catches_a_pair_that_swaps_k_and_v(judge, edited, gather_scene):
    target = edited(
        "kernels/builtin/gather_cache.py",
        "gather_cache",
        (
            "num_tokens = token_to_batch.shape[0]",
            "key, value = value, key\n    num_tokens = token_to_batch.shape[0]",
        ),
    )
    verdict = judge(target).verdict(lower(gather_scene))
    assert "roundtrip" in {result.name for result in verdict.failed}


def test_a_round_trip_that_fails_alone_blames_the_partner(cpu_lane, write_scene):
    from kvfuzz.engine.worker.judge import Judge
    from kvfuzz.kernels.resolve import resolve
    from kvfuzz.model.target import TargetSpec

    target = resolve(TargetSpec("builtin:reshape_and_cache"))
    partner = resolve(TargetSpec("mutant:hardcoded_block_stride"))
    (failed,) = Judge(target, partner, cpu_lane).verdict(lower(write_scene)).failed
    assert failed.name == "roundtrip"
    assert "mutant:hardcoded_block_stride, and it is at fault" in failed.violation.message


RECIPROCAL = (
    "quotient = tl.div_rn(x.to(tl.float32), scale)",
    "quotient = x.to(tl.float32) * tl.div_rn(1.0, scale)",
)


@pytest.mark.parametrize("declared", [True, False])
def test_a_file_declares_how_its_writer_divides(judge, edited, case_of, declared):
    changes = [RECIPROCAL]
    if declared:
        changes.append(("FP8_MAX = {", 'KVFUZZ_QUOTIENT = "x*(1/s)"\nFP8_MAX = {'))
    target = edited("kernels/builtin/reshape_and_cache.py", "reshape_and_cache", *changes)
    ties = {
        "cache_dtype": "e4m3fnuz",
        "model_dtype": "fp32",
        "values": "ties",
        "k_scale": 0x3F99999A,
        "v_scale": 0x3DCCCCCD,
    }
    failed = judge(target).verdict(case_of("reshape_and_cache", ties)).failed
    assert bool(failed) is not declared
