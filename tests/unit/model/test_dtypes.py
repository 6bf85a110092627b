import math

import ml_dtypes
import numpy as np
import pytest

from kvfuzz.model.dtypes import DTYPES, FLOATS

PEERS = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


def _as_codes(values: np.ndarray, name: str) -> np.ndarray:
    unsigned = np.uint8 if DTYPES[name].is_quantised else np.uint16
    return values.astype(PEERS[name]).view(unsigned)


@pytest.mark.parametrize("name", PEERS)
def test_every_code_decodes_to_what_ml_dtypes_says(name):
    count = 1 << (8 * DTYPES[name].itemsize)
    codes = np.arange(count, dtype=np.uint8 if count == 256 else np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        theirs = codes.view(PEERS[name]).astype(np.float64)
    ours = np.array([DTYPES[name].decode(int(code)) for code in codes])
    np.testing.assert_array_equal(ours, theirs)
    numbers = ~np.isnan(theirs)
    assert np.array_equal(np.signbit(ours[numbers]), np.signbit(theirs[numbers]))


@pytest.mark.parametrize("name", PEERS)
def test_in_range_values_encode_to_what_ml_dtypes_says(name):
    dtype, random = DTYPES[name], np.random.default_rng(3)
    reach = math.log2(dtype.max_finite)
    values = random.choice([-1, 1], 4000) * np.exp2(random.uniform(-reach - 12, reach, 4000))
    values = np.concatenate([values, [0.0, -0.0]]).astype(np.float32)
    values = values[np.abs(values) <= dtype.max_finite]
    ours = [dtype.encode(float(value)) for value in values]
    np.testing.assert_array_equal(ours, _as_codes(values, name))


@pytest.mark.parametrize("name", DTYPES)
def test_every_finite_code_encodes_back_to_itself(name):
    dtype = DTYPES[name]
    step = 1 if dtype.itemsize < 4 else 65_537
    for code in range(0, 1 << (8 * dtype.itemsize), step):
        value = dtype.decode(code)
        if math.isfinite(value):
            assert dtype.encode(value) == code


@pytest.mark.parametrize("name", [name for name in FLOATS if DTYPES[name].is_quantised])
def test_beyond_the_range_fp8_saturates_and_nan_stays_nan(name):
    dtype = DTYPES[name]
    assert dtype.decode(dtype.encode(1e9)) == dtype.max_finite
    assert dtype.decode(dtype.encode(-math.inf)) == -dtype.max_finite
    assert math.isnan(dtype.decode(dtype.encode(math.nan)))


def test_integers_round_half_to_even_and_end_at_their_own_range():
    int8 = DTYPES["int8"]
    found = [int8.decode(int8.encode(value)) for value in (0.5, 1.5, -2.5, 1e9, -math.inf, 126.6)]
    assert found == [0, 2, -2, 127, -128, 127]
    assert int8.encode(math.nan) == 0
    assert [int8.decode(code) for code in (0, 1, 0x7F, 0x80, 0xFF)] == [0, 1, 127, -128, -1]


def test_the_two_dialects_read_one_byte_as_two_values():
    assert DTYPES["e4m3fn"].decode(0x38) == 2 * DTYPES["e4m3fnuz"].decode(0x38) == 1.0
    assert math.isnan(DTYPES["e4m3fnuz"].decode(0x80))
    assert DTYPES["e4m3fn"].max_finite == 448
    assert DTYPES["e4m3fnuz"].max_finite == 240
