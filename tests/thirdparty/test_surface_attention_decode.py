"""decode_attention_fwd of vLLM, per head and grouped and over MLA's latent, and the merge."""

import inspect
from dataclasses import dataclass, replace

import pytest
import torch
from attention_batches import DECODE, FP8, Shape, allocate
from attention_launch import Launcher
from attention_reference import Computed, Rounding, Softmax, assert_right, unit, unseen_errors

pytestmark = pytest.mark.thirdparty

FILES = (
    "vllm/v1/attention/ops/triton_decode_attention.py",
    "vllm/attention/ops/triton_decode_attention.py",
)
EVERY = ("0.13.0", "0.18.0", "0.19.0", "0.24.0", "0.33.0")
PAGE_STRIDE = EVERY[3:]
"""Releases that take the stride between pages from the cache (#45111)."""
FP8_CACHE = EVERY[1:]
SPLITS = 4

GROUPED = Shape(DECODE, "kv_first")
# The kernel for one query head a KV head multiplies and sums in the query's own dtype.
PER_HEAD = Shape(
    DECODE,
    "kv_first",
    num_query_heads=3,
    num_kv_heads=3,
    dtype=torch.float32,
    cache_dtype=torch.float32,
)
# More query heads than one program takes; a latent of 64 and a rotary part of 16.
LATENT = Shape(DECODE, "latent", num_query_heads=20, num_kv_heads=1, head_size=80, head_size_v=64)
PLAIN, SOFTCAP = Softmax(32**-0.5), Softmax(32**-0.5, softcap=2.0)


@dataclass(frozen=True)
class Variant:
    """A batch and the releases that can decode over it."""

    shape: Shape
    softmax: Softmax = PLAIN
    releases: tuple[str, ...] = EVERY
    is_mla: bool = False


VARIANTS = {
    "per_head": Variant(PER_HEAD),
    "per_head_softcap": Variant(PER_HEAD, SOFTCAP),
    "per_head_fp8": Variant(replace(PER_HEAD, cache_dtype=FP8), releases=FP8_CACHE),
    "per_head_blocks_first": Variant(
        replace(PER_HEAD, layout="blocks_first"), releases=PAGE_STRIDE
    ),
    "grouped": Variant(GROUPED),
    "grouped_bf16": Variant(replace(GROUPED, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)),
    "grouped_head_48": Variant(replace(GROUPED, head_size=48)),
    "grouped_low_scores": Variant(replace(GROUPED, score=-20.0)),
    "grouped_softcap": Variant(GROUPED, SOFTCAP),
    "grouped_fp8": Variant(replace(GROUPED, cache_dtype=FP8), releases=FP8_CACHE),
    "grouped_blocks_first": Variant(replace(GROUPED, layout="blocks_first"), releases=PAGE_STRIDE),
    "grouped_content_packed": Variant(
        replace(GROUPED, layout="content_packed"), releases=PAGE_STRIDE
    ),
    "latent": Variant(LATENT, Softmax(80**-0.5)),
    "latent_fp8": Variant(replace(LATENT, cache_dtype=FP8), Softmax(80**-0.5), FP8_CACHE),
    "latent_is_mla": Variant(LATENT, Softmax(80**-0.5), PAGE_STRIDE, is_mla=True),
    "latent_is_mla_fp8": Variant(
        replace(LATENT, cache_dtype=FP8), Softmax(80**-0.5), PAGE_STRIDE, is_mla=True
    ),
}
CASES = [
    pytest.param(variant, release, id=f"decode_attention_fwd-{variant}-{release}")
    for variant, described in VARIANTS.items()
    for release in described.releases
]


@pytest.fixture
def outcome(launcher, tree):
    def make(variant: str, release: str):
        function = tree(release).load(*FILES).decode_attention_fwd
        return launcher.once(
            (variant, release), lambda on: _launch(on, function, VARIANTS[variant])
        )

    return make


def _launch(on: Launcher, function, variant: Variant) -> Computed:
    batch, softmax = allocate(on, variant.shape), variant.softmax
    sequences, heads, _ = batch.query.shape
    size = batch.value_cache.shape[-1]
    out = on.room("out", (sequences, heads, size), batch.query.dtype)
    lse = on.room("lse", (sequences, heads), batch.query.dtype)
    options = {}
    if "k_scale" in inspect.signature(function).parameters:
        options |= {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    if variant.is_mla:
        options |= {"is_mla": True}
    function(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        out,
        lse,
        batch.block_table,
        batch.seq_lens,
        on.room("attn_logits", (sequences, heads, SPLITS, size + 1), torch.float32),
        SPLITS,
        softmax.scale,
        batch.shape.block_size,
        logit_cap=softmax.softcap,
        **options,
    )
    rounding = Rounding(p=unit(batch.query.dtype), out=unit(out.dtype))
    return Computed(batch, out, softmax, rounding, lse)


@pytest.mark.parametrize(("variant", "release"), CASES)
def test_it_computes_attention_over_the_cache(outcome, variant, release):
    assert_right(outcome(variant, release))


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(("variant", "release"), CASES)
def test_a_token_read_from_another_slot_would_show(outcome, variant, release, side):
    assert unseen_errors(outcome(variant, release).result, side) == []
