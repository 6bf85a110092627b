"""What a target says that it rounds is in the bound, and what it does not say is beyond it."""

import msgspec
import pytest
import torch

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.target import IN_FP32, Precision
from kvfuzz.oracles.attention_bound import Scoring, attend
from kvfuzz.oracles.numerics import Numerics

HOW = Scoring(0.25, 0.0, None, None)
LENGTH, SIZE = 96, 16
BASE = msgspec.structs.replace(IN_FP32, tile=LENGTH)


def _drawn(seed, dtype):
    random = torch.Generator().manual_seed(seed)
    shapes = (1, 1, SIZE), (LENGTH, 1, SIZE), (LENGTH, 1, SIZE)
    drawn = [torch.randn(shape, generator=random) for shape in shapes]
    return [each.to(dtype).double() for each in drawn]


def _softmax(query, keys):
    """Weights relative to the largest one, and their sum, in fp32."""
    score = (keys[:, 0].float() @ query[0, 0].float()) * HOW.scale
    weight = (score - score.max()).exp()
    return weight, weight.sum()


def _beyond(found, numbers, numerics):
    """How many of the results `[SIZE]` are beyond their bound."""
    seen, distance = (torch.ones(1, LENGTH, dtype=kind) for kind in (torch.bool, torch.float64))
    value, bound = attend(*numbers, distance, seen, HOW, numerics).output
    return int(((found.double() - value[0, 0]).abs() > bound[0, 0]).sum())


def _counts(kernel, dtype, told, numerics):
    """Results beyond their bound in many cases, by what is told of the kernel."""
    counts = dict.fromkeys(told, 0)
    for seed in range(40):
        numbers = _drawn(seed, dtype)
        found = kernel(*numbers)
        for name, precision in told.items():
            counts[name] += _beyond(found, numbers, numerics(precision))
    return counts


@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_weights_in_the_fp8_of_queries_have_to_be_told(scale):
    def kernel(query, keys, values):
        weight, total = _softmax(query, keys)
        held = (weight * scale).to(torch.float8_e4m3fn).float() / scale
        return held @ values[:, 0].float() / total

    scales = {"e4m3fn": scale} if scale > 1 else {}
    told = {
        "told": msgspec.structs.replace(BASE, weights="query", weights_scale=scales),
        "not told": BASE,
    }
    fp8 = DTYPES["e4m3fn"]
    counts = _counts(
        kernel,
        torch.float8_e4m3fn,
        told,
        lambda precision: Numerics(precision, DTYPES["bf16"], is_quantised=True, query=fp8),
    )
    assert counts["told"] == 0
    # The output of bf16 hides what is rounded of few of the weights.
    assert counts["not told"] >= 40


def test_weights_below_the_smallest_number_of_fp8_may_vanish_where_they_are_not_scaled():
    small = Numerics(Precision(), DTYPES["bf16"], is_quantised=True, query=DTYPES["e4m3fn"])
    assert small.least_weight == 2.0**-9
    scaled = msgspec.structs.replace(Precision(), weights_scale={"e4m3fn": 256.0})
    assert small._replace(precision=scaled).least_weight == 2.0**-17


def test_weights_times_small_scales_of_v_may_vanish_in_half_precision():
    """The weights take the scale of V, 2**-16, before they are held in fp16."""
    scale, fp16 = 2.0**-16, DTYPES["fp16"]
    told = msgspec.structs.replace(BASE, weights="model", weights_by_scale=True)
    counts = dict.fromkeys((True, False), 0)
    for seed in range(40):
        query, keys, values = _drawn(seed, torch.float16)
        codes = (64 * values).to(torch.float8_e4m3fn).double()
        weight, total = _softmax(query, keys)
        found = ((weight * scale).half().float() @ codes[:, 0].float() / total).half()
        for by_scale in counts:
            precision = msgspec.structs.replace(told, weights_by_scale=by_scale)
            numerics = Numerics(precision, fp16, is_quantised=True, v_scale=scale)
            counts[by_scale] += _beyond(found, (query, keys, codes * scale), numerics)
    assert counts[True] == 0
    assert counts[False] > 0


@pytest.mark.parametrize("model", ["fp16", "bf16"])
def test_a_kernel_that_says_nothing_may_widen_all_and_take_a_tf32_dot(model):
    def cut(number):
        return (number.float().view(torch.int32) & ~0x1FFF).view(torch.float32)

    def kernel(query, keys, values):
        weight, total = _softmax(query, keys)
        return cut(weight) @ values[:, 0].float() / total

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[model]
    counts = _counts(
        lambda *numbers: kernel(*numbers).to(dtype),
        dtype,
        {"nothing said": Precision(), "all in fp32": BASE},
        lambda precision: Numerics(precision, DTYPES[model], is_quantised=False),
    )
    assert counts["nothing said"] == 0
    if model == "fp16":
        assert counts["all in fp32"] > 0
