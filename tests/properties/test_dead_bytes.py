"""Bytes that no result may depend on: with an influence a finding, without one a hazard at most."""

import dataclasses

import pytest

from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import Sequence

GATHER, WRITE = "kernels/builtin/gather_cache.py", "kernels/builtin/reshape_and_cache.py"
LOAD_K = "k = tl.load(key_cache_ptr + k_at, mask=inside)"
LOAD_V = "v = tl.load(value_cache_ptr + v_at, mask=inside)"
SCALE_V = "v = v.to(tl.float32) * tl.load(v_scale_ptr + v_scale_at)"
STORE_K = "tl.store(key_cache_ptr + k_at, k.to(key_cache_ptr.dtype.element_ty), mask=inside)"
FP8 = {"cache_dtype": "e4m3fnuz", "fill_seed": 3}


def _failed(verdict):
    return [result.name for result in verdict.failed]


def _hazards(verdict):
    return [hazard.kind for hazard in verdict.hazards]


@pytest.fixture
def gather_case(gather_scene, scene_with):
    def make(**changes):
        return lower(scene_with(gather_scene, **changes))

    return make


def test_zero_times_a_dead_element_fails_dead_bytes_alone_and_only_by_its_nans(judge, gather_case):
    judged = judge("mutant:adds_zero_times_dead")
    case = gather_case(**FP8, sequences=(Sequence((3, 1), 13, 2),))
    verdict = judged.verdict(case)
    assert _failed(verdict) == ["dead_bytes"]
    violation = verdict.failed[0].violation
    assert violation.message.startswith("NaNs in bytes that nothing may depend on change this one")
    assert "the target reads byte" in violation.message
    assert "(layer.0 v, block 3, head 0, token 0, dim 0)" in violation.message
    assert violation.place.field == "value_out"


@pytest.mark.parametrize("declared", ["finite", "nan"])
def test_a_file_that_relies_on_finite_dead_bytes_declares_it(judge, edited, gather_case, declared):
    added = f"{SCALE_V} + 0 * tl.load(value_cache_ptr + block * v_block_stride).to(tl.float32)"
    declaration = ("FP8 = (", f'KVFUZZ_DEAD = "{declared}"\nFP8 = (')
    judged = judge(edited(GATHER, "gather_cache", (SCALE_V, added), declaration))
    assert judged.target.info.dead.may_hold == declared
    case = gather_case(**FP8, sequences=(Sequence((3, 1), 13, 2),))
    assert _failed(judged.verdict(case)) == ["dead_bytes"] * (declared == "nan")


@pytest.mark.parametrize(
    ("loaded", "said"),
    [
        # The value that decides is finite: the level of NaNs is not needed.
        ("tl.where(tl.load(key_cache_ptr + block * k_block_stride) == 0, 0.0, k)", "zeros"),
        ("tl.where(tl.load(key_ptr + dim, mask=inside) == 0, 0.0, k)", "zeros"),
    ],
    ids=["cache", "output"],
)
def test_a_dead_byte_that_decides_a_result_fails_dead_bytes_alone(
    judge, edited, gather_case, loaded, said
):
    changed = f"{LOAD_K}\n    k = {loaded}.to(k.dtype)"
    verdict = judge(edited(GATHER, "gather_cache", (LOAD_K, changed))).verdict(gather_case())
    assert _failed(verdict)[0] == "dead_bytes"
    assert verdict.failed[0].violation.message.startswith(f"{said} in bytes")


def test_a_stale_entry_of_the_block_table_that_decides_a_result_fails_dead_bytes(
    judge, edited, gather_case
):
    """The last column is past every sequence's blocks; it names block 4 of 5 by chance."""
    stale = "tl.load(block_table_ptr + sequence * block_table_stride + block_table_stride - 1)"
    changed = f"{LOAD_K}\n    k = tl.where({stale} == STALE, k, 0.0).to(k.dtype)"
    case = gather_case(sequences=(Sequence((3, 1), 13, 6),), table_width=3)
    last = case.integers(case.steps[0], "block_table")[-1]
    target = edited(GATHER, "gather_cache", (LOAD_K, changed.replace("STALE", str(last))))
    verdict = judge(target).verdict(case)
    assert _failed(verdict)[0] == "dead_bytes"
    assert "of block_table" in verdict.failed[0].violation.message


def test_what_a_written_slot_held_before_decides_nothing(judge, edited, write_scene):
    """Added up instead of stored, with what was there once a zero: a cache fresh from calloc."""
    old = "tl.load(key_cache_ptr + k_at, mask=inside)"
    kept = STORE_K.replace("k.to(", f"tl.where({old} == 0, k, k + 0 * {old}).to(")
    target = edited(WRITE, "reshape_and_cache", (STORE_K, kept))
    assert "dead_bytes" in _failed(judge(target).verdict(lower(write_scene)))


@pytest.mark.parametrize(
    ("discarded", "is_read"),
    [
        ("tl.load(key_cache_ptr + dim, mask=inside, volatile=True)", True),
        ("tl.load(block_table_ptr + block_table_stride - 1, volatile=True)", True),
        ("tl.load(key_cache_ptr + dim, mask=dim < 0, volatile=True)", False),
    ],
)
def test_a_dead_byte_that_is_read_and_thrown_away_is_a_hazard(
    judge, edited, gather_case, discarded, is_read
):
    target = edited(GATHER, "gather_cache", (LOAD_K, f"{discarded}\n    {LOAD_K}"))
    verdict = judge(target).verdict(gather_case(sequences=(Sequence((3, 1), 13, 6),)))
    assert _failed(verdict) == []
    assert _hazards(verdict) == ["dead_read"] * is_read


def test_a_dead_value_under_a_select_is_a_hazard(judge, edited, gather_case):
    """Correct attention loads whole tiles and selects afterwards, NaNs and all."""
    tile = (
        f"all_k = tl.load(key_cache_ptr + dim)\n    {LOAD_K}\n    k = tl.where(dim >= 0, k, all_k)"
    )
    verdict = judge(edited(GATHER, "gather_cache", (LOAD_K, tile))).verdict(gather_case())
    assert _failed(verdict) == []
    assert _hazards(verdict) == ["dead_read"]


@pytest.mark.parametrize("layout", ["hybrid", "content_packed"])
def test_a_write_that_looks_at_a_padding_row_is_seen(
    judge, edited, write_scene, scene_with, layout
):
    """Row 0 is padding, so that nobody may look at it."""
    states = (0,) if layout == "hybrid" else ()
    scene = scene_with(write_scene, layout=layout, state_blocks=states)
    load = "k = tl.load(key_ptr + key_at, mask=inside)"
    wrong = (
        f"{load}\n    k = tl.where(tl.load(key_ptr + dim, mask=inside) == 0, 0.0, k).to(k.dtype)"
    )
    target = edited(WRITE, "reshape_and_cache", (load, wrong))
    assert _failed(judge(target).verdict(lower(scene)))[0] == "dead_bytes"


LAUNCH = "    gather_cache_kernel[(num_tokens, num_kv_heads)]("


@pytest.mark.parametrize("has_influence", [True, False])
def test_what_torch_reads_is_in_no_record_and_watched_all_the_same(
    judge, edited, gather_case, has_influence
):
    looks = "bool((key_cache[0, 0, 0] == 0).all())"
    after = (
        f"    if {looks}:\n        head_size = head_size - 1\n"
        if has_influence
        else f"    {looks}\n"
    )
    target = edited(GATHER, "gather_cache", (LAUNCH, after + LAUNCH))
    verdict = judge(target).verdict(gather_case())
    assert _failed(verdict) == ["dead_bytes"] * has_influence
    if has_influence:
        assert "is not recorded" in verdict.failed[0].violation.message


def test_no_variant_runs_where_no_dead_byte_was_read(judge, gather_case):
    from kvfuzz.oracles.dead_bytes import dead_byte_variants
    from kvfuzz.oracles.properties import Variant

    run, _ = judge("builtin:gather_cache")._run(Variant(gather_case()))
    assert dead_byte_variants(run) == {}
    assert dead_byte_variants(dataclasses.replace(run, read=None)).keys() == {
        "dead_zero",
        "dead_small",
        "dead_nan",
    }
    assert dead_byte_variants(dataclasses.replace(run, torch_ops=("aten.sum",)))


def test_a_read_far_from_the_batch_of_a_huge_cache_is_not_passed(judge, edited, gather_case):
    far = {
        "geometry": Geometry(num_blocks=1 << 21, block_size=16, num_kv_heads=2, head_size=32),
        "sequences": (Sequence(((1 << 21) - 2, 3), 13, 6),),
    }
    looks = f"tl.load(key_cache_ptr + (1 << 28) + dim, volatile=True)\n    {LOAD_K}"
    verdict = judge(edited(GATHER, "gather_cache", (LOAD_K, looks))).verdict(gather_case(**far))
    (found,) = [result for result in verdict.results if result.name == "dead_bytes"]
    assert found.outcome == "not_checked"
    assert "far from the batch" in found.reason
