"""Placements against independent arithmetic, and what no placement may do: overlap, leave, leak."""

import itertools

import numpy as np
import pytest
from layout_scenes import COMBINATIONS, layer_of, name_of
from msgspec.structs import replace

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layout import Geometry
from kvfuzz.model.placement import cache_fields, occupied, place, state_field
from kvfuzz.model.plan import AttentionLayer


def bytes_of(field):
    """Every byte of every element of a field, as an array."""
    counts = np.indices(tuple(field.extents.values()))
    grid = dict(zip(field.extents, counts, strict=True))
    at = np.full(counts.shape[1:], field.base)
    for term in field.terms:
        digit = grid[term.axis] // term.div
        at = at + term.stride * (digit % term.mod if term.mod else digit)
    return (at.reshape(-1, 1) + np.arange(itemsize(field.dtype))).ravel()


# The six orders of vLLM's KVCacheLayout, outermost axis first, and what they are here.
SIX = {
    "LBHNC": ("hnd", "layer_first"),
    "LBNHC": ("nhd", "layer_first"),
    "LHBNC": ("hnd", "head_first"),
    "BLHNC": ("hnd", "block_first"),
    "BLNHC": ("nhd", "block_first"),
    "BHLNC": ("hnd", "block_head_first"),
}


def strides_of(order, sizes, page_padding):
    """Bytes per step of each axis of `order`: running products from the innermost axis outward.

    Leaving a page, H, N and C of one block of one layer, also skips its padding.
    """
    strides, running, inside = {}, 1, set("HNC")
    for axis in reversed(order):
        if inside == set():
            running, inside = running + page_padding, None
        strides[axis] = running
        running *= sizes[axis]
        if inside:
            inside.discard(axis)
    return strides


@pytest.mark.parametrize(
    ("order", "padding"),
    # vLLM pads pages that lie in one piece only.
    [(o, p) for o in SIX for p in (0, 48, 6) if not p or o not in ("LHBNC", "BHLNC")],
)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("head_size_v", [0, 6, 12])
def test_the_six_orders_of_vllm_are_running_products(order, count, head_size_v, padding):
    inner, nesting = SIX[order]
    geometry = Geometry(3, 4, 2, 8, head_size_v)
    layer = AttentionLayer(
        "l", "a", "content_packed", inner, geometry, "bf16", nesting=nesting, page_padding=padding
    )
    content = 2 * (8 + (head_size_v or 8))
    sizes = {"L": count, "B": 3, "H": 2, "N": 4, "C": content}
    strides = strides_of(order, sizes, padding)
    for index in range(count):
        k, v = cache_fields(layer, index=index, count=count)
        for field, start in ((k, 0), (v, 16)):
            for b, h, n in itertools.product(range(3), range(2), range(4)):
                for d in (0, field.extents["dim"] - 1):
                    expected = start + 2 * d + index * strides["L"]
                    expected += b * strides["B"] + h * strides["H"] + n * strides["N"]
                    at = {"block": b, "head": h, "token": n, "dim": d}
                    assert field.byte(at) == expected
    assert place(layer, count=count).nbytes == count * 3 * (8 * content + padding)


@pytest.mark.parametrize("combination", COMBINATIONS[::7], ids=name_of)
@pytest.mark.parametrize("count", [1, 3])
def test_layers_sides_and_scales_share_no_byte_and_leave_the_padding_over(combination, count):
    layer = layer_of(combination, heads=2, blocks=3, odd=True)
    fields = [
        field for index in range(count) for field in cache_fields(layer, index=index, count=count)
    ]
    everything = np.concatenate([bytes_of(field) for field in fields])
    nbytes = place(layer, count=count).nbytes
    assert everything.min() == 0
    assert everything.max() < nbytes
    assert len(np.unique(everything)) == len(everything) == occupied(fields)
    assert nbytes - len(everything) == count * 3 * layer.page_padding
    scales = [field for field in fields if field.dtype == "fp32"]
    inline = layer.granularity == "token_head_inline"
    assert len(scales) == (2 * count if inline else 0)
    assert all(f.base % 4 == 0 and all(t.stride % 4 == 0 for t in f.terms) for f in scales)


def _layer(layout, order, geometry, dtype="bf16", **more):
    return AttentionLayer("layer.0", "kv_cache", layout, order, geometry, dtype, **more)


G = Geometry(num_blocks=3, block_size=16, num_kv_heads=2, head_size=16, head_size_v=32)
K_SIDE, V_SIDE = 16 * 2 * 16, 16 * 2 * 32  # elements of one page's K, of one page's V


# Closed formulas for sides of unequal size; x is 8 for bf16.
FORMULAS = {
    ("kv_first", "nhd", "k"): lambda b, h, n, d: b * K_SIDE + n * 32 + h * 16 + d,
    ("kv_first", "nhd", "v"): lambda b, h, n, d: 3 * K_SIDE + b * V_SIDE + n * 64 + h * 32 + d,
    ("blocks_first", "hnd", "v"): lambda b, h, n, d: (
        b * (K_SIDE + V_SIDE) + K_SIDE + h * 512 + n * 32 + d
    ),
    ("content_packed", "nhd", "v"): lambda b, h, n, d: (
        b * (K_SIDE + V_SIDE) + n * 96 + h * 48 + 16 + d
    ),
    ("blocks_first", "x_packed", "k"): lambda b, h, n, d: (
        b * (K_SIDE + V_SIDE) + h * 256 + d // 8 * 128 + n * 8 + d % 8
    ),
    ("blocks_first", "x_packed", "v"): lambda b, h, n, d: (
        b * (K_SIDE + V_SIDE) + K_SIDE + h * 512 + d * 16 + n
    ),
    ("hybrid", "x_packed_v", "v"): lambda b, h, n, d: (
        b * (K_SIDE + V_SIDE) + K_SIDE + h * 512 + n // 8 * 256 + d * 8 + n % 8
    ),
    ("kv_first", "shuffle", "v"): lambda b, h, n, d: (
        3 * K_SIDE + b * V_SIDE + h * 512 + n // 8 * 256 + d * 8 + n % 8
    ),
}


@pytest.mark.parametrize(("layout", "order", "side"), FORMULAS)
def test_sides_of_unequal_size_follow_their_closed_formula(layout, order, side):
    k, v = cache_fields(_layer(layout, order, G))
    field, formula = (k if side == "k" else v), FORMULAS[layout, order, side]
    for b, h, n in itertools.product(range(3), range(2), range(16)):
        for d in range(field.extents["dim"]):
            at = {"block": b, "head": h, "token": n, "dim": d}
            assert field.byte(at) == 2 * formula(b, h, n, d)


# Inline scales: [K | fp32 | V | fp32] per head and token, and rows of K or V with an fp32 behind.
INLINE = {
    ("content_packed", "hnd", "k_scale"): lambda b, h, n: b * 1792 + h * 896 + n * 56 + 16,
    ("content_packed", "hnd", "v_scale"): lambda b, h, n: b * 1792 + h * 896 + n * 56 + 52,
    ("blocks_first", "nhd", "k_scale"): lambda b, h, n: b * 1792 + n * 40 + h * 20 + 16,
    ("blocks_first", "nhd", "v_scale"): lambda b, h, n: b * 1792 + 640 + n * 72 + h * 36 + 32,
}


@pytest.mark.parametrize(("layout", "order", "name"), INLINE)
def test_inline_scales_lie_behind_the_row_they_are_for(layout, order, name):
    layer = _layer(layout, order, G, "e4m3fnuz", granularity="token_head_inline")
    field = next(field for field in cache_fields(layer) if field.name == name)
    for b, h, n in itertools.product(range(3), range(2), range(16)):
        expected = INLINE[layout, order, name](b, h, n)
        assert field.byte({"block": b, "head": h, "token": n}) == expected


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("nesting", ["layer_first", "block_first"])
def test_mamba_state_is_the_whole_block_of_every_layer_with_its_padding(nesting, count):
    layer = _layer("hybrid", "nhd", replace(G, head_size_v=0), nesting=nesting, page_padding=6)
    state = state_field(layer, count, name="state", owner="layer.9", blocks=(1,))
    page = 2 * 2 * K_SIDE + 6
    assert state.extents == {"block": 3, "dim": count * page}
    held = {state.byte({"block": 1, "dim": dim}) for dim in range(state.extents["dim"])}
    starts = (
        [page * count]
        if nesting == "block_first"
        else [region * 3 * page + page for region in range(count)]
    )
    length = page * count if nesting == "block_first" else page
    assert held == {at for start in starts for at in range(start, start + length)}
    for byte in held:
        found = state.coordinate(byte)
        assert found is not None
        assert state.byte(found) == byte
    assert state.coordinate(0) is None


@pytest.mark.parametrize("combination", COMBINATIONS[::29], ids=name_of)
def test_the_owner_of_a_byte_is_found_back_in_any_layout(combination):
    layer = layer_of(combination, blocks=2)
    fields = cache_fields(layer, index=1, count=2)
    for field in fields:
        for number, byte in enumerate(bytes_of(field)[:: itemsize(field.dtype)][:400]):
            found = field.coordinate(int(byte))
            assert found is not None
            assert field.byte(found) == byte, number
            assert all(other.coordinate(int(byte)) is None for other in fields if other != field)
