"""Codes to numbers and back, in torch integer arithmetic on any device.

A *code* is the bit pattern of an element as int64. `decode` is exact. `encode` rounds fp32 to
nearest, ties to even, and saturates the fp8 formats at their largest finite value, infinities
included; the 16-bit formats overflow to infinity. The scalar definition that both are tested
against is `kvfuzz.model.dtypes`.

Formats of at most 16 bits are decoded by a table of all their codes. An fp8 code is looked up by
the top half of the fp32 bits, the lowest bit of which is set where the other half is not zero:
rounded so, to odd, a number keeps all that deciding between two fp8 neighbours takes.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kvfuzz.model.dtypes import DTYPES, FINITE_UNSIGNED_ZERO, INFINITY_AND_NAN, CacheDtype
from kvfuzz.model.target import Quantise

FP32_BIAS = 127
FP32_EXPONENT_BITS = 8
FP32_MANTISSA_BITS = 23


def is_nan(codes: Tensor, dtype: CacheDtype) -> Tensor:
    """Which codes are NaNs; shape of `codes`, bool."""
    if dtype.is_integer:
        return torch.zeros_like(codes, dtype=torch.bool)
    if dtype.specials == FINITE_UNSIGNED_ZERO:
        return codes == dtype.sign_bit
    magnitude = codes & (dtype.sign_bit - 1)
    has_infinity = dtype.specials == INFINITY_AND_NAN
    return magnitude > dtype.max_code + (1 if has_infinity else 0)


def decode(codes: Tensor, dtype: CacheDtype) -> Tensor:
    """The fp32 values of `codes`; NaNs become the fp32 quiet NaN."""
    if dtype.itemsize > 2:  # fp32: the code is the number
        return _as_float(torch.where(is_nan(codes, dtype), dtype.nan_code, codes))
    return _values(dtype.name, codes.device)[codes]


@lru_cache(maxsize=32)
def _values(name: str, device: torch.device) -> Tensor:
    """The fp32 value of every code."""
    dtype = DTYPES[name]
    return _decoded(torch.arange(1 << (8 * dtype.itemsize), device=device), dtype)


@lru_cache(maxsize=32)
def _rounded(name: str, device: torch.device) -> Tensor:
    """The code nearest to each fp32 whose low 16 bits are zero; int64 `[65536]`."""
    return _encoded(_as_float(torch.arange(1 << 16, device=device) << 16), DTYPES[name])


def _decoded(codes: Tensor, dtype: CacheDtype) -> Tensor:
    if dtype.is_integer:
        return (codes - (codes & dtype.sign_bit) * 2).to(torch.float32)
    magnitude = codes & (dtype.sign_bit - 1)
    exponent, mantissa = magnitude >> dtype.mantissa_bits, magnitude % (1 << dtype.mantissa_bits)
    widened = mantissa << (FP32_MANTISSA_BITS - dtype.mantissa_bits)
    normal = ((exponent + (FP32_BIAS - dtype.bias)) << FP32_MANTISSA_BITS) | widened
    if dtype.bias < FP32_BIAS:
        # A subnormal of a narrower format is normal in fp32, and this product is exact.
        quantum = 2.0 ** (1 - dtype.bias - dtype.mantissa_bits)
        subnormal = (mantissa.to(torch.float32) * quantum).view(torch.int32).to(torch.int64)
        bits = torch.where(exponent > 0, normal, subnormal)
    else:
        bits = normal
    if dtype.specials == INFINITY_AND_NAN:
        infinity = 0xFF << FP32_MANTISSA_BITS
        bits = torch.where(magnitude == dtype.max_code + 1, infinity, bits)
    bits = torch.where(codes >= dtype.sign_bit, bits | (1 << 31), bits)
    bits = torch.where(is_nan(codes, dtype), 0x7FC00000, bits)
    return _as_float(bits)


def encode(values: Tensor, dtype: CacheDtype) -> Tensor:
    """The codes nearest to fp32 `values`, ties to even; int64, shape of `values`."""
    if dtype.is_integer:
        low, high = -dtype.sign_bit, dtype.max_code
        whole = torch.round(torch.nan_to_num(values, nan=0.0).clamp(low, high))
        return whole.to(torch.int64) & (2 * dtype.sign_bit - 1)
    bits = values.view(torch.int32)
    if dtype.exponent_bits == FP32_EXPONENT_BITS:
        return _shortened(bits.to(torch.int64) & 0xFFFFFFFF, dtype)
    if not dtype.is_quantised:
        return _encoded(values, dtype)
    odd = (bits >> 16) & 0xFFFF | ((bits & 0xFFFF) != 0)
    return _rounded(dtype.name, values.device)[odd]


def _shortened(bits: Tensor, dtype: CacheDtype) -> Tensor:
    """The codes of a format with fp32's exponents: the upper bits of fp32 `bits`, rounded."""
    dropped = FP32_MANTISSA_BITS - dtype.mantissa_bits
    magnitude = bits & 0x7FFFFFFF
    nan = magnitude > 0xFF << FP32_MANTISSA_BITS
    if dropped:
        bits = (bits + ((1 << (dropped - 1)) - 1) + (bits >> dropped & 1)) >> dropped
    return torch.where(nan, dtype.nan_code, bits)


def _encoded(values: Tensor, dtype: CacheDtype) -> Tensor:
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    magnitude = bits & 0x7FFFFFFF
    nan = magnitude > 0xFF << FP32_MANTISSA_BITS
    exponent = torch.clamp(magnitude >> FP32_MANTISSA_BITS, min=1)
    significand = magnitude - ((exponent - 1) << FP32_MANTISSA_BITS)  # implicit bit kept in place
    target = exponent - FP32_BIAS + dtype.bias
    # Below the target's smallest normal the quantum stays put and the significand is shifted more.
    shift = FP32_MANTISSA_BITS - dtype.mantissa_bits + torch.clamp(1 - target, min=0)
    rounded = _round_half_even(significand, torch.clamp(shift, max=40))
    code = rounded + ((torch.clamp(target, min=1) - 1) << dtype.mantissa_bits)
    overflow = dtype.max_code if dtype.is_quantised else dtype.max_code + 1
    code = torch.where(code > dtype.max_code, overflow, code)
    negative = bits >= 1 << 31
    if dtype.specials == FINITE_UNSIGNED_ZERO:
        negative = negative & (code > 0)
    code = torch.where(negative, code | dtype.sign_bit, code)
    return torch.where(nan, dtype.nan_code, code)


def _round_half_even(value: Tensor, shift: Tensor) -> Tensor:
    """value / 2**shift to the nearest integer, ties to even."""
    one = torch.ones_like(shift)
    half = (one << shift) >> 1
    tie_to_even = torch.clamp(half - 1, min=0) + torch.where(half > 0, (value >> shift) & 1, 0)
    return (value + tie_to_even) >> shift


def _as_float(bits: Tensor) -> Tensor:
    """fp32 of the low 32 bits of int64 `bits`."""
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)


def quotient(values: Tensor, scale: Tensor, how: Quantise) -> Tensor:
    """fp32 `values` by their scales, which broadcast, as the target declares: divided, or times the
    reciprocal, every operation rounded once to fp32."""
    return values / scale if how.quotient == "x/s" else values * (torch.ones_like(scale) / scale)
