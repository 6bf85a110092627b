"""Where narrow integers lose bits, and whether that decides a memory access.

A sum, product or left shift of at most 32 bits, or a truncation to 32, whose value does not fit
becomes `Wrapped`: the value beside what 64-bit arithmetic gives. From then on each integer op is
computed again on the exact values, with its types widened, and they stay together while they
differ. So a wrap that undoes itself, or of which only low bits are used, is no loss.

Whether an integer has a sign is up to those who use it. Both readings are carried: an op that takes
its operands as signed (an extension with the sign, a signed comparison, the offset of a pointer)
goes by the one, an unsigned op by the other. Mixing bits is no arithmetic: an exclusive or, the
upper half of a product, a shift to the right or a remainder of what lost bits is a hash or a field
of bits, and drops what it should have been; so do floats, reductions and scans.

What reaches the address of an active access, or the mask, branch or loop bound that guards one, is
recorded. The results of a branch or loop that accesses nothing itself are taken for lost.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.access import Overflow, Reached
from kvfuzz.cpu.ir import ACCESSES, MASK_OPERAND, Location, Op, Type
from kvfuzz.cpu.ops_integer import INTEGER_OPS
from kvfuzz.cpu.values import Pointer, Wrapped, exactly, rank, raw, unsigned_exactly

if TYPE_CHECKING:
    from kvfuzz.cpu.machine import Bound, Machine, Step

Array = NDArray[Any]

_NARROW = ("i8", "i16", "i32")
_LOSING = frozenset({"arith.addi", "arith.subi", "arith.muli", "arith.shli"})
_SIGNED = frozenset(
    {"arith.extsi", "arith.divsi", "arith.remsi", "arith.maxsi", "arith.minsi"}
    | {"arith.floordivsi", "arith.ceildivsi", "math.absi", "arith.index_cast"}
)
_UNSIGNED = frozenset(
    {"arith.extui", "arith.divui", "arith.maxui", "arith.minui"}
    | {"arith.ceildivui", "arith.index_castui"}
)
_MIXING = frozenset({"arith.xori", "arith.shrui", "arith.shrsi", "arith.remui", "tt.mulhiui"})


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
    return replace(type_, element="i64") if type_.element in _NARROW else type_


def checked(op: Op, step: "Step") -> "Step":
    """`step`, with its result compared to the exact one where `op` can lose bits."""
    if op.name == "arith.trunci":
        return _checked_truncation(op) if op.type.element == "i32" else step
    if op.name not in _LOSING or op.type.element not in _NARROW:
        return step
    wide_step = widened(op)
    if wide_step is None:
        return step
    place, narrow_type = op.location, np.dtype(f"i{op.type.nbytes}")

    def compared(machine: "Machine", *operands: Array) -> Any:
        wide = wide_step(machine, *[each.astype(np.int64) for each in operands])
        narrow = wide.astype(narrow_type)
        if (narrow != wide).any():
            machine.following = follow_overflow
            unsigned = wide_step(machine, *map(unsigned_exactly, operands))
            return _kept(narrow, wide, unsigned, place)
        return narrow

    return compared


def _checked_truncation(op: Op) -> "Step":
    place = op.location

    def compared(machine: "Machine", wide: Array) -> Any:
        narrow = wide.astype(np.int32)
        if wide.dtype == np.int64 and (narrow != wide).any():
            machine.following = follow_overflow
            return _kept(narrow, wide, wide, place)
        return narrow

    return compared


def follow_overflow(machine: "Machine", bound: "Bound", operands: list[Any]) -> Any:
    """Run one op on values of which some lost bits, and keep what they should have been."""
    if not any(type(each) is Wrapped for each in operands):
        return bound.checked(machine, *operands)
    name = bound.op.name
    if name == "arith.select" and type(operands[0]) is Wrapped:
        return _select(machine, bound, operands)
    if name == "tt.gather" and type(operands[1]) is Wrapped:
        return _gather(machine, bound, operands)
    if bound.carries:
        return bound.step(machine, *operands)
    values = [raw(each) for each in operands]
    if name in ACCESSES:
        _consume(machine, bound.op, operands)
        return bound.step(machine, *values)
    result = bound.checked(machine, *values)
    place = next(each.place for each in operands if isinstance(each, Wrapped))
    if name in ("tt.addptr", "tt.int_to_ptr"):
        return _pointer(machine, bound, operands, result, place)
    if name == "tt.ptr_to_int":
        (pointer,) = operands
        exact = result + (exactly(pointer) - exactly(pointer.value))
        return _kept(result, exact, exact, place)
    if bound.wide is None or name in _MIXING:
        return raw(result)
    place = result.place if isinstance(result, Wrapped) else place
    lost = _any_lost(operands, rank(result))
    signed, unsigned = exactly, unsigned_exactly
    if name in _SIGNED or (name == "arith.cmpi" and bound.op.words[0][0] != "u"):
        unsigned = exactly
    elif name in _UNSIGNED or name == "arith.cmpi":
        signed = unsigned_exactly
    readings = [bound.wide(machine, *map(read, operands)) for read in (signed, unsigned)]
    return _kept(
        raw(result),
        np.where(lost, readings[0], exactly(result)),
        np.where(lost, readings[1], unsigned_exactly(result)),
        place,
    )


def _select(machine: "Machine", bound: "Bound", operands: list[Any]) -> Any:
    """A choice by a condition that is wrong for some elements."""
    condition, *choices = operands
    used = bound.step(machine, condition.value, *choices)
    right = bound.step(machine, condition.exact, *choices)
    if bound.op.type.is_float:
        return used
    exact, unsigned = exactly(right), unsigned_exactly(right)
    if isinstance(raw(used), Pointer):
        # The same offset in another allocation is another address.
        elsewhere = raw(used).allocation != np.asarray(raw(right).allocation)
        exact = np.where(elsewhere & (exact == exactly(used)), ~exact, exact)
        unsigned = exact
    return _kept(raw(used), exact, unsigned, condition.place)


def _gather(machine: "Machine", bound: "Bound", operands: list[Any]) -> Any:
    """Elements picked by indices that lost bits: those are lost, whatever stands there."""
    source, indices = operands
    picked = bound.step(machine, source, indices.value)
    if bound.op.type.is_float or bound.op.type.is_pointer:
        return raw(picked)
    lost = indices.exact != exactly(indices.value)
    exact = np.where(lost, ~exactly(raw(picked)), exactly(picked))
    return _kept(raw(picked), exact, exact, indices.place)


def decide(
    machine: "Machine", op: Op, condition: Any, *, guards: bool, is_unsigned: bool = False
) -> Array:
    """A condition or loop bound as it is. Where it lost bits, that is recorded if an access depends
    on it (`guards`), and else kept in mind for the results of `op` (see `doubted`)."""
    if not isinstance(condition, Wrapped):
        plain: Array = raw(condition)
        return plain
    value: Array = condition.value
    read = unsigned_exactly if is_unsigned else exactly
    differ = _active(machine, read(value) != read(condition))
    if guards:
        reached: Reached = "branch" if value.dtype == np.bool_ else "bound"
        _record(machine, op, reached, condition, differ, "")
    elif differ.any():
        known = machine.doubt
        machine.doubt = (differ if known is None else known[0] | differ, condition.place)
    return value


def doubted(machine: "Machine", results: Any) -> Any:
    """Results of a branch or loop, integers taken for lost where a condition of it was."""
    if machine.doubt is None:
        return results
    lost, place = machine.doubt
    machine.doubt = None
    machine.following = follow_overflow
    if isinstance(results, list | tuple):
        return [_lost_where(each, lost, place) for each in results]
    return _lost_where(results, lost, place)


def _lost_where(value: Any, programs: Array, place: Location) -> Any:
    plain = raw(value)
    if not isinstance(plain, Pointer) and plain.dtype.kind not in "ib":
        return value
    lost = programs.reshape(-1, *[1] * rank(value))
    exact = np.where(lost, ~exactly(plain), exactly(value))
    return _kept(plain, exact, exact, place)


def _pointer(
    machine: "Machine", bound: "Bound", operands: list[Any], result: Pointer, place: Location
) -> Any:
    if bound.op.name == "tt.int_to_ptr":
        (address,) = operands
        exact = result.offset + (exactly(address) - address.value)
        return _kept(result, exact, exact, place)
    start, elements = operands  # tt.addptr
    base = raw(start)
    moved = bound.step(machine, Pointer(base.allocation, exactly(start)), exactly(elements))
    return _kept(result, moved.offset, moved.offset, place)


def _kept(value: Any, exact: Array, unsigned: Array, place: Location) -> Any:
    """The value with what it should be, or alone where they agree.

    An element that is right as a signed number makes no claim as an unsigned one.
    """
    lost = exactly(value) != exact
    if not lost.any():
        return value
    return Wrapped(value, exact, np.where(lost, unsigned, unsigned_exactly(value)), place)


def _any_lost(operands: list[Any], ndim: int) -> Array:
    """Which elements of a result of `ndim` tensor axes have an operand that lost bits."""
    lost = np.zeros([1] * (ndim + 1), np.bool_)
    for each in operands:
        if isinstance(each, Wrapped):
            own = exactly(each.value) != each.exact
            lost = lost | own.reshape(len(own), *[1] * (ndim - rank(each)), *own.shape[1:])
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
