"""Attention in fp64, how far from it a kernel may be, and what its outcome must satisfy."""

import math
from dataclasses import dataclass

import torch
from attention_batches import Batch
from attention_launch import Outcome

FP32 = 2.0**-24

LOW_SCORES = (
    "upstream: a tile without a visible key sets a row's maximum to 0 for good, and fp16 cannot "
    "hold exp(score - 0)"
)
"""Why windows of fp16 scores near -20 are wrong in several kernels."""


@dataclass(frozen=True)
class Softmax:
    """What is computed. `window` (keys that a query sees, itself included) is off at 0."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    causal: bool = True
    sinks: torch.Tensor | None = None  # [num_query_heads]
    slopes: torch.Tensor | None = None  # [num_query_heads], of ALiBi


@dataclass(frozen=True)
class Rounding:
    """What a kernel holds in fewer bits than fp32. Units are of a dtype's last place, halved."""

    p: float
    """Of P, relative to each weight."""
    out: float
    """Of the output, relative to it."""
    score: float = 0.0
    """Of a score, relative to it."""


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Result:
    """Output rows of a sequence and log-sum-exp, with the distance that each may be off."""

    out: torch.Tensor
    out_tolerance: torch.Tensor
    lse: torch.Tensor
    lse_tolerance: torch.Tensor


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax: Softmax,
    rounding: Rounding,
) -> Result:
    """Queries `[T, Hq, D]`, the last T of the tokens `[L, H, D]`; all fp64.

    An output is a weighted mean sum(p v). Weights rounded to u_p move it by u_p sum(p |v|), the
    final rounding by u_out |out|. Scores in fp32 are off by (D + 2) u_32 sum(|q| |k|), which moves
    a weight by as much, relatively, and its partner in the denominator too; sums over L tokens add
    L u_32.
    """
    count, length = len(query), len(keys)
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    score = torch.einsum("thd,lhd->htl", query, keys) * softmax.scale
    size = torch.einsum("thd,lhd->htl", query.abs(), keys.abs()) * abs(softmax.scale)
    if softmax.softcap:
        score = softmax.softcap * torch.tanh(score / softmax.softcap)
    distance = torch.arange(length - count, length)[:, None] - torch.arange(length)
    if softmax.slopes is not None:
        score = score - softmax.slopes.double()[:, None, None] * distance
        size = size + softmax.slopes.double()[:, None, None] * distance.abs()
    seen = torch.ones_like(distance, dtype=torch.bool)
    if softmax.causal:
        seen &= distance >= 0
    if softmax.window:
        seen &= distance < softmax.window
    score = score.masked_fill(~seen, -math.inf)
    size = size.masked_fill(~seen, 0.0)
    terms = [score]
    if softmax.sinks is not None:
        terms.append(softmax.sinks.double()[:, None, None].expand(-1, count, -1))
    lse = torch.cat(terms, dim=-1).logsumexp(-1)
    weight = (score - lse[..., None]).exp()

    query_dims = query.shape[-1] + 2
    off = size.amax(-1) * (2 * query_dims * FP32 + rounding.score) * 2 + 2 * (length + 8) * FP32
    mass = torch.einsum("htl,lhe->the", weight, values.abs())
    out = torch.einsum("htl,lhe->the", weight, values)
    relative = (off + rounding.p).transpose(0, 1)[..., None]
    # P is held relative to the running maximum, so what fp16 cannot hold of it is below 2**-25.
    tolerance = relative * mass + rounding.out * out.abs() + FP32 * values.abs().sum(0)
    return Result(out, tolerance, lse.T, (off + FP32 * (1 + lse.abs())).T)


@dataclass(frozen=True)
class Computed:
    """The output of a launch on `batch`, and what it should be. `lse` is `[T, Hq]`, if any."""

    batch: Batch
    out: torch.Tensor
    softmax: Softmax
    rounding: Rounding
    lse: torch.Tensor | None = None
    out_scale: float = 1.0

    def excess(self, sequence: int, keys: torch.Tensor, values: torch.Tensor) -> float:
        """The largest distance from attention over these tokens, in tolerances; NaN is inf."""
        rows = self.batch.rows(sequence)
        query = self.batch.query[rows].double()
        expected = attend(query, keys, values, self.softmax, self.rounding)
        out = self.out[rows].double() * self.out_scale
        off = [(out - expected.out).abs() / expected.out_tolerance]
        if self.lse is not None:
            lse = self.lse[rows].double()
            tolerance = expected.lse_tolerance + unit(self.lse.dtype) * expected.lse.abs()
            off.append((lse - expected.lse).abs() / tolerance)
        return max(float(each.nan_to_num(nan=math.inf).max()) for each in off)


def worst(computed: Computed) -> float:
    """The largest distance of a batch from the reference, in tolerances."""
    batch = computed.batch
    return max(
        computed.excess(sequence, *batch.tokens(sequence)) for sequence in range(len(batch.blocks))
    )


KNOWN_RACES = {
    ("kernel_unified_attention", "segm_expsum"),
    ("kernel_unified_attention", "segm_output"),
    ("kernel_unified_attention", "out"),
    ("kernel_unified_attention_2d", "out"),
    ("kernel_unified_attention_diffkv", "out"),
}
"""Upstream, up to 0.33.0: BLOCK_Q is BLOCK_M // num_queries_per_kv, and where that leaves a rest,
the last rows of a program are the first query of the next one. Both write it. Their sums over a
segment differ in the last bits, and so do rows of the output where the BLAS behind NumPy rounds a
row by its place in a tile, which depends on the processor."""


def assert_right(outcome: Outcome) -> None:
    """Every element is as near as it must be, and nothing else was touched."""
    __tracebackhide__ = True
    assert outcome.strays == []
    assert outcome.overflows == []
    assert {(race.kernel, race.allocation) for race in outcome.races} <= KNOWN_RACES
    assert outcome.changed == []
    assert worst(outcome.result) <= 1


def unseen_errors(computed: Computed, side: str, count: int = 8) -> list[tuple[int, int]]:
    """Tokens (sequence, position) that could be read from the slot before, unnoticed.

    `side` says what is read from there: `key`, `value`. Of the tokens that a query sees, about
    `count` of each sequence are tried, and its last.
    """
    unseen = []
    for sequence, (context, query) in enumerate(computed.batch.shape.sequences):
        keys, values = computed.batch.tokens(sequence)
        window, length = computed.softmax.window, context + query
        first = max(0, context + 1 - window) if window else 0
        for position in {*range(first, length, max(1, (length - first) // count)), length - 1}:
            wrong = {"key": keys.clone(), "value": values.clone()}
            wrong[side][position] = wrong[side][position - 1]
            if computed.excess(sequence, wrong["key"], wrong["value"]) <= 1:
                unseen.append((sequence, position))
    return unseen
