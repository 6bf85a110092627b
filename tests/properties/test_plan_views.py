"""Ops on cache plans: ours pass, mutants are caught, and proofs agree with counting bytes."""

import random
from collections import Counter
from functools import cache
from types import SimpleNamespace

import pytest
from cache_plans import bytes_of_view, drawn_plan_cases
from msgspec.structs import replace
from nights import first_by_day

from kvfuzz.engine.worker.plan_judge import PlanJudge
from kvfuzz.engine.worker.proving import prove
from kvfuzz.errors import UsageError
from kvfuzz.kernels.mutants.patches import mutants
from kvfuzz.kernels.own import PLAN_FUNCTIONS
from kvfuzz.kernels.resolve import resolve
from kvfuzz.model import plan_case
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.plan_case import PLAN_OPS, PlanCase
from kvfuzz.model.plan_edits import with_num_blocks
from kvfuzz.model.preset_plans import BEFORE, LAYOUTS, SINCE, PresetOptions, plan_of
from kvfuzz.model.presets import presets
from kvfuzz.model.target import TargetSpec
from kvfuzz.oracles.pieces import NotAffineError
from kvfuzz.oracles.plan_table import PLAN_PROPERTIES
from kvfuzz.oracles.prove import claims, layers_of

MUTANTS = [mutant for mutant in mutants() if mutant.patches in PLAN_FUNCTIONS]
OF_VIEWS = [f"mutant:{mutant.name}" for mutant in MUTANTS if mutant.patches == "cache_views"]
BASIC = ("crash", "bounds", "shape")
OWNERSHIP = ("aliasing", "disjoint", "page_bytes")
CLAIMED = ["bounds", "shape", *OWNERSHIP, "sharing", "oracle"]
LANE = SimpleNamespace(name="cpu", arch="gfx942")
"""No kernel is launched, so that any lane will do."""


def _judge(name):
    return PlanJudge(resolve(TargetSpec(name)), LANE)


def _outcomes(verdict):
    return {result.name: result.outcome for result in verdict.results}


@pytest.fixture(scope="module")
def drawn():
    """Drawn cases by op."""
    return {op: drawn_plan_cases(op, 600) for op in PLAN_OPS}


@pytest.fixture(scope="module")
def judged(drawn):
    """(case, what the target made, outcomes) of every drawn case of views, once for each target."""

    @cache
    def judged_by(target):
        judge = _judge(target)
        cases = drawn["cache_views"]
        return [(case, judge.run(case).made, _outcomes(judge.verdict(case))) for case in cases]

    return judged_by


@pytest.mark.parametrize("op", PLAN_OPS)
def test_what_is_built_in_passes_every_property_on_every_drawn_plan(drawn, op):
    judge = _judge(f"builtin:{op}")
    names = [each.name for each in PLAN_PROPERTIES[op]]
    for case in drawn[op]:
        verdict = judge.verdict(case)
        assert _outcomes(verdict) == dict.fromkeys(names, "passed"), (verdict.failed, case)
        assert len(verdict.digest) == 16
        assert not verdict.refused


def test_the_digest_tells_what_was_made(drawn):
    whole, swapped = _judge("builtin:cache_views"), _judge("mutant:head_slots_swapped")
    for case in drawn["cache_views"][:100]:
        same = whole.verdict(case).digest == swapped.verdict(case).digest
        assert same == (not any(layer.form == "head_slots" for layer in case.plan.layers))


def _static(case, made):
    """What is proved for the plan's own number of blocks."""
    views = sorted(made.views, key=lambda view: (view.layer, view.part))
    count = (case.plan.num_blocks,)
    said = claims(layers_of(case.plan, count), [views], count)
    return {claim.property: claim for claim in said}


def _assert_agreement(case, made, counted):
    """Proofs at the plan's count refute what fails when bytes are counted; they are compared."""
    if any(counted[name] != "passed" for name in BASIC):
        return Counter()
    proved = _static(case, made)
    for name in OWNERSHIP:
        refuted = proved[name].outcome == "refuted"
        assert refuted == (counted[name] == "failed"), (name, proved[name], made.views, case)
    return Counter((name, counted[name]) for name in OWNERSHIP)


@pytest.mark.parametrize("target", first_by_day(["builtin:cache_views", *OF_VIEWS], 3))
def test_what_is_proved_at_one_count_is_what_counting_says(judged, target):
    compared = Counter()
    for each in judged(target):
        compared += _assert_agreement(*each)
    assert compared.total() > 3 * 400


def _wrong(rng, made):
    """The views with one offset or stride changed, of one view or of all of one layer."""
    view = rng.choice(made.views)
    size, page = itemsize(view.dtype), max(view.strides)
    change = size * rng.choice((1, 2, 8, 16, page // size, -1, -8, -(page // size)))
    axis = rng.randrange(len(view.strides) + 1)
    whole = rng.random() < 0.5
    if whole:
        axis, change = rng.choice((0, len(view.strides))), page

    def changed(each):
        if each is not view and not (whole and each.layer == view.layer):
            return each
        if axis == len(each.strides):
            return replace(each, offset=max(0, each.offset + change))
        strides = list(each.strides)
        strides[axis] = max(0, strides[axis] + change)
        return replace(each, strides=tuple(strides))

    return replace(made, views=tuple(map(changed, made.views)))


def _roomy(case):
    """The case with allocations three times as large, so that wrong views stay inside of them."""
    larger = [replace(each, nbytes=3 * each.nbytes) for each in case.plan.allocations]
    return replace(case, plan=replace(case.plan, allocations=tuple(larger)))


def test_proofs_and_counting_agree_on_views_that_are_wrong_at_random(drawn):
    whole, rng, compared = resolve(TargetSpec("builtin:cache_views")), random.Random(0), Counter()
    for case in map(_roomy, drawn["cache_views"]):
        made = _wrong(rng, whole.call(case))
        wrong = SimpleNamespace(call=lambda _, made=made: made, refusals=())
        compared += _assert_agreement(case, made, _outcomes(PlanJudge(wrong, LANE).verdict(case)))
    assert len(compared) == 6
    assert min(compared.values()) > 50, compared


@pytest.mark.parametrize("target", first_by_day(["builtin:cache_views", *OF_VIEWS], 3))
def test_what_is_proved_for_every_count_passes_at_each(drawn, target):
    judge = _judge(target)
    for case in drawn["cache_views"][:250]:
        proof = prove(judge.target, case)
        if proof.undecided or not proof.every_count or proof.refuted:
            continue
        proved = [claim.property for claim in proof.claims]
        assert proved == CLAIMED
        for blocks in (1, 2, 5):
            counted = _outcomes(judge.verdict(with_num_blocks(case, blocks)))
            if counted["crash"] == counted["shape"] == "passed":
                assert {counted[name] for name in proved} == {"passed"}, (blocks, case)


@pytest.mark.parametrize("target", first_by_day(OF_VIEWS, 3))
def test_a_counterexample_of_a_proof_fails_when_its_bytes_are_counted(drawn, target):
    judge = _judge(target)
    for case in drawn["cache_views"][:400]:
        proof = prove(judge.target, case)
        for claim in proof.refuted:
            smaller = with_num_blocks(case, claim.witness.num_blocks)
            plan_case.check(smaller)
            counted = _outcomes(judge.verdict(smaller))
            if all(counted[name] == "passed" for name in BASIC if name != claim.property):
                assert counted[claim.property] == "failed", (claim, smaller)
        if proof.refuted:
            first = proof.refuted[0].witness.num_blocks
            assert proof.counterexample == with_num_blocks(case, first)


def test_every_drawn_plan_is_proved_for_every_count_with_our_views(drawn):
    target = resolve(TargetSpec("builtin:cache_views"))
    for case in drawn["cache_views"]:
        proof = prove(target, case)
        assert (proof.undecided, proof.every_count, proof.refuted) == ("", True, ()), case


def _made(judge, case):
    """What a target made, byte by byte where that is what counts."""
    made = judge.run(case).made
    if case.op == "cache_views":
        return {(view.layer, view.part): view.addresses() for view in made.views}
    if case.op == "transfer_regions":
        return Counter(
            (region.layer, region.allocation, region.address + block * region.stride + byte, block)
            for region in made.regions
            for block in range(case.plan.num_blocks)
            for byte in (0, region.length - 1)
        )
    return made.kernel_blocks


def test_the_mutants_break_all_that_is_about_ownership(judged):
    """Agreement says nothing where all are proved."""
    failed = Counter(
        name
        for target in OF_VIEWS
        for _, _, counted in judged(target)
        for name in OWNERSHIP
        if counted[name] == "failed"
    )
    assert min(failed[name] for name in OWNERSHIP) > 5


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fails_wherever_it_makes_something_else_and_is_named_as_it_says(drawn, mutant):
    whole, broken = _judge(f"builtin:{mutant.patches}"), _judge(f"mutant:{mutant.name}")
    caught = Counter()
    for case in drawn[mutant.patches]:
        verdict = broken.verdict(case)
        failed = [result.name for result in verdict.failed]
        differs = broken.run(case).error or _made(broken, case) != _made(whole, case)
        assert bool(failed) == bool(differs), (failed, case)
        caught.update(failed[:1])
    assert caught[mutant.caught_by] >= 5, caught


CAUGHT_ALONE = {
    "views_by_backend": (
        "aliasing",
        lambda case: (
            case.plan.num_blocks > 1
            and any(
                len({case.plan.layer(name).form for name in each.layers}) > 1
                for each in case.plan.placements
            )
        ),
        {"form": ("mixed",)},
    ),
    "packed_sides_overlap": ("disjoint", lambda case: True, {"form": ("content_packed",)}),
    "head_slots_swapped": ("oracle", lambda case: True, {"form": ("head_slots",)}),
    "states_aligned": (
        "page_bytes",
        lambda case: any(
            layer.states
            and layer.states[0].nbytes % 64
            and layer.page_padded >= layer.page_bytes + 64
            for layer in case.plan.layers
        ),
        {"states": ("2",)},
    ),
    "regions_by_block": (
        "disjoint",
        lambda case: case.plan.num_blocks > 1,
        {"form": ("kv_first",), "kinds": ("full", "sliding", "full+sliding", "full+cross")},
    ),
    "regions_past_the_end": (
        "bounds",
        lambda case: case.plan.num_blocks > 1,
        {"form": ("kv_first",), "kinds": ("full", "sliding", "full+sliding", "full+cross")},
    ),
}


@pytest.mark.parametrize("name", CAUGHT_ALONE)
def test_a_mutant_passes_none_of_the_cases_where_it_must_fail(name):
    prop, must_fail, where = CAUGHT_ALONE[name]
    (mutant,) = [each for each in MUTANTS if each.name == name]
    judge = _judge(f"mutant:{name}")
    cases = [c for c in drawn_plan_cases(mutant.patches, 300, where=where) if must_fail(c)]
    assert len(cases) > 30
    for case in cases:
        assert judge.verdict(case).failed[0].name == prop == mutant.caught_by, case


COMPLETE = [key for key, preset in presets().items() if not preset.incomplete]


def _forms(layout):
    return {"separate": BEFORE, "packed": ("blocks_first",)}.get(layout, SINCE)


def _planned(key, options):
    """The plan of a preset, or why there is none."""
    try:
        return plan_of(key, options), ""
    except UsageError as error:
        return None, str(error)


@pytest.mark.parametrize("layout", first_by_day(LAYOUTS, 4))
def test_every_preset_that_can_be_planned_is_proved_for_every_count(layout):
    target, proved, refused = resolve(TargetSpec("builtin:cache_views")), 0, 0
    for key in COMPLETE:
        for form in _forms(layout):
            plan, refusal = _planned(key, PresetOptions(layout, form))
            if plan is None:
                assert "pages" in refusal
                refused += 1
                continue
            case = PlanCase("cache_views", plan)
            plan_case.check(case)
            proof = prove(target, case)
            assert (proof.undecided, proof.every_count, proof.refuted) == ("", True, ()), (
                key,
                form,
            )
            assert [claim.property for claim in proof.claims] == CLAIMED
            proved += 1
    assert proved >= len(COMPLETE) / 2
    assert refused == 0 or layout in ("LHBNC", "BHLNC", "separate", "LBHNC", "LBNHC")


def test_views_that_are_no_function_of_the_formula_are_refuted_where_it_is_asked(drawn):
    whole = resolve(TargetSpec("builtin:cache_views"))

    def call(case):
        made = whole.call(case)
        if case.plan.num_blocks != 4:
            return made
        first, *others = made.views
        return replace(made, views=(replace(first, offset=2), *others))

    odd = SimpleNamespace(call=call, refusals=())
    decided = Counter()
    for case in drawn["cache_views"][:60]:
        proof = prove(odd, case)
        decided[tuple(claim.property for claim in proof.refuted)] += 1
        assert not proof.undecided
    assert all("oracle" in refuted for refuted in decided), decided


def test_a_refusal_leaves_a_proof_undecided_and_another_exception_refutes(drawn):
    class RefusedError(Exception):
        pass

    def call(case):
        raise RefusedError("no such page")

    case = drawn["cache_views"][0]
    refusing = SimpleNamespace(call=call, refusals=(RefusedError,))
    assert prove(refusing, case).undecided == "the target refused: RefusedError: no such page"
    raising = SimpleNamespace(call=call, refusals=())
    proof = prove(raising, case)
    assert [claim.property for claim in proof.refuted] == ["crash"]
    assert "RefusedError: no such page" in proof.refuted[0].said


def test_ownership_by_our_views_is_what_enumeration_says(drawn):
    """Over small plans, every byte of every view, one by one."""
    whole = resolve(TargetSpec("builtin:cache_views"))
    small = [case for case in drawn["cache_views"] if case.nbytes < 12_000][:40]
    assert len(small) >= 20
    for case in small:
        plan, owner = case.plan, {}
        group_of = plan.group_of
        owners = {layer.name for layer in plan.owners}
        for view in whole.call(case).views:
            if view.layer not in owners:
                continue
            group = group_of[view.layer]
            for (byte, block), count in bytes_of_view(view, plan.num_blocks).items():
                assert count == 1
                there = owner.setdefault((view.allocation, byte), {})
                assert group not in there
                there[group] = block
        assert all(len(set(there.values())) == 1 for there in owner.values())
        per_block = sum(layer.page_bytes for layer in plan.owners)
        assert sum(map(len, owner.values())) == per_block * plan.num_blocks


def test_no_proof_is_made_of_views_that_grow_in_another_way(drawn):
    case = drawn["cache_views"][0]
    whole = resolve(TargetSpec("builtin:cache_views"))
    counts = (3, 4, 7)
    made = [list(whole.call(with_num_blocks(case, count)).views) for count in counts]
    made[1][0] = replace(made[1][0], offset=1)
    with pytest.raises(NotAffineError, match="the offset of"):
        claims(layers_of(with_num_blocks(case, 3).plan, counts), made, counts)


TRUE_SIZE = 64 << 30
"""Bytes of a cache on one device."""


@pytest.mark.parametrize("layout", ["separate", "packed", "BLHNC"])
def test_a_models_cache_of_true_size_costs_no_memory_and_keeps_every_property(layout):
    """Blocks from the first to the last are counted out; the views are over no memory at all."""
    judge = PlanJudge(resolve(TargetSpec("builtin:cache_views")), None)
    sizes = []
    for key in ("qwen3-next-80b-a3b", "whisper-large-v3", "gemma-3n-e4b", "deepseek-v3"):
        one = plan_of(key, PresetOptions(layout=layout, num_blocks=1))
        blocks = TRUE_SIZE // sum(each.nbytes for each in one.allocations)
        plan = plan_of(key, PresetOptions(layout=layout, num_blocks=blocks))
        case = PlanCase("cache_views", plan)
        plan_case.check(case)
        verdict = judge.verdict(case)
        assert {each.outcome for each in verdict.results} == {"passed"}, verdict.failed
        sizes.append(case.nbytes)
    assert all(TRUE_SIZE * 0.9 < size <= TRUE_SIZE for size in sizes)
