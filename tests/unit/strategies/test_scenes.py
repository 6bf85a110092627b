"""What strategies draw: possible scenes inside the domain, that show the row they were drawn by."""

from collections import Counter

import pytest

from kvfuzz.errors import UsageError
from kvfuzz.model import case as cases
from kvfuzz.model.axes import TOKEN_AXES, Domain, facts
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.lower import lower
from kvfuzz.model.round_trip import with_round_trip
from kvfuzz.model.scene import OPS, QUANT_OP
from kvfuzz.strategies import drawn_scene, space
from kvfuzz.strategies.choices import Drawn


def drawn(op, domain, count, seed=0):
    within = space(op, domain)
    return [drawn_scene(Drawn((seed << 32) + n), within) for n in range(count)]


@pytest.fixture(scope="module", params=OPS)
def many(request):
    """(op, 1200 scenes of its whole domain)."""
    return request.param, drawn(request.param, Domain().narrowed(request.param), 1200)


def test_every_drawn_scene_lowers_to_a_possible_case(many):
    for scene in many[1]:
        case = lower(scene)
        cases.check(case)
        if scene.op != QUANT_OP:  # nothing undoes it
            cases.check(with_round_trip(case))


def test_a_case_shows_the_row_that_it_was_drawn_by(many):
    op, scenes = many
    within = space(op, Domain().narrowed(op))
    for number, scene in enumerate(scenes):
        assert facts(lower(scene)) == within.drawn_row(Drawn(number)), number


def test_every_level_of_every_axis_is_drawn_and_nothing_outside(many):
    op, collected = many
    shown = Counter(fact for scene in collected for fact in facts(lower(scene)).items())
    expected = {(axis.name, level) for axis in TOKEN_AXES for level in axis.levels_for(op)}
    assert shown.keys() == expected


def test_most_cases_use_several_blocks_and_strides_that_are_not_dense(many):
    shown = [facts(lower(scene)) for scene in many[1]]
    for axis, level in (("blocks_used", "2+"), ("strides", "not_dense"), ("reach", "near")):
        assert sum(each[axis] == level for each in shown) > len(shown) / 2
    consecutive = ("identity", "adjacent")
    assert sum(each["block_ids"] not in consecutive for each in shown) > len(shown) / 2


def test_batches_reach_as_deep_and_wide_as_engines_make_them(many):
    layers = [scene.attention.geometry for scene in many[1]]
    batches = [scene.batch for scene in many[1]]
    sequences = [(each, g) for b, g in zip(batches, layers, strict=True) for each in b.sequences]

    def spanned(each, g):
        return (each.start + each.length - 1) // g.block_size - each.start // g.block_size + 1

    assert max(max(each.block_ids) for each, _ in sequences) > 1000
    assert max(max(each.block_ids) * g.block_size for each, g in sequences) > 1 << 15
    assert max(each.start // g.block_size for each, g in sequences) >= 32
    assert max(spanned(each, g) for each, g in sequences if g.block_size >= 16) >= 4
    assert max(each.length for each, _ in sequences) > 128
    if many[0] == "gather_cache":  # a write has no table
        assert max(batch.table_width for batch in batches) > 64


def test_what_a_domain_narrows_and_forbids_is_never_drawn():
    domain = Domain(
        allowed={"order": ("nhd", "shuffle"), "block_size": ("16", "784"), "head_size": ("64",)},
        forbidden=({"layout": ("hybrid",), "order": ("shuffle",)},),
    ).narrowed("gather_cache")
    for scene in drawn("gather_cache", domain, 300):
        assert domain.refusal(facts(lower(scene))) is None


def test_fp8_scales_of_k_and_v_differ_unless_both_are_one(many):
    for scene in many[1]:
        if DTYPES[scene.attention.cache_dtype].is_quantised and scene.k_scale != 0x3F800000:
            assert scene.k_scale != scene.v_scale


def test_stored_and_loaded_values_stay_in_range(many):
    fp32 = DTYPES["fp32"]
    for scene in many[1]:
        cache, model = DTYPES[scene.attention.cache_dtype], DTYPES[scene.model_dtype]
        largest_scale = max(fp32.decode(scene.k_scale), fp32.decode(scene.v_scale))
        if cache.is_quantised:
            assert cache.max_finite * largest_scale <= model.max_finite


def test_two_streams_of_one_seed_are_equal_and_of_two_seeds_are_not():
    domain = Domain().narrowed("gather_cache")
    first = drawn("gather_cache", domain, 30, seed=3)
    assert drawn("gather_cache", domain, 30, seed=3) == first
    assert drawn("gather_cache", domain, 30, seed=4) != first


def test_the_integers_of_a_scene_make_it_again(many):
    op, scenes = many
    within = space(op, Domain().narrowed(op))
    for number, scene in enumerate(scenes[:100]):
        choices = Drawn(number)
        drawn_scene(choices, within)
        assert drawn_scene(Drawn(12345, choices.values), within) == scene


def test_a_domain_that_leaves_nothing_is_refused_by_its_levels():
    domain = Domain(allowed={"cache_dtype": ("fp32",), "model_dtype": ("bf16",)})
    with pytest.raises(UsageError, match=r"no case shows .*cache_dtype=fp32, model_dtype=bf16"):
        space("gather_cache", domain)


def test_ids_past_15_bits_are_drawn_where_pages_are_tiny_and_large_pages_start_deep():
    tiny = {"block_size": ("1",), "num_kv_heads": ("1",), "head_size": ("8",)}
    near = {"reach": ("near",), "nesting": ("layer_first",), "block_ids": ("shuffled",)}
    within = Domain(allowed={**tiny, **near, "cache_dtype": ("e4m3fn",)}).narrowed("gather_cache")
    ids = [max(scene.batch.sequences[0].block_ids) for scene in drawn("gather_cache", within, 300)]
    assert 1 << 15 < max(ids) < (1 << 16) + 100
    large = {"block_size": ("16",), "num_kv_heads": ("8",), "head_size": ("128",)}
    within = Domain(allowed={**large, **near, "cache_dtype": ("bf16",)}).narrowed("gather_cache")
    scenes = drawn("gather_cache", within, 300)
    assert max(scene.batch.sequences[0].start // 16 for scene in scenes) >= 7
    assert max(lower(scene).nbytes for scene in scenes) < 8 << 20
