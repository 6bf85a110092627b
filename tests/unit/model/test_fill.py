import pytest
import torch

from kvfuzz.engine.worker.fill import filled, words
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import (
    MASK,
    TEST_VECTORS,
    ByteFill,
    FloatFill,
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
