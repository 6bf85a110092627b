"""The bound of parts that are merged by their log-sum-exp holds, and is needed."""

import msgspec
import pytest
import torch

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.target import IN_FP32
from kvfuzz.oracles.attention_bound import Scoring, attend
from kvfuzz.oracles.numerics import Numerics

PART = 16
ONCE = msgspec.structs.replace(IN_FP32, tile=16)
MERGED = msgspec.structs.replace(ONCE, partial="model", merged="lse", merged_part=PART)
HOW = Scoring(0.125, 0.0, None, None)


def _numbers(seed, length, exact):
    random = torch.Generator().manual_seed(seed)
    if exact:
        draw = lambda *shape, most: torch.randint(0, most, shape, generator=random).double()  # noqa: E731
        query = draw(1, 1, 64, most=2) * 4096
        return query, draw(length, 1, 64, most=2), draw(length, 1, 64, most=17) - 8
    shapes = (1, 1, 64), (length, 1, 64), (length, 1, 64)
    drawn = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    return [each.bfloat16().double() for each in drawn]


def _in_parts(query, keys, values):
    """The output of one query whose parts are in bf16, and their sums in fp32."""
    out, sums = None, None
    for start in range(0, len(keys), PART):
        score = (keys[start : start + PART, 0] @ query[0, 0]) * HOW.scale
        lse = score.logsumexp(0)
        part = ((score - lse).exp() @ values[start : start + PART, 0]).bfloat16().float()
        lse = lse.float()
        if out is None:
            out, sums = part, lse
            continue
        top = torch.maximum(sums, lse)
        mine, other = (sums - top).exp(), (lse - top).exp()
        out = (out * (mine / (mine + other)) + part * (other / (mine + other))).bfloat16().float()
        sums = (mine + other).log() + top
    return out.double()


@pytest.mark.parametrize("exact", [False, True])
def test_parts_in_the_models_dtype_are_within_the_bound(exact):
    beyond = 0
    for seed in range(12):
        length = 8 + 40 * seed
        query, keys, values = _numbers(seed, length, exact)
        seen, distance = (torch.ones(1, length, dtype=kind) for kind in (torch.bool, torch.float64))
        found = _in_parts(query, keys, values)
        for precision in (MERGED, ONCE):
            numerics = Numerics(precision, DTYPES["bf16"], is_quantised=False)
            value, bound = attend(query, keys, values, distance, seen, HOW, numerics).output
            off = (found - value[0, 0]).abs() > bound[0, 0]
            if precision is MERGED:
                assert not off.any(), seed
            else:
                beyond += int(off.any())
    assert beyond >= 2


def test_numbers_that_cancel_have_the_bound_of_the_reference():
    query, keys = torch.zeros(1, 1, 8).double(), torch.zeros(6, 1, 8).double()
    values = torch.tensor([7.0, -5, 3, -8, 2, 1]).double().view(6, 1, 1)
    seen, distance = (torch.ones(1, 6, dtype=kind) for kind in (torch.bool, torch.float64))
    numerics = Numerics(ONCE, DTYPES["fp32"], is_quantised=False)
    value, bound = attend(query, keys, values, distance, seen, HOW, numerics).output
    assert value.abs() < 1e-14
    assert value.abs() <= bound
    assert bound < 1e-11


def _exact_bound(query, precision, scale):
    """The largest bound of one query over keys of zeros and ones, relative to the values."""
    random = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randint(low, 9 if low else 2, (200, 1, 64), generator=random).double()
        for low in (0, -8)
    )
    seen, distance = (torch.ones(1, 200, dtype=kind) for kind in (torch.bool, torch.float64))
    numerics = Numerics(precision, DTYPES["fp32"], is_quantised=False)
    how = Scoring(scale, 0.0, None, None)
    return float(attend(query, keys, values, distance, seen, how, numerics).output.bound.max())


@pytest.mark.parametrize(
    ("hot", "scaled", "is_exact"),
    [
        (8, None, True),
        # Multiplied by log2(e) an element has 24 bits, of which sums are not exact.
        (8, "fp32", False),
        (1, "fp32", True),
        (0, "fp32", True),
    ],
)
def test_sums_of_a_scaled_query_are_exact_where_one_element_counts(hot, scaled, is_exact):
    query = torch.zeros(1, 1, 64, dtype=torch.float64)
    query[..., :hot] = 4096
    precision = msgspec.structs.replace(ONCE, scaled_query=scaled)
    few = 1e-5
    assert (_exact_bound(query, precision, 0.125) < few) is is_exact


def test_a_query_of_zeros_gives_all_tokens_the_same_weight():
    query = torch.zeros(1, 1, 64, dtype=torch.float64)
    assert _exact_bound(query, ONCE, 0.125) < 1e-5
