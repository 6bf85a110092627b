"""Typed operations of one Triton kernel: what the printed TTIR says, free of its text.

`Module` holds functions, those hold blocks, those hold `Op`. Every SSA value of a function has a
number (its *slot*); an op names its operands and results by slot.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

INTEGER_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "index": 64}
FLOAT_BITS = {
    "f8E4M3FN": 8,
    "f8E4M3FNUZ": 8,
    "f8E5M2": 8,
    "f8E5M2FNUZ": 8,
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
}


@dataclass(frozen=True, slots=True)
class Location:
    """A place in kernel source: `file` as Triton recorded it (a path), `line` from 1.

    `column`, from 1, tells several ops of one line apart; places that differ in it are equal.
    """

    file: str
    line: int
    column: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        """The base name of the file: what messages and seeds may hold."""
        return os.path.basename(self.file)

    def __str__(self) -> str:
        return f"{self.name}:{self.line}"


NOWHERE = Location("?", 0)


@dataclass(frozen=True, slots=True)
class Type:
    """`shape` in elements, `()` for a scalar; for a pointer `element` is what it points to."""

    shape: tuple[int, ...]
    element: str
    is_pointer: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one element in memory (an i1 takes a whole byte)."""
        bits = INTEGER_BITS.get(self.element) or FLOAT_BITS[self.element]
        return max(bits // 8, 1)

    @property
    def is_float(self) -> bool:
        """True for floating-point elements, false for integers and pointers."""
        return not self.is_pointer and self.element in FLOAT_BITS


@dataclass(frozen=True, slots=True)
class Successor:
    """A branch target: the number of a block and the slots passed as its arguments."""

    block: int
    operands: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """`arguments` are slots; the last op is the terminator."""

    arguments: tuple[int, ...]
    argument_types: tuple[Type, ...]
    ops: tuple["Op", ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `words` are its bare keywords (`slt`, `x`, `fadd`) in printed order."""

    name: str
    operands: tuple[int, ...]
    operand_types: tuple[Type, ...]
    results: tuple[int, ...]
    result_types: tuple[Type, ...]
    location: Location
    words: tuple[str, ...] = ()
    attributes: dict[str, object] = field(default_factory=dict)
    regions: tuple[tuple[Block, ...], ...] = ()
    successors: tuple[Successor, ...] = ()

    @property
    def type(self) -> Type:
        """The type of the first result."""
        return self.result_types[0]


MASK_OPERAND = {
    "tt.load": 1,
    "tt.store": 2,
    "tt.atomic_rmw": 2,
    "tt.atomic_load": 1,
    "tt.atomic_store": 2,
}
"""Which operand of an access is its mask, where it has one."""

ACCESSES = frozenset({*MASK_OPERAND, "tt.atomic_cas", "tt.atomic_poll"})
"""The ops that read or write memory; the first operand is the pointer."""


def nested(blocks: tuple[Block, ...]) -> Iterator["Op"]:
    """Every op of some blocks, those of their regions included."""
    for block in blocks:
        for op in block.ops:
            yield op
            for region in op.regions:
                yield from nested(region)


def reached_from(blocks: tuple[Block, ...]) -> list[set[int]]:
    """For every block the numbers of those it branches to, directly or through others."""
    reached: list[set[int]] = []
    for block in blocks:
        found: set[int] = set()
        todo = [block]
        while todo:
            for successor in todo.pop().ops[-1].successors:
                if successor.block not in found:
                    found.add(successor.block)
                    todo.append(blocks[successor.block])
        reached.append(found)
    return reached


@dataclass(frozen=True, slots=True)
class Function:
    """One `tt.func`: its argument slots are those of its first block."""

    name: str
    blocks: tuple[Block, ...]
    num_slots: int


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled kernel: `entry` names the public function."""

    entry: str
    functions: dict[str, Function]
