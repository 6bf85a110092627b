"""Which bytes of a buffer an image holds: all of a small one, a few spans of a large one.

A cache of many GiB is drawn to let addresses run past 2**31, not to be filled. Of such a buffer
only the blocks that the steps name are filled and compared, with their neighbours, the blocks of
Mamba state, and the first and last block; every other byte starts as zero and must not be written.
Derived from the case, never stored.
"""

from bisect import bisect_right
from collections import deque
from itertools import accumulate

import msgspec

from kvfuzz.model.case import Program
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.fill import LARGE
from kvfuzz.model.layout import Field
from kvfuzz.model.round_trip import touched_blocks

ALIGNMENT = 64
"""Spans begin and end at multiples of this many bytes, or at the buffer's end."""


class Held(msgspec.Struct, frozen=True):
    """The spans `(start, stop)` of a buffer of `nbytes` bytes, ascending and disjoint.

    A *position* counts the held bytes, span after span.
    """

    nbytes: int
    spans: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        """Whether every byte is held, so that positions are addresses."""
        return self.spans == ((0, self.nbytes),)

    @property
    def size(self) -> int:
        """How many bytes are held."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The position of each span's first byte."""
        return (0, *accumulate(stop - start for start, stop in self.spans[:-1]))

    def address(self, position: int) -> int:
        """The byte address at a position."""
        number = bisect_right(self.firsts, position) - 1
        return self.spans[number][0] + position - self.firsts[number]

    def position(self, address: int) -> int:
        """The position of a byte address. Raises ValueError where it is not held."""
        number = bisect_right([start for start, _ in self.spans], address) - 1
        if number < 0 or address >= self.spans[number][1]:
            raise ValueError(f"byte {address} is not held")
        return self.firsts[number] + address - self.spans[number][0]


def whole(nbytes: int) -> Held:
    """All bytes of a buffer."""
    return Held(nbytes, ((0, nbytes),))


def held(case: Program, name: str) -> Held:
    """What an image of the buffer `name` holds."""
    by_name = next((found for known, found in _recent if known is case), None)
    if by_name is None:
        by_name = dict[str, Held]()
        _recent.appendleft((case, by_name))
    if name not in by_name:
        nbytes = case.buffer(name).nbytes
        by_name[name] = whole(nbytes) if nbytes < LARGE else _spans(case, name)
    return by_name[name]


# A case holds dicts and cannot be a key; a few of them are asked about again and again.
_recent: deque[tuple[Program, dict[str, Held]]] = deque(maxlen=4)


def _spans(case: Program, name: str) -> Held:
    nbytes = case.buffer(name).nbytes
    spans = sorted(
        (max(start, 0) // ALIGNMENT * ALIGNMENT, min(-(-stop // ALIGNMENT) * ALIGNMENT, nbytes))
        for field in case.fields
        if field.buffer == name
        for block in held_blocks(case, field)
        for start, stop in _pieces(field, block)
    )
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return Held(nbytes, tuple(merged))


def held_blocks(case: Program, field: Field) -> list[int]:
    """The blocks of a field in a large buffer that are held whole."""
    if "block" not in field.extents:
        return [0]
    last = field.extents["block"] - 1
    named = {block for step in case.steps for block in touched_blocks(case, step, field.buffer)}
    near = {block + by for block in named for by in (-1, 0, 1)} | {0, last}
    return sorted(block for block in {*near, *field.blocks} if 0 <= block <= last)


def _pieces(field: Field, block: int) -> list[tuple[int, int]]:
    """The bytes from the first to the last of one block of a field, for each head outside of it.

    A term that takes wider steps than blocks do (heads outside of blocks, regions of state) makes a
    piece of each of its digits; the others reach from a piece's first byte to its last.
    """
    inner = dict.fromkeys(field.extents, 0) | {"block": block}
    starts = [field.byte({axis: inner[axis] for axis in field.extents})]
    stride = next((term.stride for term in field.terms if term.axis == "block"), 0)
    reach = 0
    for term in field.terms:
        digits = term.digits(field.extents[term.axis])
        if term.axis == "block":
            continue
        if stride and term.stride > stride:
            starts = [start + digit * term.stride for start in starts for digit in range(digits)]
        else:
            reach += term.stride * (digits - 1)
    return [(start, start + reach + itemsize(field.dtype)) for start in starts]
