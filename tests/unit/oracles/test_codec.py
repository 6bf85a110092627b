import math

import numpy as np
import pytest
import torch

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.oracles.codec import decode, encode, is_nan

NARROW = [name for name, dtype in DTYPES.items() if dtype.itemsize < 4]


@pytest.mark.parametrize("name", NARROW)
def test_decoding_every_code_agrees_with_the_scalar_definition(name):
    dtype = DTYPES[name]
    codes = torch.arange(1 << (8 * dtype.itemsize))
    values = decode(codes, dtype)
    expected = torch.tensor([dtype.decode(code) for code in codes.tolist()])
    assert torch.equal(values.isnan(), expected.isnan())
    assert torch.equal(is_nan(codes, dtype), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(values[known].view(torch.int32), expected[known].view(torch.int32))


@pytest.mark.parametrize("name", DTYPES)
def test_encoding_agrees_with_the_scalar_definition_ties_included(name):
    dtype, random = DTYPES[name], np.random.default_rng(1)
    exponents = np.arange(max(-140, -dtype.bias - 30), min(127, dtype.bias + 3))
    mantissas = random.integers(0, 1 << 12, (len(exponents), 40)) / (1 << 12)  # many exact ties
    values = np.concatenate([(1 + mantissas).ravel() * np.exp2(np.repeat(exponents, 40))])
    values = np.concatenate([values, -values, [0.0, -0.0, np.inf, -np.inf, np.nan, 1e38, 1e-45]])
    tensor = torch.tensor(values, dtype=torch.float32)
    expected = [dtype.encode(float(value)) for value in tensor.tolist()]
    assert encode(tensor, dtype).tolist() == expected


@pytest.mark.parametrize("name", NARROW)
def test_every_finite_code_survives_decode_and_encode(name):
    dtype = DTYPES[name]
    codes = torch.arange(1 << (8 * dtype.itemsize))
    values = decode(codes, dtype)
    finite = values.isfinite()
    assert torch.equal(encode(values[finite], dtype), codes[finite])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_sixteen_bit_formats_agree_with_torch(name):
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=random).to(torch.int32)
    values = bits.view(torch.float32)
    values = values[~values.isnan()]
    theirs = values.to({"bf16": torch.bfloat16, "fp16": torch.float16}[name])
    ours = encode(values, DTYPES[name])
    assert torch.equal(ours, theirs.view(torch.int16).to(torch.int64) & 0xFFFF)


def test_fp8_saturates_and_keeps_nan():
    values = torch.tensor([1e9, -math.inf, math.nan])
    for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"):
        dtype = DTYPES[name]
        high, low, nan = encode(values, dtype).tolist()
        assert (high, low) == (dtype.max_code, dtype.max_code | dtype.sign_bit)
        assert math.isnan(dtype.decode(nan))


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"])
def test_the_lower_half_of_an_fp32_decides_between_fp8_neighbours(name):
    """Just below, at and just above every midpoint: half a step is far beyond 16 bits."""
    dtype = DTYPES[name]
    codes = range(dtype.max_code)
    ties = torch.tensor([(dtype.decode(c) + dtype.decode(c + 1)) / 2 for c in codes])
    for by in (-0x8001, -1, 0, 1, 0x7FFF):
        near = (ties.view(torch.int32) + by).view(torch.float32)
        for values in (near, -near):
            expected = [dtype.encode(value) for value in values.tolist()]
            assert encode(values, dtype).tolist() == expected


def test_an_nan_whose_bits_are_all_in_the_lower_half_is_encoded_as_one():
    nan = torch.tensor([0x7F800001, 0xFF80FFFF - (1 << 32)], dtype=torch.int32)
    for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"):
        dtype = DTYPES[name]
        assert encode(nan.view(torch.float32), dtype).tolist() == [dtype.nan_code] * 2
