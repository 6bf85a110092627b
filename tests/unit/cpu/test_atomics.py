# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvfuzz.cpu import LaunchError, UnsupportedOp, atomics
from kvfuzz.cpu.atomics import ATOMIC_KINDS, atomic_compute
from kvfuzz.cpu.memory import Memory

AT_LEAST_3_9 = hasattr(tl, "atomic_load")


@triton.jit
def add_to(counter, values, old, length, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + at, mask=at < length)
    before = tl.atomic_add(counter + at % 2, value, mask=at < length)
    tl.store(old + at, before, mask=at < length)


@triton.jit
def every_kind(memory, value, old):
    pid = tl.program_id(0)
    tl.store(old + pid * 8, tl.atomic_add(memory, value))
    tl.store(old + pid * 8 + 1, tl.atomic_and(memory + 1, value))
    tl.store(old + pid * 8 + 2, tl.atomic_or(memory + 2, value))
    tl.store(old + pid * 8 + 3, tl.atomic_xor(memory + 3, value))
    tl.store(old + pid * 8 + 4, tl.atomic_xchg(memory + 4, value))
    tl.store(old + pid * 8 + 5, tl.atomic_max(memory + 5, value))
    tl.store(old + pid * 8 + 6, tl.atomic_min(memory + 6, value))


@triton.jit
def extremes(memory, values, BLOCK: tl.constexpr):
    value = tl.load(values + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_max(memory + tl.arange(0, BLOCK), value)
    tl.atomic_min(memory + BLOCK + tl.arange(0, BLOCK), value)


@triton.jit
def swap(memory, expected, old, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    wanted = tl.load(expected + pid * BLOCK + at)
    new = (wanted + 1).to(memory.dtype.element_ty)
    tl.store(old + pid * BLOCK + at, tl.atomic_cas(memory + at // 2, wanted, new))


@triton.jit
def swap_one(memory, expected, new, chosen, shift):
    pid = tl.program_id(0)
    if tl.load(chosen + pid) != 0:
        tl.atomic_cas(memory + shift, expected, new + pid)


@triton.jit
def contend(memory, spots, values, on, old, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target, value = memory + tl.load(spots + at), tl.load(values + at)
    mask = tl.load(on + at) != 0
    if tl.load(on + tl.program_id(0) * BLOCK) >= 0:
        if KIND == "add":
            before = tl.atomic_add(target, value, mask=mask)
        elif KIND == "and":
            before = tl.atomic_and(target, value, mask=mask)
        elif KIND == "or":
            before = tl.atomic_or(target, value, mask=mask)
        elif KIND == "xor":
            before = tl.atomic_xor(target, value, mask=mask)
        elif KIND == "xchg":
            before = tl.atomic_xchg(target, value, mask=mask)
        elif KIND == "max":
            before = tl.atomic_max(target, value, mask=mask)
        else:
            before = tl.atomic_min(target, value, mask=mask)
        tl.store(old + at, before, mask=mask)


@triton.jit
def count(bins, spots, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(bins + tl.load(spots + at), 1)


def test_half_precision_atomics_round_after_every_program(buffer):
    for dtype, reference in ((torch.float16, np.float16), (torch.bfloat16, ml_dtypes.bfloat16)):
        rng = np.random.default_rng(1)
        values = (rng.standard_normal(23) * 50).astype(reference)
        name = str(dtype)
        counter = buffer(f"counter{name}", torch.zeros(2, dtype=dtype))
        old = buffer(f"old{name}", torch.zeros(23, dtype=dtype))
        given = buffer(f"v{name}", torch.from_numpy(values.view(np.int16)).view(dtype))
        add_to[(3,)](counter, given, old, 23, BLOCK=8)
        sums, before = np.zeros(2, reference), np.zeros(23, reference)
        for i, value in enumerate(values):
            before[i] = sums[i % 2]
            sums[i % 2] = reference(np.float32(sums[i % 2]) + np.float32(value))
        np.testing.assert_array_equal(counter.view(torch.int16).numpy(), sums.view(np.int16))
        np.testing.assert_array_equal(old.view(torch.int16).numpy(), before.view(np.int16))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
def test_every_kind_gives_back_what_the_program_before_left(buffer, dtype):
    start, value = [3, 0b1100, 0b0011, 0b0101, 9, 2, 200], 0b0110
    memory = buffer("memory", torch.tensor(start, dtype=dtype))
    old = buffer("old", torch.zeros(2, 8, dtype=dtype))
    every_kind[(2,)](memory, value, old)
    once = [3 + 6, 0b0100, 0b0111, 0b0011, 6, 6, 6]
    twice = [3 + 12, 0b0100, 0b0111, 0b0101, 6, 6, 6]
    assert old[:, :7].tolist() == [start, once]
    assert memory.tolist() == twice


def test_unsigned_extremes_are_those_of_unsigned_numbers(buffer):
    values = torch.tensor([[1, -1], [5, 7]], dtype=torch.int32).view(torch.uint32)
    memory = buffer("memory", torch.tensor([2, 2, 2, 2], dtype=torch.int32).view(torch.uint32))
    extremes[(2,)](memory, buffer("values", values), BLOCK=2)
    assert memory.tolist() == [5, 2**32 - 1, 1, 2]


def test_floating_point_extremes_are_made_of_integer_ones(buffer):
    values = torch.tensor([[1.5, -2.0], [-0.5, 3.0]])
    memory = buffer("memory", torch.tensor([0.0, -1.0, 0.0, -1.0]))
    extremes[(2,)](memory, buffer("values", values), BLOCK=2)
    assert memory.tolist() == [1.5, 3.0, -0.5, -2.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float16])
def test_compare_and_swap_sees_what_earlier_lanes_and_programs_wrote(buffer, dtype):
    start = [1, 5, 0, 3]
    expected = [[1, 2, 5, 5, 7, 0, 3, 4], [3, 4, 6, 6, 0, 1, 5, 5]]
    memory = buffer("memory", torch.tensor(start, dtype=dtype))
    old = buffer("old", torch.zeros(2, 8, dtype=dtype))
    swap[(2,)](memory, buffer("expected", torch.tensor(expected, dtype=dtype)), old, BLOCK=8)
    state, seen = list(start), []
    for row in expected:
        for at, wanted in enumerate(row):
            seen.append(state[at // 2])
            if state[at // 2] == wanted:
                state[at // 2] = wanted + 1
    assert old.flatten().tolist() == seen
    assert memory.tolist() == state


def test_compare_and_swap_compares_bits(buffer):
    for start, expected, swaps in ((-0.0, 0.0, False), (float("nan"), float("nan"), True)):
        memory = buffer(f"memory{swaps}", torch.tensor([start]))
        chosen = buffer(f"chosen{swaps}", torch.ones(1, dtype=torch.int32))
        swap_one[(1,)](memory, expected, 7.0, chosen, 0)
        assert (memory.item() == 7) == swaps


def test_only_a_swap_that_succeeds_writes_and_only_in_active_programs(lane, buffer):
    memory = buffer("memory", torch.tensor([4, 4], dtype=torch.int32))
    chosen = buffer("chosen", torch.tensor([0, 1, 1], dtype=torch.int32))
    with lane.observe() as access:
        swap_one[(3,)](memory, 5, 9, chosen, 0)
    assert access.read("memory").tolist() == [True] * 4 + [False] * 4
    assert not access.written("memory").any()
    with lane.observe() as access:
        swap_one[(3,)](memory, 4, 9, chosen, 1)
    assert memory.tolist() == [4, 10]  # program 0 is off, program 2 comes too late
    assert access.written("memory").tolist() == [False] * 4 + [True] * 4


def test_an_atomic_outside_its_allocation_writes_nothing(lane, buffer):
    memory = buffer("memory", torch.tensor([4, 4], dtype=torch.int32))
    chosen = buffer("chosen", torch.ones(2, dtype=torch.int32))
    poison = int.from_bytes([lane.poison] * 4, "little") - (1 << 32)
    with lane.observe() as access:
        swap_one[(2,)](memory, poison, 9, chosen, 2)
    assert memory.tolist() == [4, 4]
    assert {(stray.kind, stray.offset) for stray in access.strays} == {("read", 8), ("write", 8)}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
@pytest.mark.parametrize("kind", ["add", "and", "or", "xor", "xchg", "max", "min"])
def test_contenders_leave_what_they_leave_one_after_the_other(
    lane, buffer, monkeypatch, kind, dtype
):
    rng = np.random.default_rng([ord(letter) for letter in kind])
    programs, block, strayed = 5, 16, set()

    def ints(values, dtype):
        return torch.from_numpy(values).to(dtype)

    for bins in (1, 3, 40):
        spots = ints(rng.integers(-2, bins + 2, programs * block), torch.int32)  # some are strays
        on = ints(rng.integers(-1, 2, programs * block), torch.int32)  # some programs are off
        values = ints(rng.integers(-(2**31), 2**31, programs * block), torch.int32).to(dtype)
        start = ints(rng.integers(-(2**31), 2**31, bins), torch.int32).to(dtype)

        def outcome(name, bins=bins, spots=spots, on=on, values=values, start=start):
            memory = buffer(f"memory{name}", start)
            old = buffer(f"old{name}", torch.full((programs * block,), 77).to(dtype))
            with lane.observe() as access:
                contend[(programs,)](memory, spots, values, on, old, KIND=kind, BLOCK=block)
            strays = [(s.kind, s.line, s.program, s.offset, s.count) for s in access.strays]
            marks = [access.read(f"memory{name}"), access.written(f"memory{name}")]
            return memory.tolist(), old.tolist(), strays, [each.tolist() for each in marks]

        at_once = outcome(f"{bins}")
        with monkeypatch.context() as patch:
            patch.setattr(atomics, "IN_TURN", set(ATOMIC_KINDS))
            assert outcome(f"{bins} in turn") == at_once
        strayed |= {stray[0] for stray in at_once[2]}
    assert strayed == {"read", "write"}


def test_many_contenders_for_few_addresses_take_one_round(lane, buffer, monkeypatch):
    stores, spots = [], np.random.default_rng(2).integers(0, 4, 1 << 14).astype(np.int32)
    store = Memory.store

    def counted(*arguments, **options):
        stores.append(1)
        store(*arguments, **options)

    monkeypatch.setattr(Memory, "store", counted)
    bins = buffer("bins", torch.zeros(4, dtype=torch.int32))
    count[(16,)](bins, buffer("spots", torch.from_numpy(spots)), BLOCK=1024)
    assert bins.tolist() == np.bincount(spots).tolist()
    assert len(stores) == 1


def test_only_what_the_table_names_is_bound():
    for kind, (_, elements) in ATOMIC_KINDS.items():
        for element in elements:
            atomic_compute(kind, element)
    for kind, element in (("fadd", "f8E5M2"), ("add", "i8"), ("dance", "i32")):
        with pytest.raises(ValueError, match=f"{kind} on {element}"):
            atomic_compute(kind, element)


if AT_LEAST_3_9:

    @triton.jit
    def publish(flags, out, seen, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        value = tl.atomic_load(flags + at, mask=at < 3)
        tl.atomic_store(out + at, value + 1, mask=at < 2)
        tl.store(seen + at, tl.atomic_poll(flags + at, 2, timeout_ns=0))

    @triton.jit
    def poll_for_ever(flag, out):
        tl.store(out, tl.atomic_poll(flag, 1))

    @triton.jit
    def hand_over(flags, out):
        pid = tl.program_id(0)
        tl.atomic_poll(flags + pid, 1)
        tl.store(out + pid, 5)
        tl.atomic_store(flags + pid + 1, 1)

    def test_atomic_loads_and_stores_obey_their_masks(buffer):
        flags = buffer("flags", torch.tensor([1, 2, 3, 2], dtype=torch.int32))
        out = buffer("out", torch.zeros(4, dtype=torch.int32))
        seen = buffer("seen", torch.zeros(4, dtype=torch.int32))
        publish[(1,)](flags, out, seen, BLOCK=4)
        assert out.tolist() == [2, 3, 0, 0]
        assert seen.tolist() == [0, 1, 0, 1]

    def test_a_poll_waits_for_the_program_before(buffer):
        flags = buffer("flags", torch.tensor([1, 0, 0, 0], dtype=torch.int32))
        out = buffer("out", torch.zeros(3, dtype=torch.int32))
        hand_over[(3,)](flags, out)
        assert out.tolist() == [5, 5, 5]

    def test_a_poll_that_nobody_can_satisfy_ends_the_launch(buffer):
        flag = buffer("flag", torch.zeros(1, dtype=torch.int32))
        out = buffer("out", torch.zeros(1, dtype=torch.int32))
        with pytest.raises(LaunchError, match="out of fuel: kernel=poll_for_ever"):
            poll_for_ever[(1,)](flag, out)
        with pytest.raises(UnsupportedOp, match="waits for a later one"):
            poll_for_ever[(2,)](flag, out)
