"""Rows of heads, queries and results of attention, as engines hand them over: `[T, H, D]`.

A backend that pads heads hands over a part of each, one that projects several things at once a part
of each row, and one that pads batches has rows behind those of the batch.
"""

import msgspec

from kvfuzz.model.case import Buffer, TensorView
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.fill import Fill
from kvfuzz.model.layout import Field, Term
from kvfuzz.model.ops.metadata import Metadata


class Gaps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Elements that belong to nothing: behind each head of a row, and behind each row."""

    head: int = 0
    row: int = 0


def row_elements(heads: int, size: int, gaps: Gaps) -> int:
    """Elements from one row to the next."""
    return heads * (size + gaps.head) + gaps.row


def rows_of_heads(
    name: str,
    dtype: str,
    shape: tuple[int, int, int],
    fill: Fill,
    gaps: Gaps = Gaps(),  # noqa: B008  (frozen)
    behind: int = 0,
) -> Metadata:
    """Rows `[T, H, D]`, with so many more `behind` them that are not handed over."""
    count, heads, size = shape
    element = itemsize(dtype)
    row, head = element * row_elements(heads, size, gaps), element * (size + gaps.head)
    terms = (Term("token", row), Term("head", head), Term("dim", element))
    extents = {"token": count + behind, "head": heads, "dim": size}
    return Metadata(
        Buffer(name, (count + behind) * row, fill),
        Field(name, name, dtype, 0, terms, extents),  # type: ignore[arg-type]
        TensorView(name, name, dtype, shape, (row, head, element)),
    )
