"""The state of a launch in flight, and the loop that runs a block of bound ops.

`Step` is one op bound to a function of the machine and the operand values: all that its text said
was looked up when the kernel was decoded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.errors import LaunchError
from kvfuzz.cpu.ir import Op
from kvfuzz.cpu.memory import Memory

if TYPE_CHECKING:
    from kvfuzz.cpu.values import Mask

Array = NDArray[Any]
Step = Callable[..., Any]
Follow = Callable[["Machine", "Bound", list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Bound:
    """An op ready to run: operand and result slots, and its `step`.

    `follow` computes the result's origins while they are traced; None for ops that move whole
    values about (control flow) and so carry traces along by themselves.
    """

    step: Step
    operands: tuple[int, ...]
    results: tuple[int, ...]
    op: Op
    follow: Follow | None


@dataclass(frozen=True, slots=True)
class Jump:
    """Where a branch goes: a block's number and the slots whose values it is given."""

    block: int
    operands: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """A block: argument slots, ops, then what its terminator hands on, and to whom."""

    arguments: tuple[int, ...]
    ops: tuple[Bound, ...]
    outcome: tuple[int, ...]
    targets: tuple[Jump, ...]


@dataclass(frozen=True, slots=True)
class Routine:
    """A function: its blocks in an order where every branch goes forward."""

    name: str
    blocks: tuple[Code, ...]
    num_slots: int


@dataclass(frozen=True, slots=True)
class Program:
    """A decoded kernel. `largest` is the number of elements of its largest value.

    `serial`: its programs wait for each other, and must run one by one (see `waiting`).
    """

    name: str
    entry: Routine
    largest: int
    serial: bool = False


class Machine:
    """One chunk of a launch: programs `start .. start + num_programs` of `grid`, x fastest."""

    def __init__(
        self,
        kernel: str,
        memory: Memory,
        grid: tuple[int, int, int],
        start: int,
        num_programs: int,
        fuel: int,
    ) -> None:
        self.kernel = kernel
        self.memory = memory
        self.grid = grid
        self.start = start
        self.num_programs = num_programs
        self.fuel = fuel
        self.mask: Mask = None
        self.slots: list[Any] = []
        self.tracing = memory.access is not None and memory.access.trace_origins

    def program_ids(self, index: int) -> tuple[int, int, int]:
        """Program ids (x, y, z) of the `index`-th program of the chunk."""
        number = self.start + index
        x, y, _ = self.grid
        return number % x, number // x % y, number // (x * y)

    def program_id(self, axis: int) -> Array:
        """Program ids along `axis`, int32 `[P]`, or `[1]` if the grid has one there."""
        if self.grid[axis] == 1:
            return np.zeros(1, np.int32)
        number = np.arange(self.start, self.start + self.num_programs)
        below = (1, self.grid[0], self.grid[0] * self.grid[1])[axis]
        return (number // below % self.grid[axis]).astype(np.int32)

    def burn(self, op: Op) -> None:
        """Spend fuel on one loop iteration. Raises `LaunchError` when there is none left."""
        self.fuel -= 1
        if self.fuel < 0:
            place = str(op.location)
            raise LaunchError(f"out of fuel: kernel={self.kernel} still loops in {place}")

    def run(self, code: Code, values: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Run one block with `values` for its arguments; return what its terminator hands on."""
        slots = self.slots
        for slot, value in zip(code.arguments, values, strict=True):
            slots[slot] = value
        tracing = self.tracing
        for bound in code.ops:
            operands = [slots[slot] for slot in bound.operands]
            try:
                if tracing and bound.follow is not None:
                    result = bound.follow(self, bound, operands)
                else:
                    result = bound.step(self, *operands)
            except Exception as error:
                place = bound.op.location
                error.add_note(f"while evaluating {bound.op.name} of {place}")
                raise
            results = bound.results
            if len(results) == 1:
                slots[results[0]] = result
            else:
                for slot, value in zip(results, result or (), strict=True):
                    slots[slot] = value
        return tuple([slots[slot] for slot in code.outcome])
