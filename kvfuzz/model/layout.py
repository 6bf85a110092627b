"""Where the bytes of (block, head, token, dim) lie: fields with mixed-radix affine maps.

A field is one named part of a cache or of an activation tensor (k, v, state, key, value). Its map
gives the first byte of an element:

    byte = base + sum(stride_i * ((coordinate[axis_i] // div_i) % mod_i))

with strides in bytes. Plain strided layouts need one term per axis; SHUFFLE splits an axis in two.
Oracles compute every address from fields and never from a tensor view. An axis without a term has
one element for all its values: a scale that all heads share.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.fill import Fill

Axis = Literal["block", "head", "token", "dim"]

INDEX_ORDER: tuple[Axis, ...] = ("block", "token", "head", "dim")
"""How the elements of a field are counted; JSON keeps no order of `extents`."""


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
    `fill` lays elements of its own over what the buffer holds: element `index(coordinate)` of the
    stream that is called like the field.
    """

    name: str
    buffer: str
    dtype: str
    base: int
    terms: tuple[Term, ...]
    extents: dict[Axis, int]
    layer: str = ""
    blocks: tuple[int, ...] = ()
    fill: Fill | None = None

    def byte(self, coordinate: Mapping[Axis, int]) -> int:
        """Byte address in the buffer of the element at `coordinate`."""
        offset = self.base
        for term in self.terms:
            digit = coordinate[term.axis] // term.div
            offset += term.stride * (digit % term.mod if term.mod else digit)
        return offset

    def index(self, coordinate: Mapping[Axis, int]) -> int:
        """The row-major number of the element, its axes in the order of `INDEX_ORDER`."""
        number = 0
        for axis in INDEX_ORDER:
            if axis in self.extents:
                number = number * self.extents[axis] + coordinate[axis]
        return number

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
    head_size_v: int = 0
    """Elements of one head of V where they differ from those of K; 0 says that they do not."""

    @property
    def value_size(self) -> int:
        """Elements of one head of V."""
        return self.head_size_v or self.head_size
