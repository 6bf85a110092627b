"""Whole scenes for one op, from a target's domain: a row first, then what the row leaves open."""

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvfuzz.model.axes import Domain
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layout import Geometry, place
from kvfuzz.model.plan import CACHE, AttentionLayer, Plan, StateLayer
from kvfuzz.model.scene import VALUES, Scene
from kvfuzz.strategies.batches import Occupancy, occupancy, row_gap
from kvfuzz.strategies.choices import Choices, FromHypothesis
from kvfuzz.strategies.rows import Row, Space, space
from kvfuzz.strategies.scales import scale_pair

MAX_FILL_SEED = (1 << 32) - 1
LAYER, STATE_LAYER = "layer.0", "layer.1"


def scenes(op: str, domain: Domain) -> SearchStrategy[Scene]:
    """Scenes of `op` inside `domain`.

    Raises UsageError, when first drawn from, where the domain leaves nothing to draw.
    """

    @st.composite
    def draw_scene(draw: DrawFn) -> Scene:
        return drawn_scene(FromHypothesis(draw), space(op, domain))

    return draw_scene()


def drawn_scene(choices: Choices, within: Space) -> Scene:
    """The scene that `choices` make; the first of them are its row."""
    row = within.drawn_row(choices)
    writes = within.op == "reshape_and_cache"
    page = Geometry(1, int(row["block_size"]), int(row["num_kv_heads"]), int(row["head_size"]))
    element = itemsize(row["cache_dtype"])
    occupied = occupancy(
        choices,
        row,
        page,
        side_bytes=page.block_size * page.num_kv_heads * page.head_size * element,
        block_stride=place(row["layout"], row["order"], page, element).block_stride,
        writes=writes,
    )
    k_scale, v_scale = scale_pair(choices, row)
    gapped = row["rows"] == "gapped"
    return Scene(
        op=within.op,
        layer=LAYER,
        plan=_plan(row, page, occupied),
        batch=occupied.batch,
        model_dtype=row["model_dtype"],
        k_scale=k_scale,
        v_scale=v_scale,
        values=row["values"] if row["values"] in VALUES else VALUES[0],
        row_gap=row_gap(choices, page.num_kv_heads, page.head_size) if gapped else 0,
        fill_seed=choices.integer(0, MAX_FILL_SEED),
    )


def _plan(row: Row, page: Geometry, occupied: Occupancy) -> Plan:
    geometry = Geometry(occupied.num_blocks, page.block_size, page.num_kv_heads, page.head_size)
    attention = AttentionLayer(
        LAYER, CACHE, row["layout"], row["order"], geometry, row["cache_dtype"]
    )
    if not occupied.state_blocks:
        return Plan((attention,))
    return Plan((attention, StateLayer(STATE_LAYER, CACHE, occupied.state_blocks)))
