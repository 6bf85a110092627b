import itertools

import pytest
import torch

from kvfuzz.model.lower import lower
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


def test_same_tells_tensors_of_any_dtype_and_stride_as_torch_does():
    """A difference counts in any byte of any entry, and where entries do not lie side by side."""
    for dtype in (torch.uint8, torch.bool, torch.int32, torch.int64):
        one = torch.zeros(6, 5, dtype=dtype)
        for at in (0, 17, 29):
            other = one.clone()
            other.view(-1)[at] = 1 << 40 if dtype == torch.int64 else 1
            for mine, theirs in ((one, other), (one.T, other.T), (one.T, other), (one, one.T)):
                assert image.same(mine, theirs) == torch.equal(mine, theirs)
            assert image.same(other.T, other.clone().T)


def test_elements_are_copied_marked_and_cleared_as_bytes_are():
    """Aligned elements go as integers, others byte by byte; both leave the same."""
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(256, (256,), dtype=torch.uint8, generator=generator)
    for dtype in ("u8", "fp16", "fp32", "i64"):
        size = image.itemsize(dtype)
        for first in (0, 1):
            start = first + size * torch.tensor([[5, 0], [7, 3]])
            goal = first + size * torch.tensor([[1, 2], [9, 4]])
            mine, theirs = torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
            image.copy(source, start, mine, goal, dtype)
            theirs[image.element_bytes(goal, dtype)] = source[image.element_bytes(start, dtype)]
            assert torch.equal(mine, theirs)
            mask = torch.ones(256, dtype=torch.bool)
            image.mark(mask, goal, dtype, to=False)
            expected = torch.ones(256, dtype=torch.bool)
            expected[image.element_bytes(goal, dtype)] = False
            assert torch.equal(mask, expected)


def test_addresses_broadcast_over_the_axes_that_have_a_term(gather_scene):
    """Every order of axes and split digits, against the scalar definition of a field."""
    case = lower(gather_scene)
    for field in case.fields:
        along = {axis: torch.arange(size) for axis, size in field.extents.items()}
        shaped = {
            axis: each.view([-1 if other == axis else 1 for other in along])
            for axis, each in along.items()
        }
        found = image.addresses(field, **shaped).flatten().tolist()
        expected = [
            field.byte(dict(zip(along, coordinate, strict=True)))
            for coordinate in itertools.product(*(range(size) for size in field.extents.values()))
        ]
        assert found == expected


def test_addresses_take_single_coordinates(gather_scene):
    field = lower(gather_scene).field("k")
    at = {axis: torch.tensor(size - 1) for axis, size in field.extents.items()}
    last = field.byte({axis: size - 1 for axis, size in field.extents.items()})
    assert image.addresses(field, **at).tolist() == last
    at["dim"] = torch.arange(2)
    assert image.addresses(field, **at).shape == (2,)
