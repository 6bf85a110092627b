# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
"""Bytes that two programs of a launch write differently, or one reads and another changes."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def store_ids(out, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * STRIDE + tl.arange(0, BLOCK)
    tl.store(out + at, tl.zeros([BLOCK], tl.int32) + tl.program_id(0))


@triton.jit
def store_places(out, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * STRIDE + tl.arange(0, BLOCK)
    tl.store(out + at, at)


@triton.jit
def store_twice(out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, at)
    for step in range(3):
        tl.store(out + at, at + step)


@triton.jit
def store_then_neighbour(out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, at)
    tl.store(out + at + BLOCK, at)


@triton.jit
def store_words_and_bytes(words, halves, SHIFT: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(words + pid, 0x01020304)
    tl.store(halves + 2 * pid + SHIFT, 7)


@triton.jit
def masked_overlap(out, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    value = lane * 0 + tl.program_id(0)
    tl.store(out + tl.program_id(0) * STRIDE + lane, value, mask=lane < STRIDE)


@triton.jit
def one_store_two_values(out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane // 2, lane)


@triton.jit
def shift_in_place(data, BY: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(data + at, tl.load(data + at + BY) + 1)


@triton.jit
def read_common_write_own(data, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(data + BLOCK + at, tl.load(data + tl.arange(0, BLOCK)) + at)


@triton.jit
def count(out, hits, BLOCK: tl.constexpr):
    tl.atomic_add(hits + tl.arange(0, BLOCK) * 0, 1)
    tl.store(out + tl.program_id(0), 1)


@triton.jit
def last_one_writes(out, hits):
    if tl.atomic_add(hits, 1) == tl.num_programs(0) - 1:
        tl.store(out, tl.program_id(0))


def _observed(lane, kernel, programs, *arguments, readers=False, **constants):
    with lane.observe(readers=readers) as access:
        kernel[(programs,)](*arguments, **constants)
    return access


def test_two_programs_that_store_different_values_to_one_byte_race(lane, buffer):
    out = buffer("out", torch.zeros(64, dtype=torch.int32))
    (race,) = _observed(lane, store_ids, 4, out, STRIDE=8, BLOCK=16).found_races
    assert (race.kind, race.kernel, race.allocation) == ("write/write", "store_ids", "out")
    assert (race.file, race.line) == ("test_races.py", 13)
    # Whose value is lost, and whose stays.
    assert (race.program, race.other_program, race.offset) == ((0, 0, 0), (1, 0, 0), 32)
    assert race.count == 3 * 8


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (store_ids, {"STRIDE": 16, "BLOCK": 16}),
        (store_places, {"STRIDE": 8, "BLOCK": 16}),  # an equal value twice is no race
        (store_twice, {"BLOCK": 16}),  # a program may change its mind
        (masked_overlap, {"STRIDE": 8, "BLOCK": 16}),  # what overlaps is masked off
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("chunk_bytes", [1, 2 << 20], ids=["program by program", "at once"])
def test_a_correct_kernel_that_looks_like_it_does_not_race(
    lane, buffer, kernel, constants, chunk_bytes
):
    lane.chunk_bytes = chunk_bytes
    out = buffer("out", torch.zeros(80, dtype=torch.int32))
    assert _observed(lane, kernel, 4, out, **constants).found_races == []


@pytest.mark.parametrize("chunk_bytes", [1, 2 << 20], ids=["program by program", "at once"])
def test_a_race_is_found_whatever_runs_together(lane, buffer, chunk_bytes):
    lane.chunk_bytes = chunk_bytes
    out = buffer("out", torch.full((64,), -1, dtype=torch.int32))
    assert _observed(lane, store_ids, 4, out, STRIDE=8, BLOCK=16).found_races


def test_a_race_between_two_stores_names_both_lines_and_programs(lane, buffer):
    out = buffer("out", torch.zeros(80, dtype=torch.int32))
    (race,) = _observed(lane, store_then_neighbour, 4, out, BLOCK=16).found_races
    assert (race.line, race.other_line) == (34, 33)
    assert (race.program, race.other_program) == ((0, 0, 0), (1, 0, 0))
    assert race.offset == 16 * 4


def test_two_launches_are_ordered(lane, buffer):
    out = buffer("out", torch.zeros(64, dtype=torch.int32))
    with lane.observe() as access:
        for stride in (16, 8):
            store_ids[(4,)](out, STRIDE=stride, BLOCK=8)
    assert access.found_races == []


@pytest.mark.parametrize(("shift", "races"), [(0, False), (2, True), (3, True)])
def test_stores_of_different_widths_race_where_they_overlap(lane, buffer, shift, races):
    """Program p stores word p, then a half of it (shift 0) or of the next word."""
    words = buffer("data", torch.zeros(8, dtype=torch.int32))
    access = _observed(lane, store_words_and_bytes, 4, words, words.view(torch.int16), SHIFT=shift)
    assert bool(access.found_races) == races


def test_two_lanes_of_one_store_with_two_values_race(lane, buffer):
    out = buffer("out", torch.zeros(16, dtype=torch.int32))
    (race,) = _observed(lane, one_store_two_values, 1, out, BLOCK=16).found_races
    assert race.program == race.other_program == (0, 0, 0)


def test_an_unaligned_store_races_by_its_bytes(lane, buffer):
    raw = buffer("data", torch.zeros(80, dtype=torch.uint8))
    odd = torch.frombuffer(raw.numpy()[1:73], dtype=torch.int32)
    assert _observed(lane, store_ids, 2, odd, STRIDE=8, BLOCK=16).found_races
    assert not _observed(lane, store_ids, 1, odd, STRIDE=8, BLOCK=16).found_races


def test_reading_what_another_program_changes_is_a_race_when_readers_are_noted(lane, buffer):
    data = buffer("data", torch.arange(80, dtype=torch.int32))
    plain = _observed(lane, shift_in_place, 4, data, BY=16, BLOCK=16)
    assert (plain.found_races, plain.crossed) == ([], ["data"])
    noted = _observed(lane, shift_in_place, 4, data, readers=True, BY=16, BLOCK=16)
    (race,) = noted.found_races
    assert (race.kind, race.allocation, race.nbytes) == ("read/write", "data", 4)
    assert {race.program, race.other_program} == {(0, 0, 0), (1, 0, 0)}


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [(shift_in_place, {"BY": 0}), (read_common_write_own, {})],
    ids=["its own bytes", "bytes that nobody changes"],
)
def test_reading_what_nobody_else_changes_is_no_race(lane, buffer, kernel, constants):
    data = buffer("data", torch.arange(128, dtype=torch.int32))
    access = _observed(lane, kernel, 4, data, readers=True, BLOCK=16, **constants)
    assert access.found_races == []


def test_an_equal_rewrite_of_what_others_read_is_no_race(lane, buffer):
    data = buffer("data", torch.zeros(80, dtype=torch.int32))
    with lane.observe(readers=True) as access:
        rewrite_zeros[(4,)](data, BLOCK=16)
    assert access.found_races == []


@triton.jit
def rewrite_zeros(data, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    value = tl.load(data + lane)
    tl.store(data + lane, value * 2)


def test_atomics_are_ordered(lane, buffer):
    out = buffer("out", torch.zeros(8, dtype=torch.int32))
    hits = buffer("hits", torch.zeros(1, dtype=torch.int32))
    access = _observed(lane, count, 4, out, hits, BLOCK=4)
    assert (access.found_races, access.synchronising) == ([], [])
    assert int(hits[0]) == 16


def test_a_kernel_that_uses_what_an_atomic_returned_orders_itself(lane, buffer):
    out = buffer("out", torch.zeros(1, dtype=torch.int32))
    hits = buffer("hits", torch.zeros(1, dtype=torch.int32))
    access = _observed(lane, last_one_writes, 4, out, hits)
    assert access.synchronising == ["last_one_writes (test_races.py:77)"]


@triton.jit
def clear_then_first_sets(out):
    tl.store(out, 0)
    if tl.program_id(0) == 0:
        tl.store(out, 5)


@triton.jit
def clear_then_last_sets(out):
    pid = tl.program_id(0)
    tl.store(out + pid * 0, pid * 0)
    if pid == tl.num_programs(0) - 1:
        tl.store(out, 5)


@triton.jit
def both_store_zero_then_one(out):
    pid = tl.program_id(0)
    tl.store(out + pid * 0, pid * 0)
    tl.store(out + pid * 0, pid * 0 + 1)


@triton.jit
def first_changes_its_mind(out):
    pid = tl.program_id(0)
    tl.store(out + pid * 0, pid * 0 + 1, mask=pid == 0)
    tl.store(out + pid * 0, pid * 0 + 2)


@triton.jit
def store_and_add(out):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(out, 10)
    else:
        tl.atomic_add(out, pid)


@triton.jit
def add_and_load(out, result):
    pid = tl.program_id(0)
    tl.atomic_add(out, pid + 1)
    tl.store(result + pid, tl.load(out))


@triton.jit
def first_reads_all_set(out, result):
    if tl.program_id(0) == 0:
        tl.store(result, tl.load(out))
    tl.store(out, 1)


EITHER_WAY = pytest.mark.parametrize(
    "chunk_bytes", [1, 2 << 20], ids=["program by program", "at once"]
)


@EITHER_WAY
@pytest.mark.parametrize(
    "kernel",
    [
        clear_then_first_sets,
        clear_then_last_sets,
        both_store_zero_then_one,
        first_changes_its_mind,
        store_and_add,
    ],
    ids=lambda kernel: kernel.__name__,
)
def test_who_comes_first_does_not_decide_whether_programs_race(lane, buffer, kernel, chunk_bytes):
    lane.chunk_bytes = chunk_bytes
    out = buffer("out", torch.full((8,), -1, dtype=torch.int32))
    kinds = {race.kind for race in _observed(lane, kernel, 4, out).found_races}
    assert kinds == {"write/write"}


@EITHER_WAY
@pytest.mark.parametrize(
    "kernel", [add_and_load, first_reads_all_set], ids=lambda kernel: kernel.__name__
)
def test_reading_what_others_change_races_however_equal_their_bytes(
    lane, buffer, kernel, chunk_bytes
):
    lane.chunk_bytes = chunk_bytes
    out = buffer("out", torch.zeros(8, dtype=torch.int32))
    result = buffer("result", torch.zeros(8, dtype=torch.int32))
    access = _observed(lane, kernel, 4, out, result, readers=True)
    assert {(race.kind, race.allocation) for race in access.found_races} == {("read/write", "out")}


@triton.jit
def waits_for_a_flag(flag, out):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(flag, 1)
    else:
        while tl.load(flag, volatile=True) == 0:
            pass
        tl.store(out + pid, 1)


def test_a_kernel_that_waits_for_memory_orders_itself(lane, buffer):
    flag = buffer("flag", torch.zeros(1, dtype=torch.int32))
    out = buffer("out", torch.zeros(4, dtype=torch.int32))
    access = _observed(lane, waits_for_a_flag, 4, flag, out, readers=True)
    assert access.found_races == []
    assert access.synchronising == ["waits_for_a_flag (its loops)"]


def test_a_kernel_that_orders_itself_hides_no_race_of_another(lane, buffer):
    out = buffer("out", torch.zeros(64, dtype=torch.int32))
    hits = buffer("hits", torch.zeros(1, dtype=torch.int32))
    with lane.observe() as access:
        last_one_writes[(4,)](out, hits)
        store_ids[(4,)](out, STRIDE=8, BLOCK=16)
    assert [race.kernel for race in access.found_races] == ["store_ids"]
    assert len(access.synchronising) == 1


def test_many_stores_of_a_launch_cost_their_number_and_not_its_square(lane, buffer):
    """A program that rewrites its own element ten thousand times; quadratic, this takes minutes."""
    out = buffer("out", torch.zeros(8, dtype=torch.int32))
    access = _observed(lane, rewrites_its_own, 8, out, N=10_000)
    assert access.found_races == []
    assert out.tolist() == [10_000] * 8


@triton.jit
def rewrites_its_own(out, N):
    pid = tl.program_id(0)
    for _ in range(N):
        tl.store(out + pid, tl.load(out + pid) + 1)
