"""Real kernels: the releases that have a bug are red, the ones that fixed it are clean."""

import pytest
from nights import more_by_night, newest_by_day

from kvfuzz.errors import Exit

pytestmark = pytest.mark.thirdparty
CASES, BY_NIGHT = 40, 60

GATHER = "vllm:cp_mha_gather_cache"
SHUFFLE_WRITER = "vllm:reshape_and_cache_shuffle"
FLASH_WRITER = "vllm:reshape_and_cache_flash"

FOUND = [
    # (target, release, where, property, what its smallest case must show)
    (GATHER, "0.18.0", "cache_dtype=bf16,order=nhd", "oracle", {"layout": "hybrid"}),  # #37228
    (GATHER, "0.13.0", "", "oracle", {"layout": "hybrid"}),  # #37228, one program a token
    (GATHER, "0.19.0", "order=nhd", "oracle", {"cache_dtype": "e4m3fnuz"}),  # #39122
    (GATHER, "0.24.0", "order=shuffle,scale=none", "oracle", {"strides": "not_dense"}),  # #43660
    (GATHER, "0.24.0", "order=shuffle,layout=kv_first", "oracle", {"cache_dtype": "e4m3fnuz"}),
    (SHUFFLE_WRITER, "0.18.0", "scale=none", "frame", {"layout": "hybrid"}),  # #39192
    # Its scales are ignored, as they were until 0.33.
    (SHUFFLE_WRITER, "0.24.0", "layout=kv_first", "oracle", {"cache_dtype": "e4m3fnuz"}),
    # The writer has the block stride by then, and the gather of the same tree has not.
    (SHUFFLE_WRITER, "0.24.0", "scale=none", "roundtrip", {"strides": "not_dense"}),
    (FLASH_WRITER, "0.19.0", "", "complete", {"order": "hnd"}),  # #37940
]

OF_OPS = [
    # (target, release, property, what its smallest case must show, its bytes at most)
    ("vllm:per_token_head_quant", "0.23.0", "oracle", {"cache_dtype": "int8"}, 512),  # #45361
    ("vllm:slot_mapping_v1", "0.24.0", "oracle", {"interleave": "beyond", "ranks": "2"}, 64),
    ("vllm:slot_mapping_v2", "0.24.0", "oracle", {"interleave": "beyond", "ranks": "2"}, 64),
]

CLEAN_OPS = [
    ("vllm:per_token_head_quant", "0.24.0"),
    ("vllm:per_token_head_quant", "0.33.0"),
    ("vllm:slot_mapping_v1", "0.29.0"),
    ("vllm:slot_mapping_v1", "0.33.0"),
    ("vllm:slot_mapping_v2", "0.13.0"),
    ("vllm:slot_mapping_v2", "0.19.0"),
    ("vllm:slot_mapping_v2", "0.29.0"),
    ("vllm:slot_mapping_v2", "0.33.0"),
]

CLEAN = [
    (FLASH_WRITER, "0.13.0", ""),
    (GATHER, "0.24.0", "order=nhd"),
    (GATHER, "0.33.0", ""),
    (SHUFFLE_WRITER, "0.24.0", "scale=none|unit,layout=kv_first"),
    (SHUFFLE_WRITER, "0.33.0", ""),
    (FLASH_WRITER, "0.19.0", "order=nhd"),
    (FLASH_WRITER, "0.24.0", ""),
    (FLASH_WRITER, "0.33.0", ""),
]


@pytest.mark.parametrize(("target", "release", "where", "name", "shows"), FOUND)
def test_a_release_with_the_bug_is_red(campaign, vllm, target, release, where, name, shows):
    from kvfuzz.model.axes import facts

    code, (found,), _ = campaign(target, where=where, sources=vllm(release), max_cases=300)
    assert code == Exit.FINDING
    assert name in {result.name for result in found.verdict.failed}
    geometry, shown = found.seed.case.geometry, facts(found.seed.case)
    assert {axis: shown[axis] for axis in shows} == shows
    assert geometry.num_blocks <= 3
    assert geometry.num_kv_heads <= 2


@pytest.mark.parametrize(("target", "release", "name", "shows", "most"), OF_OPS)
def test_a_bug_of_another_op_is_found_and_small(campaign, vllm, target, release, name, shows, most):
    from kvfuzz.model.axes import facts

    code, (found,), _ = campaign(target, sources=vllm(release), max_cases=300)
    assert code == Exit.FINDING
    assert name in {result.name for result in found.verdict.failed}
    shown = facts(found.seed.case)
    assert {axis: shown[axis] for axis in shows} == shows
    assert found.seed.case.nbytes <= most


@pytest.mark.parametrize(
    ("target", "release", "count"), more_by_night(newest_by_day(CLEAN_OPS), CASES, BY_NIGHT)
)
def test_another_op_is_clean_where_it_is_right(campaign, vllm, target, release, count):
    code, _, summary = campaign(target, sources=vllm(release), max_cases=count)
    assert (code, summary.cases, summary.refused) == (Exit.CLEAN, count, 0)
    assert summary.passed["oracle"] == count


@pytest.mark.parametrize(
    ("target", "release", "where", "count"), more_by_night(newest_by_day(CLEAN), CASES, BY_NIGHT)
)
def test_a_release_that_fixed_it_is_clean(campaign, vllm, target, release, where, count):
    code, _, summary = campaign(target, where=where, sources=vllm(release), max_cases=count)
    assert code == Exit.CLEAN
    assert summary.cases == count
    assert summary.facts["blocks_used"]["2+"] >= 20
    assert summary.refused == 0
    assert summary.passed["oracle"] == count


def test_conch_is_red_where_the_cache_has_a_head_stride_of_its_own(campaign):
    target = "conch:reshape_and_cache"
    for where in ("order=hnd", "layout=content_packed"):
        code, (found,), _ = campaign(target, where=where, out=where, max_cases=100)
        assert code == Exit.FINDING
        assert found.seed.property == "oracle"
    code, _, summary = campaign(
        target, where="order=nhd,layout=kv_first|blocks_first", max_cases=60
    )
    assert (code, summary.cases) == (Exit.CLEAN, 60)


def test_a_kernel_that_returns_at_once_shows_other_bytes_than_the_recorded_ones(
    campaign, vllm, tmp_path
):
    import shutil

    from kvfuzz.engine.replay import replay

    where = "cache_dtype=bf16,order=nhd"
    _, (found,), _ = campaign(GATHER, where=where, sources=vllm("0.18.0"), max_cases=300)
    again = replay(found.seed, sources=vllm("0.18.0"))
    assert (again.exit_code, again.same_bytes) == (Exit.FINDING, True)

    tree = tmp_path / "vllm-early-return"
    shutil.copytree(vllm("0.18.0")["vllm"], tree)
    file = tree / "vllm/v1/attention/backends/rocm_aiter_fa.py"
    text = file.read_text()
    start = text.index("def cp_mha_gather_cache_kernel(")
    at = text.index("        token_id = tl.program_id(0)", start)
    file.write_text(text[:at] + "        return\n" + text[at:])
    silent = replay(found.seed, sources={"vllm": str(tree)})
    assert silent.exit_code == Exit.FINDING
    assert not silent.same_bytes
    assert "complete" in {result.name for result in silent.verdict.failed}
