"""Simpler batches, for every scene of an op that has `batch`, `block_size` and `num_blocks`.

Each pass is a search (`kvfuzz.model.search`). A pass that needs a block to be somewhere else moves
the number of blocks with it.
"""

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import msgspec

from kvfuzz.model.plan import Batch, Sequence
from kvfuzz.model.search import Steps, fewest, first_of, smallest


class Batched(Protocol):
    """What a scene must have."""

    @property
    def batch(self) -> Batch:
        """Its sequences."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""


S = TypeVar("S", bound=Any)
"""A scene that is Batched, and a struct."""

FILL_SEEDS = 16
"""Fill seeds that one token is tried with."""


def _with_batch(scene: S, **changes: object) -> S:
    replaced: S = msgspec.structs.replace(
        scene, batch=msgspec.structs.replace(scene.batch, **changes)
    )
    return replaced


def with_sequences(scene: S, sequences: tuple[Sequence, ...]) -> S:
    """Other sequences; each padding row keeps the tokens before it, as far as there are as many."""
    tokens = sum(sequence.length for sequence in sequences)
    padding = tuple(
        min(row - index, tokens) + index for index, row in enumerate(scene.batch.padding)
    )
    return _with_batch(scene, sequences=sequences, padding=padding)


def sequences(scene: S) -> Steps[S]:
    """Fewer sequences."""
    kept = scene.batch.sequences
    return (yield from fewest(scene, kept, lambda some: with_sequences(scene, some), least=1))


def runs(scene: S) -> Steps[S]:
    """Shorter runs, from the end and from the start, that begin early in their sequence."""
    for index in range(len(scene.batch.sequences)):
        run = scene.batch.sequences[index]
        scene = yield from first_of(scene, [_run(scene, index, run.start, run.length)])
        scene = yield from smallest(scene, run.length, 1, _to_length(scene, index))
        run = scene.batch.sequences[index]
        scene = yield from smallest(scene, run.length, 1, _to_end(scene, index))
        run = scene.batch.sequences[index]
        before = run.start // scene.block_size
        scene = yield from smallest(scene, before, 0, _to_blocks(scene, index, before))
        run = scene.batch.sequences[index]
        offset = run.start % scene.block_size
        scene = yield from smallest(scene, offset, 0, _to_offset(scene, index))
    return scene


def _run(scene: S, index: int, start: int, length: int, drop: int = 0) -> S:
    """Sequence `index` without its first `drop` blocks, and without blocks behind its run."""
    run, n = scene.batch.sequences[index], scene.block_size
    ids = run.block_ids[drop : max(1, -(-(start + length) // n))]
    shorter = msgspec.structs.replace(run, block_ids=ids, start=start - drop * n, length=length)
    whole = scene.batch.sequences
    return with_sequences(scene, (*whole[:index], shorter, *whole[index + 1 :]))


def _to_length(scene: S, index: int):  # type: ignore[no-untyped-def]
    start = scene.batch.sequences[index].start
    return lambda length: _run(scene, index, start, length)


def _to_end(scene: S, index: int):  # type: ignore[no-untyped-def]
    run = scene.batch.sequences[index]
    return lambda length: _run(scene, index, run.start + run.length - length, length)


def _to_blocks(scene: S, index: int, before: int):  # type: ignore[no-untyped-def]
    run = scene.batch.sequences[index]
    return lambda blocks: _run(scene, index, run.start, run.length, drop=before - blocks)


def _to_offset(scene: S, index: int):  # type: ignore[no-untyped-def]
    run = scene.batch.sequences[index]
    edge = run.start // scene.block_size * scene.block_size
    return lambda offset: _run(scene, index, edge + offset, run.length)


def padding(scene: S) -> Steps[S]:
    """As few padding rows as possible, at the front."""

    def padded(rows: tuple[int, ...]) -> S:
        before = {row: row - index for index, row in enumerate(scene.batch.padding)}
        return _with_batch(
            scene, padding=tuple(before[row] + index for index, row in enumerate(rows))
        )

    scene = yield from fewest(scene, scene.batch.padding, padded)
    front = tuple(range(len(scene.batch.padding)))
    return (yield from first_of(scene, [_with_batch(scene, padding=front)]))


def table_width(scene: S) -> Steps[S]:
    """As narrow a block table as possible."""
    width = scene.batch.table_width
    return (yield from smallest(scene, width, 1, lambda less: _with_batch(scene, table_width=less)))


def other_bytes(scene: S) -> Steps[S]:
    """One token with other bytes: where a failure depends on those, more tokens were more tries."""
    if scene.batch.num_rows == 1:
        return scene
    first = scene.batch.sequences[0]
    token = msgspec.structs.replace(first, block_ids=first.block_ids[:1], start=0, length=1)
    one = with_sequences(_with_batch(scene, padding=()), (token,))
    tries = (msgspec.structs.replace(one, fill_seed=seed) for seed in range(FILL_SEEDS))
    return (yield from first_of(scene, tries))


def blocks(scene: S) -> Steps[S]:
    """Low block ids without gaps, in the order of use if that will do, and no spare block."""
    used = blocks_of(scene)
    rank = {block: index for index, block in enumerate(sorted(used))}
    plainer = [tuple(range(len(used))), tuple(rank[block] for block in used)]
    scene = yield from first_of(scene, _until(scene, plainer))
    scene = yield from _no_spare_blocks(scene)
    used = blocks_of(scene)
    first = min(used)
    scene = yield from smallest(scene, first, 0, lambda to: from_block(scene, to))
    if len(used) > 1:
        for block in sorted(blocks_of(scene)):
            scene = yield from _lower_block(scene, block)
    return (yield from _no_spare_blocks(scene))


def _lower_block(scene: S, block: int) -> Steps[S]:
    """Give `block` a lower id that is free."""
    used = blocks_of(scene)
    below = sorted(each for each in used if each < block)

    def moved(number: int) -> S:
        free = number
        for taken in below:
            free += taken <= free
        ids = {each: each for each in used} | {block: free}
        return renumbered(scene, ids, scene.num_blocks)

    return (yield from smallest(scene, block - len(below), 0, moved))


def _until(scene: S, plainer: list[tuple[int, ...]]) -> Iterator[S]:
    """The scene with each numbering of its blocks, up to the one that it has."""
    used = blocks_of(scene)
    for ids in plainer:
        if ids == used:
            return
        yield renumbered(scene, dict(zip(used, ids, strict=True)), max(ids) + 1)


def _no_spare_blocks(scene: S) -> Steps[S]:
    needed = max(blocks_of(scene)) + 1

    def with_blocks(count: int) -> S:
        replaced: S = msgspec.structs.replace(scene, num_blocks=count)
        return replaced

    return (yield from smallest(scene, scene.num_blocks, needed, with_blocks))


def blocks_of(scene: Batched) -> tuple[int, ...]:
    """The blocks of all sequences, in their order."""
    return tuple(block for each in scene.batch.sequences for block in each.block_ids)


def renumbered(scene: S, ids: dict[int, int], num_blocks: int) -> S:
    """Blocks under the new `ids`, in a cache of `num_blocks` blocks."""
    moved = tuple(
        msgspec.structs.replace(each, block_ids=tuple(ids[block] for block in each.block_ids))
        for each in scene.batch.sequences
    )
    return with_sequences(msgspec.structs.replace(scene, num_blocks=num_blocks), moved)


def from_block(scene: S, first: int) -> S:
    """Every block id, and the number of blocks, moved by as much as the lowest id is to `first`."""
    used = blocks_of(scene)
    by = first - min(used)
    return renumbered(scene, {block: block + by for block in used}, scene.num_blocks + by)


def with_block_size(scene: S, block_size: int) -> S:
    """A smaller block size. Every run begins and ends in the blocks in which it did, at offsets
    that are as high as before where the smaller block has them."""
    n: int = scene.block_size

    def moved(token: int) -> int:
        block, offset = divmod(token, n)
        return block * block_size + min(offset, block_size - 1)

    def shorter(run: Sequence) -> Sequence:
        start, length = moved(run.start), 0
        if run.length:
            length = moved(run.start + run.length - 1) - start + 1
        return msgspec.structs.replace(run, start=start, length=length)

    resized = msgspec.structs.replace(scene, block_size=block_size)
    return with_sequences(resized, tuple(map(shorter, scene.batch.sequences)))
