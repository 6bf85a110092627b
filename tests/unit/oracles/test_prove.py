"""Pieces hold the bytes of their views, and a proof says what counting them says."""

import itertools
import random
from collections import Counter

import pytest
from cache_plans import bytes_of_piece, bytes_of_view

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layer_view import LayerView
from kvfuzz.oracles.overlap import Bytes, _apart, _beside, repeated_byte, shared_byte
from kvfuzz.oracles.pieces import (
    MOST_UNROLLED,
    Affine,
    NotAffineError,
    Piece,
    collapsed,
    fitted,
    joined,
    pieces_of,
)
from kvfuzz.oracles.prove import Layers, claims

COUNTS = (3, 4, 7)
FEW = range(1, 6)


def _all(pieces, num_blocks):
    return sum((bytes_of_piece(piece, num_blocks) for piece in pieces), Counter())


def test_an_affine_function_is_fitted_on_two_answers_and_checked_on_the_third():
    rng = random.Random(0)
    for _ in range(300):
        constant, slope = rng.randint(-50, 50), rng.randint(-50, 50)
        values = [constant + slope * count for count in COUNTS]
        assert fitted(values, COUNTS, "it") == Affine(constant, slope)
        values[rng.randrange(3)] += rng.choice((-1, 1))
        with pytest.raises(NotAffineError, match=r"it is \[.*\] at \[3, 4, 7\] blocks"):
            fitted(values, COUNTS, "it")
    assert fitted([5], [9], "it") == Affine(5)


@pytest.mark.parametrize(
    ("value", "never"),
    [
        (Affine(0), True),
        (Affine(-1), False),
        (Affine(-3, 3), True),
        (Affine(-4, 3), False),
        (Affine(100, -1), False),
        (Affine(100), True),
    ],
)
def test_a_value_is_never_negative_where_no_count_makes_it_so(value, never):
    assert value.is_never_negative is never
    assert all(value.at(blocks) >= 0 for blocks in range(1, 200)) is never


def _family(rng):
    """A view at any number of blocks: its offset and the strides inside of a page may grow."""
    dtype = rng.choice(("e4m3fn", "bf16"))
    size, ratio = itemsize(dtype), rng.randint(1, 2)
    inner = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    strides = [size * rng.randint(1, 8) for _ in inner]
    grows = [rng.random() < 0.25 for _ in inner]
    block, base = size * rng.randint(1, 30), (size * rng.randint(0, 9), size * rng.randint(0, 9))

    def at(blocks):
        return LayerView(
            "a",
            "k",
            "kv",
            dtype,
            (blocks * ratio, *inner),
            (block, *(s * blocks if g else s for s, g in zip(strides, grows, strict=True))),
            base[0] + base[1] * blocks,
        )

    return at


def test_pieces_fitted_on_three_counts_are_the_view_at_every_count():
    rng = random.Random(1)
    for _ in range(300):
        view = _family(rng)
        pieces = pieces_of([view(count) for count in COUNTS], COUNTS)
        for blocks in (*FEW, 9):
            assert _all(pieces, blocks) == bytes_of_view(view(blocks), blocks), view(blocks)
        for piece in pieces:
            for blocks in FEW:
                held = bytes_of_piece(piece, blocks)
                assert min(held)[0] == piece.base.at(blocks)
                assert max(held)[0] == piece.last.at(blocks)
                assert held.total() == piece.bytes_of_block * blocks


def test_pieces_of_one_count_are_the_view_at_that_count():
    rng = random.Random(2)
    for _ in range(300):
        view, blocks = _family(rng), rng.randint(1, 5)
        assert _all(pieces_of([view(blocks)], [blocks]), blocks) == bytes_of_view(
            view(blocks), blocks
        )


def _changed(field, *values):
    usual = LayerView("a", "k", "kv", "bf16", (6, 4), (8, 2), 0)
    views = []
    for value in values:
        parts = {name: getattr(usual, name) for name in usual.__struct_fields__}
        views.append(LayerView(**{**parts, **dict(zip(field, value, strict=True))}))
    return views


@pytest.mark.parametrize(
    ("views", "words"),
    [
        (_changed(["shape"], [(3, 4)], [(4, 4)], [(7, 5)]), "the shape of k of a is not the same"),
        (_changed(["shape"], [(6, 4)], [(8, 4)], [(15, 4)]), "k of a has 6 kernel blocks of 3"),
        (_changed(["shape"], [(4, 4)], [(4, 4)], [(7, 4)]), "k of a has 4 kernel blocks of 3"),
        (
            _changed(["shape", "offset"], [(3, 4), 6], [(4, 4), 8], [(7, 4), 16]),
            "the offset of k of a is [6, 8, 16] at [3, 4, 7] blocks",
        ),
        (
            _changed(["shape", "strides"], [(3, 4), (8, 3)], [(4, 4), (8, 4)], [(7, 4), (8, 4)]),
            "stride 1 of k of a is [3, 4, 4]",
        ),
        (
            _changed(["shape", "strides"], [(3, 4), (6, 2)], [(4, 4), (8, 2)], [(7, 4), (14, 2)]),
            "the block stride of k of a grows with the number of blocks",
        ),
        (
            _changed(
                ["shape", "strides"],
                *([(n, MOST_UNROLLED + 1), (8, 2 * n)] for n in COUNTS),
            ),
            f"k of a has {MOST_UNROLLED + 1} pieces outside of its blocks",
        ),
    ],
)
def test_views_that_are_not_affine_are_named(views, words):
    with pytest.raises(NotAffineError) as error:
        pieces_of(views, COUNTS)
    assert words in str(error.value)


def _piece(rng):
    """A small piece of any strides: overlapping itself or others, or not."""
    axes = tuple(
        (rng.randint(2, 3), rng.choice((1, 2, 3, 4, 6, 8))) for _ in range(rng.randint(0, 2))
    )
    base = Affine(rng.randint(0, 12), rng.choice((0, 0, 0, 4, 8)))
    stride, ratio = rng.choice((2, 4, 6, 8, 12, 16)), rng.randint(1, 2)
    return Piece(base, stride, ratio, axes, rng.choice((1, 2, 4)))


def test_collapsing_keeps_every_byte_and_its_block():
    rng, shorter = random.Random(3), 0
    for _ in range(1000):
        piece = _piece(rng)
        smaller = collapsed(piece)
        shorter += smaller.run > piece.run
        for blocks in FEW:
            assert bytes_of_piece(smaller, blocks) == bytes_of_piece(piece, blocks), piece
    assert shorter > 100


def _disjoint(pieces):
    return all(max(_all(pieces, blocks).values()) == 1 for blocks in FEW)


def test_joining_keeps_every_byte_and_its_block():
    rng, fewer = random.Random(4), 0
    for _ in range(1500):
        first = _piece(rng)
        pieces, base = [first], first.base
        for _ in range(rng.randint(1, 3)):
            base = base.plus(Affine(first.run if rng.random() < 0.8 else rng.randint(1, 40)))
            pieces.append(first._replace(base=base))
        rng.shuffle(pieces)
        if not _disjoint(pieces):
            continue
        together = joined(pieces)
        fewer += len(together) < len(pieces)
        for blocks in FEW:
            assert _all(together, blocks) == _all(pieces, blocks), pieces
    assert fewer > 100


def _shared(one, other, want, blocks):
    """(byte, block, other block) of every byte of both pieces, in blocks as `want` says."""
    theirs: dict[int, set[int]] = {}
    for byte, block in bytes_of_piece(other, blocks):
        theirs.setdefault(byte, set()).add(block)
    return {
        (byte, b, c)
        for byte, b in bytes_of_piece(one, blocks)
        for c in theirs.get(byte, ())
        if want == "" or b != c
    }


def _pairs(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        one, other = _piece(rng), _piece(rng)
        if rng.random() < 0.5:
            # As two layers of a plan: equally far apart, at another place.
            other = other._replace(
                stride=one.stride * one.ratio,
                ratio=1,
                base=Affine(rng.randint(0, 24), one.base.slope),
            )
        yield one, other


def test_what_is_seen_to_lie_apart_does():
    told = Counter()
    for one, other in _pairs(5, 4000):
        beside = _beside(one, other)
        told["beside"] += beside
        everywhere = [_shared(one, other, "", blocks) for blocks in range(1, 8)]
        if beside or _apart(one, other, COUNTS):
            told["apart"] += 1
            assert not any(everywhere), (one, other)
        for blocks in FEW:
            if _apart(one, other, (blocks,)):
                told["apart at one count"] += 1
                assert not everywhere[blocks - 1], (one, other, blocks)
    assert told["beside"] > 80
    assert told["apart"] > 200
    assert told["apart at one count"] > 300


@pytest.mark.parametrize("want", ["", "b != c"])
def test_a_shared_byte_is_found_where_counting_finds_one(want):
    told = Counter()
    for one, other in _pairs(6, 300):
        for blocks in FEW:
            naive = _shared(one, other, want, blocks)
            found = shared_byte(Bytes(one, other, want), (blocks,))
            told[found is None] += 1
            assert (found is None) == (not naive), (one, other, blocks)
            if found is not None:
                assert found.num_blocks == blocks
                assert (found.byte, found.block, found.other) in naive, (one, other, found)
    assert min(told.values()) > 50


@pytest.mark.parametrize("want", ["", "b != c"])
def test_what_is_proved_for_every_count_holds_at_each_and_a_witness_is_a_byte_of_both(want):
    told = Counter()
    for one, other in _pairs(7, 600):
        found = shared_byte(Bytes(one, other, want), COUNTS)
        told[found is None] += 1
        if found is None:
            assert not any(_shared(one, other, want, blocks) for blocks in range(1, 9)), (
                one,
                other,
            )
            continue
        naive = _shared(one, other, want, found.num_blocks)
        assert (found.byte, found.block, found.other) in naive, (one, other, found)
        # A witness has a count that the builder was asked for, where there is one.
        asked = [blocks for blocks in COUNTS if _shared(one, other, want, blocks)]
        assert found.num_blocks in asked or not asked, (one, other, found)
    assert min(told.values()) > 30


def test_a_byte_that_is_two_elements_of_a_piece_is_found_where_counting_finds_one():
    rng, told = random.Random(8), Counter()
    for _ in range(150):
        piece = _piece(rng)
        for counts in (COUNTS, *((blocks,) for blocks in FEW)):
            found = repeated_byte(piece, counts)
            told[found is None] += 1
            blocks = found.num_blocks if found else counts[-1]
            counted = bytes_of_piece(piece, blocks)
            owners: dict[int, Counter] = {}
            for (byte, block), count in counted.items():
                owners.setdefault(byte, Counter())[block] += count
            twice = {byte: blocks for byte, blocks in owners.items() if blocks.total() > 1}
            if found is None:
                assert not twice, (piece, blocks)
            else:
                left = Counter(twice[found.byte])
                left.subtract([found.block, found.other])
                assert min(left.values()) >= 0, (piece, found)
    assert min(told.values()) > 100


def _layer_views(rng, name, blocks):
    views = []
    for part in ("k", "v")[: rng.randint(1, 2)]:
        shape = (blocks, rng.randint(1, 3), rng.randint(1, 3))
        inner = rng.choice(((2, 2 * shape[1]), (2 * shape[2], 2), (2, 4)))
        page = rng.choice((12, 24, 36))
        offset = rng.choice((0, 0, 12, 18, 36, 48))
        strides = (page, inner[0], inner[1])
        views.append(LayerView(name, part, "kv", "bf16", shape, strides, offset))
    return views


def test_every_claim_about_raw_views_is_what_counting_says():
    rng, told = random.Random(9), Counter()
    for _ in range(400):
        blocks = rng.randint(1, 5)
        groups = {"a": 0, "b": rng.randint(0, 1), "c": 1}
        views = [view for name in groups for view in _layer_views(rng, name, blocks)]
        nbytes = rng.choice((100, 150, 250))
        said = claims(Layers(groups, {"kv": Affine(nbytes)}), [views], (blocks,))
        outcome = {claim.property: claim.outcome for claim in said}
        assert [*outcome] == ["bounds", "aliasing", "disjoint"]
        owned = {
            name: sum((bytes_of_view(v, blocks) for v in views if v.layer == name), Counter())
            for name in groups
        }
        last = max(byte for bytes_ in owned.values() for byte, _ in bytes_)
        tangled = {
            name
            for name, bytes_ in owned.items()
            if max(Counter(byte for byte, _ in bytes_.elements()).values()) > 1
        }
        whole = {name: dict(owned[name].keys()) for name in groups if name not in tangled}
        pairs = list(itertools.combinations(whole, 2))
        aliased = any(
            any(whole[one][at] != whole[other][at] for at in whole[one].keys() & whole[other])
            for one, other in pairs
            if groups[one] != groups[other]
        )
        shared = bool(tangled) or any(
            whole[one].keys() & whole[other].keys()
            for one, other in pairs
            if groups[one] == groups[other]
        )
        expected = {"bounds": last >= nbytes, "aliasing": aliased, "disjoint": shared}
        for name, refuted in expected.items():
            told[name, refuted] += 1
            assert outcome[name] == ("refuted" if refuted else "proved"), (name, views, blocks)
    assert len(told) == 6
    assert min(told.values()) > 15


def test_bounds_are_refuted_by_a_count_that_was_asked_for_or_else_by_the_first_that_does_not_fit():
    view = [LayerView("a", "k", "kv", "bf16", (n, 4), (8, 2), 40) for n in COUNTS]
    over = Layers({"a": 0}, {"kv": Affine(0, 16)})
    found = claims(over, [[each] for each in view], COUNTS)[0]
    assert (found.property, found.outcome) == ("bounds", "refuted")
    # 40 + 8 B bytes are reached, and 16 B are there: enough from B = 5 on.
    assert found.witness.num_blocks == 3
    assert claims(over, [[LayerView("a", "k", "kv", "bf16", (5, 4), (8, 2), 40)]], (5,))[
        0
    ].outcome == ("proved")
    late = Layers({"a": 0}, {"kv": Affine(72, 7)})
    found = claims(late, [[each] for each in view], COUNTS)[0]
    # 72 + 7 B is less than 40 + 8 B from B = 33 on.
    assert found.witness.num_blocks == 33
