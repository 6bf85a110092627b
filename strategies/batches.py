"""The batch: which runs of tokens an op touches, in which blocks, and which rows are padding.

Everything that the row of a scene says about tokens is kept; the rest is drawn. Most batches are
small; some have what engines have: runs that start many blocks deep or span many, wide tables, and
ids far above the number of blocks in use.
"""

import msgspec

from kvfuzz.model.layout import Geometry
from kvfuzz.model.plan import Batch, Sequence
from kvfuzz.strategies.choices import RARELY, Choices, distinct, number, pick, rarely
from kvfuzz.strategies.ids import STEPS, Blocks, assigned, ratio_of
from kvfuzz.strategies.layers import first_block
from kvfuzz.strategies.rows import Row

LONG_SPAN = 20
"""Blocks that a run spans, at most, where it need not span more."""
RUN_TOKENS = 200
"""Tokens of a run that need not be longer, at most."""
RUN_ELEMENTS = 1 << 14
"""Elements of one side of a run that need not have more, about."""
NEAR, DEEP = 2, 48
"""Blocks before a run starts: few as a rule, many as in the chunks of a long prompt."""
WIDE = 64
"""Unused columns of a block table, at most."""
CACHE_BYTES = 1 << 21
"""Bytes of a cache that is made larger than its batch needs, about."""
MOST_SPARE = 1 << 16
"""Blocks that nobody owns, at most: ids past 2**15, as far as 2**16, show where pages are tiny."""
CLOSE = 8
"""Tokens from the edge of a block within which most runs begin and end."""


class Occupancy(msgspec.Struct, frozen=True):
    """A batch, and whose the `num_blocks` blocks of its allocation are."""

    batch: Batch
    num_blocks: int
    state_blocks: tuple[int, ...]


class Run(msgspec.Struct, frozen=True):
    """A run of tokens: `skipped` blocks of its sequence, then from offset `first` of the next block
    to offset `last` of the block `span - 1` further on."""

    skipped: int
    span: int
    first: int
    last: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence up to the end of the run."""
        return self.skipped + self.span

    def start(self, block_size: int) -> int:
        """The position of the first token in its sequence."""
        return self.skipped * block_size + self.first

    def length(self, block_size: int) -> int:
        """Tokens of the run."""
        return (self.span - 1) * block_size + self.last - self.first + 1


def occupancy(
    choices: Choices,
    row: Row,
    page: Geometry,
    *,
    layers: int,
    side_bytes: int,
    block_stride: int,
    writes: bool,
    from_start: bool = False,
    least: tuple[int, int] = (1, 1),
) -> Occupancy:
    """A batch that shows `row`, over a cache whose blocks hold `page`, `block_stride` bytes apart.

    `side_bytes` are those of K, or of V, in one block of one of `layers` layers. A hybrid
    allocation gives some blocks to Mamba state. With `from_start` every run begins with its
    sequence. `least` are the tokens that a run has at least, and those of the last one; a run of
    one block has as many as that allows.
    """
    n = page.block_size
    apart = STEPS[ratio_of(row["block_ids"])]
    room = CACHE_BYTES // (2 * side_bytes * layers * apart)
    runs = _runs(choices, row, page, room, writes=writes, from_start=from_start, least=least)
    blocks = Blocks(
        row["block_ids"],
        tuple((run.skipped, run.span) for run in runs),
        num_states=number(choices, 1, 2) if row.get("layout") == "hybrid" else 0,
        spare=rarely(choices, 2, min(max(2, room // 2), MOST_SPARE)),
    )
    first = first_block(choices, row["reach"], page, side_bytes, block_stride)
    ids = assigned(choices, blocks)
    sequences = tuple(
        Sequence(tuple(first + block for block in owned), run.start(n), run.length(n))
        for run, owned in zip(runs, ids.sequences, strict=True)
    )
    unused = 0 if row["table"] == "tight" else 1 + rarely(choices, 1, WIDE - 1)
    width = max(run.num_blocks for run in runs) + unused
    num_tokens = sum(sequence.length for sequence in sequences)
    padded = _padding_rows(choices, num_tokens) if row["padding"] == "some" else ()
    return Occupancy(
        Batch(sequences, padded, width),
        first + ids.num_blocks,
        tuple(first + block for block in ids.states),
    )


def _runs(
    choices: Choices,
    row: Row,
    page: Geometry,
    room: int,
    *,
    writes: bool,
    from_start: bool,
    least: tuple[int, int],
) -> list[Run]:
    """The runs of a batch, in the order of its rows: as many as the row says, or, for a write,
    one to three."""
    if not writes:
        count = int(row["sequences"])
    else:
        count = 1 if row["blocks_used"] == "1" else pick(choices, (1, 1, 2, 3))
    runs = []
    for index in range(count):
        first_offset = "edge" if from_start else "" if index else row["first_offset"]
        firsts = _firsts(page.block_size, first_offset)
        lasts = _lasts(page.block_size, row["last_offset"] if index == count - 1 else "")
        fewest, most = _spans(row, page, index, count)
        span = fewest + rarely(choices, min(1, most - fewest), most - fewest)
        tokens = least[index == count - 1]
        if span == 1 and lasts[1] < firsts[0] + tokens - 1 and row["blocks_used"] != "1":
            span = 2
        if span == 1:
            last = _close(choices, min(max(lasts[0], firsts[0] + tokens - 1), lasts[1]), lasts[1])
            first = _close(choices, firsts[0], min(firsts[1], last - tokens + 1))
        else:
            first, last = _close(choices, *firsts), _close(choices, *lasts)
            missing = tokens - ((span - 1) * page.block_size + last - first + 1)
            span += -(-max(missing, 0) // page.block_size)
        skipped = 0
        if not from_start:
            skipped = _skipped(choices, row, room, index, count, writes=writes)
        runs.append(Run(skipped, span, first, last))
    return runs


def _firsts(n: int, level: str) -> tuple[int, int]:
    """The offsets at which a run may begin, where `first_offset` is `level`; any without one."""
    return {"edge": (0, 0), "inside": (1, n - 1), "": (0, n - 1)}[level]


def _lasts(n: int, level: str) -> tuple[int, int]:
    """The offsets at which a run may end, where `last_offset` is `level`; any without one."""
    return {"edge": (n - 1, n - 1), "first": (0, 0), "inside": (1, n - 2), "": (0, n - 1)}[level]


def _close(choices: Choices, low: int, high: int) -> int:
    """An offset of `low`..`high`, mostly close to an end."""
    if high - low < 2 * CLOSE:
        return number(choices, low, high)
    side = choices.integer(0, RARELY)
    if side == RARELY:
        return choices.integer(low, high)
    away = choices.integer(0, CLOSE - 1)
    return high - away if side % 2 else low + away


def _spans(row: Row, page: Geometry, index: int, count: int) -> tuple[int, int]:
    """The fewest and the most blocks that a run touches.

    To show a split the first run needs two blocks of one group, and a third beyond the group where
    no other run shows that groups lie apart.
    """
    if row["blocks_used"] == "1":
        return 1, 1
    if index > 0:
        fewest = 1
    elif ratio_of(row["block_ids"]) > 1:
        fewest = 3 if count == 1 else 2
    else:
        fewest = 2 if count == 1 else 1
    tokens = min(RUN_TOKENS, RUN_ELEMENTS // (page.num_kv_heads * page.head_size))
    return fewest, max(fewest, min(LONG_SPAN, tokens // page.block_size))


def _skipped(choices: Choices, row: Row, room: int, index: int, count: int, *, writes: bool) -> int:
    """Blocks of a sequence before its run.

    In split blocks a later run begins with a group; the first begins so that its second block is
    in the same group, and, where it is alone, its third in the next.
    """
    deep = max(NEAR, min(DEEP, room // 3 - 2))
    least = 1 if index == 0 and row["start_block"] == "later" else 0
    at_start = index == 0 and not writes and row["start_block"] == "first"
    ratio = ratio_of(row["block_ids"])
    if at_start:
        return 0
    skipped = least + rarely(choices, NEAR - least, deep - least)
    if ratio == 1:
        return skipped
    within = 0 if index else ratio - 2 if count == 1 else number(choices, 0, ratio - 2)
    groups = skipped // ratio
    if index == 0 and groups * ratio + within < least:
        groups += 1
    return groups * ratio + within


def _padding_rows(choices: Choices, num_tokens: int) -> tuple[int, ...]:
    """One to three rows of a write batch that are padding, anywhere."""
    count = number(choices, 1, 3)
    return tuple(sorted(distinct(choices, count, num_tokens + count)))


def row_gap(choices: Choices, num_kv_heads: int, head_size: int) -> int:
    """Elements between rows of key: what else a fused qkv projection holds."""
    row = num_kv_heads * head_size
    return pick(choices, (head_size, row, 3 * row))
