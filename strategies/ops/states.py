"""Copies of states: shapes of states in their few formats, and blocks that are copied."""

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layout import Geometry
from kvfuzz.model.ops.state_axes import LONG, STATE_DTYPES
from kvfuzz.model.ops.states import State, StateScene
from kvfuzz.strategies.boundary import Boundary
from kvfuzz.strategies.choices import RARELY, Choices, chance, fill_seed, number, pick, rarely
from kvfuzz.strategies.ids import Blocks, assigned
from kvfuzz.strategies.layers import first_block
from kvfuzz.strategies.ops.pages import CACHE_BYTES, FEW_ENTRIES, MOST_ENTRIES, dealt_pairs
from kvfuzz.strategies.rows import Row

FEW, MOST, HUGE = 12, 3 * LONG, 100 * LONG
"""8-byte words of most short states; bytes of most long ones, and of any, at most."""
WORD = 8
PADDINGS = (16, 64, 4, 1040)

BOUNDARIES: tuple[Boundary, ...] = (
    Boundary({"state_dtypes": "mixed", "page": "padded"}, "a convolution's and a recurrence's"),
    Boundary({"state_length": "long", "state_bytes": "uneven"}, "the tail of the last chunk"),
    Boundary({"page": "padded", "block_ids": "shuffled"}, "blocks as large as attention's pages"),
    Boundary({"reach": "past_2g_bytes"}, "32-bit offsets of blocks"),
    Boundary({"metadata": "wider", "pairs": "1"}, "a persistent buffer with a stale tail"),
    Boundary({"num_states": "3", "pairs": "3+"}, "every state of every pair"),
)


def drawn_scene(choices: Choices, row: Row) -> StateScene:
    """The scene of `row`; what the row leaves open is drawn."""
    states = _states(choices, row)
    largest = max(itemsize(state.dtype) for state in states)
    whole = sum(state.nbytes for state in states)
    # Blocks lie at multiples of every element.
    padding = -whole % largest
    if row["page"] == "padded":
        padding += pick(choices, PADDINGS)
    stride = whole + padding
    pairs = int(row["pairs"]) if row["pairs"] != "3+" else _several(choices, stride)
    blocks = Blocks(row["block_ids"], ((0, 2 * pairs),), 0, rarely(choices, 2, 64))
    ids = assigned(choices, blocks)
    element = itemsize(states[0].dtype)
    first = first_block(choices, row["reach"], Geometry(1, 1, 1, 1), element, stride)
    named = [first + block for block in ids.sequences[0]]
    return StateScene(
        states=states,
        num_blocks=first + ids.num_blocks,
        pairs=dealt_pairs(choices, named, [True] * pairs),
        padding=padding,
        spare=number(choices, 1, 4) if row["metadata"] == "wider" else 0,
        fill_seed=fill_seed(choices),
    )


def _states(choices: Choices, row: Row) -> tuple[State, ...]:
    """The states of a block; each is a whole number of the largest element, so that all lie at
    multiples of their own wherever they stand."""
    count = int(row["num_states"])
    dtypes = [row["state_dtype"]] * count
    if row["state_dtypes"] == "mixed":
        others = [each for each in STATE_DTYPES if each != dtypes[0]]
        changed = {count - 1, number(choices, 1, count - 1)}
        dtypes = [pick(choices, others) if n in changed else each for n, each in enumerate(dtypes)]
    unit = max(map(itemsize, dtypes))
    uneven, long, deep = (number(choices, 0, count - 1) for _ in range(3))
    states = []
    for index, dtype in enumerate(dtypes):
        is_long = row["state_length"] == "long" and index == long
        words = _long(choices) if is_long else _few(choices, 1, LONG // WORD - 1)
        nbytes = WORD * words
        if row["state_bytes"] == "uneven" and index == uneven:
            nbytes += unit * number(choices, 1, WORD // unit - 1)
        elif is_long:
            nbytes += WORD
        rank = (
            int(row["state_rank"]) if index == deep else number(choices, 1, int(row["state_rank"]))
        )
        states.append(State(dtype, _shape(choices, nbytes // itemsize(dtype), rank)))
    return tuple(states)


def _several(choices: Choices, stride: int) -> int:
    """Three pairs or more; many where blocks are small."""
    most = min(MOST_ENTRIES, CACHE_BYTES // (2 * stride))
    return 3 + rarely(choices, FEW_ENTRIES - 3, max(FEW_ENTRIES, most) - 3)


def _long(choices: Choices) -> int:
    """8-byte words of a long state: those of models have a hundred KiB and more."""
    return (LONG + rarely(choices, MOST - LONG, HUGE - LONG)) // WORD


def _few(choices: Choices, low: int, high: int) -> int:
    """Mostly a small number."""
    return (
        number(choices, low, min(FEW, high))
        if not chance(choices, RARELY)
        else number(choices, low, high)
    )


def _shape(choices: Choices, elements: int, rank: int) -> tuple[int, ...]:
    """So many elements in a shape of `rank` axes."""
    shape = []
    for _ in range(rank - 1):
        divisors = [each for each in range(1, elements + 1) if elements % each == 0]
        shape.append(pick(choices, divisors))
        elements //= shape[-1]
    return (*shape, elements)
