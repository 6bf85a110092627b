"""The scales that a quantiser computes itself: one for each group, from its absmax, in fp32.

    scale = max(max(absmax, absmax_floor) / largest, scale_floor)

every operation rounded once to fp32. The numbers are those that a target declares (`Quantise`).
"""

import torch
from torch import Tensor

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import FP32_MANTISSA
from kvfuzz.model.target import Quantise
from kvfuzz.oracles.codec import FP32_MANTISSA_BITS, encode, quotient


def largest_of(cache_dtype: str, how: Quantise) -> float:
    """The number that the absmax of a group is mapped to in `cache_dtype`."""
    declared = how.largest.get(cache_dtype)
    return DTYPES[cache_dtype].max_finite if declared is None else declared


def group_scales(absmax_values: Tensor, cache_dtype: str, how: Quantise) -> Tensor:
    """The fp32 scale of each group whose greatest magnitude is given; shape of `absmax_values`."""
    absmax = torch.maximum(absmax_values, _fp32(how.absmax_floor, absmax_values))
    scales = absmax / _fp32(largest_of(cache_dtype, how), absmax)
    return torch.maximum(scales, _fp32(how.scale_floor, scales))


def group_codes(values: Tensor, scale: Tensor, cache_dtype: str, how: Quantise) -> Tensor:
    """The codes of fp32 `values` by their scales, which broadcast: the quotient, rounded as the
    target declares, within `-largest..largest`, integers within all of their range."""
    dtype, found = DTYPES[cache_dtype], quotient(values, scale, how)
    if not dtype.is_integer:
        largest = largest_of(cache_dtype, how)
        return encode(torch.clamp(found, -largest, largest), dtype)
    if how.rounding == "half_away_fp32":
        half = torch.full_like(found, 0.5)
        found = torch.trunc(torch.where(found >= 0, found + half, found - half))
    return encode(found, dtype)


def next_powers_of_two(scales: Tensor) -> Tensor:
    """The least power of two that is no less than each positive, normal fp32: 2**ceil(log2(x)), by
    its bits."""
    bits = (scales.view(torch.int32) + FP32_MANTISSA) >> FP32_MANTISSA_BITS << FP32_MANTISSA_BITS
    return bits.view(torch.float32)


def _fp32(number: float, like: Tensor) -> Tensor:
    return torch.tensor(number, dtype=torch.float32, device=like.device)
