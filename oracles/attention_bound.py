"""Attention in fp64, and how far from it a kernel in fp32 may be: a derived bound, no tolerance.

Notation: u = 2^-24 is the unit roundoff of fp32, U = 2^-23 that of its sums, which tensor cores may
cut off instead of rounding (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA
tensor cores", 2021), u_m that of the model's dtype, and sums of n terms in any order are off by
((1 + U)^n - 1) sum|terms| (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, 4.2).

Scores. A product q k is off by the roundings of its operands (K dequantised, cut for a tf32 dot),
a sum of D of them by the above, each scaling, cap or bias by some u of its result. That makes
delta_j of score s_j. exp(s_j - m) is computed of numbers of size |s_j| + |m|, in fp32, with a few
units of its own, and rescaled once a tile by numbers of a few units: more of delta_j, all of it
relative error of the weight w_j. (The errors of softmax are those of its exponents: Blanchard,
Higham and Higham, "Accurately computing the log-sum-exp and softmax functions", 2021.)

Weights to result. With o = sum p_j v_j, p_j = w_j / sum w, weights that are off by exp(eta_j),
|eta_j| <= delta_j <= d, give an o' with do/deta_j = p_j (v_j - o) along the way, where p_j grows to
exp(2d) p_j at most and o moves by E at most, so that

    E <= exp(2d) (A + E B),  A = sum p_j delta_j |v_j - o|,  B = sum p_j delta_j

which is solved for E; |v_j - o| is bounded by |v_j| + |o|. Then come: P rounded (u_p sum p|v|, and
what is below its smallest number relative to the largest weight), V dequantised, sums over L
tokens and the tiles' rescalings, partial results, the division, the rounding of the output.

Parts. A target may attend over parts of a sequence and merge their results by the log-sum-exp of
each, which it holds in fp32. That is off by u of its size, |m| + log L at most, or more of it as
the weight of its part is less, so that each of n merges moves the result by 2 sum p|v| of that,
and rounds it to what partial results are held in.

The reference itself is computed in fp64, in which sums of L terms are off by L 2^-53 sum|terms|.

Exact sums. Where all products and partial sums of q . k have few enough bits, and what is summed is
multiplied afterwards, equal scores are equal bits, so that the tokens with the largest score have
weight one exactly; all others together have some small weight, which is counted as lost. What is
left are merges, a division and a rounding. A query that is scaled before the dot must have elements
of one size, and zeros.

Log-sum-exp. l = m + log(sum w), m the largest score. Scores that are off by eta_j, |eta_j| <=
delta_j, give an l' with dl/deta_j = p_j along the way, so that it moves by max delta_j at most, and
by exp(2d) B at most. The sum is off as above, of positive terms, which its logarithm makes an
absolute error; then the logarithm and the addition of m have some u of what they are of, and so has
each part of a sequence whose l goes into a merge. With exact scores only those are left.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvfuzz.model.target import Precision
from kvfuzz.oracles.numerics import FEW, FP32, LEAST, Bounded, Numerics, smallest, unit

REFERENCE = 2.0**-50
"""Of sums of fp64, a term: eight times what is rounded of one."""
VACUOUS = 0.25
"""A relative error of weights from which on nothing is bounded."""


class Scoring(NamedTuple):
    """How scores are made of q . k."""

    scale: float
    cap: float
    """0 for none."""
    slopes: Tensor | None
    """`[Hq]`, fp64."""
    sinks: Tensor | None
    """`[Hq]`, fp64."""
    reach: int = 0
    """Tokens of the sequence, where more than are seen: positions may be counted from its first."""


class Attended(NamedTuple):
    """What attention makes of each query head."""

    output: Bounded
    """`[T, Hq, Dv]`, of the model's dtype."""
    lse: Bounded
    """`[T, Hq]`, the logarithm of the sum of exp(score), sinks included, in fp32."""


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    distance: Tensor,
    seen: Tensor,
    how: Scoring,
    numerics: Numerics,
) -> Attended:
    """Queries `[T, Hq, D]` over keys `[L, H, D]` and values `[L, H, Dv]`, all fp64.

    `distance` and `seen` are `[T, L]`: position of the query less that of the key, and whether it
    sees it; each query sees some key.
    """
    count, heads, _ = query.shape
    shared = keys.shape[1]
    group = heads // shared

    def rows(of: Tensor) -> Tensor:
        """`[T, Hq, n]` as `[H, G * T, n]`, the rows of a head of the cache together."""
        return of.transpose(0, 1).reshape(shared, group * count, -1)

    def of_heads(each: Tensor | None) -> Tensor | None:
        return None if each is None else rows(each[None, :, None].expand(count, -1, 1))

    found = _attended(
        rows(query),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        distance.repeat(group, 1),
        seen.repeat(group, 1),
        how._replace(slopes=of_heads(how.slopes), sinks=of_heads(how.sinks)),
        numerics,
    )

    def of_queries(each: Tensor) -> Tensor:
        """`[H, G * T, n]` as `[T, Hq, n]`."""
        return each.reshape(heads, count, -1).transpose(0, 1)

    output = Bounded(*map(of_queries, found.output))
    return Attended(output, Bounded(*(of_queries(each).squeeze(-1) for each in found.lse)))


class Scores(NamedTuple):
    """Scores `[H, R, L]`, -inf where nothing is seen, and how far off each is."""

    score: Tensor
    off: Tensor
    largest: Tensor
    """`[H, R, 1]`, sinks included."""


def _scored(
    q: Tensor, k: Tensor, distance: Tensor, seen: Tensor, how: Scoring, numerics: Numerics
) -> Scores:
    # Of what is held in the model's dtype, its unit takes the place of that of fp32.
    held = numerics.unit(numerics.precision.sums)
    score, size = (q @ k.mT) * how.scale, (q.abs() @ k.abs().mT) * how.scale
    sums = (1 + numerics.dot) ** (q.shape[2] + 4)
    off = size * (sums * (1 + numerics.asked) * (1 + numerics.cached) - 1)
    if how.cap:
        score = how.cap * torch.tanh(score / how.cap)
        off = off + FEW * held * (how.cap + score.abs())
    if how.slopes is not None:
        score = score - how.slopes * distance
        off = off + 4 * held * (how.slopes * max(how.reach, k.shape[1]) + score.abs())
    score = score.masked_fill(~seen, -math.inf)
    largest = score.amax(-1, keepdim=True)
    if how.sinks is not None:
        largest = torch.maximum(largest, how.sinks)
    return Scores(score, off, largest)


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distance: Tensor,
    seen: Tensor,
    how: Scoring,
    numerics: Numerics,
) -> Attended:
    """Queries `[H, R, D]` over the keys of their head `[H, L, D]`; slopes and sinks `[H, R, 1]`."""
    precision, model = numerics.precision, numerics.model
    held = numerics.unit(precision.sums)
    length, tiles = k.shape[1], -(-k.shape[1] // precision.tile) + 1
    score, off, largest = _scored(q, k, distance, seen, how, numerics)
    weight = torch.exp(score - largest)
    total = weight.sum(-1, keepdim=True)
    if how.sinks is not None:
        total = total + torch.exp(how.sinks - largest)
    p = weight / total
    value, mass = p @ v, p @ v.abs()
    # Of weights and their sum: exponents of numbers as large as the scores, and the rescalings.
    spread = score.masked_fill(~seen, 0.0).abs() + largest.abs()
    delta = (off + 4 * held * spread + FEW * held * (tiles + 1)).masked_fill(~seen, 0.0)
    sums = (1 + max(held, numerics.dot)) ** (length + 2 * tiles + FEW) - 1
    vanished = numerics.least_weight * (seen.double() @ v.abs()) / total
    merged = mass * _merging(length, largest.abs(), numerics)
    bound = (
        _moved(p, delta, v, value, mass)
        + mass * (numerics.weight + numerics.cached + 2 * FP32 + 2 * sums)
        + vanished
        + merged
        + value.abs() * (2 * sums + 2 * FEW * held)
    )
    is_exact = torch.zeros_like(largest, dtype=torch.bool)
    if precision.sums == "fp32":
        is_exact = _is_exact(q, k, v, seen, how, numerics)[..., None]
        winners = _of_winners(weight, total, v, value) + merged + value.abs() * 2 * FEW * FP32
        # Of numbers with few bits, as fp8 has, sums may be exact although many tokens count.
        bound = torch.where(is_exact, torch.minimum(winners, bound), bound)
    # What this arithmetic rounds itself, and what fp32, or a partial result, has no numbers for.
    bound = bound + mass * length * REFERENCE + (length + FEW) * LEAST
    bound = bound + merges(length, precision) * smallest(model)
    lse = largest + torch.log(total)
    off_lse = torch.where(is_exact, 0.0, _moved_lse(p, delta)) + sums / (1 - sums)
    off_lse = off_lse + FEW * held * (1 + torch.log(total) + largest.abs() + lse.abs())
    return Attended(Bounded(value, bound).rounded(model), Bounded(lse, off_lse))


def _moved_lse(p: Tensor, delta: Tensor) -> Tensor:
    """How far the log-sum-exp moves with the scores: `[H, R, 1]`."""
    d = delta.amax(-1, keepdim=True)
    return torch.minimum(d, torch.exp(2 * d) * (p * delta).sum(-1, keepdim=True))


def merges(length: int, precision: Precision) -> int:
    """How often the results of parts of `length` tokens are merged by a log-sum-exp, at most."""
    if precision.merged == "sums":
        return 0
    return -(-length // precision.merged_part) if precision.merged_part else 1


def _merging(length: int, largest: Tensor, numerics: Numerics) -> Tensor | float:
    """How far merging moves a result, relative to sum p|v|, where the largest score is `largest`:
    by roundings to the model's dtype, and by sums that are off."""
    precision, count = numerics.precision, merges(length, numerics.precision)
    held = unit(numerics.model) * (1 + max(1, count)) if precision.partial == "model" else 0.0
    sums = 4 * FP32 * (largest + math.log(length) + 1) + FEW * FP32
    return held + 2 * count * sums


def _moved(p: Tensor, delta: Tensor, v: Tensor, value: Tensor, mass: Tensor) -> Tensor:
    """E of the docstring, infinite where weights are too far off for any."""
    d = delta.amax(-1, keepdim=True)
    b = (p * delta).sum(-1, keepdim=True)
    a = (p * delta) @ v.abs() + value.abs() * b
    grown = torch.exp(2 * d)
    solved = grown * a / (1 - grown * b)
    return torch.where((d > VACUOUS) | (grown * b > VACUOUS), math.inf, solved)


def _of_winners(weight: Tensor, total: Tensor, v: Tensor, value: Tensor) -> Tensor:
    """How far the result is from the mean over the tokens of weight one, doubled."""
    rest = torch.where(weight == 1, 0.0, weight)
    share = rest.sum(-1, keepdim=True) / total
    return 2 * (rest @ v.abs() / total + share * value.abs())


def _is_exact(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, how: Scoring, numerics: Numerics
) -> Tensor:
    """Of which queries all sums are exact, whatever their order; bool `[H, R]`."""
    nothing = torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device)
    if how.cap or how.slopes is not None or how.sinks is not None:
        return nothing
    some, room = seen.any(0), 2.0**numerics.exact_bits
    k, v = k[:, some], v[:, some]
    if float(v.abs().sum(1).amax()) >= _quantum(v) * room:
        return nothing
    sizes = (q.abs() @ k.abs().mT).amax(-1)
    if numerics.precision.scaled_query is None:
        return sizes < _quantum(q) * _quantum(k) * room
    return _is_exact_scaled(q, sizes / _quantum(k), numerics, room)


def _is_exact_scaled(q: Tensor, sizes: Tensor, numerics: Numerics, room: float) -> Tensor:
    """The same of queries that are multiplied before the dot, by any number, such as the scale of
    scores and log2(e). Equal elements stay equal, and have then all the bits that they are held
    in: sums of them are exact where those are few, and so is one product alone."""
    largest = q.abs().amax(-1)
    there = q != 0
    alike = (~there | (q.abs() == largest[..., None])).all(-1)
    bits = 24 if numerics.precision.scaled_query == "fp32" else numerics.model.mantissa_bits + 1
    few = sizes * 2.0**bits < largest * room
    return alike & (few | (there.sum(-1) <= 1))


def _quantum(numbers: Tensor) -> float:
    """The largest power of two that all numbers, not all zero, are multiples of; 1 for zeros."""
    mantissa, exponent = torch.frexp(numbers[numbers != 0])
    if not len(mantissa):
        return 1.0
    whole = (mantissa * 2.0**53).to(torch.int64)
    lowest = (whole & -whole).double() * torch.exp2(exponent.double() - 53)
    return float(lowest.min())
