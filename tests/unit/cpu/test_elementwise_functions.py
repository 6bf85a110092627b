# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import pytest
import torch
import triton
import triton.language as tl

from kvfuzz.cpu import LaunchError, UnsupportedOp


@triton.jit
def count_bins(values, mask, out, out_masked, out_all, LENGTH: tl.constexpr, BINS: tl.constexpr):
    pid = tl.program_id(0)
    value = tl.load(values + pid * LENGTH + tl.arange(0, LENGTH))
    bins = pid * BINS + tl.arange(0, BINS)
    if pid != 1:
        tl.store(out + bins, tl.histogram(value, BINS))
    keep = tl.load(mask + tl.arange(0, LENGTH)) != 0
    tl.store(out_masked + bins, tl.histogram(value, BINS, mask=keep))
    tl.store(out_all + bins, tl.histogram(tl.zeros([LENGTH], tl.int32) + 2, BINS))


@triton.jit
def collatz_steps(n, limit):
    steps = 0
    while (n > 1) & (steps < limit):
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    return steps, n


@triton.jit
def ordered(x, y):
    if x > y:
        return y, x
    return x, y


@triton.jit
def map_collatz(values, steps, ends, limits, ROWS: tl.constexpr, COLS: tl.constexpr):
    pid = tl.program_id(0)
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    limit = tl.load(limits + pid)
    if limit > 0:
        n = tl.load(values + pid * ROWS * COLS + at)
        taken, end = tl.map_elementwise(collatz_steps, n, tl.zeros_like(n) + limit)
        tl.store(steps + pid * ROWS * COLS + at, taken)
        tl.store(ends + pid * ROWS * COLS + at, end)


@triton.jit
def map_ordered(a, low, high, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    shifted = tl.load(a + at)
    x, y = tl.map_elementwise(ordered, shifted, at)
    tl.store(low + at, x)
    tl.store(high + at, y)


@triton.jit
def count_to(limit):
    steps = limit * 0
    while steps != limit:
        steps += 1
    return steps


@triton.jit
def map_counts(limits, out, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    limit = tl.load(limits + pid)
    if limit >= 0:
        wanted = limit - tl.arange(0, BLOCK)
        first = tl.map_elementwise(count_to, wanted)
        second = tl.map_elementwise(count_to, first)
        tl.store(out + pid * BLOCK + tl.arange(0, BLOCK), first + second)


@triton.jit
def pair_sum(x0, x1):
    return (x0 + x1, x0 - x1)


@triton.jit
def map_pairs(a, out):
    at = tl.arange(0, 16)
    (y,) = tl.map_elementwise(pair_sum, tl.load(a + at), pack=2)
    tl.store(out + at, y)


@triton.jit
def plus_program(x):
    return x + tl.program_id(0)


@triton.jit
def map_plus_program(a, out):
    at = tl.arange(0, 16)
    y = tl.map_elementwise(plus_program, tl.load(a + at))
    tl.store(out + at, y)


@pytest.mark.parametrize("bins", [2, 16, 128])
def test_a_histogram_counts_elements_by_value(buffer, bins):
    values = torch.randint(0, bins, (3, 64), dtype=torch.int32)
    mask = (torch.arange(64) % 3 == 0).int()
    outs = [buffer(name, torch.zeros(3, bins, dtype=torch.int32)) for name in "xyz"]
    inputs = buffer("values", values), buffer("mask", mask)
    count_bins[(3,)](*inputs, *outs, LENGTH=64, BINS=bins)

    def counted(row):
        return [row.count(number) for number in range(bins)]

    rows = [counted(row) for row in values.tolist()]
    rows[1] = [0] * bins  # this program does not count
    assert outs[0].tolist() == rows
    assert outs[1].tolist() == [counted(row) for row in values[:, mask == 1].tolist()]
    # A value that has no bin is counted by its low bits, of which there are at least six.
    assert outs[2].tolist() == [[0, 0, 64, *[0] * bins][:bins]] * 3


def test_values_outside_the_bins_are_counted_by_their_low_bits(buffer):
    values = torch.tensor([[-1, 63, 64, 65, 129, 16, 17, 200] * 8], dtype=torch.int32)
    outs = [buffer(name, torch.zeros(1, 16, dtype=torch.int32)) for name in "xyz"]
    mask = buffer("mask", torch.ones(64, dtype=torch.int32))
    count_bins[(1,)](buffer("values", values), mask, *outs, LENGTH=64, BINS=16)
    low = [value % 64 for value in values[0].tolist()]
    assert outs[0].tolist() == [[low.count(number) for number in range(16)]]


def test_each_element_takes_its_own_way_through_a_mapped_function(buffer):
    def walk(n, limit):
        steps = 0
        while n > 1 and steps < limit:
            n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
        return steps, n

    values = torch.randint(0, 40, (3, 4, 8), dtype=torch.int32)
    limits = torch.tensor([200, 0, 5], dtype=torch.int32)
    steps, ends = (buffer(name, torch.full((3, 4, 8), -1, dtype=torch.int32)) for name in "se")
    given = buffer("values", values), steps, ends, buffer("limits", limits)
    map_collatz[(3,)](*given, ROWS=4, COLS=8)
    for program, limit in enumerate(limits.tolist()):
        pairs = [walk(n, limit) if limit else (-1, -1) for n in values[program].flatten().tolist()]
        assert list(zip(steps[program].flatten().tolist(), ends[program].flatten().tolist(),
                        strict=True)) == pairs  # fmt: skip


def test_a_mapped_function_with_branches_gives_several_results(buffer):
    a = torch.tensor([5, 0, 2, 9], dtype=torch.int32)
    low, high = (buffer(name, torch.zeros(4, dtype=torch.int32)) for name in ("low", "high"))
    map_ordered[(1,)](buffer("a", a), low, high, BLOCK=4)
    assert low.tolist() == [0, 0, 2, 3]
    assert high.tolist() == [5, 1, 2, 9]


def test_elements_of_programs_that_are_off_do_not_run(lane, buffer):
    lane.fuel = 50
    limits = buffer("limits", torch.tensor([9, -1, 3], dtype=torch.int32))
    out = buffer("out", torch.zeros(3, 2, dtype=torch.int32))
    map_counts[(3,)](limits, out, BLOCK=2)
    assert out.tolist() == [[18, 16], [0, 0], [6, 4]]


def test_mapped_functions_share_the_fuel_of_the_launch(lane, buffer):
    lane.fuel = 20
    limits = buffer("limits", torch.tensor([15], dtype=torch.int32))
    out = buffer("out", torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(LaunchError, match="out of fuel: kernel=map_counts"):
        map_counts[(1,)](limits, out, BLOCK=2)


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        (map_pairs, r"tt.map_elementwise \(pack = 2\)"),
        (map_plus_program, "tt.get_program_id in tt.map_elementwise"),
    ],
)
def test_mapped_functions_that_see_neighbours_or_act_are_refused(buffer, kernel, op):
    a, out = (buffer(name, torch.zeros(16, dtype=torch.int32)) for name in ("a", "out"))
    with pytest.raises(UnsupportedOp, match=op):
        kernel[(1,)](a, out)
