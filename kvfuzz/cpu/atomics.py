"""Atomic read-modify-write, as if the programs ran one after the other.

Accesses to one address are ranked in program order; all first ones are done at once, then all
second ones, so that the work is one round per contender and not one per program.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.ir import Op
from kvfuzz.cpu.machine import Machine
from kvfuzz.cpu.values import Pointer

Array = NDArray[Any]


def _as_unsigned(compute: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def on_unsigned(a: Array, b: Array) -> Array:
        kind = f"u{a.dtype.itemsize}"
        return compute(a.view(kind), b.view(kind)).view(a.dtype)

    return on_unsigned


ATOMIC_KINDS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "fadd": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda _old, new: new,
    "max": np.maximum,
    "min": np.minimum,
    "umax": _as_unsigned(np.maximum),
    "umin": _as_unsigned(np.minimum),
}


def read_modify_write(
    op: Op, machine: Machine, kind: str, pointer: Pointer, value: Array, mask: Array | None
) -> Array:
    """The old values, shape `(P, *shape)`; strays read poison and write nothing."""
    compute = ATOMIC_KINDS[kind]
    shape = (machine.num_programs, *op.type.shape)
    lanes = np.ones(shape, np.bool_)
    if machine.mask is not None:
        lanes &= machine.mask.reshape(-1, *[1] * (len(shape) - 1))
    if mask is not None:
        lanes &= mask
    wide = Pointer(
        pointer.allocation
        if isinstance(pointer.allocation, int)
        else np.broadcast_to(pointer.allocation, shape),
        np.broadcast_to(pointer.offset, shape),
    )
    operand = np.broadcast_to(value, shape)
    order = _ranks(wide, lanes)
    old = np.zeros(shape, operand.dtype)
    for rank in range(int(order.max(initial=-1)) + 1):
        now = order == rank
        read = machine.memory.load(op, machine, wide, now, old)
        machine.memory.store(op, machine, wide, compute(read, operand), now, ordered=True)
        old = read
    return old


def _ranks(pointer: Pointer, lanes: Array) -> Array:
    """How many earlier active lanes use the same address; -1 for lanes that are off."""
    ranks = np.full(lanes.shape, -1, np.int64)
    numbers = np.broadcast_to(np.asarray(pointer.allocation, np.int64), lanes.shape)[lanes]
    offsets = pointer.offset[lanes]
    order = np.lexsort((offsets, numbers))
    same = np.zeros(len(order), np.bool_)
    same[1:] = (np.diff(offsets[order]) == 0) & (np.diff(numbers[order]) == 0)
    position = np.arange(len(order))
    start = np.maximum.accumulate(np.where(same, 0, position))
    found = np.empty(len(order), np.int64)
    found[order] = position - start
    ranks[lanes] = found
    return ranks
