"""Runs a decoded kernel over its grid, in chunks of programs that keep memory bounded."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvfuzz.cpu.control import run_routine
from kvfuzz.cpu.machine import Machine, Program
from kvfuzz.cpu.memory import Memory


def run_grid(
    program: Program,
    arguments: Sequence[Any],
    grid: tuple[int, int, int],
    memory: Memory,
    *,
    fuel: int,
    chunk_bytes: int,
) -> None:
    """Run all programs of `grid` (x fastest). `arguments` are values of shape `[1]`.

    A chunk is as many programs as keep the largest value near `chunk_bytes` bytes. `fuel` is the
    number of loop iterations that the launch may take. Raises `LaunchError`.
    """
    total = grid[0] * grid[1] * grid[2]
    chunk = max(1, chunk_bytes // (8 * program.largest))
    with np.errstate(all="ignore"):
        for start in range(0, total, chunk):
            machine = Machine(program, memory, grid, start, min(chunk, total - start), fuel)
            run_routine(machine, program.entry, arguments)
            fuel = machine.fuel
