"""Scales of an fp8 cache as fp32 bit patterns: one, powers of two, between them, tiny and huge.

K and V get different ones, so that a kernel which mixes them up is wrong. A scale is bounded so
that neither a stored nor a loaded value overflows: saturation is a property of its own.
"""

import math

from kvfuzz.model.axes import EXTREME
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.strategies.choices import Choices, number
from kvfuzz.strategies.rows import Row

SMALLEST_EXPONENT, LARGEST_EXPONENT = -6, 3
MANTISSA_BITS = DTYPES["fp32"].mantissa_bits


def scale_pair(choices: Choices, row: Row) -> tuple[int, int]:
    """(k_scale, v_scale) bit patterns of the row's kind; without a scale both are 1."""
    if row["scale"] in ("none", "unit"):
        return FP32_ONE, FP32_ONE
    if row["scale"] == "extreme":
        return _extreme(choices, row["model_dtype"]), _extreme(choices, row["model_dtype"])
    cache, model = DTYPES[row["cache_dtype"]], DTYPES[row["model_dtype"]]
    headroom = math.frexp(model.max_finite / cache.max_finite)[1] - 2
    if row["granularity"] != "tensor":
        headroom -= 2  # the largest of many is four times the least
    highest = min(LARGEST_EXPONENT, headroom)
    k_exponent = number(choices, SMALLEST_EXPONENT, highest)
    # Another exponent: one of those left, counted from the smallest.
    v_exponent = number(choices, SMALLEST_EXPONENT, highest - 1)
    v_exponent += v_exponent >= k_exponent
    mantissas = (0, 0)
    if row["scale"] == "general":
        most = (1 << MANTISSA_BITS) - 1
        mantissas = (choices.integer(1, most), choices.integer(1, most))
    return _bits(k_exponent, mantissas[0]), _bits(v_exponent, mantissas[1])


def _extreme(choices: Choices, model_dtype: str) -> int:
    """A tiny or huge scale; half precision has no numbers for huge ones, or for very tiny ones."""
    if model_dtype == "fp16":
        exponent = -number(choices, EXTREME, EXTREME + 6)
    else:
        exponent = number(choices, EXTREME, 100) * (1 - 2 * number(choices, 0, 1))
    return _bits(exponent, choices.integer(0, (1 << MANTISSA_BITS) - 1))


def _bits(exponent: int, mantissa: int) -> int:
    return (exponent + DTYPES["fp32"].bias) << MANTISSA_BITS | mantissa
