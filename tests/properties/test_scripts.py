"""A cache in use: our kernels keep every byte, and what breaks a step is found and made short."""

import pytest

from kvfuzz.engine.reduce import reduced
from kvfuzz.engine.worker.script_judge import ScriptJudge
from kvfuzz.kernels.mutants.patches import mutants
from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.steps import PAGE_OPS
from kvfuzz.model.target import TargetSpec
from kvfuzz.strategies import drawn_case, space
from kvfuzz.strategies.choices import Drawn

OP = "stateful_cache"
SHORTEST = {
    "copy_on_write_forgotten": 3,
    "copied_tail_is_stale": 3,
    "swapped_by_the_wrong_id": 3,
    "cleared_tail_is_stale": 2,
}
"""Actions of the shortest script that shows each, found by hand."""


def _judge(name, cpu_lane):
    return ScriptJudge(resolve(TargetSpec(name)), cpu_lane)


def _scripts(judge, count, first=0):
    within = space(OP, judge.target.info.domain.narrowed(OP))
    return [drawn_case(Drawn(seed), within) for seed in range(first, first + count)]


def test_our_kernels_keep_every_byte_of_every_step(cpu_lane):
    judge = _judge("stateful:builtin", cpu_lane)
    for case in _scripts(judge, 60):
        verdict = judge.verdict(case)
        assert not verdict.failed, (verdict.failed[0], case.script.actions)
        assert {each.outcome for each in verdict.results} == {"passed"}
        cpu_lane.rest()


def test_every_page_op_has_a_mutant_here():
    assert {each.patches for each in mutants() if each.name in SHORTEST} == {*PAGE_OPS}


@pytest.mark.parametrize("name", SHORTEST)
def test_a_broken_page_op_is_found_by_name_and_shrinks_to_the_shortest_script(cpu_lane, name):
    (mutant,) = [each for each in mutants() if each.name == name]
    judge = _judge(f"stateful:mutant:{name}", cpu_lane)
    domain = judge.target.info.domain.narrowed(OP)
    for case in _scripts(judge, 60):
        failed = judge.verdict(case).failed
        if failed and failed[0].name == mutant.caught_by and len(case.script.actions) > 4:
            break
    else:
        raise AssertionError("never found")

    def still_fails(smaller):
        cpu_lane.rest()
        again = judge.verdict(smaller).failed
        return bool(again) and again[0].name == mutant.caught_by

    smallest = reduced(case, still_fails, domain=domain, budget_s=60.0).case
    assert len(smallest.script.actions) <= SHORTEST[name] + 1
    message = judge.verdict(smallest).failed[0].violation.message
    assert message.startswith("step ")
    assert f"{mutant.patches} of layers." in message


def test_a_broken_writer_or_gather_is_found_in_use(cpu_lane):
    for name in ("hardcoded_block_stride", "hardcoded_block_stride_write"):
        judge = _judge(f"stateful:mutant:{name}", cpu_lane)
        verdicts = (judge.verdict(case) for case in _scripts(judge, 40))
        assert any(verdict.failed for verdict in verdicts), name


def test_a_step_that_raises_is_a_crash_with_its_step(cpu_lane, tmp_path):
    kernel = tmp_path / "mine.py"
    kernel.write_text("def copy_blocks(key_cache, value_cache, block_mapping):\n    1 / 0\n")
    judge = _judge(f"stateful:{kernel}:copy_blocks", cpu_lane)
    for case in _scripts(judge, 80):
        failed = judge.verdict(case).failed
        if failed:
            assert failed[0].name == "crash"
            assert "copy_blocks of layers." in failed[0].violation.message
            return
    raise AssertionError("no script copied a block")


def test_targets_of_no_step_and_two_of_one_op_are_refused():
    from kvfuzz.errors import UsageError

    with pytest.raises(UsageError, match="is a cache_views"):
        resolve(TargetSpec("stateful:builtin:cache_views"))
    with pytest.raises(UsageError, match="two targets are a gather_cache"):
        resolve(TargetSpec("stateful:builtin:gather_cache+mutant:hardcoded_block_stride"))
