"""Whole pages and states: where their bytes are by closed formulas, and what is impossible."""

import itertools

import pytest
from msgspec.structs import replace

from kvfuzz.errors import UsageError
from kvfuzz.model.fill import LARGE
from kvfuzz.model.held import held
from kvfuzz.model.layout import Geometry
from kvfuzz.model.named_blocks import named_blocks, named_ids
from kvfuzz.model.ops.op_case import lower_op
from kvfuzz.model.ops.page_scene import PageScene
from kvfuzz.model.ops.states import State, StateScene
from kvfuzz.model.plan import AttentionLayer
from kvfuzz.model.tokens import reach

B, N, H, D = 5, 4, 3, 8
LAYER = AttentionLayer("layer", "kv_cache", "blocks_first", "nhd", Geometry(B, N, H, D), "bf16")
COPY = PageScene("copy_blocks", LAYER, ((4, 0), (1, 2)), spare=2)
SWAP = PageScene("swap_blocks", LAYER, ((4, 0), (1, 2)), host="kv_first", host_blocks=3)
ZERO = PageScene("zero_blocks", LAYER, ((4,), (1,)), spare=3)
STATES = StateScene((State("bf16", (3, 4)), State("fp32", (2, 2))), 6, ((5, 1),), padding=12)
P = N * H * D
"""Elements of a page of K."""


def _offsets(layout, order):
    """Elements from the start to K and to V of (block, token, head, dim), by layout and order."""
    row = {"nhd": lambda s, h: s * H + h, "hnd": lambda s, h: h * N + s}[order]
    return {
        "kv_first": (
            lambda b, s, h, d: b * P + row(s, h) * D + d,
            lambda b, s, h, d: B * P + b * P + row(s, h) * D + d,
        ),
        "blocks_first": (
            lambda b, s, h, d: b * 2 * P + row(s, h) * D + d,
            lambda b, s, h, d: b * 2 * P + P + row(s, h) * D + d,
        ),
        "content_packed": (
            lambda b, s, h, d: b * 2 * P + row(s, h) * 2 * D + d,
            lambda b, s, h, d: b * 2 * P + row(s, h) * 2 * D + D + d,
        ),
    }[layout]


def _elements():
    return itertools.product(range(B), range(N), range(H), range(D))


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("layout", ["kv_first", "blocks_first", "content_packed"])
def test_pages_of_k_and_v_lie_where_the_formulas_of_their_layout_say(layout, order):
    case = lower_op(replace(COPY, layer=replace(LAYER, layout=layout, order=order)))
    for name, expected in zip(("key_cache", "value_cache"), _offsets(layout, order), strict=True):
        field, view = case.bound_field(case.steps[0], name), case.tensor(name)
        for b, s, h, d in _elements():
            byte = 2 * expected(b, s, h, d)
            assert field.byte({"block": b, "token": s, "head": h, "dim": d}) == byte
            strides = zip((b, s, h, d), view.strides, strict=True)
            assert view.offset + sum(at * stride for at, stride in strides) == byte


def test_pages_of_the_host_are_k_first_and_dense_whatever_the_device_has():
    layer = replace(LAYER, nesting="block_first", page_padding=32)
    case = lower_op(replace(SWAP, layer=layer, layers=2, index=1))
    page = 2 * 2 * P + 32
    k, v, mine = (case.field(name) for name in ("k_target", "v_target", "k"))
    for b, s, h, d in itertools.product(range(3), range(N), range(H), range(D)):
        at = {"block": b, "token": s, "head": h, "dim": d}
        inside = 2 * (s * H * D + h * D + d)
        # Two layers, one after the other; then K of all three blocks before V of them.
        assert k.byte(at) == 3 * 4 * P + b * 2 * P + inside
        assert v.byte(at) == 3 * 4 * P + 3 * 2 * P + b * 2 * P + inside
        assert mine.byte(at) == b * 2 * page + page + inside
    assert case.buffer("host").nbytes == 2 * 3 * 4 * P


def test_a_host_that_is_like_the_device_has_its_layout_and_no_states():
    hybrid = replace(LAYER, layout="hybrid", page_padding=16)
    case = lower_op(replace(SWAP, layer=hybrid, host="like", state_blocks=(0, 3)))
    names = ("key_cache", "key_target", "value_cache", "value_target")
    views = {name: case.tensor(name) for name in names}
    assert views["key_cache"].strides == views["key_target"].strides
    assert views["value_cache"].offset == views["value_target"].offset
    assert [field.name for field in case.fields if field.name.startswith("state")] == ["state"]
    assert case.field("state").buffer == "kv_cache"


def test_states_lie_one_after_the_other_in_their_block():
    case = lower_op(STATES)
    stride = 24 + 16 + 12
    for name, base, size, (rows, columns) in (
        ("state_0", 0, 2, (3, 4)),
        ("state_1", 24, 4, (2, 2)),
    ):
        field, view = case.field(name), case.tensor(name)
        assert view.shape == (6, rows, columns)
        for b, i, j in itertools.product(range(6), range(rows), range(columns)):
            byte = base + b * stride + size * (columns * i + j)
            assert field.byte({"block": b, "dim": columns * i + j}) == byte
            strides = zip((b, i, j), view.strides, strict=True)
            assert view.offset + sum(at * step for at, step in strides) == byte
    assert case.buffer("kv_cache").nbytes == 6 * stride


def test_a_state_lies_at_a_multiple_of_its_element():
    odd = (State("bf16", (3, 5)), STATES.states[1])
    with pytest.raises(UsageError, match="state 1 of fp32 at byte 30"):
        lower_op(replace(STATES, states=odd))


def test_what_lies_behind_the_entries_is_in_the_buffer_and_in_no_view():
    case = lower_op(ZERO)
    step = case.steps[0]
    assert len(case.written_out(step, "block_ids")) == 5
    assert case.tensor("block_ids").shape == (2,)
    assert named_ids(case, step) == [4, 1]
    case = lower_op(COPY)
    assert case.tensor("block_mapping").shape == (2, 2)
    assert len(case.written_out(case.steps[0], "block_mapping")) == 8
    assert named_blocks(case, case.steps[0], "kv_cache") == [4, 0, 1, 2]


def test_of_a_swap_each_cache_has_the_blocks_of_its_own_side():
    case = lower_op(SWAP)
    assert named_blocks(case, case.steps[0], "kv_cache") == [4, 1]
    assert named_blocks(case, case.steps[0], "host") == [0, 2]


def test_of_huge_caches_the_named_blocks_of_each_side_are_held():
    far = (1 << 31) // (2 * P)
    layer = replace(LAYER, geometry=Geometry(far + 9, N, H, D))
    case = lower_op(replace(SWAP, layer=layer, entries=((far + 5, 3),), host_blocks=far))
    assert reach(case) == "past_2g_elements"
    assert min(case.buffer(name).nbytes for name in ("kv_cache", "host")) > LARGE
    for parameter, block in (("key_cache", far + 5), ("value_cache", far + 5), ("value_target", 3)):
        field = case.bound_field(case.steps[0], parameter)
        kept = held(case, field.buffer)
        assert kept.size < 1 << 16
        kept.position(field.byte({"block": block, "token": N - 1, "head": H - 1, "dim": D - 1}))
    with pytest.raises(ValueError, match="is not held"):
        held(case, "host").position(
            case.field("k_target").byte({"block": far // 2, "token": 0, "head": 0, "dim": 0})
        )


@pytest.mark.parametrize(
    ("scene", "changes", "said"),
    [
        (COPY, {"op": "move_blocks"}, "op='move_blocks', expected one of copy_blocks"),
        (COPY, {"entries": ((0, 1), (2, 1))}, "a block is written twice"),
        (COPY, {"entries": ((0, 1), (1, 2))}, "a block is read and written"),
        (COPY, {"entries": ((0,),)}, "expected 2 numbers each in copy_blocks"),
        (COPY, {"entries": ((0, 5),)}, "outside 5 blocks"),
        (COPY, {"entries": ()}, "0 entries"),
        (COPY, {"index": 1}, "layer 1 of 1"),
        (COPY, {"host": "like"}, "host='like' of 0 blocks in copy_blocks"),
        (COPY, {"state_blocks": (3,)}, "layout=blocks_first with state_blocks"),
        (SWAP, {"host": "none"}, "host='none' of 3 blocks in swap_blocks"),
        (SWAP, {"entries": ((4, 3),)}, "and 3 of the host"),
        (SWAP, {"layer": replace(LAYER, order="x_packed")}, "order=x_packed"),
        (ZERO, {"layer": replace(LAYER, geometry=Geometry(1, N, H, D))}, "the null block"),
        (STATES, {"pairs": ((1, 1),)}, "written twice, or read and written"),
        (STATES, {"pairs": ((1, 6),)}, "outside 6 blocks"),
        (STATES, {"states": ()}, "0 states, expected 1 to 3"),
        (STATES, {"states": (State("bf16", ()),)}, r"a state of bf16 \(\)"),
    ],
)
def test_what_is_impossible_is_said_in_one_line(scene, changes, said):
    with pytest.raises(UsageError, match=said) as error:
        lower_op(replace(scene, **changes))
    assert "\n" not in str(error.value)


def test_a_block_of_mamba_state_is_not_copied():
    hybrid = replace(LAYER, layout="hybrid")
    with pytest.raises(UsageError, match="a block of Mamba state is named"):
        lower_op(replace(COPY, layer=hybrid, state_blocks=(1,)))
    with pytest.raises(UsageError, match="expected each once, in order"):
        lower_op(replace(COPY, layer=hybrid, state_blocks=(3, 3)))
