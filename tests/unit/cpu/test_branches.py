"""Control flow that Triton's front end does not print today: hand-written TTIR, run directly."""

import numpy as np
import pytest

from kvfuzz.cpu import LaunchError, UnsupportedOp
from kvfuzz.cpu.decode import decode_module
from kvfuzz.cpu.evaluate import run_grid
from kvfuzz.cpu.memory import Memory
from kvfuzz.cpu.parse import parse_module
from kvfuzz.cpu.space import AddressSpace
from kvfuzz.cpu.values import Pointer


def run(body, *arrays, programs=1, fuel=1000):
    """Run a function of pointers %a, %b, ... to i32, changing the int32 arrays in place."""
    space, pointers = AddressSpace(), []
    for number, array in enumerate(arrays):
        allocation = space.add(f"array{number}", array.view(np.uint8))
        pointers.append(Pointer(allocation.number, np.zeros(1, np.int64)))
    names = "abcdef"[: len(arrays)]
    arguments = ", ".join(f'%{name}: !tt.ptr<i32> loc("{name}"(#loc))' for name in names)
    text = f"""
#loc = loc("/src/kernel.py":10:0)
#loc1 = loc("/src/kernel.py":11:5)
module {{
  tt.func public @kernel({arguments}) attributes {{noinline = false}} {{
{body}
    tt.return loc(#loc)
  }} loc(#loc)
}} loc(#loc)
"""
    program = decode_module(parse_module(text))
    memory = Memory(space, 0xA5)
    run_grid(program, pointers, (programs, 1, 1), memory, fuel=fuel, chunk_bytes=1 << 20)
    return program


# Each program sums 0..bound-1; %seen is what it saw last, read after the loop by its block's name.
SUM = """
    %c0 = arith.constant 0 : i32 loc(#loc)
    %c1 = arith.constant 1 : i32 loc(#loc)
    %pid = tt.get_program_id x : i32 loc(#loc)
    %at = tt.addptr %a, %pid : !tt.ptr<i32>, i32 loc(#loc)
    %bound = tt.load %at : !tt.ptr<i32> loc(#loc)
    cf.br ^bb1(%c0, %c0 : i32, i32) loc(#loc)
  ^bb1(%i: i32 loc("i"(#loc)), %total: i32 loc("total"(#loc))):  // 2 preds: ^bb0, ^bb2
    %seen = arith.muli %i, %bound : i32 loc(#loc)
    %more = arith.cmpi slt, %i, %bound : i32 loc(#loc)
    cf.cond_br %more, ^bb2, ^bb3 loc(#loc)
  ^bb2:  // pred: ^bb1
    %sum = arith.addi %total, %i : i32 loc(#loc1)
    %next = arith.addi %i, %c1 : i32 loc(#loc1)
    cf.br ^bb1(%next, %sum : i32, i32) loc(#loc1)
  ^bb3:  // pred: ^bb1
    %to = tt.addptr %b, %pid : !tt.ptr<i32>, i32 loc(#loc)
    %both = arith.addi %total, %seen : i32 loc(#loc)
    tt.store %to, %both : !tt.ptr<i32> loc(#loc)"""


def ints(*values):
    return np.array(values, np.int32)


def test_programs_leave_a_cycle_of_blocks_one_by_one_and_keep_their_values():
    bounds, out = [3, 0, 7, 1, -2], ints(*[-1] * 5)
    run(SUM, ints(*bounds), out, programs=5)
    assert out.tolist() == [sum(range(bound)) + max(bound, 0) * bound for bound in bounds]


def test_what_follows_a_cycle_is_done_in_program_order():
    body = SUM.replace("tt.addptr %b, %pid", "tt.addptr %b, %c0")
    for order in ("%more, ^bb2, ^bb3", "%less, ^bb3, ^bb2"):
        swapped = body.replace("%more, ^bb2, ^bb3", order).replace(
            "    cf.cond_br %less",
            "    %less = arith.cmpi sge, %i, %bound : i32 loc(#loc)\n    cf.cond_br %less",
        )
        out = ints(-1)
        run(swapped, ints(9, 2, 4), out, programs=3)
        assert out.tolist() == [4 * 4 + 0 + 1 + 2 + 3]  # of the last program, not the last to leave


def test_a_cycle_of_blocks_spends_fuel():
    with pytest.raises(
        LaunchError, match=r"out of fuel: kernel=kernel still loops in kernel\.py:11"
    ):
        run(SUM, ints(2000), ints(0), fuel=100)
    forever = """
    cf.br ^bb1 loc(#loc)
  ^bb1:  // 2 preds: ^bb0, ^bb1
    cf.br ^bb1 loc(#loc)
  ^bb2:  // no predecessors"""
    with pytest.raises(LaunchError, match="out of fuel"):
        run(forever, ints(0))


# An outer cycle around an inner one; programs take the inner one %n times in each outer round.
NESTED = """
    %c0 = arith.constant 0 : i32 loc(#loc)
    %c1 = arith.constant 1 : i32 loc(#loc)
    %pid = tt.get_program_id x : i32 loc(#loc)
    %at = tt.addptr %a, %pid : !tt.ptr<i32>, i32 loc(#loc)
    %n = tt.load %at : !tt.ptr<i32> loc(#loc)
    cf.br ^bb1(%c0, %c0 : i32, i32) loc(#loc)
  ^bb1(%i: i32 loc("i"(#loc)), %count: i32 loc("count"(#loc))):  // 2 preds
    %more = arith.cmpi slt, %i, %n : i32 loc(#loc)
    cf.cond_br %more, ^bb2(%c0, %count : i32, i32), ^bb4 loc(#loc)
  ^bb2(%j: i32 loc("j"(#loc)), %inner: i32 loc("inner"(#loc))):  // 2 preds
    %again = arith.addi %inner, %j : i32 loc(#loc)
    %jj = arith.addi %j, %c1 : i32 loc(#loc)
    %stay = arith.cmpi sle, %jj, %i : i32 loc(#loc)
    cf.cond_br %stay, ^bb2(%jj, %again : i32, i32), ^bb3 loc(#loc)
  ^bb3:  // pred: ^bb2
    %ii = arith.addi %i, %c1 : i32 loc(#loc)
    cf.br ^bb1(%ii, %again : i32, i32) loc(#loc)
  ^bb4:  // pred: ^bb1
    %to = tt.addptr %b, %pid : !tt.ptr<i32>, i32 loc(#loc)
    tt.store %to, %count : !tt.ptr<i32> loc(#loc)"""


def test_cycles_of_blocks_nest():
    bounds, out = [4, 1, 0, 6], ints(0, 0, 0, 0)
    run(NESTED, ints(*bounds), out, programs=4)
    assert out.tolist() == [sum(j for i in range(n) for j in range(i + 1)) for n in bounds]


UNLOCK = """
    %c0 = arith.constant 0 : i32 loc(#loc)
    %c1 = arith.constant 1 : i32 loc(#loc)
    cf.br ^bb1 loc(#loc)
  ^bb1:  // 2 preds: ^bb0, ^bb1
    %old = tt.atomic_cas acq_rel, gpu, %a, %c0, %c1 : (!tt.ptr<i32>, i32, i32) -> i32 loc(#loc)
    %held = arith.cmpi eq, %old, %c1 : i32 loc(#loc)
    cf.cond_br %held, ^bb1, ^bb2 loc(#loc)
  ^bb2:  // pred: ^bb1
    %n = tt.load %b : !tt.ptr<i32> loc(#loc)
    %m = arith.addi %n, %c1 : i32 loc(#loc)
    tt.store %b, %m : !tt.ptr<i32> loc(#loc)
    tt.store %a, %c0 : !tt.ptr<i32> loc(#loc)"""


def test_a_lock_taken_in_a_cycle_of_blocks_does_not_deadlock():
    lock, count = ints(0), ints(0)
    program = run(UNLOCK, lock, count, programs=6)
    assert program.serial
    assert (lock[0], count[0]) == (0, 6)


def counted_loop(unsigned):
    return f"""
    %c1 = arith.constant 1 : i32 loc(#loc)
    %pid = tt.get_program_id x : i32 loc(#loc)
    %at = tt.addptr %a, %pid : !tt.ptr<i32>, i32 loc(#loc)
    %low = tt.load %at : !tt.ptr<i32> loc(#loc)
    %end = tt.addptr %b, %pid : !tt.ptr<i32>, i32 loc(#loc)
    %high = tt.load %end : !tt.ptr<i32> loc(#loc)
    %c0 = arith.constant 0 : i32 loc(#loc)
    %n:2 = scf.for {unsigned}%i = %low to %high step %c1 iter_args(%k = %c0, %last = %c0) -> (i32, i32)  : i32 {{
      %kk = arith.addi %k, %c1 : i32 loc(#loc)
      scf.yield %kk, %i : i32, i32 loc(#loc)
    }} loc(#loc)
    %to = tt.addptr %c, %pid : !tt.ptr<i32>, i32 loc(#loc)
    tt.store %to, %n#0 : !tt.ptr<i32> loc(#loc)
    %tt = tt.addptr %d, %pid : !tt.ptr<i32>, i32 loc(#loc)
    tt.store %tt, %n#1 : !tt.ptr<i32> loc(#loc)"""  # noqa: E501 (one line in print)


@pytest.mark.parametrize("programs", [1, 3])
def test_an_unsigned_loop_counts_past_the_largest_signed_number(programs):
    low, high = ints(2**31 - 2, 5, -3), ints(-(2**31) + 3, 2, -1)
    for unsigned, counts, last in (
        ("unsigned ", [5, 0, 2], [-(2**31) + 2, 0, -2]),
        ("", [0, 0, 2], [0, 0, -2]),
    ):
        count, end = ints(0, 0, 0), ints(0, 0, 0)
        run(counted_loop(unsigned), low, high, count, end, programs=programs)
        assert count.tolist()[:programs] == counts[:programs]
        assert end.tolist()[:programs] == last[:programs]


def test_blocks_inside_the_region_of_a_loop_are_refused():
    body = """
    %true = arith.constant true loc(#loc)
    scf.if %true {
      cf.br ^bb1 loc(#loc1)
    ^bb1:  // pred: ^bb0
      scf.yield loc(#loc1)
    } loc(#loc1)"""
    with pytest.raises(UnsupportedOp, match="several blocks in a region"):
        run(body, ints(0))
