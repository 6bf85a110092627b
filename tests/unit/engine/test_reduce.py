"""Reducing by a predicate: what it never does, when it stops, and how far it gets."""

import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfuzz.engine.minimize import Alike, alike_of, minimum
from kvfuzz.engine.reduce import reduced
from kvfuzz.model.axes import TOKEN_AXES, Domain, facts
from kvfuzz.model.case import LARGE, check
from kvfuzz.model.fill import ByteFill
from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import Sequence
from kvfuzz.model.round_trip import with_round_trip
from kvfuzz.model.seed import Expected, Provenance, Seed, dump, load
from kvfuzz.model.steps import check_steps
from kvfuzz.model.verdict import Place, PropertyResult, Verdict, Violation
from kvfuzz.strategies import cases

ANY = Domain()


def _reduced(case, fails, domain=ANY, **limits):
    return reduced(case, fails, domain=domain, **{"budget_s": 60} | limits)


@pytest.fixture
def big_scene(write_scene, scene_with):
    """Three runs over fp8 blocks between blocks of Mamba state, with padding rows and gaps."""
    return scene_with(
        write_scene,
        layout="hybrid",
        order="hnd",
        cache_dtype="e4m3fnuz",
        geometry=Geometry(num_blocks=20, block_size=16, num_kv_heads=8, head_size=96),
        sequences=(
            Sequence((17, 3, 12, 9), 21, 38),
            Sequence((5,), 2, 9),
            Sequence((14, 6), 0, 20),
        ),
        padding=(0, 7, 30),
        table_width=9,
        state_blocks=(1, 15),
        k_scale=0x3FA66666,
        v_scale=0x40133333,
    )


def test_what_always_fails_becomes_one_plain_token(big_scene):
    reduction = _reduced(lower(big_scene), lambda case: True)
    scene = reduction.case.scene
    assert scene.attention.geometry == Geometry(1, 1, 1, 8)
    assert scene.batch.sequences == (Sequence((0,), 0, 1),)
    assert scene.batch.padding == ()
    assert scene.batch.table_width == 1
    assert len(scene.plan.layers) == 1
    assert facts(reduction.case) | {"layout": "kv_first"} == facts(reduction.case)
    assert (scene.model_dtype, scene.k_scale, scene.row_gap, scene.fill_seed) == (
        "fp32",
        0x3F800000,
        0,
        0,
    )
    assert reduction.ended_by == "minimal"
    assert reduction.runs < 30


@pytest.mark.parametrize("axis", [axis.name for axis in TOKEN_AXES])
def test_the_one_fact_that_matters_is_kept_and_the_rest_goes(big_scene, axis):
    start = lower(big_scene)
    level = facts(start)[axis]
    small = _reduced(start, lambda case: facts(case)[axis] == level).case
    assert facts(small)[axis] == level
    # The size that one fact can ask for: SHUFFLE's x, two blocks, a row beside padding.
    assert small.geometry.num_blocks <= 3
    assert small.scene.batch.num_rows <= 2
    assert small.nbytes < start.nbytes / 10


@pytest.mark.parametrize(
    ("op", "matters", "rows", "blocks"),
    [
        ("reshape_and_cache", lambda scene: len(scene.batch.sequences) > 1, 2, 2),
        ("reshape_and_cache", lambda scene: scene.batch.padding, 2, 1),
        ("reshape_and_cache", lambda scene: scene.batch.num_tokens > 4, 5, 1),
        ("reshape_and_cache", lambda scene: scene.state_blocks, 1, 2),
        ("reshape_and_cache", lambda scene: 7 in scene.batch.sequences[-1].block_ids, 1, 8),
        ("reshape_and_cache", lambda scene: scene.attention.geometry.num_blocks > 10, 1, 11),
        ("gather_cache", lambda scene: any(x.start > 2 for x in scene.batch.sequences), 1, 2),
        ("gather_cache", lambda scene: any(x.start > 17 for x in scene.batch.sequences), 1, 2),
        ("gather_cache", lambda scene: scene.batch.table_width > 6, 1, 1),
    ],
)
def test_structure_that_matters_is_kept_at_its_least(
    big_scene, scene_with, op, matters, rows, blocks
):
    sequences = (*big_scene.batch.sequences[:2], Sequence((7,), 0, 5))
    start = scene_with(big_scene, op=op, sequences=sequences)
    if op == "gather_cache":
        start = scene_with(start, padding=(), row_gap=0)
    small = _reduced(lower(start), lambda case: bool(matters(case.scene))).case
    assert matters(small.scene)
    assert (small.scene.batch.num_rows, small.geometry.num_blocks) == (rows, blocks)


@given(st.data())
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_every_case_that_is_run_is_sound_and_inside_the_domain(data):
    op = data.draw(st.sampled_from(["gather_cache", "reshape_and_cache"]))
    domain = Domain(
        allowed={
            "block_size": ("16", "32", "64"),
            "order": ("hnd", "shuffle"),
            "head_size": ("64", "80", "96"),
            "cache_dtype": ("bf16", "e4m3fn", "e5m2"),
        },
        forbidden=({"layout": ("kv_first",), "order": ("shuffle",)},),
    )
    case = data.draw(cases(op, domain.narrowed(op)))
    ran = []

    def fails(candidate):
        check(candidate)
        check_steps(candidate)
        assert domain.refusal(facts(candidate)) is None
        assert candidate.nbytes <= max(case.nbytes, LARGE)
        ran.append(candidate)
        return len(ran) % 3 > 0

    small = _reduced(case, fails, domain).case
    assert domain.refusal(facts(small)) is None
    seed = Seed(
        "t", op, "oracle", small, Expected("failed", ""), Provenance("", "", "", "cpu", "", "")
    )
    assert load(dump(seed), where="here") == seed


def test_a_case_outside_the_domain_is_left_as_it_is(big_scene):
    case = lower(big_scene)
    reduction = _reduced(case, lambda _: True, Domain(allowed={"block_size": ("784",)}))
    assert (reduction.case, reduction.runs) == (case, 0)


def test_a_reduced_case_is_minimal_at_once_and_the_search_is_deterministic(big_scene):
    def watched(case):
        asked = []

        def fails(candidate):
            asked.append(candidate)
            return facts(candidate)["blocks_used"] == "2+"

        return _reduced(case, fails), asked

    first, asked = watched(lower(big_scene))
    again, asked_again = watched(lower(big_scene))
    assert (again, asked_again) == (first, asked)
    assert first.case != lower(big_scene)
    rest, _ = watched(first.case)
    assert (rest.case, rest.ended_by) == (first.case, "minimal")


def test_no_case_is_run_twice_but_for_the_last_which_is_confirmed(big_scene):
    ran = []

    def fails(case):
        ran.append(msgspec.json.encode((case.buffers, case.fields, case.tensors, case.steps)))
        return facts(case)["order"] == "hnd"

    reduction = _reduced(lower(big_scene), fails)
    assert len(ran) == reduction.runs == len(set(ran)) + 1
    assert ran[-1] in ran[:-1]


def test_the_time_cap_ends_it_with_the_best_so_far(big_scene):
    def slow(case):
        time.sleep(0.05)
        return len(case.scene.batch.sequences) > 1

    start = lower(big_scene)
    began = time.monotonic()
    reduction = _reduced(start, slow, budget_s=0.3)
    assert time.monotonic() - began < 3
    assert (reduction.ended_by, reduction.runs < 15) == ("time", True)
    assert len(reduction.case.scene.batch.sequences) == 2
    assert reduction.case.nbytes < start.nbytes


def test_the_cap_on_runs_ends_it_with_the_best_so_far(big_scene):
    reduction = _reduced(lower(big_scene), lambda case: True, max_runs=2)
    assert (reduction.ended_by, reduction.runs) == ("runs", 3)
    assert len(reduction.case.scene.plan.layers) > 0
    assert len(reduction.case.scene.batch.sequences) == 1


def test_without_any_budget_nothing_is_run(big_scene):
    case = lower(big_scene)
    ran = []
    assert _reduced(case, ran.append, budget_s=0).case == case
    assert ran == []


def test_a_failure_that_comes_and_goes_ends_and_gives_what_failed_last(big_scene):
    answers = []

    def flaky(case):
        answers.append((case, len(answers) % 2 == 0))
        return answers[-1][1]

    reduction = _reduced(lower(big_scene), flaky)
    assert reduction.runs == len(answers) < 300
    assert (reduction.case, True) in answers


def test_a_failure_that_never_comes_back_gives_the_case_as_it_was(big_scene):
    case, left = lower(big_scene), [True] * 10
    reduction = _reduced(case, lambda _: bool(left and left.pop()))
    assert reduction.case == case


def test_steps_and_what_only_they_bind_go_first(write_scene):
    case = with_round_trip(lower(write_scene))
    small = _reduced(case, lambda each: facts(each)["padding"] == "some").case
    assert len(small.steps) == 1
    assert small == lower(small.scene)


def test_a_case_whose_scene_does_not_fail_loses_steps_alone(write_scene):
    case = with_round_trip(lower(write_scene))
    buffers = tuple(
        msgspec.structs.replace(each, fill=ByteFill(99)) if each.name == "kv_cache" else each
        for each in case.buffers
    )
    case = msgspec.structs.replace(case, buffers=buffers)
    small = _reduced(case, lambda each: each.buffer("kv_cache").fill == ByteFill(99)).case
    assert small.steps == case.steps[:1]
    assert {each.name for each in small.tensors} == set(case.steps[0].tensors.values())
    assert small.scene == case.scene
    check(small)
    check_steps(small)


def _failing(*names, field=""):
    place = Place("kv_cache", 0, field) if field else None
    violation = Violation("wrong", place)
    return Verdict(tuple(PropertyResult(name, "failed", violation=violation) for name in names))


def test_a_symptom_is_a_property_and_a_side_that_nothing_comes_before():
    alike = alike_of(_failing("oracle", "frame", field="v"))
    assert alike == Alike("oracle", "value", frozenset({"oracle", "frame"}))
    assert alike.shown_by(_failing("oracle", field="value_out"))
    assert not alike.shown_by(_failing("oracle", field="key"))
    assert not alike.shown_by(_failing("oracle"))
    assert not alike.shown_by(_failing("frame", field="v"))
    assert not alike.shown_by(_failing("crash"))
    assert not alike.shown_by(_failing("no_overflow", "oracle", field="v"))
    assert not alike.shown_by(Verdict((), refused="no"))
    anywhere = alike_of(_failing("oracle", field="state"))
    assert anywhere.shown_by(_failing("oracle", field="key"))


def test_a_named_property_may_come_after_what_failed_with_it_before():
    alike = alike_of(_failing("oracle", "frame", field="k"), "frame")
    assert alike.property == "frame"
    assert alike.shown_by(_failing("oracle", "frame", field="k"))
    assert alike.shown_by(_failing("frame", field="k"))
    assert not alike.shown_by(_failing("crash", "frame", field="k"))
    assert alike_of(_failing("oracle"), "frame") is None


def test_a_smaller_case_that_fails_another_property_or_side_is_not_the_finding(big_scene):
    """With one head another property fails, with one token the other side."""

    def check_case(case):
        if case.geometry.num_kv_heads < 2:
            return _failing("frame", field="k")
        return _failing("oracle", field="k" if case.scene.batch.num_rows > 1 else "v")

    case = lower(big_scene)
    reduction, verdict = minimum(case, check_case(case), check_case, domain=ANY, budget_s=60)
    assert verdict == _failing("oracle", field="k")
    assert reduction.case.geometry.num_kv_heads == 2
    assert reduction.case.scene.batch.num_rows == 2


def test_a_crash_is_reduced_by_its_property_alone(big_scene):
    def check_case(case):
        said = f"killed by signal {case.nbytes}"
        failed = PropertyResult("crash", "failed", violation=Violation(said))
        return Verdict((failed,) if case.scene.batch.num_tokens > 3 else ())

    case = lower(big_scene)
    reduction, verdict = minimum(case, check_case(case), check_case, domain=ANY, budget_s=60)
    assert reduction.case.scene.batch.num_tokens == 4
    assert verdict == check_case(reduction.case)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"order": "shuffle"}, {"order": "shuffle", "cache_dtype": "e4m3fn"}),
        ({"order": "shuffle", "cache_dtype": "bf16"}, {"order": "shuffle", "cache_dtype": "fp32"}),
        ({"order": "hnd"}, {"order": "nhd", "cache_dtype": "e4m3fn"}),
    ],
)
def test_a_finding_does_not_slip_into_the_bug_of_another_path(big_scene, scene_with, changes, kept):
    """A kernel that fails always, as one with a bug in each of its paths does."""
    case = lower(scene_with(big_scene, **changes))
    always = _failing("oracle")
    reduction, _ = minimum(case, always, lambda _: always, domain=ANY, budget_s=60)
    assert facts(reduction.case) | kept == facts(reduction.case)


def test_a_verdict_that_fails_nothing_is_no_finding(big_scene):
    case = lower(big_scene)
    with pytest.raises(ValueError, match="no property failed"):
        minimum(case, Verdict(()), lambda _: Verdict(()), domain=ANY, budget_s=60)
