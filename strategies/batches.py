"""The batch: which runs of tokens an op touches, in which blocks, and which rows are padding.

Block ids are shuffled and mostly not adjacent, runs begin inside a block as often as at its edge,
and cross into the next block about every second time, since nearly every addressing bug needs a
second block to show.
"""

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvfuzz.model.plan import Batch, Sequence

MAX_SEQUENCES = 3
MAX_RUN = 24
MAX_BLOCKS_PER_SEQUENCE = 6
MAX_SKIPPED_BLOCKS = 2


class Occupancy(msgspec.Struct, frozen=True):
    """A batch, and whose the `num_blocks` blocks of its allocation are."""

    batch: Batch
    num_blocks: int
    state_blocks: tuple[int, ...]


class Run(msgspec.Struct, frozen=True):
    """Tokens `start` to `start + length` of a sequence that owns `num_blocks` blocks."""

    start: int
    length: int
    num_blocks: int


@st.composite
def runs(draw: DrawFn, block_size: int) -> Run:
    """A run of at least one token, in a sequence of just enough blocks."""
    skipped = draw(st.integers(0, MAX_SKIPPED_BLOCKS))
    offsets = st.one_of(st.just(0), st.just(block_size - 1), st.integers(0, block_size - 1))
    start = skipped * block_size + draw(offsets)
    capacity = MAX_BLOCKS_PER_SEQUENCE * block_size - start
    length = draw(st.integers(1, min(MAX_RUN, capacity)))
    return Run(start, length, -(-(start + length) // block_size))


@st.composite
def occupancies(
    draw: DrawFn, block_size: int, *, hybrid: bool = False, padding: bool = False
) -> Occupancy:
    """A batch over shuffled blocks; a hybrid allocation gives some blocks to Mamba state.

    `padding` asks for padding rows, about every second time.
    """
    drawn = draw(st.lists(runs(block_size), min_size=1, max_size=MAX_SEQUENCES))
    used = sum(run.num_blocks for run in drawn)
    num_state = draw(st.integers(1, 2)) if hybrid else 0
    num_blocks = used + num_state + draw(st.integers(0, 2))
    ids = draw(st.permutations(range(num_blocks)))
    sequences, at = [], 0
    for run in drawn:
        sequences.append(Sequence(tuple(ids[at : at + run.num_blocks]), run.start, run.length))
        at += run.num_blocks
    width = max(run.num_blocks for run in drawn) + draw(st.integers(0, 2))
    num_tokens = sum(run.length for run in drawn)
    rows = draw(padding_rows(num_tokens)) if padding else ()
    batch = Batch(tuple(sequences), rows, width)
    return Occupancy(batch, num_blocks, tuple(sorted(ids[at : at + num_state])))


@st.composite
def padding_rows(draw: DrawFn, num_tokens: int) -> tuple[int, ...]:
    """Rows of a write batch that are padding: none half of the time, else up to three anywhere."""
    count = draw(st.sampled_from((0, 0, 0, 1, 2, 3)))
    rows = st.integers(0, num_tokens + count - 1)
    return tuple(sorted(draw(st.lists(rows, min_size=count, max_size=count, unique=True))))


def row_gaps(num_kv_heads: int, head_size: int) -> SearchStrategy[int]:
    """Elements between rows of key: none, or what else a fused qkv projection holds."""
    row = num_kv_heads * head_size
    return st.sampled_from((0, head_size, row, 3 * row))
