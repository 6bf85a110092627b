"""Drawn cache plans: all of them possible, each as its row says, and small once they shrink."""

from collections import Counter

import hypothesis
import pytest
from cache_plans import drawn_plan_cases
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvfuzz.errors import UsageError
from kvfuzz.model.axes import AXIS, Domain, facts
from kvfuzz.model.plan_axes import KIND_SETS, PLAN_AXES
from kvfuzz.model.plan_case import PLAN_OPS, check
from kvfuzz.model.plan_edits import is_planned
from kvfuzz.strategies import drawn_case, space
from kvfuzz.strategies.boundaries import PLAN_BOUNDARIES, boundary_rows
from kvfuzz.strategies.cases import cases
from kvfuzz.strategies.choices import Drawn
from kvfuzz.strategies.rows import is_costly

MANY = {"cache_views": 3000, "transfer_regions": 1000, "expand_block_table": 1000}


@pytest.fixture(scope="module", params=PLAN_OPS)
def many(request):
    """(op, thousands of cases of its whole domain)."""
    return request.param, drawn_plan_cases(request.param, MANY[request.param])


def _whole(op):
    return space(op, Domain().narrowed(op))


def test_every_drawn_plan_is_possible_and_can_be_planned_again(many):
    for case in many[1]:
        check(case)
        assert is_planned(case.plan)


def test_a_plan_shows_the_row_that_it_was_drawn_by(many):
    op, drawn = many
    for number, case in enumerate(drawn):
        assert facts(case) == _whole(op).drawn_row(Drawn(number)), number


def test_every_level_that_rows_draw_occurs_and_no_other(many):
    op, drawn = many
    shown = Counter(fact for case in drawn for fact in facts(case).items())
    assert shown.keys() == {
        (axis.name, level) for axis in PLAN_AXES for level in axis.levels_for(op)
    }
    assert min(shown.values()) >= 10


def test_block_ids_are_those_of_the_plan_and_only_where_they_are_expanded(many):
    op, drawn = many
    for case in drawn:
        assert bool(case.block_ids) == (op == "expand_block_table")
        assert all(0 <= block < case.plan.num_blocks for block in case.block_ids)
    if op == "expand_block_table":
        assert {len(case.block_ids) for case in drawn} == set(range(1, 9))
        assert {case.expanded.ratio for case in drawn} >= {1, 2, 3, 4, 12}
        assert any(len(set(case.block_ids)) < len(case.block_ids) for case in drawn)


def test_the_layers_of_a_group_are_of_one_format_and_sharers_come_last(many):
    for case in many[1]:
        for group in case.plan.groups:
            layers = [case.plan.layer(name) for name in group]
            assert len({(layer.kind, layer.form, layer.page_stride) for layer in layers}) == 1
            shares = [bool(layer.shares) for layer in layers]
            assert shares == sorted(shares)
        assert len({layer.page_stride for layer in case.plan.owners}) == 1


def test_the_same_integers_make_the_same_plan(many):
    op, drawn = many
    for number, case in enumerate(drawn[:200]):
        choices = Drawn(number)
        assert drawn_case(choices, _whole(op)) == case
        assert drawn_case(Drawn(number + 1, choices.values), _whole(op)) == case


def test_the_integers_of_a_row_draw_it_again(many):
    within = _whole(many[0])
    for number in range(200):
        row = within.drawn_row(Drawn(number))
        again = Drawn(number + 1, within.integers(row))
        assert facts(drawn_case(again, within)) == row


@pytest.mark.parametrize("axis", [axis.name for axis in PLAN_AXES])
def test_each_level_of_an_axis_can_be_asked_for_alone(axis):
    for op in PLAN_OPS:
        for level in AXIS[axis].levels_for(op):
            within = space(op, Domain().narrowed(op, {axis: (level,)}))
            for number in range(5):
                assert facts(drawn_case(Drawn(number), within))[axis] == level


@pytest.mark.parametrize(
    ("axis", "level"),
    [
        (axis.name, level)
        for axis in PLAN_AXES
        for level in axis.levels
        if level not in axis.levels_for("cache_views")
    ],
)
def test_what_reduced_plans_alone_show_is_not_drawn(axis, level):
    with pytest.raises(UsageError) as error:
        Domain().narrowed("cache_views", {axis: (level,)})
    assert str(error.value).startswith(f"--where {axis}={level}: cache_views on this target takes")


def test_a_domain_that_leaves_no_plan_is_refused_by_the_levels_that_it_narrows():
    narrow = Domain(allowed={"kinds": ("mla",), "form": ("kv_first",)}, source="the source")
    with pytest.raises(UsageError, match=r"no case shows kinds=mla, form=kv_first.*the source"):
        space("cache_views", narrow)


def test_every_boundary_is_drawn_by_its_levels(many):
    op, _ = many
    rows = list(boundary_rows(_whole(op), Drawn(0)))
    assert len(rows) == len(PLAN_BOUNDARIES) >= 15
    for boundary, row in zip(PLAN_BOUNDARIES, rows, strict=True):
        assert boundary.levels.items() <= row.items()
        case = drawn_case(Drawn(0, _whole(op).integers(row)), _whole(op))
        check(case)
        assert facts(case) == row


def test_boundaries_outside_a_domain_are_left_out():
    narrow = Domain(allowed={"placement": ("one_buffer",)}).narrowed("cache_views")
    rows = list(boundary_rows(space("cache_views", narrow), Drawn(0)))
    assert 0 < len(rows) < len(PLAN_BOUNDARIES)
    assert {row["placement"] for row in rows} == {"one_buffer"}


def test_no_plan_is_costly(many):
    drawn = many[1]
    assert not any(is_costly(facts(case)) for case in drawn[:100])
    assert max(case.nbytes for case in drawn) < 1 << 30


SHRINKING = settings(
    database=None,
    deadline=None,
    max_examples=2000,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def _smallest(op, condition):
    return hypothesis.find(cases(op, Domain().narrowed(op)), condition, settings=SHRINKING)


@pytest.mark.parametrize("op", PLAN_OPS)
def test_a_plan_shrinks_to_one_layer_of_one_block(op):
    case = _smallest(op, lambda _: True)
    assert (len(case.plan.layers), case.plan.num_blocks) == (1, 1)
    assert case.nbytes <= 512
    assert case.block_ids == ((0,) if op == "expand_block_table" else ())


@pytest.mark.parametrize(
    ("condition", "groups", "layers"),
    [
        (lambda case: len(case.plan.groups) > 1, 2, 2),
        (lambda case: facts(case)["form"] == "mixed", 2, 2),
        (lambda case: case.plan.has_state, 2, 2),
        (lambda case: bool(case.plan.sharers), 1, 2),
        (lambda case: len(case.plan.groups) > 2, 3, 3),
        (lambda case: case.plan.kv_layout == "BHLNC", 1, 1),
    ],
)
def test_what_matters_is_kept_while_a_plan_shrinks(condition, groups, layers):
    case = _smallest("cache_views", condition)
    assert condition(case)
    assert (len(case.plan.groups), len(case.plan.layers)) == (groups, layers)
    assert case.plan.num_blocks == 1


@pytest.mark.parametrize("kinds", KIND_SETS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_hypothesis_draws_inside_a_narrowed_domain(kinds, data):
    domain = Domain().narrowed("cache_views", {"kinds": (kinds,)})
    case = data.draw(cases("cache_views", domain))
    check(case)
    assert domain.refusal(facts(case)) is None
