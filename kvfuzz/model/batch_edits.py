"""Edits of a batch that keep it one batch: padding rows and the ends of runs follow."""

from collections.abc import Mapping

from msgspec.structs import replace

from kvfuzz.model.plan import Batch, Sequence


def with_sequences(batch: Batch, sequences: tuple[Sequence, ...]) -> Batch:
    """Other sequences; each padding row keeps the tokens before it, as far as there are as many."""
    tokens = sum(sequence.length for sequence in sequences)
    padding = tuple(min(row - index, tokens) + index for index, row in enumerate(batch.padding))
    return replace(batch, sequences=sequences, padding=padding)


def with_padding(batch: Batch, kept: tuple[int, ...]) -> Batch:
    """Only the padding rows in `kept`, each behind the tokens that it was behind before."""
    tokens = {row: row - index for index, row in enumerate(batch.padding)}
    return replace(batch, padding=tuple(tokens[row] + index for index, row in enumerate(kept)))


def run_of(
    batch: Batch, index: int, block_size: int, start: int, length: int, *, drop: int = 0
) -> Batch:
    """Sequence `index` without its first `drop` blocks, with the run from `start` on and no block
    behind the run's last. Token positions count from what was token 0 before."""
    sequence = batch.sequences[index]
    shorter = replace(
        sequence,
        block_ids=sequence.block_ids[drop : -(-(start + length) // block_size)],
        start=start - drop * block_size,
        length=length,
    )
    return with_sequences(batch, (*batch.sequences[:index], shorter, *batch.sequences[index + 1 :]))


def first_token(batch: Batch) -> Batch:
    """One token, the first of the first sequence's first block, and no padding."""
    first = batch.sequences[0]
    token = replace(first, block_ids=first.block_ids[:1], start=0, length=1)
    return replace(batch, sequences=(token,), padding=())


def with_block_size(batch: Batch, before: int, now: int) -> Batch:
    """The batch where a block holds `now` tokens, fewer than the `before` it held.

    Every run begins and ends in the blocks in which it did, at offsets that are as high as before
    where the smaller block has them.
    """

    def moved(token: int) -> int:
        block, offset = divmod(token, before)
        return block * now + min(offset, now - 1)

    def shorter(run: Sequence) -> Sequence:
        start, length = moved(run.start), 0
        if run.length:
            length = moved(run.start + run.length - 1) - start + 1
        return replace(run, start=start, length=length)

    return with_sequences(batch, tuple(map(shorter, batch.sequences)))


def renumbered(batch: Batch, ids: Mapping[int, int]) -> Batch:
    """Blocks under the new `ids`."""
    return replace(
        batch,
        sequences=tuple(
            replace(each, block_ids=tuple(ids[block] for block in each.block_ids))
            for each in batch.sequences
        ),
    )
