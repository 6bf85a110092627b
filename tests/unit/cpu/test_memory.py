# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvfuzz.cpu import LaneError


@triton.jit
def copy(src, dst, length, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + at, tl.load(src + at, mask=at < length), mask=at < length)


@triton.jit
def copy_unmasked(src, dst, shift, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(src + at + shift)
    tl.store(dst + at, value)


@triton.jit
def store_shifted(dst, shift, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + at + shift, at)


@triton.jit
def scatter_ids(slots, out):
    pid = tl.program_id(0)
    tl.store(out + tl.load(slots + pid), pid)


@triton.jit
def load_masked(src, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(src + at, mask=at < 2))


@triton.jit
def store_all_pids(out):
    pid = tl.program_id(0) + tl.program_id(1) * 100 + tl.program_id(2) * 10000
    tl.store(out, pid)


@triton.jit
def choose_source(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    both = tl.where(at % 2 == 0, a + at, b + at)
    tl.store(out + at, tl.load(both))


@triton.jit
def follow_table(table, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    base = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.program_id(0) * BLOCK + at, tl.load(base + at))


@triton.jit
def wrapping_offset(src, out, stride):
    pid = tl.program_id(0)
    tl.store(out + pid, tl.load(src + (pid + 1) * stride))


@triton.jit
def count_up(counter, tickets, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    ticket = tl.atomic_add(counter + at % 2, 1)
    tl.store(tickets + tl.program_id(0) * BLOCK + at, ticket)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def bytes_at(nbytes, *ranges):
    expected = np.zeros(nbytes, bool)
    for start, stop in ranges:
        expected[start:stop] = True
    return expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_copy_keeps_nan_payloads_bit_for_bit(buffer, dtype):
    payloads = torch.tensor([0x7F81, 0x7FC1, -1, 0x7C01, -0x7F, 0x3F80], dtype=torch.int16)
    dst = buffer("dst", torch.zeros(6, dtype=dtype))
    copy[(1,)](buffer("src", payloads.view(dtype)), dst, 6, BLOCK=8)
    assert torch.equal(dst.view(torch.int16), payloads)


def test_a_masked_copy_keeps_signalling_nans_of_fp32(buffer):
    payloads = torch.tensor([0x7F800001, -0x7FFFFF, 0x7FC12345], dtype=torch.int32)
    dst = buffer("dst", torch.zeros(3))
    copy[(1,)](buffer("src", payloads.view(torch.float32)), dst, 3, BLOCK=4)
    assert torch.equal(dst.view(torch.int32), payloads)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz],
)
def test_a_copy_keeps_every_fp8_code(buffer, dtype):
    codes = torch.arange(256).to(torch.uint8)
    dst = buffer("dst", torch.zeros(256, dtype=torch.uint8).view(dtype))
    copy[(4,)](buffer("src", codes.view(dtype)), dst, 256, BLOCK=64)
    assert torch.equal(dst.view(torch.uint8), codes)


def test_reads_and_writes_are_recorded_byte_by_byte(lane, buffer):
    src, dst = buffer("src", ints(*range(10))), buffer("dst", torch.zeros(16, dtype=torch.int32))
    with lane.observe() as access:
        copy[(2,)](src[2:], dst[4:], 7, BLOCK=8)
    np.testing.assert_array_equal(access.read("src"), bytes_at(40, (8, 36)))
    np.testing.assert_array_equal(access.written("dst"), bytes_at(64, (16, 44)))
    assert not access.written("src").any()
    assert not access.read("dst").any()
    assert access.strays == []


def test_accesses_under_a_false_mask_are_no_strays(lane, buffer):
    src, dst = buffer("src", ints(1, 2, 3)), buffer("dst", ints(0, 0, 0))
    with lane.observe() as access:
        copy[(5,)](src, dst, 3, BLOCK=16)
    assert access.strays == []
    assert dst.tolist() == [1, 2, 3]


def test_a_stray_read_gives_poison_and_is_recorded_once_with_its_count(lane, buffer):
    src, dst = buffer("src", ints(1, 2, 3)), buffer("dst", ints(0, 0, 0, 0, 0, 0, 0, 0))
    lane.poison = 0x5A
    with lane.observe() as access:
        copy_unmasked[(2,)](src, dst, 1, BLOCK=4)
    assert dst.tolist() == [2, 3] + [0x5A5A5A5A] * 6
    (stray,) = access.strays
    assert (stray.kind, stray.kernel, stray.file) == ("read", "copy_unmasked", "test_memory.py")
    assert (stray.program, stray.allocation, stray.offset) == ((0, 0, 0), "src", 12)
    assert (stray.nbytes, stray.count) == (4, 6)
    source = copy_unmasked.fn.__code__.co_firstlineno
    assert stray.line == source + 3


def test_a_stray_write_is_dropped_and_recorded_with_the_program_that_did_it(lane, buffer):
    dst = buffer("dst", torch.zeros(8, dtype=torch.int32))
    with lane.observe() as access:
        store_shifted[(3,)](dst, 2, BLOCK=4)
    assert dst.tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    (stray,) = access.strays
    assert (stray.kind, stray.program, stray.offset, stray.count) == ("write", (1, 0, 0), 32, 6)


def test_a_negative_offset_is_a_stray_below_the_allocation(lane, buffer):
    dst = buffer("dst", torch.zeros(8, dtype=torch.int32))
    with lane.observe() as access:
        store_shifted[(1,)](dst, -1, BLOCK=4)
    (stray,) = access.strays
    assert (stray.offset, stray.count) == (-4, 1)
    assert dst.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


def test_an_overrun_into_a_neighbouring_allocation_is_still_a_stray(lane):
    first = lane.allocate("first", 256)
    second = lane.allocate("second", 256)
    distance = (second.data_ptr() - first.data_ptr()) // 4
    with lane.observe() as access:
        store_shifted[(1,)](first.view(torch.int32), distance, BLOCK=4)
    assert not second.any()
    (stray,) = access.strays
    assert (stray.allocation, stray.offset, stray.count) == ("first", 4 * distance, 4)


def test_of_programs_that_store_to_one_byte_the_last_wins(buffer):
    out = buffer("out", torch.zeros(3, dtype=torch.int32))
    scatter_ids[(6,)](buffer("slots", ints(1, 0, 1, 1, 0, 2)), out)
    assert out.tolist() == [4, 3, 5]


def test_the_last_program_of_a_three_dimensional_grid_wins(buffer):
    out = buffer("out", torch.zeros(1, dtype=torch.int32))
    store_all_pids[(3, 4, 5)](out)
    assert out.item() == 2 + 300 + 40000


def test_masked_off_lanes_without_other_hold_poison(lane, buffer):
    lane.poison = 0x11
    out = buffer("out", torch.zeros(4, dtype=torch.int32))
    load_masked[(1,)](buffer("src", ints(5, 6, 7, 8)), out, BLOCK=4)
    assert out.tolist() == [5, 6, 0x11111111, 0x11111111]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_unaligned_views_are_read_and_written_byte_by_byte(lane, dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    src, dst = lane.allocate("src", 8 * size), lane.allocate("dst", 8 * size)
    src.copy_(torch.arange(8 * size).to(torch.uint8))
    odd = {}
    for name, memory in (("src", src), ("dst", dst)):
        values = np.frombuffer(memory.numpy(), np.uint8)[1 : 1 + 4 * size].view(f"i{size}")
        odd[name] = torch.from_numpy(values)
    with lane.observe() as access:
        copy[(1,)](odd["src"], odd["dst"], 4, BLOCK=4)
    assert dst.tolist() == [0, *src[1 : 1 + 4 * size].tolist(), *[0] * (4 * size - 1)]
    np.testing.assert_array_equal(access.read("src"), bytes_at(8 * size, (1, 1 + 4 * size)))
    np.testing.assert_array_equal(access.written("dst"), bytes_at(8 * size, (1, 1 + 4 * size)))


def test_a_pointer_chosen_per_element_keeps_both_allocations(lane, buffer):
    out = buffer("out", torch.zeros(4, dtype=torch.int32))
    a, b = buffer("a", ints(1, 2, 3, 4)), buffer("b", ints(10, 20, 30))
    with lane.observe() as access:
        choose_source[(1,)](a, b, out, BLOCK=4)
    assert out.tolist()[:3] == [1, 20, 3]
    np.testing.assert_array_equal(access.read("a"), bytes_at(16, (0, 4), (8, 12)))
    np.testing.assert_array_equal(access.read("b"), bytes_at(12, (4, 8)))
    (stray,) = access.strays
    assert (stray.allocation, stray.offset, stray.count) == ("b", 12, 1)


def test_absolute_addresses_find_their_allocation(lane, buffer):
    rows = [buffer(f"row{i}", torch.arange(4.0) + 10 * i) for i in range(3)]
    table = buffer("table", torch.tensor([row.data_ptr() for row in reversed(rows)]))
    out = buffer("out", torch.zeros(3, 4))
    with lane.observe() as access:
        follow_table[(3,)](table, out, BLOCK=4)
    assert out.tolist() == [row.tolist() for row in reversed(rows)]
    assert all(access.read(f"row{i}").all() for i in range(3))


def test_an_address_that_belongs_to_nothing_is_a_stray(lane, buffer):
    table = buffer("table", torch.tensor([16]))
    out = buffer("out", torch.zeros(1, 4))
    with lane.observe() as access:
        follow_table[(1,)](table, out, BLOCK=4)
    (stray,) = access.strays
    assert (stray.kind, stray.allocation, stray.offset, stray.count) == ("read", "?", 16, 4)


def test_offsets_in_32_bits_wrap_as_in_hardware(lane, buffer):
    out = buffer("out", ints(0, 0, 0, 0))
    with lane.observe() as access:
        wrapping_offset[(4,)](buffer("src", ints(7)), out, 1 << 30)
    (stray,) = access.strays
    assert (stray.offset, stray.count) == (4 << 30, 3)
    assert out[3] == 7  # 4 * 2**30 is 0 in 32 bits


def test_tensors_nobody_allocated_get_a_name_for_the_observation(lane, buffer):
    dst = torch.zeros(6, dtype=torch.int32)
    with lane.observe() as access:
        copy[(1,)](buffer("src", ints(1, 2, 3)), dst[2:], 3, BLOCK=4)
    assert dst.tolist() == [0, 0, 1, 2, 3, 0]
    np.testing.assert_array_equal(access.written("tensor:dst"), bytes_at(24, (8, 20)))


def test_asking_for_an_unknown_allocation_says_which_there_are(lane, buffer):
    with lane.observe() as access:
        copy[(1,)](buffer("src", ints(1)), buffer("dst", ints(0)), 1, BLOCK=1)
    with pytest.raises(LaneError, match="name='other' was not allocated; known: src, dst"):
        access.read("other")


def test_a_name_can_be_allocated_only_once(lane):
    lane.allocate("kv", 16)
    with pytest.raises(LaneError, match="name='kv' is allocated already"):
        lane.allocate("kv", 16)


def test_allocations_are_aligned_to_256_bytes(lane):
    for nbytes in (1, 100, 257, 5):
        assert lane.allocate(f"a{nbytes}", nbytes).data_ptr() % 256 == 0


def test_atomics_hand_out_each_ticket_once_in_program_order(lane, buffer):
    counter, tickets = buffer("counter", ints(0, 5)), buffer("tickets", ints(*[0] * 12))
    with lane.observe() as access:
        count_up[(3,)](counter, tickets, BLOCK=4)
    assert counter.tolist() == [6, 11]
    assert tickets.tolist() == [0, 5, 1, 6, 2, 7, 3, 8, 4, 9, 5, 10]
    assert access.read("counter").all()
    assert access.written("counter").all()


@pytest.mark.parametrize("programs_per_chunk", [1, 3, 1000])
def test_chunks_of_programs_write_the_same_bytes(lane, buffer, programs_per_chunk):
    lane.chunk_bytes = 8 * 16 * programs_per_chunk
    values = torch.arange(100, dtype=torch.int32)
    dst = buffer("dst", torch.zeros(100, dtype=torch.int32))
    with lane.observe() as access:
        copy[(7,)](buffer("src", values), dst, 100, BLOCK=16)
    assert torch.equal(dst, values)
    assert access.written("dst").all()


def test_strays_of_several_chunks_name_the_right_program_and_add_up(lane, buffer):
    lane.chunk_bytes = 8 * 4
    dst = buffer("dst", torch.zeros(8, dtype=torch.int32))
    with lane.observe() as access:
        store_shifted[(4,)](dst, 0, BLOCK=4)
    (stray,) = access.strays
    assert (stray.program, stray.offset, stray.count) == ((2, 0, 0), 32, 8)
