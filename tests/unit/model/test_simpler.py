"""Edits of scenes, the searches that try them, and that no attribute is forgotten."""

import msgspec
import pytest

from kvfuzz.model import simpler
from kvfuzz.model.axes import facts
from kvfuzz.model.batch_edits import run_of
from kvfuzz.model.edits import (
    BATCHES,
    as_far,
    blocks_of,
    renumbered,
    with_block_size,
    with_dtypes,
    with_layout,
    with_part,
    with_sequences,
)
from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.ops import attention_family
from kvfuzz.model.ops.attention import AttentionScene
from kvfuzz.model.plain import SIMPLER, SIZES
from kvfuzz.model.plan import AttentionLayer, Batch, Sequence
from kvfuzz.model.scene import Scene
from kvfuzz.model.search import fewest, first_of, smallest


def _run_of(scene, start, length, drop=0):
    block_size = scene.attention.geometry.block_size
    batch = run_of(scene.batch, 0, block_size, start, length, drop=drop)
    return msgspec.structs.replace(scene, batch=batch)


def _driven(search, will_do):
    """The result of a search, and every candidate that it asked about."""
    asked, answer = [], None
    while True:
        try:
            candidate = search.send(answer)
        except StopIteration as end:
            return end.value, asked
        asked.append(candidate)
        answer = will_do(candidate)


@pytest.mark.parametrize("needed", [set(), {0}, {31}, {7, 20}, set(range(32))])
def test_a_list_is_reduced_to_the_items_that_are_needed(needed):
    items = tuple(range(32))
    left, asked = _driven(fewest(items, items, lambda kept: kept), needed.issubset)
    assert set(left) == needed
    assert len(asked) <= 64


def test_a_list_keeps_its_least_length():
    left, _ = _driven(fewest((1, 2, 3), (1, 2, 3), lambda kept: kept, least=2), lambda kept: True)
    assert len(left) == 2


@pytest.mark.parametrize("least_that_does", [0, 1, 77, 999, 1000])
def test_an_integer_is_bisected(least_that_does):
    search = smallest(1000, 1000, 0, lambda value: value)
    left, asked = _driven(search, lambda value: value >= least_that_does)
    assert left == least_that_does
    assert len(asked) <= 11


def test_the_first_candidate_that_does_is_taken_and_none_leaves_it_as_it_was():
    assert _driven(first_of(9, [1, 2, 3]), lambda value: value > 1) == (2, [1, 2])
    assert _driven(first_of(9, [9, 1]), lambda value: False) == (9, [1])


def test_padding_rows_keep_the_tokens_before_them(write_scene):
    """Padding before the first token and before the fourth, of six and two."""
    assert write_scene.batch.padding == (0, 4)
    first, second = write_scene.batch.sequences
    assert with_sequences(write_scene, (second,)).batch.padding == (0, 3)
    assert with_sequences(write_scene, (second, first)).batch.padding == (0, 4)
    lower(with_sequences(write_scene, (second,)))


def test_a_smaller_block_keeps_the_blocks_of_a_run(gather_scene):
    """Tokens 13 to 18 of blocks of 16: the end of block 0, the start of block 1."""
    small = with_block_size(gather_scene, 4)
    assert small.batch.sequences == (Sequence((3, 1), 3, 4), Sequence((4,), 0, 2))
    lower(small)


def test_a_run_loses_blocks_before_and_behind(gather_scene):
    scene = _run_of(gather_scene, 17, 1, drop=1)
    assert scene.batch.sequences[0] == Sequence((1,), 1, 1)
    assert _run_of(gather_scene, 13, 2).batch.sequences[0] == Sequence((3,), 13, 2)
    lower(scene)


def test_a_plain_layout_and_a_plain_cache_lose_what_only_the_other_has(gather_scene, scene_with):
    hybrid = scene_with(
        gather_scene, layout="hybrid", state_blocks=(0,), cache_dtype="e5m2", k_scale=0x40000000
    )
    plain = with_dtypes(with_layout(hybrid, "kv_first"), ("fp32", "fp32"))
    assert len(plain.plan.layers) == 1
    assert facts(lower(plain))["scale"] == "none"
    assert plain.k_scale == 0x3F800000
    assert with_layout(hybrid, "hybrid") == hybrid


def test_states_move_with_the_blocks_of_their_allocation(gather_scene, scene_with):
    hybrid = scene_with(gather_scene, layout="hybrid", state_blocks=(0, 2))
    assert blocks_of(hybrid) == (3, 1, 4, 0, 2)
    moved = renumbered(hybrid, {3: 0, 1: 1, 4: 2, 0: 4, 2: 3}, 5)
    assert blocks_of(moved) == (0, 1, 2, 3, 4)
    higher = BATCHES.from_block(hybrid, 10)
    assert (blocks_of(higher), higher.attention.geometry.num_blocks) == ((13, 11, 14, 10, 12), 15)


def test_an_edited_case_is_moved_as_far_as_it_was(gather_scene, scene_with):
    first = 1 << 20
    wide = Geometry(num_blocks=first + 5, block_size=16, num_kv_heads=2, head_size=32)
    far = BATCHES.from_block(scene_with(gather_scene, geometry=wide), first)
    case, edited = lower(far), lower(with_part(far, "geometry", num_kv_heads=1))
    again = lower(as_far(edited.scene, first, case, edited))
    assert min(blocks_of(again.scene)) == 2 * first
    assert facts(case)["reach"] == facts(again)["reach"] != "near"
    assert facts(edited)["reach"] != facts(case)["reach"]
    assert again.nbytes <= case.nbytes


def test_every_attribute_of_a_scene_is_in_a_table_or_has_a_pass_of_its_own():
    """Whoever adds one is to say what is plain, or findings will keep what they do not need."""
    passes = {"plan", "batch", "sequences", "padding", "geometry", "num_blocks"}
    names = {"op", "layer", "name", "allocation"}
    together = {"cache_dtype", "model_dtype"}  # in the table as `dtypes`
    own = (*simpler.OWN, *attention_family.OWN)
    table = {each.name for each in (*SIZES, *SIMPLER, *own)}
    assert "dtypes" in table
    for part in (Scene, AttentionScene, AttentionLayer, Geometry, Batch):
        for field in msgspec.structs.fields(part):
            assert field.name in passes | names | together | table, f"{part.__name__}.{field.name}"
