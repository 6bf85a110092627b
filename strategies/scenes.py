"""Whole scenes for one op, from a target's domain: a row first, then what the row leaves open."""

import msgspec

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layout import Geometry
from kvfuzz.model.placement import place
from kvfuzz.model.plan import CACHE, AttentionLayer, Plan, StateLayer
from kvfuzz.model.scene import VALUES, Scene
from kvfuzz.model.vocabulary import SCALE_BYTES, x_of
from kvfuzz.strategies.batches import Occupancy, occupancy, row_gap
from kvfuzz.strategies.choices import Choices, chance, number, pick
from kvfuzz.strategies.rows import NESTED, Row, Space
from kvfuzz.strategies.scales import scale_pair

MAX_FILL_SEED = (1 << 32) - 1
MOST_LAYERS = 3
MOST_SPARE = 5
"""Rows and entries behind a batch, at most."""
SEVERAL = 6
"""One in so many caches whose layers lie apart has several of them."""


def drawn_scene(choices: Choices, within: Space) -> Scene:
    """The scene that `choices` make; the first of them are its row."""
    row = within.drawn_row(choices)
    writes = within.op != "gather_cache"
    layer = _layer(choices, row)
    page, element = layer.geometry, itemsize(layer.cache_dtype)
    index, count = _layers(choices, row)
    occupied = occupancy(
        choices,
        row,
        page,
        layers=count,
        side_bytes=page.block_size * page.num_kv_heads * page.head_size * element,
        block_stride=place(layer, count=count).k.block,
        writes=writes,
    )
    k_scale, v_scale = scale_pair(choices, row)
    gapped = row["rows"] == "gapped"
    return Scene(
        op=within.op,
        layer=_name(index),
        plan=_plan(layer, count, occupied),
        batch=occupied.batch,
        model_dtype=row["model_dtype"],
        k_scale=k_scale,
        v_scale=v_scale,
        values=row["values"] if row["values"] in VALUES else VALUES[0],
        row_gap=row_gap(choices, page.num_kv_heads, page.head_size) if gapped else 0,
        spare_rows=number(choices, 1, MOST_SPARE) if row["row_count"] == "more" else 0,
        spare_entries=number(choices, 1, MOST_SPARE) if row["metadata"] == "wider" else 0,
        fill_seed=choices.integer(0, MAX_FILL_SEED),
    )


def _layer(choices: Choices, row: Row) -> AttentionLayer:
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


def _layers(choices: Choices, row: Row) -> tuple[int, int]:
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


def _name(index: int) -> str:
    return f"layer.{index}"


def _plan(layer: AttentionLayer, count: int, occupied: Occupancy) -> Plan:
    geometry = msgspec.structs.replace(layer.geometry, num_blocks=occupied.num_blocks)
    attention = tuple(
        msgspec.structs.replace(layer, name=_name(index), geometry=geometry)
        for index in range(count)
    )
    if not occupied.state_blocks:
        return Plan(attention)
    return Plan((*attention, StateLayer(_name(count), CACHE, occupied.state_blocks)))
