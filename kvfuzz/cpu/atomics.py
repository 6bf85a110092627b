"""Atomic read-modify-write, as if the programs ran one after the other.

Accesses to one address are lined up in program order. Where it does not matter how a row of updates
is bracketed, each is combined with all before it by doubling, in as many rounds as the number of
contenders has binary digits. A sum of floats rounds after every update, and whether a swap happens
depends on the one before: there all first accesses are done at once, then all second ones, one
round per contender.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.accesses import note_mask
from kvfuzz.cpu.ir import Op
from kvfuzz.cpu.machine import Machine
from kvfuzz.cpu.numerics import decode, encode
from kvfuzz.cpu.values import UNRESOLVED, Pointer

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

IN_TURN = frozenset({"fadd"})
"""The kinds for which it matters how a row of updates is bracketed."""


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
    lanes, wide = _active(op, machine, pointer, mask)
    is_one = isinstance(wide.allocation, int) and wide.allocation != UNRESOLVED
    if op.words[0] not in IN_TURN and is_one:
        return _all_at_once(op, machine, compute, wide, operand, lanes)

    def update(read: Array, now: Array) -> tuple[Array, Array]:
        return compute(read, operand), now

    return _in_turn(op, machine, wide, lanes, operand.dtype, update)


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

    lanes, wide = _active(op, machine, pointer, None)
    return _in_turn(op, machine, wide, lanes, new.dtype, update)


def _active(
    op: Op, machine: Machine, pointer: Pointer, mask: Array | None
) -> tuple[Array, Pointer]:
    """The active lanes, and the pointer of every lane; both of shape `(P, *shape)`."""
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
    return lanes, wide


def _all_at_once(
    op: Op, machine: Machine, compute: Compute, pointer: Pointer, operand: Array, lanes: Array
) -> Array:
    """Update elements of one allocation by a `compute` that is associative."""
    old = np.zeros(lanes.shape, operand.dtype)
    if not lanes.any():
        return old
    found = machine.memory.load(op, machine, pointer, lanes, old, ordered=True)
    before, offsets = found[lanes], pointer.offset[lanes]
    order = np.argsort(offsets, kind="stable")
    start = _starts(offsets[order])
    ranks = np.arange(len(order)) - start
    total = operand[lanes][order]
    reach, longest = 1, int(ranks.max())
    while reach <= longest:  # total: of this update and those up to `reach - 1` places before it
        behind = np.flatnonzero(ranks >= reach)
        total[behind] = compute(total[behind - reach], total[behind])
        reach *= 2
    first = before[order]
    seen = first.copy()
    later = np.flatnonzero(ranks)
    seen[later] = compute(first[later], total[later - 1])
    allocation = machine.memory.space.allocations[int(pointer.allocation)]
    stray = (offsets < 0) | (offsets > allocation.nbytes - operand.itemsize)
    given = np.empty_like(before)
    given[order] = seen
    old[lanes] = np.where(stray, before, given)
    given[order] = compute(first, total)
    new = np.zeros_like(old)  # of one address the last one stays
    new[lanes] = given
    machine.memory.store(op, machine, pointer, new, lanes, ordered=True)
    return old


def _in_turn(
    op: Op,
    machine: Machine,
    pointer: Pointer,
    lanes: Array,
    dtype: np.dtype[Any],
    update: Callable[[Array, Array], tuple[Array, Array]],
) -> Array:
    """Give active lanes their turns: `update` maps what was read to what is written, and where."""
    order = _ranks(pointer, lanes)
    old = np.zeros(lanes.shape, dtype)
    for rank in range(int(order.max(initial=-1)) + 1):
        now = order == rank
        read = machine.memory.load(op, machine, pointer, now, old, ordered=True)
        old = np.ascontiguousarray(read)
        new, written = update(old, now)
        machine.memory.store(op, machine, pointer, new, written, ordered=True)
    return old


def _ranks(pointer: Pointer, lanes: Array) -> Array:
    """How many earlier active lanes use the same address; -1 for lanes that are off."""
    ranks = np.full(lanes.shape, -1, np.int64)
    numbers = np.broadcast_to(np.asarray(pointer.allocation, np.int64), lanes.shape)[lanes]
    offsets = pointer.offset[lanes]
    order = np.lexsort((offsets, numbers))
    found = np.empty(len(order), np.int64)
    found[order] = np.arange(len(order)) - _starts(numbers[order], offsets[order])
    ranks[lanes] = found
    return ranks


def _starts(*keys: Array) -> Array:
    """For each position of a sorted row, where the run of equal keys that it is in starts."""
    new = np.zeros(len(keys[0]), np.bool_)
    for key in keys:
        new[1:] |= key[1:] != key[:-1]
    starts: Array = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
    return starts
