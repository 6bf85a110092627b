# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import pytest
import torch
import triton
import triton.language as tl

from kvfuzz.cpu import LaunchError


@triton.jit
def checked(values, limit, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.load(values + pid * BLOCK + at)
    if pid != 1:
        tl.device_assert(value < limit, 'too "large"\n', mask=at < 3)


@triton.jit
def shows(values, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    row = tl.load(values + pid * BLOCK + tl.arange(0, BLOCK))
    if pid != 0:
        tl.device_print("row", row, pid)
        tl.device_print("half", row.to(tl.float16) / 2)
        tl.device_print("bits", pid - 3, hex=True)
    tl.device_print("same", tl.full([2], 7, tl.uint8) - 8)


@triton.jit
def shows_in_loop(out, turns):
    for i in range(turns):
        tl.device_print("turn", i)
    tl.store(out, 1)


def test_an_assertion_is_judged_under_its_mask_and_for_active_programs(buffer):
    good = torch.tensor([[1, 2, 3, 99], [99, 99, 99, 99], [4, 5, 6, 99]], dtype=torch.int32)
    values = buffer("values", good)
    checked[(3,)](values, 10, BLOCK=4, debug=True)
    checked[(3,)](values, 1, BLOCK=4)  # without debug it is not compiled
    values[2, 1] = 10
    with pytest.raises(LaunchError) as failure:
        checked[(3,)](values, 10, BLOCK=4, debug=True)
    line = checked.fn.__code__.co_firstlineno + 6
    assert str(failure.value) == (
        f"device assertion failed: 'too \"large\"\\n' in test_watch.py:{line}"
    )


def test_a_print_is_one_line_with_the_first_active_program(buffer, capfd):
    values = torch.arange(3 * 16, dtype=torch.int32).reshape(3, 16)
    shows[(3,)](buffer("values", values), BLOCK=16)
    start = shows.fn.__code__.co_firstlineno
    assert capfd.readouterr().err.splitlines() == [
        f"test_watch.py:{start + 5}: row: [16 17 18 ... 29 30 31], 1"
        " (program (1, 0, 0), first of 2)",
        f"test_watch.py:{start + 6}: half: [8 8.5 9 ... 14.5 15 15.5]"
        " (program (1, 0, 0), first of 2)",
        f"test_watch.py:{start + 7}: bits: 0xfffffffe (program (1, 0, 0), first of 2)",
        f"test_watch.py:{start + 8}: same: [255 255] (program (0, 0, 0), first of 3)",
    ]


def test_a_print_in_a_loop_is_one_line_a_turn_however_many_programs(buffer, capfd):
    shows_in_loop[(500,)](buffer("out", torch.zeros(1, dtype=torch.int32)), 3)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(" (")[0].split(": ", 1)[1] for line in lines] == [
        "turn: 0", "turn: 1", "turn: 2",
    ]  # fmt: skip
