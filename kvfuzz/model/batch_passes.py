"""Simpler batches, for every kind of scene that has a batch of sequences in blocks.

Each pass is a search (`kvfuzz.model.search`). A `Holder` says where a kind of scene keeps its
block size and its number of blocks, and who else, beside the sequences, uses blocks.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from kvfuzz.model import batch_edits
from kvfuzz.model.plan import Batch
from kvfuzz.model.search import Steps, fewest, first_of, smallest

S = TypeVar("S", bound=Any)
"""A struct with a `batch` and a `fill_seed`."""

FILL_SEEDS = 16
"""Fill seeds that one token is tried with."""
FEW_BLOCKS = 2
"""Up to how many blocks in use every choice of low ids is tried."""


@dataclass(frozen=True)
class Holder(Generic[S]):
    """How one kind of scene holds the blocks of its batch, and the passes over such scenes."""

    block_size: Callable[[S], int]
    num_blocks: Callable[[S], int]
    used: Callable[[S], tuple[int, ...]]
    """Ids of the blocks in use, each once, those of the sequences first."""
    renumbered: Callable[[S, Mapping[int, int], int], S]
    """The scene with its blocks under new ids, in a cache of so many blocks."""

    def sequences(self, scene: S) -> Steps[S]:
        """Fewer sequences."""
        whole = scene.batch.sequences
        rebuild = _edit(scene, batch_edits.with_sequences)
        return (yield from fewest(scene, whole, rebuild, least=1))

    def runs(self, scene: S) -> Steps[S]:
        """Shorter runs, from the end and from the start, that begin early in their sequence."""
        for index in range(len(scene.batch.sequences)):
            scene = yield from self._run(scene, index)
        return scene

    def _run(self, scene: S, index: int) -> Steps[S]:
        n = self.block_size(scene)

        def run(scene: S) -> tuple[int, int, Callable[..., S]]:
            now = scene.batch.sequences[index]
            shorter = _edit(scene, batch_edits.run_of)
            return now.start, now.length, partial(shorter, index, n)

        start, length, at = run(scene)
        scene = yield from first_of(scene, [at(start, length)])
        scene = yield from smallest(scene, length, 1, lambda less: at(start, less))
        start, length, at = run(scene)
        end = start + length
        scene = yield from smallest(scene, length, 1, lambda less: at(end - less, less))
        start, length, at = run(scene)
        before = start // n
        scene = yield from smallest(
            scene, before, 0, lambda blocks: at(start, length, drop=before - blocks)
        )
        start, length, at = run(scene)
        edge = start // n * n
        return (
            yield from smallest(scene, start - edge, 0, lambda offset: at(edge + offset, length))
        )

    def padding(self, scene: S) -> Steps[S]:
        """As few padding rows as possible, at the front."""
        rebuild = _edit(scene, batch_edits.with_padding)
        scene = yield from fewest(scene, scene.batch.padding, rebuild)
        front = tuple(range(len(scene.batch.padding)))
        return (yield from first_of(scene, [_with_batch(scene, padding=front)]))

    def table_width(self, scene: S) -> Steps[S]:
        """As narrow a block table as possible."""
        width = scene.batch.table_width
        return (
            yield from smallest(scene, width, 1, lambda less: _with_batch(scene, table_width=less))
        )

    def other_bytes(self, scene: S) -> Steps[S]:
        """One token with other bytes: where a failure depends on those, more were more tries."""
        if scene.batch.num_rows == 1:
            return scene
        one = replace(scene, batch=batch_edits.first_token(scene.batch))
        tries = (replace(one, fill_seed=seed) for seed in range(FILL_SEEDS))
        return (yield from first_of(scene, tries))

    def blocks(self, scene: S) -> Steps[S]:
        """Low block ids without gaps, in the order of use if that will do, and no spare block."""
        used = self.used(scene)
        plainer = (
            self.renumbered(scene, dict(zip(used, ids, strict=True)), max(ids) + 1)
            for ids in _low(used)
        )
        scene = yield from first_of(scene, itertools.takewhile(lambda each: each != scene, plainer))
        scene = yield from self._no_spare_blocks(scene)
        first = min(self.used(scene))
        scene = yield from smallest(scene, first, 0, partial(self.from_block, scene))
        if len(used) > 1:
            for block in sorted(self.used(scene)):
                scene = yield from self._lower_block(scene, block)
        return (yield from self._no_spare_blocks(scene))

    def from_block(self, scene: S, first: int) -> S:
        """Every block id, and the number of blocks, moved until the lowest id is `first`."""
        used = self.used(scene)
        by = first - min(used)
        ids = {block: block + by for block in used}
        return self.renumbered(scene, ids, self.num_blocks(scene) + by)

    def _lower_block(self, scene: S, block: int) -> Steps[S]:
        """Give `block` a lower id that is free."""
        used = self.used(scene)
        lower_ids = sorted(each for each in used if each < block)

        def moved(number: int) -> S:
            free = number
            for taken in lower_ids:
                free += taken <= free
            ids = {each: each for each in used} | {block: free}
            return self.renumbered(scene, ids, self.num_blocks(scene))

        return (yield from smallest(scene, block - len(lower_ids), 0, moved))

    def _no_spare_blocks(self, scene: S) -> Steps[S]:
        used = self.used(scene)
        unmoved = {block: block for block in used}
        with_blocks = partial(self.renumbered, scene, unmoved)
        return (yield from smallest(scene, self.num_blocks(scene), max(used) + 1, with_blocks))


def _with_batch(scene: S, **changes: object) -> S:
    changed: S = replace(scene, batch=replace(scene.batch, **changes))
    return changed


def _edit(scene: S, edit: Callable[..., Batch]) -> Callable[..., S]:
    """An edit of batches as one of `scene`."""

    def edited(*args: Any, **options: Any) -> S:
        changed: S = replace(scene, batch=edit(scene.batch, *args, **options))
        return changed

    return edited


def _low(used: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Low ids for the blocks in `used`, the plainest first.

    One or two get any of the lowest ones: a wrong stride may relate two ids, so that neither can
    be lowered alone.
    """
    count = len(used)
    yield tuple(range(count))
    rank = {block: index for index, block in enumerate(sorted(used))}
    yield tuple(rank[block] for block in used)
    if count <= FEW_BLOCKS:
        yield from sorted(itertools.permutations(range(count + 1), count), key=max)
