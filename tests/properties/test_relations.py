"""Each relation sees a broken kernel that nothing else sees, and correct look-alikes stay green."""

import pytest

from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import Sequence

GATHER, WRITE = "kernels/builtin/gather_cache.py", "kernels/builtin/reshape_and_cache.py"
ONE_TOKEN_BLOCKS = {
    "geometry": Geometry(num_blocks=9, block_size=1, num_kv_heads=2, head_size=32),
    "sequences": (Sequence((3, 1, 8), 0, 3), Sequence((4,), 0, 1)),
}
GENERAL_SCALES = {"k_scale": 0x3F99999A, "v_scale": 0x3DCCCCCD}
FP8 = {"cache_dtype": "e4m3fnuz", **GENERAL_SCALES}

ALONE = {
    "size1_stride": ("mutant:block_size_bounded_by_strides", "gather_cache", ONE_TOKEN_BLOCKS),
    "scale_homogeneity": ("mutant:least_scale", "reshape_and_cache", FP8),
    "layout_equivariance": ("mutant:dense_pages_off_by_one", "gather_cache", {}),
    "block_permutation": ("mutant:block_zero_is_null", "gather_cache", {}),
    "batch_invariance": ("mutant:one_row_skipped", "reshape_and_cache", {}),
}


def _failed(verdict):
    return [result.name for result in verdict.failed]


def _outcome(verdict, name):
    (found,) = [result for result in verdict.results if result.name == name]
    return found


@pytest.fixture
def case_of(scene_with, write_scene, gather_scene):
    def make(op, **changes):
        scene = write_scene if op == "reshape_and_cache" else gather_scene
        if "geometry" in changes and op == "reshape_and_cache":
            changes.setdefault("padding", ())
        return lower(scene_with(scene, **changes))

    return make


@pytest.mark.parametrize("name", ALONE)
def test_a_relation_catches_its_broken_kernel_alone(judge, case_of, name):
    target, op, changes = ALONE[name]
    case = case_of(op, **changes)
    assert _failed(judge(target).verdict(case)) == [name]
    whole = judge(f"builtin:{op}").verdict(case)
    assert _failed(whole) == []
    assert _outcome(whole, name).outcome == "passed"


def _said(verdict, name):
    return _outcome(verdict, name).violation


def test_a_finding_names_the_other_layout_the_other_ids_the_other_strides(judge, case_of):
    target, op, changes = ALONE["layout_equivariance"]
    said = _said(judge(target).verdict(case_of(op, **changes)), "layout_equivariance")
    assert (
        said.message
        == "in layout kv_first, the same logical cache gives another byte; here it is right"
    )
    assert said.place.field == "key_out"
    target, op, changes = ALONE["block_permutation"]
    said = _said(judge(target).verdict(case_of(op, **changes)), "block_permutation")
    assert "with blocks renamed (3 is 0, 4 is 2, 0 is 3, 2 is 4)" in said.message
    target, op, changes = ALONE["size1_stride"]
    said = _said(judge(target).verdict(case_of(op, **changes)), "size1_stride")
    assert "key_cache.stride(1) is 192 instead of 64" in said.message
    target, op, changes = ALONE["scale_homogeneity"]
    said = _said(judge(target).verdict(case_of(op, **changes)), "scale_homogeneity")
    assert said.message == "with scales and x times 2**-16, another code is stored"
    target, op, changes = ALONE["batch_invariance"]
    said = _said(judge(target).verdict(case_of(op, **changes)), "batch_invariance")
    assert said.message == "alone, a token gets another byte; here it is right"
    assert said.place.field == "k"


LOAD_K = "k = tl.load(key_cache_ptr + k_at, mask=inside)"
SCALED_V = "v = v.to(tl.float32) * tl.load(v_scale_ptr + v_scale_at)"
START = "start = tl.load(seq_starts_ptr + sequence)"
BLOCK = "block = tl.load(block_table_ptr + entry).to(tl.int64)"


def test_a_constant_that_is_added_to_a_scale_fails_scale_homogeneity(judge, edited, case_of):
    """Next to 1.2 it rounds away."""
    added = SCALED_V.replace(
        "tl.load(v_scale_ptr + v_scale_at)", "(tl.load(v_scale_ptr + v_scale_at) + 5e-8)"
    )
    target = edited(GATHER, "gather_cache", (SCALED_V, added))
    case = case_of("gather_cache", **{**FP8, "v_scale": 0x3F99999A, "k_scale": 0x3DCCCCCD})
    assert _failed(judge(target).verdict(case)) == ["scale_homogeneity"]


def test_a_start_that_leaks_from_the_first_sequence_fails_batch_invariance(judge, edited, case_of):
    """Where the first sequence starts first of all, nothing is wrong."""
    leaking = f"{START}\n    start = tl.maximum(start, tl.load(seq_starts_ptr))"
    case = case_of("gather_cache", sequences=(Sequence((4,), 0, 2), Sequence((3, 1), 13, 6)))
    verdict = judge(edited(GATHER, "gather_cache", (START, leaking))).verdict(case)
    assert _failed(verdict) == ["batch_invariance"]
    assert "in a batch of the opposite order" in verdict.failed[0].violation.message


def test_an_odd_block_id_with_a_meaning_of_its_own_fails_block_permutation(judge, edited, case_of):
    marked = f"{BLOCK}\n    inside = inside & (block % 2 == 0)"
    case = case_of("gather_cache", sequences=(Sequence((4, 2), 13, 6),))
    target = edited(GATHER, "gather_cache", (BLOCK, marked))
    assert _failed(judge(target).verdict(case)) == ["block_permutation"]


def test_a_branch_on_equal_strides_fails_size1_stride(judge, edited, case_of):
    """One head: its stride is that of a dense row by chance, and nothing says that it is."""
    one_head = Geometry(num_blocks=5, block_size=16, num_kv_heads=1, head_size=32)
    changed = f"{LOAD_K}\n    k = k if key_head_stride == head_size else k + 1"
    target = edited(GATHER, "gather_cache", (LOAD_K, changed))
    verdict = judge(target).verdict(case_of("gather_cache", geometry=one_head))
    assert _failed(verdict) == ["size1_stride"]


LOOKALIKES = {
    # Two paths that do the same, told apart by strides.
    "two_paths": (LOAD_K, f"{LOAD_K}\n    k = k if key_head_stride == head_size else k + 0"),
    # The table's width decides how much is prefetched, not what is read.
    "prefetch": (LOAD_K, f"tl.load(block_table_ptr + entry, volatile=True)\n    {LOAD_K}"),
    # A scale's power of two is split off and put back.
    "split_scale": (SCALED_V, f"{SCALED_V.replace('tl.load', '0.5 * tl.load')} * 2.0"),
}


@pytest.mark.parametrize("name", LOOKALIKES)
@pytest.mark.parametrize("heads", [1, 2])
def test_a_correct_kernel_that_looks_at_the_same_things_passes(judge, edited, case_of, name, heads):
    geometry = Geometry(num_blocks=5, block_size=16, num_kv_heads=heads, head_size=32)
    target = edited(GATHER, "gather_cache", LOOKALIKES[name])
    changes = FP8 if name == "split_scale" else {}
    verdict = judge(target).verdict(case_of("gather_cache", geometry=geometry, **changes))
    assert _failed(verdict) == []
    assert verdict.hazards == ()


LAUNCH = "    gather_cache_kernel[(num_tokens, num_kv_heads)]("


@pytest.mark.parametrize(
    ("refusal", "outcome", "said"),
    [
        ("NotImplementedError('one head alone')", "not_checked", "refuses the case"),
        ("ValueError('one head alone')", "failed", "the target raises ValueError: one head alone"),
    ],
)
def test_a_target_that_refuses_the_other_case_is_not_checked_and_one_that_raises_is_red(
    judge, edited, case_of, refusal, outcome, said
):
    check = f"    if num_tokens == 1:\n        raise {refusal}\n"
    target = edited(GATHER, "gather_cache", (LAUNCH, check + LAUNCH))
    verdict = judge(target).verdict(case_of("gather_cache"))
    found = _outcome(verdict, "batch_invariance")
    assert found.outcome == outcome
    assert said in (found.reason or found.violation.message)
    assert _failed(verdict) == ["batch_invariance"] * (outcome == "failed")


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ({"layout": ("blocks_first",)}, "layout_equivariance"),
        ({"block_ids": ("shuffled",)}, "block_permutation"),
        ({"blocks_used": ("2+",)}, "batch_invariance"),
    ],
)
def test_no_case_outside_where_is_run(cpu_lane, case_of, where, name):
    from kvfuzz.engine.worker.judge import Judge
    from kvfuzz.kernels.resolve import resolve
    from kvfuzz.model.target import TargetSpec

    target = resolve(TargetSpec(ALONE[name][0]))
    case = case_of(target.info.op)
    verdict = Judge(target, None, cpu_lane, where).verdict(case)
    if name == "batch_invariance":  # the opposite order is inside, and right
        assert _outcome(verdict, name).outcome == "passed"
    else:
        reason = _outcome(verdict, name).reason
        assert "outside --where" in reason or "no plainer layout" in reason


def test_a_target_that_does_not_promise_it_is_not_held_to_batch_invariance(judge, case_of):
    import dataclasses

    import msgspec

    judged = judge("mutant:one_row_skipped")
    info = msgspec.structs.replace(judged.target.info, batch_invariant=False)
    judged._adapters["target"] = dataclasses.replace(judged.target, info=info)
    found = _outcome(judged.verdict(case_of("reshape_and_cache")), "batch_invariance")
    assert (found.outcome, found.reason) == ("not_checked", "the target does not promise it")


FAR = {
    "geometry": Geometry(num_blocks=1 << 21, block_size=16, num_kv_heads=2, head_size=32),
    "sequences": (Sequence(((1 << 21) - 2, 3), 13, 6), Sequence((77,), 0, 2)),
}


@pytest.mark.parametrize("op", ["gather_cache", "reshape_and_cache"])
@pytest.mark.parametrize("dtype", ["bf16", "e4m3fnuz"])
def test_relations_hold_and_are_decided_on_a_huge_cache(judge, case_of, op, dtype):
    changes = FP8 if dtype != "bf16" else {}
    verdict = judge(f"builtin:{op}").verdict(case_of(op, **FAR, **changes))
    assert _failed(verdict) == []
    decided = {result.name for result in verdict.results if result.outcome == "passed"}
    assert {"layout_equivariance", "block_permutation", "batch_invariance"} <= decided
    assert ("scale_homogeneity" in decided) == (dtype != "bf16")


def test_on_a_huge_cache_blocks_are_renamed_among_themselves(judge, edited, case_of):
    """The first in use is the highest, and becomes the lowest in use."""
    marked = f"{BLOCK}\n    inside = inside & ((block > 5) | (row > 2))"
    target = edited(GATHER, "gather_cache", (BLOCK, marked))
    verdict = judge(target).verdict(case_of("gather_cache", **FAR))
    assert _failed(verdict) == ["block_permutation"]
    assert "3 is 77" in verdict.failed[0].violation.message


def test_a_finding_names_some_of_many_strides(judge, case_of):
    target, op, changes = ALONE["size1_stride"]
    one = {"sequences": (Sequence((3, 1, 8), 1, 1),)}
    said = _said(judge(target).verdict(case_of(op, **{**changes, **one})), "size1_stride")
    assert "key_cache.stride(1) is 192 instead of 64" in said.message
    assert ", and 2 more change; here it is right" in said.message
