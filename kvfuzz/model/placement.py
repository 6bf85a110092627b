"""Where the pages of an attention layer lie in its allocation: from a layer to its fields.

Every layout is K and V rows, one per token and head, at a token, head, block and layer stride. A
row of K has `head_size` elements and a row of V `head_size_v`, each followed by its fp32 scale
where scales are inline; in a content_packed cache a row holds both. `order` and `nesting` say in
which sequence the strides grow, `page_padding` widens the first stride that leaves a page.
"""

import math
from collections.abc import Iterable

import msgspec

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layout import Axis, Field, Term
from kvfuzz.model.plan import AttentionLayer
from kvfuzz.model.vocabulary import SCALE_BYTES, SPLIT_DIM, SPLIT_TOKEN, x_of

SCALE_AXES: dict[str, tuple[Axis, ...]] = {
    "tensor": (),
    "head": ("head",),
    "block_head": ("block", "head"),
    "token_head": ("block", "token", "head"),
    "token_head_inline": ("block", "token", "head"),
}
"""By granularity: what a scale depends on, in the order of its tensor's axes."""


class Side(msgspec.Struct, frozen=True):
    """Where K, or V, of one layer begins and how far apart its parts are, in bytes."""

    base: int
    block: int
    head: int
    token: int


class Placement(msgspec.Struct, frozen=True):
    """Both sides of one layer, and the bytes of the allocation and of one page with its padding."""

    k: Side
    v: Side
    nbytes: int
    page: int


def row_bytes(layer: AttentionLayer) -> tuple[int, int]:
    """Bytes of one row of K and of one row of V, inline scales included."""
    inline = SCALE_BYTES if layer.granularity == "token_head_inline" else 0
    element, g = itemsize(layer.cache_dtype), layer.geometry
    return g.head_size * element + inline, g.value_size * element + inline


def place(layer: AttentionLayer, *, index: int = 0, count: int = 1) -> Placement:
    """The placement of the layer that is number `index` of `count` in its allocation."""
    g = layer.geometry
    k_row, v_row = row_bytes(layer)
    rows = g.block_size * g.num_kv_heads
    page = rows * (k_row + v_row) + layer.page_padding
    nbytes = count * g.num_blocks * page
    if layer.layout == "kv_first":
        base = index * g.num_blocks * page
        k_side, v_side = rows * k_row, rows * v_row
        return Placement(
            Side(base, k_side, *_inner(layer, k_row)),
            Side(base + g.num_blocks * k_side, v_side, *_inner(layer, v_row)),
            nbytes,
            page,
        )
    v_after = rows * k_row
    if layer.layout == "content_packed":
        v_after = k_row
        k_row = v_row = k_row + v_row
    (k_head, k_token), (v_head, v_token) = _inner(layer, k_row), _inner(layer, v_row)
    cell = g.block_size * k_row  # the tokens of one head, where heads lie outside of blocks
    block, step = page, g.num_blocks * page
    if layer.nesting == "block_first":
        block, step = count * page, page
    elif layer.nesting == "head_first":
        block, step = cell, g.num_kv_heads * g.num_blocks * cell
        k_head = v_head = g.num_blocks * cell
    elif layer.nesting == "block_head_first":
        block, step = g.num_kv_heads * count * cell, cell
        k_head = v_head = count * cell
    base = index * step
    return Placement(
        Side(base, block, k_head, k_token),
        Side(base + v_after, block, v_head, v_token),
        nbytes,
        page,
    )


def _inner(layer: AttentionLayer, row: int) -> tuple[int, int]:
    """The head and the token stride inside a page whose rows are `row` bytes apart."""
    if layer.order == "nhd":
        return row, layer.geometry.num_kv_heads * row
    return layer.geometry.block_size * row, row


def scale_extents(layer: AttentionLayer) -> dict[Axis, int]:
    """The axes that a scale depends on, with their extents; none where there is one scale."""
    every = _extents(layer)
    return {axis: every[axis] for axis in SCALE_AXES[layer.granularity]}


def cache_fields(
    layer: AttentionLayer, *, index: int = 0, count: int = 1, prefix: str = ""
) -> tuple[Field, ...]:
    """The fields of one layer's pages: k, v, and k_scale, v_scale where they are inline.

    `prefix` goes before each name, to tell the layers of an allocation apart.
    """
    at = place(layer, index=index, count=count)
    element, g = itemsize(layer.cache_dtype), layer.geometry
    fields = [
        _side(layer, prefix + "k", at.k, _k_terms(layer, at.k), g.head_size),
        _side(layer, prefix + "v", at.v, _v_terms(layer, at.v), g.value_size),
    ]
    if layer.granularity == "token_head_inline":
        fields += [
            _inline(layer, prefix + "k_scale", at.k, g.head_size * element),
            _inline(layer, prefix + "v_scale", at.v, g.value_size * element),
        ]
    return tuple(fields)


def _extents(layer: AttentionLayer) -> dict[Axis, int]:
    g = layer.geometry
    return {"block": g.num_blocks, "head": g.num_kv_heads, "token": g.block_size}


def _side(
    layer: AttentionLayer, name: str, at: Side, terms: tuple[Term, ...], head_size: int
) -> Field:
    extents = _extents(layer) | {"dim": head_size}
    return Field(name, layer.allocation, layer.cache_dtype, at.base, terms, extents, layer.name)


def _inline(layer: AttentionLayer, name: str, at: Side, after: int) -> Field:
    terms = (Term("block", at.block), Term("token", at.token), Term("head", at.head))
    return Field(
        name, layer.allocation, "fp32", at.base + after, terms, _extents(layer), layer.name
    )


def _k_terms(layer: AttentionLayer, at: Side) -> tuple[Term, ...]:
    element = itemsize(layer.cache_dtype)
    if layer.order not in SPLIT_DIM:
        return _plain(at, element)
    x, n = x_of(layer.cache_dtype), layer.geometry.block_size
    return (
        Term("block", at.block),
        Term("head", at.head),
        Term("dim", n * x * element, x),
        Term("token", x * element),
        Term("dim", element, 1, x),
    )


def _v_terms(layer: AttentionLayer, at: Side) -> tuple[Term, ...]:
    element, g = itemsize(layer.cache_dtype), layer.geometry
    if layer.order not in SPLIT_DIM:
        return _plain(at, element)
    block_head = (Term("block", at.block), Term("head", at.head))
    if layer.order not in SPLIT_TOKEN:
        return (*block_head, Term("dim", g.block_size * element), Term("token", element))
    x = x_of(layer.cache_dtype)
    return (
        *block_head,
        Term("token", g.value_size * x * element, x),
        Term("dim", x * element),
        Term("token", element, 1, x),
    )


def _plain(at: Side, element: int) -> tuple[Term, ...]:
    return (
        Term("block", at.block),
        Term("token", at.token),
        Term("head", at.head),
        Term("dim", element),
    )


def state_field(
    layer: AttentionLayer, count: int, *, name: str, owner: str, blocks: tuple[int, ...]
) -> Field:
    """The bytes of Mamba state that lie where the pages of `blocks` of `count` layers would.

    A block of state is as large as its neighbour's pages, padding included: that is what pages are
    padded for. Its bytes are counted through the regions of the layers.
    """
    at = place(layer, count=count)
    inside = count * at.page if layer.nesting == "block_first" else at.page
    terms = [Term("block", at.k.block), Term("dim", 1)]
    if inside < count * at.page:
        region = layer.geometry.num_blocks * at.page
        terms = [Term("block", at.k.block), Term("dim", region, at.page), Term("dim", 1, 1, inside)]
    extents: dict[Axis, int] = {"block": layer.geometry.num_blocks, "dim": count * at.page}
    return Field(name, layer.allocation, "u8", 0, tuple(terms), extents, owner, blocks)


def occupied(fields: Iterable[Field]) -> int:
    """Bytes of all elements of `fields`."""
    return sum(math.prod(each.extents.values()) * itemsize(each.dtype) for each in fields)
