"""The address space: which bytes belong to which allocation, by number and by address."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.errors import LaneError
from kvfuzz.cpu.reserve import LARGE, address_of
from kvfuzz.cpu.values import UNRESOLVED

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Allocation:
    """`bytes` is uint8 `[nbytes]` in place; `address` is that of its first byte."""

    name: str
    number: int
    address: int
    bytes: Array
    keeper: Any = None  # whatever must live as long as the bytes do
    views: dict[Any, Array] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return len(self.bytes)

    @property
    def is_large(self) -> bool:
        """Whether records of it are kept by page, because most of it is never touched."""
        return self.nbytes >= LARGE

    def typed(self, dtype: Any) -> Array:
        """The bytes as elements of `dtype`; a tail shorter than one element is left out."""
        view = self.views.get(dtype)
        if view is None:
            size = np.dtype(dtype).itemsize
            view = self.bytes[: len(self.bytes) // size * size].view(dtype)
            self.views[dtype] = view
        return view


class AddressSpace:
    """Allocations by number, by name and by absolute address.

    A number is used again after `restart` only: an origin has 15 bits for it, and a worker makes a
    million allocations in its life.
    """

    def __init__(self) -> None:
        self.allocations: dict[int, Allocation] = {}
        self._by_name: dict[str, int] = {}
        self._by_address: dict[int, int] = {}
        self._next_number = 0
        self._sorted: tuple[Array, Array, Array] | None = None

    def add(self, name: str, memory: Array, keeper: Any = None) -> Allocation:
        """Register uint8 `memory`. Raises `LaneError` if `name` is taken."""
        if name in self._by_name:
            raise LaneError(f"name={name!r} is allocated already; release it first")
        number, address = self._next_number, address_of(memory)
        self._next_number += 1
        allocation = Allocation(name, number, address, memory, keeper)
        self.allocations[number] = allocation
        self._by_name[name] = number
        self._by_address[address] = number
        self._sorted = None
        return allocation

    def remove(self, number: int) -> None:
        """Forget one allocation; its number is not used again."""
        allocation = self.allocations.pop(number)
        del self._by_name[allocation.name]
        if self._by_address.get(allocation.address) == number:
            del self._by_address[allocation.address]
        self._sorted = None

    def restart(self) -> None:
        """Count numbers from 0 again. Nothing may be known by its number any more."""
        if not self.allocations:
            self._next_number = 0

    def named(self, name: str) -> Allocation | None:
        """The live allocation of that name."""
        number = self._by_name.get(name)
        return None if number is None else self.allocations[number]

    def at(self, address: int) -> Allocation | None:
        """The allocation that starts at `address`, else the one that holds it."""
        number = self._by_address.get(address)
        if number is None:
            number = int(self.find(np.array([address], np.int64))[0])
        allocation = self.allocations.get(number)
        if allocation is None or address - allocation.address > max(allocation.nbytes - 1, 0):
            return None
        return allocation

    def find(self, addresses: Array) -> Array:
        """Allocation number for each absolute address (int64), `UNRESOLVED` where there is none.

        One past the end still counts, as a pointer may stand there.
        """
        if self._sorted is None:
            live = sorted(self.allocations.values(), key=lambda each: each.address)
            starts = np.array([each.address for each in live], np.int64)
            ends = np.array([each.address + each.nbytes for each in live], np.int64)
            numbers = np.array([each.number for each in live], np.int64)
            self._sorted = (starts, ends, numbers)
        starts, ends, numbers = self._sorted
        if not len(starts):
            return np.full(addresses.shape, UNRESOLVED, np.int64)
        at = np.searchsorted(starts, addresses, side="right") - 1
        inside = (at >= 0) & (addresses <= ends[at])
        return np.where(inside, numbers[at], UNRESOLVED)

    def unused_name(self, wanted: str) -> str:
        """`wanted`, or `wanted#2` and so on if that is taken."""
        name, count = wanted, 1
        while name in self._by_name:
            count += 1
            name = f"{wanted}#{count}"
        return name
