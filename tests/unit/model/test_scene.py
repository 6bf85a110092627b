import pytest
from layout_scenes import COMBINATIONS, name_of, scene_of
from msgspec.structs import replace

from kvfuzz.errors import UsageError
from kvfuzz.model import case as cases
from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import Plan, Sequence
from kvfuzz.model.round_trip import with_round_trip
from kvfuzz.model.rules import READ_SCALES
from kvfuzz.model.scene import check
from kvfuzz.model.steps import check_steps

INLINE = {"cache_dtype": "e4m3fn", "granularity": "token_head_inline"}
IMPOSSIBLE = {
    "op='nop'": {"op": "nop"},
    "layout='zigzag'": {"layout": "zigzag"},
    "num_kv_heads=0": {"geometry": Geometry(5, 16, 0, 32)},
    "cache_dtype='fp4'": {"cache_dtype": "fp4"},
    "model_dtype='e4m3fn'": {"model_dtype": "e4m3fn"},
    "has the model's dtype": {"cache_dtype": "fp16"},
    "K and V tiles would overlap": {"layout": "content_packed", "order": "shuffle"},
    "divisible by 8": {"order": "shuffle", "geometry": Geometry(5, 16, 2, 12)},
    "state_blocks=(0,)": {"state_blocks": (0,)},
    "k_scale=0x00000000": {"k_scale": 0},
    "v_scale=0x7fc00000": {"v_scale": 0x7FC00000},
    "two owners": {"sequences": (Sequence((1,), 0, 1), Sequence((1,), 3, 1))},
    "outside num_blocks": {"sequences": (Sequence((9,), 0, 1),)},
    "outside a sequence": {"sequences": (Sequence((1,), 10, 7),)},
    "table_width=1": {"table_width": 1},
    "padding rows (99,)": {"padding": (99,)},
    "without tokens": {"sequences": (Sequence((1,), 0, 0),)},
    "row_gap=-8": {"row_gap": -8},
    "nesting='inside_out'": {"nesting": "inside_out"},
    "granularity='page'": {"granularity": "page"},
    "head_size_v=-1": {"geometry": Geometry(5, 16, 2, 32, -1)},
    "page_padding=3, expected a multiple of 2": {"page_padding": 3},
    "page_padding=-2": {"page_padding": -2},
    "expected a multiple of 4 bytes": {**INLINE, "page_padding": 6},
    "divisible by 4: the scale behind is an fp32": {
        **INLINE,
        "geometry": Geometry(5, 16, 2, 30),
    },
    "head_size_v=20 divisible by 8": {
        "order": "x_packed",
        "geometry": Geometry(5, 16, 2, 32, 20),
    },
    "block_size=12 divisible by 8": {
        "order": "x_packed_v",
        "geometry": Geometry(5, 12, 2, 32),
    },
    "only fp8 caches have scales": {"granularity": "head"},
    "the tokens of a head lie side by side": {"layout": "content_packed", "nesting": "head_first"},
    "values=ties with granularity=head": {
        "cache_dtype": "e4m3fn",
        "granularity": "head",
        "values": "ties",
    },
    "expected four times as much to be finite": {
        "cache_dtype": "e4m3fn",
        "granularity": "head",
        "k_scale": 0x7F000000,
    },
    "bytes that hold scales, expected less than": {
        **INLINE,
        "geometry": Geometry(1 << 20, 16, 2, 32),
    },
    "67108864 bytes that hold scales": {
        "cache_dtype": "e4m3fn",
        "granularity": "block_head",
        "geometry": Geometry(1 << 23, 16, 2, 32),
    },
}


@pytest.mark.parametrize("hint", IMPOSSIBLE)
def test_an_impossible_scene_is_refused_in_one_line(gather_scene, scene_with, hint):
    with pytest.raises(UsageError) as error:
        check(scene_with(gather_scene, **IMPOSSIBLE[hint]))
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


def test_layers_that_share_an_allocation_are_laid_out_alike(gather_scene):
    layer = gather_scene.attention
    other = replace(layer, name="layer.1", page_padding=16)
    with pytest.raises(UsageError, match=r"layers layer\.0 and layer\.1 share .* differ in more"):
        check(replace(gather_scene, plan=Plan((layer, other))))
    check(replace(gather_scene, plan=Plan((layer, replace(other, allocation="another")))))


@pytest.mark.parametrize("combination", COMBINATIONS[::50], ids=name_of)
@pytest.mark.parametrize("op", READ_SCALES)
def test_a_round_trip_has_the_pages_and_scales_of_its_case(combination, op):
    case = lower(scene_of(combination, op, 1))
    both = with_round_trip(case)
    cases.check(both)
    if op == "reshape_and_cache":
        check_steps(both)  # which wants the target's step first
    for step in both.steps:
        for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
            assert both.bound_field(step, name) == case.bound_field(case.steps[0], name)
            assert step.tensors[name] == case.steps[0].tensors[name]
        sizes = [both.bound_field(step, name).extents["dim"] for name in ("key", "value")]
        assert sizes == [case.geometry.head_size, case.geometry.value_size]


def test_what_lowers_is_a_possible_case(gather_scene, write_scene):
    for scene in (gather_scene, write_scene):
        case = lower(scene)
        cases.check(case)
        cases.check(with_round_trip(case))


def test_padding_rows_take_the_slot_minus_one_and_push_tokens_back(write_scene):
    case = lower(write_scene)
    mapping = case.integers(case.steps[0], "slot_mapping")
    assert mapping == (-1, 61, 62, 63, -1, 16, 17, 18, 64, 65)


def test_a_round_trip_gathers_each_stored_token_as_a_sequence_of_its_own(write_scene):
    case = with_round_trip(lower(write_scene))
    write, gather = case.steps
    assert (write.by, gather.by) == ("target", "partner")
    assert case.integers(gather, "block_table") == (3, 3, 3, 1, 1, 1, 4, 4)
    assert case.integers(gather, "seq_starts") == (13, 14, 15, 0, 1, 2, 0, 1)


def test_a_round_trip_of_a_gather_writes_what_it_reads_first(gather_scene):
    case = with_round_trip(lower(gather_scene))
    assert [step.by for step in case.steps] == ["partner", "target"]
    assert case.integers(case.steps[0], "slot_mapping") == (61, 62, 63, 16, 17, 18, 64, 65)
