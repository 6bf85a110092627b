"""Rows: the rules are the truth, any axis can be narrowed, and nothing leads to a dead end."""

import itertools
import random

import pytest

from kvfuzz.errors import UsageError
from kvfuzz.model.axes import AXIS, TOKEN_AXES, Domain, axes_of, facts
from kvfuzz.model.lower import lower
from kvfuzz.model.ops.table import FAMILIES
from kvfuzz.model.plan_case import PLAN_OPS
from kvfuzz.model.plan_rules import PLAN_RULES
from kvfuzz.model.rules import RULES
from kvfuzz.model.scene import OPS
from kvfuzz.strategies import drawn_scene, space
from kvfuzz.strategies.boundaries import BOUNDARIES, PLAN_BOUNDARIES, boundary_rows
from kvfuzz.strategies.choices import Drawn
from kvfuzz.strategies.ops.table import OP_BOUNDARIES
from kvfuzz.strategies.rows import OFTEN


def _boundaries(family):
    return [boundary for op in family.ops for boundary in OP_BOUNDARIES[op]]


@pytest.fixture(params=OPS)
def whole(request):
    """All rows of an op."""
    return space(request.param, Domain().narrowed(request.param))


def test_the_tables_name_axes_and_levels_that_there_are():
    tables = [
        (OPS, RULES, BOUNDARIES),
        (PLAN_OPS, PLAN_RULES, PLAN_BOUNDARIES),
        *((family.ops, family.rules, _boundaries(family)) for family in FAMILIES.values()),
    ]
    for ops, rules, boundaries in tables:
        names = {axis.name for axis in axes_of(ops[0])}
        for rule in rules:
            assert set(rule.axes) <= names
            assert set(rule.ops) <= set(ops)
        assert all(boundary.levels.keys() <= names for boundary in boundaries)
    every = [boundary for _, _, boundaries in tables for boundary in boundaries]
    for named in (OFTEN, *(each.levels for each in every)):
        for axis, levels in named.items():
            assert set([levels] if isinstance(levels, str) else levels) <= set(AXIS[axis].levels)


def test_every_rule_allows_some_combinations_and_excludes_others():
    of_ops = [rule for family in FAMILIES.values() for rule in family.rules]
    for rule in (*RULES, *PLAN_RULES, *of_ops):
        levels = [AXIS[axis].levels for axis in rule.axes]
        answers = {bool(rule.allows(*each)) for each in itertools.product(*levels)}
        assert answers == {True, False}, rule.axes


def test_most_pairs_of_levels_have_a_row_whose_case_shows_it(whole):
    rng, shown = random.Random(0), 0
    for one, other in rng.sample(list(itertools.combinations(range(len(whole.axes)), 2)), 60):
        first, second = (rng.randrange(len(whole.levels[axis])) for axis in (one, other))
        row = whole.completed({one: first, other: second}, lambda _, possible: list(possible))
        if row is None:
            continue
        named = whole.named(row)
        case = lower(drawn_scene(Drawn(rng.randrange(1 << 32), whole.integers(named)), whole))
        assert facts(case) == named
        shown += 1
    assert shown > 45


def test_the_integers_of_a_row_draw_it_again(whole):
    for seed in range(200):
        row = whole.drawn_row(Drawn(seed))
        assert whole.drawn_row(Drawn(seed + 1, whole.integers(row))) == row


@pytest.mark.nightly
@pytest.mark.parametrize("axis", [axis.name for axis in TOKEN_AXES])
def test_each_level_of_an_axis_can_be_asked_for_alone(axis):
    for op in OPS:
        for level in AXIS[axis].levels_for(op):
            narrow = Domain().narrowed(op, {axis: (level,)})
            within = space(op, narrow)
            shown = facts(lower(drawn_scene(Drawn(7), within)))
            assert shown[axis] == level


def test_what_is_no_row_is_refused(whole):
    row = whole.drawn_row(Drawn(1))
    with pytest.raises(ValueError, match="cache_dtype="):
        whole.integers({**row, "order": "nhd", "cache_dtype": "fp64"})
    with pytest.raises(ValueError, match="does not go with the levels before it"):
        whole.integers({**row, "order": "shuffle", "layout": "content_packed"})


def test_a_domain_that_leaves_no_row_is_refused_by_the_levels_that_it_narrows():
    narrow = Domain(allowed={"block_size": ("1",), "order": ("shuffle",)}, source="the source")
    with pytest.raises(UsageError, match=r"no case shows order=shuffle, block_size=1.*the source"):
        space("gather_cache", narrow)


def test_every_boundary_is_drawn_where_the_domain_has_it(whole):
    rows = list(boundary_rows(whole, Drawn(0)))
    possible = [
        boundary
        for boundary in BOUNDARIES
        if all(level in AXIS[axis].levels_for(whole.op) for axis, level in boundary.levels.items())
    ]
    assert len(rows) == len(possible) >= 25
    for boundary, row in zip(possible, rows, strict=True):
        assert boundary.levels.items() <= row.items()


def test_boundaries_outside_a_domain_are_left_out():
    narrow = Domain(allowed={"order": ("nhd",)}).narrowed("gather_cache")
    rows = list(boundary_rows(space("gather_cache", narrow), Drawn(0)))
    assert rows
    assert {row["order"] for row in rows} == {"nhd"}


@pytest.mark.parametrize("op", ["cache_views", "stateful_cache"])
def test_an_impossible_domain_names_the_axes_that_were_narrowed_and_no_others(op):
    """Scripts have fewer levels of some axes that they share with plans."""
    together = {"placement": ("separate",), "kv_layout": ("LBHNC",)}
    with pytest.raises(UsageError) as error:
        space(op, Domain(allowed=together, source="a test"))
    said = "no case shows placement=separate, kv_layout=LBHNC at once (a test)"
    assert str(error.value) == f"nothing to draw: {said}"
