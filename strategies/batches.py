"""The batch: which runs of tokens an op touches, in which blocks, and which rows are padding.

Block ids are shuffled and mostly not adjacent, runs begin inside a block as often as at its edge,
and cross into the next block about every second time, since nearly every addressing bug needs a
second block to show. Most batches are small; some have what engines have: runs that start many
blocks deep or span many, wide tables, and ids far above the number of blocks in use.
"""

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvfuzz.model.axes import REACH
from kvfuzz.model.layout import Geometry
from kvfuzz.model.plan import Batch, Sequence

MAX_SEQUENCES = 3
SHORT_RUN, LONG_RUN = 24, 200
NEAR, DEEP = 2, 48
"""Blocks before a run starts: few as a rule, many as in the chunks of a long prompt."""
WIDE = 64
"""Unused columns of a block table, at most."""
CACHE_BYTES = 1 << 21
"""Bytes of a cache that is made larger than its batch needs, about."""
RUN_ELEMENTS = 1 << 14
"""Elements of one side of a long run, about."""
MOST_BLOCKS = 1 << 16
NEAR_PER_FAR = 15
"""Batches near the start of the cache, for one that lies past 2**31."""


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


def mostly(usual: SearchStrategy[int], rare: SearchStrategy[int]) -> SearchStrategy[int]:
    """`usual` five times of six."""
    return st.sampled_from((usual,) * 5 + (rare,)).flatmap(lambda chosen: chosen)


@st.composite
def runs(draw: DrawFn, page: Geometry, *, room: int) -> Run:
    """A run of at least one token, in a sequence of just enough blocks.

    `room` is how many blocks the cache may have, about.
    """
    n = page.block_size
    deep = max(NEAR, min(DEEP, room // MAX_SEQUENCES - 2))
    skipped = draw(mostly(st.integers(0, NEAR), st.integers(0, deep)))
    offsets = st.one_of(st.just(0), st.just(n - 1), st.integers(0, n - 1))
    start = skipped * n + draw(offsets)
    long = min(LONG_RUN, RUN_ELEMENTS // (page.num_kv_heads * page.head_size), 8 * n)
    longest = st.integers(1, max(long, 1))
    length = draw(mostly(st.integers(1, min(SHORT_RUN, 6 * n)), longest))
    return Run(start, length, -(-(start + length) // n))


@st.composite
def occupancies(
    draw: DrawFn,
    page: Geometry,
    page_bytes: int,
    *,
    first_block: SearchStrategy[int],
    hybrid: bool = False,
    padding: bool = False,
) -> Occupancy:
    """A batch over shuffled blocks; a hybrid allocation gives some blocks to Mamba state.

    `page` has the sizes of one block and `page_bytes` its bytes, K and V together. All blocks in
    use have ids from `first_block` on. `padding` asks for padding rows, about every second time.
    """
    first = draw(first_block)
    room = min(CACHE_BYTES // page_bytes, MOST_BLOCKS)
    drawn = draw(st.lists(runs(page, room=room), min_size=1, max_size=MAX_SEQUENCES))
    used = sum(run.num_blocks for run in drawn)
    num_state = draw(st.integers(1, 2)) if hybrid else 0
    spare = mostly(st.integers(0, 2), st.integers(0, max(2, room - used)))
    needed = used + num_state
    window = needed + draw(spare)
    ids = [first + block for block in draw(_distinct(needed, window))]
    sequences, at = [], 0
    for run in drawn:
        sequences.append(Sequence(tuple(ids[at : at + run.num_blocks]), run.start, run.length))
        at += run.num_blocks
    unused = mostly(st.integers(0, 2), st.integers(0, WIDE))
    width = max(run.num_blocks for run in drawn) + draw(unused)
    num_tokens = sum(run.length for run in drawn)
    rows = draw(padding_rows(num_tokens)) if padding else ()
    batch = Batch(tuple(sequences), rows, width)
    return Occupancy(batch, first + window, tuple(sorted(ids[at : at + num_state])))


@st.composite
def first_blocks(draw: DrawFn, block_stride: int, element: int, levels: tuple[str, ...]) -> int:
    """The least id of the blocks in use: 0 as a rule, and now and then past 2**31, as the `levels`
    of the axis `reach` ask for.

    `block_stride` is in bytes, `element` the bytes of one. Past 2**32 elements an unsigned index
    fails, too, so that a block lies past twice the boundary every other time. Near and far take
    the same choices, so that a far case shrinks to a near one that is otherwise the same.
    """
    # Where an element is one byte, bytes are elements.
    possible = [level for level in levels if element > 1 or level != "past_2g_bytes"]
    far = [level for level in possible if level != "near"]
    near = ["near"] * max(1, NEAR_PER_FAR * len(far)) if "near" in possible else []
    level = draw(st.sampled_from(near + far))
    times = draw(st.sampled_from((1, 2)))
    boundary = {
        "near": 0,
        "past_2g_bytes": REACH,
        "past_2g_elements": REACH * element * times,
    }
    return -(-boundary[level] // block_stride)


def _distinct(count: int, below: int) -> SearchStrategy[list[int]]:
    """`count` different integers of `range(below)` in any order."""
    if below <= 2 * count:
        return st.permutations(range(below)).map(lambda ids: list(ids[:count]))
    ids = st.integers(0, below - 1)
    return st.lists(ids, min_size=count, max_size=count, unique=True)


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
