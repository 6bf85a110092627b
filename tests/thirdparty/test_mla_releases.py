"""vLLM's decode attention over MLA's latent: which releases are right, and what is wrong."""

from pathlib import Path

import pytest
from nights import by_night

from kvfuzz.errors import Exit

pytestmark = pytest.mark.thirdparty

DECODE = "vllm:decode_attention"
DENSE = "nesting=layer_first,page=exact,reach=near"
"""Pages that follow each other, as they do where each layer has a cache of its own."""
CASES = 20

CLEAN = [
    # With a token a block the stride between tokens says nothing, and is taken for that of pages.
    by_night("0.13.0", f"{DENSE},block_size=2|16|64"),
    by_night("0.18.0", f"{DENSE},scale=none|unit"),
    by_night("0.19.0", DENSE),
    by_night("0.23.0", DENSE),
    by_night("0.24.0", "reach=near"),
    by_night("0.25.0", ""),
    ("0.33.0", ""),
]


@pytest.mark.parametrize(
    "release", [by_night("0.13.0"), by_night("0.18.0"), by_night("0.19.0"), "0.23.0"]
)
def test_to_0_23_0_pages_are_taken_to_follow_each_other(campaign, vllm, release):
    """#45111; before that #37032, garbage from a model whose layers shared an allocation."""
    where = "reach=near,scale=none"
    code, (found,), _ = campaign(DECODE, where=where, sources=vllm(release), max_cases=30)
    assert code == Exit.FINDING
    assert found.seed.property == "oracle"
    scene = found.seed.case.scene
    # Block 0 is right under any stride: one more, and something behind its page.
    assert scene.num_blocks == 2
    assert scene.layers > 1 or scene.page_padding > 0
    assert scene.batch.num_tokens == 1


@pytest.mark.parametrize("release", [by_night("0.19.0"), by_night("0.23.0"), "0.24.0"])
def test_to_0_24_0_block_ids_are_multiplied_in_32_bits(campaign, vllm, release):
    where = "nesting=layer_first,page=exact,reach=past_2g_elements"
    code, (found,), _ = campaign(DECODE, where=where, sources=vllm(release), max_cases=30)
    assert code == Exit.FINDING
    assert found.seed.property == "no_overflow"
    # The first block of 16 rows of 16 + 8 elements that lies past 2**31 elements.
    assert found.seed.case.scene.num_blocks == (1 << 31) // (16 * 24) + 2


@pytest.mark.nightly
def test_in_0_18_0_values_have_the_scale_of_v_and_are_stored_by_that_of_k(campaign, vllm):
    """A latent is stored once, by K's scale; from 0.19.0 on the backend hands it over for both."""
    code, (found,), _ = campaign(DECODE, where=DENSE, sources=vllm("0.18.0"), max_cases=30)
    assert code == Exit.FINDING
    scene = found.seed.case.scene
    assert found.seed.property == "oracle"
    assert (scene.cache_dtype, scene.batch.num_tokens) == ("e4m3fnuz", 1)


@pytest.mark.parametrize(("release", "where"), CLEAN)
def test_a_release_is_clean(campaign, vllm, release, where):
    code, _, summary = campaign(
        DECODE, where=where, sources=vllm(release), max_cases=CASES, budget_s=600.0
    )
    assert (code, summary.cases, summary.refused) == (Exit.CLEAN, CASES, 0)
    assert summary.passed["oracle"] >= CASES - 2
    assert summary.facts["blocks_used"]["2+"] >= CASES // 2


def test_what_a_tree_says_is_its_domain(vllm):
    from kvfuzz.kernels.resolve import resolve
    from kvfuzz.model.target import TargetSpec

    domains = {
        release: resolve(TargetSpec(DECODE, vllm(release))).info.domain
        for release in ("0.13.0", "0.19.0", "0.33.0")
    }
    held = {release: domain.levels("cache_dtype") for release, domain in domains.items()}
    assert held["0.13.0"] == ("bf16", "fp16")
    assert held["0.19.0"] == held["0.33.0"] == ("bf16", "fp16", "e4m3fnuz")
    assert domains["0.13.0"].levels("latent_size") == ("512",)
    assert domains["0.13.0"].levels("block_size")[0] == "1"
    assert domains["0.19.0"].levels("block_size")[0] == "16"


def test_sequences_are_split_as_the_backend_says(vllm):
    """Into four parts, or by the longest sequence that the host knows of."""
    from kvfuzz.kernels import vllm_mla

    def splits(release):
        return vllm_mla._splits(Path(vllm(release)["vllm"], vllm_mla.BACKEND).read_text())

    fixed, is_fixed = splits("0.19.0")
    by_length, is_by_length = splits("0.33.0")
    assert (is_fixed, is_by_length) == (True, False)
    assert [fixed(longest) for longest in (1, 5000)] == [4, 4]
    assert [by_length(longest) for longest in (1, 1023, 1024, 1536, 5000)] == [1, 1, 2, 4, 16]
