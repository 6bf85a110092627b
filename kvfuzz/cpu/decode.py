"""Binds a parsed kernel to steps, once: every op is looked up here, or the kernel is refused."""

import math
from collections.abc import Callable

from kvfuzz.cpu.arch import DEFAULT_ARCH, Target, target_of
from kvfuzz.cpu.control import bind_call, bind_for, bind_if, bind_while
from kvfuzz.cpu.coverage import Coverage
from kvfuzz.cpu.errors import UnsupportedOp
from kvfuzz.cpu.inline_asm import bind_inline_asm
from kvfuzz.cpu.ir import Block, Function, Module, Op, nested, reached_from
from kvfuzz.cpu.machine import Bound, Code, Jump, Program, Routine, Step
from kvfuzz.cpu.ops_atomic import ATOMIC_OPS
from kvfuzz.cpu.ops_convert import CONVERSIONS, note_extended
from kvfuzz.cpu.ops_extern import bind_extern
from kvfuzz.cpu.ops_float import FLOAT_OPS
from kvfuzz.cpu.ops_integer import INTEGER_OPS
from kvfuzz.cpu.ops_map import bind_map
from kvfuzz.cpu.ops_memory import MEMORY_OPS
from kvfuzz.cpu.ops_region import bind_dot, bind_histogram, bind_reduce, bind_scan
from kvfuzz.cpu.ops_scaled import bind_dot_scaled
from kvfuzz.cpu.ops_shape import SHAPE_OPS
from kvfuzz.cpu.ops_watch import WATCH_OPS
from kvfuzz.cpu.overflow import checked, widened
from kvfuzz.cpu.possible import possible_outcomes
from kvfuzz.cpu.waiting import waits

# Every op without regions: a function from the op to its step, which may raise `UnsupportedOp`.
OPS = {
    **INTEGER_OPS,
    **SHAPE_OPS,
    **MEMORY_OPS,
    **ATOMIC_OPS,
    **WATCH_OPS,
    "tt.elementwise_inline_asm": bind_inline_asm,
    "tt.extern_elementwise": bind_extern,
}

# The same, where the architecture matters: a function from the op and the target.
TARGET_OPS: dict[str, Callable[[Op, Target], Step]] = {
    **FLOAT_OPS,
    **CONVERSIONS,
    "tt.dot": bind_dot,
    "tt.dot_scaled": bind_dot_scaled,
    "tt.histogram": bind_histogram,
}

# Ops with regions also get a function that binds a block.
REGION_OPS = {
    "scf.if": bind_if,
    "scf.for": bind_for,
    "scf.while": bind_while,
    "tt.reduce": bind_reduce,
    "tt.scan": bind_scan,
}

TERMINATORS = frozenset(
    {
        "tt.return",
        "tt.reduce.return",
        "tt.scan.return",
        "tt.map_elementwise.return",
        "scf.yield",
        "scf.condition",
        "cf.br",
        "cf.cond_br",
    }
)

_CARRIES = frozenset({*SHAPE_OPS, *REGION_OPS, "arith.select", "tt.call"})


def decode_module(module: Module, arch: str = DEFAULT_ARCH, *, has_median: bool = True) -> Program:
    """Bind a whole kernel for `arch`. Raises `UnsupportedOp` before anything could run."""
    decoder = _Decoder(module, target_of(module, arch, has_median))
    entry = decoder.routine(module.entry)
    serial = waits(module)
    return Program(
        module.entry,
        entry,
        decoder.largest,
        tuple(decoder.codes),
        serial=serial,
        synchronises=_synchronises(module) or (f"{module.entry} (its loops)" if serial else ""),
        coverage=Coverage(possible_outcomes(module)),
    )


def _synchronises(module: Module) -> str:
    """`kernel (file:line)` of the first atomic access whose result the kernel uses, or nothing."""
    for function in module.functions.values():
        ops = list(nested(function.blocks))
        used = {slot for op in ops for slot in op.operands}
        used |= {slot for op in ops for each in op.successors for slot in each.operands}
        for op in ops:
            if op.name.startswith("tt.atomic") and used.intersection(op.results):
                return f"{module.entry} ({op.location})"
    return ""


class _Decoder:
    def __init__(self, module: Module, target: Target) -> None:
        self._module = module
        self._target = target
        self._routines: dict[str, Routine] = {}
        self.codes: list[Code] = []
        self.largest = 1

    def routine(self, name: str) -> Routine:
        if name not in self._routines:
            function: Function = self._module.functions[name]
            note_extended(function.blocks)
            self._routines[name] = Routine(name, self.blocks(function.blocks), function.num_slots)
        return self._routines[name]

    def blocks(self, blocks: tuple[Block, ...]) -> tuple[Code, ...]:
        order = _block_order(blocks)
        number_of = {block: number for number, block in enumerate(order)}
        return tuple(self.block(blocks[block], number_of) for block in order)

    def block(self, block: Block, number_of: dict[int, int] | None = None) -> Code:
        if not block.ops or block.ops[-1].name not in TERMINATORS:
            # The printer leaves out a yield of nothing.
            return self._code(block, block.ops, (), ())
        *ops, last = block.ops
        outcome = last.operands if last.name != "cf.br" else ()
        targets = tuple(
            Jump((number_of or {})[each.block], each.operands) for each in last.successors
        )
        return self._code(block, tuple(ops), outcome, targets, last)

    def _code(
        self,
        block: Block,
        ops: tuple[Op, ...],
        outcome: tuple[int, ...],
        targets: tuple[Jump, ...],
        last: Op | None = None,
    ) -> Code:
        bound = tuple(self._bound(op) for op in ops)
        code = Code(block.arguments, bound, outcome, targets, last)
        self.codes.append(code)
        return code

    def _bound(self, op: Op) -> Bound:
        for type_ in (*op.operand_types, *op.result_types):
            self.largest = max(self.largest, math.prod(type_.shape))
        try:
            step = self._step(op)
        except (KeyError, IndexError, ValueError) as error:
            raise _unsupported(op, f"{error}") from error
        return Bound(
            step,
            checked(op, step),
            widened(op),
            op.operands,
            op.results,
            op,
            op.name in _CARRIES or (op.name == "tt.bitcast" and op.type.is_pointer),
        )

    def _step(self, op: Op) -> Step:
        if op.name in MODULE_OPS:
            return MODULE_OPS[op.name](self, op)
        if op.name in REGION_OPS:
            if any(len(region) != 1 for region in op.regions):
                raise _unsupported(op, "several blocks in a region")
            return REGION_OPS[op.name](op, self.block)
        if op.name in TARGET_OPS:
            return TARGET_OPS[op.name](op, self._target)
        if op.name in OPS:
            return OPS[op.name](op)
        raise _unsupported(op)


# Ops that need more than one block of the module: a function from the decoder and the op.
MODULE_OPS: dict[str, Callable[[_Decoder, Op], Step]] = {
    "tt.call": lambda decoder, op: bind_call(decoder.routine(str(op.attributes["callee"]))),
    "tt.map_elementwise": lambda decoder, op: bind_map(op, decoder.blocks),
}


def _block_order(blocks: tuple[Block, ...]) -> list[int]:
    """Numbers of the reachable blocks, each before those it branches to but for loops.

    What follows a loop comes after it, so that programs that leave early wait there.
    """
    reached = reached_from(blocks)
    finished: list[int] = []
    seen: set[int] = set()

    def visit(number: int) -> None:
        if number in seen:
            return
        seen.add(number)
        ways = [successor.block for successor in blocks[number].ops[-1].successors]
        for way in sorted(ways, key=lambda way: number in reached[way]):
            visit(way)
        finished.append(number)

    visit(0)
    return finished[::-1]


def _unsupported(op: Op, why: str = "") -> UnsupportedOp:
    name = f"{op.name} ({why})" if why else op.name
    return UnsupportedOp(name, op.location.name, op.location.line)
