"""Where the bytes of (block, head, token, dim) lie: fields with mixed-radix affine maps.

A field is one named part of a cache or of an activation tensor (k, v, state, key, value). Its map
gives the first byte of an element:

    byte = base + sum(stride_i * ((coordinate[axis_i] // div_i) % mod_i))

with strides in bytes. Plain strided layouts need one term per axis; SHUFFLE splits an axis in two.
Oracles compute every address from fields and never from a tensor view.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from kvfuzz.model.dtypes import itemsize

Axis = Literal["block", "head", "token", "dim"]


class Term(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One digit of a coordinate: `stride` bytes for each step of `(axis // div) % mod`.

    An array in JSON, since a case holds dozens.

    `mod` 0 means that the digit is not bounded by a further split.
    """

    axis: Axis
    stride: int
    div: int = 1
    mod: int = 0

    def digits(self, extent: int) -> int:
        """How many values the digit takes when its axis runs over `extent`."""
        whole = -(-extent // self.div)
        return min(whole, self.mod) if self.mod else whole


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named part of `buffer`: elements of `dtype` over `extents`, placed by `terms`.

    For an activation (key, value) `token` counts the rows of the batch; for a cache field it
    counts tokens inside a block. `layer` names the layer whose cache this is, or is empty.
    `blocks` are the block ids that belong to the field where it has some of an allocation's
    blocks only; empty means all. A field that names its blocks stands before one that does not.
    """

    name: str
    buffer: str
    dtype: str
    base: int
    terms: tuple[Term, ...]
    extents: dict[Axis, int]
    layer: str = ""
    blocks: tuple[int, ...] = ()

    def byte(self, coordinate: Mapping[Axis, int]) -> int:
        """Byte address in the buffer of the element at `coordinate`."""
        offset = self.base
        for term in self.terms:
            digit = coordinate[term.axis] // term.div
            offset += term.stride * (digit % term.mod if term.mod else digit)
        return offset

    def last_byte(self) -> int:
        """The largest byte address that any element of the field occupies."""
        reach = sum(
            term.stride * (term.digits(self.extents[term.axis]) - 1)
            for term in self.terms
            if term.stride > 0
        )
        return self.base + reach + itemsize(self.dtype) - 1

    def coordinate(self, byte: int) -> dict[Axis, int] | None:
        """The element that owns `byte`, or None where the field has no element there.

        Digits are taken greedily from the widest stride down, which is exact for every map whose
        elements do not overlap.
        """
        rest = byte - self.base
        if rest < 0:
            return None
        found: dict[Axis, int] = dict.fromkeys(self.extents, 0)
        for term in sorted(self.terms, key=lambda term: -term.stride):
            digit = min(rest // term.stride, term.digits(self.extents[term.axis]) - 1)
            rest -= digit * term.stride
            found[term.axis] += digit * term.div
        inside = all(found[axis] < self.extents[axis] for axis in found)
        if self.blocks and found["block"] not in self.blocks:
            return None
        return found if inside and rest < itemsize(self.dtype) else None


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes of one layer's cache, counted in blocks, tokens, heads and elements."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int


class Placement(msgspec.Struct, frozen=True):
    """Where V of one layer lies, and how far apart blocks, tokens and heads are, in bytes."""

    v_base: int
    block_stride: int
    token_stride: int
    head_stride: int


LAYOUTS: tuple[str, ...] = ("kv_first", "blocks_first", "hybrid", "content_packed")
"""How K and V share the allocation (formulas: vLLM, by release).

kv_first        (2, B, N, H, D): all K pages, then all V pages; #43660 moved AITER away from it
blocks_first    (B, 2, N, H, D): K page and V page of a block side by side
hybrid          the interleave [K0][V0][K1][V1] of attention beside Mamba pages (#37228)
content_packed  (B, H, N, 2D): K and V of one token and head side by side (#44455)
"""

ORDERS: tuple[str, ...] = ("nhd", "hnd", "shuffle")
"""The order of (token, head, dim) inside a page; `shuffle` is AITER's x-packed pair.

With x = 16 bytes of elements and N = block_size, SHUFFLE stores K as (H, D/x, N, x) and V as
(H, N/x, D, x).
"""


def place(layout: str, order: str, geometry: Geometry, element: int) -> Placement:
    """The placement of one layer whose K starts its allocation; `element` is bytes."""
    g = geometry
    row = g.head_size * element
    side = g.block_size * g.num_kv_heads * row  # one page of K, or of V, without the other
    content = 2 * row if layout == "content_packed" else row
    token_stride, head_stride = (
        (content, g.block_size * content) if order == "hnd" else (g.num_kv_heads * content, content)
    )
    if layout == "kv_first":
        v_base, block_stride = g.num_blocks * side, side
    elif layout == "content_packed":
        v_base, block_stride = row, 2 * side
    else:
        v_base, block_stride = side, 2 * side
    return Placement(v_base, block_stride, token_stride, head_stride)


def cache_fields(
    layout: str, order: str, geometry: Geometry, dtype: str, *, buffer: str, layer: str
) -> tuple[Field, Field]:
    """The K and V fields of one layer's cache.

    Raises ValueError for content_packed with shuffle: K and V tiles would overlap (#44455).
    """
    if layout == "content_packed" and order == "shuffle":
        raise ValueError("layout content_packed has no shuffle order: K and V tiles would overlap")
    element = itemsize(dtype)
    at = place(layout, order, geometry, element)
    k_terms: tuple[Term, ...]
    v_terms: tuple[Term, ...]
    if order == "shuffle":
        x, n, d = 16 // element, geometry.block_size, geometry.head_size
        block = Term("block", at.block_stride)
        head = Term("head", n * d * element)
        k_terms = (
            block,
            head,
            Term("dim", n * x * element, x),
            Term("token", x * element),
            Term("dim", element, 1, x),
        )
        v_terms = (
            block,
            head,
            Term("token", d * x * element, x),
            Term("dim", x * element),
            Term("token", element, 1, x),
        )
    else:
        k_terms = v_terms = (
            Term("block", at.block_stride),
            Term("token", at.token_stride),
            Term("head", at.head_stride),
            Term("dim", element),
        )
    extents: dict[Axis, int] = {
        "block": geometry.num_blocks,
        "head": geometry.num_kv_heads,
        "token": geometry.block_size,
        "dim": geometry.head_size,
    }
    return (
        Field("k", buffer, dtype, 0, k_terms, extents, layer),
        Field("v", buffer, dtype, at.v_base, v_terms, extents, layer),
    )
