"""Loads and stores of whole grids: bounds by allocation, poison for stray reads, all recorded.

An active store outside its pointer's allocation is dropped, an active load there gives poison, and
both are recorded. Stores are applied in program order within one op: the last program wins.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.access import ORIGIN_SHIFT, Access, Kind, Stray
from kvfuzz.cpu.accesses import Programs, active_lanes, chosen_by, elements_at
from kvfuzz.cpu.elements import gather, in_bounds, index_of, scatter
from kvfuzz.cpu.ir import Op
from kvfuzz.cpu.space import AddressSpace, Allocation
from kvfuzz.cpu.values import STORAGE, UNRESOLVED, Mask, Pointer

Array = NDArray[Any]


@dataclass(slots=True)
class Memory:
    """An address space with the `poison` byte for stray reads, and who is watching."""

    space: AddressSpace
    poison: int
    access: Access | None = None

    def poison_value(self, element: str) -> Array:
        """One element of `element` whose every byte is poison; shape `[1]`."""
        dtype = np.dtype(STORAGE[element])
        if dtype == np.bool_:
            return np.array([bool(self.poison & 1)])
        return np.full(dtype.itemsize, self.poison, np.uint8).view(dtype)

    def load(
        self,
        op: Op,
        programs: Programs,
        pointer: Pointer,
        mask: Mask,
        other: Array | None,
        *,
        ordered: bool = False,
    ) -> Array:
        """Elements of `op`'s result type; masked-off lanes hold `other`, or poison.

        `ordered` accesses, atomic ones, cannot race.
        """
        element = op.type.element
        dtype = np.dtype(STORAGE[element])
        active = active_lanes(programs, mask, len(op.type.shape))
        fill = self.poison_value(element) if other is None else other
        if isinstance(pointer.allocation, int) and pointer.allocation != UNRESOLVED:
            allocation = self.space.allocations[pointer.allocation]
            return self._load(
                op, programs, allocation, pointer.offset, active, fill, dtype, ordered
            )
        result = fill
        for allocation, offset, here in self._parts(op, "read", programs, pointer, active):
            part = self._load(op, programs, allocation, offset, here, fill, dtype, ordered)
            result = np.where(here, part, result)
        return result

    def store(
        self,
        op: Op,
        programs: Programs,
        pointer: Pointer,
        value: Array,
        mask: Mask,
        *,
        ordered: bool = False,
    ) -> None:
        """Write `value` where active; `op`'s first operand is the pointer.

        `ordered` accesses, atomic ones, cannot race.
        """
        active = active_lanes(programs, mask, len(op.operand_types[0].shape))
        if isinstance(pointer.allocation, int) and pointer.allocation != UNRESOLVED:
            allocation = self.space.allocations[pointer.allocation]
            self._store(op, programs, allocation, pointer.offset, value, active, ordered)
            return
        for allocation, offset, here in self._parts(op, "write", programs, pointer, active):
            self._store(op, programs, allocation, offset, value, here, ordered)

    def record_origins(
        self, op: Op, programs: Programs, pointer: Pointer, origin: Array, mask: Mask, exact: bool
    ) -> None:
        """After a store: note for every byte written where its value was loaded from."""
        if self.access is None:
            return
        active = active_lanes(programs, mask, len(op.operand_types[0].shape))
        size = op.operand_types[0].nbytes
        for allocation, offset, here in self._parts(op, None, programs, pointer, active):
            inside = here & (offset >= 0) & (offset <= allocation.nbytes - size)
            shape = np.broadcast_shapes(inside.shape, origin.shape)
            at = np.broadcast_to(offset, shape)[np.broadcast_to(inside, shape)]
            came = np.broadcast_to(origin, shape)[np.broadcast_to(inside, shape)]
            for byte in range(size):
                known = np.where(came < 0, came, came + (byte if exact else 0))
                self.access.note_origin(allocation, at + byte, known)

    def origins(self, pointer: Pointer) -> Array:
        """The origin of each byte a load through `pointer` would start at, -1 if unresolved."""
        number = np.asarray(pointer.allocation, np.int64)
        return np.where(number < 0, -1, (number << ORIGIN_SHIFT) + pointer.offset)

    def _parts(
        self, op: Op, kind: Kind | None, programs: Programs, pointer: Pointer, active: Array | None
    ) -> list[tuple[Allocation, Array, Array]]:
        """Split by allocation: its offsets and the active lanes there. Records the homeless."""
        numbers = np.asarray(pointer.allocation, np.int64)
        offset = pointer.offset
        if (numbers == UNRESOLVED).any():
            found = self.space.find(offset)
            numbers = np.where(numbers == UNRESOLVED, found, numbers)
            starts = {number: each.address for number, each in self.space.allocations.items()}
            for number in np.unique(found[found != UNRESOLVED]):
                absolute = (np.asarray(pointer.allocation) == UNRESOLVED) & (found == number)
                offset = np.where(absolute, offset - starts[int(number)], offset)
        numbers = np.broadcast_to(numbers, np.broadcast_shapes(numbers.shape, offset.shape))
        parts = []
        for number in np.unique(numbers):
            here = numbers == number if active is None else (numbers == number) & active
            if not here.any():
                continue
            if number != UNRESOLVED:
                parts.append((self.space.allocations[int(number)], offset, here))
            elif kind is not None:
                self._stray(op, kind, programs, None, offset, here)
        return parts

    def _load(
        self,
        op: Op,
        programs: Programs,
        allocation: Allocation,
        offset: Array,
        active: Array | None,
        fill: Array,
        dtype: np.dtype[Any],
        ordered: bool,
    ) -> Array:
        size = dtype.itemsize
        safe = offset if active is None else np.where(active, offset, 0)
        if in_bounds(safe, allocation.nbytes - size):
            index = index_of(safe, size)
            if self.access is not None:
                self._note_read(op, programs, allocation, safe, index, active, size, ordered)
            wanted = gather(allocation, safe, dtype, index)
            return wanted if active is None else np.where(active, wanted, fill)
        inside = self._inside(op, "read", programs, allocation, offset, active, size)
        poison = self.poison_value(op.type.element)
        wanted = np.broadcast_to(poison, inside.shape)
        if inside.any():
            safe = np.where(inside, offset, 0)
            index = index_of(safe, size)
            if self.access is not None:
                self._note_read(op, programs, allocation, safe, index, inside, size, ordered)
            wanted = np.where(inside, gather(allocation, safe, dtype, index), poison)
        return wanted if active is None else np.where(active, wanted, fill)

    def _store(
        self,
        op: Op,
        programs: Programs,
        allocation: Allocation,
        offset: Array,
        value: Array,
        active: Array | None,
        ordered: bool,
    ) -> None:
        size, highest = value.dtype.itemsize, allocation.nbytes - value.dtype.itemsize
        parts = (offset.shape, value.shape) + (() if active is None else (active.shape,))
        shape = np.broadcast_shapes(*parts)
        lanes = None if active is None else np.flatnonzero(np.broadcast_to(active, shape))
        at, kept = elements_at(offset, lanes, shape), elements_at(value, lanes, shape)
        if not in_bounds(at, highest):
            inside = self._inside(op, "write", programs, allocation, offset, active, size)
            lanes = np.flatnonzero(np.broadcast_to(inside, shape))
            at, kept = elements_at(offset, lanes, shape), elements_at(value, lanes, shape)
        index = index_of(at, size)
        if self.access is not None and len(at):
            self.access.marks(allocation).note("write", at, size, index)
            chosen = chosen_by(op, programs, at, index, lanes, shape)
            self.access.races.wrote(chosen, allocation, kept, atomic=ordered)
        scatter(allocation, at, kept, index)

    def _note_read(
        self,
        op: Op,
        programs: Programs,
        allocation: Allocation,
        offset: Array,
        index: Array | None,
        inside: Array | None,
        size: int,
        ordered: bool,
    ) -> None:
        """Note a load from the elements in `inside` (None: all); the other offsets are 0."""
        if self.access is None:
            return
        at, of = offset, index
        if inside is not None:
            shape = np.broadcast_shapes(offset.shape, inside.shape)
            here = np.broadcast_to(inside, shape)
            of = None if index is None else np.broadcast_to(index, shape)[here]
            # Of a small allocation the indices are enough.
            if of is None or allocation.is_large:
                at = np.broadcast_to(offset, shape)[here]
        if not (at if of is None else of).size:
            return
        self.access.marks(allocation).note("read", at, size, of)
        if self.access.races.with_readers and not ordered:
            shape = (programs.num_programs, *op.operand_types[0].shape)
            lanes = None if inside is None else np.flatnonzero(np.broadcast_to(inside, shape))
            at = elements_at(offset, lanes, shape)
            chosen = chosen_by(op, programs, at, index_of(at, size), lanes, shape)
            self.access.races.read(chosen, allocation, size)

    def _inside(
        self,
        op: Op,
        kind: Kind,
        programs: Programs,
        allocation: Allocation,
        offset: Array,
        active: Array | None,
        size: int,
    ) -> Array:
        """Active lanes within the allocation; records those outside."""
        good: Array = (offset >= 0) & (offset <= allocation.nbytes - size)
        if active is None:
            stray, inside = ~good, good
        else:
            stray, inside = active & ~good, active & good
        if stray.any():
            self._stray(op, kind, programs, allocation, offset, stray)
        return inside

    def _stray(
        self,
        op: Op,
        kind: Kind,
        programs: Programs,
        allocation: Allocation | None,
        offset: Array,
        stray: Array,
    ) -> None:
        if self.access is None:
            return
        shape = (programs.num_programs, *op.operand_types[0].shape)
        everywhere = np.broadcast_to(stray, shape)
        if programs.mask is not None:
            everywhere = everywhere & programs.mask.reshape(-1, *[1] * (len(shape) - 1))
        first = int(everywhere.argmax())
        where = np.unravel_index(first, shape)
        record = Stray(
            kind,
            programs.kernel,
            op.location.name,
            op.location.line,
            programs.program_ids(int(where[0])),
            allocation.name if allocation else "?",
            int(np.broadcast_to(offset, shape)[where]),
            op.operand_types[0].nbytes,
            int(np.count_nonzero(everywhere)),
        )
        if allocation is not None:
            self.access.marks(allocation)
        number = allocation.number if allocation else UNRESOLVED
        self.access.add_stray((id(op), kind, number), record)
