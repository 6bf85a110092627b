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
