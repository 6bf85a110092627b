"""merge_attn_states of vLLM: attention over a context and over new tokens makes that over both."""

import math

import pytest
import torch
from attention_batches import MIXED, Shape, allocate
from attention_launch import Launcher
from attention_reference import (
    Computed,
    Rounding,
    Softmax,
    assert_right,
    attend,
    unit,
    unseen_errors,
)

pytestmark = pytest.mark.thirdparty

FILES = (
    "vllm/v1/attention/ops/triton_merge_attn_states.py",
    "vllm/attention/ops/triton_merge_attn_states.py",
)
EVERY = ("0.13.0", "0.18.0", "0.19.0", "0.24.0", "0.33.0")
EXACT = Rounding(p=0.0, out=0.0)
FULL = Softmax(32**-0.5, causal=False)
SHAPES = {
    "context": Shape(MIXED),
    # FlashAttention 2 says inf of an empty context, which stands for -inf.
    "context_inf": Shape(MIXED),
    "context_head_48": Shape(MIXED, head_size=48),
    "context_bf16": Shape(MIXED, dtype=torch.bfloat16),
    # The last tokens have no context, and their part of it is not read.
    "context_of_some": Shape(((37, 5), (52, 1), (0, 19))),
    "context_lse_by_token": Shape(MIXED),
}
RELEASES = {"context_of_some": EVERY[3:], "context_lse_by_token": EVERY[4:]}
CASES = [
    pytest.param(variant, release, id=f"merge_attn_states-{variant}-{release}")
    for variant in SHAPES
    for release in RELEASES.get(variant, EVERY)
]


@pytest.fixture
def outcome(launcher, tree):
    def make(variant: str, release: str):
        function = tree(release).load(*FILES).merge_attn_states
        return launcher.once((variant, release), lambda on: _launch(on, function, variant))

    return make


def _launch(on: Launcher, function, variant: str) -> Computed:
    batch = allocate(on, SHAPES[variant])
    dtype, (tokens, heads, size) = batch.query.dtype, batch.query.shape
    parts = {
        "prefix": (torch.zeros(tokens, heads, size), torch.full((tokens, heads), -math.inf)),
        "suffix": (torch.zeros(tokens, heads, size), torch.zeros(tokens, heads)),
    }
    if variant == "context_inf":
        parts["prefix"][1].fill_(math.inf)
    for sequence, (context, _) in enumerate(batch.shape.sequences):
        rows = batch.rows(sequence)
        keys, values = batch.tokens(sequence)
        for name, which in (("prefix", slice(context)), ("suffix", slice(context, None))):
            if len(keys[which]):
                query = batch.query[rows].double()
                part = attend(query, keys[which], values[which], FULL, EXACT)
                parts[name][0][rows], parts[name][1][rows] = part.out.float(), part.lse.float()
    options = {}
    if variant == "context_of_some":
        with_context = batch.rows(1).stop
        parts["prefix"][0][with_context:] = math.nan
        options["prefill_tokens_with_context"] = with_context
    given = []
    for name, (out, lse) in parts.items():
        given.append(on.given(f"{name}_output", out.to(dtype)))
        if variant == "context_lse_by_token":
            given.append(on.given(f"{name}_lse", lse).T)
        else:
            given.append(on.given(f"{name}_lse", lse.T.contiguous()))
    out = on.room("out", (tokens, heads, size), dtype)
    out_lse = on.room("out_lse", (heads, tokens), torch.float32)
    function(out, *given, output_lse=out_lse, **options)
    # Both parts are rounded before they are averaged.
    rounding = Rounding(p=unit(dtype), out=unit(dtype))
    return Computed(batch, out, FULL, rounding, out_lse.T)


@pytest.mark.parametrize(("variant", "release"), CASES)
def test_it_computes_attention_over_both_parts(outcome, variant, release):
    assert_right(outcome(variant, release))


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(("variant", "release"), CASES)
def test_a_token_read_from_another_slot_would_show(outcome, variant, release, side):
    assert unseen_errors(outcome(variant, release).result, side) == []


def test_two_empty_parts_make_zeros(launcher, tree):
    def launch(on: Launcher) -> torch.Tensor:
        given = []
        for name in ("prefix", "suffix"):
            given.append(on.given(f"{name}_output", torch.full((3, 2, 32), math.nan)))
            given.append(on.given(f"{name}_lse", torch.full((2, 3), -math.inf)))
        out = on.room("out", (3, 2, 32), torch.float32)
        tree("0.33.0").load(*FILES).merge_attn_states(out, *given)
        return out

    outcome = launcher.once("empty", launch)
    assert outcome.changed == []
    assert not outcome.result.any()
