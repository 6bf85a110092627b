"""Views as affine pieces, for any number of blocks: what a proof reasons about.

A view builder is asked for its views at a few block counts; what it answers is affine in the count,
`at(B) = constant + slope * B`, fitted on two of the answers and checked on the others. An axis
whose stride grows with the count (heads outside of blocks) is unrolled, so that of every piece only
the base may grow:

    byte = base(B) + stride * (ratio * block + part) + sum(stride_i * count_i) + offset in the run
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layer_view import LayerView

MOST_UNROLLED = 4096
"""Most pieces that an axis outside of blocks is unrolled to."""


class Affine(NamedTuple):
    """`constant + slope * B`, B being the number of manager blocks."""

    constant: int
    slope: int = 0

    def plus(self, other: "Affine", times: int = 1) -> "Affine":
        """The sum with `times` the other."""
        return Affine(self.constant + times * other.constant, self.slope + times * other.slope)

    def at(self, blocks: int) -> int:
        """The value for so many blocks."""
        return self.constant + self.slope * blocks

    @property
    def is_never_negative(self) -> bool:
        """Whether the value is at least 0 for every B of at least 1."""
        return self.slope >= 0 and self.constant + self.slope >= 0


class Piece(NamedTuple):
    """Some bytes of each block of one layer: `run` bytes at each of the places that axes count."""

    base: Affine
    stride: int
    """From a kernel block to the next."""
    ratio: int
    axes: tuple[tuple[int, int], ...]
    """(count, stride) of each axis inside of a kernel block; strides in bytes."""
    run: int

    @property
    def extent(self) -> int:
        """Bytes from the first to the last one of a manager block; strides are not negative."""
        inside = sum((count - 1) * stride for count, stride in self.axes) + self.run
        return (self.ratio - 1) * self.stride + inside

    @property
    def last(self) -> Affine:
        """The last byte."""
        pitch = self.stride * self.ratio
        return self.base.plus(Affine(self.extent - 1 - pitch, pitch))

    @property
    def bytes_of_block(self) -> int:
        """Bytes of one manager block, if no two of them are the same."""
        count = self.ratio * self.run
        for size, _ in self.axes:
            count *= size
        return count


class NotAffineError(Exception):
    """What a builder made is not affine in the number of blocks."""


def fitted(values: Sequence[int], counts: Sequence[int], what: str) -> Affine:
    """The affine function with `values` at several block counts, or at one: then it is constant.

    Raises NotAffineError where there is none.
    """
    if len(counts) == 1:
        return Affine(values[0])
    slope, rest = divmod(values[1] - values[0], counts[1] - counts[0])
    found = Affine(values[0] - slope * counts[0], slope)
    if rest or any(found.at(count) != value for count, value in zip(counts, values, strict=True)):
        raise NotAffineError(f"{what} is {list(values)} at {list(counts)} blocks")
    return found


def pieces_of(several: Sequence[LayerView], counts: Sequence[int]) -> tuple[Piece, ...]:
    """The pieces of one view, from what it is at each of `counts` blocks.

    With one count they are those of that count alone. Raises NotAffineError where the view is no
    affine function of the count.
    """
    first = several[0]
    where = f"{first.part} of {first.layer}"
    if any(view.shape[1:] != first.shape[1:] for view in several):
        raise NotAffineError(f"the shape of {where} is not the same at every number of blocks")
    ratio, rest = divmod(first.shape[0], counts[0])
    if rest or any(v.shape[0] != ratio * n for v, n in zip(several, counts, strict=True)):
        raise NotAffineError(f"{where} has {first.shape[0]} kernel blocks of {counts[0]} blocks")
    base = fitted([view.offset for view in several], counts, f"the offset of {where}")
    strides = [
        fitted([view.strides[axis] for view in several], counts, f"stride {axis} of {where}")
        if first.shape[axis] > 1 or axis == 0
        else Affine(0)
        for axis in range(len(first.shape))
    ]
    if first.shape[0] == 1:
        strides[0] = Affine(0)
    if strides[0].slope:
        raise NotAffineError(f"the block stride of {where} grows with the number of blocks")
    bases = [base]
    inside = []
    for count, stride in zip(first.shape[1:], strides[1:], strict=True):
        if stride.slope:
            bases = [each.plus(stride, index) for each in bases for index in range(count)]
        elif count > 1:
            inside.append((count, stride.constant))
    if len(bases) > MOST_UNROLLED:
        raise NotAffineError(f"{where} has {len(bases)} pieces outside of its blocks")
    run = itemsize(first.dtype)
    plain = [Piece(each, strides[0].constant, ratio, tuple(inside), run) for each in bases]
    return tuple(map(collapsed, plain))


def collapsed(piece: Piece) -> Piece:
    """The same bytes with longer runs: axes whose places follow each other are part of them."""
    axes, run = sorted(piece.axes, key=lambda axis: axis[1]), piece.run
    while axes and axes[0][1] == run:
        run *= axes.pop(0)[0]
    if not axes and piece.ratio > 1 and piece.stride == run:
        return Piece(piece.base, run * piece.ratio, 1, (), run * piece.ratio)
    return Piece(piece.base, piece.stride, piece.ratio, tuple(axes), run)


def joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same bytes in fewer pieces, where one's runs follow another's. They must be disjoint."""
    left = sorted(pieces, key=lambda each: (each.base.slope, each.base.constant))
    done: list[Piece] = []
    while left:
        piece = left.pop(0)
        for number, other in enumerate(left):
            alike = (piece.stride, piece.ratio, piece.axes) == (
                other.stride,
                other.ratio,
                other.axes,
            )
            if alike and other.base == piece.base.plus(Affine(piece.run)):
                del left[number]
                left.insert(0, collapsed(piece._replace(run=piece.run + other.run)))
                break
        else:
            done.append(piece)
    return tuple(done)
