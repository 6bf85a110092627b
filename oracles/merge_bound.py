"""Two parts of attention merged in fp64, and how far from it a kernel in fp32 may be.

Notation: u = 2^-24 is the unit roundoff of fp32, u_m that of the model's dtype, (1 + u)^n - 1 what
n roundings amount to (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, 3.1). A part
j has the result v_j and the log-sum-exp l_j, both given exactly, and the share p_j = exp(l_j - m) /
s, where m is the larger l and s = sum exp(l - m), so that o = p_1 v_1 + p_2 v_2 and L = m + log s.

Shares. There are two ways (Blanchard, Higham and Higham, "Accurately computing the log-sum-exp and
softmax functions", IMA Journal of Numerical Analysis, 2021): to divide exp(l_j - m) by s, of which
the exponent is off by u |l_j - m|; or exp(l_j - L), by u |l_j - L| and what L is off by, u |L| and
the error of log s. Taking exp by exp2, or being in base two throughout, rounds log2(e) and a
product with each number: 2 u of it. With FEW u for each function (log, and an exp within and
without) either is below

    delta_j = 4 u (|l_j| + |m|) + 3 FEW u

in the exponent, as |L| <= |m| + log 2, and a share that decides L is off by |l_j - m| exp(m - l_j)
u at most, less than u. With d = delta_1 + delta_2 a share is off by d exp(d) p_j at most, and so

    E = d exp(d) M,  M = p_1 |v_1| + p_2 |v_2|

Then, relative to M + E: the sum of weights, a division, two products and their sum, and a share
that a target holds in fewer bits. A weight or a product below the smallest normal number of fp32
may be lost. Last, u_m of the result for its rounding, and the smallest number of the model's dtype.

The log-sum-exp: log of a sum in [1, 2] that is off by sum p_j delta_j and u, log itself FEW u
absolutely (next to one, hardware has an absolute error: PTX ISA, lg2.approx), and adding m, or
going to base two and back, 4 u (|m| + |L|).

One empty part. exp(0) / (exp(0) + exp(-inf)) is one, and log(one) zero, without any rounding, so
that the other part comes back as it is: the bound is zero. So it is of two empty ones.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvfuzz.model.dtypes import CacheDtype
from kvfuzz.model.target import Precision
from kvfuzz.oracles.numerics import FEW, FP32, Bounded, smallest, unit

LOST = 2.0**-126
"""The smallest normal number of fp32."""


class Part(NamedTuple):
    """Results `[n, D]` and their log-sum-exps `[n]`, fp64; an empty part has zeros and -inf."""

    output: Tensor
    lse: Tensor


class Shares(NamedTuple):
    """How much each of two parts weighs, `[2, n]` fp64 each, and what both are weighed by."""

    share: Tensor
    delta: Tensor
    largest: Tensor
    """`[n]`, 0 where both are empty."""
    total: Tensor
    """`[n]`, sum of exp(l - largest); 0 where both are empty."""
    alone: Tensor
    """`[n]` bool: where at most one part is not empty."""


def shares(lse: Tensor) -> Shares:
    """The shares of parts with log-sum-exps `[2, n]`."""
    there = lse > -math.inf
    largest = lse.amax(0)
    largest = torch.where(largest > -math.inf, largest, 0.0)
    weight = torch.exp(lse - largest)
    total = weight.sum(0)
    spread = torch.where(there, lse.abs() + largest.abs(), 0.0)
    delta = torch.where(there, 4 * FP32 * spread + 3 * FEW * FP32, 0.0)
    share = weight / torch.where(total > 0, total, 1.0)
    return Shares(share, delta, largest, total, ~there.all(0))


def merged(prefix: Part, suffix: Part, precision: Precision, model: CacheDtype) -> Bounded:
    """The results of both parts together, `[n, D]`, as numbers of `model`."""
    of = shares(torch.stack((prefix.lse, suffix.lse)))
    p, q = of.share[..., None]
    value = p * prefix.output + q * suffix.output
    sizes = prefix.output.abs() + suffix.output.abs()
    d = of.delta.sum(0)[:, None]
    mass = p * prefix.output.abs() + q * suffix.output.abs()
    moved = torch.exp(d) * d * mass
    is_fp32 = precision.weights == "fp32"
    rounded = 0.0 if is_fp32 else unit(model)
    lost = LOST if is_fp32 else LOST + smallest(model)
    roundings = (1 + FP32) ** (FEW + 4) * (1 + rounded) - 1
    bound = moved + (mass + moved) * roundings + lost * (sizes + 2)
    bound = Bounded(value, bound).rounded(model).bound
    return Bounded(value, torch.where(of.alone[:, None], 0.0, bound))


def merged_lse(prefix: Tensor, suffix: Tensor) -> Bounded:
    """The log-sum-exps of both parts together, `[n]`, from those of each."""
    of = shares(torch.stack((prefix, suffix)))
    value = of.largest + torch.log(of.total)
    off = (of.share * of.delta).sum(0) + FP32
    bound = -torch.log1p(-off) + FEW * FP32 + 4 * FP32 * (of.largest.abs() + value.abs())
    return Bounded(value, torch.where(of.alone, 0.0, bound))
