"""Which block ids the sequences of a batch own, so that the touched ones follow a pattern.

The patterns are those of `kvfuzz.model.tokens.BLOCK_IDS`. Blocks that a sequence owns and the batch
does not touch, blocks of Mamba state and blocks that nobody owns get the ids in between.
"""

import itertools
from collections.abc import Iterable

import msgspec

from kvfuzz.model.tokens import SPLITS, id_pattern
from kvfuzz.strategies.choices import Choices, distinct

ALIGNED = max(SPLITS)
"""Adding a multiple of this to every id keeps the pattern of a split (12 is a multiple of 4)."""


STEPS = {1: 1, 2: 2, 4: 3, 12: 1}
"""By ratio, how far groups lie apart: those of a lower one begin at no multiple of a higher one."""


class Blocks(msgspec.Struct, frozen=True):
    """What is to be numbered: per sequence its untouched blocks and the touched ones after them."""

    pattern: str
    sequences: tuple[tuple[int, int], ...]
    """(untouched, touched) blocks."""
    num_states: int
    spare: int
    """Ids that nobody owns, about."""


class Ids(msgspec.Struct, frozen=True):
    """The ids of each sequence's blocks, in its order, of the state's blocks, and how many ids
    there are."""

    sequences: tuple[tuple[int, ...], ...]
    states: tuple[int, ...]
    num_blocks: int


def ratio_of(pattern: str) -> int:
    """Kernel blocks in a group of a split pattern; 1 for the others."""
    return int(pattern.removeprefix("split_")) if pattern.startswith("split_") else 1


def assigned(choices: Choices, blocks: Blocks) -> Ids:
    """Ids whose touched blocks show the pattern, which must be possible for their number."""
    if ratio_of(blocks.pattern) > 1:
        return _split(choices, blocks)
    touched = sum(span for _, span in blocks.sequences)
    untouched = sum(before for before, _ in blocks.sequences)
    window = touched + untouched + blocks.num_states + blocks.spare
    if blocks.pattern == "shuffled":
        drawn = distinct(choices, window - blocks.spare, window)
        chosen, others = _shuffled(drawn[:touched]), drawn[touched:]
    else:
        # At least one id before the first, unless that is to be 0.
        first = 0
        if blocks.pattern == "adjacent":
            window += 1
            first = 1 + distinct(choices, 1, window - touched)[0]
        chosen = list(range(first, first + touched))
        rest = [block for block in range(window) if not first <= block < first + touched]
        others = [rest[at] for at in distinct(choices, untouched + blocks.num_states, len(rest))]
    before, after = iter(others), iter(chosen)
    sequences = tuple(
        (*itertools.islice(before, skipped), *itertools.islice(after, span))
        for skipped, span in blocks.sequences
    )
    return Ids(sequences, tuple(sorted(before)), window)


def _shuffled(ids: list[int]) -> list[int]:
    """`ids`, or the same from the highest down where they happen to follow another pattern."""
    return ids if id_pattern(ids) == "shuffled" else sorted(ids, reverse=True)


def _split(choices: Choices, blocks: Blocks) -> Ids:
    """Groups of kernel blocks that begin at multiples of the ratio, as manager blocks do.

    Where the touched blocks of the chosen groups follow each other all the same, groups go
    downwards.
    """
    ratio = ratio_of(blocks.pattern)
    sizes = [-(-(before + span) // ratio) for before, span in blocks.sequences]
    count = sum(sizes) + blocks.num_states
    step = STEPS[ratio]
    drawn = distinct(choices, count, count + -(-blocks.spare // ratio))
    num_groups = step * (count + -(-blocks.spare // ratio) - 1) + (step > 1) + 1
    for order in (drawn, sorted(drawn, reverse=True)):
        groups = iter([step * group + (step > 1) for group in order])
        sequences = tuple(
            _kernel_blocks(itertools.islice(groups, size), ratio)[: before + span]
            for (before, span), size in zip(blocks.sequences, sizes, strict=True)
        )
        touched = [
            block
            for (before, _), owned in zip(blocks.sequences, sequences, strict=True)
            for block in owned[before:]
        ]
        if id_pattern(touched) == blocks.pattern:
            break
    return Ids(sequences, tuple(sorted(_kernel_blocks(groups, ratio))), num_groups * ratio)


def _kernel_blocks(groups: Iterable[int], ratio: int) -> tuple[int, ...]:
    return tuple(group * ratio + kernel for group in groups for kernel in range(ratio))
