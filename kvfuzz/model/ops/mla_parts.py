"""What a scene of decode over MLA's latent adds up to: pages, queries, results, metadata, the step.

The parts of a page are bound beside what a target is handed, as `cached_latent` and `cached_rope`.
With `exact` values a row is zeros and ones and a query has about `HOT_ELEMENTS` large elements, so
that of a few hundred tokens several have the largest score.
"""

import msgspec

from kvfuzz.model.case import Buffer, Step, TensorView
from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.fill import ByteFill, Fill
from kvfuzz.model.layout import Field, Term
from kvfuzz.model.ops.attended import Rows, cache_fill, idle_rows, query_fill, seen_of
from kvfuzz.model.ops.latent import page_fields
from kvfuzz.model.ops.latent_parts import (
    cache_buffer,
    cache_view,
    given_scale,
    kv_cache_dtype,
    other_layers,
)
from kvfuzz.model.ops.metadata import Metadata
from kvfuzz.model.ops.mla import MLA_OP, MlaScene
from kvfuzz.model.parts import Parts
from kvfuzz.model.plan import CACHE

HOT_ELEMENTS = 4
"""Elements of an exact query that are not zero, about."""
ZEROS_AND_ONES = (0.0, 1.0)


def parts(scene: MlaScene) -> Parts:
    """What a possible scene adds up to."""
    pages = scene.pages
    own = tuple(
        msgspec.structs.replace(field, fill=_fill(scene, field))
        for field in page_fields(pages, scene.layer)
    )
    longest = max(each.start + each.length for each in scene.batch.sequences)
    query, *results = _rows(scene)
    tensors = (
        query,
        *results,
        *seen_of(scene.batch, scene.num_blocks, scene.fill_seed, scene.spare_entries),
        given_scale("k_scale", scene.scale),
    )
    bound = {each.view.name: each.view.name for each in tensors}
    return Parts(
        (cache_buffer(pages), *(each.buffer for each in tensors)),
        (*own, *(each.field for each in tensors), *other_layers(pages)),
        (cache_view(pages), *(each.view for each in tensors)),
        Step(
            MLA_OP,
            {CACHE: CACHE} | bound,
            {field.name: field.name for field in own} | bound,
            {
                "scale_bits": scene.softmax_scale,
                "cap": scene.softcap,
                "max_seq_len": longest + scene.margin,
                "cache_dtype": scene.cache_dtype,
                "kv_cache_dtype": kv_cache_dtype(pages),
            },
        ),
        unused=idle_rows(scene.batch, results),
    )


def _fill(scene: MlaScene, field: Field) -> Fill:
    seed, values = scene.fill_seed, scene.values
    return cache_fill(seed, field.dtype, scene.scale, values, ZEROS_AND_ONES, is_key=True)


def _rows(scene: MlaScene) -> tuple[Metadata, ...]:
    """query, output and lse."""
    seed, width = scene.fill_seed, scene.latent_size + scene.rope_size
    count, heads = len(scene.batch.sequences) + scene.spare_rows, scene.num_query_heads
    rows = Rows(scene.model_dtype, count, heads, scene.row_gap)
    results = rows._replace(gap=0) if scene.dense_output else rows
    zeros = max(1, width // HOT_ELEMENTS - 1)
    asked = scene.model_dtype, scene.values, width * DTYPES["fp32"].decode(scene.softmax_scale)
    return (
        rows.tensor("query", width, query_fill(seed, *asked, zeros)),
        results.tensor("output", scene.latent_size, ByteFill(seed)),
        _lse(scene.lse_dtype, count, heads, seed),
    )


def _lse(dtype: str, count: int, heads: int, seed: int) -> Metadata:
    element = itemsize(dtype)
    strides = (heads * element, element)
    terms = (Term("token", strides[0]), Term("head", element))
    return Metadata(
        Buffer("lse", count * strides[0], ByteFill(seed)),
        Field("lse", "lse", dtype, 0, terms, {"token": count, "head": heads}),
        TensorView("lse", "lse", dtype, (count, heads), strides),
    )
