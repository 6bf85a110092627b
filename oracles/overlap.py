"""Whether pieces of a cache have a byte in common, decided as the emptiness of integer sets.

A set holds (B, b, c, x): with B blocks, byte x is of block b of one piece and of block c of the
other. What is plain to see (all bytes of one lie before those of the other) is not handed to islpy.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import islpy
import msgspec

from kvfuzz.model.proof import Witness
from kvfuzz.oracles.pieces import Affine, Piece

SMALL = 6
"""Up to so many blocks a counterexample is looked for first."""


Counts = tuple[int, ...]
"""The numbers of blocks that a builder was asked for: one, for which alone something is decided, or
several, from which it is decided for every number."""


class Bytes(NamedTuple):
    """Two elements that may be one byte, as conditions on (B, b, c, x); `want` relates b and c."""

    one: Piece
    other: Piece
    want: str


def shared_byte(query: Bytes, counts: Counts) -> Witness | None:
    """A byte of both pieces, in blocks that `query.want` allows, if there is one."""
    one, other = query.one, query.other
    if _apart(one, other, counts):
        return None
    # The same question is asked of many layers: only the distance of the pieces matters.
    base = one.base
    found = _decided(
        one._replace(base=Affine(0)),
        other._replace(base=other.base.plus(base, -1)),
        query.want,
        counts,
    )
    return None if found is None else _moved(found, base)


def _apart(one: Piece, other: Piece, counts: Counts) -> bool:
    """Whether two pieces are seen to have no byte in common without solving anything: all bytes of
    one lie before those of the other, or in another part of each block."""
    return (
        is_before(one.last, other.base, counts)
        or is_before(other.last, one.base, counts)
        or _beside(one, other)
    )


def is_before(last: Affine, first: Affine, counts: Counts) -> bool:
    """Whether `last` is below `first`, for every number of blocks or for the only one."""
    room = first.plus(last, -1).plus(Affine(-1))
    return room.at(counts[0]) >= 0 if len(counts) == 1 else room.is_never_negative


def _beside(one: Piece, other: Piece) -> bool:
    """Whether blocks are equally far apart in both pieces, as far as both reach in one block
    together, where they share nothing: a common byte would be of one block in both."""
    pitch = one.stride * one.ratio
    if pitch != other.stride * other.ratio or one.base.slope != other.base.slope:
        return False
    low, high = sorted((one, other), key=lambda piece: piece.base.constant)
    gap = high.base.constant - low.base.constant
    return low.extent <= gap and gap + high.extent <= pitch


@cache
def _decided(one: Piece, other: Piece, want: str, counts: Counts) -> Witness | None:
    mine, theirs = _element(one, "b", "p"), _element(other, "c", "q")
    wanted = [*mine.conditions, *theirs.conditions, *([want] if want else [])]
    return _solved(wanted, mine.variables + theirs.variables, counts)


@cache
def _repeated(piece: Piece, counts: Counts) -> Witness | None:
    mine, theirs = _element(piece, "b", "p"), _element(piece, "c", "q")
    different = [
        "b != c",
        *(f"{p} != {q}" for p, q in zip(mine.counts, theirs.counts, strict=True)),
    ]
    wanted = [*mine.conditions, *theirs.conditions, f"({' or '.join(different)})"]
    return _solved(wanted, mine.variables + theirs.variables, counts)


def repeated_byte(piece: Piece, counts: Counts) -> Witness | None:
    """A byte that is two elements of one piece, if there is one."""
    found = _repeated(piece._replace(base=Affine(0)), counts)
    return None if found is None else _moved(found, piece.base)


def _moved(found: Witness, base: Affine) -> Witness:
    """A witness among pieces that begin at `base`."""
    return msgspec.structs.replace(found, byte=found.byte + base.at(found.num_blocks))


def first_outside(piece: Piece, page: Piece, counts: Counts) -> Witness | None:
    """A byte of `piece` that is not in the page of its block."""
    mine = _element(piece, "b", "p")
    page_start = f"({_text(page.base)} + {page.stride} * b)"
    outside = f"(x < {page_start} or x >= {page_start} + {page.run})"
    return _solved([*mine.conditions, "c = b", outside], mine.variables, counts)


class Element(NamedTuple):
    """Conditions under which x is a byte of block `b` of a piece."""

    variables: list[str]
    counts: list[str]
    conditions: list[str]


def _text(value: Affine) -> str:
    return f"{value.constant} + {value.slope} * B"


def _element(piece: Piece, block: str, prefix: str) -> Element:
    counts = [f"{prefix}{number}" for number in range(len(piece.axes) + 1)]
    within = f"{prefix}e"
    sizes = [piece.ratio, *(count for count, _ in piece.axes)]
    terms = [
        _text(piece.base),
        f"{piece.stride * piece.ratio} * {block} + {piece.stride} * {counts[0]}",
        *(f"{stride} * {name}" for name, (_, stride) in zip(counts[1:], piece.axes, strict=True)),
        within,
    ]
    conditions = [
        f"0 <= {block} < B",
        *(f"0 <= {name} < {size}" for name, size in zip(counts, sizes, strict=True)),
        f"0 <= {within} < {piece.run}",
        f"x = {' + '.join(terms)}",
    ]
    return Element([*counts, within], counts, conditions)


def _solved(conditions: Sequence[str], variables: Sequence[str], counts: Counts) -> Witness | None:
    """A point of the set that the conditions describe, None where it is empty: with as many blocks
    as the builder was asked for if there is one, else with few."""
    exists = f"exists {', '.join(variables)} : " if variables else ""
    points = islpy.Set(
        f"{{ [B, b, c, x] : {exists}{' and '.join(conditions)} and B >= 1 }}"
        if len(counts) > 1
        else f"{{ [B, b, c, x] : {exists}{' and '.join(conditions)} and B = {counts[0]} }}"
    )
    if points.is_empty():
        return None
    for few in (*(f"B = {count}" for count in counts), f"B <= {SMALL}"):
        some = points.intersect(islpy.Set(f"{{ [B, b, c, x] : {few} }}"))
        if not some.is_empty():
            points = some
            break
    point = _lowest(points)
    values = [int(str(point.get_coordinate_val(islpy.dim_type.set, at))) for at in range(4)]
    return Witness(values[0], values[3], values[1], values[2])


def _lowest(points: islpy.Set) -> islpy.Point:
    """The first point, or some point where isl gives up on the order of many."""
    try:
        return points.lexmin().sample_point()
    except islpy.Error:
        return points.sample_point()


def forget() -> None:
    """Drop the answers that are remembered: to measure how long they take."""
    _decided.cache_clear()
    _repeated.cache_clear()
