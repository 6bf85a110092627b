"""Where a value's bytes were loaded from, followed through copies, casts and arithmetic.

Used to explain a finding, not to find one. An origin is one int64 per element: the allocation's
number above bit 48, the byte offset below, -1 for none. Control flow and changes of shape carry
traces along by themselves; what remains is here.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from kvfuzz.cpu.access import NO_ORIGIN
from kvfuzz.cpu.accesses import active_lanes
from kvfuzz.cpu.values import Pointer, Traced, raw

if TYPE_CHECKING:
    from kvfuzz.cpu.machine import Bound, Machine


def follow_origins(machine: "Machine", bound: "Bound", operands: list[Any]) -> Any:
    """Run one op, and let the result know where its bytes came from."""
    if bound.carries:
        return bound.step(machine, *operands)
    return _FOLLOW.get(bound.op.name, _follow_value)(machine, bound, operands)


def _follow_value(machine: "Machine", bound: "Bound", operands: list[Any]) -> Any:
    """The result comes from the widest traced operand, the first of equals."""
    result = bound.step(machine, *[raw(value) for value in operands])
    if len(bound.results) != 1 or isinstance(result, Pointer):
        return result
    traced = [value for value in operands if isinstance(value, Traced)]
    if not traced:
        return result
    best = max(traced, key=lambda value: value.origin.size)
    exact = bound.op.name.endswith(".bitcast") and best.exact
    return Traced(result, best.origin, exact)


def _follow_load(machine: "Machine", bound: "Bound", operands: list[Any]) -> Any:
    """The result comes from where it was loaded, for active lanes at or past the start."""
    pointer, *rest = [raw(value) for value in operands]
    result = bound.step(machine, pointer, *rest)
    origin = machine.memory.origins(pointer)
    active = active_lanes(machine, rest[0] if rest else None, len(bound.op.type.shape))
    known = pointer.offset >= 0
    known = known if active is None else known & active
    return Traced(result, np.where(known, origin, NO_ORIGIN), True)


def _follow_store(machine: "Machine", bound: "Bound", operands: list[Any]) -> None:
    """Store, then write the value's origin next to its bytes."""
    pointer, value, *rest = operands
    mask = raw(rest[0]) if rest else None
    bound.step(machine, raw(pointer), raw(value), *([] if mask is None else [mask]))
    origin, exact = np.full([1] * raw(value).ndim, NO_ORIGIN), False
    if isinstance(value, Traced):
        origin, exact = value.origin, value.exact
    machine.memory.record_origins(bound.op, machine, raw(pointer), origin, mask, exact)


_FOLLOW = {
    "tt.load": _follow_load,
    "tt.atomic_load": _follow_load,
    "tt.store": _follow_store,
    "tt.atomic_store": _follow_store,
}
