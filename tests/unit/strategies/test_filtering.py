"""Levels that are left by generalised arc consistency, against all rows of small tables."""

import itertools
import random

from kvfuzz.strategies.filtering import Filter

SIZES = (3, 4, 2, 3, 2)
LEVELS = [tuple(map(str, range(size))) for size in SIZES]


def _tables(rng):
    found = []
    for _ in range(rng.randint(2, 6)):
        axes = tuple(sorted(rng.sample(range(len(SIZES)), rng.randint(2, 3))))
        every = itertools.product(*(range(SIZES[axis]) for axis in axes))
        found.append((axes, {each for each in every if rng.random() < 0.6}))
    return found


def _rows(tables, chosen):
    for row in itertools.product(*map(range, SIZES)):
        if all(row[axis] == level for axis, level in chosen.items()) and all(
            tuple(row[axis] for axis in axes) in allowed for axes, allowed in tables
        ):
            yield row


def test_no_level_of_any_row_is_filtered_out_and_each_that_stays_has_support():
    rng, nothing, fewer = random.Random(0), 0, 0
    for _ in range(300):
        tables = _tables(rng)
        axis = rng.randrange(len(SIZES))
        chosen = {axis: rng.randrange(SIZES[axis])}
        left, rows = Filter(LEVELS, tables).left(chosen), list(_rows(tables, chosen))
        if left is None:
            assert not rows
            nothing += 1
            continue
        for row in rows:
            assert all(level in left[at] for at, level in enumerate(row))
        for axes, allowed in tables:
            kept = [
                each
                for each in allowed
                if all(x in left[a] for a, x in zip(axes, each, strict=True))
            ]
            for place, axis in enumerate(axes):
                assert {each[place] for each in kept} == left[axis]
        fewer += any(len(each) < size for each, size in zip(left, SIZES, strict=True))
    assert nothing >= 10
    assert fewer >= 100


def test_levels_that_exclude_each_other_by_way_of_a_third_axis_leave_nothing():
    same = {(0, 0), (1, 1)}
    chain = Filter([("a", "b")] * 4, [((0, 1), same), ((1, 2), same), ((2, 3), same)])
    assert chain.left({0: 0, 3: 1}) is None
    assert chain.left({0: 0}) == [{0}] * 4
    assert chain.left({}) == [{0, 1}] * 4


def test_a_rule_that_allows_nothing_leaves_nothing():
    assert Filter([("a",), ("b",)], [((0, 1), set())]).left({}) is None
