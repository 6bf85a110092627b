"""Drawn scenes of one row a token: a case shows its row, and its bytes lie where formulas say."""

import itertools
from collections import Counter

import pytest
from msgspec.structs import replace

from kvfuzz.errors import UsageError
from kvfuzz.model.any_case import check_case
from kvfuzz.model.axes import AXIS, Domain, axes_of, facts
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.held import held
from kvfuzz.model.ops.latent import LatentScene
from kvfuzz.model.ops.latent_axes import FORMS_OF, LATENT_AXES
from kvfuzz.model.ops.op_case import lower_op
from kvfuzz.model.plan import Batch, Sequence
from kvfuzz.model.round_trip import touched
from kvfuzz.model.seed import Expected, Provenance, Seed, dump, load
from kvfuzz.strategies.boundaries import boundary_rows
from kvfuzz.strategies.cases import drawn_case
from kvfuzz.strategies.choices import Drawn
from kvfuzz.strategies.ops.latent import BOUNDARIES
from kvfuzz.strategies.rows import space

DRAWS = 1500


def _space(op):
    return space(op, Domain().narrowed(op))


@pytest.mark.parametrize("op", FORMS_OF)
def test_a_case_shows_the_row_that_it_was_drawn_by_and_every_level_occurs(op):
    within, seen = _space(op), Counter()
    for seed in range(DRAWS):
        row = within.drawn_row(Drawn(seed))
        case = drawn_case(Drawn(seed), within)
        check_case(case)
        shown = facts(case)
        assert shown == row
        seen.update(shown.items())
    levels = {(axis.name, level) for axis in axes_of(op) for level in axis.levels_for(op)}
    assert levels == set(seen)


@pytest.mark.parametrize("op", FORMS_OF)
def test_every_boundary_has_a_row(op):
    assert len(list(boundary_rows(_space(op), Drawn(0)))) == len(BOUNDARIES[op])


def test_axes_that_other_ops_have_as_well_have_the_same_levels():
    for axis in LATENT_AXES:
        assert AXIS[axis.name].levels == axis.levels


def _scene(op, form, **changes):
    """Two sequences over shuffled blocks of the second of three packed layers."""
    scene = LatentScene(
        op=op,
        form=form,
        num_blocks=6,
        block_size=16,
        latent_size={"fp8_ds_mla": 512, "fp8_ds_mla_v4": 448}.get(form, 32),
        rope_size={"mla": 8, "fp8_ds_mla": 64, "fp8_ds_mla_v4": 64}.get(form, 0),
        cache_dtype="bf16" if form == "mla" else "e4m3fn",
        model_dtype="bf16",
        batch=Batch((Sequence((4, 1), 0, 18), Sequence((3,), 0, 3)), table_width=3),
        layers=3,
        layer=1,
        page_padding=448 if form == "fp8_ds_mla_v4" else 32,
        fill_seed=3,
    )
    return replace(scene, **changes)


SCENES = {(op, form): _scene(op, form) for op, forms in FORMS_OF.items() for form in forms}


def _token_at(scene, block, token):
    """The byte of a token's row in a page whose rows lie together."""
    row = {"mla": 2 * (32 + 8), "fp8_ds_mla": 656}[scene.form]
    page = 16 * row + 32
    return block * 3 * page + page + token * row


def _formulas(scene):
    """By part of a page, the byte of (block, token, dim), written out."""
    if scene.form == "mla":
        return {
            "cached_latent": lambda b, s, d: _token_at(scene, b, s) + 2 * d,
            "cached_rope": lambda b, s, d: _token_at(scene, b, s) + 2 * (32 + d),
        }
    if scene.form == "fp8_ds_mla":
        return {
            "cached_latent": lambda b, s, d: _token_at(scene, b, s) + d,
            "cached_scale": lambda b, s, d: _token_at(scene, b, s) + 512 + 4 * d,
            "cached_rope": lambda b, s, d: _token_at(scene, b, s) + 528 + 2 * d,
        }
    if scene.form == "fp8_ds_mla_v4":
        page = 17 * 576  # 16 tokens of 584 bytes, up to a multiple of 576

        def token(b, s):
            return b * 3 * page + page + s * 576

        return {
            "cached_nope": lambda b, s, d: token(b, s) + d,
            "cached_rope": lambda b, s, d: token(b, s) + 448 + 2 * d,
            "cached_scale": lambda b, s, d: token(b, 16) + 8 * s + d,
        }
    page = 16 * 36 + 32

    def code(b, s, d):
        return s * 32 + d if scene.form == "flat" else d // 16 * 256 + s * 16 + d % 16

    return {
        "cached_k": lambda b, s, d: b * 3 * page + page + code(b, s, d),
        "cached_scale": lambda b, s, d: b * 3 * page + page + 16 * 32 + 4 * s,
    }


@pytest.mark.parametrize("scene", SCENES.values(), ids=map("-".join, SCENES))
def test_parts_of_a_page_lie_where_the_formulas_say_and_apart(scene):
    case = lower_op(scene)
    formulas = _formulas(scene)
    step = case.steps[0]
    assert {name for name in step.fields if name.startswith("cached_")} == set(formulas)
    owned = set()
    for name, at in formulas.items():
        field = case.bound_field(step, name)
        dims = range(field.extents.get("dim", 1))
        for b, s, d in itertools.product(range(6), range(16), dims):
            byte = field.byte({"block": b, "token": s, "dim": d})
            assert byte == at(b, s, d)
            mine = range(byte, byte + itemsize(field.dtype))
            assert owned.isdisjoint(mine)
            owned.update(mine)
    others = [f for f in case.fields if f.layer not in ("", "layer.1")]
    assert {f.layer for f in others} == {"layer.0", "layer.2"}
    assert not any(f.coordinate(byte) for f in others for byte in sorted(owned)[::97])


@pytest.mark.parametrize("scene", SCENES.values(), ids=map("-".join, SCENES))
def test_the_views_of_a_page_start_where_its_layer_does(scene):
    case = lower_op(scene)
    view = case.tensor("kv_cache")
    first = next(iter(_formulas(scene).values()))
    assert view.offset == first(0, 0, 0)
    assert view.strides[0] == first(1, 0, 0) - first(0, 0, 0)
    assert view.shape[0] == 6


def test_slots_and_sequences_name_the_same_tokens():
    slots = [4 * 16 + s for s in range(16)] + [16, 17] + [3 * 16 + s for s in range(3)]
    for scene in SCENES.values():
        case = lower_op(scene)
        assert touched(case, case.steps[0]) == slots


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "tiled"}, "form='tiled' of concat_and_cache_mla"),
        ({"layer": 3}, "layer=3 of 3"),
        ({"cache_dtype": "fp32"}, "cache_dtype=fp32 with model_dtype=bf16 in a page of mla"),
        ({"page_padding": 3}, "page_padding=3, expected a multiple of 2 bytes"),
        ({"scale": 0}, "scale=0x00000000, expected a positive fp32"),
        ({"num_blocks": 4}, "outside num_blocks=4"),
        ({"rope_size": 0}, "rope_size=0, expected 1 or more"),
    ],
)
def test_an_impossible_scene_is_refused_in_one_line(change, message):
    with pytest.raises(UsageError, match=message):
        lower_op(replace(_scene("concat_and_cache_mla", "mla"), **change))


def test_groups_stay_whole_where_rows_have_gaps():
    with pytest.raises(UsageError, match="row_gap=16, expected a multiple of 32 elements"):
        lower_op(_scene("indexer_quant_and_cache", "tiled", row_gap=16))


def test_a_far_cache_holds_the_blocks_of_its_batch_alone():
    far = (1 << 31) // (3 * (16 * 36 + 32)) + 7
    batch = Batch((Sequence((far,), 0, 3),), table_width=1)
    scene = _scene("gather_indexer", "tiled", num_blocks=far + 2, batch=batch)
    case = lower_op(scene)
    kept = held(case, "kv_cache")
    assert facts(case)["reach"] == "past_2g_elements"
    assert kept.nbytes > 1 << 31
    assert kept.size < 1 << 16
    assert kept.position(far * scene.block_stride + scene.page_pitch) > 0


def test_a_seed_of_such_a_case_is_read_back():
    case = lower_op(_scene("concat_and_cache_mla", "fp8_ds_mla"))
    provenance = Provenance("0", "0", "0", "cpu", "gfx942", "")
    seed = Seed("builtin:x", case.op, "oracle", case, Expected("failed", ""), provenance)
    assert load(dump(seed), where="here") == seed
