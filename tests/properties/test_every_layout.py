"""Our kernels are right on every layout that can be, and each new way to be wrong is seen."""

import msgspec
import pytest
from layout_scenes import COMBINATIONS, covering, name_of, scene_of

from kvfuzz.model import case as cases
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import Batch, Sequence
from kvfuzz.model.round_trip import with_round_trip
from kvfuzz.model.scene import OPS
from kvfuzz.reports.places import element, meaning

RELATIONS = {
    "size1_stride",
    "scale_homogeneity",
    "layout_equivariance",
    "block_permutation",
    "batch_invariance",
}


def _wrong(judge, op, combinations):
    """The combinations on which a property of builtin:`op` does not pass, with its name.

    A relation may find nothing to compare a case with.
    """
    judged, wrong = judge(f"builtin:{op}"), []
    for number, combination in enumerate(combinations):
        case = lower(scene_of(combination, op, number))
        cases.check(case)
        cases.check(with_round_trip(case))
        results = judged.verdict(case).results
        wrong += [
            (name_of(combination), r.name)
            for r in results
            if r.outcome == "failed" or (r.outcome == "not_checked" and r.name not in RELATIONS)
        ]
    return wrong


@pytest.mark.parametrize(("op", "size"), [("gather_cache", 3), ("reshape_and_cache", 2)])
def test_our_kernels_pass_every_property_on_a_cover_of_all_layouts(judge, op, size):
    chosen = covering(size)
    assert len(chosen) > 25
    assert _wrong(judge, op, chosen) == []


@pytest.mark.nightly
@pytest.mark.parametrize("op", OPS)
def test_our_kernels_pass_every_property_on_all_layouts(judge, op):
    assert len(COMBINATIONS) > 900
    assert _wrong(judge, op, COMBINATIONS) == []


PLAIN = {
    "layout": "blocks_first",
    "order": "nhd",
    "nesting": "layer_first",
    "page": "exact",
    "value_size": "same",
    "granularity": "tensor",
    "cache_dtype": "e4m3fnuz",
}
SEEN_ON = [
    # (mutant, what it takes to see it)
    ("k_strides_for_v", {"value_size": "wider"}),
    ("one_mask_for_k_and_v", {"value_size": "narrower"}),
    ("v_tokens_not_in_runs", {"order": "x_packed_v", "cache_dtype": "bf16"}),
    ("scale_of_head_zero", {"granularity": "head"}),
    ("scale_of_head_zero", {"granularity": "token_head_inline"}),
    ("scale_of_block_zero", {"granularity": "block_head"}),
    ("scale_strides_from_shape", {"granularity": "token_head_inline"}),
    ("hardcoded_block_stride", {"page": "padded", "layout": "content_packed"}),
    ("hardcoded_block_stride_write", {"nesting": "block_first"}),
    ("shuffle_block_stride", {"order": "shuffle", "page": "padded"}),
    ("head_stride_is_head_size", {"order": "hnd", "nesting": "head_first"}),
]


@pytest.mark.parametrize(("name", "levels"), SEEN_ON)
def test_a_mutant_is_seen_on_the_layout_that_shows_it(judge, name, levels):
    judged = judge(f"mutant:{name}")
    if levels.get("nesting") == "head_first":
        levels = {**levels, "layout": "content_packed"}
    case = lower(scene_of(PLAIN | levels, judged.target.info.op, number=1))
    assert judged.verdict(case).failed != ()


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("k_strides_for_v", {}),
        ("one_mask_for_k_and_v", {}),
        ("scale_of_head_zero", {}),
        ("scale_of_block_zero", {"granularity": "head"}),
        ("scale_strides_from_shape", {"granularity": "token_head"}),
    ],
)
def test_a_mutant_is_right_where_its_layout_does_not_show_it(judge, name, levels):
    judged = judge(f"mutant:{name}")
    case = lower(scene_of(PLAIN | levels, judged.target.info.op, number=1))
    assert judged.verdict(case).failed == ()


def test_a_finding_names_the_layer_whose_bytes_were_overwritten(judge):
    levels = {"nesting": "block_first", "order": "hnd", "layout": "content_packed"}
    scene = scene_of(PLAIN | levels, "reshape_and_cache")
    # Twice a page of K alone behind its own in block 0 is the next layer's page.
    batch = Batch((Sequence((2,), 0, 2),), table_width=1)
    case = lower(msgspec.structs.replace(scene, batch=batch))
    judged = judge("mutant:hardcoded_block_stride_write")
    (frame,) = [each for each in judged.verdict(case).failed if each.name == "frame"]
    place = frame.violation.place
    assert (place.layer, place.field) == ("layer.2", "layer.2.k")
    assert element(place) == "layer.2 k, block 0, head 0, token 0, dim 0"
    assert meaning(case, place) == (
        "layer.2 shares the allocation with layer.1, which the op works on"
    )
