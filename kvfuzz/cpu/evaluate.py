"""Runs a decoded kernel over its grid, in chunks of programs that keep memory bounded."""

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from kvfuzz.cpu.control import run_routine
from kvfuzz.cpu.errors import LaunchError, UnsupportedOp
from kvfuzz.cpu.machine import Machine, Program
from kvfuzz.cpu.memory import Memory

Order = Literal["together", "forward", "backward"]


def run_grid(
    program: Program,
    arguments: Sequence[Any],
    grid: tuple[int, int, int],
    memory: Memory,
    *,
    fuel: int,
    chunk_bytes: int,
    order: Order = "together",
) -> None:
    """Run all programs of `grid` (x fastest). `arguments` are values of shape `[1]`.

    A chunk is as many programs as keep the largest value near `chunk_bytes` bytes, or one program
    if the programs wait for each other. `fuel` is the number of loop iterations that each chunk
    may take, so that a launch does not run out of it for having many chunks. `order` runs the
    programs one after the other, from the first (`forward`) or from the last (`backward`), except
    where they wait for each other. Raises `LaunchError`, and `UnsupportedOp` for a program that
    waits for a later one.
    """
    total = grid[0] * grid[1] * grid[2]
    chunk = max(1, chunk_bytes // (8 * program.largest))
    if program.serial or order != "together":
        chunk = 1
    starts = range(0, total, chunk)
    with np.errstate(all="ignore"):
        for start in reversed(starts) if order == "backward" and not program.serial else starts:
            machine = Machine(program, memory, grid, start, min(chunk, total - start), fuel)
            try:
                run_routine(machine, program.entry, arguments)
            except LaunchError as error:
                if program.serial and machine.fuel < 0 and start + 1 < total:
                    raise _waits_for_later(machine, error) from error
                raise


def _waits_for_later(machine: Machine, error: LaunchError) -> UnsupportedOp:
    place = re.search(r" in ([^ ]*):(\d+)$", str(error))
    why = f"{machine.kernel} (program {machine.program_ids(0)} waits for a later one)"
    return UnsupportedOp(why, place[1] if place else "?", int(place[2]) if place else 0)
