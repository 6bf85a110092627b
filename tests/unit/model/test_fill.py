import math

import pytest
import torch

from kvfuzz.engine.worker.fill import filled, words
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import (
    GROUP_KINDS,
    MASK,
    TEST_VECTORS,
    ByteFill,
    FloatFill,
    GroupFill,
    IntegerFill,
    ScaleFill,
    TieFill,
    byte_at,
    code_at,
    word,
)
from kvfuzz.model.held import whole

CPU = torch.device("cpu")


@pytest.mark.parametrize(("seed", "buffer", "index", "expected"), TEST_VECTORS)
def test_the_scalar_definition_keeps_its_test_vectors(seed, buffer, index, expected):
    assert word(seed, buffer, index) == expected


@pytest.mark.parametrize(("seed", "buffer"), [(0, "kv_cache"), (MASK, "value"), (5, "key")])
def test_tensor_words_are_the_scalar_words(seed, buffer):
    found = words(seed, buffer, 300)
    assert [int(each) for each in found] == [word(seed, buffer, i) for i in range(300)]


def test_words_go_on_past_the_first_chunk_and_start_anywhere():
    found, places = words(5, "key", 40_000), (0, 16_383, 16_384, 16_385, 39_999)
    assert [int(found[at]) for at in places] == [word(5, "key", at) for at in places]
    assert words(5, "key", 20_000, 17).tolist() == found[17:20_017].tolist()


def test_tensor_bytes_are_the_scalar_bytes_at_any_length():
    fill = ByteFill(11)
    for nbytes in (1, 7, 8, 9, 100):
        expected = [byte_at(fill, "key", address) for address in range(nbytes)]
        assert filled(fill, "key", whole(nbytes), CPU).tolist() == expected


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "e4m3fn", "e5m2"])
def test_tensor_floats_are_the_scalar_codes_inside_the_exponent_range(name):
    dtype = DTYPES[name]
    fill = FloatFill(3, name, 1, 7)
    data = filled(fill, "key", whole(200 * dtype.itemsize), CPU).reshape(200, dtype.itemsize)
    for index, row in enumerate(data.tolist()):
        code = int.from_bytes(bytes(row), "little")
        assert code == code_at(fill, "key", index)
        assert 1 <= (code & (dtype.sign_bit - 1)) >> dtype.mantissa_bits <= 7


@pytest.mark.parametrize("cache", ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_tensor_ties_are_the_scalar_codes(name, cache):
    fill = TieFill(3, name, cache, 0x3DCCCCCD)  # 0.1
    size = DTYPES[name].itemsize
    data = filled(fill, "key", whole(200 * size), CPU).reshape(200, size)
    codes = [int.from_bytes(bytes(row), "little") for row in data.tolist()]
    assert codes == [code_at(fill, "key", index) for index in range(200)]


def test_integers_are_little_endian_and_keep_their_sign_and_bit_patterns():
    slots = filled(IntegerFill("i64", (-1, 5)), "slots", whole(16), CPU)
    assert slots.view(torch.int64).tolist() == [-1, 5]
    most = filled(IntegerFill("i64", ((1 << 64) - 1, -(1 << 63))), "slots", whole(16), CPU)
    assert most.view(torch.int64).tolist() == [-1, -(1 << 63)]
    pattern = filled(IntegerFill("fp32", (0xBF800000,)), "k_scale", whole(4), CPU)
    assert pattern.view(torch.float32).item() == -1.0


def test_two_buffers_of_one_seed_hold_different_bytes():
    key, value = (filled(ByteFill(0), name, whole(64), CPU) for name in ("key", "value"))
    assert (key != value).any()


SCALE_VECTORS = {
    # the least scale, and the first scales of seed 5
    0x3F800000: [0x3F800000, 0x3F800000, 0x3F800000, 0x3F800000],
    0x3E800000: [0x3F000000, 0x3E800000, 0x3E800000, 0x3F800000],
    0x3DCCCCCD: [0x3EAA267C, 0x3E2AFFBD, 0x3E11226B, 0x3EC65D17],
}


@pytest.mark.parametrize("least", SCALE_VECTORS)
def test_scales_keep_their_test_vectors_and_tensor_scales_are_the_scalar_ones(least):
    fill = ScaleFill(5, least)
    codes = [code_at(fill, "k_scale", index) for index in range(500)]
    assert codes[:4] == SCALE_VECTORS[least]
    data = filled(fill, "k_scale", whole(2000), CPU)
    assert data.view(torch.int32).tolist() == codes


@pytest.mark.parametrize("least", SCALE_VECTORS)
def test_scales_lie_between_the_least_and_four_times_that_and_are_of_its_kind(least):
    fp32, fill = DTYPES["fp32"], ScaleFill(9, least)
    codes = {code_at(fill, "v_scale", index) for index in range(2000)}
    values = [fp32.decode(code) / fp32.decode(least) for code in codes]
    assert min(values) >= 1
    assert max(values) <= 4
    if least == 0x3F800000:
        assert codes == {least}
    elif least == 0x3E800000:
        assert sorted(values) == [1, 2, 4]
    else:
        assert len(codes) > 1900
        assert max(values) > 3.9


def _codes_of(fill, count):
    size = DTYPES[fill.dtype].itemsize
    data = filled(fill, "k", whole(count * size), CPU).reshape(count, size)
    return [int.from_bytes(bytes(row), "little") for row in data.tolist()]


@pytest.mark.parametrize("ties", [False, True], ids=["spread", "ties"])
@pytest.mark.parametrize("cache", ["e4m3fn", "e4m3fnuz", "i8"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_tensor_groups_are_the_scalar_codes(name, cache, ties):
    fill = GroupFill(3, name, cache, 7, 127.0 if cache == "i8" else 224.0, ties)
    assert _codes_of(fill, 500) == [code_at(fill, "k", index) for index in range(500)]


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_some_groups_are_zero_some_small_and_the_others_differ_widely(name):
    dtype, group = DTYPES[name], 16
    fill = GroupFill(5, name, "e4m3fn", group, 448.0)
    values = [abs(dtype.decode(code)) for code in _codes_of(fill, 400 * group)]
    tops = [max(values[at : at + group]) for at in range(0, len(values), group)]
    floor = 1e-4 if name == "fp16" else 1e-6
    assert tops.count(0) > 400 / GROUP_KINDS / 2
    assert sum(0 < top < floor for top in tops) > 400 / GROUP_KINDS / 2
    assert max(tops) > (1 << 14 if name == "fp16" else 1 << 28)
    assert all(any(0 < value < top / 1000 for value in values) for top in tops if top > 1)


@pytest.mark.parametrize("cache", ["e4m3fn", "e4m3fnuz", "i8"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_tied_groups_have_one_largest_and_the_rest_between_two_codes(name, cache):
    dtype, group, largest = DTYPES[name], 16, 127.0 if cache == "i8" else 224.0
    fill = GroupFill(6, name, cache, group, largest, ties=True)
    values = [abs(dtype.decode(code)) for code in _codes_of(fill, 200 * group)]
    groups = [values[at : at + group] for at in range(0, len(values), group)]
    tied = [each for each in groups if max(each) > 1e-4]
    assert len(tied) > 100
    for each in tied:
        scale = max(each) / largest
        assert math.frexp(scale)[0] == 0.5
        assert each.count(max(each)) == 1
        for value in each:
            if value != max(each):
                assert _is_tie(value / scale, cache)


def _is_tie(value, cache):
    if cache == "i8":
        return value % 1 == 0.5
    dtype = DTYPES[cache]
    at = next(code for code in range(dtype.max_code) if dtype.decode(code + 1) > value)
    return dtype.decode(at) + dtype.decode(at + 1) == 2 * value


GROUP_VECTORS = {
    # whether tied: the third group of seed 5 in bf16, for e4m3fn
    False: [0xB949, 0x3788, 0x3803, 0x3397, 0xB4F5, 0xBA20, 0xBB87, 0x394C],
    True: [0xC160, 0x3B08, 0x3C78, 0x3D38, 0xC028, 0xBA08, 0xBA08, 0x3D98],
}


@pytest.mark.parametrize("ties", GROUP_VECTORS)
def test_groups_keep_their_test_vectors(ties):
    fill = GroupFill(5, "bf16", "e4m3fn", 8, 448.0, ties)
    assert [code_at(fill, "k", index) for index in range(16, 24)] == GROUP_VECTORS[ties]
