"""`tt.map_elementwise`: a scalar function with branches, applied to every element.

Each element stands as a program of its own, so that elements diverge just as programs do.
"""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.control import run_blocks
from kvfuzz.cpu.errors import UnsupportedOp
from kvfuzz.cpu.ir import Block, Op, nested
from kvfuzz.cpu.machine import Code, Machine, Step
from kvfuzz.cpu.values import Mask, raw, restructure

Array = NDArray[Any]

# What would see that the programs are not programs.
_OF_PROGRAMS = ("tt.load", "tt.store", "tt.atomic", "tt.get_", "tt.print", "tt.assert", "tt.call")


def bind_map(op: Op, bind: Callable[[tuple[Block, ...]], tuple[Code, ...]]) -> Step:
    """Bind the region; only one element at a time, as neighbours depend on the layout."""
    inside = list(nested(op.regions[0]))
    for inner in inside:
        if inner.name.startswith(_OF_PROGRAMS):
            raise UnsupportedOp(
                f"{inner.name} in {op.name}", inner.location.name, inner.location.line
            )
    if op.attributes["pack"] != 1:
        raise ValueError(f"pack = {op.attributes['pack']}")
    blocks = bind(op.regions[0])
    made = {slot for inner in inside for slot in inner.results}
    made.update(_arguments(op.regions[0]))
    captured = sorted({slot for inner in inside for slot in _uses(inner)} - made)
    shape = op.type.shape
    count = int(np.prod(shape))

    def step(machine: Machine, *operands: Any) -> Any:
        programs = machine.num_programs
        elements = copy(machine)
        elements.num_programs = programs * count
        # Nothing in there is an access, and an element is nobody whom a record could name.
        elements.memory = replace(machine.memory, access=None)
        elements.mask = _each(machine.mask, programs, count)
        elements.slots = list(machine.slots)
        for slot in captured:
            elements.slots[slot] = restructure(
                raw(machine.slots[slot]), lambda value: _each(value, programs, count)
            )
        flat = [
            restructure(raw(value), lambda part: _flattened(part, (programs, *shape)))
            for value in operands
        ]
        results = run_blocks(elements, blocks, flat)
        machine.fuel = elements.fuel
        done = [
            restructure(
                raw(each),
                lambda part: np.broadcast_to(part, programs * count).reshape(programs, *shape),
            )
            for each in results
        ]
        return done[0] if len(done) == 1 else done

    return step


def _each(value: Array | None, programs: int, count: int) -> Any:
    """One value per program becomes one per element; what is the same for all stays so."""
    if value is None or len(value) == 1:
        mask: Mask = value
        return mask
    return np.repeat(np.broadcast_to(value, programs), count)


def _flattened(part: Array, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(part, shape).reshape(-1)


def _arguments(blocks: tuple[Block, ...]) -> Iterator[int]:
    for block in blocks:
        yield from block.arguments
        for op in block.ops:
            for region in op.regions:
                yield from _arguments(region)


def _uses(op: Op) -> Iterator[int]:
    yield from op.operands
    for successor in op.successors:
        yield from successor.operands
