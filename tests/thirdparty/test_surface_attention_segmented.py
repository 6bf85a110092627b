"""run_segmented_attention of vLLM: ROCm's token-major attention, split along the keys."""

import inspect
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from attention_batches import FP8, MIXED, PREFILL, Shape, allocate
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

OPS = "vllm/v1/attention/ops/"
RELEASES = ("0.33.0",)
SCALE = 64**-0.5
PLAIN, WINDOW = Softmax(SCALE), Softmax(SCALE, window=20)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5])


@dataclass(frozen=True)
class Variant:
    """A batch, and a config where not the function's own choice."""

    shape: Shape
    softmax: Softmax = PLAIN
    config: tuple[tuple[str, object], ...] = ()


MIX = Shape(MIXED, layout="content_packed", head_size=64)
LONG = replace(MIX, sequences=((299, 1), (129, 1), (39, 1)))
# The window of query tokens that share a program begins in one tile of keys and in the next.
STEPS = ((0, 100), (23, 40))
HALVES = (("bm", 64), ("bn", 64), ("bk", 64), ("splits", 1), ("warps", 8), ("stages", 1))
HALVES += (("pv_split", True),)
VARIANTS = {
    "prefill": Variant(replace(MIX, sequences=PREFILL)),
    "mixed": Variant(MIX),
    "mixed_block_48": Variant(replace(MIX, block_size=48)),
    "mixed_full": Variant(MIX, Softmax(SCALE, causal=False)),
    "mixed_window": Variant(MIX, WINDOW),
    "mixed_sinks": Variant(MIX, Softmax(SCALE, sinks=SINKS)),
    "mixed_fp8": Variant(replace(MIX, cache_dtype=FP8)),
    "mixed_halves": Variant(MIX, config=HALVES),
    "decode_split": Variant(LONG),
    "decode_split_window": Variant(LONG, Softmax(SCALE, window=150)),
    "decode_split_sinks": Variant(LONG, Softmax(SCALE, sinks=SINKS)),
    "decode_split_fp8": Variant(replace(LONG, cache_dtype=FP8)),
    "window": Variant(replace(MIX, sequences=STEPS), WINDOW),
    "window_low_scores": Variant(replace(MIX, sequences=STEPS, score=-20.0), WINDOW),
    "window_low_scores_bf16": Variant(
        replace(
            MIX,
            sequences=STEPS,
            score=-20.0,
            dtype=torch.bfloat16,
            cache_dtype=torch.bfloat16,
        ),
        WINDOW,
    ),
}
NO_DIM = pytest.mark.xfail(
    "dim" not in inspect.signature(tl.cat).parameters,
    raises=triton.CompilationError,
    reason="Triton: tl.cat takes no dim yet",
)
MARKS = {
    "window_low_scores": pytest.mark.xfail(reason=LOW_SCORES),
    "mixed_halves": NO_DIM,
}
CASES = [
    pytest.param(
        variant,
        release,
        id=f"segmented_attention-{variant}-{release}",
        marks=MARKS.get(variant, ()),
    )
    for variant in VARIANTS
    for release in RELEASES
]
RIGHT = [case for case in CASES if "low_scores-" not in case.id]


@pytest.fixture
def outcome(launcher, tree):
    def make(variant: str, release: str):
        source = tree(release)
        source.load(OPS + "triton_attention_helpers.py")
        source.load(OPS + "triton_unified_attention.py")
        module = source.load(OPS + "segmented_attention.py")
        return launcher.once((variant, release), lambda on: _launch(on, module, VARIANTS[variant]))

    return make


def _launch(on: Launcher, module, variant: Variant) -> Computed:
    batch, softmax = allocate(on, variant.shape), variant.softmax
    out = on.room("out", tuple(batch.query.shape), batch.query.dtype)
    module.run_segmented_attention(
        batch.query,
        out,
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.max_query_len,
        batch.max_seq_len,
        batch.k_scale,
        batch.v_scale,
        softmax.scale,
        sliding_window=softmax.window - 1,
        causal=softmax.causal,
        sinks=None if softmax.sinks is None else on.given("sinks", softmax.sinks),
        config=dict(variant.config) or None,
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
