"""The state of a launch in flight, and the loop that runs a block of bound ops.

`Step` is one op bound to a function of the machine and the operand values: all that its text said
was looked up when the kernel was decoded.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.coverage import Coverage
from kvfuzz.cpu.errors import LaunchError
from kvfuzz.cpu.ir import Location, Op
from kvfuzz.cpu.memory import Memory
from kvfuzz.cpu.trace import follow_origins

if TYPE_CHECKING:
    from kvfuzz.cpu.values import Mask

Array = NDArray[Any]
Step = Callable[..., Any]
Following = Callable[["Machine", "Bound", list[Any]], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """An op ready to run: operand and result slots, and its `step`.

    `checked` is the step that also looks for lost bits, `wide` the op over 64-bit integers.
    `carries` says that the op moves whole values about (control flow, changes of shape) and so
    carries what travels with them by itself.
    """

    step: Step
    checked: Step
    wide: Step | None
    operands: tuple[int, ...]
    results: tuple[int, ...]
    op: Op
    carries: bool


@dataclass(frozen=True, slots=True)
class Jump:
    """Where a branch goes: a block's number and the slots whose values it is given."""

    block: int
    operands: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """A block: argument slots, ops, then what its terminator hands on, and to whom."""

    arguments: tuple[int, ...]
    ops: tuple[Bound, ...]
    outcome: tuple[int, ...]
    targets: tuple[Jump, ...]
    terminator: Op | None = None

    @property
    def last(self) -> Op:
        """The terminator of a block that branches."""
        if self.terminator is None:
            raise ValueError("a block without a terminator branches nowhere")
        return self.terminator

    def all_ops(self) -> tuple[Op, ...]:
        """The ops of this block, the terminator last; those of their regions not."""
        last = () if self.terminator is None else (self.terminator,)
        return (*[bound.op for bound in self.ops], *last)


@dataclass(frozen=True, slots=True)
class Routine:
    """A function: its blocks, each before those it branches to, loops aside."""

    name: str
    blocks: tuple[Code, ...]
    num_slots: int


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A decoded kernel. `largest` is the number of elements of its largest value.

    `codes` are all its blocks, those of regions and functions included. `serial`: its programs
    wait for each other, and must run one by one (see `waiting`). `synchronises` says where it uses
    what an atomic access returned, if it does.
    """

    name: str
    entry: Routine
    largest: int
    codes: tuple[Code, ...] = ()
    serial: bool = False
    synchronises: str = ""
    coverage: Coverage = field(default_factory=Coverage)


_ONLY_PROGRAM = np.zeros(1, np.int32)
_ONLY_PROGRAM.flags.writeable = False


@lru_cache(maxsize=64)
def _program_ids(grid: tuple[int, int, int], axis: int, start: int, count: int) -> Array:
    """Ids along `axis` of programs `start` to `start + count`; int32 `[count]`, read only, since
    the variants of a case ask for the same ones."""
    number = np.arange(start, start + count)
    below = (1, grid[0], grid[0] * grid[1])[axis]
    if below > 1:
        number //= below
    if math.prod(grid[axis + 1 :]) > 1:
        number %= grid[axis]
    found = number.astype(np.int32)
    found.flags.writeable = False
    return found


class Machine:
    """One chunk of a launch: programs `start .. start + num_programs` of `grid`, x fastest."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        grid: tuple[int, int, int],
        start: int,
        num_programs: int,
        fuel: int,
    ) -> None:
        self.kernel = program.name
        self.memory = memory
        self.grid = grid
        self.start = start
        self.num_programs = num_programs
        self.fuel = fuel
        self.mask: Mask = None
        self.slots: list[Any] = []
        access = memory.access
        self.coverage = None if access is None else program.coverage
        """What was exercised, where somebody watches."""
        self.doubt: tuple[Array, Location] | None = None
        """Programs for which a condition of the region in flight had lost bits, and where."""
        self.following: Following | None = None
        """How ops are run while something travels with the values."""
        if access is not None and access.trace_origins:
            self.following = follow_origins

    def program_ids(self, index: int) -> tuple[int, int, int]:
        """Program ids (x, y, z) of the `index`-th program of the chunk."""
        number = self.start + index
        x, y, _ = self.grid
        return number % x, number // x % y, number // (x * y)

    def program_id(self, axis: int) -> Array:
        """Program ids along `axis`, int32 `[P]`, or `[1]` if the grid has one there."""
        if self.grid[axis] == 1:
            return _ONLY_PROGRAM
        return _program_ids(self.grid, axis, self.start, self.num_programs)

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
        coverage = self.coverage
        if coverage is not None:
            coverage.blocks.add(code)
        for bound in code.ops:
            operands = [slots[slot] for slot in bound.operands]
            try:
                if self.following is not None:
                    result = self.following(self, bound, operands)
                elif coverage is None:
                    result = bound.step(self, *operands)
                else:
                    result = bound.checked(self, *operands)
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
