"""The merge of two parts against decimals of fifty digits, its bound against algorithms in fp32."""

import math
from decimal import Decimal, localcontext

import pytest
import torch

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.target import Precision
from kvfuzz.oracles.merge_bound import Part, merged, merged_lse
from kvfuzz.oracles.numerics import unit

FULL = Precision(weights="fp32")
FP32 = DTYPES["fp32"]
ROWS, SIZE = 400, 8
LOG2_E = math.log2(math.e)


def drawn(seed, apart):
    """Two parts whose log-sum-exps are up to so far apart; every number is an fp32."""
    random = torch.Generator().manual_seed(seed)
    first = torch.rand(ROWS, generator=random) * 64 - 16
    second = first + (torch.rand(ROWS, generator=random) * 2 - 1) * apart
    values = [torch.randn(ROWS, SIZE, generator=random) for _ in range(2)]
    return [
        Part(value.double(), lse.double())
        for value, lse in zip(values, (first, second), strict=True)
    ]


def in_decimals(prefix, suffix):
    """The results and the log-sum-exps, from their definitions."""
    results, lses = [], []
    with localcontext() as context:
        context.prec, context.Emin = 50, -(10**9)
        for one, other, v, w in zip(
            prefix.lse.tolist(),
            suffix.lse.tolist(),
            prefix.output.tolist(),
            suffix.output.tolist(),
            strict=True,
        ):
            p, q = Decimal(one).exp(), Decimal(other).exp()
            lses.append(float((p + q).ln()))
            pairs = zip(v, w, strict=True)
            results.append([float((p * Decimal(a) + q * Decimal(b)) / (p + q)) for a, b in pairs])
    return tuple(torch.tensor(each, dtype=torch.float64) for each in (results, lses))


@pytest.mark.parametrize("apart", [4.0, 150.0])
def test_the_reference_is_the_definition(apart):
    prefix, suffix = drawn(0, apart)
    results, lses = in_decimals(prefix, suffix)
    found, lse = merged(prefix, suffix, FULL, FP32), merged_lse(prefix.lse, suffix.lse)
    torch.testing.assert_close(found.value, results, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(lse.value, lses, rtol=1e-14, atol=1e-14)


def by_division(a, b):
    """exp(l - m) over the sum of both, as vLLM and FlashInfer do it."""
    m = torch.maximum(a, b)
    p, q = torch.exp(a - m), torch.exp(b - m)
    return p / (p + q), q / (p + q), torch.log(p + q) + m


def by_log_sum_exp(a, b):
    """exp(l - L), as FlashAttention combines splits."""
    m = torch.maximum(a, b)
    lse = torch.log(torch.exp(a - m) + torch.exp(b - m)) + m
    return torch.exp(a - lse), torch.exp(b - lse), lse


def in_base_two(a, b):
    """exp2 and log2 throughout, as FlashInfer's log-sum-exps are."""
    a, b = a * LOG2_E, b * LOG2_E
    m = torch.maximum(a, b)
    p, q = torch.exp2(a - m), torch.exp2(b - m)
    return p / (p + q), q / (p + q), (torch.log2(p + q) + m) * (1 / LOG2_E)


@pytest.mark.parametrize("algorithm", [by_division, by_log_sum_exp, in_base_two])
@pytest.mark.parametrize("apart", [0.0, 4.0, 30.0, 150.0])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_usual_way_in_fp32_is_within_the_bound(algorithm, apart, dtype):
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    parts = [
        Part(each.output.to(torch_dtype).double(), each.lse)
        for each in drawn(1 + round(apart), apart)
    ]
    p, q, lse = algorithm(*(each.lse.float() for each in parts))
    v, w = (each.output.float() for each in parts)
    result = (v * p[:, None] + w * q[:, None]).to(torch_dtype).double()
    expected = merged(*parts, FULL, DTYPES[dtype])
    off = (result - expected.value).abs()
    assert (off <= expected.bound).all()
    # Beside the rounding of the result, next to nothing.
    rounding = unit(DTYPES[dtype]) * expected.value.abs()
    assert (expected.bound - rounding < 1e-3).all()
    expected = merged_lse(*(each.lse for each in parts))
    assert ((lse.double() - expected.value).abs() <= expected.bound).all()
    assert (expected.bound < 1e-3).all()


def test_a_share_or_a_log_sum_exp_in_bf16_is_beyond_the_bound():
    prefix, suffix = drawn(5, 4.0)
    p, q, lse = by_division(prefix.lse.float(), suffix.lse.float())
    narrow = p.bfloat16().float()
    result = narrow[:, None] * prefix.output.float() + q[:, None] * suffix.output.float()
    expected = merged(prefix, suffix, FULL, FP32)
    assert ((result.double() - expected.value).abs() > expected.bound).float().mean() > 0.9
    told = merged(prefix, suffix, Precision(weights="model"), DTYPES["bf16"])
    assert ((result.double() - told.value).abs() <= told.bound).all()
    expected = merged_lse(prefix.lse, suffix.lse)
    off = (lse.bfloat16().double() - expected.value).abs()
    assert (off > expected.bound).float().mean() > 0.9


def test_a_part_beside_an_empty_one_comes_back_as_it_is_and_two_empty_ones_are_zeros():
    full = drawn(7, 4.0)[0]
    empty = Part(torch.zeros(ROWS, SIZE).double(), torch.full((ROWS,), -math.inf).double())
    for parts in ((full, empty), (empty, full)):
        found, lse = merged(*parts, FULL, FP32), merged_lse(*(each.lse for each in parts))
        assert torch.equal(found.value, full.output)
        assert torch.equal(lse.value, full.lse)
        assert not found.bound.any()
        assert not lse.bound.any()
    found, lse = merged(empty, empty, FULL, FP32), merged_lse(empty.lse, empty.lse)
    assert not found.value.any()
    assert not found.bound.any()
    assert (lse.value == -math.inf).all()
    assert not lse.bound.any()
