"""ROCM_ATTN's kernels in vLLM: context_attention_fwd and kernel_paged_attention_2d, x-packed."""

import inspect
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from attention_batches import DECODE, FP8, GARBAGE, MIXED, PREFILL, STEPS, Batch, Shape, allocate
from attention_launch import Launcher
from attention_reference import Computed, Rounding, Softmax, assert_right, unit, unseen_errors

pytestmark = pytest.mark.thirdparty

PREFIX = ("vllm/v1/attention/ops/prefix_prefill.py", "vllm/attention/ops/prefix_prefill.py")
CHUNKED = (
    "vllm/v1/attention/ops/chunked_prefill_paged_decode.py",
    "vllm/attention/ops/chunked_prefill_paged_decode.py",
)
EVERY = ("0.13.0", "0.18.0", "0.19.0", "0.24.0", "0.33.0")
TILED = EVERY[1:]
"""Releases whose tiles need not be a whole block, for blocks such as Qwen3-Next's of 544."""
NEWEST = EVERY[-1:]
SCALE = 32**-0.5
PLAIN = Softmax(SCALE)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625])


@dataclass(frozen=True)
class Variant:
    """A batch and how a function is called on it, in the releases that have this call."""

    shape: Shape
    softmax: Softmax = PLAIN
    releases: tuple[str, ...] = EVERY
    default_scale: bool = False
    from_cache: bool = False
    """New tokens are read from the cache too: key and value are None."""


MIX, DECODES = Shape(MIXED, "x_packed"), Shape(DECODE, "x_packed")

CONTEXT = {
    "prefill": Variant(Shape(PREFILL, "x_packed")),
    "mixed": Variant(MIX),
    "mixed_hybrid": Variant(replace(MIX, layout="x_packed_hybrid")),
    "mixed_interleaved": Variant(replace(MIX, layout="x_packed_interleaved"), releases=NEWEST),
    "mixed_block_48": Variant(replace(MIX, block_size=48), releases=TILED),
    "mixed_head_48": Variant(replace(MIX, head_size=48), Softmax(48**-0.5)),
    "mixed_window": Variant(MIX, Softmax(SCALE, window=20)),
    "window_low_scores": Variant(
        replace(MIX, sequences=STEPS, score=-20.0), Softmax(SCALE, window=20)
    ),
    "mixed_sinks": Variant(MIX, Softmax(SCALE, sinks=SINKS)),
    "mixed_alibi": Variant(MIX, Softmax(SCALE, slopes=SLOPES)),
    "mixed_fp8": Variant(replace(MIX, cache_dtype=FP8)),
    "mixed_from_cache": Variant(MIX, releases=NEWEST, from_cache=True),
    "mixed_not_causal": Variant(MIX, Softmax(SCALE, causal=False), releases=EVERY[3:]),
}
PAGED = {
    "decode": Variant(DECODES),
    "decode_hybrid": Variant(replace(DECODES, layout="x_packed_hybrid")),
    "decode_interleaved": Variant(replace(DECODES, layout="x_packed_interleaved"), releases=NEWEST),
    "decode_block_48": Variant(replace(DECODES, block_size=48), releases=TILED),
    "decode_head_48": Variant(replace(DECODES, head_size=48), Softmax(48**-0.5)),
    "decode_window": Variant(DECODES, Softmax(SCALE, window=20)),
    "decode_window_low_scores": Variant(replace(DECODES, score=-20.0), Softmax(SCALE, window=20)),
    "decode_sinks": Variant(DECODES, Softmax(SCALE, sinks=SINKS)),
    "decode_alibi": Variant(DECODES, Softmax(SCALE, slopes=SLOPES)),
    "decode_fp8": Variant(replace(DECODES, cache_dtype=FP8)),
    "decode_default_scale": Variant(DECODES, default_scale=True),
}
BOTH = {
    "mixed": Variant(MIX),
    "mixed_fp8": Variant(replace(MIX, cache_dtype=FP8)),
    "mixed_window": Variant(MIX, Softmax(SCALE, window=20)),
    "mixed_interleaved_fp8": Variant(
        replace(MIX, layout="x_packed_interleaved", cache_dtype=FP8), releases=NEWEST
    ),
}
KERNELS = {
    "context_attention_fwd": CONTEXT,
    # With one query token a sequence, chunked_prefill_paged_decode launches nothing else.
    "kernel_paged_attention_2d": PAGED,
    "chunked_prefill_paged_decode": BOTH,
}
WRONG_SCALE = "upstream: 1/sqrt(num_query_heads) stands for sm_scale=None"
# Triton 3.6 lets a scalar be indexed by [None, :], as the kernel of 0.13.0 does; 3.9 does not.
REFUSED = pytest.mark.xfail(
    "too many indices" in inspect.getsource(tl.core),
    raises=triton.CompilationError,
    reason="Triton: too many indices for tensor of rank 0",
)


def _marks(kernel: str, variant: str, release: str):
    if variant == "decode_default_scale" and release == "0.13.0":
        return pytest.mark.xfail(reason=WRONG_SCALE)
    compiles = release != "0.13.0" or variant == "mixed_alibi"
    return () if compiles or kernel == "kernel_paged_attention_2d" else REFUSED


CASES = [
    pytest.param(
        kernel,
        variant,
        release,
        id=f"{kernel}-{variant}-{release}",
        marks=_marks(kernel, variant, release),
    )
    for kernel, variants in KERNELS.items()
    for variant, described in variants.items()
    for release in described.releases
]
RIGHT = [case for case in CASES if "decode_default_scale-0.13.0" not in case.id]


@pytest.fixture
def outcome(launcher, tree):
    def make(kernel: str, variant: str, release: str):
        described = KERNELS[kernel][variant]
        if release != "0.33.0":
            # Before #47305 slots past seq_len were loaded and multiplied by 0.
            described = replace(described, shape=replace(described.shape, poison=GARBAGE))
        prefix = tree(release).load(*PREFIX)
        if kernel == "context_attention_fwd":
            return launcher.once(
                (kernel, variant, release),
                lambda on: _context(on, prefix.context_attention_fwd, described),
            )
        function = tree(release).load(*CHUNKED).chunked_prefill_paged_decode
        return launcher.once(
            (kernel, variant, release), lambda on: _chunked(on, function, described)
        )

    return make


def _new_tokens(on: Launcher, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the query's tokens, which the functions take apart from the cache."""
    sides = zip(*map(batch.tokens, range(len(batch.blocks))), strict=True)
    contexts = [context for context, _ in batch.shape.sequences]
    key, value = (
        torch.cat([each[context:] for each, context in zip(side, contexts, strict=True)])
        for side in sides
    )
    key, value = key.to(batch.query.dtype), value.to(batch.query.dtype)
    return on.given("key", key), on.given("value", value)


def _computed(batch: Batch, out: torch.Tensor, variant: Variant) -> Computed:
    rounding = Rounding(p=unit(batch.query.dtype), out=unit(out.dtype))
    return Computed(batch, out, variant.softmax, rounding)


def _options(on: Launcher, variant: Variant) -> dict[str, object]:
    softmax = variant.softmax
    return {
        "sinks": None if softmax.sinks is None else on.given("sinks", softmax.sinks),
        "alibi_slopes": None if softmax.slopes is None else on.given("slopes", softmax.slopes),
        "sliding_window": softmax.window,
        "sm_scale": None if variant.default_scale else softmax.scale,
        **({} if softmax.causal else {"causal": False}),
    }


def _context(on: Launcher, function, variant: Variant) -> Computed:
    batch = allocate(on, variant.shape)
    key, value = (None, None) if variant.from_cache else _new_tokens(on, batch)
    out = on.room("out", tuple(batch.query.shape), batch.query.dtype)
    options = _options(on, variant)
    if variant.shape.layout == "x_packed_interleaved":
        options["interleaved_v_pack_factor"] = batch.key_cache.shape[-1]
    function(
        q=batch.query,
        k=key,
        v=value,
        o=out,
        kv_cache_dtype="fp8" if batch.cache.dtype == FP8 else "auto",
        k_cache=batch.key_cache,
        v_cache=batch.value_cache,
        b_loc=batch.block_table,
        b_start_loc=batch.query_start_loc,
        b_seq_len=batch.seq_lens,
        max_seq_len=batch.max_seq_len,
        max_input_len=batch.max_query_len,
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
        **options,
    )
    return _computed(batch, out, variant)


def _chunked(on: Launcher, function, variant: Variant) -> Computed:
    batch = allocate(on, variant.shape)
    key, value = _new_tokens(on, batch)
    out = on.room("out", tuple(batch.query.shape), batch.query.dtype)
    options = _options(on, variant)
    if variant.shape.layout == "x_packed_interleaved":
        options["use_interleaved_v_cache"] = True
    function(
        query=batch.query,
        key=key,
        value=value,
        output=out,
        kv_cache_dtype="fp8" if batch.cache.dtype == FP8 else "auto",
        key_cache=batch.key_cache,
        value_cache=batch.value_cache,
        block_table=batch.block_table,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        max_seq_len=batch.max_seq_len,
        max_query_len=batch.max_query_len,
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
        **options,
    )
    return _computed(batch, out, variant)


@pytest.mark.parametrize(("kernel", "variant", "release"), CASES)
def test_it_computes_attention_over_the_cache(outcome, kernel, variant, release):
    assert_right(outcome(kernel, variant, release))


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(("kernel", "variant", "release"), RIGHT)
def test_a_token_read_from_another_slot_would_show(outcome, kernel, variant, release, side):
    assert unseen_errors(outcome(kernel, variant, release).result, side) == []
