"""Scales that a kernel chooses for a group of elements, and the codes that follow, bit for bit.

All of it is fp32 arithmetic with one rounding an operation, in the order that the target declares
(`kvfuzz.model.target.Quantise`). NumPy's and torch's operations on fp32 are IEEE ones.
"""

import torch
from torch import Tensor

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.target import Quantise
from kvfuzz.oracles.codec import encode


def group_scales(absmax: Tensor, cache_dtype: str, how: Quantise) -> Tensor:
    """The scale of each group; fp32, shape of `absmax`, the largest magnitude of each in fp32."""
    top = torch.full_like(absmax, how.top(cache_dtype))
    return torch.clamp(torch.clamp(absmax, min=how.absmax_floor) / top, min=how.scale_floor)


def group_codes(values: Tensor, scale: Tensor, cache_dtype: str, how: Quantise) -> Tensor:
    """The codes of fp32 `values` by their scales, which broadcast: the quotient, rounded as the
    target declares, within `-top..top`, integers within all of their range."""
    dtype, top = DTYPES[cache_dtype], how.top(cache_dtype)
    quotient = (
        values / scale if how.quotient == "x/s" else values * (torch.ones_like(scale) / scale)
    )
    if not dtype.is_integer:
        return encode(torch.clamp(quotient, -top, top), dtype)
    if how.rounding == "half_away_fp32":
        half = torch.full_like(quotient, 0.5)
        quotient = torch.trunc(torch.where(quotient >= 0, quotient + half, quotient - half))
    return encode(quotient, dtype)
