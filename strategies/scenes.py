"""Whole scenes for one op, from a target's domain: a row first, then what the row leaves open."""

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.placement import place
from kvfuzz.model.scene import VALUES, Scene
from kvfuzz.strategies.batches import occupancy, row_gap
from kvfuzz.strategies.choices import Choices, fill_seed, number
from kvfuzz.strategies.layers import drawn_layer, layer_name, layer_of_several, plan_of
from kvfuzz.strategies.rows import Space
from kvfuzz.strategies.scales import scale_pair

MOST_SPARE = 5
"""Rows and entries behind a batch, at most."""


def drawn_scene(choices: Choices, within: Space) -> Scene:
    """The scene that `choices` make; the first of them are its row."""
    row = within.drawn_row(choices)
    writes = within.op != "gather_cache"
    layer = drawn_layer(choices, row)
    page, element = layer.geometry, itemsize(layer.cache_dtype)
    index, count = layer_of_several(choices, row)
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
        layer=layer_name(index),
        plan=plan_of(layer, count, occupied.num_blocks, occupied.state_blocks),
        batch=occupied.batch,
        model_dtype=row["model_dtype"],
        k_scale=k_scale,
        v_scale=v_scale,
        values=row["values"] if row["values"] in VALUES else VALUES[0],
        row_gap=row_gap(choices, page.num_kv_heads, page.head_size) if gapped else 0,
        spare_rows=number(choices, 1, MOST_SPARE) if row["row_count"] == "more" else 0,
        spare_entries=number(choices, 1, MOST_SPARE) if row["metadata"] == "wider" else 0,
        fill_seed=fill_seed(choices),
    )
