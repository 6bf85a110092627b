"""Metadata tensors as engines keep them: persistent, wider than a batch, with what an earlier
batch left behind its end.

Each has a field beside its view: an oracle finds an entry through the field, and what it reads of
it is what may matter. A vector is counted along `token`, the columns of a table along `dim`.
"""

from typing import NamedTuple

import msgspec

from kvfuzz.model.case import Buffer, TensorView
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.fill import IntegerFill, word
from kvfuzz.model.layout import Axis, Field, Term


class Metadata(NamedTuple):
    """One tensor of written-out integers."""

    buffer: Buffer
    field: Field
    view: TensorView


def vector(name: str, dtype: str, values: tuple[int, ...], length: int) -> Metadata:
    """The first `length` of `values` as a tensor `[length]` of `dtype`; the rest lies behind it."""
    size = itemsize(dtype)
    return Metadata(
        Buffer(name, size * len(values), IntegerFill(dtype, values)),
        Field(name, name, dtype, 0, (Term("token", size),), {"token": len(values)}),
        TensorView(name, name, dtype, (length,), (size,)),
    )


def table(
    name: str, dtype: str, rows: tuple[tuple[int, ...], ...], height: int, width: int | None = None
) -> Metadata:
    """The first `height` of `rows`, all of one length, and of those the first `width` columns, or
    all: a tensor `[height, width]`."""
    size, columns = itemsize(dtype), len(rows[0])
    extents: dict[Axis, int] = {"token": len(rows), "dim": columns}
    terms = (Term("token", size * columns), Term("dim", size))
    values = tuple(value for row in rows for value in row)
    return Metadata(
        Buffer(name, size * len(values), IntegerFill(dtype, values)),
        Field(name, name, dtype, 0, terms, extents),
        TensorView(name, name, dtype, (height, width or columns), (size * columns, size)),
    )


def rows_from(field: Field, first: int, count: int) -> Field:
    """`count` rows of a field, from row `first` on, as a field of the same name."""
    base = field.byte(dict.fromkeys(field.extents, 0) | {"token": first})
    return msgspec.structs.replace(field, base=base, extents=field.extents | {"token": count})


def stale(seed: int, name: str, count: int, below: int) -> tuple[int, ...]:
    """`count` integers of `range(below)` that an earlier batch may have left in `name`."""
    return tuple(word(seed, name, index) % below for index in range(count))
