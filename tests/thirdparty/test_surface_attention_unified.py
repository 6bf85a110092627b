"""unified_attention of vLLM, in each release: 2D and split-KV, over the layouts of its era."""

import inspect
from dataclasses import dataclass, replace

import pytest
import torch
from attention_batches import DECODE, FP8, GARBAGE, MIXED, PREFILL, STEPS, Shape, allocate, segments
from attention_launch import KVQuantMode, Launcher
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

FILES = (
    "vllm/v1/attention/ops/triton_unified_attention.py",
    "vllm/attention/ops/triton_unified_attention.py",
)
HELPERS = "vllm/v1/attention/ops/triton_attention_helpers.py"
LAYOUT = {
    "0.13.0": "kv_first",
    "0.18.0": "blocks_first",
    "0.19.0": "blocks_first",
    "0.24.0": "blocks_first",
    "0.33.0": "content_packed",
}
EVERY = tuple(LAYOUT)
SEGMENTS = 4
SCALE = 32**-0.5
PLAIN = Softmax(SCALE)


@dataclass(frozen=True)
class Variant:
    """A batch, how the function is called on it, and the releases that have this call."""

    shape: Shape
    softmax: Softmax = PLAIN
    split: bool = False
    options: tuple[tuple[str, object], ...] = ()
    releases: tuple[str, ...] = EVERY


DECODES, MIX = Shape(DECODE), Shape(MIXED)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625])
TD = (("use_td", True),)
WITH_TD = ("0.24.0", "0.33.0")
UNMASKED = "upstream: descriptors load slots past seq_len, and 0 * NaN is NaN (as in #47305)"

VARIANTS = {
    "prefill": Variant(Shape(PREFILL)),
    "decode": Variant(DECODES),
    "decode_split": Variant(DECODES, split=True),
    "mixed": Variant(MIX),
    "mixed_bf16": Variant(replace(MIX, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)),
    "mixed_head_48": Variant(replace(MIX, head_size=48), Softmax(48**-0.5)),
    "mixed_hnd": Variant(replace(MIX, layout="blocks_first_hnd")),
    "mixed_window": Variant(MIX, Softmax(SCALE, window=20)),
    "mixed_low_scores": Variant(replace(MIX, score=-20.0)),
    "window_low_scores": Variant(
        replace(MIX, sequences=STEPS, score=-20.0), Softmax(SCALE, window=20)
    ),
    "decode_split_window_low_scores": Variant(
        replace(DECODES, score=-20.0), Softmax(SCALE, window=20), split=True
    ),
    "mixed_softcap": Variant(MIX, Softmax(SCALE, softcap=2.0)),
    "mixed_sinks": Variant(MIX, Softmax(SCALE, sinks=SINKS)),
    "mixed_alibi": Variant(MIX, Softmax(SCALE, slopes=SLOPES)),
    "mixed_fp8": Variant(replace(MIX, cache_dtype=FP8)),
    "decode_split_window": Variant(DECODES, Softmax(SCALE, window=20), split=True),
    "decode_split_softcap": Variant(DECODES, Softmax(SCALE, softcap=2.0), split=True),
    "decode_split_sinks": Variant(DECODES, Softmax(SCALE, sinks=SINKS), split=True),
    "decode_split_fp8": Variant(replace(DECODES, cache_dtype=FP8), split=True),
    "mixed_descriptor": Variant(
        replace(MIX, num_query_heads=4, poison=GARBAGE), options=TD, releases=WITH_TD
    ),
    "mixed_descriptor_group_of_3": Variant(
        replace(MIX, poison=GARBAGE), options=TD, releases=WITH_TD
    ),
    "mixed_descriptor_nan": Variant(MIX, options=TD, releases=WITH_TD),
    "decode_split_descriptor": Variant(
        replace(DECODES, num_query_heads=4, poison=GARBAGE),
        split=True,
        options=TD,
        releases=WITH_TD,
    ),
    # Several query tokens a sequence, as speculative decoding verifies them.
    "speculative_split": Variant(
        Shape(((35, 6), (10, 7), (62, 8))), split=True, releases=("0.33.0",)
    ),
}


def _marks(variant: str, release: str):
    low = variant == "window_low_scores" and release != "0.33.0"
    if low or (variant, release) == ("decode_split_window_low_scores", "0.13.0"):
        return pytest.mark.xfail(reason=LOW_SCORES)
    return pytest.mark.xfail(reason=UNMASKED) if variant == "mixed_descriptor_nan" else ()


CASES = [
    pytest.param(
        variant,
        release,
        id=f"unified_attention-{variant}-{release}",
        marks=_marks(variant, release),
    )
    for variant, described in VARIANTS.items()
    for release in described.releases
]
RIGHT = [case for case in CASES if not case.marks]


@pytest.fixture
def outcome(launcher, tree):
    def make(variant: str, release: str):
        if release not in ("0.13.0", "0.18.0", "0.19.0"):
            tree(release).load(HELPERS)
        function = tree(release).load(*FILES).unified_attention
        described = VARIANTS[variant]
        if described.shape.layout == "blocks_first":
            shape = replace(described.shape, layout=LAYOUT[release])
            described = replace(described, shape=shape)
        return launcher.once((variant, release), lambda on: _launch(on, function, described))

    return make


def _launch(on: Launcher, function, variant: Variant) -> Computed:
    batch, softmax = allocate(on, variant.shape), variant.softmax
    out = on.room("out", tuple(batch.query.shape), batch.query.dtype)
    options = dict(variant.options)
    if batch.cache.dtype == FP8 and "kv_quant_mode" in inspect.signature(function).parameters:
        options["kv_quant_mode"] = KVQuantMode.FP8_PER_TENSOR
    function(
        q=batch.query,
        k=batch.key_cache,
        v=batch.value_cache,
        out=out,
        cu_seqlens_q=batch.query_start_loc,
        max_seqlen_q=batch.max_query_len,
        seqused_k=batch.seq_lens,
        max_seqlen_k=batch.max_seq_len,
        softmax_scale=softmax.scale,
        causal=True,
        window_size=(softmax.window - 1, softmax.window - 1),
        block_table=batch.block_table,
        softcap=softmax.softcap,
        q_descale=None,
        k_descale=batch.k_scale,
        v_descale=batch.v_scale,
        sinks=None if softmax.sinks is None else on.given("sinks", softmax.sinks),
        alibi_slopes=None if softmax.slopes is None else on.given("slopes", softmax.slopes),
        **(segments(on, batch, SEGMENTS, batch.query.shape[2]) if variant.split else {}),
        **options,
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
