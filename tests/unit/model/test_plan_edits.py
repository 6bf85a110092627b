"""Simpler plans: possible ones, each simpler than the last, down to one layer of one block."""

import pytest
from cache_plans import attention, drawn_plan_cases, state
from msgspec.structs import replace

from kvfuzz.model.cache_plan import KV_LAYOUTS
from kvfuzz.model.plan_case import PLAN_OPS, PlanCase, check
from kvfuzz.model.plan_edits import is_planned, simplifications, with_num_blocks
from kvfuzz.model.planning import one_buffer, packed, separate


def _driven(case, will_do):
    """(the last case that did, every candidate with the one that it was to be simpler than)."""
    search, answer, tried, last = simplifications(case), None, [], case
    while True:
        try:
            candidate = search.send(answer) if answer is not None else next(search)
        except StopIteration as end:
            return end.value, tried
        tried.append((candidate, last))
        answer = bool(will_do(candidate))
        if answer:
            last = candidate


@pytest.mark.parametrize("op", PLAN_OPS)
def test_whatever_is_tried_is_a_possible_plan(op):
    for case in drawn_plan_cases(op, 60, seed=1):
        for candidate, _ in _driven(case, lambda _: True)[1]:
            check(candidate)
            assert is_planned(candidate.plan)


@pytest.mark.parametrize("op", PLAN_OPS)
def test_a_plan_of_which_nothing_matters_is_one_layer_of_one_block(op):
    for case in drawn_plan_cases(op, 120, seed=2):
        small, _ = _driven(case, lambda _: True)
        assert (len(small.plan.layers), small.plan.num_blocks) == (1, 1), small
        assert len(small.block_ids) == (op == "expand_block_table")
        (layer,) = small.plan.layers
        assert layer.cache_dtype in ("", "bf16")
        assert [state.dtype for state in layer.states] in ([], ["bf16"])


@pytest.mark.parametrize(
    ("matters", "kept"),
    [
        (lambda layer: layer.cache_dtype == "e4m3fn", "a"),
        (lambda layer: len(layer.states) > 1, "s"),
    ],
)
def test_the_dtype_or_the_states_that_matter_are_kept(matters, kept):
    fp8 = attention("a", cache_dtype="e4m3fn", head_size=16, head_size_v=16)
    case = PlanCase("cache_views", packed([[fp8, attention("b")], [state("s")]], 2))
    small, _ = _driven(case, lambda case: any(map(matters, case.plan.layers)))
    assert [layer.name for layer in small.plan.layers] == [kept]
    assert matters(small.plan.layers[0])


def test_the_case_itself_is_never_tried_as_a_simpler_one():
    """It would do, and the search would believe that what it deleted is gone."""
    for case in drawn_plan_cases("cache_views", 120, seed=3):
        for candidate, last in _driven(case, lambda _: True)[1]:
            assert candidate != last, last


def test_a_layer_goes_together_with_those_that_share_its_cache():
    plan = separate([[attention("a"), attention("d", shares="a")]], 1)
    small, _ = _driven(PlanCase("cache_views", plan), lambda _: True)
    assert [layer.name for layer in small.plan.layers] == ["a"]


def test_a_sharer_that_matters_keeps_its_target_and_nothing_else():
    layers = [attention("a"), attention("b"), attention("d", shares="b")]
    plan = separate([layers, [state("s")]], 3)
    small, _ = _driven(PlanCase("cache_views", plan), lambda case: case.plan.sharers)
    assert [layer.name for layer in small.plan.layers] == ["b", "d"]
    assert small.plan.num_blocks == 1


def test_a_plan_that_no_planning_makes_is_left_as_it_is():
    plan = separate([[attention("a")], [attention("w", kind="sliding")]], 3)
    allocations = tuple(replace(each, nbytes=each.nbytes + 1) for each in plan.allocations)
    odd = PlanCase("cache_views", replace(plan, allocations=allocations))
    assert not is_planned(odd.plan)
    assert _driven(odd, lambda _: True) == (odd, [])
    assert with_num_blocks(odd, 5) == odd


@pytest.mark.parametrize("kv_layout", KV_LAYOUTS)
def test_the_same_layers_are_planned_for_another_number_of_blocks(kv_layout):
    layers = [attention(name, form="content_packed") for name in "abc"]
    case = PlanCase("cache_views", one_buffer([layers], 3, kv_layout))
    for blocks in (1, 2, 9):
        expected = one_buffer([layers], blocks, kv_layout)
        assert with_num_blocks(case, blocks).plan == expected
    assert with_num_blocks(case, 3) is case
