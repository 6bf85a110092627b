"""The layer whose cache an op works on, as a row says: its pages, and where they lie."""

import msgspec

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layout import Geometry
from kvfuzz.model.plan import CACHE, AttentionLayer, Plan, StateLayer
from kvfuzz.model.tokens import REACH
from kvfuzz.model.vocabulary import SCALE_BYTES, x_of
from kvfuzz.strategies.choices import Choices, chance, number, pick
from kvfuzz.strategies.ids import ALIGNED
from kvfuzz.strategies.rows import NESTED, Row

MOST_LAYERS = 3
SEVERAL = 6
"""One in so many caches whose layers lie apart has several of them."""


def drawn_layer(choices: Choices, row: Row) -> AttentionLayer:
    """A layer as the row says, of one block and without a name."""
    head_size, x = int(row["head_size"]), x_of(row["cache_dtype"])
    value_size, padding = 0, 0
    if row["value_size"] == "narrower":
        value_size = pick(choices, (head_size - x, max(x, head_size // (2 * x) * x)))
    elif row["value_size"] == "wider":
        value_size = head_size + x * number(choices, 1, 4)
    if row["page"] == "padded":
        inline = row["granularity"] == "token_head_inline"
        unit = SCALE_BYTES if inline else itemsize(row["cache_dtype"])
        padding = pick(choices, (16, 64, unit, 3 * unit, 7 * unit))
    return AttentionLayer(
        "",
        CACHE,
        row["layout"],
        row["order"],
        Geometry(1, int(row["block_size"]), int(row["num_kv_heads"]), head_size, value_size),
        row["cache_dtype"],
        nesting=row["nesting"],
        page_padding=padding,
        granularity=row["granularity"],
    )


def layer_of_several(choices: Choices, row: Row) -> tuple[int, int]:
    """Which attention layer of its allocation the op works on, and how many there are.

    Layers that lie side by side show as such where there are two; a huge cache has one otherwise.
    """
    if row["nesting"] in NESTED:
        count = number(choices, 2, MOST_LAYERS)
    elif row["reach"] == "near" and chance(choices, SEVERAL):
        count = number(choices, 1, MOST_LAYERS)
    else:
        count = 1
    return number(choices, 0, count - 1), count


def layer_name(index: int) -> str:
    """What a layer of a drawn plan is called."""
    return f"layer.{index}"


def plan_of(
    layer: AttentionLayer, count: int, num_blocks: int, state_blocks: tuple[int, ...]
) -> Plan:
    """`count` layers like `layer` over one allocation of `num_blocks` blocks, of which some may be
    those of Mamba state."""
    geometry = msgspec.structs.replace(layer.geometry, num_blocks=num_blocks)
    attention = tuple(
        msgspec.structs.replace(layer, name=layer_name(index), geometry=geometry)
        for index in range(count)
    )
    if not state_blocks:
        return Plan(attention)
    return Plan((*attention, StateLayer(layer_name(count), CACHE, state_blocks)))


def first_block(choices: Choices, reach: str, page: Geometry, side_bytes: int, stride: int) -> int:
    """The least id of the blocks in use: 0, or the first beyond 2**31 bytes or elements.

    `stride` is in bytes from block to block, `side_bytes` those of one side of a page. Past 2**32
    elements an unsigned index fails, too, so that every other time blocks lie past twice as much.
    """
    element = side_bytes // (page.block_size * page.num_kv_heads * page.head_size)
    boundary = {"near": 0, "past_2g_bytes": REACH, "past_2g_elements": REACH * element}[reach]
    times = number(choices, 1, 2) if reach == "past_2g_elements" else 1
    first = -(-boundary * times // stride)
    return -(-first // ALIGNED) * ALIGNED
