import itertools

import pytest

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layout import Geometry
from kvfuzz.model.placement import cache_fields
from kvfuzz.model.plan import AttentionLayer
from kvfuzz.model.vocabulary import LAYOUTS, ORDERS, conflict

GEOMETRIES = [Geometry(3, 16, 1, 16), Geometry(4, 16, 3, 32), Geometry(2, 32, 2, 16)]
COMBINATIONS = [
    (layout, order)
    for layout, order in itertools.product(LAYOUTS, ORDERS)
    if conflict({"layout": layout, "order": order}) is None
]


def _fields(layout, order, geometry, dtype):
    return cache_fields(AttentionLayer("layer.0", "kv_cache", layout, order, geometry, dtype))


def _coordinates(field):
    axes = list(field.extents)
    for values in itertools.product(*(range(field.extents[axis]) for axis in axes)):
        yield dict(zip(axes, values, strict=True))


@pytest.mark.parametrize(("layout", "order"), COMBINATIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("dtype", ["bf16", "e4m3fn"])
def test_k_and_v_tile_the_allocation_without_overlap(layout, order, geometry, dtype):
    k, v = _fields(layout, order, geometry, dtype)
    starts = [field.byte(at) for field in (k, v) for at in _coordinates(field)]
    size = itemsize(dtype)
    total = 2 * geometry.num_blocks * geometry.block_size * geometry.num_kv_heads
    assert sorted(starts) == list(range(0, total * geometry.head_size * size, size))


@pytest.mark.parametrize(("layout", "order"), COMBINATIONS)
def test_the_owner_of_every_byte_is_found_back(layout, order):
    k, v = _fields(layout, order, GEOMETRIES[1], "bf16")
    for field, other in ((k, v), (v, k)):
        for at in _coordinates(field):
            byte = field.byte(at) + 1  # the second byte of the element
            assert field.coordinate(byte) == at
            assert other.coordinate(byte) is None


# The closed formulas of vLLM's layouts, element index with P = N*H*D, written independently.
def _kv_first(b, h, n, d, g):
    return b * _page(g) + n * g.num_kv_heads * g.head_size + h * g.head_size + d


def _page(g):
    return g.block_size * g.num_kv_heads * g.head_size


FORMULAS = {
    ("kv_first", "nhd", "k"): _kv_first,
    ("kv_first", "nhd", "v"): lambda b, h, n, d, g: (
        g.num_blocks * _page(g) + _kv_first(b, h, n, d, g)
    ),
    ("blocks_first", "nhd", "v"): lambda b, h, n, d, g: (
        (2 * b + 1) * _page(g) + _kv_first(0, h, n, d, g)
    ),
    ("hybrid", "nhd", "k"): lambda b, h, n, d, g: 2 * b * _page(g) + _kv_first(0, h, n, d, g),
    ("blocks_first", "hnd", "k"): lambda b, h, n, d, g: (
        2 * b * _page(g) + h * g.block_size * g.head_size + n * g.head_size + d
    ),
    ("content_packed", "hnd", "v"): lambda b, h, n, d, g: (
        2 * b * _page(g)
        + h * g.block_size * 2 * g.head_size
        + n * 2 * g.head_size
        + g.head_size
        + d
    ),
    ("content_packed", "nhd", "k"): lambda b, h, n, d, g: (
        2 * b * _page(g) + n * g.num_kv_heads * 2 * g.head_size + h * 2 * g.head_size + d
    ),
    ("kv_first", "shuffle", "k"): lambda b, h, n, d, g: (
        b * _page(g) + h * g.head_size * g.block_size + (d // 8) * g.block_size * 8 + n * 8 + d % 8
    ),
    ("blocks_first", "shuffle", "v"): lambda b, h, n, d, g: (
        (2 * b + 1) * _page(g)
        + h * g.head_size * g.block_size
        + (n // 8) * g.head_size * 8
        + d * 8
        + n % 8
    ),
}


@pytest.mark.parametrize(("layout", "order", "side"), FORMULAS)
def test_addresses_follow_the_published_formula(layout, order, side):
    g = GEOMETRIES[1]
    k, v = _fields(layout, order, g, "bf16")
    field, formula = (k if side == "k" else v), FORMULAS[layout, order, side]
    for at in _coordinates(field):
        index = formula(at["block"], at["head"], at["token"], at["dim"], g)
        assert field.byte(at) == 2 * index


def test_what_excludes_each_other_is_told_with_the_levels_and_the_reason():
    assert conflict({"layout": "content_packed"}) is None
    assert conflict({"layout": "content_packed", "order": "shuffle"}) == (
        "layout=content_packed with order=shuffle: K and V tiles would overlap (#44455)"
    )
    assert "only fp8" in conflict({"cache_dtype": "bf16", "granularity": "head"})


def test_elements_are_counted_in_one_order_whatever_the_order_of_extents():
    k, _ = _fields("kv_first", "hnd", GEOMETRIES[1], "bf16")
    numbers = [k.index(at) for at in _coordinates(k)]
    assert sorted(numbers) == list(range(len(numbers)))
    assert k.index({"block": 1, "token": 2, "head": 1, "dim": 5}) == ((1 * 16 + 2) * 3 + 1) * 32 + 5
