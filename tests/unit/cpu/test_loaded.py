# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import gc
import weakref

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver

from kvfuzz.cpu import CpuLane


@triton.jit
def counted(out, NUMBER: tl.constexpr):
    tl.store(out, NUMBER)


@triton.jit
def other_kernel(out, NUMBER: tl.constexpr):
    tl.store(out + 1, NUMBER)


@pytest.fixture
def small_lane():
    """A lane with room for the text of about four small kernels."""
    lane = CpuLane()
    lane.activate()
    driver.active.kernels.most_text = 2000
    yield lane
    lane.deactivate()


def kept(kernel):
    kernels, keys, *_ = kernel.device_caches[driver.active.get_current_device()]
    return kernels, keys


def test_kernels_are_let_go_and_compiled_again_when_asked_for(small_lane):
    out = torch.zeros(2, dtype=torch.int32)
    first = counted[(1,)](out, NUMBER=100)
    length = len(first.kernel)
    assert 300 < length < 700
    gone = weakref.ref(first)
    del first
    for number in range(101, 140):
        (counted if number % 2 else other_kernel)[(1,)](out, NUMBER=number)
        assert out[1 - number % 2] == number
        texts = [len(each.kernel) for kernel in (counted, other_kernel)
                 for each in kept(kernel)[0].values()]  # fmt: skip
        assert sum(texts) <= 2000
    assert sum(texts) > 2000 - 2 * length
    assert len(kept(counted)[1]) <= len(texts)
    gc.collect()
    assert gone() is None
    again = counted[(1,)](out, NUMBER=100)
    assert out[0] == 100
    assert again.function is counted[(1,)](out, NUMBER=100).function


def test_what_is_launched_often_is_kept(small_lane):
    out = torch.zeros(2, dtype=torch.int32)
    often = counted[(1,)](out, NUMBER=100).function
    seldom = weakref.ref(counted[(1,)](out, NUMBER=101))
    for number in range(102, 120):
        counted[(1,)](out, NUMBER=number)
        assert counted[(1,)](out, NUMBER=100).function is often
    gc.collect()
    assert seldom() is None


def test_a_kernel_longer_than_all_room_runs(small_lane):
    driver.active.kernels.most_text = 10
    out = torch.zeros(2, dtype=torch.int32)
    for number in (1, 2, 1):
        counted[(1,)](out, NUMBER=number)
        assert out[0] == number


def test_what_was_let_go_is_observed_like_the_first_time(small_lane):
    out = torch.zeros(2, dtype=torch.int32)
    for number in (7, 8, 9, 10, 11, 12, 13, 7):
        with small_lane.observe() as access:
            counted[(1,)](out, NUMBER=number)
        assert access.launches[0].constexprs == {"NUMBER": number}
        assert access.written("tensor:out").tolist() == [True] * 4 + [False] * 4
