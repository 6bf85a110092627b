# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvfuzz.cpu import CpuLane
from kvfuzz.cpu.tickets import MOST_KEPT, MOST_TICKETS, Tickets


@triton.jit
def store_value(out, value, STRIDE: tl.constexpr):
    at = tl.program_id(0) * STRIDE + tl.arange(0, 8)
    tl.store(out + at, value + tl.program_id(0))


@pytest.fixture
def own_lane():
    lane = CpuLane()
    lane.activate()
    yield lane
    lane.deactivate()


def races_of(lane, stride, value=0):
    """The races of one observation of four programs."""
    lane.release_all()
    out = lane.allocate("out", 4 * 64).view(torch.int32)
    with lane.observe() as access:
        store_value[(4,)](out, value, STRIDE=stride)
    return access.found_races


def test_what_another_observation_wrote_is_no_race(own_lane):
    for value in range(5):
        assert races_of(own_lane, 8, value) == []
        (race,) = races_of(own_lane, 4, value)
        assert (race.kind, race.offset) == ("write/write", 16)


def test_numbers_begin_again_before_they_run_out(own_lane):
    assert len(races_of(own_lane, 4)) == 1
    own_lane._tickets.next = MOST_TICKETS // 2 + 1
    assert len(races_of(own_lane, 4)) == 1
    assert own_lane._tickets.next < 1000
    assert races_of(own_lane, 8) == []


def test_a_table_is_used_again_and_only_so_much_is_kept():
    tickets = Tickets()
    table = tickets.table(1000)
    assert len(table) >= 1000
    assert not table.any()
    tickets.give_back(table)
    assert tickets.table(900) is table
    assert tickets.table(900) is not table
    many = [tickets.table(1 << 20) for _ in range(20)]
    for each in many:
        tickets.give_back(each)
    kept = sum(each.nbytes for tables in tickets._spare.values() for each in tables)
    assert MOST_KEPT // 2 < kept <= MOST_KEPT


def test_a_table_of_a_reserved_allocation_is_not_kept():
    tickets = Tickets()
    huge = tickets.table(1 << 26)
    assert len(huge) == 1 << 26
    tickets.give_back(huge)
    assert tickets._spare == {}
    assert huge.dtype == np.int32
