"""The conversions that Triton writes out for one architecture or another, over all their inputs."""

import numpy as np
import pytest

from kvfuzz.cpu.arch import PECULIARITIES, Target, wave_size
from kvfuzz.cpu.numerics import FORMATS, convert, decode

SIX = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "gfx1250")
NO_OCP = ("gfx90a", "gfx942", "gfx1100", "gfx1201")
NO_FNUZ = ("gfx90a", "gfx950", "gfx1100", "gfx1201", "gfx1250")


def all_codes(element):
    return np.arange(1 << FORMATS[element].bits).astype(FORMATS[element].storage)


def changed(arch, source, target, rounding="rtne"):
    """All codes, which of them the arch converts otherwise than the rule, and to what."""
    codes = all_codes(source)
    given = Target(arch).convert(codes, source, target, rounding)
    assert given.dtype == FORMATS[target].storage
    differs = given != convert(codes, source, target, rounding)
    return codes, differs, given


def families(archs):
    return [(arch, arch in archs) for arch in SIX]


@pytest.mark.parametrize(("arch", "in_software"), families(NO_OCP))
def test_fp16_between_464_and_480_is_the_nan_of_e4m3fn_without_an_instruction(arch, in_software):
    codes, differs, given = changed(arch, "f16", "f8E4M3FN")
    values = decode(codes, "f16")
    between = (np.abs(values) > 464) & (np.abs(values) < 480)
    assert between.sum() == 126
    assert np.array_equal(differs, between & in_software)
    if in_software:
        assert np.array_equal(given[between], np.where(values[between] < 0, 0xFF, 0x7F))


@pytest.mark.parametrize(("arch", "in_software"), families(NO_OCP))
def test_nan_of_e4m3fn_is_480_in_bf16_without_an_instruction(arch, in_software):
    codes, differs, given = changed(arch, "f8E4M3FN", "bf16")
    assert codes[differs].tolist() == ([0x7F, 0xFF] if in_software else [])
    assert decode(given[differs], "bf16").tolist() == ([480, -480] if in_software else [])


@pytest.mark.parametrize(("arch", "in_software"), families(NO_OCP))
def test_specials_of_e5m2_are_large_numbers_in_bf16_without_an_instruction(arch, in_software):
    codes, differs, given = changed(arch, "f8E5M2", "bf16")
    specials = codes & 0x7F >= 0x7C
    assert np.array_equal(differs, specials & in_software)
    if in_software:
        positive = [65536, 81920, 98304, 114688]
        negative = [-value for value in positive]
        assert decode(given[differs], "bf16").tolist() == positive + negative


@pytest.mark.parametrize("target", ["f8E4M3FNUZ", "f8E5M2FNUZ"])
@pytest.mark.parametrize("source", ["f16", "bf16"])
@pytest.mark.parametrize(("arch", "in_software"), families(NO_FNUZ))
def test_infinities_are_the_nan_of_fnuz_without_an_instruction(arch, in_software, source, target):
    codes, differs, given = changed(arch, source, target)
    assert np.array_equal(differs, np.isinf(decode(codes, source)) & in_software)
    assert np.all(given[differs] == 0x80)


@pytest.mark.parametrize("target", ["f8E4M3FNUZ", "f8E5M2FNUZ"])
@pytest.mark.parametrize(("arch", "in_software"), families(NO_FNUZ))
def test_infinities_of_fp32_are_too(arch, in_software, target):
    values = np.array([np.inf, -np.inf, 3e38, -3e38, np.nan, 1.0], np.float32)
    given = Target(arch).convert(values, "f32", target)
    largest = [0x80, 0x80] if in_software else [0x7F, 0xFF]
    assert given[:5].tolist() == [*largest, 0x7F, 0xFF, 0x80]
    assert given[5] == convert(values, "f32", target)[5]


@pytest.mark.parametrize("arch", SIX)
def test_fp16_cut_off_to_e5m2_is_its_upper_byte(arch):
    codes, _, given = changed(arch, "f16", "f8E5M2", "rtz")
    assert np.array_equal(given, codes.view(np.uint8)[1::2])
    values = np.array([np.inf, -np.inf, 1e38, 1.9], np.float32)
    given = Target(arch).convert(values, "f32", "f8E5M2", "rtz")
    assert given.tolist() == [0x7C, 0xFC, 0x7B, 0x3F]


def test_no_other_conversion_differs_from_the_general_rule():
    for source in FORMATS:
        for target in FORMATS:
            if (source, target, "rtne") not in PECULIARITIES:
                assert not any(changed(arch, source, target)[1].any() for arch in SIX)


@pytest.mark.parametrize("source", ["bf16", "f32"])
def test_only_finite_numbers_are_clamped_to_the_largest_of_fp16(source):
    codes = all_codes("bf16")
    values = codes if source == "bf16" else decode(codes, "bf16")
    plain = Target().convert(values, source, "f16")
    clamped = Target(clamps_fp16=True).convert(values, source, "f16")
    numbers = decode(codes, "bf16")
    overflows = np.isfinite(numbers) & (np.abs(numbers) >= 65520)
    assert overflows.any()
    assert np.array_equal(plain != clamped, overflows)
    assert np.array_equal(clamped[overflows], np.where(numbers[overflows] < 0, 0xFBFF, 0x7BFF))


def test_fp64_becomes_fp16_by_integer_instructions_that_do_not_clamp():
    given = Target(clamps_fp16=True).convert(np.array([1e6, -1e6]), "f64", "f16")
    assert given.tolist() == [0x7C00, 0xFC00]


def test_wavefronts_have_64_lanes_up_to_gfx9_and_32_from_gfx10_on():
    assert [wave_size(arch) for arch in ("gfx906", *SIX[:3])] == [64] * 4
    assert [wave_size(arch) for arch in ("gfx1030", *SIX[3:], "gfx1250-strict")] == [32] * 5
