"""Pointers, loads and stores."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.errors import UnsupportedOp
from kvfuzz.cpu.ir import Op
from kvfuzz.cpu.machine import Machine, Step
from kvfuzz.cpu.memory import note_mask
from kvfuzz.cpu.values import STORAGE, UNRESOLVED, Pointer

Array = NDArray[Any]
Binder = Callable[[Op], Step]


def _add_pointer(op: Op) -> Step:
    size = op.type.nbytes

    def step(_: Machine, pointer: Pointer, elements: Array) -> Pointer:
        moved = elements.astype(np.int64)
        if size > 1:
            moved *= size
        start = pointer.offset
        if start.ndim == moved.ndim and all(map(operator.le, start.shape, moved.shape)):
            moved += start
        else:
            moved = start + moved
        return Pointer(pointer.allocation, moved)

    return step


def _integer_to_pointer(_: Op) -> Step:
    def step(machine: Machine, address: Array) -> Pointer:
        space = machine.memory.space
        numbers = space.find(address)
        first = int(numbers.flat[0])
        if (numbers == first).all():
            base = 0 if first == UNRESOLVED else space.allocations[first].address
            return Pointer(first, address - base)
        starts = np.array(
            [0 if n == UNRESOLVED else space.allocations[int(n)].address for n in numbers.flat]
        )
        return Pointer(numbers, address - starts.reshape(numbers.shape))

    return step


def _pointer_to_integer(_: Op) -> Step:
    def step(machine: Machine, pointer: Pointer) -> Array:
        allocations = machine.memory.space.allocations
        numbers = np.asarray(pointer.allocation)
        starts = np.zeros(numbers.shape, np.int64)
        for number in np.unique(numbers[numbers != UNRESOLVED]):
            starts[numbers == number] = allocations[int(number)].address
        return pointer.offset + starts

    return step


def _bitcast(op: Op) -> Step:
    if op.type.is_pointer:
        return lambda _, pointer: pointer
    dtype = np.dtype(STORAGE[op.type.element])
    if dtype.itemsize != np.dtype(STORAGE[op.operand_types[0].element]).itemsize:
        raise UnsupportedOp(f"{op.name} between widths", op.location.name, op.location.line)
    return lambda _, value: value.view(dtype)


def _load(op: Op) -> Step:
    def step(
        machine: Machine, pointer: Pointer, mask: Array | None = None, other: Array | None = None
    ) -> Array:
        note_mask(op, machine, mask)
        return machine.memory.load(op, machine, pointer, mask, other)

    return step


def _store(op: Op) -> Step:
    def step(machine: Machine, pointer: Pointer, value: Array, mask: Array | None = None) -> None:
        note_mask(op, machine, mask)
        machine.memory.store(op, machine, pointer, value, mask)

    return step


MEMORY_OPS: dict[str, Binder] = {
    "tt.addptr": _add_pointer,
    "tt.int_to_ptr": _integer_to_pointer,
    "tt.ptr_to_int": _pointer_to_integer,
    "tt.bitcast": _bitcast,
    "arith.bitcast": _bitcast,
    "tt.load": _load,
    "tt.store": _store,
}
