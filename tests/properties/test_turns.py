"""Properties with runs of their own take turns in a search; a failing case is asked them all."""

import msgspec
import pytest
from nights import first_by_day

from kvfuzz.engine.guide import Guide
from kvfuzz.engine.hunt import Effort, Hunt
from kvfuzz.engine.tally import Tally
from kvfuzz.engine.worker.judge import Patience
from kvfuzz.model.axes import Domain
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import Sequence
from kvfuzz.model.scene import OPS
from kvfuzz.model.verdict import WAITING, PropertyResult, Verdict, Violation
from kvfuzz.oracles.table import PROPERTIES, TURNS, by_turn
from kvfuzz.strategies import drawn_scene, space

TAKING_TURNS = {
    op: {each.name for each in PROPERTIES if each.takes_turns and each.is_about(op)} for op in OPS
}
DRAWN = 700
NARROW = {"reach": ("near",), "block_size": ("4",), "head_size": ("16",)}


def _drawn(op, count):
    guide = Guide(space(op, Domain(allowed=NARROW).narrowed(op)), 7)
    return [lower(drawn_scene(guide.draw(), guide.space)) for _ in range(count)]


def _outcomes(verdict):
    return {result.name: result.outcome for result in verdict.results}


@pytest.mark.parametrize("op", OPS)
def test_a_case_that_passes_has_a_few_relations_decided_and_everything_else(judge, op):
    judged, turns = judge(f"builtin:{op}"), set()
    for case in _drawn(op, 40):
        asked, whole = judged.verdict(case, in_turn=True), judged.verdict(case)
        waiting = {result.name for result in asked.results if result.reason == WAITING}
        assert waiting <= TAKING_TURNS[op]
        assert WAITING not in [result.reason for result in whole.results]
        for one, other in zip(asked.results, whole.results, strict=True):
            assert one == other or one.name in waiting
        decided, possible = (
            {
                name
                for name, outcome in _outcomes(verdict).items()
                if name in TAKING_TURNS[op] and outcome != "not_checked"
            }
            for verdict in (asked, whole)
        )
        assert len(decided) == min(TURNS, len(possible))
        turns |= decided
    assert turns == TAKING_TURNS[op]


@pytest.mark.parametrize("op", first_by_day(OPS, 1))
def test_each_relation_comes_first_about_as_often_as_the_others(op):
    cases = _drawn(op, DRAWN)
    first = [by_turn(case)[0].name for case in cases]
    assert set(first) == TAKING_TURNS[op]
    assert min(map(first.count, TAKING_TURNS[op])) > DRAWN / len(TAKING_TURNS[op]) / 2


def test_a_case_that_fails_is_asked_everything(judge, gather_scene):
    """Whichever property fails first: bytes, or a relation when it has its turn."""
    judged, case = judge("mutant:hardcoded_block_stride"), lower(gather_scene)
    assert judged.verdict(case, in_turn=True).results == judged.verdict(case).results
    judged, seen = judge("mutant:block_zero_is_null"), set()
    for seed in range(12):
        case = lower(msgspec.structs.replace(gather_scene, fill_seed=seed))
        verdict = judged.verdict(case, in_turn=True)
        seen.add(bool(verdict.failed))
        if verdict.failed:
            assert [each.name for each in verdict.failed] == ["block_permutation"]
            assert WAITING not in [result.reason for result in verdict.results]
        else:
            assert ("block_permutation", WAITING) in [(r.name, r.reason) for r in verdict.results]
    assert seen == {True, False}


def test_what_time_is_left_for_does_not_depend_on_whose_turn_it_is(
    judge, gather_scene, monkeypatch
):
    """All are asked in one order, so that the same ones are left out whatever the scene."""
    judged, left_out = judge("builtin:gather_cache"), set()
    for seed in range(6):
        runs = iter(["", ""])
        monkeypatch.setattr(Patience, "spent", lambda self, runs=runs: next(runs, "too long"))
        verdict = judged.verdict(lower(msgspec.structs.replace(gather_scene, fill_seed=seed)))
        left_out.add(tuple(each.name for each in verdict.results if each.reason == "too long"))
    (names,) = left_out
    assert len(names) >= 2


def test_a_change_of_any_part_of_a_scene_may_change_whose_turn_it_is(gather_scene, scene_with):
    def first(**changes):
        return by_turn(lower(scene_with(gather_scene, **changes)))[0].name

    assert len({first(sequences=(Sequence((3, 1), 13, n),)) for n in range(1, 15)}) > 2
    assert len({first(fill_seed=seed) for seed in range(20)}) > 3


class _Runner:
    """Answers with a failure from the `fails_at`-th case on, and notes who was asked everything."""

    def __init__(self, fails_at):
        self._left = fails_at
        self.in_turn = []

    def check(self, case, *, in_turn=False):
        self.in_turn.append(in_turn)
        self._left -= 1
        violation = Violation("wrong") if self._left < 0 else None
        outcome = "failed" if violation else "passed"
        return Verdict((PropertyResult("roundtrip", outcome, violation=violation),)), False


def test_turns_are_taken_while_searching_and_never_on_the_way_down(gather_scene):
    runner, case = _Runner(4), lower(gather_scene)
    hunt = Hunt(
        runner,
        Tally(),
        "gather_cache",
        Domain(),
        random_seed=0,
        effort=Effort(0, 0),
        progress=lambda phase: None,
    )
    for phase in ("seeds", "boundary", "covering", "random", "random", "random"):
        hunt.attempt(case, {}, phase)
    assert runner.in_turn == [False, False, True, True, True, False]
