import itertools

import pytest
from layout_scenes import COMBINATIONS as EVERY
from layout_scenes import ONE, layer_of, name_of, scene_of
from msgspec.structs import replace

from kvfuzz.errors import UsageError
from kvfuzz.model.axes import AXIS, TOKEN_AXES, Domain, axes_of, facts, parse_where
from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.ops.table import BY_OP
from kvfuzz.model.plan import Batch, Plan, Sequence
from kvfuzz.model.plan_case import PLAN_OPS
from kvfuzz.model.scene import Scene
from kvfuzz.model.script import STATEFUL_OP
from kvfuzz.model.vocabulary import LAYOUTS, NESTINGS, ORDERS, conflict


def test_every_fact_is_a_level_of_its_axis(gather_scene, write_scene):
    for scene in (gather_scene, write_scene):
        shown = facts(lower(scene))
        assert list(shown) == [axis.name for axis in TOKEN_AXES]
        for axis in TOKEN_AXES:
            assert shown[axis.name] in axis.levels_for(scene.op)


@pytest.mark.parametrize("op", [*BY_OP, "gather_cache", *PLAN_OPS, STATEFUL_OP])
def test_axes_of_one_name_have_the_same_levels_in_every_family(op):
    for axis in axes_of(op):
        assert axis.levels == AXIS[axis.name].levels, axis.name


COMBINATIONS = [
    (layout, order)
    for layout, order in itertools.product(LAYOUTS, ORDERS)
    if conflict({"layout": layout, "order": order}) is None
]


@pytest.mark.parametrize(("layout", "order"), COMBINATIONS)
@pytest.mark.parametrize("heads", [1, 2])
def test_layout_and_order_are_read_off_the_fields(gather_scene, scene_with, layout, order, heads):
    scene = scene_with(
        gather_scene,
        layout=layout,
        order=order,
        geometry=Geometry(5, 16, heads, 32),
        state_blocks=(0,) if layout == "hybrid" else (),
    )
    shown = facts(lower(scene))
    assert (shown["layout"], shown["order"]) == (layout, order)


@pytest.mark.parametrize("number", range(0, len(EVERY), 11), ids=lambda n: name_of(EVERY[n]))
def test_every_layout_attribute_is_read_off_the_fields(number):
    scene = scene_of(EVERY[number], "gather_cache", number)
    shown = facts(lower(scene))
    assert {axis: shown[axis] for axis in EVERY[number]} == EVERY[number]


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_nestings_that_are_the_same_bytes_are_told_as_the_plainest(heads, blocks, nesting):
    """With one layer, or with one head or block, some are; otherwise none is."""
    layer = layer_of(
        {
            "layout": "content_packed",
            "order": "hnd",
            "nesting": nesting,
            "page": "exact",
            "value_size": "same",
            "granularity": "tensor",
            "cache_dtype": "bf16",
        },
        heads=heads,
        blocks=blocks,
    )
    for count in (1, 2):
        others = [replace(layer, name=f"other.{n}") for n in range(count - 1)]
        scene = Scene(
            "gather_cache",
            layer.name,
            Plan((layer, *others)),
            Batch((Sequence((blocks - 1,), 0, 2),), table_width=1),
            "bf16",
            ONE,
            ONE,
        )
        case = lower(scene)
        told = facts(case)["nesting"]
        plainest = replace(layer, nesting=told)
        same = lower(
            replace(scene, plan=Plan((plainest, *(replace(o, nesting=told) for o in others))))
        )
        assert _addresses(case) == _addresses(same)
        if count == 2 and heads == 2 and blocks == 2:
            assert told == nesting


def _addresses(case):
    fields = [field for field in case.fields if field.buffer == "kv_cache"]
    return {
        (field.name, block, head, token): field.byte(
            {"block": block, "head": head, "token": token, "dim": 0}
        )
        for field in fields
        for block in range(field.extents["block"])
        for head in range(field.extents["head"])
        for token in range(field.extents["token"])
    }


def test_facts_of_the_batch_follow_what_the_op_touches(gather_scene, write_scene, scene_with):
    shown = facts(lower(gather_scene))
    assert shown["blocks_used"] == "2+"
    assert shown["block_ids"] == "shuffled"
    assert shown["first_offset"] == "inside"
    assert facts(lower(write_scene))["padding"] == "some"
    assert facts(lower(write_scene))["rows"] == "gapped"
    one = scene_with(gather_scene, sequences=(Sequence((0,), 0, 3),))
    assert facts(lower(one))["blocks_used"] == "1"
    assert facts(lower(one))["block_ids"] == "identity"


def test_where_collects_levels_per_axis():
    where = parse_where("order=nhd|hnd, layout=hybrid,layout=kv_first")
    assert where == {"order": ("nhd", "hnd"), "layout": ("hybrid", "kv_first")}
    assert parse_where("") == {}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("layuot=hybrid", "did you mean layout?"),
        ("layout=hybird", "did you mean hybrid?"),
        ("layout", "expected AXIS=LEVEL"),
        ("cache_dtype=fp8", "did you mean"),
    ],
)
def test_where_names_what_it_does_not_know(text, hint):
    with pytest.raises(UsageError, match="--where") as error:
        parse_where(text)
    assert hint in str(error.value)


def test_a_domain_refuses_levels_and_combinations_with_the_reason():
    domain = Domain(
        allowed={"order": ("nhd",)}, forbidden=({"layout": ("hybrid",), "scale": ("general",)},)
    )
    assert domain.refusal({"order": "nhd", "layout": "hybrid", "scale": "unit"}) is None
    assert "order=hnd" in domain.refusal({"order": "hnd"})
    assert "forbidden" in domain.refusal({"layout": "hybrid", "scale": "general"})


def test_narrowing_to_what_the_target_does_not_accept_is_refused():
    with pytest.raises(UsageError, match="on this target takes order=nhd"):
        Domain(allowed={"order": ("nhd",)}).narrowed("gather_cache", {"order": ("shuffle",)})


def test_narrowing_to_what_the_op_cannot_show_is_refused():
    with pytest.raises(UsageError, match=r"--where padding=some: gather_cache .* padding=none"):
        Domain().narrowed("gather_cache", {"padding": ("some",)})
    assert Domain().narrowed("reshape_and_cache").levels("padding") == ("none", "some")
