"""Who owns which bytes: views as runs of bytes, each with the manager block that it belongs to.

Everything is counted out, address by address, with no reasoning about strides: what
`kvfuzz.oracles.prove` decides for all sizes is counted here for one. Of a plan of very many blocks
some are looked at (`blocks_of`); proofs are about all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layer_view import LayerView

Array = NDArray[Any]

MOST_RUNS = 1 << 18
"""Most runs of all views of a plan that are counted out, if that leaves out some blocks."""


class Runs(NamedTuple):
    """Bytes `starts[i]` to `ends[i]`, exclusive, belong to manager block `blocks[i]`; by start."""

    starts: Array
    ends: Array
    blocks: Array

    @property
    def nbytes(self) -> int:
        """Bytes of all runs, those that overlap counted twice."""
        return int((self.ends - self.starts).sum())


def blocks_of(num_blocks: int, runs_of_block: int) -> list[int]:
    """The manager blocks that are looked at, of which each has so many runs in all views: all, or
    the first, some inside, and the last."""
    if num_blocks * runs_of_block <= MOST_RUNS:
        return list(range(num_blocks))
    some = {0, 1, 2, 3, num_blocks // 3, num_blocks // 2, num_blocks // 2 + 1}
    some |= {num_blocks - 2, num_blocks - 1}
    return sorted(block for block in some if 0 <= block < num_blocks)


def runs_in_block(view: LayerView, num_blocks: int) -> int:
    """How many runs a view has in one manager block."""
    axes = sorted(zip(view.strides[1:], view.shape[1:], strict=True))
    length, count = itemsize(view.dtype), view.shape[0] // num_blocks
    for stride, size in axes:
        if stride == length:
            length *= size
        else:
            count *= size
    return count


def runs_of(view: LayerView, num_blocks: int, blocks: Sequence[int]) -> Runs:
    """The runs of `view` in the given manager blocks; its first axis is that of kernel blocks.

    Elements that follow each other without a gap, along the innermost axes, are one run.
    """
    ratio = view.shape[0] // num_blocks
    axes = sorted(zip(view.strides[1:], view.shape[1:], strict=True))
    length = itemsize(view.dtype)
    while axes and axes[0][0] == length:
        length *= axes.pop(0)[1]
    first = np.asarray(view.offset, np.int64)
    for stride, size in axes:
        first = first[..., None] + np.arange(size, dtype=np.int64) * stride
    inside = first.reshape(-1)
    kernel_blocks = np.asarray(
        [block * ratio + part for block in blocks for part in range(ratio)], np.int64
    )
    starts = (kernel_blocks[:, None] * view.strides[0] + inside[None, :]).reshape(-1)
    owner = np.repeat(kernel_blocks // ratio, inside.size)
    return _sorted(starts, starts + length, owner)


def _sorted(starts: Array, ends: Array, blocks: Array) -> Runs:
    order = np.argsort(starts, kind="stable")
    return Runs(starts[order], ends[order], blocks[order])


def together(several: Sequence[Runs]) -> Runs:
    """The runs of several views as those of one."""
    return _sorted(
        np.concatenate([each.starts for each in several]),
        np.concatenate([each.ends for each in several]),
        np.concatenate([each.blocks for each in several]),
    )


def overlap(runs: Runs) -> tuple[int, int, int] | None:
    """The first byte that two of the runs have in common, and the blocks of both, if any."""
    reach = np.maximum.accumulate(runs.ends)
    found = np.flatnonzero(runs.starts[1:] < reach[:-1])
    if not found.size:
        return None
    later = int(found[0]) + 1
    byte = int(runs.starts[later])
    earlier = int(np.flatnonzero(runs.ends[:later] > byte)[0])
    return byte, int(runs.blocks[earlier]), int(runs.blocks[later])


def merged(runs: Runs) -> Runs:
    """The same bytes in as few runs as possible; runs must not overlap."""
    if runs.starts.size < 2:
        return runs
    apart = (runs.starts[1:] != runs.ends[:-1]) | (runs.blocks[1:] != runs.blocks[:-1])
    begin = np.concatenate([[True], apart])
    end = np.concatenate([apart, [True]])
    return Runs(runs.starts[begin], runs.ends[end], runs.blocks[begin])


def disagreement(one: Runs, other: Runs) -> tuple[int, int, int] | None:
    """A byte that is of different blocks in two maps without overlaps, and these two blocks.

    Of several the first one of the lowest block of `other`.
    """
    first = np.searchsorted(one.ends, other.starts, side="right")
    last = np.searchsorted(one.starts, other.ends, side="left")
    count = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(other.starts.size), count)
    if not mine.size:
        return None
    offsets = np.arange(mine.size) - np.repeat(np.cumsum(count) - count, count)
    theirs = np.repeat(first, count) + offsets
    wrong = np.flatnonzero(one.blocks[theirs] != other.blocks[mine])
    if not wrong.size:
        return None
    bytes_ = np.maximum(one.starts[theirs[wrong]], other.starts[mine[wrong]])
    best = np.lexsort((bytes_, other.blocks[mine[wrong]]))[0]
    at = wrong[best]
    return int(bytes_[best]), int(one.blocks[theirs[at]]), int(other.blocks[mine[at]])
