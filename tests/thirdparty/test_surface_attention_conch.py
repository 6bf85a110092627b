"""conch's attention kernels: paged decode, varlen, and the unified_attention that it carries."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from attention_batches import DECODE, FP8, GARBAGE, MIXED, PREFILL, STEPS, Shape, allocate
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

SCALE = 32**-0.5
FULL, CAUSAL = Softmax(SCALE, causal=False), Softmax(SCALE)
# conch keeps sums, maxima and weights in the output's dtype; in fp32 it can be held to little.
FP32 = Shape(DECODE, dtype=torch.float32, cache_dtype=torch.float32)
SHORT = Shape(((20, 1), (17, 1), (33, 1)))
XFAIL = {
    ("varlen_attention", "mixed"): "upstream: the causal mask lets query token i see keys 0 to i, "
    "as if there were no context",
    ("unified_attention", "window_low_scores"): LOW_SCORES,
    ("unified_attention", "mixed_nan"): "upstream: slots past seq_len are loaded, and 0 * NaN is "
    "NaN (vLLM's #47305)",
}


@dataclass(frozen=True)
class Variant:
    """A batch and what is computed over it; `max_seq_len` as the engine says it."""

    shape: Shape
    softmax: Softmax = CAUSAL
    max_seq_len: int = 0


PAGED = {
    "decode": Variant(FP32),
    "decode_fp16": Variant(SHORT),
    "decode_head_48": Variant(replace(FP32, head_size=48)),
    "decode_content_packed": Variant(replace(FP32, layout="content_packed")),
    "decode_softcap": Variant(FP32, Softmax(SCALE, softcap=2.0)),
    "decode_fp8": Variant(replace(FP32, cache_dtype=FP8)),
    # Splits of one block up to 128 tokens of the table, of more beyond.
    "decode_split": Variant(replace(FP32, sequences=((129, 1), (17, 1), (260, 1)))),
}
VARLEN = {
    "prefill": Variant(replace(FP32, sequences=PREFILL)),
    "prefill_full": Variant(replace(FP32, sequences=PREFILL), FULL),
    "mixed_full": Variant(replace(FP32, sequences=MIXED), FULL),
    "mixed": Variant(replace(FP32, sequences=MIXED)),
    "decode": Variant(FP32),
    "decode_fp16": Variant(SHORT),
    "decode_head_48": Variant(replace(FP32, head_size=48)),
    "decode_content_packed": Variant(replace(FP32, layout="content_packed")),
    "decode_softcap": Variant(FP32, Softmax(SCALE, softcap=2.0)),
    "decode_fp8": Variant(replace(FP32, cache_dtype=FP8)),
    # Split-KV begins where the engine says that sequences may have 4096 tokens.
    "decode_split": Variant(
        replace(FP32, sequences=((299, 1), (16, 1), (530, 1))), max_seq_len=4096
    ),
}
# It takes a power of two of query heads a KV head, and loads slots past the end of a sequence.
TWO_A_HEAD = Shape(MIXED, num_query_heads=4, poison=GARBAGE)
UNIFIED = {
    "prefill": Variant(replace(TWO_A_HEAD, sequences=PREFILL)),
    "decode": Variant(replace(TWO_A_HEAD, sequences=DECODE)),
    "mixed": Variant(TWO_A_HEAD),
    "mixed_window": Variant(TWO_A_HEAD, Softmax(SCALE, window=20)),
    "window_low_scores": Variant(
        replace(TWO_A_HEAD, sequences=STEPS, score=-20.0), Softmax(SCALE, window=20)
    ),
    "mixed_softcap": Variant(TWO_A_HEAD, Softmax(SCALE, softcap=2.0)),
    "mixed_fp8": Variant(replace(TWO_A_HEAD, cache_dtype=FP8)),
    "mixed_nan": Variant(replace(TWO_A_HEAD, poison=math.nan)),
}
KERNELS = {"paged_attention": PAGED, "varlen_attention": VARLEN, "unified_attention": UNIFIED}
CASES = [
    pytest.param(
        kernel,
        variant,
        id=f"conch:{kernel}-{variant}",
        marks=pytest.mark.xfail(reason=XFAIL[kernel, variant])
        if (kernel, variant) in XFAIL
        else (),
    )
    for kernel, variants in KERNELS.items()
    for variant in variants
]
RIGHT = [case for case in CASES if not case.marks]


@pytest.fixture
def outcome(launcher, monkeypatch):
    from conch.platforms import current_platform
    from conch.platforms.platform import PlatformEnum

    # It asks torch for a GPU; the lane stands for an AMD one.
    monkeypatch.setattr(current_platform, "platform_enum", PlatformEnum.AMD)
    launches = {"paged_attention": _paged, "varlen_attention": _varlen}

    def make(kernel: str, variant: str):
        launch, described = launches.get(kernel, _unified), KERNELS[kernel][variant]
        return launcher.once((kernel, variant), lambda on: launch(on, described))

    return make


def _rounding(variant: Variant) -> Rounding:
    dtype = variant.shape.dtype
    if dtype == torch.float32:
        return Rounding(p=0.0, out=unit(dtype))
    # In fp16: a weight, five levels of their sum, and the two updates and the product of a block.
    blocks = max(map(sum, variant.shape.sequences)) // variant.shape.block_size + 1
    return Rounding(p=(6 + 3 * blocks) * unit(dtype), out=unit(dtype), score=unit(dtype))


def _cache_dtype(variant: Variant) -> str:
    return "fp8" if variant.shape.cache_dtype == FP8 else "auto"


def _paged(on: Launcher, variant: Variant) -> Computed:
    from conch.ops.attention.paged_attention import paged_attention

    batch = allocate(on, variant.shape)
    out = on.room("out", tuple(batch.query.shape), batch.query.dtype)
    paged_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        batch.seq_lens,
        output=out,
        scale=variant.softmax.scale,
        softcap=variant.softmax.softcap,
        kv_cache_dtype=_cache_dtype(variant),
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
    )
    return Computed(batch, out, variant.softmax, _rounding(variant))


def _varlen(on: Launcher, variant: Variant) -> Computed:
    from conch.ops.attention.varlen_attention import varlen_attention

    batch = allocate(on, variant.shape)
    out = on.room("out", tuple(batch.query.shape), batch.query.dtype)
    varlen_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.query_start_loc,
        batch.max_query_len,
        batch.seq_lens,
        variant.max_seq_len or batch.max_seq_len,
        batch.block_table,
        output=out,
        causal=variant.softmax.causal,
        scale=variant.softmax.scale,
        softcap=variant.softmax.softcap,
        kv_cache_dtype=_cache_dtype(variant),
        q_scale=on.given("q_scale", torch.ones(1)),
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
        strict=True,
    )
    return Computed(batch, out, variant.softmax, _rounding(variant))


def _unified(on: Launcher, variant: Variant) -> Computed:
    from conch.third_party.vllm.unified_attention import unified_attention

    batch, softmax = allocate(on, variant.shape), variant.softmax
    out = on.room("out", tuple(batch.query.shape), batch.query.dtype)
    unified_attention(
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
    )
    rounding = Rounding(p=unit(batch.query.dtype), out=unit(out.dtype))
    return Computed(batch, out, softmax, rounding)


@pytest.mark.parametrize(("kernel", "variant"), CASES)
def test_it_computes_attention_over_the_cache(outcome, kernel, variant):
    assert_right(outcome(kernel, variant))


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(("kernel", "variant"), RIGHT)
def test_a_token_read_from_another_slot_would_show(outcome, kernel, variant, side):
    assert unseen_errors(outcome(kernel, variant).result, side) == []
