"""Where 32-bit integers lose bits, and whether that decides a memory access.

A 32-bit sum, product, shift or truncation whose value does not fit becomes `Wrapped`: the value
beside what 64-bit arithmetic gives. From then on each integer op is computed a second time on the
exact values, with its types widened, and the two stay together while they differ. So a wrap that
undoes itself, or of which only low bits are used (a hash), is no loss. What reaches the address of
an active access, or the mask or branch that guards one, is recorded.

Floats, reductions and scans drop what their operands should have been.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.access import Overflow, Reached
from kvfuzz.cpu.ir import ACCESSES, MASK_OPERAND, Location, Op, Type
from kvfuzz.cpu.ops_integer import INTEGER_OPS
from kvfuzz.cpu.values import Pointer, Wrapped, exactly, raw

if TYPE_CHECKING:
    from kvfuzz.cpu.machine import Bound, Machine, Step

Array = NDArray[Any]

_LOSING = frozenset({"arith.addi", "arith.subi", "arith.muli", "arith.shli", "arith.trunci"})


def widened(op: Op) -> "Step | None":
    """`op` over 64-bit integers: what it gives when nothing is lost. None for other ops."""
    if op.name not in INTEGER_OPS or len(op.results) != 1 or op.type.is_float:
        return None
    wide = replace(
        op,
        operand_types=tuple(map(_wide_type, op.operand_types)),
        result_types=tuple(map(_wide_type, op.result_types)),
    )
    return INTEGER_OPS[op.name](wide)


def _wide_type(type_: Type) -> Type:
    return replace(type_, element="i64") if type_.element in ("i8", "i16", "i32") else type_


def checked(op: Op, step: "Step") -> "Step":
    """`step`, with its result compared to the exact one where `op` can lose bits of 32."""
    if op.name not in _LOSING or op.type.element != "i32" or op.type.is_pointer:
        return step
    exact_step = widened(op) if op.name != "arith.trunci" else None
    place = op.location

    def compared(machine: "Machine", *operands: Array) -> Any:
        wide = (
            operands[0]
            if exact_step is None
            else exact_step(machine, *[each.astype(np.int64) for each in operands])
        )
        narrow = wide.astype(np.int32)
        if (narrow != wide).any():
            machine.following = follow_overflow
            return Wrapped(narrow, wide, place)
        return narrow

    return compared


def follow_overflow(machine: "Machine", bound: "Bound", operands: list[Any]) -> Any:
    """Run one op on values of which some lost bits, and keep what they should have been."""
    if not any(type(each) is Wrapped for each in operands):
        return bound.checked(machine, *operands)
    chooses = bound.op.name == "arith.select" and type(operands[0]) is Wrapped
    if bound.carries and not chooses:
        return bound.step(machine, *operands)
    values = [raw(each) for each in operands]
    if bound.op.name in ACCESSES:
        _consume(machine, bound.op, operands)
        return bound.step(machine, *values)
    result = bound.checked(machine, *values)
    place = next(each.place for each in operands if isinstance(each, Wrapped))
    if bound.op.name in ("tt.addptr", "tt.int_to_ptr"):
        return _pointer(machine, bound, operands, result, place)
    if bound.op.name == "tt.ptr_to_int":
        (pointer,) = operands
        return _kept(result, result + (exactly(pointer) - exactly(pointer.value)), place)
    if bound.wide is None:
        return result
    lost = _any_lost(operands)
    wide = bound.wide(machine, *[exactly(each) for each in operands])
    place = result.place if isinstance(result, Wrapped) else place
    return _kept(raw(result), np.where(lost, wide, exactly(result)), place)


def decide(machine: "Machine", op: Op, condition: Any, *, guards: bool) -> Array:
    """A condition or loop bound as it is; noted where it lost bits and an access depends on it."""
    if not isinstance(condition, Wrapped):
        plain: Array = raw(condition)
        return plain
    if guards:
        differ = _active(machine, condition.value != condition.exact)
        _record(machine, op, "branch", condition, differ, "")
    value: Array = condition.value
    return value


def _pointer(
    machine: "Machine", bound: "Bound", operands: list[Any], result: Pointer, place: Location
) -> Any:
    if bound.op.name == "tt.int_to_ptr":
        (address,) = operands
        return _kept(result, result.offset + (exactly(address) - address.value), place)
    start, elements = operands  # tt.addptr
    base = raw(start)
    moved = bound.step(machine, Pointer(base.allocation, exactly(start)), exactly(elements))
    return _kept(result, moved.offset, place)


def _kept(value: Any, exact: Array, place: Location) -> Any:
    """The value with what it should be, or alone where they agree."""
    return Wrapped(value, exact, place) if (exactly(value) != exact).any() else value


def _any_lost(operands: list[Any]) -> Array:
    lost = np.zeros(1, np.bool_)
    for each in operands:
        if isinstance(each, Wrapped):
            lost = lost | (exactly(each.value) != each.exact)
    return lost


def _active(machine: "Machine", lanes: Array) -> Array:
    if machine.mask is None:
        return lanes
    return lanes & machine.mask.reshape(-1, *[1] * (lanes.ndim - 1))


def _consume(machine: "Machine", op: Op, operands: list[Any]) -> None:
    """Note which of an access's operands, its address or its mask, lost bits that matter."""
    at = MASK_OPERAND.get(op.name)
    mask = operands[at] if at is not None and len(operands) > at else None
    if isinstance(mask, Wrapped):
        differ = _active(machine, mask.value != mask.exact)
        _record(machine, op, "mask", mask, differ, _allocation(machine, operands[0]))
    pointer = operands[0]
    if isinstance(pointer, Wrapped):
        differ = _active(machine, exactly(pointer.value) != pointer.exact)
        if mask is not None:
            differ = differ & raw(mask)
        _record(machine, op, "address", pointer, differ, _allocation(machine, pointer))


def _allocation(machine: "Machine", pointer: Any) -> str:
    number = getattr(raw(pointer), "allocation", None)
    known = machine.memory.space.allocations
    return known[number].name if isinstance(number, int) and number in known else "?"


def _record(
    machine: "Machine", op: Op, reached: Reached, value: Wrapped, differ: Array, allocation: str
) -> None:
    access = machine.memory.access
    if access is None or not differ.any():
        return
    shape = np.broadcast_shapes(differ.shape, (machine.num_programs, *[1] * (differ.ndim - 1)))
    everywhere = np.broadcast_to(differ, shape)
    where = np.unravel_index(int(everywhere.argmax()), shape)
    used, exact = (
        int(np.broadcast_to(part, shape)[where]) for part in (exactly(value.value), value.exact)
    )
    record = Overflow(
        reached,
        machine.kernel,
        op.location.name,
        op.location.line,
        value.place.name,
        value.place.line,
        machine.program_ids(int(where[0])),
        allocation,
        used,
        exact,
        int(np.count_nonzero(everywhere)),
    )
    access.add_overflow((id(op), reached), record)
