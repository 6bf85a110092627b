"""Real kernels on whole pages and states: what releases pass, and where they must not be asked."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from nights import by_night, more_by_night, newest_by_day

from kvfuzz.errors import Exit
from kvfuzz.model.layout import Geometry
from kvfuzz.model.ops.op_case import lower_op
from kvfuzz.model.ops.page_scene import PageScene
from kvfuzz.model.plan import AttentionLayer

pytestmark = pytest.mark.thirdparty
CASES, BY_NIGHT = 40, 60

ZERO, SWAP, STATES = "vllm:zero_blocks", "vllm:swap_blocks", "vllm:copy_states"
CLEAN = [
    (ZERO, "0.18.0"),
    (ZERO, "0.24.0"),
    (ZERO, "0.33.0"),
    (SWAP, "0.24.0"),
    (SWAP, "0.33.0"),
    (STATES, "0.18.0"),
    (STATES, "0.24.0"),
    (STATES, "0.33.0"),
]


def _is_clean(code, summary, count):
    assert (code, summary.cases, summary.refused) == (Exit.CLEAN, count, 0)
    assert summary.passed["oracle"] == summary.passed["frame"] == count
    assert summary.facts["reach"]["past_2g_elements"] >= 1


@pytest.mark.parametrize(
    ("target", "release", "count"), more_by_night(newest_by_day(CLEAN), CASES, BY_NIGHT)
)
def test_a_release_is_clean(campaign, vllm, target, release, count):
    code, _, summary = campaign(target, sources=vllm(release), max_cases=count)
    _is_clean(code, summary, count)


@pytest.mark.parametrize("count", [CASES, by_night(BY_NIGHT)])
def test_conchs_copy_is_clean(campaign, count):
    code, _, summary = campaign("conch:copy_blocks", max_cases=count)
    _is_clean(code, summary, count)
    assert min(summary.facts["order"][each] for each in ("nhd", "hnd", "shuffle")) > 5


def _packed(index):
    """Block 1 of layer `index` of two, which lie side by side in each block."""
    layer = AttentionLayer(
        "layer", "kv_cache", "blocks_first", "nhd", Geometry(3, 16, 1, 32), "bf16", "block_first"
    )
    return PageScene("zero_blocks", layer, ((1,),), layers=2, index=index)


def test_the_zeroer_of_0_24_clears_as_far_as_the_next_block_of_a_packed_cache(judge, vllm):
    """From the second layer on that is the first layer's page of the next block. The engine asked
    it for models with Mamba alone, whose caches were not packed: such caches are not in its domain.
    """
    judged = judge(ZERO, **vllm("0.24.0"))
    assert judged.target.info.domain.levels("nesting") == ("layer_first",)
    for index, place in ((0, (1, "layer.1")), (1, (2, "layer.0"))):
        (found,) = judged.verdict(lower_op(_packed(index))).failed
        wrong = found.violation.place
        assert (found.name, wrong.coordinate["block"], wrong.layer) == ("frame", *place)
    with_sizes = judge(ZERO, **vllm("0.33.0"))
    assert "block_first" in with_sizes.target.info.domain.levels("nesting")
    for index in (0, 1):
        assert not with_sizes.verdict(lower_op(_packed(index))).failed


def test_the_zeroer_of_0_33_clears_all_layers_of_a_block_whose_heads_lie_outside_them(judge, vllm):
    """It says so: who gets a block gets it in every layer."""
    judged = judge(ZERO, **vllm("0.33.0"))
    layer = replace(
        _packed(0).layer,
        layout="content_packed",
        order="hnd",
        nesting="block_head_first",
        geometry=Geometry(3, 16, 2, 32),
    )
    (found,) = judged.verdict(lower_op(replace(_packed(0), layer=layer))).failed
    place = found.violation.place
    assert (found.name, place.coordinate["block"], place.layer) == ("frame", 1, "layer.1")
    assert "block_head_first" not in judged.target.info.domain.levels("nesting")


@pytest.mark.parametrize(
    ("target", "file", "old", "new"),
    [
        (
            ZERO,
            "vllm/v1/worker/utils.py",
            "seg_block_strides.append(logical_block_stride_bytes // 4)",
            "seg_block_strides.append(kernel_page_bytes // 4)",
        ),
        (
            SWAP,
            "vllm/v1/kv_offload/cpu/swap_blocks_triton.py",
            "for start in range(0, words, WORDS_PER_CHUNK):",
            "for start in range(0, words - WORDS_PER_CHUNK, WORDS_PER_CHUNK):",
        ),
        (
            STATES,
            "vllm/v1/worker/mamba_utils.py",
            "copy_spec.num_elements * state.element_size()",
            "copy_spec.num_elements",
        ),
    ],
    ids=[ZERO, SWAP, STATES],
)
def test_a_release_with_one_line_broken_is_red(campaign, vllm, tmp_path, target, file, old, new):
    text = (Path(vllm("0.33.0")["vllm"]) / file).read_text()
    assert text.count(old) == 1
    broken = tmp_path / "tree" / file
    broken.parent.mkdir(parents=True)
    broken.write_text(text.replace(old, new))
    sources = {"vllm": str(tmp_path / "tree")}
    code, found, _ = campaign(target, sources=sources, max_cases=150, budget_s=60.0)
    assert code == Exit.FINDING
    assert {"oracle", "complete", "frame"} & {result.name for result in found[0].verdict.failed}
    scene = found[0].seed.case.scene
    entries = scene.pairs if target == STATES else scene.entries
    assert len(entries) == 1
