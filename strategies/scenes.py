"""Whole scenes for one op, from a target's domain."""

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvfuzz.model.axes import Domain
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.layout import Geometry
from kvfuzz.model.scene import VALUES, Scene
from kvfuzz.strategies.batches import batches, padding_rows, row_gaps
from kvfuzz.strategies.formats import formats
from kvfuzz.strategies.geometries import page_geometries
from kvfuzz.strategies.scales import scale_pairs

MAX_FILL_SEED = (1 << 32) - 1


def scenes(op: str, domain: Domain) -> SearchStrategy[Scene]:
    """Scenes of `op` inside `domain`.

    Raises UsageError, when first drawn from, where the domain leaves nothing to draw.
    """
    drawn_formats = st.deferred(lambda: formats(domain))

    @st.composite
    def draw_scene(draw: DrawFn) -> Scene:
        format = draw(drawn_formats)
        g = draw(page_geometries(domain, format))
        batch = draw(batches(g.block_size, hybrid=format.layout == "hybrid"))
        k_scale, v_scale = draw(scale_pairs(domain, format))
        padding: tuple[int, ...] = ()
        gap, values = 0, VALUES[0]
        if op == "reshape_and_cache":
            num_tokens = sum(sequence.length for sequence in batch.sequences)
            if "some" in domain.levels("padding"):
                padding = draw(padding_rows(num_tokens))
            if DTYPES[format.cache_dtype].is_fp8:
                wanted = [each for each in VALUES if each in domain.levels("values")]
                values = draw(st.sampled_from(wanted)) if wanted else values
            if "gapped" in domain.levels("rows"):
                gap = draw(row_gaps(g.num_kv_heads, g.head_size))
        return Scene(
            op=op,
            layout=format.layout,
            order=format.order,
            geometry=Geometry(batch.num_blocks, g.block_size, g.num_kv_heads, g.head_size),
            cache_dtype=format.cache_dtype,
            model_dtype=format.model_dtype,
            k_scale=k_scale,
            v_scale=v_scale,
            sequences=batch.sequences,
            padding=padding,
            values=values,
            row_gap=gap,
            table_width=batch.table_width,
            state_blocks=batch.state_blocks,
            fill_seed=draw(st.integers(0, MAX_FILL_SEED)),
        )

    return draw_scene()
