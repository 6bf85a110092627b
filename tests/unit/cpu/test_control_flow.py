# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import re

import pytest
import torch
import triton
import triton.language as tl

from kvfuzz.cpu import LaunchError


@triton.jit
def early_return(slots, out):
    pid = tl.program_id(0)
    slot = tl.load(slots + pid)
    if slot < 0:
        return
    tl.store(out + slot, pid + 1)


@triton.jit
def two_returns(values, out):
    pid = tl.program_id(0)
    value = tl.load(values + pid)
    tl.store(out + pid, 1)
    if value < 0:
        return
    tl.store(out + pid, 2)
    if value > 10:
        return
    tl.store(out + pid, 3)


@triton.jit
def sum_to(bounds, out, start):
    pid = tl.program_id(0)
    total = 0
    for i in range(start, tl.load(bounds + pid)):
        total += i
    tl.store(out + pid, total)


@triton.jit
def sum_rows(values, out, length, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        at = start + lanes
        total += tl.load(values + pid * length + at, mask=at < length, other=0)
    tl.store(out + pid, tl.sum(total, 0))


@triton.jit
def collatz(values, out):
    pid = tl.program_id(0)
    n = tl.load(values + pid)
    steps = 0
    while n > 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    tl.store(out + pid, steps)


@triton.jit
def nested_if(values, out):
    pid = tl.program_id(0)
    value = tl.load(values + pid)
    if value > 0:
        if value > 10:
            result = value * 2
        else:
            result = value + 100
            tl.store(out + pid + 8, 7)
    else:
        result = -value
    tl.store(out + pid, result)


@triton.jit
def nested_loops(bounds, out):
    pid = tl.program_id(0)
    bound = tl.load(bounds + pid)
    total = 0
    for i in range(bound):
        for j in range(i):
            if (i + j) % 2 == 0:
                total += i * j
    tl.store(out + pid, total)


@triton.jit
def guarded_steps(steps, out):
    pid = tl.program_id(0)
    step = tl.load(steps + pid)
    if step > 0:
        count = 0
        for _ in range(0, 10, step):
            count += 1
        tl.store(out + pid, count)


@triton.jit
def unguarded_steps(steps, out):
    pid = tl.program_id(0)
    count = 0
    for _ in range(0, 10, tl.load(steps + pid)):
        count += 1
    tl.store(out + pid, count)


@triton.jit(noinline=True)
def outlined(value, limit):
    if value > limit:
        return value
    return value - limit


@triton.jit
def calls(values, out):
    pid = tl.program_id(0)
    tl.store(out + pid, outlined(tl.load(values + pid), 5))


@triton.jit
def asserts(values):
    pid = tl.program_id(0)
    value = tl.load(values + pid)
    if value >= 0:
        tl.device_assert(value < 10, "value is too large")


@triton.jit
def for_ever(out):
    n = tl.load(out) + 1
    while n != 0:
        n += 2
        tl.store(out, n)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_programs_that_return_early_store_nothing(buffer):
    out = buffer("out", torch.zeros(6, dtype=torch.int32))
    early_return[(4,)](buffer("slots", ints(3, -1, 0, -1)), out)
    assert out.tolist() == [3, 0, 0, 1, 0, 0]


def test_a_uniform_early_return_ends_every_program(buffer):
    out = buffer("out", torch.zeros(4, dtype=torch.int32))
    early_return[(4,)](buffer("slots", ints(-1, -1, -1, -1)), out)
    assert out.tolist() == [0, 0, 0, 0]


def test_each_program_stops_at_its_own_return(buffer):
    out = buffer("out", torch.zeros(4, dtype=torch.int32))
    two_returns[(4,)](buffer("values", ints(-1, 20, 5, 0)), out)
    assert out.tolist() == [1, 2, 3, 3]


def test_loop_bounds_may_come_from_data(buffer):
    bounds = [0, 5, 1, 100, -3]
    out = buffer("out", torch.zeros(5, dtype=torch.int32))
    sum_to[(5,)](buffer("bounds", ints(*bounds)), out, 2)
    assert out.tolist() == [sum(range(2, bound)) for bound in bounds]


def test_a_loop_over_tiles_masks_the_last_one(buffer):
    values = torch.randint(0, 100, (3, 37), dtype=torch.int32)
    out = buffer("out", torch.zeros(3, dtype=torch.int32))
    sum_rows[(3,)](buffer("values", values), out, 37, BLOCK=16)
    assert out.tolist() == values.sum(1).tolist()


def test_while_loops_end_for_each_program_on_its_own(buffer):
    def steps(n):
        count = 0
        while n > 1:
            n, count = (n // 2 if n % 2 == 0 else 3 * n + 1), count + 1
        return count

    values = [1, 2, 7, 27, 9, 0]
    out = buffer("out", torch.zeros(6, dtype=torch.int32))
    collatz[(6,)](buffer("values", ints(*values)), out)
    assert out.tolist() == [steps(n) for n in values]


def test_nested_branches_store_only_where_taken(buffer):
    out = buffer("out", torch.zeros(16, dtype=torch.int32))
    nested_if[(4,)](buffer("values", ints(20, 5, -3, 1)), out)
    assert out.tolist() == [40, 105, 3, 101, 0, 0, 0, 0, 0, 7, 0, 7, 0, 0, 0, 0]


def test_nested_loops_with_divergent_bounds(buffer):
    bounds = [3, 0, 7, 5]
    out = buffer("out", torch.zeros(4, dtype=torch.int32))
    nested_loops[(4,)](buffer("bounds", ints(*bounds)), out)
    assert out.tolist() == [
        sum(i * j for i in range(n) for j in range(i) if (i + j) % 2 == 0) for n in bounds
    ]


def test_programs_behind_a_false_guard_do_not_fail_the_others(buffer):
    out = buffer("out", torch.zeros(4, dtype=torch.int32))
    guarded_steps[(4,)](buffer("steps", ints(1, 0, -2, 4)), out)
    assert out.tolist() == [10, 0, 0, 3]


def test_a_loop_that_cannot_advance_is_stopped(buffer):
    with pytest.raises(LaunchError, match="loop without step"):
        unguarded_steps[(2,)](buffer("steps", ints(1, 0)), buffer("out", ints(0, 0)))


def test_a_function_that_is_not_inlined_returns_per_program(buffer):
    out = buffer("out", torch.zeros(3, dtype=torch.int32))
    calls[(3,)](buffer("values", ints(9, 5, -1)), out)
    assert out.tolist() == [9, 0, -6]


def test_a_loop_without_end_runs_out_of_fuel(lane, buffer):
    lane.fuel = 1000
    out = buffer("out", torch.zeros(1, dtype=torch.int32))
    place = r".*test_control_flow\.py:\d+"
    with pytest.raises(LaunchError, match="out of fuel: kernel=for_ever " + place) as stopped:
        for_ever[(1,)](out)
    (note,) = stopped.value.__notes__
    assert re.fullmatch("while evaluating scf.while of " + place, note)


def test_fuel_is_renewed_for_every_launch(lane, buffer):
    lane.fuel = 30
    bounds = buffer("bounds", ints(20))
    out = buffer("out", torch.zeros(1, dtype=torch.int32))
    for _ in range(3):
        sum_to[(1,)](bounds, out, 0)
    assert out.item() == 190


def test_fuel_does_not_depend_on_how_many_chunks_a_launch_has(lane, buffer):
    lane.fuel = 30
    bounds = buffer("bounds", ints(*[20] * 8))
    for chunk_bytes in (1, 16, 1 << 20):
        lane.chunk_bytes = chunk_bytes
        sum_to[(8,)](bounds, buffer(f"out{chunk_bytes}", torch.zeros(8, dtype=torch.int32)), 0)
    lane.fuel = 19
    for chunk_bytes in (1, 16, 1 << 20):
        lane.chunk_bytes = chunk_bytes
        with pytest.raises(LaunchError, match="out of fuel"):
            sum_to[(8,)](bounds, buffer(f"o{chunk_bytes}", torch.zeros(8, dtype=torch.int32)), 0)


def test_a_device_assertion_is_judged_for_active_programs_only(buffer):
    asserts[(3,)](buffer("good", ints(1, -1, 9)), debug=True)
    with pytest.raises(LaunchError, match="device assertion failed: 'value is too large' in "):
        asserts[(3,)](buffer("bad", ints(1, -1, 10)), debug=True)
