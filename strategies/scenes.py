"""Whole scenes for one op, from a target's domain."""

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvfuzz.model.axes import Domain
from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.layout import Geometry
from kvfuzz.model.placement import place
from kvfuzz.model.plan import CACHE, AttentionLayer, Plan, StateLayer
from kvfuzz.model.scene import VALUES, Scene
from kvfuzz.strategies.batches import Occupancy, first_blocks, occupancies, row_gaps
from kvfuzz.strategies.formats import Format, formats
from kvfuzz.strategies.geometries import page_geometries
from kvfuzz.strategies.scales import scale_pairs

MAX_FILL_SEED = (1 << 32) - 1
LAYER, STATE_LAYER = "layer.0", "layer.1"


def scenes(op: str, domain: Domain) -> SearchStrategy[Scene]:
    """Scenes of `op` inside `domain`.

    Raises UsageError, when first drawn from, where the domain leaves nothing to draw.
    """
    drawn_formats = st.deferred(lambda: formats(domain))
    writes = op == "reshape_and_cache"

    @st.composite
    def draw_scene(draw: DrawFn) -> Scene:
        format = draw(drawn_formats)
        page = draw(page_geometries(domain, format))
        occupancy = draw(
            occupancies(
                page,
                _page_bytes(page, format),
                first_block=first_blocks(
                    _block_stride(page, format),
                    itemsize(format.cache_dtype),
                    domain.levels("reach"),
                ),
                hybrid=format.layout == "hybrid",
                padding=writes and "some" in domain.levels("padding"),
            )
        )
        k_scale, v_scale = draw(scale_pairs(domain, format))
        gap, values = 0, VALUES[0]
        if writes:
            wanted = [each for each in VALUES if each in domain.levels("values")]
            if wanted and DTYPES[format.cache_dtype].is_fp8:
                values = draw(st.sampled_from(wanted))
            if "gapped" in domain.levels("rows"):
                gap = draw(row_gaps(page.num_kv_heads, page.head_size))
        return Scene(
            op=op,
            layer=LAYER,
            plan=_plan(format, page, occupancy),
            batch=occupancy.batch,
            model_dtype=format.model_dtype,
            k_scale=k_scale,
            v_scale=v_scale,
            values=values,
            row_gap=gap,
            fill_seed=draw(st.integers(0, MAX_FILL_SEED)),
        )

    return draw_scene()


def _page_bytes(page: Geometry, format: Format) -> int:
    elements = 2 * page.block_size * page.num_kv_heads * page.head_size
    return elements * itemsize(format.cache_dtype)


def _block_stride(page: Geometry, format: Format) -> int:
    """Bytes between two blocks of one side."""
    layer = AttentionLayer(LAYER, CACHE, format.layout, format.order, page, format.cache_dtype)
    return place(layer).k.block


def _plan(format: Format, page: Geometry, occupancy: Occupancy) -> Plan:
    geometry = Geometry(occupancy.num_blocks, page.block_size, page.num_kv_heads, page.head_size)
    attention = AttentionLayer(
        LAYER, CACHE, format.layout, format.order, geometry, format.cache_dtype
    )
    if not occupancy.state_blocks:
        return Plan((attention,))
    return Plan((attention, StateLayer(STATE_LAYER, CACHE, occupancy.state_blocks)))
