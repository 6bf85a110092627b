"""What a scene of attention over K and V pages adds up to: cache, queries, metadata, the step."""

import itertools

import msgspec

from kvfuzz.model.cache_parts import cache_parts
from kvfuzz.model.case import Buffer, Step, TensorView
from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.fill import FP32_ONE, ByteFill, Fill, IntegerFill, word
from kvfuzz.model.layout import Field, Term
from kvfuzz.model.ops.attended import (
    MOST_V,
    Rows,
    cache_fill,
    ends_of,
    idle_rows,
    query_fill,
    seen_of,
)
from kvfuzz.model.ops.attention import PAGED, AttentionScene
from kvfuzz.model.ops.metadata import Metadata, stale, vector
from kvfuzz.model.parts import Parts
from kvfuzz.model.scales import SCALES, Scales, inline_scales, scales_of
from kvfuzz.model.steps import CACHES
from kvfuzz.model.views import SPELT

SINK_STEPS = 16
MARGIN = 7
"""By how many tokens at most the host's bounds of lengths are above them."""


def parts(scene: AttentionScene) -> Parts:
    """What a possible scene adds up to."""
    cache = cache_parts(scene.plan, scene.attention, scene.fill_seed)
    scales = _scales(scene, cache.inline)
    rows = [_rows_of(scene, number) for number in range(scene.sharers)]
    shared = (*_metadata(scene), *_scalings(scene))
    own = (*itertools.chain(*rows), *shared)
    k, v = (
        msgspec.structs.replace(field, fill=_cache_fill(scene, field, least))
        for field, least in ((cache.k, scene.k_scale), (cache.v, scene.v_scale))
    )
    handed = {name: name for name in (*CACHES, *SCALES, *(each.view.name for each in shared))}
    steps = [
        Step(
            scene.op,
            handed | names,
            handed | {"key_cache": "k", "value_cache": "v"} | names,
            _scalars(scene, number),
        )
        for number, (query, output) in enumerate(rows)
        for names in [{"query": query.view.name, "output": output.view.name}]
    ]
    return Parts(
        (
            cache.buffer,
            *(each.buffer for each in scales if each.buffer),
            *(each.buffer for each in own),
        ),
        (
            *cache.states,
            k,
            v,
            *(each.field for each in scales),
            *cache.others,
            *(each.field for each in own),
        ),
        (*cache.views, *(each.view for each in scales), *(each.view for each in own)),
        steps[0],
        tuple(steps[1:]),
        idle_rows(scene.batch, [output for _, output in rows]) if scene.op == PAGED else (),
    )


def _scalars(scene: AttentionScene, number: int) -> dict[str, int | str]:
    """What a step is told beside its tensors; one of several also which it is, and of how many."""
    lengths = [each.length for each in scene.batch.sequences]
    ends = [each.start + each.length for each in scene.batch.sequences]
    more = word(scene.fill_seed, "host", 0) % (MARGIN + 1) if scene.spare_entries else 0
    return {
        "scale_bits": scene.softmax_scale,
        "window": scene.window,
        "cap": scene.softcap,
        "num_rows": scene.num_rows,
        "max_query_len": max(lengths),
        "max_seq_len": max(ends) + more,
        "kv_cache_layout": SPELT[scene.attention.order],
        "cache_dtype": scene.attention.cache_dtype,
        **({"sharer": number, "sharers": scene.sharers} if scene.sharers > 1 else {}),
    }


def _scales(scene: AttentionScene, inline: tuple[Field, ...]) -> list[Scales]:
    layer, seed, least = scene.attention, scene.fill_seed, (scene.k_scale, scene.v_scale)
    if inline:
        return [
            inline_scales(at, layer, bits, seed) for at, bits in zip(inline, least, strict=True)
        ]
    return [scales_of(name, layer, bits, seed) for name, bits in zip(SCALES, least, strict=True)]


def _cache_fill(scene: AttentionScene, field: Field, scale: int) -> Fill:
    exact = (0, 1) if field.name == "k" else range(-MOST_V, MOST_V + 1)
    is_key = field.name == "k"
    return cache_fill(scene.fill_seed, field.dtype, scale, scene.values, exact, is_key=is_key)


def _rows_of(scene: AttentionScene, number: int) -> tuple[Metadata, Metadata]:
    """Query and output of the first layer that attends, or of another one of several."""
    geometry, seed = scene.attention.geometry, scene.fill_seed
    count = scene.num_rows + scene.spare_rows
    shape = (count, scene.num_query_heads)
    output_gap = 0 if scene.dense_output else scene.row_gap
    factor = geometry.head_size * DTYPES["fp32"].decode(scene.softmax_scale)
    scale = scene.q_scale if scene.query_quantised else FP32_ONE
    fill = query_fill(seed, scene.query_dtype, scene.values, factor, scale=scale)
    suffix = f"_{number}" if number else ""
    return (
        Rows(scene.query_dtype, *shape, scene.row_gap).tensor(
            f"query{suffix}", geometry.head_size, fill
        ),
        Rows(scene.model_dtype, *shape, output_gap).tensor(
            f"output{suffix}", geometry.value_size, ByteFill(seed)
        ),
    )


def _metadata(scene: AttentionScene) -> tuple[Metadata, ...]:
    seed, spare = scene.fill_seed, scene.spare_entries
    seen = seen_of(scene.batch, scene.attention.geometry.num_blocks, seed, spare)
    if scene.op == PAGED:
        return seen
    ends = ends_of(scene.batch)
    behind = stale(seed, "query_start_loc behind", spare, max(ends) + 1)
    return (*seen, vector("query_start_loc", "i32", (*ends, *behind), len(ends)))


def _scalings(scene: AttentionScene) -> tuple[Metadata, ...]:
    """The scale of queries; sinks, of the size of scores, and ALiBi's slopes, which halve from head
    to head."""
    heads, fp32 = range(scene.num_query_heads), DTYPES["fp32"]
    drawn = [word(scene.fill_seed, "sinks", head) % SINK_STEPS for head in heads]
    numbers = {
        "sinks": [each / 2 - SINK_STEPS / 4 for each in drawn] if scene.sinks else [],
        "alibi_slopes": [2.0 ** -(1 + head % 8) for head in heads] if scene.alibi else [],
    }
    codes = {name: tuple(map(fp32.encode, each)) for name, each in numbers.items()}
    codes["q_scale"] = (scene.q_scale,) if scene.query_quantised else ()
    return tuple(_vector(name, each) for name, each in codes.items() if each)


def _vector(name: str, bits: tuple[int, ...]) -> Metadata:
    size = itemsize("fp32")
    return Metadata(
        Buffer(name, size * len(bits), IntegerFill("fp32", bits)),
        Field(name, name, "fp32", 0, (Term("head", size),), {"head": len(bits)}),
        TensorView(name, name, "fp32", (len(bits),), (size,)),
    )
