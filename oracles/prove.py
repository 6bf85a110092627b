"""Prove of a cache plan's views, for all block ids and, where they are affine, all block counts.

Each claim is the emptiness of an integer set, which islpy decides: elements that break it. A claim
is *proved*, or *refuted* by a number of blocks and a byte that show it; `kvfuzz.oracles.byte_map`
counts the same for one number of blocks, and both must agree.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from kvfuzz.model.cache_plan import CachePlan
from kvfuzz.model.layer_view import LayerView
from kvfuzz.model.plan_views import is_in_one_piece
from kvfuzz.model.proof import Claim, Witness
from kvfuzz.oracles.overlap import (
    Bytes,
    Counts,
    first_outside,
    is_before,
    repeated_byte,
    shared_byte,
)
from kvfuzz.oracles.pieces import Affine, Piece, joined, pieces_of


class Owned(NamedTuple):
    """The bytes of a layer in one allocation: engines may keep K and V apart."""

    layer: str
    allocation: str


class Layers(NamedTuple):
    """What views are over: who is in which group, how large allocations are, what was planned."""

    group_of: Mapping[str, int]
    """By layer with a cache of its own."""
    sizes: Mapping[str, Affine]
    """Bytes by allocation."""
    plan: CachePlan | None = None
    """Where views are of a plan, whose pages they must be."""


def claims(over: Layers, made: Sequence[Sequence[LayerView]], counts: Counts) -> tuple[Claim, ...]:
    """What holds of the views `made` at each of `counts` blocks; `over.plan` has the first of them.

    With one count claims are about that number of blocks, else about every number. Raises
    NotAffineError where views are no affine function of the count.
    """
    views = [
        (made[0][at], pieces_of([each[at] for each in made], counts)) for at in range(len(made[0]))
    ]
    return (_bounds(over, views, counts), *_ownership(over, views, counts))


Views = Sequence[tuple[LayerView, tuple[Piece, ...]]]


def layers_of(plan: CachePlan, counts: Counts) -> Layers:
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


def _bounds(over: Layers, views: Views, counts: Counts) -> Claim:
    sizes, planned = over.sizes, over.plan.placement_of if over.plan else {}
    for view, pieces in views:
        at = planned.get(view.layer)
        if at is not None and at.allocation != view.allocation:
            said = f"{view.part} of {view.layer} is over {view.allocation}, not {at.allocation}"
            return Claim("bounds", "refuted", said, Witness(counts[0], view.offset, 0, 0))
        for piece in pieces:
            spare = sizes[view.allocation].plus(piece.last, -1).plus(Affine(-1))
            for outside in (spare, piece.base):
                blocks = _broken(outside, counts)
                if blocks:
                    said = f"{view.part} of {view.layer} reaches byte {piece.last.at(blocks)} of "
                    said += f"{view.allocation}, which has {sizes[view.allocation].at(blocks)}"
                    byte = piece.last.at(blocks)
                    return Claim("bounds", "refuted", said, Witness(blocks, byte, 0, 0))
    return Claim("bounds", "proved")


def _broken(value: Affine, counts: Counts) -> int:
    """A number of blocks at which `value` is negative, or 0."""
    for count in counts:
        if value.at(count) < 0:
            return count
    if len(counts) == 1 or value.is_never_negative:
        return 0
    return 1 if value.at(1) < 0 else -(value.constant // value.slope) + 1


def _ownership(over: Layers, views: Views, counts: Counts) -> list[Claim]:
    """Agreement between groups, disjointness within them, and pages.

    What a layer's blocks own means nothing where some byte of it is two elements.
    """
    parts_of: dict[Owned, list[tuple[LayerView, tuple[Piece, ...]]]] = {}
    for view, pieces in views:
        if view.layer in over.group_of:
            parts_of.setdefault(Owned(view.layer, view.allocation), []).append((view, pieces))
    tangled = {
        each.layer: found
        for each, parts in parts_of.items()
        if (found := _twice(each.layer, parts, counts))
    }
    whole = {
        each: joined([piece for _, pieces in parts for piece in pieces])
        for each, parts in parts_of.items()
        if each.layer not in tangled
    }
    same, apart = list[tuple[Owned, Owned]](), list[tuple[Owned, Owned]]()
    for one, other in combinations(whole, 2):
        if one.allocation == other.allocation:
            alike = over.group_of[one.layer] == over.group_of[other.layer]
            (same if alike else apart).append((one, other))
    within = next(iter(tangled.values()), None) or _between(whole, same, "", counts)
    return [
        _claim("aliasing", _between(whole, apart, "b != c", counts), "disagree on block"),
        _claim("disjoint", within, "share a byte of block"),
        *([_pages(over.plan, whole, counts)] if over.plan else []),
    ]


def _between(
    whole: Mapping[Owned, Sequence[Piece]],
    pairs: Sequence[tuple[Owned, Owned]],
    want: str,
    counts: Counts,
) -> "Found | None":
    """The first byte that two layers of a pair have in common, of blocks as `want` says."""
    reach = {name: _reach(pieces) for name, pieces in whole.items()}
    for one, other in pairs:
        first, second = reach[one], reach[other]
        if (
            first
            and second
            and (is_before(first[1], second[0], counts) or is_before(second[1], first[0], counts))
        ):
            continue
        for mine in whole[one]:
            for theirs in whole[other]:
                witness = shared_byte(Bytes(mine, theirs, want), counts)
                if witness is not None:
                    return Found(one.layer, other.layer, witness)
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
    name: str, parts: Sequence[tuple[LayerView, tuple[Piece, ...]]], counts: Counts
) -> Found | None:
    """A byte that is two elements of one layer, if there is one."""
    pieces = [(view.part, piece) for view, several in parts for piece in several]
    for part, piece in pieces:
        if (witness := repeated_byte(piece, counts)) is not None:
            return Found(f"{part} of {name}", f"{part} of {name}", witness)
    for (part, one), (second, other) in combinations(pieces, 2):
        if (witness := shared_byte(Bytes(one, other, ""), counts)) is not None:
            return Found(f"{part} of {name}", f"{second} of {name}", witness)
    return None


def _pages(plan: CachePlan, whole: Mapping[Owned, Sequence[Piece]], counts: Counts) -> Claim:
    """Each block has the bytes of one page, which lie in it where it is in one piece."""
    for layer in plan.owners:
        at = plan.placement_of[layer.name]
        pieces = whole.get(Owned(layer.name, at.allocation))
        if pieces is None:
            continue
        held = sum(piece.bytes_of_block for piece in pieces)
        if held != layer.page_bytes:
            said = f"a block of {layer.name} has {held} bytes, expected {layer.page_bytes}"
            return Claim("page_bytes", "refuted", said, Witness(counts[0], 0, 0, 0))
        if not is_in_one_piece(plan, layer):
            continue
        start = _start(plan, layer.name, counts)
        page = Piece(start, at.block_stride, 1, (), layer.page_bytes)
        for piece in pieces:
            found = first_outside(piece, page, counts)
            if found is not None:
                said = (
                    f"with {found.num_blocks} blocks, byte {found.byte} of block {found.block} of "
                    f"{layer.name} is outside of its page"
                )
                return Claim("page_bytes", "refuted", said, found)
    return Claim("page_bytes", "proved")


def _start(plan: CachePlan, name: str, counts: Counts) -> Affine:
    """The first byte of a layer, for any number of blocks where it is planned for any."""
    at = plan.placement_of[name]
    start = at.offset + at.layers.index(name) * at.layer_stride
    if len(counts) == 1 or not plan.kv_layout.startswith("L"):
        return Affine(start)
    # Regions of whole layers: both offset and layer stride grow with the blocks.
    return Affine(0, start // plan.num_blocks)
