"""Control flow over all programs at once: both sides of a branch run, each under its mask.

A mask is bool `[P]`, or None while all programs are active. Values that reach a join are chosen
per program. A loop goes round while any active program wants to.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.errors import LaunchError
from kvfuzz.cpu.ir import ACCESSES, Block, Op, nested
from kvfuzz.cpu.machine import Code, Machine, Routine, Step
from kvfuzz.cpu.overflow import decide, doubted
from kvfuzz.cpu.values import STORAGE, Mask, merge

Array = NDArray[Any]
BindBlock = Callable[[Block], Code]
Split = tuple[bool, Mask]  # whether any program goes this way, and which


def split(mask: Mask, condition: Array) -> tuple[Split, Split]:
    """The programs for which `condition` (bool `[P]` or `[1]`) holds, and the others."""
    if len(condition) == 1:
        taken = bool(condition[0])
        return (taken, mask), (not taken, mask)
    yes = condition if mask is None else condition & mask
    no = ~condition if mask is None else ~condition & mask
    any_yes, any_no = bool(yes.any()), bool(no.any())
    return (any_yes, yes if any_no else mask), (any_no, no if any_yes else mask)


def update(mask: Mask, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """`new` for the programs in `mask`, `old` for the others."""
    if mask is None:
        return list(new)
    return [merge(mask, a, b) for a, b in zip(new, old, strict=True)]


def run_routine(machine: Machine, routine: Routine, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Run a function in a frame of its own; the programs return at different blocks."""
    outer_slots = machine.slots
    machine.slots = [None] * routine.num_slots
    results = run_blocks(machine, routine.blocks, arguments)
    machine.slots = outer_slots
    return results


def run_blocks(
    machine: Machine, blocks: Sequence[Code], arguments: Sequence[Any]
) -> tuple[Any, ...]:
    """Run blocks that branch to each other until every active program has left them.

    The lowest block that programs wait at goes next, with all that wait there, so that without
    branches backwards each runs once.
    """
    outer_mask = machine.mask
    arrivals: dict[int, list[tuple[Mask, list[Any]]]] = {0: [(outer_mask, list(arguments))]}
    returned: list[tuple[Mask, list[Any]]] = []
    been: set[int] = set()
    while arrivals:
        number = min(arrivals)
        code = blocks[number]
        machine.mask, values = _join(arrivals.pop(number))
        mask = machine.mask
        outcome = _run_again(machine, code, values) if number in been else machine.run(code, values)
        been.add(number)
        if not code.targets:
            returned.append((mask, list(outcome)))
            continue
        ways: tuple[Split, ...] = ((True, mask),)
        if len(code.targets) == 2:
            ways = _fork(machine, code.last, outcome[0])
        for target, (any_goes, going) in zip(code.targets, ways, strict=True):
            if any_goes:
                if target.block <= number:
                    machine.burn(code.last)
                passed = [machine.slots[slot] for slot in target.operands]
                arrivals.setdefault(target.block, []).append((going, passed))
    _, results = _join(returned)
    machine.mask = outer_mask
    return tuple(results)


def _fork(machine: Machine, op: Op, condition: Any, *, guards: bool = True) -> tuple[Split, Split]:
    """Which programs take a branch of `op` and which do not; both are noted."""
    ways = split(machine.mask, decide(machine, op, condition, guards=guards))
    if machine.coverage is not None:
        machine.coverage.note(op, ways[0][0], ways[1][0])
    return ways


def reaches_memory(op: Op) -> bool:
    """Whether the regions of `op` access memory, or call what may."""
    inner = (each for region in op.regions for each in nested(region))
    return any(each.name in ACCESSES or each.name == "tt.call" for each in inner)


def _run_again(machine: Machine, code: Code, values: Sequence[Any]) -> tuple[Any, ...]:
    """Run a block that ran before; programs that have left it keep the values it gave them."""
    slots = [*code.arguments, *(slot for bound in code.ops for slot in bound.results)]
    before = [machine.slots[slot] for slot in slots]
    outcome = machine.run(code, values)
    after = update(machine.mask, [machine.slots[slot] for slot in slots], before)
    for slot, value in zip(slots, after, strict=True):
        machine.slots[slot] = value
    return outcome


def _join(arrived: list[tuple[Mask, list[Any]]]) -> tuple[Mask, list[Any]]:
    mask, values = arrived[0]
    for other_mask, other_values in arrived[1:]:
        values = update(other_mask, other_values, values)
        mask = None if mask is None or other_mask is None else mask | other_mask
    if mask is not None and mask.all():
        mask = None
    return mask, values


def _results(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def bind_if(op: Op, bind: BindBlock) -> Step:
    """`scf.if`, with or without results."""
    sides = [bind(region[0]) for region in op.regions]
    guards = reaches_memory(op)

    def step(machine: Machine, condition: Any) -> Any:
        outer = machine.mask
        done: list[tuple[Mask, tuple[Any, ...]]] = []
        ways = _fork(machine, op, condition, guards=guards)
        for code, (any_goes, going) in zip(sides, ways, strict=False):
            if any_goes:
                machine.mask = going
                done.append((going, machine.run(code)))
        machine.mask = outer
        if not done:
            return ()
        mask, values = done[0]
        if len(done) == 2:
            return _results(update(mask, values, done[1][1]))
        return _results(values)

    return step if guards else _doubting(step)


def bind_for(op: Op, bind: BindBlock) -> Step:
    """`scf.for`; bounds and step may differ between programs."""
    code = bind(op.regions[0][0])
    dtype = np.dtype(STORAGE[op.regions[0][0].argument_types[0].element])
    guards = reaches_memory(op)
    is_unsigned = "unsigned" in op.words
    wide = np.uint64 if is_unsigned else np.int64

    def step(machine: Machine, *operands: Any) -> Any:
        low, high, stride = (
            decide(machine, op, each, guards=guards, is_unsigned=is_unsigned)
            for each in operands[:3]
        )
        carried = operands[3:]
        if is_unsigned:
            low, high, stride = (part.view(f"u{dtype.itemsize}") for part in (low, high, stride))
        values: Sequence[Any] = carried
        (still, _), _ = split(machine.mask, stride <= 0)
        if still:
            raise LaunchError(f"a loop without step in {op.location}")
        if machine.coverage is not None and not machine.coverage.complete(op):
            trips = -((low.astype(np.int64) - high) // stride)
            machine.coverage.note_trips(op, trips, machine.mask)
        if len(low) == len(high) == len(stride) == 1:
            for counter in range(int(low[0]), int(high[0]), int(stride[0])):
                machine.burn(op)
                values = machine.run(code, [np.array([counter], wide).astype(dtype), *values])
            return _results(values)
        outer = machine.mask
        counters, end, by = (part.astype(wide) for part in (low, high, stride))
        while True:
            inside = np.broadcast_to(counters < end, machine.num_programs)
            (any_goes, going), _ = split(outer, inside)
            if not any_goes:
                break
            machine.burn(op)
            machine.mask = going
            new = machine.run(code, [counters.astype(dtype), *values])
            values = update(going, new, values)
            counters = counters + by
        machine.mask = outer
        return _results(values)

    return step if guards else _doubting(step)


def bind_while(op: Op, bind: BindBlock) -> Step:
    """`scf.while`: the first region decides and hands on values, the second is the body."""
    before, after = (bind(region[0]) for region in op.regions)
    guards = reaches_memory(op)

    def step(machine: Machine, *carried: Any) -> Any:
        outer = machine.mask
        going: Mask = outer
        values: Sequence[Any] = carried
        results: Sequence[Any] | None = None
        trips = np.zeros(1, np.int64)
        while True:
            machine.burn(op)
            condition, *handed = machine.run(before, values)
            results = handed if results is None else update(going, handed, results)
            condition = decide(machine, op, condition, guards=guards)
            (any_goes, going), _ = split(going, condition)
            if not any_goes:
                break
            trips = trips + (1 if going is None else going)
            machine.mask = going
            values = update(going, machine.run(after, handed), values)
        machine.mask = outer
        if machine.coverage is not None:
            machine.coverage.note_trips(op, trips, outer)
        return _results(results or ())

    return step if guards else _doubting(step)


def _doubting(step: Step) -> Step:
    """A branch or loop without accesses, whose results are in doubt if its conditions were."""

    def doubting(machine: Machine, *operands: Any) -> Any:
        outer, machine.doubt = machine.doubt, None
        results = doubted(machine, step(machine, *operands))
        machine.doubt = outer
        return results

    return doubting


def bind_call(routine: Routine) -> Step:
    """`tt.call` of a function that was not inlined."""
    return lambda machine, *arguments: _results(run_routine(machine, routine, arguments))
