# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import pytest
import torch
import triton
import triton.language as tl

from kvfuzz.cpu import LaunchError, UnsupportedOp
from kvfuzz.cpu.driver import CpuUtils


@triton.jit
def locked_sum(lock, total, values):
    pid = tl.program_id(0)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total, volatile=True) * 3 + tl.load(values + pid))
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def look_back(flags, partial, out, values, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    at = pid * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(values + at)
    before = 0
    if pid > 0:
        ready = tl.load(flags + pid - 1, volatile=True)
        while ready == 0:
            ready = tl.load(flags + pid - 1, volatile=True)
        before = tl.load(partial + pid - 1)
    tl.store(partial + pid, before + tl.sum(row, 0))
    tl.atomic_xchg(flags + pid, 1)
    tl.store(out + at, before + tl.cumsum(row, 0))


@triton.jit
def wait_for_next(flags, out):
    pid = tl.program_id(0)
    while tl.load(flags + pid + 1, volatile=True) == 0:
        pass
    tl.store(out + pid, 1)
    tl.atomic_xchg(flags + pid, 1)


@triton.jit
def take_turns(counter, out, turns):
    pid = tl.program_id(0)
    done = 0
    while done < turns:
        tl.store(out + tl.atomic_add(counter, 1), pid)
        done += 1


@triton.jit
def plain_loop(bounds, out):
    pid = tl.program_id(0)
    n = 0
    while tl.load(bounds + n) > pid:
        n += 1
    tl.store(out + pid, n)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_a_spin_lock_does_not_deadlock(buffer):
    values = list(range(1, 8))
    total, lock = buffer("total", ints(0)), buffer("lock", ints(0))
    locked_sum[(7,)](lock, total, buffer("values", ints(*values)))
    expected = 0
    for value in values:
        expected = expected * 3 + value
    assert (total.item(), lock.item()) == (expected, 0)


def test_a_look_back_scan_finds_what_the_programs_before_left(buffer):
    values = torch.randint(-9, 9, (6, 8), dtype=torch.int32)
    out = buffer("out", torch.zeros(6, 8, dtype=torch.int32))
    flags, partial = buffer("flags", ints(*[0] * 6)), buffer("partial", ints(*[0] * 6))
    look_back[(6,)](flags, partial, out, buffer("values", values), BLOCK=8)
    assert torch.equal(out.flatten(), values.flatten().cumsum(0).int())


def test_a_program_that_waits_for_a_later_one_is_not_supported(lane, buffer):
    lane.fuel = 50
    flags, out = buffer("flags", ints(0, 0, 1)), buffer("out", ints(0, 0))
    with pytest.raises(UnsupportedOp, match=r"program \(0, 0, 0\) waits for a later") as refusal:
        wait_for_next[(2,)](flags, out)
    assert refusal.value.file == "test_waiting.py"
    assert refusal.value.line == wait_for_next.fn.__code__.co_firstlineno + 3
    flags[1] = 1
    wait_for_next[(2,)](flags, out)
    assert out.tolist() == [1, 1]


def test_a_lock_that_is_never_released_ends_the_launch(lane, buffer):
    lane.fuel = 50
    lock = buffer("lock", ints(1))
    with pytest.raises(LaunchError, match="out of fuel: kernel=locked_sum"):
        locked_sum[(1,)](lock, buffer("total", ints(0)), buffer("values", ints(0)))


def test_each_program_that_runs_alone_has_the_fuel_of_a_launch(lane, buffer):
    lane.fuel = 8
    out = buffer("out", ints(*[-1] * 20))
    take_turns[(4,)](buffer("counter", ints(0)), out, 5)
    assert out.tolist() == [pid for pid in range(4) for _ in range(5)]


@pytest.mark.parametrize(
    ("kernel", "serial"),
    [(locked_sum, True), (look_back, True), (take_turns, True), (plain_loop, False)],
)
def test_kernels_whose_loops_watch_memory_are_told_by_their_code(
    lane, buffer, monkeypatch, kernel, serial
):
    loaded = {}
    original = CpuUtils.load_binary

    def load(self, name, *rest):
        result = original(self, name, *rest)
        loaded[name] = result[1]
        return result

    monkeypatch.setattr(CpuUtils, "load_binary", load)
    kernel.device_caches.clear()
    some = [buffer(name, ints(*[0] * 16)) for name in "abcd"]
    if kernel is take_turns:
        kernel[(1,)](some[0], some[1], 2)
    elif kernel is look_back:
        kernel[(1,)](*some, BLOCK=8)
    elif kernel is plain_loop:
        kernel[(1,)](some[0], some[1])
    else:
        kernel[(1,)](*some[:3])
    assert loaded[kernel.fn.__name__].serial is serial
