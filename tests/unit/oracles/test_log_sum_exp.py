"""The bound of a log-sum-exp: what fp32 computes in any order is within it, a wrong one is not."""

import math

import msgspec
import pytest
import torch

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.target import IN_FP32
from kvfuzz.oracles.attention_bound import Scoring, attend
from kvfuzz.oracles.numerics import Numerics

FP32 = DTYPES["fp32"]
FULL = Numerics(IN_FP32, FP32, is_quantised=False)


def _inputs(seed, tokens, dims, heads=3):
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(1, heads, dims, generator=random)
    rows = torch.randn(tokens, 1, dims, generator=random)
    return query, rows


def _attended(query, rows, scale, cap=0.0):
    distance = torch.arange(len(rows)).flip(0)[None, :].double()
    seen = torch.ones_like(distance, dtype=torch.bool)
    how = Scoring(scale, cap, None, None)
    return attend(query.double(), rows.double(), rows.double(), distance, seen, how, FULL)


def _in_fp32(query, rows, scale, cap, parts):
    """The log-sum-exp of each head, parts of the tokens apart, those of a part one by one."""
    scores = (query[0] @ rows[:, 0].T) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    found = []
    for part in scores.chunk(parts, dim=1):
        largest = part.amax(1, keepdim=True)
        total = torch.zeros(len(part))
        for column in torch.exp(part - largest).T:
            total = total + column
        found.append(largest[:, 0] + torch.log(total))
    merged = torch.stack(found)
    largest = merged.amax(0)
    return (largest + torch.log(torch.exp(merged - largest).sum(0)))[None, :]


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize(("tokens", "dims"), [(1, 24), (7, 24), (300, 24), (300, 576)])
def test_fp32_is_within_the_bound_in_any_order(tokens, dims, cap):
    scale = dims**-0.5
    for seed in range(10):
        query, rows = _inputs(seed, tokens, dims)
        lse = _attended(query, rows, scale, cap).lse
        for parts in (1, 4):
            order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
            found = _in_fp32(query, rows[order], scale, cap, min(parts, tokens)).double()
            assert ((found - lse.value).abs() <= lse.bound).all()
        assert (lse.bound < 4e-3).all()


def test_a_sum_to_another_base_or_without_a_token_is_outside():
    query, rows = _inputs(0, 60, 24)
    lse = _attended(query, rows, 24**-0.5).lse
    for wrong in (lse.value / math.log(2), _attended(query, rows[:-1], 24**-0.5).lse.value):
        assert ((wrong - lse.value).abs() > lse.bound).all()


def test_scores_that_are_exact_leave_the_logarithm_alone():
    """Large scores have errors of their size, but for those that add up exactly."""
    query = torch.zeros(1, 1, 24)
    query[0, 0, :3] = 2.0**12
    rows = torch.randint(0, 2, (200, 1, 24), generator=torch.Generator().manual_seed(1)).float()
    lse = _attended(query, rows, 0.25).lse
    winners = int((rows[:, 0, :3].sum(1) == 3).sum())
    assert winners > 1
    assert lse.value.item() == pytest.approx(3 * 2.0**10 + math.log(winners), abs=1e-9)
    assert lse.bound.item() < 0.01


def test_weights_that_are_unbounded_leave_a_log_sum_exp_that_is_not():
    query, rows = _inputs(0, 20, 24)
    attended = _attended(query * 2.0**12, rows * 2.0**6, 1.0)
    assert attended.output.bound.isinf().any()
    assert attended.lse.bound.isfinite().all()


def test_rounding_adds_half_a_unit_of_the_format():
    query, rows = _inputs(0, 20, 24)
    exact = _attended(query, rows, 24**-0.5).lse
    rounded = exact.rounded(DTYPES["bf16"])
    assert (rounded.bound >= exact.value.abs() * 2.0**-8).all()
    assert (rounded.bound <= exact.value.abs() * 2.0**-7).all()


def test_parts_that_are_merged_by_their_logarithm_are_off_by_a_unit_of_the_scores():
    """Winners in two parts, 3 and 1, of scores of 3072: their logarithms have twelve bits behind
    the point, and the weights no more."""
    query = torch.zeros(1, 1, 24)
    query[0, 0, :3] = 2.0**12
    rows = torch.zeros(8, 1, 24)
    rows[[0, 1, 2, 7], 0, :3] = 1
    rows[7, 0, 5] = 1
    scores = (query[0] @ rows[:, 0].T) * 0.25
    found = [torch.logsumexp(part, 1) for part in scores.chunk(2, dim=1)]
    share = float(torch.exp(found[1] - found[0]) / (1 + torch.exp(found[1] - found[0])))
    by_sums = _attended(query, rows, 0.25).output
    assert abs(share - 0.25) > by_sums.bound[0, 0, 5]
    merged = FULL._replace(precision=msgspec.structs.replace(IN_FP32, merged="lse"))
    how = Scoring(0.25, 0.0, None, None)
    distance = torch.arange(8).flip(0)[None, :].double()
    seen = torch.ones_like(distance, dtype=torch.bool)
    args = (query.double(), rows.double(), rows.double(), distance, seen, how, merged)
    by_lse = attend(*args).output
    assert abs(share - 0.25) <= by_lse.bound[0, 0, 5] < 1e-3
