# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
"""Kernel coverage: lines, both sides of branches, masks, loop trips."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def everything(out, flags, counts, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if tl.load(flags + pid) > 0:
        tl.store(out + pid, 1)
    for step in range(tl.load(counts + pid)):
        tl.store(out + pid, step)
    tl.store(out + 8 + pid * BLOCK + lane, lane, mask=pid * BLOCK + lane < n)


@triton.jit
def returns_early(out, flags):
    pid = tl.program_id(0)
    if tl.load(flags + pid) > 0:
        return
    left = tl.load(flags + pid) + 3
    while left > 0:
        left -= 2
    tl.store(out + pid, left)


@triton.jit
def shifted(ptr, at, n):
    value = tl.load(ptr + at, mask=at < n)
    if n > 3:
        value += 1
    return value


@triton.jit
def copies(out, ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for step in tl.static_range(3):
        tl.store(out + step * BLOCK + lane, lane, mask=step * BLOCK + lane < n)
    near, far = shifted(ptr, lane, n), shifted(ptr, lane + 8, n + 0)
    tl.store(out + 32 + lane, near + far)


@triton.jit
def two_loads(out, ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(ptr + at, mask=at < n) + tl.load(ptr + at, mask=at + 1 < n)
    tl.store(out + at, value)


# fmt: off
@triton.jit
def many_lines(
    out,
    ptr,
    n,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(
        0,
        BLOCK,
    )
    value = tl.load(
        ptr
        + lane * 2,
        mask=(
            lane
            < n
        ),
        other=0,
    )
    if (
        n > 3
        and tl.load(ptr) == 0
    ):
        tl.store(
            out
            + lane,
            value
            + n,
            mask=(lane < n)
            & (lane > 1),
        )
    tl.store(
        out
        + 40,
        n
        + 1,
    )
# fmt: on


@pytest.fixture
def covered(lane, buffer):
    """Run a kernel; returns {(kind, line): outcomes seen} of its sites."""
    out = buffer("out", torch.zeros(64, dtype=torch.int32))

    def run(kernel, programs, *arguments, **constants):
        with lane.observe():
            kernel[(programs,)](out, *arguments, **constants)
        return {
            (site.kind, site.line): set(seen)
            for site, (seen, _) in lane.newly_exercised()
            if site.kernel == kernel.__name__
        }

    return run


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_what_did_not_happen_is_missing(lane, covered):
    found = covered(everything, 1, _ints(0), _ints(0), 4, BLOCK=4)
    assert found["line", 13] == {"run"}
    assert found["branch", 14] == {"not taken"}
    assert found["line", 15] == set()
    assert found["loop", 16] == {"0"}
    assert found["line", 17] == set()
    assert found["mask", 18] == {"all"}


def test_outcomes_add_up_over_programs_and_launches(lane, covered):
    covered(everything, 1, _ints(0), _ints(0), 4, BLOCK=8)
    found = covered(everything, 4, _ints(0, 1, 0, 0), _ints(0, 1, 2, 0), 12, BLOCK=8)
    assert found["branch", 14] == {"taken", "not taken"}
    assert found["line", 15] == {"run"}
    assert found["loop", 16] == {"0", "1", "many"}
    assert found["mask", 18] == {"all", "some", "none"}


def test_programs_that_have_returned_do_not_count(lane, covered):
    found = covered(returns_early, 3, _ints(1, 0, 1))
    assert found["branch", 24] == {"taken", "not taken"}
    assert found["loop", 27] == {"many"}
    assert found["line", 29] == {"run"}
    everyone = covered(returns_early, 1, _ints(-2))
    assert everyone["loop", 27] == {"many", "1"}


def test_only_what_is_new_is_reported(lane, covered):
    assert covered(everything, 1, _ints(1), _ints(1), 4, BLOCK=2)
    assert covered(everything, 1, _ints(1), _ints(1), 4, BLOCK=2) == {}


def test_triton_s_own_library_does_not_count(lane, covered):
    found = covered(everything, 1, _ints(1), _ints(1), 4, BLOCK=2)
    assert {line for _, line in found} <= set(range(11, 19))


def test_nothing_is_recorded_while_nobody_watches(lane, buffer):
    out = buffer("out", torch.zeros(64, dtype=torch.int32))
    everything[(1,)](out, _ints(1), _ints(1), 4, BLOCK=32)
    assert not lane.newly_exercised()


def test_copies_of_one_place_are_one_place(lane, covered):
    found = covered(copies, 1, _ints(*[0] * 16), 6, BLOCK=4)
    assert found["mask", 44] == {"all", "some", "none"}  # of three copies of the loop
    assert found["mask", 34] == {"all", "none"}  # of two inlined calls
    assert found["branch", 35] == {"taken"}
    assert {line for kind, line in found if kind == "line"} <= set(range(34, 47))


def test_two_accesses_of_one_line_are_two_places(lane, buffer):
    out, ptr = (buffer(name, torch.zeros(8, dtype=torch.int32)) for name in ("out", "ptr"))
    with lane.observe():
        two_loads[(1,)](out, ptr, 4, BLOCK=4)
    masks = {
        site.column: seen
        for site, (seen, _) in lane.newly_exercised()
        if (site.kernel, site.kind) == ("two_loads", "mask")
    }
    assert [masks[column] for column in sorted(masks)] == [("all",), ("some",)]


def test_of_a_statement_of_many_lines_all_or_none_has_run(lane, covered):
    skipped = covered(many_lines, 1, _ints(*[0] * 16), 3, BLOCK=8)
    never = {line for (kind, line), seen in skipped.items() if kind == "line" and not seen}
    # Triton 3.6 places the ops of a call at its arguments.
    assert never
    assert never <= set(range(81, 89))
    assert skipped["line", 89] == {"run"}
    ran = covered(many_lines, 1, _ints(*[0] * 16), 6, BLOCK=8)
    assert all(ran.values())
