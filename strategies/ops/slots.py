"""Slot mappings: requests somewhere in their blocks, on one rank of several."""

from kvfuzz.model.ops.slot_axes import LONG
from kvfuzz.model.ops.slots import NO_ROW, Request, SlotScene
from kvfuzz.strategies.boundary import Boundary
from kvfuzz.strategies.choices import (
    RARELY,
    Choices,
    chance,
    distinct,
    fill_seed,
    number,
    pick,
    rarely,
)

MOST_REQUESTS = 5
SHORT = 40
"""Tokens of a chunk, mostly at most."""
MANY = 4 * LONG
"""Tokens beyond LONG of a long request, or slots of a long tail, at most."""
DEEP = 6
"""Virtual blocks before a deep request's tokens, at most."""
PAST = 1 << 16

BOUNDARIES: tuple[Boundary, ...] = (
    Boundary({"ranks": "4", "interleave": "beyond"}, "owners by the manager's block, 51031"),
    Boundary({"ranks": "2", "interleave": "block"}, "whole blocks go round the ranks"),
    Boundary({"ranks": "3", "interleave": "part"}, "rounds that no power of two divides"),
    Boundary({"dummies": "some"}, "a request that owns no blocks writes nowhere, 39444"),
    Boundary({"tail": "some", "metadata": "wider"}, "a captured graph with a smaller batch"),
    Boundary({"tail": "1024+"}, "a captured graph of a far larger batch"),
    Boundary({"lengths": "1024+"}, "more tokens than a program has lanes"),
    Boundary({"lengths": "1", "requests": "3+"}, "a decode"),
    Boundary({"ids": "past_65535"}, "ids that 16 bits do not hold"),
    Boundary({"block_size": "1"}, "a token a block"),
)


def drawn_scene(choices: Choices, row: dict[str, str]) -> SlotScene:
    """The scene of `row`; what the row leaves open is drawn."""
    block_size, cp_size = int(row["block_size"]), int(row["ranks"])
    split = int(row["split"])
    interleave = _interleave(choices, row["interleave"], block_size, split)
    kinds = _kinds(choices, row)
    virtual = block_size * split * cp_size
    longest = next(place for place, kind in enumerate(kinds) if kind != "empty")
    runs = [
        _run(choices, row, kind, virtual, is_longest=place == longest)
        for place, kind in enumerate(kinds)
    ]
    held = [
        0 if kind == "dummy" else -(-(start + length) // virtual)
        for kind, (start, length) in zip(kinds, runs, strict=True)
    ]
    rows, num_rows = _rows(choices, row["state_rows"], kinds)
    ids = _ids(choices, row["ids"], sum(held))
    requests, at = [], 0
    for place, (start, length), count in zip(rows, runs, held, strict=True):
        requests.append(Request(place, start, length, ids[at : at + count]))
        at += count
    tokens = sum(length for _, length in runs)
    needed = max(held) * split
    width = needed + (split * number(choices, 1, 3) if row["table"] == "wide" else 0)
    return SlotScene(
        requests=tuple(requests),
        block_size=block_size,
        num_blocks=max(ids) + 1 + number(choices, 0, 2),
        num_rows=num_rows,
        table_width=width,
        max_num_tokens=tokens + _tail(choices, row["tail"]),
        split=split,
        cp_size=cp_size,
        cp_rank=number(choices, 0, cp_size - 1),
        interleave=interleave,
        spare=number(choices, 1, 4) if row["metadata"] == "wider" else 0,
        fill_seed=fill_seed(choices),
    )


def _interleave(choices: Choices, level: str, block_size: int, split: int) -> int:
    """Tokens of a rank in a row: a divisor of the manager's block."""
    if level == "beyond":
        return block_size * pick(choices, [part for part in (2, 4) if part <= split])
    if level == "part":
        return pick(choices, [run for run in range(2, block_size) if block_size % run == 0])
    return 1 if level == "1" else block_size


def _kinds(choices: Choices, row: dict[str, str]) -> list[str]:
    """What each request of a batch is: one with tokens, one without, or a dummy."""
    count = {"1": 1, "2": 2}.get(row["requests"]) or number(choices, 3, MOST_REQUESTS)
    wanted = [
        kind for kind, axis in (("empty", "empty"), ("dummy", "dummies")) if row[axis] == "some"
    ]
    kinds = ["full"] * (count - len(wanted)) + wanted
    order = distinct(choices, count, count)
    return [kinds[place] for place in order]


def _run(
    choices: Choices, row: dict[str, str], kind: str, virtual: int, *, is_longest: bool
) -> tuple[int, int]:
    """Where a request's tokens start, and how many there are."""
    if kind == "empty":
        return 0, 0
    deep = row["deep"] == "later"
    start = number(choices, 0, virtual - 1) if chance(choices, 2) else 0
    if deep:
        start += virtual * number(choices, 1, DEEP)
    if row["lengths"] == "1024+" and (is_longest or chance(choices, RARELY)):
        return start, _many(choices)
    return start, {"1": 1}.get(row["lengths"]) or number(choices, 2, SHORT)


def _many(choices: Choices) -> int:
    """Some more than a program of vLLM's has lanes, at times several times as many."""
    return LONG + 1 + rarely(choices, SHORT, MANY)


def _tail(choices: Choices, level: str) -> int:
    """Slots behind the last token."""
    if level == "1024+":
        return _many(choices)
    return number(choices, 1, SHORT) if level == "some" else 0


def _rows(choices: Choices, level: str, kinds: list[str]) -> tuple[list[int], int]:
    """The rows of a batch's requests in the table, and how many rows that has."""
    count = sum(kind != "dummy" for kind in kinds)
    if level == "in_order":
        rows, num_rows = list(range(count)), count + number(choices, 0, 2)
    else:
        num_rows = count + number(choices, 1, 3)
        rows = distinct(choices, count, num_rows)
        if rows == list(range(count)):
            rows[-1] = num_rows - 1
            if count == num_rows:
                rows.reverse()
    taken = iter(rows)
    return [NO_ROW if kind == "dummy" else next(taken) for kind in kinds], num_rows


def _ids(choices: Choices, level: str, count: int) -> tuple[int, ...]:
    """Different block ids in any order."""
    ids = distinct(choices, count, 2 * count)
    first = PAST if level == "past_65535" else 0
    return tuple(first + block for block in ids)
