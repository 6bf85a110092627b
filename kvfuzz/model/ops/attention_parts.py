"""What a scene of attention adds up to: a cache whose numbers attention can be computed of exactly
enough, queries, metadata, and the step.

Of scores and weights a reference has a bound, and no bits. The bound is small where numbers are of
a similar size, so that K, V and queries are drawn from a few binades; what else the cache holds is
hash bytes as ever. With `exact` values a query is zeros and a large power of two, K zeros and ones,
and V small integers: every score is a multiple of that power, so that the largest ones have the
weight one and all others none, and every sum is exact.
"""

import math

import msgspec

from kvfuzz.model.batch_metadata import gathered
from kvfuzz.model.cache_parts import cache_parts
from kvfuzz.model.case import Buffer, Step, TensorView
from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.fill import ByteFill, ChoiceFill, Fill, FloatFill, IntegerFill, word
from kvfuzz.model.layout import Field, Term
from kvfuzz.model.ops import metadata
from kvfuzz.model.ops.activations import Gaps, rows_of_heads
from kvfuzz.model.ops.attention import PAGED, AttentionScene
from kvfuzz.model.ops.metadata import Metadata, stale
from kvfuzz.model.parts import Parts
from kvfuzz.model.scales import SCALES, Scales, inline_scales, scales_of
from kvfuzz.model.steps import CACHES
from kvfuzz.model.views import SPELT

QUERY_BINADES, CACHE_BINADES = (-3, 0), (-3, 0)
"""The binades of queries, and of what elements of a cache stand for: scores spread over a few
units, so that some tokens matter more than others and none alone."""
HOT = 12
"""The power of two that exact queries have: large enough that one step of a score is exp(-100)."""
MOST_V = 8
"""The largest integer of an exact V: every format here has all up to it."""
NEAR_ONE = (0.75, 1.0, 1.25, 1.5)
LOW = 20.0
"""About what a low score is below zero."""
SINK_STEPS = 16
MARGIN = 7
"""By how many tokens at most the host's bounds of lengths are above them."""


def parts(scene: AttentionScene) -> Parts:
    """What a possible scene adds up to."""
    cache = cache_parts(scene.plan, scene.attention, scene.fill_seed)
    scales = _scales(scene, cache.inline)
    own = (_query(scene), _output(scene), *_metadata(scene), *_per_head(scene))
    bound = {each.view.name: each.view.name for each in own}
    k, v = (
        msgspec.structs.replace(field, fill=_cache_fill(scene, field, least))
        for field, least in ((cache.k, scene.k_scale), (cache.v, scene.v_scale))
    )
    same = {name: name for name in (*CACHES, *SCALES)}
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
        Step(
            scene.op,
            same | bound,
            {"key_cache": "k", "value_cache": "v"} | {name: name for name in SCALES} | bound,
            _scalars(scene),
        ),
    )


def _scalars(scene: AttentionScene) -> dict[str, int | str]:
    lengths = [each.length for each in scene.batch.sequences]
    ends = [each.start + each.length for each in scene.batch.sequences]
    more = word(scene.fill_seed, "host", 0) % (MARGIN + 1) if scene.spare_entries else 0
    return {
        "scale_bits": scene.softmax_scale,
        "window": scene.window,
        "cap": scene.softcap,
        "num_rows": scene.batch.num_tokens,
        "max_query_len": max(lengths),
        "max_seq_len": max(ends) + more,
        "kv_cache_layout": SPELT[scene.attention.order],
        "cache_dtype": scene.attention.cache_dtype,
    }


def _scales(scene: AttentionScene, inline: tuple[Field, ...]) -> list[Scales]:
    layer, seed, least = scene.attention, scene.fill_seed, (scene.k_scale, scene.v_scale)
    if inline:
        return [
            inline_scales(at, layer, bits, seed) for at, bits in zip(inline, least, strict=True)
        ]
    return [scales_of(name, layer, bits, seed) for name, bits in zip(SCALES, least, strict=True)]


def _cache_fill(scene: AttentionScene, field: Field, scale: int) -> Fill:
    """The elements of K or V, so that code * scale is of the size that it should be."""
    dtype, of_one = DTYPES[field.dtype], DTYPES["fp32"].decode(scale)
    if not dtype.is_quantised:
        of_one = 1.0
    if scene.values == "exact":
        numbers = (0.0, 1.0) if field.name == "k" else range(-MOST_V, MOST_V + 1)
        return _choices(scene, dtype.name, [each / of_one for each in numbers])
    if scene.values == "low" and field.name == "k":
        return _choices(scene, dtype.name, [-each / of_one for each in NEAR_ONE])
    if dtype.is_integer:
        return _choices(scene, dtype.name, list(range(-MOST_V, MOST_V + 1)))
    low, high = (each - math.frexp(of_one)[1] + 1 + dtype.bias for each in CACHE_BINADES)
    top = (1 << dtype.exponent_bits) - 2
    return FloatFill(scene.fill_seed, dtype.name, min(max(low, 1), top), min(max(high, 1), top))


def _choices(scene: AttentionScene, dtype: str, numbers: list[float]) -> ChoiceFill:
    codes = tuple(DTYPES[dtype].encode(number) for number in numbers)
    return ChoiceFill(scene.fill_seed, dtype, codes)


def _query(scene: AttentionScene) -> Metadata:
    dtype = DTYPES[scene.model_dtype]
    fill: Fill
    if scene.values == "exact":
        fill = _choices(scene, dtype.name, [0.0, 0.0, 0.0, 2.0**HOT])
    elif scene.values == "low":
        size = scene.attention.geometry.head_size
        one = LOW / (size * DTYPES["fp32"].decode(scene.softmax_scale))
        fill = _choices(scene, dtype.name, [one * each for each in NEAR_ONE])
    else:
        low, high = (each + dtype.bias for each in QUERY_BINADES)
        fill = FloatFill(scene.fill_seed, dtype.name, low, high)
    return _rows(scene, "query", scene.attention.geometry.head_size, fill)


def _output(scene: AttentionScene) -> Metadata:
    fill = ByteFill(scene.fill_seed)
    return _rows(scene, "output", scene.attention.geometry.value_size, fill)


def _rows(scene: AttentionScene, name: str, size: int, fill: Fill) -> Metadata:
    """Rows `[T, Hq, size]` of the model's dtype, with a gap behind each."""
    count = scene.batch.num_tokens + scene.spare_rows
    shape = (count, scene.num_query_heads, size)
    return rows_of_heads(name, scene.model_dtype, shape, fill, Gaps(row=scene.row_gap))


def _metadata(scene: AttentionScene) -> tuple[Metadata, ...]:
    seed, spare, blocks = scene.fill_seed, scene.spare_entries, scene.attention.geometry.num_blocks
    told, width = gathered(scene.batch, blocks, seed), scene.batch.table_width
    ids = told.block_table
    rows = [ids[at : at + width] for at in range(0, len(ids), width)]
    old = stale(seed, "block_table behind", spare * width, blocks)
    behind = [old[at : at + width] for at in range(0, len(old), width)]
    lens = tuple(each.start + each.length for each in scene.batch.sequences)
    vectors = {"seq_lens": lens, "query_start_loc": told.cu_seqlens_kv}
    if scene.op == PAGED:
        del vectors["query_start_loc"]
    return (
        metadata.table("block_table", "i32", (*rows, *behind), len(rows)),
        *(
            metadata.vector(
                name,
                "i32",
                (*numbers, *stale(seed, f"{name} behind", spare, max(numbers) + 1)),
                len(numbers),
            )
            for name, numbers in vectors.items()
        ),
    )


def _per_head(scene: AttentionScene) -> tuple[Metadata, ...]:
    """Sinks, of the size of scores, and ALiBi's slopes, which halve from head to head."""
    heads, fp32 = range(scene.num_query_heads), DTYPES["fp32"]
    drawn = [word(scene.fill_seed, "sinks", head) % SINK_STEPS for head in heads]
    numbers = {
        "sinks": [each / 2 - SINK_STEPS / 4 for each in drawn] if scene.sinks else [],
        "alibi_slopes": [2.0 ** -(1 + head % 8) for head in heads] if scene.alibi else [],
    }
    return tuple(
        _vector(name, tuple(map(fp32.encode, each))) for name, each in numbers.items() if each
    )


def _vector(name: str, bits: tuple[int, ...]) -> Metadata:
    size = itemsize("fp32")
    return Metadata(
        Buffer(name, size * len(bits), IntegerFill("fp32", bits)),
        Field(name, name, "fp32", 0, (Term("head", size),), {"head": len(bits)}),
        TensorView(name, name, "fp32", (len(bits),), (size,)),
    )
