import pytest
import torch

from kvfuzz.oracles import image


@pytest.mark.parametrize("dtype", ["u8", "bf16", "fp32", "i64"])
@pytest.mark.parametrize("first", [0, 8, 3])
def test_elements_are_little_endian_wherever_they_lie(dtype, first):
    data = torch.arange(1, 65, dtype=torch.uint8)
    size = image.itemsize(dtype)
    at = first + size * torch.tensor([[0, 2], [1, 4]])
    expected = [
        int.from_bytes(bytes(data[start : start + size].tolist()), "little")
        for start in at.flatten().tolist()
    ]
    codes = image.read(data, at, dtype)
    assert codes.shape == at.shape
    assert codes.flatten().tolist() == expected
    copied = torch.zeros_like(data)
    image.write(copied, at, dtype, codes)
    marked = torch.zeros(64, dtype=torch.bool)
    image.mark(marked, at, dtype)
    assert torch.equal(copied, torch.where(marked, data, 0))
    assert marked.sum() == 4 * size


def test_codes_have_no_sign_below_64_bits():
    data = torch.full((8,), 0xFF, dtype=torch.uint8)
    for dtype, all_ones in (("u8", 0xFF), ("fp16", 0xFFFF), ("fp32", 0xFFFFFFFF), ("i64", -1)):
        assert image.read(data, torch.tensor([0]), dtype).tolist() == [all_ones]


def test_an_image_whose_length_is_no_multiple_of_the_element_is_read():
    data = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    assert image.read(data, torch.tensor([0, 2]), "bf16").tolist() == [0x0201, 0x0403]
    assert image.read(data[1:], torch.tensor([0, 2]), "bf16").tolist() == [0x0302, 0x0504]


def test_same_and_is_any_see_a_single_entry():
    one = torch.zeros(1000, dtype=torch.uint8)
    other = one.clone()
    assert image.same(one, other)
    other[999] = 1
    assert not image.same(one, other)
    assert not image.same(one, one[:-1])
    assert image.is_any(other != one)
    assert not image.is_any(one != one.clone())
