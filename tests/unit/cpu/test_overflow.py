# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
"""32-bit integers that lose bits: found where that decides an access, and nowhere else."""

import pytest
import torch
import triton
import triton.language as tl

BIG = 1 << 30


@triton.jit
def narrow_offset(src, out, stride, factor):
    pid = tl.program_id(0)
    tl.store(out + pid, tl.load(src + (pid * factor) * stride))


@triton.jit
def wide_offset(src, out, stride, factor):
    pid = tl.program_id(0)
    tl.store(out + pid, tl.load(src + (pid * factor).to(tl.int64) * stride))


@triton.jit
def wraps_and_returns(src, out, big):
    pid = tl.program_id(0)
    tl.store(out + pid, tl.load(src + (pid + big + big - big - big)))


@triton.jit
def hashed(src, out, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    code = (pid + 1) * 0x3504F333
    tl.store(out + pid, tl.load(src + (code & (BLOCK - 1))))


@triton.jit
def stored_only(src, out, big):
    pid = tl.program_id(0)
    tl.store(out + pid, tl.load(src + pid) + (pid + 1) * big * 2)


@triton.jit
def masked_off(src, out, n, factor):
    pid = tl.program_id(0)
    at = pid * factor * 4
    tl.store(out + pid, tl.load(src + at, mask=pid < n, other=0))


@triton.jit
def mask_lets_it_through(out, big, n):
    lane = tl.arange(0, 4)
    end = tl.program_id(0) * big * 4 + lane  # 2**32 * pid: 0 in 32 bits
    tl.store(out + tl.program_id(0) * 4 + lane, lane, mask=end < n)


@triton.jit
def branch_lets_it_through(out, big, n):
    pid = tl.program_id(0)
    if pid * big * 4 < n:
        tl.store(out + pid, 1)


@triton.jit
def loop_bound(out, big):
    pid = tl.program_id(0)
    for at in range(pid * big * 4, pid * big * 4 + 2):
        tl.store(out + pid * 2 + at, 1)


@triton.jit
def truncated_id(src, ids, out):
    pid = tl.program_id(0)
    tl.store(out + pid, tl.load(src + tl.load(ids + pid).to(tl.int32)))


@triton.jit
def through_selects_and_shapes(src, out, big):
    pid = tl.program_id(0)
    at = tl.where(pid > 0, pid * big * 4, 0) + tl.arange(0, 2)[:, None] + tl.zeros([2, 2], tl.int32)
    values = tl.load(src + tl.ravel(at))
    tl.store(out + pid * 4 + tl.arange(0, 4), values)


@triton.jit
def pointer_steps(src, out, big):
    pid = tl.program_id(0)
    pointer = src + pid  # the steps are 32-bit, their sum is a pointer: nothing is lost
    pointer += big
    pointer += big
    pointer += big
    pointer -= big
    pointer -= big
    pointer -= big
    tl.store(out + pid, tl.load(pointer))


@pytest.fixture
def launch(lane, buffer):
    """Run a kernel of two programs over `src` (and `ids`) and `out`; returns the overflows."""
    src = buffer("src", torch.arange(64, dtype=torch.int32))
    ids = buffer("ids", torch.tensor([3, (1 << 32) + 5]))
    out = buffer("out", torch.zeros(64, dtype=torch.int32))

    def run(kernel, *arguments, **constants):
        known = {"src": src, "ids": ids, "out": out}
        tensors = [known[name] for name in kernel.arg_names if name in known]
        with lane.observe() as access:
            kernel[(2,)](*tensors, *arguments, **constants)
        return access.overflows

    return run


def test_an_offset_that_wraps_in_32_bits_is_found(launch):
    (found,) = launch(narrow_offset, 8, BIG)
    assert (found.reached, found.kernel, found.allocation) == ("address", "narrow_offset", "src")
    assert (found.file, found.line, found.lost_line) == ("test_overflow.py", 15, 15)
    assert found.program == (1, 0, 0)
    assert (found.offset, found.exact) == (0, 8 * BIG * 4)
    assert found.count == 1


CORRECT = [
    (wide_offset, (8, 0), {}),
    (narrow_offset, (8, 1), {}),
    (wraps_and_returns, (BIG,), {}),
    (hashed, (), {"BLOCK": 64}),
    (stored_only, (BIG,), {}),
    (masked_off, (1, BIG), {}),
    (pointer_steps, (BIG,), {}),
]


@pytest.mark.parametrize(
    ("kernel", "arguments", "constants"), CORRECT, ids=[each[0].__name__ for each in CORRECT]
)
def test_a_wrap_without_consequence_is_no_overflow(launch, kernel, arguments, constants):
    assert launch(kernel, *arguments, **constants) == []


def test_the_same_wrap_is_found_once_its_mask_is_on(launch):
    (found,) = launch(masked_off, 2, BIG)
    assert (found.reached, found.program) == ("address", (1, 0, 0))


@pytest.mark.parametrize(
    ("kernel", "reached", "arguments"),
    [
        (mask_lets_it_through, "mask", (BIG, 4)),
        (branch_lets_it_through, "branch", (BIG, 4)),
        (loop_bound, "bound", (BIG,)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrapped_mask_branch_or_bound_of_an_access_is_found(launch, kernel, reached, arguments):
    found = launch(kernel, *arguments)
    assert reached in {each.reached for each in found}
    assert {each.program for each in found} == {(1, 0, 0)}


def test_a_mask_that_is_right_although_its_operand_wrapped_is_no_overflow(launch):
    # Neither 2**32 nor the 0 that is left of it lies below -1.
    assert launch(mask_lets_it_through, BIG, -1) == []


def test_an_identifier_cut_to_32_bits_is_found(launch):
    (found,) = launch(truncated_id)
    assert (found.reached, found.offset, found.exact) == ("address", 20, ((1 << 32) + 5) * 4)


def test_the_loss_travels_through_selects_and_changes_of_shape(launch):
    (found,) = launch(through_selects_and_shapes, BIG)
    assert (found.program, found.offset, found.exact) == ((1, 0, 0), 0, 4 * BIG * 4)


def test_without_an_observation_nothing_is_looked_for(lane, buffer, monkeypatch):
    monkeypatch.setattr("kvfuzz.cpu.overflow._kept", lambda *_: pytest.fail("looked for"))
    src = buffer("src", torch.arange(8, dtype=torch.int32) + 5)
    out = buffer("out", torch.zeros(2, dtype=torch.int32))
    narrow_offset[(2,)](src, out, 8, BIG)
    assert out.tolist() == [5, 5]


@triton.jit
def multiplicative_hash(src, out, ids):
    pid = tl.program_id(0)
    code = tl.load(ids + pid).to(tl.uint32) * 2654435769
    tl.store(out + pid, tl.load(src + (code >> 27)))


@triton.jit
def mixed_hash(src, out, ids, n):
    pid = tl.program_id(0)
    code = tl.load(ids + pid).to(tl.uint32) * 2654435769
    code = code ^ (code >> 16)
    tl.store(out + pid, tl.load(src + code % n.to(tl.uint32)))


@triton.jit
def random_index(src, out, n):
    pid = tl.program_id(0)
    number, _, _, _ = tl.randint4x(n, pid)
    tl.store(out + pid, tl.load(src + (number & 63), mask=tl.randint(n, pid) % 3 == 0))


@triton.jit
def unsigned_position(src, out, big):
    pid = tl.program_id(0)
    at = (pid + big).to(tl.uint32) + big.to(tl.uint32)  # 2**31 and more: right without a sign
    tl.store(out + pid, tl.load(src + (at.to(tl.int64) - 2147483648)))


@triton.jit
def signed_nibble(src, out):
    pid = tl.program_id(0)
    tl.store(out + pid, tl.load(src + 8 + (((pid + 13) << 28) >> 28)))


@triton.jit
def gathers_by_a_hash(src, out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    code = (((lane + 1) * 0x3504F333) >> 30) & (BLOCK - 1)
    tl.store(out + lane, tl.gather(tl.load(src + lane), code, 0))


@triton.jit
def unsigned_product(src, out, big):
    pid = tl.program_id(0)
    at = (pid * 4).to(tl.uint32) * big.to(tl.uint32)  # 2**32: lost with and without a sign
    tl.store(out + pid, tl.load(src + at))


@triton.jit
def counts_to_a_lost_bound(src, out, big):
    pid = tl.program_id(0)
    end = pid * big * 4 + 3
    at = 0
    while at < end:
        at += 1
    tl.store(out + pid, tl.load(src + at))


@triton.jit
def branches_to_an_index(src, out, big, n):
    pid = tl.program_id(0)
    at = pid
    if pid * big * 4 < n:
        for _ in range(3):
            at += pid
    tl.store(out + pid, tl.load(src + at))


@triton.jit
def chooses_tensors(src, out, big, n, BLOCK: tl.constexpr):
    pid, lane = tl.program_id(0), tl.arange(0, BLOCK)
    at = lane + BLOCK
    if pid * big * 4 < n:
        at = lane
    tl.store(out + pid * BLOCK + lane, tl.load(src + at))


@triton.jit
def chooses_an_allocation(src, out, big, n):
    pid = tl.program_id(0)
    tl.store(out + pid, tl.load(tl.where(pid * big * 4 < n, src + pid, out + pid)))


@triton.jit
def gathered_address(src, out, big, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    at = tl.gather(lane, lane * big * 4, 0)  # all are index 0, and should be far outside
    tl.store(out + lane, tl.load(src + at))


HARMLESS = [
    (multiplicative_hash, (), {}),
    (mixed_hash, (61,), {}),
    (random_index, (7,), {}),
    (unsigned_position, (BIG,), {}),
    (signed_nibble, (), {}),
    (gathers_by_a_hash, (), {"BLOCK": 16}),
]


@pytest.mark.parametrize(
    ("kernel", "arguments", "constants"), HARMLESS, ids=[each[0].__name__ for each in HARMLESS]
)
def test_hashes_fields_of_bits_and_unsigned_numbers_are_no_overflow(
    launch, kernel, arguments, constants
):
    assert launch(kernel, *arguments, **constants) == []


LOST = [
    (unsigned_product, (BIG,), {}),
    (counts_to_a_lost_bound, (BIG,), {}),
    (branches_to_an_index, (BIG, 4), {}),
    (chooses_tensors, (BIG, 4), {"BLOCK": 16}),
    (chooses_tensors, (BIG, 4), {"BLOCK": 2}),  # as many lanes as programs
    (chooses_an_allocation, (BIG, 4), {}),
    (gathered_address, (BIG,), {"BLOCK": 8}),
]


@pytest.mark.parametrize(
    ("kernel", "arguments", "constants"), LOST, ids=[each[0].__name__ for each in LOST]
)
def test_a_loss_is_found_by_whatever_way_it_reaches_an_address(
    launch, kernel, arguments, constants
):
    found = launch(kernel, *arguments, **constants)
    assert {each.reached for each in found} == {"address"}
    by_lanes = kernel is gathered_address
    assert {each.program for each in found} == {(0, 0, 0) if by_lanes else (1, 0, 0)}


def test_a_lossy_choice_between_tensors_marks_the_programs_and_not_the_lanes(launch):
    (found,) = launch(chooses_tensors, BIG, 4, BLOCK=2)
    assert (found.program, found.count) == ((1, 0, 0), 2)
    assert (found.offset, found.exact) == (0, 2 * 4)


def test_a_bound_is_reported_with_its_two_values(launch):
    (found,) = [each for each in launch(loop_bound, BIG) if each.reached == "bound"][:1]
    assert (found.offset, found.exact) == (0, 4 * BIG)


def test_origins_are_followed_through_gathers_by_loaded_indices(lane, buffer):
    src = buffer("src", torch.arange(16, dtype=torch.int32) + 100)
    ids = buffer("ids", torch.arange(15, -1, -1, dtype=torch.int32))
    out = buffer("out", torch.zeros(16, dtype=torch.int32))
    with lane.observe(trace_origins=True) as access:
        gathers_by_load[(1,)](src, ids, out, BLOCK=16)
    assert out.tolist() == list(range(115, 99, -1))
    number, byte = access.origin_of("out", 0)
    assert (access.allocation_name(number), byte) == ("src", 60)


@triton.jit
def gathers_by_load(src, ids, out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, tl.gather(tl.load(src + lane), tl.load(ids + lane), 0))
