import ctypes
import ctypes.util
from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from kvfuzz.cpu.numerics import (
    FORMATS,
    convert,
    decode,
    encode,
    encode_bits,
    fused_multiply_add,
)

REFERENCE = {
    "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "f8E5M2": ml_dtypes.float8_e5m2,
    "f8E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
}
FP8 = ("f8E4M3FN", "f8E4M3FNUZ", "f8E5M2", "f8E5M2FNUZ")


def largest(element):
    return float(decode(np.array([FORMATS[element].largest], np.uint16), element)[0])


def codes_of(values, element):
    with np.errstate(all="ignore"):
        cast = values.astype(REFERENCE[element])
    return cast.view(FORMATS[element].storage)


def random_floats(count=1 << 16):
    rng = np.random.default_rng(7)
    scale = np.exp2(rng.uniform(-30, 18, count))
    return (rng.standard_normal(count) * scale).astype(np.float32)


@pytest.mark.parametrize("element", REFERENCE)
def test_every_code_decodes_to_the_reference_value(element):
    codes = np.arange(1 << FORMATS[element].bits).astype(FORMATS[element].storage)
    expected = codes.view(REFERENCE[element]).astype(np.float32)
    np.testing.assert_array_equal(decode(codes, element), expected)


@pytest.mark.parametrize("element", REFERENCE)
def test_encoding_a_decoded_number_gives_its_code_back(element):
    codes = np.arange(1 << FORMATS[element].bits).astype(FORMATS[element].storage)
    values = decode(codes, element)
    numbers = np.isfinite(values)
    np.testing.assert_array_equal(encode(values[numbers], element), codes[numbers])


@pytest.mark.parametrize("element", FP8)
@pytest.mark.parametrize("source", ["f16", "bf16"])
def test_all_16_bit_inputs_in_range_round_to_fp8_as_the_reference_does(source, element):
    codes = np.arange(1 << 16).astype(np.uint16)
    values = decode(codes, source)
    in_range = np.abs(values) <= largest(element)
    expected = codes_of(values[in_range], element)
    np.testing.assert_array_equal(convert(codes, source, element)[in_range], expected)
    np.testing.assert_array_equal(encode(values[in_range], element), expected)


@pytest.mark.parametrize("element", REFERENCE)
def test_random_fp32_in_range_rounds_as_the_reference_does(element):
    values = random_floats()
    values = values[np.abs(values) <= largest(element)]
    np.testing.assert_array_equal(encode(values, element), codes_of(values, element))
    np.testing.assert_array_equal(
        encode_bits(values.view(np.uint32), FORMATS[element]), codes_of(values, element)
    )


def fp32_patterns():
    """2**20 bit patterns: every exponent and sign, random mantissas and ties of all formats."""
    rng = np.random.default_rng(11)
    mantissas = rng.integers(0, 1 << 23, (512, 2048), dtype=np.uint32)
    for column, kept in enumerate((2, 3, 7, 10)):  # mantissa bits of the formats
        half = np.uint32(1 << (22 - kept))
        ties = (mantissas[:, :256] >> np.uint32(23 - kept) << np.uint32(23 - kept)) | half
        for offset in (-1, 0, 1):
            start = (3 * column + offset + 1) * 128
            mantissas[:, start : start + 128] = ties[:, :128] + np.uint32(offset % (1 << 32))
    mantissas[:, -2:] = 0, 0x7FFFFF
    exponents = np.arange(512, dtype=np.uint32)[:, None] << np.uint32(23)
    return (exponents | (mantissas & np.uint32(0x7FFFFF))).ravel()


def values_of(source):
    """All values of a 16-bit format, or of the fp32 patterns, as fp32."""
    if source == "f32":
        return fp32_patterns().view(np.float32)
    return decode(np.arange(1 << 16).astype(np.uint16), source)


def exact_code_value(code, fmt):
    """What a positive code means, from its fields, as a rational number."""
    field, fraction = code >> fmt.mantissa, Fraction(code & (1 << fmt.mantissa) - 1)
    fraction /= 1 << fmt.mantissa
    if field == 0:
        return fraction * Fraction(2) ** (1 - fmt.bias)
    return (1 + fraction) * Fraction(2) ** (field - fmt.bias)


def rounded_exactly(values, element):
    """Codes by exact comparison with every midpoint between neighbours. NaN is left out.

    Beyond the largest finite value, infinity included, a code saturates: the lane's documented
    choice for fp8, after Triton's AMD backend.
    """
    fmt = FORMATS[element]
    exact = [exact_code_value(code, fmt) for code in range(fmt.largest + 1)]
    middles = [(low + high) / 2 for low, high in pairwise(exact)]
    as_floats = np.array([float(middle) for middle in middles])
    assert [Fraction(middle) for middle in as_floats] == middles  # so fp64 compares exactly
    magnitude = np.abs(values).astype(np.float64)
    codes = np.searchsorted(as_floats, magnitude, side="left")
    tie = np.append(as_floats, np.inf)[codes] == magnitude
    codes += tie & (codes < fmt.largest) & (codes & 1 == 1)
    sign = np.signbit(values)
    if fmt.unsigned_zero:
        sign &= codes > 0
    return (codes | sign.astype(np.int64) << (fmt.bits - 1)).astype(np.uint8)


@pytest.mark.parametrize("element", FP8)
@pytest.mark.parametrize("source", ["f16", "bf16", "f32"])
def test_fp8_codes_are_those_of_exact_rational_rounding_and_saturate(source, element):
    values = values_of(source)
    numbers = ~np.isnan(values)
    expected = rounded_exactly(values[numbers], element)
    np.testing.assert_array_equal(encode(values[numbers], element), expected)
    if source != "f32":
        codes = np.arange(1 << 16).astype(np.uint16)
        np.testing.assert_array_equal(convert(codes, source, element)[numbers], expected)


@pytest.mark.parametrize("element", FP8)
@pytest.mark.parametrize("source", ["f16", "bf16", "f32"])
def test_fp8_codes_are_the_references_and_saturate_where_it_overflows(source, element):
    values = values_of(source)
    ours, theirs = encode(values, element), codes_of(values, element)
    finite = np.isfinite(theirs.view(REFERENCE[element]).astype(np.float32))
    np.testing.assert_array_equal(ours[finite], theirs[finite])
    overflow = ~finite & ~np.isnan(values)
    top = np.where(np.signbit(values), FORMATS[element].largest | 0x80, FORMATS[element].largest)
    np.testing.assert_array_equal(ours[overflow], top[overflow])
    assert np.isnan(decode(ours, element)[np.isnan(values)]).all()


@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_fp32_of_every_exponent_rounds_to_16_bits_as_the_reference_does(element):
    values = values_of("f32")
    ours, theirs = encode(values, element), codes_of(values, element)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(ours[numbers], theirs[numbers])
    np.testing.assert_array_equal(encode_bits(values.view(np.uint32), FORMATS[element]), ours)


@pytest.mark.parametrize("element", FP8)
def test_ties_between_neighbouring_fp8_numbers_go_to_the_even_code(element):
    codes = np.arange(FORMATS[element].largest).astype(np.uint8)
    low, high = decode(codes, element), decode(codes + np.uint8(1), element)
    middle = ((low.astype(np.float64) + high) / 2).astype(np.float32)
    np.testing.assert_array_equal(encode(middle, element), codes + (codes & 1))
    np.testing.assert_array_equal(encode(np.nextafter(middle, np.float32(0)), element), codes)
    beyond = np.nextafter(middle, np.float32(np.inf))
    np.testing.assert_array_equal(encode(beyond, element), codes + np.uint8(1))


@pytest.mark.parametrize("element", FP8)
def test_fp8_overflow_and_infinity_saturate_to_the_largest_finite_value(element):
    values = np.array([1e6, np.inf, -1e6, -np.inf], np.float32)
    top = largest(element)
    np.testing.assert_array_equal(decode(encode(values, element), element), [top, top, -top, -top])


@pytest.mark.parametrize(
    ("element", "positive", "negative"),
    [("f8E4M3FN", 0x7F, 0xFF), ("f8E4M3FNUZ", 0x80, 0x80), ("f8E5M2FNUZ", 0x80, 0x80)],
)
def test_nan_becomes_the_nan_code_of_the_fp8_format(element, positive, negative):
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001], np.uint32)
    expected = [positive, negative, positive, negative]
    np.testing.assert_array_equal(encode(nans.view(np.float32), element), expected)


def test_nan_stays_nan_with_its_sign_in_e5m2_and_the_16_bit_formats():
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
    for element in ("f8E5M2", "f16", "bf16"):
        codes = encode(nans, element)
        assert np.isnan(decode(codes, element)).all()
        sign = FORMATS[element].bits - 1
        np.testing.assert_array_equal(codes >> sign, [0, 1, 0])


@pytest.mark.parametrize("element", ["f8E4M3FNUZ", "f8E5M2FNUZ"])
def test_minus_zero_and_tiny_negatives_are_plain_zero_in_fnuz(element):
    values = np.array([-0.0, -1e-30], np.float32)
    np.testing.assert_array_equal(encode(values, element), [0, 0])


def test_16_bit_formats_overflow_to_infinity():
    values = np.array([65519.0, 65520.0, np.inf, -1e30], np.float32)
    np.testing.assert_array_equal(encode(values, "f16"), [0x7BFF, 0x7C00, 0x7C00, 0xFC00])
    top = np.array([0x7F7F7FFF, 0x7F7F8000], np.uint32).view(np.float32)
    np.testing.assert_array_equal(encode(top, "bf16"), [0x7F7F, 0x7F80])


@pytest.mark.parametrize("element", REFERENCE)
def test_rounding_toward_zero_never_gains_magnitude(element):
    values = random_floats()
    values = values[np.abs(values) <= largest(element)]
    truncated = decode(encode(values, element, "rtz"), element)
    nearest = decode(encode(values, element), element)
    assert (np.abs(truncated) <= np.abs(values)).all()
    differs = truncated != nearest
    assert (np.abs(nearest[differs]) > np.abs(values[differs])).all()


def test_fp64_is_rounded_once_on_its_way_to_16_bits():
    # Just above a tie of fp16: rounding to fp32 first would lose what breaks the tie.
    value = np.array([1.0 + 2.0**-11 + 2.0**-40])
    assert encode(value, "f16")[0] == 0x3C01
    assert encode(value.astype(np.float32), "f16")[0] == 0x3C00


def test_fused_multiply_add_rounds_once():
    rng = np.random.default_rng(3)
    a, b, c = (rng.standard_normal((3, 2000)) * np.exp2(rng.integers(-40, 40, (3, 2000)))).astype(
        np.float32
    )
    c[:1000] = -(a * b)[:1000]
    result = fused_multiply_add(a, b, c)
    below, above = (np.nextafter(result, np.float32(to)) for to in (-np.inf, np.inf))
    for i in range(len(a)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        gap = abs(Fraction(float(result[i])) - exact)
        assert gap <= abs(Fraction(float(below[i])) - exact)
        assert gap <= abs(Fraction(float(above[i])) - exact)


def test_fused_multiply_add_of_fp64_is_that_of_the_c_library():
    name = ctypes.util.find_library("m")
    if name is None:
        pytest.skip("no C library to compare with")
    library = ctypes.CDLL(name)
    library.fma.restype = ctypes.c_double
    library.fma.argtypes = [ctypes.c_double] * 3
    rng = np.random.default_rng(3)
    a, b, c = rng.standard_normal((3, 3000)) * np.exp2(rng.integers(-530, 530, (3, 3000)))
    special = [0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, 5e-324, 1e308]
    c[:1000] = -(np.clip(a[:1000], -1e150, 1e150) * np.clip(b[:1000], -1e150, 1e150))
    corners = np.stack(np.meshgrid(special, special, special)).reshape(3, -1)
    a, b, c = np.concatenate([np.stack([a, b, c]), corners], 1)
    with np.errstate(all="ignore"):
        result = fused_multiply_add(a, b, c)
    expected = np.array([library.fma(*each) for each in zip(a, b, c, strict=True)])
    np.testing.assert_array_equal(result, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(result)[numbers], np.signbit(expected)[numbers])
