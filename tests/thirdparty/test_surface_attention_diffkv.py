"""unified_attention_diffkv of vLLM: values of another size than keys, in one content dimension."""

from dataclasses import dataclass, replace

import pytest
import torch
from attention_batches import DECODE, FP8, MIXED, PREFILL, STEPS, Shape, allocate, segments
from attention_launch import Launcher
from attention_reference import (
    LOW_SCORES,
    Computed,
    Rounding,
    Softmax,
    assert_right,
    unit,
    unseen_errors,
)

pytestmark = pytest.mark.thirdparty

FILE = "vllm/v1/attention/ops/triton_unified_attention_diffkv.py"
HELPERS = "vllm/v1/attention/ops/triton_attention_helpers.py"
EVERY = ("0.24.0", "0.33.0")
NEWEST = EVERY[-1:]
LAYOUT = {"0.24.0": "content_packed_nhd", "0.33.0": "content_packed"}
SEGMENTS = 4
SCALE = 48**-0.5
PLAIN = Softmax(SCALE)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5])


@dataclass(frozen=True)
class Variant:
    """A batch and how the function is called on it, in the releases that have this call."""

    shape: Shape
    softmax: Softmax = PLAIN
    split: bool = False
    releases: tuple[str, ...] = EVERY


MIX = Shape(MIXED, head_size=48, head_size_v=32)
DECODES = replace(MIX, sequences=DECODE)
VARIANTS = {
    "prefill": Variant(replace(MIX, sequences=PREFILL)),
    "mixed": Variant(MIX),
    "mixed_window": Variant(MIX, Softmax(SCALE, window=20)),
    "window_low_scores": Variant(
        replace(MIX, sequences=STEPS, score=-20.0), Softmax(SCALE, window=20)
    ),
    "mixed_softcap": Variant(MIX, Softmax(SCALE, softcap=2.0)),
    "mixed_sinks": Variant(MIX, Softmax(SCALE, sinks=SINKS)),
    "mixed_fp8": Variant(replace(MIX, cache_dtype=FP8), releases=NEWEST),
    "decode": Variant(DECODES),
    "decode_split": Variant(DECODES, split=True),
    "decode_split_window": Variant(DECODES, Softmax(SCALE, window=20), split=True),
    "decode_split_fp8": Variant(replace(DECODES, cache_dtype=FP8), split=True, releases=NEWEST),
    "speculative_split": Variant(
        replace(MIX, sequences=((35, 4), (10, 3), (62, 2))), split=True, releases=NEWEST
    ),
}
CASES = [
    pytest.param(
        variant,
        release,
        id=f"unified_attention_diffkv-{variant}-{release}",
        marks=pytest.mark.xfail(reason=LOW_SCORES)
        if (variant, release) == ("window_low_scores", "0.24.0")
        else (),
    )
    for variant, described in VARIANTS.items()
    for release in described.releases
]
RIGHT = [case for case in CASES if not case.marks]


@pytest.fixture
def outcome(launcher, tree):
    def make(variant: str, release: str):
        tree(release).load(HELPERS)
        function = tree(release).load(FILE).unified_attention_diffkv
        described = VARIANTS[variant]
        described = replace(described, shape=replace(described.shape, layout=LAYOUT[release]))
        return launcher.once((variant, release), lambda on: _launch(on, function, described))

    return make


def _launch(on: Launcher, function, variant: Variant) -> Computed:
    batch, softmax = allocate(on, variant.shape), variant.softmax
    size = batch.value_cache.shape[-1]
    out = on.room("out", (*batch.query.shape[:2], size), batch.query.dtype)
    scales = {"k_descale": batch.k_scale, "v_descale": batch.v_scale}
    function(
        q=batch.query,
        k=batch.key_cache,
        v=batch.value_cache,
        out=out,
        cu_seqlens_q=batch.query_start_loc,
        seqused_k=batch.seq_lens,
        softmax_scale=softmax.scale,
        causal=True,
        window_size=(softmax.window - 1, softmax.window - 1),
        block_table=batch.block_table,
        softcap=softmax.softcap,
        max_seqlen_q=batch.max_query_len,
        sinks=None if softmax.sinks is None else on.given("sinks", softmax.sinks),
        **(segments(on, batch, SEGMENTS, size) if variant.split else {}),
        **(scales if batch.cache.dtype == FP8 else {}),
    )
    rounding = Rounding(p=unit(batch.query.dtype), out=unit(out.dtype))
    return Computed(batch, out, softmax, rounding)


@pytest.mark.parametrize(("variant", "release"), CASES)
def test_it_computes_attention_over_the_cache(outcome, variant, release):
    assert_right(outcome(variant, release))


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(("variant", "release"), RIGHT)
def test_a_token_read_from_another_slot_would_show(outcome, variant, release, side):
    assert unseen_errors(outcome(variant, release).result, side) == []
