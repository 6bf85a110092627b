"""vLLM's view builders: releases that hand out wrong views are red, the others are clean."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
from cache_plans import bytes_of_view, drawn_plan_cases
from nights import by_night

from kvfuzz.engine.worker.plan_judge import PlanJudge
from kvfuzz.engine.worker.proving import prove
from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.axes import facts
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.preset_plans import PresetOptions, plan_of
from kvfuzz.model.target import TargetSpec

pytestmark = pytest.mark.thirdparty

V1, V2 = "vllm:v1_cache_views", "vllm:v2_cache_views"
SPLIT, SINCE = "vllm:split_kv_cache", "vllm:create_kv_cache_views"
MIXED = {"form": ("mixed",)}
WITH_STATES = ("full+mamba", "mla+mamba", "full+sliding+mamba")
WITHOUT = ("full", "sliding", "mla", "full+sliding", "full+chunked", "full+cross")


@pytest.fixture
def builder(vllm):
    """The judge of a builder of a release."""

    def make(target, release):
        found = resolve(TargetSpec(target, vllm(release)))
        return PlanJudge(found, SimpleNamespace(name="cpu", arch="gfx942"))

    return make


def _failures(judge, where, count, seed=0):
    """(case, names of what failed) of drawn cases of a part of the builder's domain."""
    domain = judge.target.info.domain
    found = []
    for case in drawn_plan_cases("cache_views", count, seed=seed, domain=domain, where=where):
        verdict = judge.verdict(case)
        assert not verdict.refused, (verdict.refused, case)
        assert all(result.outcome != "not_checked" for result in verdict.results) or verdict.failed
        found.append((case, verdict))
    return found


def _names(verdict):
    return [result.name for result in verdict.failed]


def _has_both_storages(case):
    """Whether some allocation is under layers of both forms, in blocks that can be told apart."""
    return case.plan.num_blocks > 1 and any(
        len({case.plan.layer(name).form for name in each.layers}) > 1
        for each in case.plan.placements
    )


@pytest.mark.parametrize("target", [V1, V2])
def test_mixed_backends_of_0_24_0_disagree_on_blocks_wherever_they_share_bytes(builder, target):
    """#47035 and #47685."""
    judge = builder(target, "0.24.0")
    aliased = 0
    for case, verdict in _failures(judge, MIXED, 200):
        if not _has_both_storages(case):
            continue
        aliased += 1
        (found,) = [result for result in verdict.failed if result.name == "aliasing"]
        assert verdict.failed[0] is found
        said = re.fullmatch(
            r"(\S+) and (\S+) disagree on block (\d+): byte (\d+) of (\S+) is in block \3 of \2 "
            r"and in block (\d+) of \1",
            found.violation.message,
        )
        one, other, mine, byte, allocation, theirs = said.groups()
        assert {case.plan.layer(name).form for name in (one, other)} == {"kv_first", "blocks_first"}
        assert mine != theirs
        place = found.violation.place
        assert (place.buffer, place.byte, place.layer) == (allocation, int(byte), other)
    assert aliased > 60


@pytest.mark.parametrize("target", [V1, V2])
def test_the_byte_that_is_named_is_the_first_of_the_lowest_block_that_is_anothers(builder, target):
    judge = builder(target, "0.24.0")
    checked = 0
    where = {**MIXED, "layers": ("1",), "tokens": ("16",), "heads": ("1",)}
    for case, verdict in _failures(judge, where, 60):
        if "aliasing" not in _names(verdict) or case.nbytes > 20_000:
            continue
        place = verdict.failed[0].violation.place
        one, other = verdict.failed[0].violation.message.split()[0:3:2]
        owner = {one: {}, other: {}}
        for view in judge.run(case).made.views:
            if view.layer in owner:
                owner[view.layer].update(bytes_of_view(view, case.plan.num_blocks).keys())
        wrong = [
            (block, byte)
            for byte, block in owner[other].items()
            if owner[one].get(byte, block) != block
        ]
        assert (place.coordinate["block"], place.byte) == min(wrong)
        checked += 1
    assert checked >= 5


@pytest.mark.parametrize("target", [V1, V2])
def test_mixed_backends_of_0_25_0_are_clean(builder, target):
    found = _failures(builder(target, "0.25.0"), MIXED, 300)
    assert [_names(verdict) for _, verdict in found] == [[]] * 300
    assert sum(_has_both_storages(case) for case, _ in found) > 100


def test_what_aiter_splits_is_clean_beside_kv_first_layers_in_0_24_0(builder):
    """#43945: cross-attention restrided to the storage of the decoder's own."""
    found = _failures(builder(SPLIT, "0.24.0"), MIXED, 300)
    assert [_names(verdict) for _, verdict in found] == [[]] * 300


def test_what_aiter_splits_aliases_blocks_first_layers_of_the_decoder_in_0_24_0(builder):
    where = {"form": ("blocks_first",), "kinds": ("full+cross",), "placement": ("separate",)}
    aliased = Counter()
    for case, verdict in _failures(builder(SPLIT, "0.24.0"), where, 200):
        shared = case.plan.num_blocks > 1 and any(
            {case.plan.layer(name).kind for name in each.layers} == {"full", "cross"}
            for each in case.plan.placements
        )
        aliased[shared, "aliasing" in _names(verdict)] += 1
    assert aliased[True, False] == aliased[False, True] == 0
    assert aliased[True, True] > 60


def test_what_aiter_splits_is_clean_in_0_25_0(builder):
    for form in ("mixed", "blocks_first"):
        where = {"form": (form,), "placement": ("separate",)}
        found = _failures(builder(SPLIT, "0.25.0"), where, 150)
        assert [_names(verdict) for _, verdict in found] == [[]] * 150


RELEASES = pytest.mark.parametrize("release", ["0.24.0", "0.25.0"])


@RELEASES
@pytest.mark.parametrize("target", [V1, V2])
def test_packed_hnd_pages_get_another_shape(builder, target, release):
    """#47314: viewed in the order of the shape, then permuted."""
    where = {"placement": ("packed",), "page_order": ("hnd",)}
    told = Counter()
    for case, verdict in _failures(builder(target, release), where, 150):
        layer = next(layer for layer in case.plan.layers if layer.is_attention)
        same = layer.num_kv_heads == layer.kernel_block_size
        told[_names(verdict)[0] if verdict.failed else "", same] += 1
    assert told == Counter({("shape", False): 150})


@RELEASES
@pytest.mark.parametrize("target", [V1, V2, SPLIT])
def test_packed_states_are_not_put_where_their_pages_are(builder, target, release):
    """A state's view begins at byte 0 of the buffer, wherever the plan packs its page."""
    where = {"placement": ("packed",), "page_order": ("nhd",), "kinds": WITH_STATES}
    told = Counter()
    for case, verdict in _failures(builder(target, release), where, 150):
        failed = _names(verdict)
        slots = max(len([n for n in g if not case.plan.layer(n).shares]) for g in case.plan.groups)
        told[slots > 1 and case.plan.num_blocks > 1, failed[0] if failed else ""] += 1
    assert told[True, ""] == 0
    assert told.keys() <= {
        (several, name)
        for several in (True, False)
        for name in ("", "aliasing", "disjoint", "page_bytes")
    }
    assert told[True, "aliasing"] + told[True, "disjoint"] > 50


@RELEASES
@pytest.mark.parametrize("target", [V1, V2])
def test_whatever_else_the_runners_place_is_clean(builder, target, release):
    judge = builder(target, release)
    forms = ("kv_first", "blocks_first", "latent")
    for where in (
        {"placement": ("separate",), "form": forms, "num_blocks": ("1", "3+")}
        | {"kernel_blocks": ("1", "3", "4+")},
        {"placement": ("packed",), "page_order": ("nhd",), "kinds": WITHOUT},
    ):
        found = _failures(judge, where, 200)
        assert Counter(tuple(_names(verdict)) for _, verdict in found) == {(): 200}


@pytest.mark.parametrize("target", [V1, V2, SPLIT])
@pytest.mark.parametrize("release", [by_night("0.24.0"), "0.25.0"])
def test_no_plan_of_a_builders_domain_is_refused(builder, target, release):
    judge = builder(target, release)
    domain = judge.target.info.domain
    for case in drawn_plan_cases("cache_views", 600, seed=1, domain=domain):
        assert judge.verdict(case).refused == "", (facts(case), case)


def test_views_by_kv_layout_are_clean_in_0_33_0(builder):
    judge = builder(SINCE, "0.33.0")
    found = _failures(judge, None, 400)
    assert [_names(verdict) for _, verdict in found] == [[]] * 400
    shown = Counter(fact for case, _ in found for fact in facts(case).items())
    for axis in ("kv_layout", "form", "kinds", "page_padding", "states", "sharers"):
        domain = judge.target.info.domain.narrowed("cache_views")
        drawn = {level for name, level in shown if name == axis}
        assert drawn <= set(domain.levels(axis))
        assert len(drawn) >= 3


@pytest.mark.parametrize(
    ("target", "release", "lacks"),
    [
        (V1, "0.33.0", "no get_kv_cache_shape in this tree"),
        (V2, "0.33.0", "attn_utils.py has no _reshape_kv_cache: absent in this tree"),
        (SPLIT, "0.33.0", "no get_kv_cache_shape in this tree"),
        (SINCE, "0.24.0", "kv_cache_interface.py has no create_kv_cache_views: absent in this"),
        (SINCE, "0.25.0", "kv_cache_interface.py has no create_kv_cache_views: absent in this"),
    ],
)
def test_a_builder_that_a_release_lacks_is_not_checked(builder, target, release, lacks):
    with pytest.raises(NotCheckedError) as error:
        builder(target, release)
    assert lacks in str(error.value)


@pytest.mark.parametrize("target", [V1, V2, SPLIT, SINCE])
def test_without_a_source_tree_a_builder_is_not_checked(target):
    with pytest.raises(NotCheckedError, match=f"{target} needs --source vllm=DIR"):
        resolve(TargetSpec(target))


def _nemotron_parse():
    return PlanCase("cache_views", plan_of("nemotron-parse", PresetOptions(form="mixed")))


def test_a_model_with_two_backends_is_refuted_on_0_24_0(builder):
    judge = builder(V2, "0.24.0")
    proof = prove(judge.target, _nemotron_parse())
    assert not proof.undecided
    assert [claim.property for claim in proof.refuted] == ["aliasing", "oracle"]
    assert proof.refuted[0].witness.num_blocks == 3
    assert proof.counterexample.plan.num_blocks == 3
    assert "aliasing" in _names(judge.verdict(proof.counterexample))


@pytest.mark.parametrize("target", [V1, V2])
def test_a_model_with_two_backends_is_proved_on_0_25_0(builder, target):
    proof = prove(builder(target, "0.25.0").target, _nemotron_parse())
    assert (proof.undecided, proof.every_count, proof.refuted) == ("", True, ())
    assert [claim.property for claim in proof.claims] == [
        "bounds",
        "shape",
        "aliasing",
        "disjoint",
        "page_bytes",
        "sharing",
        "oracle",
    ]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_models_are_proved_on_0_33_0_for_every_number_of_blocks(builder, layout):
    target = builder(SINCE, "0.33.0").target
    keys = ("llama-3.1-8b", "mistral-7b-v0.1", "gemma-3n-e2b", "deepseek-v3", "kimi-k2")
    if layout in ("BLHNC", "BLNHC", "LBHNC", "LBNHC"):
        keys += ("qwen3-next-80b-a3b", "jamba-1.5-mini", "gpt-oss-20b")
    for key in keys:
        plan = plan_of(key, PresetOptions(layout))
        proof = prove(target, PlanCase("cache_views", plan))
        assert (proof.undecided, proof.every_count, proof.refuted) == ("", True, ()), key
