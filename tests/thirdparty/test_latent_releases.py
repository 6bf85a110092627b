"""vLLM's kernels for the sparse indexer's cache: which releases are right, and which overflow."""

import pytest
from nights import by_night, newest_by_day

from kvfuzz.errors import Exit

pytestmark = pytest.mark.thirdparty

V4_WRITER = "vllm:quantize_and_insert_k_cache"
WRITER, GATHER = "vllm:indexer_quant_and_cache", "vllm:gather_indexer"
NEAR = "reach=near"

CLEAN = [
    # Slots are 64 bits wide, and with them what the writer multiplies.
    (WRITER, "0.18.0", ""),
    (WRITER, "0.23.0", ""),
    (WRITER, "0.24.0", ""),
    (WRITER, "0.33.0", ""),
    (GATHER, "0.18.0", NEAR),
    (GATHER, "0.23.0", NEAR),
    (GATHER, "0.24.0", ""),
    (GATHER, "0.33.0", ""),
    (V4_WRITER, "0.23.0", ""),
    (V4_WRITER, "0.33.0", ""),
]


@pytest.mark.parametrize("release", [by_night("0.18.0"), by_night("0.19.0"), "0.23.0"])
def test_to_0_23_0_the_gather_multiplies_block_ids_in_32_bits(campaign, vllm, release):
    # Of tiles the first such block is another, and a block has several tokens.
    where = "page_form=flat"
    code, (found,), _ = campaign(GATHER, where=where, sources=vllm(release), max_cases=150)
    assert code == Exit.FINDING
    assert found.seed.property == "no_overflow"
    scene = found.seed.case.scene
    assert (scene.block_size, scene.layers, scene.batch.num_tokens) == (1, 1, 1)
    # The first block of rows of 32 codes and a scale that lies past 2**31 bytes.
    assert scene.num_blocks == (1 << 31) // 36 + 2


@pytest.mark.parametrize(("target", "release", "where"), newest_by_day(CLEAN))
def test_a_release_is_clean(campaign, vllm, target, release, where):
    code, _, summary = campaign(target, where=where, sources=vllm(release), max_cases=60)
    assert (code, summary.cases, summary.refused) == (Exit.CLEAN, 60, 0)
    assert summary.passed["oracle"] == 60
    assert summary.facts["blocks_used"]["2+"] >= 30


def test_tiles_are_in_the_domain_of_the_releases_that_have_them(vllm):
    from kvfuzz.kernels.resolve import resolve
    from kvfuzz.model.target import TargetSpec
    from kvfuzz.strategies.rows import space

    def forms(release):
        domain = resolve(TargetSpec(WRITER, vllm(release))).info.domain
        within = space("indexer_quant_and_cache", domain)
        rows = [within.levels[within.axes.index(axis)] for axis in ("page_form", "block_size")]
        return within.possible(()), rows[1]

    assert forms("0.18.0") == ((1,), ("1",))  # row by row, a token a block
    assert forms("0.23.0") == ((0, 1), ("1", "64"))
    assert forms("0.33.0")[1] == ("1", "16", "32", "48", "64", "128", "544", "784")
