"""Attention of vLLM and conch over pages: which releases are right, and what is wrong elsewhere."""

import pytest
from nights import by_night

from kvfuzz.errors import Exit, NotCheckedError

pytestmark = pytest.mark.thirdparty

UNIFIED, DESCRIPTORS = "vllm:unified_attention", "vllm:unified_attention_descriptors"
DIFFKV = "vllm:unified_attention_diffkv"
PAGED, CHUNKED = "vllm:paged_attention_2d", "vllm:chunked_prefill_paged_decode"
CONCH = ("conch:paged_attention", "conch:varlen_attention", "conch:unified_attention")
CASES = 20
CLEAN = [
    (UNIFIED, "0.33.0"),
    (PAGED, "0.33.0"),
    by_night(CHUNKED, "0.33.0"),
]


@pytest.mark.parametrize(("target", "release"), CLEAN)
def test_a_release_is_clean(campaign, vllm, target, release):
    code, _, summary = campaign(target, sources=vllm(release), max_cases=CASES)
    assert (code, summary.cases, summary.refused) == (Exit.CLEAN, CASES, 0)
    assert summary.passed["oracle"] >= CASES - 2  # the rest has no bound
    assert summary.facts["blocks_used"]["2+"] >= CASES // 2


@pytest.mark.parametrize(
    ("target", "where"),
    [
        (UNIFIED, "query=quantised"),
        by_night(UNIFIED, "granularity=token_head_inline"),
        by_night(DIFFKV, "value_size=narrower|wider"),
        by_night(DIFFKV, "query=quantised"),
    ],
)
def test_what_few_caches_have_is_clean(campaign, vllm, target, where):
    """Weights held in fp8 are in the bound, which some cases then have none of."""
    code, _, summary = campaign(target, where=where, sources=vllm("0.33.0"), max_cases=CASES)
    assert (code, summary.cases, summary.refused) == (Exit.CLEAN, CASES, 0)
    assert summary.passed["oracle"] >= CASES * 3 // 4
    assert summary.passed["dead_bytes"] == CASES


@pytest.fixture
def allowed(vllm):
    """What a target of a release lets an axis be."""
    from kvfuzz.kernels.resolve import resolve
    from kvfuzz.model.target import TargetSpec

    def look(target, release, axis, arch="gfx942"):
        return set(resolve(TargetSpec(target, vllm(release)), arch=arch).info.domain.allowed[axis])

    return look


@pytest.mark.parametrize(
    ("target", "release"),
    [(UNIFIED, "0.13.0"), (UNIFIED, "0.33.0"), (DIFFKV, "0.33.0"), (DESCRIPTORS, "0.33.0")],
)
def test_no_head_is_drawn_that_a_backend_refuses(allowed, target, release):
    """On CUDA Triton has no dot over fewer than 16 elements: a small head is a crash there."""
    sizes = allowed(target, release, "head_size")
    assert sizes == {"32", "64", "80", "96", "128", "192", "256"}


def test_rocm_attn_lists_its_heads(allowed):
    sizes = {"32", "64", "96", "128", "192", "256"}
    for target in PAGED, CHUNKED:
        assert allowed(target, "0.13.0", "head_size") == sizes
        assert allowed(target, "0.33.0", "head_size") == sizes | {"80"}


def test_on_cuda_no_part_of_a_row_is_too_small_for_a_dot(allowed):
    decode = "vllm:decode_attention"
    assert allowed(decode, "0.33.0", "rope_size") == {"8", "16", "64"}
    assert allowed(decode, "0.33.0", "rope_size", "sm_90") == {"16", "64"}


def test_on_cuda_no_backend_takes_descriptors(allowed):
    with pytest.raises(NotCheckedError, match="XPU"):
        allowed(DESCRIPTORS, "0.33.0", "head_size", "sm_90")


def test_every_kernel_of_others_says_which_queries_it_takes(allowed):
    for target in (*CONCH, UNIFIED, DIFFKV, PAGED, CHUNKED, "vllm:shared_kv_attention"):
        queries = allowed(target, "0.33.0", "query")
        assert queries == ({"model", "quantised"} if target in (UNIFIED, DIFFKV) else {"model"})


def test_queries_are_quantised_where_a_backend_does_so(allowed):
    def queries(release, arch):
        return allowed(UNIFIED, release, "query", arch)

    assert queries("0.33.0", "gfx942") == {"model", "quantised"}
    assert queries("0.33.0", "gfx90a") == {"model"}
    assert queries("0.30.0", "gfx942") == {"model"}
    assert queries("0.19.0", "gfx942") == {"model"}


@pytest.mark.parametrize(
    ("target", "release"),
    [
        (PAGED, "0.24.0"),
        by_night(CHUNKED, "0.24.0"),
        by_night(DESCRIPTORS, "0.33.0"),
    ],
)
def test_slots_behind_a_sequence_are_multiplied_by_zero(campaign, vllm, target, release):
    """vLLM #47305, fixed in 0.25.0; by descriptors it is there to this day."""
    code, (found,), _ = campaign(target, sources=vllm(release), max_cases=CASES)
    assert (code, found.seed.property) == (Exit.FINDING, "dead_bytes")
    scene = found.seed.case.scene
    assert (scene.num_query_heads, len(scene.batch.sequences)) == (1, 1)


@pytest.mark.nightly
def test_up_to_0_24_0_a_tile_without_a_visible_token_ends_a_row_in_half_precision(campaign, vllm):
    where = "numbers=low,window=cuts,phase=extend|prefill|mixed,model_dtype=fp16,cache_dtype=fp16"
    code, found, _ = campaign(UNIFIED, where=where, sources=vllm("0.24.0"), max_cases=CASES)
    assert (code, {each.seed.property for each in found}) == (Exit.FINDING, {"oracle"})
    code, found, _ = campaign(UNIFIED, where=where, sources=vllm("0.33.0"), max_cases=CASES // 2)
    assert (code, list(found)) == (Exit.CLEAN, [])


@pytest.mark.nightly
def test_of_diffkv_the_same_is_true_up_to_0_32_0(campaign, vllm):
    where = "numbers=low,window=cuts,phase=extend,model_dtype=fp16,cache_dtype=fp16"
    code, found, _ = campaign(DIFFKV, where=where, sources=vllm("0.32.0"), max_cases=40)
    assert (code, {each.seed.property for each in found}) == (Exit.FINDING, {"oracle"})
    code, found, _ = campaign(DIFFKV, where=where, sources=vllm("0.33.0"), max_cases=CASES // 2)
    assert (code, list(found)) == (Exit.CLEAN, [])


@pytest.mark.nightly
@pytest.mark.parametrize("target", CONCH)
def test_conch_is_asked_for_nothing_that_it_refuses(campaign, target):
    effort = {"keep_going": True, "shrink_s": 0.1, "reduce_s": 0.1, "extent_s": 0.0}
    _, found, summary = campaign(target, where="reach=near", max_cases=CASES, **effort)
    assert (summary.cases, summary.refused) == (CASES, 0)
    assert summary.facts["query"]["quantised"] == 0
    assert "crash" not in {each.seed.property for each in found}


@pytest.mark.nightly
def test_conch_multiplies_block_ids_in_32_bits(campaign):
    code, (found,), _ = campaign(
        "conch:paged_attention", where="reach=past_2g_elements", max_cases=CASES
    )
    assert (code, found.seed.property) == (Exit.FINDING, "no_overflow")


@pytest.mark.nightly
def test_conchs_varlen_attention_takes_a_context_for_none(campaign):
    where = "phase=extend,cache_dtype=fp32"
    code, (found,), _ = campaign("conch:varlen_attention", where=where, max_cases=CASES)
    assert (code, found.seed.property) == (Exit.FINDING, "oracle")
    (sequence,) = found.seed.case.scene.batch.sequences
    assert (sequence.start, sequence.length) == (1, 2)
    where = "phase=prefill|decode,cache_dtype=fp32,reach=near"
    code, found, _ = campaign("conch:varlen_attention", where=where, max_cases=CASES)
    assert (code, list(found)) == (Exit.CLEAN, [])
