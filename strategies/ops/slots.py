"""Slot mappings: requests somewhere in their blocks, on one rank of several."""

from kvfuzz.model.ops.slot_axes import LONG
from kvfuzz.model.ops.slots import NO_ROW, Request, SlotScene
from kvfuzz.strategies.boundary import Boundary
from kvfuzz.strategies.choices import Choices, chance, distinct, number, pick

MOST_REQUESTS = 5
SHORT = 40
"""Tokens of a chunk, mostly at most."""
DEEP = 6
"""Virtual blocks before a deep request's tokens, at most."""
PAST = 1 << 16
MAX_FILL_SEED = (1 << 32) - 1
OFTEN_SHORT = 4

BOUNDARIES: tuple[Boundary, ...] = (
    Boundary({"ranks": "4", "interleave": "beyond"}, "owners by the manager's block, 51031"),
    Boundary({"ranks": "2", "interleave": "block"}, "whole blocks go round the ranks"),
    Boundary({"ranks": "3", "interleave": "part"}, "rounds that no power of two divides"),
    Boundary({"dummies": "some"}, "a request that owns no blocks writes nowhere, 39444"),
    Boundary({"tail": "some", "metadata": "wider"}, "a captured graph with a smaller batch"),
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
    runs = [_run(choices, row, kind, virtual, first=i == 0) for i, kind in enumerate(kinds)]
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
        max_num_tokens=tokens + (number(choices, 1, SHORT) if row["tail"] == "some" else 0),
        split=split,
        cp_size=cp_size,
        cp_rank=number(choices, 0, cp_size - 1),
        interleave=interleave,
        spare=number(choices, 1, 4) if row["metadata"] == "wider" else 0,
        fill_seed=choices.integer(0, MAX_FILL_SEED),
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
    choices: Choices, row: dict[str, str], kind: str, virtual: int, *, first: bool
) -> tuple[int, int]:
    """Where a request's tokens start, and how many there are."""
    if kind == "empty":
        return 0, 0
    deep = row["deep"] == "later"
    start = number(choices, 0, virtual - 1) if chance(choices, 2) else 0
    if deep:
        start += virtual * number(choices, 1, DEEP)
    most = {"1": 1, "2+": SHORT, "1024+": LONG + SHORT}[row["lengths"]]
    least = {"1": 1, "2+": 2, "1024+": LONG + 1}[row["lengths"]]
    return start, number(choices, least, max(least, most))


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
