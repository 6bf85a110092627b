"""Atomic read-modify-write, as if the programs ran one after the other.

Accesses to one address are ranked in program order; all first ones are done at once, then all
second ones, so that the work is one round per contender and not one per program.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.accesses import note_mask
from kvfuzz.cpu.ir import Op
from kvfuzz.cpu.machine import Machine
from kvfuzz.cpu.numerics import decode, encode
from kvfuzz.cpu.values import Pointer

Array = NDArray[Any]
Compute = Callable[[Array, Array], Array]

_WHOLE = ("i32", "i64")


def _as_unsigned(compute: Compute) -> Compute:
    def on_unsigned(a: Array, b: Array) -> Array:
        kind = f"u{a.dtype.itemsize}"
        return compute(a.view(kind), b.view(kind)).view(a.dtype)

    return on_unsigned


# By kind: what becomes of the old value and the operand, and for which elements. Triton's front
# end lets nothing else through; its floating-point minimum and maximum are made of these.
ATOMIC_KINDS: dict[str, tuple[Compute, tuple[str, ...]]] = {
    "add": (np.add, _WHOLE),
    "fadd": (np.add, ("f16", "bf16", "f32", "f64")),
    "and": (np.bitwise_and, _WHOLE),
    "or": (np.bitwise_or, _WHOLE),
    "xor": (np.bitwise_xor, _WHOLE),
    "exch": (lambda _old, new: new, (*_WHOLE, "f32", "f64")),
    "max": (np.maximum, _WHOLE),
    "min": (np.minimum, _WHOLE),
    "umax": (_as_unsigned(np.maximum), _WHOLE),
    "umin": (_as_unsigned(np.minimum), _WHOLE),
}


def atomic_compute(kind: str, element: str) -> Compute:
    """The computation of one kind, rounded to `element`. Raises ValueError if there is none."""
    compute, elements = ATOMIC_KINDS.get(kind, (np.add, ()))
    if element not in elements:
        raise ValueError(f"{kind} on {element}")
    if element not in ("f16", "bf16"):
        return compute
    return lambda a, b: encode(compute(decode(a, element), decode(b, element)), element)


def read_modify_write(
    op: Op, machine: Machine, compute: Compute, pointer: Pointer, value: Array, mask: Array | None
) -> Array:
    """The old values, shape `(P, *shape)`; strays read poison and write nothing."""
    shape = (machine.num_programs, *op.type.shape)
    operand = np.broadcast_to(value, shape)

    def update(read: Array, now: Array) -> tuple[Array, Array]:
        return compute(read, operand), now

    return _in_turn(op, machine, pointer, mask, operand.dtype, update)


def compare_and_swap(
    op: Op, machine: Machine, pointer: Pointer, expected: Array, value: Array
) -> Array:
    """The old values; `value` is written where they had the bits of `expected`."""
    shape = (machine.num_programs, *op.type.shape)
    bits = f"u{value.dtype.itemsize}"
    wanted = np.broadcast_to(expected.view(bits), shape)
    new = np.broadcast_to(value, shape)

    def update(read: Array, now: Array) -> tuple[Array, Array]:
        return new, now & (read.view(bits) == wanted)

    return _in_turn(op, machine, pointer, None, new.dtype, update)


def _in_turn(
    op: Op,
    machine: Machine,
    pointer: Pointer,
    mask: Array | None,
    dtype: np.dtype[Any],
    update: Callable[[Array, Array], tuple[Array, Array]],
) -> Array:
    """Give active lanes their turns: `update` maps what was read to what is written, and where."""
    note_mask(op, machine, mask)
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
    order = _ranks(wide, lanes)
    old = np.zeros(shape, dtype)
    for rank in range(int(order.max(initial=-1)) + 1):
        now = order == rank
        old = np.ascontiguousarray(machine.memory.load(op, machine, wide, now, old, ordered=True))
        new, written = update(old, now)
        machine.memory.store(op, machine, wide, new, written, ordered=True)
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
