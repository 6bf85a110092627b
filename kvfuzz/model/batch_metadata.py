"""The numbers by which a batch is handed to a kernel: a write's slots, a gather's block table."""

from typing import NamedTuple

from kvfuzz.model.fill import word
from kvfuzz.model.plan import Batch
from kvfuzz.model.steps import PAD_SLOT_ID


class Gathered(NamedTuple):
    """The metadata of a gather, as flat integers; the table is `[num_sequences, width]`."""

    block_table: tuple[int, ...]
    seq_starts: tuple[int, ...]
    cu_seqlens_kv: tuple[int, ...]
    token_to_batch: tuple[int, ...]


def slot_mapping(batch: Batch, block_size: int) -> tuple[int, ...]:
    """The slot of each row of a write, PAD_SLOT_ID for padding."""
    n = block_size
    slots = iter(
        sequence.block_ids[p // n] * n + p % n
        for sequence in batch.sequences
        for p in range(sequence.start, sequence.start + sequence.length)
    )
    padded = set(batch.padding)
    return tuple(PAD_SLOT_ID if row in padded else next(slots) for row in range(batch.num_rows))


def gathered(batch: Batch, num_blocks: int, fill_seed: int) -> Gathered:
    """What a gather of `batch` is told.

    Past a sequence's blocks the table is stale: whatever ids an earlier request left.
    """
    table, starts, ends, owners = [], [], [0], []
    for row, sequence in enumerate(batch.sequences):
        columns = range(len(sequence.block_ids), batch.table_width)
        places = (row * batch.table_width + column for column in columns)
        stale = (word(fill_seed, "block_table", place) % num_blocks for place in places)
        table += [*sequence.block_ids, *stale]
        starts.append(sequence.start)
        ends.append(ends[-1] + sequence.length)
        owners += [row] * sequence.length
    return Gathered(tuple(table), tuple(starts), tuple(ends), tuple(owners))
