# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kvfuzz.cpu import CpuLane


@triton.jit
def copy_tile(source, target, row, column):
    tile = source.load([row + tl.program_id(0) * 4, column])
    target.store([tl.program_id(0) * 4, 0], tile + 1)


@triton.jit
def copy_made(source, target, rows, columns, row, column, R: tl.constexpr, C: tl.constexpr):
    a = tl.make_tensor_descriptor(source, [rows, columns], [columns, 1], [R, C])
    b = tl.make_tensor_descriptor(target, [R, C], [C, 1], [R, C])
    if tl.program_id(0) == 1:
        b.store([0, 0], tl.load_tensor_descriptor(a, [row, column]))


@triton.jit
def gather_rows(source, target, indices, columns, column, R: tl.constexpr, C: tl.constexpr):
    a = tl.make_tensor_descriptor(source, [6, columns], [columns, 1], [1, C])
    b = tl.make_tensor_descriptor(target, [8, C], [C, 1], [1, C])
    rows = tl.load(indices + tl.arange(0, R))
    b.scatter(a.gather(rows, column), rows, 0)


@triton.jit
def add_tile(source, target):
    a = tl.make_tensor_descriptor(source, [8, 8], [8, 1], [4, 8])
    b = tl.make_tensor_descriptor(target, [5, 8], [8, 1], [4, 8])
    b.atomic_add([tl.program_id(0) * 3, 0], a.load([tl.program_id(0) * 4, 0]))


@triton.jit
def from_tuple(pair, out):
    out.store([0, 0], pair[0].load([0, 0]) * pair[1])


def numbers(rows, columns):
    return torch.arange(1.0, rows * columns + 1).reshape(rows, columns)


def window(source, row, column, rows, columns, fill=0.0):
    """What a load of a tile gives: `fill` outside of the tensor."""
    tile = torch.full((rows, columns), fill)
    for i in range(rows):
        for j in range(columns):
            if 0 <= row + i < source.shape[0] and 0 <= column + j < source.shape[1]:
                tile[i, j] = source[row + i, column + j]
    return tile


@pytest.mark.parametrize("padding", ["zero", "nan"])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 5), (-2, -1), (40, 0)])
def test_descriptors_of_the_host_pad_loads_and_drop_stores_outside(
    lane, buffer, padding, row, column
):
    source, target = numbers(9, 8), torch.zeros(6, 8)
    target_view = buffer("target", target)
    a = TensorDescriptor(buffer("source", source), [9, 8], [8, 1], [4, 8], padding)
    b = TensorDescriptor(target_view, [6, 8], [8, 1], [4, 8])
    with lane.observe() as access:
        copy_tile[(2,)](a, b, row, column)
    fill = float("nan") if padding == "nan" else 0.0
    expected = window(source, row, column, 8, 8, fill)[:6] + 1
    assert torch.equal(target_view.nan_to_num(nan=-1), expected.nan_to_num(nan=-1))
    assert access.strays == []
    assert access.written("target").all()


def test_descriptors_made_in_the_kernel_work_like_pointers(lane, buffer):
    source = numbers(7, 12)
    target = buffer("target", torch.zeros(4, 8))
    with lane.observe() as access:
        copy_made[(2,)](buffer("source", source), target, 7, 12, 5, 6, R=4, C=8)
    assert torch.equal(target, window(source, 5, 6, 4, 8))
    read = access.read("source").reshape(7, 12, 4).all(2)
    assert read.sum() == 2 * 6
    assert read[5:, 6:].all()


def test_gathered_rows_may_lie_outside(buffer):
    source = numbers(6, 16)
    target = buffer("target", torch.zeros(8, 8))
    rows = torch.tensor([5, 0, 6, -1, 2, 7, 2, 3], dtype=torch.int32)
    gather_rows[(1,)](buffer("source", source), target, buffer("i", rows), 16, 8, R=8, C=8)
    expected = torch.zeros(8, 8)
    for row in (5, 0, 2, 3):
        expected[row] = source[row, 8:]
    assert torch.equal(target, expected)


def test_descriptor_atomics_add_inside_only(buffer):
    target = buffer("target", torch.zeros(8, 8))
    add_tile[(2,)](buffer("source", numbers(8, 8)), target)
    expected = torch.zeros(8, 8)
    expected[:4] += numbers(8, 8)[:4]
    expected[3:5] += numbers(8, 8)[4:6]
    assert torch.equal(target, expected)


def test_a_descriptor_may_come_in_a_tuple(buffer):
    out = buffer("out", torch.zeros(4, 8))
    source = TensorDescriptor.from_tensor(buffer("source", numbers(4, 8)), [4, 8])
    from_tuple[(1,)]((source, 3.0), TensorDescriptor.from_tensor(out, [4, 8]))
    assert torch.equal(out, numbers(4, 8) * 3)


def test_an_arch_with_descriptors_in_hardware_runs_them_too(lane):
    lane.deactivate()
    other = CpuLane(arch="gfx1250")
    other.activate()
    try:
        source, target = numbers(7, 12), torch.zeros(4, 8)
        copy_made[(2,)](source, target, 7, 12, 5, 6, R=4, C=8)
        assert torch.equal(target, window(source, 5, 6, 4, 8))
        out = torch.zeros(6, 8)
        a = TensorDescriptor(numbers(9, 8), [9, 8], [8, 1], [4, 8])
        copy_tile[(2,)](a, TensorDescriptor(out, [6, 8], [8, 1], [4, 8]), 3, 5)
        assert torch.equal(out, window(numbers(9, 8), 3, 5, 8, 8)[:6] + 1)
    finally:
        other.deactivate()
        lane.activate()
