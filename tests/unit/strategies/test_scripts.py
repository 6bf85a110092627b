"""Scripts: what is drawn is possible, shows its row, and becomes smaller."""

import msgspec
import pytest

from kvfuzz.errors import UsageError
from kvfuzz.model.any_case import check_case
from kvfuzz.model.axes import Domain, axes_of, facts
from kvfuzz.model.script import ACTIONS, Action, check
from kvfuzz.model.script_edits import possible, simplifications
from kvfuzz.model.script_lowering import lower_script
from kvfuzz.strategies import drawn_case, space
from kvfuzz.strategies.boundaries import SCRIPT_BOUNDARIES, boundary_rows
from kvfuzz.strategies.choices import Drawn

OP = "stateful_cache"
WITHIN = space(OP, Domain())


def _drawn(seed):
    return drawn_case(Drawn(seed), WITHIN)


def test_drawn_scripts_are_possible_and_show_their_rows():
    shown = set()
    rules = set()
    for seed in range(1000):
        case = _drawn(seed)
        check_case(case)
        found = facts(case)
        assert found == WITHIN.drawn_row(Drawn(seed)), seed
        shown.update(found.items())
        rules.update(action.rule for action in case.script.actions)
    wanted = {(axis.name, level) for axis in axes_of(OP) for level in axis.levels_for(OP)}
    assert wanted <= shown
    assert rules == {*ACTIONS}


def test_the_same_integers_make_the_same_script():
    choices = Drawn(7)
    case = drawn_case(choices, WITHIN)
    assert drawn_case(Drawn(99, choices.values), WITHIN) == case


def test_a_case_is_what_lowering_its_script_gives_in_binary_and_json():
    for seed in range(30):
        case = _drawn(seed)
        assert lower_script(case.script) == case
        packed = msgspec.json.encode(case)
        assert msgspec.json.decode(packed, type=type(case)) == case


def test_every_boundary_has_a_row():
    rows = list(boundary_rows(WITHIN, Drawn(0)))
    assert len(rows) == len(SCRIPT_BOUNDARIES)


def test_an_action_that_is_taken_out_takes_along_what_it_made_possible():
    case = _drawn(3)
    actions = (
        Action("prefill", ("a",), 3),
        Action("fork", ("a", "b")),
        Action("decode", ("b",)),
        Action("free", ("b",)),
        Action("decode", ("a",)),
    )
    assert possible(case.plan, 8, actions) == actions
    assert possible(case.plan, 8, (actions[0], *actions[2:])) == (actions[0], actions[4])


def _smallest(case, will_do):
    """The end of the search for what is simpler, and how many candidates it took."""
    search, answer, count = simplifications(case), None, 0
    while True:
        try:
            candidate = search.send(answer) if answer is not None else next(search)
        except StopIteration as end:
            return end.value, count
        assert candidate is not None
        check_case(candidate)
        count += 1
        answer = will_do(candidate)


@pytest.mark.parametrize(
    ("op", "rules"),
    [
        ("copy_blocks", ["prefill", "fork", "decode"]),
        ("swap_blocks", ["prefill", "swap_out"]),
        ("zero_blocks", ["prefill", "zero"]),
        ("gather_cache", ["prefill", "read"]),
    ],
)
def test_a_script_shrinks_to_the_shortest_that_has_a_step_of_an_op(op, rules):
    def has(case):
        return any(step.op == op for step in case.steps)

    long = [case for case in map(_drawn, range(120)) if has(case) and len(case.script.actions) > 6]
    assert len(long) > 5
    for case in long[:12]:
        smallest, _ = _smallest(case, has)
        found = [action.rule for action in smallest.script.actions]
        assert len(found) <= len(rules) + 1
        assert {*rules[1:-1]} <= {*found}
        (layer,) = smallest.plan.layers
        assert layer.cache_dtype == smallest.script.model_dtype == "bf16"


WRONG = (
    ({"actions": ()}, "0 actions"),
    ({"actions": (Action("dance", ("a",)),)}, "expected one of"),
    ({"actions": (Action("prefill", ("a",)),)}, "tokens=0"),
    ({"actions": (Action("decode", ("a",), 2),)}, "tokens=2"),
    ({"actions": (Action("fork", ("a",)),)}, "1 names"),
    ({"actions": (Action("decode", ("a", "a")),)}, "2 names"),
    ({"model_dtype": "e5m2"}, "model_dtype='e5m2'"),
    ({"host_blocks": 0}, "host_blocks=0"),
    ({"k_scale": 0}, "k_scale=0x00000000"),
)


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_an_impossible_script_says_what_is_wrong(changes, message):
    script = msgspec.structs.replace(_drawn(0).script, **changes)
    with pytest.raises(UsageError, match=message):
        check(script)
