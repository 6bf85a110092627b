"""The axes of slot mappings, read off the metadata of their one step, and which go together."""

import itertools

from kvfuzz.model.axis import COUNTS, Axis, count_level
from kvfuzz.model.case import Program
from kvfuzz.model.rules import Rule
from kvfuzz.model.vocabulary import BLOCK_SIZES, Levels

RANKS: Levels = ("1", "2", "3", "4", "8")
INTERLEAVES: Levels = ("1", "part", "block", "beyond")
"""How many tokens a rank owns in a row, compared with a kernel block."""
SPLITS: Levels = ("1", "2", "4")
"""Kernel blocks of a manager block."""
LENGTHS: Levels = ("1", "2+", "1024+")
"""The most tokens of a request: a decode, a chunk, more than vLLM's kernel has lanes."""
LONG = 1024
SOME: Levels = ("none", "some")
TAILS: Levels = ("none", "some", "1024+")
"""How many slots there are behind the last token."""


def _request_rows(case: Program) -> tuple[int, ...]:
    step = case.steps[0]
    return case.integers(step, "idx_mapping")[: _num_requests(case)]


def _num_requests(case: Program) -> int:
    return case.tensor(case.steps[0].tensors["idx_mapping"]).shape[0]


def _starts(case: Program) -> tuple[int, ...]:
    return case.integers(case.steps[0], "query_start_loc")[: _num_requests(case) + 1]


def _lengths(case: Program) -> list[int]:
    starts = _starts(case)
    return [end - start for start, end in itertools.pairwise(starts)]


def _scalar(case: Program, name: str) -> int:
    return int(case.steps[0].scalars[name])


def interleave_level(tokens: int, block_size: int) -> str:
    """The level of a run of so many tokens of one rank."""
    if tokens == 1:
        return "1"
    return "part" if tokens < block_size else "block" if tokens == block_size else "beyond"


def _last_positions(case: Program) -> list[int]:
    """The last position of each request that has a row and tokens."""
    positions = case.integers(case.steps[0], "positions")
    found = zip(_request_rows(case), _starts(case), _lengths(case), strict=False)
    return [positions[start + count - 1] for row, start, count in found if row >= 0 and count]


def _virtual_block(case: Program) -> int:
    """Tokens of a request for which every rank has one manager block."""
    return _scalar(case, "manager_block_size") * _scalar(case, "cp_size")


def _table(case: Program) -> str:
    """Whether the table has columns that no request of the batch needs."""
    width = case.tensor(case.steps[0].tensors["block_table"]).shape[1]
    split = _scalar(case, "manager_block_size") // _scalar(case, "block_size")
    last = max(_last_positions(case), default=-1)
    return "wide" if width > -(-(last + 1) // _virtual_block(case)) * split else "tight"


def _is_deep(case: Program) -> str:
    """Whether a request has tokens before its batch that fill a block on every rank."""
    positions, starts = case.integers(case.steps[0], "positions"), _starts(case)
    first = [
        positions[start] for start, count in zip(starts, _lengths(case), strict=False) if count
    ]
    return "later" if max(first, default=0) >= _virtual_block(case) else "first"


def _largest_id(case: Program) -> str:
    step = case.steps[0]
    return "past_65535" if max(case.integers(step, "block_table")) > (1 << 16) - 1 else "small"


def _wider(case: Program) -> str:
    """Whether metadata have entries behind those of the batch."""
    has = len(case.written_out(case.steps[0], "idx_mapping"))
    return "wider" if has > _num_requests(case) else "exact"


def _order(case: Program) -> str:
    rows = [row for row in _request_rows(case) if row >= 0]
    return "in_order" if rows == list(range(len(rows))) else "permuted"


def _longest(case: Program) -> str:
    most = max(_lengths(case))
    return "1" if most < 2 else "2+" if most <= LONG else "1024+"


def _tail(case: Program) -> str:
    behind = len(case.integers(case.steps[0], "positions")) - _starts(case)[-1]
    return "1024+" if behind > LONG else _is_some(behind > 0)


def _is_some(condition: bool) -> str:
    return "some" if condition else "none"


SLOT_AXES: tuple[Axis, ...] = (
    Axis("block_size", tuple(map(str, BLOCK_SIZES)), lambda case: str(_scalar(case, "block_size"))),
    Axis("ranks", RANKS, lambda case: str(_scalar(case, "cp_size"))),
    Axis(
        "interleave",
        INTERLEAVES,
        lambda case: interleave_level(_scalar(case, "cp_interleave"), _scalar(case, "block_size")),
    ),
    Axis(
        "split",
        SPLITS,
        lambda case: str(_scalar(case, "manager_block_size") // _scalar(case, "block_size")),
    ),
    Axis("requests", COUNTS, lambda case: count_level(_num_requests(case))),
    Axis("empty", SOME, lambda case: _is_some(0 in _lengths(case))),
    Axis("dummies", SOME, lambda case: _is_some(min(_request_rows(case)) < 0)),
    Axis("state_rows", ("in_order", "permuted"), _order),
    Axis("lengths", LENGTHS, _longest),
    Axis("deep", ("first", "later"), _is_deep),
    Axis("table", ("tight", "wide"), _table),
    Axis("tail", TAILS, _tail),
    Axis("metadata", ("exact", "wider"), _wider),
    Axis("ids", ("small", "past_65535"), _largest_id),
)

SLOT_RULES: tuple[Rule, ...] = (
    Rule(("ranks", "interleave"), lambda ranks, run: ranks != "1" or run == "1"),
    Rule(
        ("block_size", "interleave"),
        lambda size, run: (
            run in ("1", "beyond") or (int(size) > 1 and (run == "block" or _is_split(int(size))))
        ),
    ),
    # A run lies in one manager block.
    Rule(("interleave", "split"), lambda run, split: run != "beyond" or split != "1"),
    # A batch of dummies alone has no token that goes anywhere.
    Rule(("requests", "dummies"), lambda requests, some: requests != "1" or some == "none"),
    Rule(("requests", "empty"), lambda requests, some: requests != "1" or some == "none"),
    Rule(
        ("requests", "empty", "dummies"),
        lambda requests, empty, dummies: (requests, empty, dummies) != ("2", "some", "some"),
    ),
)


def _is_split(size: int) -> bool:
    """Whether a block has a run between one token and itself that divides it."""
    return any(size % run == 0 for run in range(2, size))
