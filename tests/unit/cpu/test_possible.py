# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
"""Which outcomes a place in a kernel can have at all."""

from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from kvfuzz.cpu.coverage import Coverage
from kvfuzz.cpu.possible import COMBINED


@triton.jit
def padded(out, rows, n, SIZE: tl.constexpr, PADDED: tl.constexpr):
    pid = tl.program_id(0)
    dim = tl.arange(0, PADDED)
    inside = dim < SIZE
    tl.store(out + dim, dim, mask=inside)
    tl.store(out + dim, dim, mask=inside & (pid < rows))
    tl.store(out + dim, dim, mask=inside & (pid * PADDED + dim < n))
    tl.store(out + dim, dim, mask=(dim >= SIZE) | (pid < rows))
    tl.store(out + pid, pid, mask=pid < rows)
    for step in range(3):
        tl.store(out + dim + step, dim, mask=dim + step < SIZE)
    square = dim[:, None] + dim[None, :]
    part = inside & (pid < rows)
    tl.store(out + square, square, mask=part[:, None])
    tl.store(out + square, square, mask=tl.full([PADDED, PADDED], pid, tl.int32) < rows)
    tl.store(out + dim, dim, mask=(pid * PADDED + dim < n) & (rows > 3))
    chosen = tl.where(pid < rows, inside, dim < 0)
    tl.store(out + dim, dim, mask=chosen)


@triton.jit
def gated(out, gate: tl.int1):
    tl.store(out, 1, mask=gate)


@pytest.fixture
def possible(lane, buffer):
    """Run a kernel that is new to the process; returns {(kind, line): outcomes possible}."""
    out = buffer("possible", torch.zeros(256, dtype=torch.int32))

    def run(kernel, programs, *arguments, **constants):
        with lane.observe():
            kernel[(programs,)](out, *arguments, **constants)
        return {
            (site.kind, site.line): {*seen, *missing}
            for site, (seen, missing) in lane.newly_exercised()
            if site.kernel == kernel.__name__
        }

    return run


def test_a_mask_that_depends_on_nothing_outside_has_one_outcome(possible):
    assert possible(padded, 1, 1, 9, SIZE=8, PADDED=8)["mask", 20] == {"all"}
    assert possible(padded, 1, 1, 9, SIZE=5, PADDED=8)["mask", 20] == {"some"}


@pytest.mark.parametrize(
    ("size", "with_scalar", "with_lanes", "or_scalar"),
    [
        (16, {"all", "none"}, {"all", "some", "none"}, {"all", "none"}),
        (11, {"some", "none"}, {"some", "none"}, {"all", "some"}),
    ],
)
def test_a_combined_mask_can_be_what_its_parts_allow(
    possible, size, with_scalar, with_lanes, or_scalar
):
    found = possible(padded, 2, 2, 11, SIZE=size, PADDED=16)
    assert found["mask", 21] == with_scalar
    assert found["mask", 22] == with_lanes
    assert found["mask", 23] == or_scalar
    assert found["mask", 29] == with_scalar
    assert found["mask", 30] == {"all", "none"}
    assert found["mask", 31] == {"all", "some", "none"}
    assert found["mask", 33] == with_scalar


def test_a_scalar_mask_is_never_in_part(possible):
    assert possible(gated, 1, True)["mask", 38] == {"all", "none"}
    assert possible(padded, 1, 1, 9, SIZE=4, PADDED=4)["mask", 24] == {"all", "none"}


def test_a_loop_with_constant_bounds_goes_round_so_often(possible):
    found = possible(padded, 1, 1, 9, SIZE=3, PADDED=4)
    assert found["loop", 25] == {"many"}
    assert found["mask", 26] == {"all", "some", "none"}  # the counter varies


def test_what_has_shown_all_that_it_can_is_watched_no_more(possible, monkeypatch):
    possible(padded, 1, 1, 9, SIZE=7, PADDED=8)
    noted = []
    monkeypatch.setattr(Coverage, "note_mask", lambda _, op, *rest: noted.append(op.location.line))
    possible(padded, 1, 1, 9, SIZE=7, PADDED=8)
    assert 20 not in noted
    assert 22 in noted


def _outcome(mask):
    return 1 if all(mask) else 2 if any(mask) else 4


@pytest.mark.parametrize("name", list(COMBINED))
def test_combinations_name_exactly_what_can_come_of_them(name):
    combine = {"andi": int.__and__, "ori": int.__or__, "xori": int.__xor__}[name.split(".")[1]]
    found = {}
    masks = list(product((0, 1), repeat=3))
    for a, b in product(masks, masks):
        key = _outcome(a), _outcome(b)
        found[key] = found.get(key, 0) | _outcome(list(map(combine, a, b)))
    assert {(a, b): COMBINED[name](a, b) for a, b in found} == found
