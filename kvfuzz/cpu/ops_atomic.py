"""Atomic ops: each binds to reads and writes of memory that happen one program after another."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from kvfuzz.cpu.accesses import active_lanes, note_mask
from kvfuzz.cpu.atomics import atomic_compute, compare_and_swap, read_modify_write
from kvfuzz.cpu.ir import Op, Type
from kvfuzz.cpu.machine import Machine, Step
from kvfuzz.cpu.values import Pointer

Array = NDArray[Any]


def _read_modify_write(op: Op) -> Step:
    compute = atomic_compute(op.words[0], op.type.element)

    def step(machine: Machine, pointer: Pointer, value: Array, mask: Array | None = None) -> Array:
        return read_modify_write(op, machine, compute, pointer, value, mask)

    return step


def _compare_and_swap(op: Op) -> Step:
    def step(machine: Machine, pointer: Pointer, expected: Array, value: Array) -> Array:
        return compare_and_swap(op, machine, pointer, expected, value)

    return step


def _load(op: Op) -> Step:
    def step(machine: Machine, pointer: Pointer, mask: Array | None = None) -> Array:
        note_mask(op, machine, mask)
        return machine.memory.load(op, machine, pointer, mask, None, ordered=True)

    return step


def _store(op: Op) -> Step:
    def step(machine: Machine, pointer: Pointer, value: Array, mask: Array | None = None) -> None:
        note_mask(op, machine, mask)
        machine.memory.store(op, machine, pointer, value, mask, ordered=True)

    return step


def _poll(op: Op) -> Step:
    """Whether the value is the expected one. Without a timeout a program waits until it is: as no
    other program can run meanwhile, that takes all the fuel there is.
    """
    reading = replace(op, result_types=(Type(op.type.shape, op.operand_types[0].element),))

    def step(machine: Machine, pointer: Pointer, expected: Array, *timeout: Array) -> Array:
        seen: Array = (
            machine.memory.load(reading, machine, pointer, None, None, ordered=True) == expected
        )
        active = active_lanes(machine, None, seen.ndim - 1)
        waiting = ~seen if active is None else ~seen & active
        if waiting.any() and not timeout:
            machine.fuel = 0
            machine.burn(op)
        return seen

    return step


ATOMIC_OPS: dict[str, Callable[[Op], Step]] = {
    "tt.atomic_rmw": _read_modify_write,
    "tt.atomic_cas": _compare_and_swap,
    "tt.atomic_load": _load,
    "tt.atomic_store": _store,
    "tt.atomic_poll": _poll,
}
