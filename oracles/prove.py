"""Prove of a cache plan's views, for all block ids and, where they are affine, all block counts.

Each claim is the emptiness of an integer set, which islpy decides: elements that break it. A claim
is *proved*, or *refuted* by a number of blocks and a byte that show it; `kvfuzz.oracles.byte_map`
counts the same for one number of blocks, and both must agree.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import NamedTuple

import islpy
import msgspec

from kvfuzz.model.cache_plan import CachePlan
from kvfuzz.model.layer_view import LayerView
from kvfuzz.model.plan_views import is_in_one_piece
from kvfuzz.model.proof import Claim, Witness
from kvfuzz.oracles.pieces import Affine, Piece, joined, pieces_of

SMALL = 6
"""Up to so many blocks a counterexample is looked for first."""


class Layers(NamedTuple):
    """What views are over: who is in which group, how large allocations are, what was planned."""

    group_of: Mapping[str, int]
    """By layer with a cache of its own."""
    sizes: Mapping[str, Affine]
    """Bytes by allocation."""
    plan: CachePlan | None = None
    """Where views are of a plan, whose pages they must be."""


class Bytes(NamedTuple):
    """Two elements that may be one byte, as conditions on (B, b, c, x); `want` relates b and c."""

    one: Piece
    other: Piece
    want: str


def claims(
    over: Layers, made: Sequence[Sequence[LayerView]], counts: Sequence[int]
) -> tuple[Claim, ...]:
    """What holds of the views `made` at each of `counts` blocks; `over.plan` has the first of them.

    With one count claims are about that number of blocks, else about every number. Raises
    NotAffineError where views are no affine function of the count.
    """
    fixed = counts[0] if len(counts) == 1 else 0
    views = [
        (made[0][at], pieces_of([each[at] for each in made], counts)) for at in range(len(made[0]))
    ]
    return (_bounds(views, over.sizes, fixed), *_ownership(over, views, fixed))


Views = Sequence[tuple[LayerView, tuple[Piece, ...]]]


def layers_of(plan: CachePlan, counts: Sequence[int]) -> Layers:
    """The layers of a plan; its allocations have as many times more bytes as there are blocks."""
    group_of = plan.group_of
    return Layers(
        {layer.name: group_of[layer.name] for layer in plan.owners},
        {
            each.name: Affine(each.nbytes)
            if len(counts) == 1
            else Affine(0, each.nbytes // plan.num_blocks)
            for each in plan.allocations
        },
        plan,
    )


def _bounds(views: Views, sizes: Mapping[str, Affine], fixed: int) -> Claim:
    for view, pieces in views:
        for piece in pieces:
            spare = sizes[view.allocation].plus(piece.last, -1).plus(Affine(-1))
            for outside in (spare, piece.base):
                blocks = _broken(outside, fixed)
                if blocks:
                    said = f"{view.part} of {view.layer} reaches byte {piece.last.at(blocks)} of "
                    said += f"{view.allocation}, which has {sizes[view.allocation].at(blocks)}"
                    byte = piece.last.at(blocks)
                    return Claim("bounds", "refuted", said, Witness(blocks, byte, 0, 0))
    return Claim("bounds", "proved")


def _broken(value: Affine, fixed: int) -> int:
    """A number of blocks at which `value` is negative, or 0."""
    if fixed:
        return fixed if value.at(fixed) < 0 else 0
    if value.is_never_negative:
        return 0
    return 1 if value.at(1) < 0 else -(value.constant // value.slope) + 1


def _ownership(over: Layers, views: Views, fixed: int) -> list[Claim]:
    """Agreement between groups, disjointness within them, and pages.

    What a layer's blocks own means nothing where some byte of it is two elements.
    """
    by_layer: dict[str, list[tuple[LayerView, tuple[Piece, ...]]]] = {}
    for view, pieces in views:
        if view.layer in over.group_of:
            by_layer.setdefault(view.layer, []).append((view, pieces))
    tangled = {
        name: found for name, parts in by_layer.items() if (found := _twice(name, parts, fixed))
    }
    whole = {
        name: joined([piece for _, pieces in parts for piece in pieces])
        for name, parts in by_layer.items()
        if name not in tangled
    }
    same, apart = list[tuple[str, str]](), list[tuple[str, str]]()
    for one, other in combinations(whole, 2):
        if by_layer[one][0][0].allocation == by_layer[other][0][0].allocation:
            alike = over.group_of[one] == over.group_of[other]
            (same if alike else apart).append((one, other))
    within = next(iter(tangled.values()), None) or _between(whole, same, "", fixed)
    return [
        _claim("aliasing", _between(whole, apart, "b != c", fixed), "disagree on block"),
        _claim("disjoint", within, "share a byte of block"),
        *([_pages(over.plan, whole, fixed)] if over.plan else []),
    ]


def _between(
    whole: Mapping[str, Sequence[Piece]], pairs: Sequence[tuple[str, str]], want: str, fixed: int
) -> "Found | None":
    """The first byte that two layers of a pair have in common, of blocks as `want` says."""
    reach = {name: _reach(pieces) for name, pieces in whole.items()}
    for one, other in pairs:
        first, second = reach[one], reach[other]
        if (
            first
            and second
            and (_before(first[1], second[0], fixed) or _before(second[1], first[0], fixed))
        ):
            continue
        for mine in whole[one]:
            for theirs in whole[other]:
                witness = shared_byte(Bytes(mine, theirs, want), fixed)
                if witness is not None:
                    return Found(one, other, witness)
    return None


class Found(NamedTuple):
    """Two parts, or layers, with the byte that shows what they have in common."""

    one: str
    other: str
    witness: Witness


def _reach(pieces: Sequence[Piece]) -> tuple[Affine, Affine] | None:
    """The first and the last byte of all pieces, if they are the same for every block count."""
    first = min((piece.base for piece in pieces), key=lambda base: base.at(1))
    last = max((piece.last for piece in pieces), key=lambda end: end.at(1))
    steady = all(
        piece.base.plus(first, -1).is_never_negative and last.plus(piece.last, -1).is_never_negative
        for piece in pieces
    )
    return (first, last) if steady else None


def _claim(name: str, found: Found | None, what: str) -> Claim:
    if found is None:
        return Claim(name, "proved")
    at = found.witness
    said = (
        f"with {at.num_blocks} blocks, {found.one} and {found.other} {what} {at.other}: byte "
        f"{at.byte} is in block {at.other} of {found.other} and in block {at.block} of {found.one}"
    )
    return Claim(name, "refuted", said, at)


def _twice(
    name: str, parts: Sequence[tuple[LayerView, tuple[Piece, ...]]], fixed: int
) -> Found | None:
    """A byte that is two elements of one layer, if there is one."""
    pieces = [(view.part, piece) for view, several in parts for piece in several]
    for part, piece in pieces:
        if (witness := repeated_byte(piece, fixed)) is not None:
            return Found(f"{part} of {name}", f"{part} of {name}", witness)
    for (part, one), (second, other) in combinations(pieces, 2):
        if (witness := shared_byte(Bytes(one, other, ""), fixed)) is not None:
            return Found(f"{part} of {name}", f"{second} of {name}", witness)
    return None


def _pages(plan: CachePlan, whole: Mapping[str, Sequence[Piece]], fixed: int) -> Claim:
    """Each block has the bytes of one page, which lie in it where it is in one piece."""
    for layer in (each for each in plan.owners if each.name in whole):
        held = sum(piece.bytes_of_block for piece in whole[layer.name])
        if held != layer.page_bytes:
            said = f"a block of {layer.name} has {held} bytes, expected {layer.page_bytes}"
            return Claim("page_bytes", "refuted", said, Witness(fixed or 1, 0, 0, 0))
        if not is_in_one_piece(plan, layer):
            continue
        at = plan.placement_of[layer.name]
        start = _start(plan, layer.name, fixed)
        page = Piece(start, at.block_stride, 1, (), layer.page_bytes)
        for piece in whole[layer.name]:
            found = _outside(piece, page, fixed)
            if found is not None:
                said = (
                    f"with {found.num_blocks} blocks, byte {found.byte} of block {found.block} of "
                    f"{layer.name} is outside of its page"
                )
                return Claim("page_bytes", "refuted", said, found)
    return Claim("page_bytes", "proved")


def _start(plan: CachePlan, name: str, fixed: int) -> Affine:
    """The first byte of a layer, for any number of blocks where it is planned for any."""
    at = plan.placement_of[name]
    start = at.offset + at.layers.index(name) * at.layer_stride
    if fixed or not plan.kv_layout.startswith("L"):
        return Affine(start)
    # Regions of whole layers: both offset and layer stride grow with the blocks.
    return Affine(0, start // plan.num_blocks)


def shared_byte(query: Bytes, fixed: int) -> Witness | None:
    """A byte of both pieces, in blocks that `query.want` allows, if there is one."""
    one, other = query.one, query.other
    if _apart(one, other, fixed):
        return None
    # The same question is asked of many layers: only the distance of the pieces matters.
    base = one.base
    found = _decided(
        one._replace(base=Affine(0)),
        other._replace(base=other.base.plus(base, -1)),
        query.want,
        fixed,
    )
    return None if found is None else _moved(found, base)


def _apart(one: Piece, other: Piece, fixed: int) -> bool:
    """Whether two pieces are seen to have no byte in common without solving anything: all bytes of
    one lie before those of the other, or in another part of each block."""
    return (
        _before(one.last, other.base, fixed)
        or _before(other.last, one.base, fixed)
        or _beside(one, other)
    )


def _before(last: Affine, first: Affine, fixed: int) -> bool:
    """Whether `last` is below `first`, for every number of blocks or for `fixed`."""
    room = first.plus(last, -1).plus(Affine(-1))
    return room.at(fixed) >= 0 if fixed else room.is_never_negative


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
def _decided(one: Piece, other: Piece, want: str, fixed: int) -> Witness | None:
    mine, theirs = _element(one, "b", "p"), _element(other, "c", "q")
    wanted = [*mine.conditions, *theirs.conditions, *([want] if want else [])]
    return _solved(wanted, mine.variables + theirs.variables, fixed)


@cache
def _repeated(piece: Piece, fixed: int) -> Witness | None:
    mine, theirs = _element(piece, "b", "p"), _element(piece, "c", "q")
    different = [
        "b != c",
        *(f"{p} != {q}" for p, q in zip(mine.counts, theirs.counts, strict=True)),
    ]
    wanted = [*mine.conditions, *theirs.conditions, f"({' or '.join(different)})"]
    return _solved(wanted, mine.variables + theirs.variables, fixed)


def repeated_byte(piece: Piece, fixed: int) -> Witness | None:
    """A byte that is two elements of one piece, if there is one."""
    found = _repeated(piece._replace(base=Affine(0)), fixed)
    return None if found is None else _moved(found, piece.base)


def _moved(found: Witness, base: Affine) -> Witness:
    """A witness among pieces that begin at `base`."""
    return msgspec.structs.replace(found, byte=found.byte + base.at(found.num_blocks))


def _outside(piece: Piece, page: Piece, fixed: int) -> Witness | None:
    """A byte of `piece` that is not in the page of its block."""
    mine = _element(piece, "b", "p")
    page_start = f"({_text(page.base)} + {page.stride} * b)"
    outside = f"(x < {page_start} or x >= {page_start} + {page.run})"
    return _solved([*mine.conditions, "c = b", outside], mine.variables, fixed)


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


def _solved(conditions: Sequence[str], variables: Sequence[str], fixed: int) -> Witness | None:
    """A point of the set that the conditions describe, with few blocks; None where it is empty."""
    exists = f"exists {', '.join(variables)} : " if variables else ""
    text = f"{{ [B, b, c, x] : {exists}{' and '.join(conditions)} and B >= 1 }}"
    points = islpy.Set(text)
    if fixed:
        points = points.intersect(islpy.Set(f"{{ [B, b, c, x] : B = {fixed} }}"))
    if points.is_empty():
        return None
    for most in range(1, SMALL + 1):
        few = points.intersect(islpy.Set(f"{{ [B, b, c, x] : B <= {most} }}"))
        if not few.is_empty():
            points = few
            break
    point = points.lexmin().sample_point()
    values = [int(str(point.get_coordinate_val(islpy.dim_type.set, at))) for at in range(4)]
    return Witness(values[0], values[3], values[1], values[2])
