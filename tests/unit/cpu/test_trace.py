# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvfuzz.cpu import LaneError


@triton.jit
def gather(src, table, scale, out, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    row = tl.load(table + pid)
    value = tl.load(src + row * BLOCK + at)
    if SCALED:
        value = (value.to(tl.float32) * tl.load(scale)).to(out.dtype.element_ty)
    tl.store(out + pid * BLOCK + at, value)


@triton.jit
def interleave(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + tl.arange(0, 2 * BLOCK), tl.reshape(tl.join(x, y), (2 * BLOCK,)))


@triton.jit
def pick_row(a, b, flags, out, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.zeros([BLOCK], tl.int32)
    if tl.load(flags + pid) > 0:
        value = tl.load(a + at)
    else:
        for _ in range(2):
            value = tl.load(b + at)
    tl.store(out + pid * BLOCK + at, value)


@pytest.fixture
def sources(buffer):
    return {
        "src": buffer("src", torch.randn(4, 8).bfloat16()),
        "table": buffer("table", torch.tensor([2, 0, 3], dtype=torch.int32)),
        "scale": buffer("scale", torch.tensor([0.5])),
    }


def test_a_copied_byte_names_the_byte_it_was_loaded_from(lane, buffer, sources):
    out = buffer("out", torch.zeros(4, 8).bfloat16())
    with lane.observe(trace_origins=True) as access:
        gather[(3,)](**sources, out=out, SCALED=False, BLOCK=8)
    numbers, offsets = access.origin("out")
    assert {access.allocation_name(number) for number in numbers[:48]} == {"src"}
    expected = np.concatenate([np.arange(16) + 16 * row for row in (2, 0, 3)])
    np.testing.assert_array_equal(offsets[:48], expected)
    assert (numbers[48:] == -1).all()
    assert (offsets[48:] == -1).all()


def test_a_converted_element_names_the_first_byte_of_its_source(lane, buffer, sources):
    out = buffer("out", torch.zeros(3, 8))
    with lane.observe(trace_origins=True) as access:
        gather[(3,)](**sources, out=out, SCALED=True, BLOCK=8)
    numbers, offsets = access.origin("out")
    assert {access.allocation_name(number) for number in numbers} == {"src"}
    elements = np.concatenate([2 * np.arange(8) + 16 * row for row in (2, 0, 3)])
    np.testing.assert_array_equal(offsets, np.repeat(elements, 4))


def test_results_are_the_same_with_and_without_a_trace(lane, buffer, sources):
    plain, traced = (buffer(name, torch.zeros(3, 8)) for name in ("plain", "traced"))
    gather[(3,)](**sources, out=plain, SCALED=True, BLOCK=8)
    with lane.observe(trace_origins=True):
        gather[(3,)](**sources, out=traced, SCALED=True, BLOCK=8)
    assert torch.equal(plain, traced)


def test_origins_follow_elements_through_a_change_of_shape(lane, buffer):
    a, b = (buffer(n, torch.arange(4, dtype=torch.int16)) for n in ("a", "b"))
    out = buffer("out", torch.zeros(8, dtype=torch.int16))
    with lane.observe(trace_origins=True) as access:
        interleave[(1,)](a, b, out, BLOCK=4)
    numbers, offsets = access.origin("out")
    assert [access.allocation_name(number) for number in numbers[::2]] == ["a", "b"] * 4
    np.testing.assert_array_equal(offsets.reshape(4, 2, 2)[:, 0], np.arange(8).reshape(4, 2))


def test_origins_follow_values_through_branches_and_loops(lane, buffer):
    a, b = (buffer(n, torch.arange(4, dtype=torch.int32)) for n in ("a", "b"))
    out = buffer("out", torch.zeros(2, 4, dtype=torch.int32))
    with lane.observe(trace_origins=True) as access:
        pick_row[(2,)](a, b, buffer("flags", torch.tensor([0, 1], dtype=torch.int32)), out, BLOCK=4)
    numbers, offsets = access.origin("out")
    names = [access.allocation_name(number) for number in numbers]
    assert names == ["b"] * 16 + ["a"] * 16
    np.testing.assert_array_equal(offsets, np.tile(np.arange(16), 2))


def test_origins_that_were_not_traced_cannot_be_asked_for(lane, buffer, sources):
    out = buffer("out", torch.zeros(3, 8).bfloat16())
    with lane.observe() as access:
        gather[(3,)](**sources, out=out, SCALED=False, BLOCK=8)
    with pytest.raises(LaneError, match="origins were not traced"):
        access.origin("out")


@triton.jit
def larger(a, b):
    if a > b:
        return a, b
    return b, a


@triton.jit
def many_ops(src, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(src + at)
    a, b = tl.map_elementwise(larger, x, at)
    c = tl.inline_asm_elementwise("v_add_u32 $0, $1, $2", "=v,v,v", [a, b], tl.int32, True, 1)
    tl.device_print("c", c)
    tl.device_assert(x < 100, "too large")
    while tl.atomic_cas(out + BLOCK + tl.load(src), 0, tl.load(src + 1)) > 99:
        c += 1
    tl.store(out + at, c + tl.gather(tl.histogram(x % 4, BLOCK), at, 0))


def test_every_op_runs_the_same_while_origins_are_traced(lane, buffer, capfd):
    src = buffer("src", torch.arange(3, 11, dtype=torch.int32))
    plain = buffer("plain", torch.zeros(16, dtype=torch.int32))
    traced = buffer("traced", torch.zeros(16, dtype=torch.int32))
    many_ops[(1,)](src, plain, BLOCK=8, debug=True)
    with lane.observe(trace_origins=True):
        many_ops[(1,)](src, traced, BLOCK=8, debug=True)
    assert plain.any()
    assert torch.equal(plain, traced)
    first, second = capfd.readouterr().err.splitlines()
    assert first == second


def test_origins_are_known_after_more_allocations_than_an_origin_has_numbers_for(lane):
    for _ in range(1 << 13):
        for name in ("src", "table", "scale", "out"):
            lane.allocate(name, 16)
        lane.release_all()
    src, table, scale, out = (lane.allocate(name, 64) for name in ("src", "table", "scale", "out"))
    with lane.observe(trace_origins=True) as access:
        gather[(1,)](src, table.view(torch.int32), scale, out, SCALED=False, BLOCK=8)
    number, byte = access.origin_of("out", 3)
    assert (access.allocation_name(number), byte) == ("src", 3)


def test_allocations_of_one_observation_are_told_apart_although_all_before_were_released(lane):
    with lane.observe() as access:
        for size in (64, 4096):
            src, table, scale, out = (
                lane.allocate(name, size) for name in ("src", "table", "scale", "out")
            )
            gather[(2,)](src, table.view(torch.int32), scale, out, SCALED=False, BLOCK=size // 4)
            lane.release_all()
    assert len(access.launches) == 2
