"""slot_mapping: which slot of the cache each new token of a batch goes to.

A request's positions go round the ranks of context parallelism in runs of `interleave` tokens. The
tokens of one rank, in their order, fill that rank's blocks of the request one after the other. So
with `n` tokens of one rank before a position, its slot on that rank is

    block_table[row, n // block_size] * block_size + n % block_size

and PAD_SLOT_ID on every other rank. `block_size` is that of the kernels: a manager block, of which
`interleave` divides the tokens, is `split` of them. Slots behind the last token are padding, too,
since captured graphs read them (vLLM `_compute_slot_mappings_kernel`, vllm/v1/worker/gpu).

The step binds, in a batch of `num_reqs` requests:

    idx_mapping       `[num_reqs]` i32, the row of each request in the table; -1 has none (a dummy)
    query_start_loc   `[num_reqs + 1]` i32, where each request's tokens begin
    positions         `[max_num_tokens]` i64, by token
    block_table       `[max_num_reqs, width]` i32, of all requests that the engine knows
    slot_mapping      `[max_num_tokens]` i64, the result

and the scalars block_size, manager_block_size, cp_rank, cp_size, cp_interleave, and num_tokens:
those of the batch, which an engine knows on its host.
"""

import msgspec

from kvfuzz.model.case import Buffer, Step, TensorView
from kvfuzz.model.fill import ByteFill
from kvfuzz.model.layout import Field, Term
from kvfuzz.model.ops.metadata import stale, table, vector
from kvfuzz.model.parts import Parts
from kvfuzz.model.plan import require

SLOT_OP = "slot_mapping"
NO_ROW = -1
"""The row of a request that owns no blocks: a dummy, or padding of a captured graph."""
MOST_TOKENS = 1 << 16
MOST_ENTRIES = 1 << 18


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a batch: tokens `start` to `start + length`, and its row of the table."""

    row: int
    start: int
    length: int
    block_ids: tuple[int, ...] = ()
    """The manager blocks that it holds on every rank, in order; kernel blocks `b * split` and those
    behind it are block b (vLLM: map_to_kernel_blocks)."""


class SlotScene(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="slots"):
    """Everything that decides a slot mapping."""

    requests: tuple[Request, ...]
    block_size: int
    """Tokens of a kernel block."""
    num_blocks: int
    """Manager blocks of the cache, in which stale entries of the table lie, too."""
    num_rows: int
    table_width: int
    max_num_tokens: int
    split: int = 1
    """Kernel blocks of a manager block."""
    cp_size: int = 1
    cp_rank: int = 0
    interleave: int = 1
    spare: int = 0
    """Entries that idx_mapping and query_start_loc have behind the batch, and columns that the
    table has behind those that are handed over."""
    fill_seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return sum(request.length for request in self.requests)

    @property
    def virtual_block(self) -> int:
        """Tokens of a request for which every rank has one manager block."""
        return self.block_size * self.split * self.cp_size


def check(scene: SlotScene) -> None:
    """Raise UsageError with the first thing that makes `scene` impossible."""
    for name in ("block_size", "num_blocks", "num_rows", "max_num_tokens", "split", "cp_size"):
        require(getattr(scene, name) >= 1, f"{name}={getattr(scene, name)}, expected 1 or more")
    require(0 <= scene.cp_rank < scene.cp_size, f"cp_rank={scene.cp_rank} of {scene.cp_size}")
    manager = scene.block_size * scene.split
    require(
        scene.interleave >= 1 and manager % scene.interleave == 0,
        f"interleave={scene.interleave}, expected to divide a manager block of {manager} tokens",
    )
    require(bool(scene.requests), "a batch without requests")
    require(
        scene.num_tokens <= scene.max_num_tokens <= MOST_TOKENS,
        f"{scene.num_tokens} tokens with max_num_tokens={scene.max_num_tokens}, expected at most "
        f"{MOST_TOKENS}",
    )
    require(
        0 <= scene.spare <= MOST_TOKENS
        and scene.table_width > 0
        and scene.num_rows * (scene.table_width + scene.spare) <= MOST_ENTRIES,
        f"a table of {scene.num_rows} x {scene.table_width}, spare={scene.spare}",
    )
    require(
        scene.num_blocks * manager < 1 << 31,
        f"num_blocks={scene.num_blocks} of {manager} tokens: a slot is below 2**31",
    )
    _check_requests(scene)


def _check_requests(scene: SlotScene) -> None:
    rows = [each.row for each in scene.requests if each.row != NO_ROW]
    require(
        len(set(rows)) == len(rows) and all(0 <= row < scene.num_rows for row in rows),
        f"rows {rows} of a table of {scene.num_rows}",
    )
    ids = [block for each in scene.requests for block in each.block_ids]
    require(
        len(set(ids)) == len(ids) and all(0 <= block < scene.num_blocks for block in ids),
        f"block ids {ids} of {scene.num_blocks} blocks: two owners, or outside",
    )
    for each in scene.requests:
        held = len(each.block_ids)
        room = held * scene.virtual_block
        require(
            each.start >= 0
            and each.length >= 0
            and (each.row == NO_ROW or each.start + each.length <= room),
            f"tokens {each.start}..{each.start + each.length} in {held} blocks of a rank",
        )
        require(
            held * scene.split <= scene.table_width and (held == 0 or each.row >= 0),
            f"{held} blocks of a request, in a row of {scene.table_width}, split={scene.split}",
        )


def parts(scene: SlotScene) -> Parts:
    """What a scene adds up to."""
    seed, tokens = scene.fill_seed, scene.num_tokens
    starts = [0]
    for each in scene.requests:
        starts.append(starts[-1] + each.length)
    positions = tuple(
        position
        for each in scene.requests
        for position in range(each.start, each.start + each.length)
    )
    behind = scene.max_num_tokens - tokens
    deepest = max(1, scene.table_width // scene.split * scene.virtual_block)
    tensors = (
        vector(
            "idx_mapping",
            "i32",
            tuple(each.row for each in scene.requests)
            + stale(seed, "idx_mapping", scene.spare, scene.num_rows),
            len(scene.requests),
        ),
        vector(
            "query_start_loc",
            "i32",
            tuple(starts) + stale(seed, "query_start_loc", scene.spare, tokens + 1),
            len(scene.requests) + 1,
        ),
        vector(
            "positions",
            "i64",
            positions + stale(seed, "positions", behind, deepest),
            scene.max_num_tokens,
        ),
        table("block_table", "i32", _table(scene), scene.num_rows, scene.table_width),
    )
    size = 8 * scene.max_num_tokens
    extents = {"token": scene.max_num_tokens}
    bound = {each.view.name: each.view.name for each in tensors} | {"slot_mapping": "slot_mapping"}
    return Parts(
        (*(each.buffer for each in tensors), Buffer("slot_mapping", size, ByteFill(seed))),
        (
            *(each.field for each in tensors),
            Field("slot_mapping", "slot_mapping", "i64", 0, (Term("token", 8),), extents),  # type: ignore[arg-type]
        ),
        (
            *(each.view for each in tensors),
            TensorView("slot_mapping", "slot_mapping", "i64", (scene.max_num_tokens,), (8,)),
        ),
        Step(
            SLOT_OP,
            bound,
            bound,
            {
                "block_size": scene.block_size,
                "manager_block_size": scene.block_size * scene.split,
                "num_tokens": scene.num_tokens,
                "cp_rank": scene.cp_rank,
                "cp_size": scene.cp_size,
                "cp_interleave": scene.interleave,
            },
        ),
    )


def _table(scene: SlotScene) -> tuple[tuple[int, ...], ...]:
    """The block table: rows of requests that are not in the batch are stale, and so is what lies
    behind a request's blocks."""
    parts = range(scene.split)
    rows = {
        each.row: tuple(block * scene.split + part for block in each.block_ids for part in parts)
        for each in scene.requests
    }
    width, below = scene.table_width + scene.spare, scene.num_blocks * scene.split
    old = stale(scene.fill_seed, "block_table", scene.num_rows * width, below)
    return tuple(
        (*held, *old[row * width + len(held) : (row + 1) * width])
        for row in range(scene.num_rows)
        for held in [rows.get(row, ())]
    )


def at_rank(scene: SlotScene, rank: int) -> SlotScene:
    """The same batch on another rank."""
    return msgspec.structs.replace(scene, cp_rank=rank)
