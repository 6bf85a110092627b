"""vLLM's merge of two parts of attention: what its releases take, and which of them are wrong."""

import pytest
from nights import by_night

from kvfuzz.errors import Exit
from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.axes import facts
from kvfuzz.model.target import TargetSpec

pytestmark = pytest.mark.thirdparty

TARGET = "vllm:merge_attn_states"
ONE_PART = "empties=none|prefix|suffix"

FOUND = [
    # (release, where, what its smallest case must show, its bytes at most)
    ("0.13.0", "", {"empties": "both", "num_tokens": "1"}, 128),  # #39148
    ("0.24.0", "", {"empties": "both", "num_tokens": "1"}, 128),
    # A part that was merged before is dense, and one that the backend cuts off is not (#42642).
    ("0.24.0", ONE_PART, {"suffix_heads": "other", "num_heads": "2"}, 256),
]
CLEAN = [
    by_night("0.13.0", ONE_PART),
    by_night("0.19.0", ONE_PART),
    ("0.24.0", f"{ONE_PART},suffix_heads=same"),
    ("0.33.0", ""),
]


@pytest.mark.parametrize(("release", "where", "shows", "most"), FOUND)
def test_a_release_with_a_bug_is_red_and_its_case_small(
    campaign, vllm, release, where, shows, most
):
    code, (found,), _ = campaign(TARGET, where=where, sources=vllm(release), max_cases=300)
    assert code == Exit.FINDING
    assert "oracle" in {result.name for result in found.verdict.failed}
    assert facts(found.seed.case).items() >= shows.items()
    assert found.seed.case.nbytes <= most


@pytest.mark.parametrize(("release", "where"), CLEAN)
def test_a_release_is_clean_where_it_is_right(campaign, vllm, release, where):
    code, _, summary = campaign(TARGET, where=where, sources=vllm(release), max_cases=50)
    assert (code, summary.cases, summary.refused) == (Exit.CLEAN, 50, 0)
    assert summary.passed["oracle"] == summary.passed["dead_bytes"] == 50


@pytest.mark.parametrize(
    ("release", "lse", "context", "suffix"),
    [
        ("0.13.0", ("by_head",), ("all",), ("same",)),
        ("0.19.0", ("by_head",), ("all",), ("same",)),
        ("0.24.0", ("by_head",), ("all", "some"), ("same", "other")),
        ("0.33.0", ("by_head", "wider", "by_token"), ("all", "some"), ("same",)),
    ],
)
def test_what_a_release_takes_is_read_off_its_source(vllm, release, lse, context, suffix):
    info = resolve(TargetSpec(TARGET, vllm(release))).info
    levels = info.domain.levels
    assert levels("suffix_heads") == suffix
    assert levels("with_context") == context
    assert levels("prefix_lse") == levels("suffix_lse") == lse
    assert levels("output_lse") == ("none", *lse)
    assert levels("suffix_rows") == ("dense",)
    assert levels("output_heads") == ("dense", "padded")
    assert info.dead.may_hold == "finite"
