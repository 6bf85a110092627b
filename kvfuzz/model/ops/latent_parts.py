"""What a scene of one row a token adds up to: buffers, fields, views, and the step.

A parameter that a target is handed has the name of its view. The parts of a page are bound beside
it, as `cached_latent`, `cached_rope`, `cached_k` and `cached_scale`: those are what oracles read.
"""

from kvfuzz.model.batch_metadata import gathered, slot_mapping
from kvfuzz.model.case import Buffer, Step, TensorView
from kvfuzz.model.dtypes import engine_spelling, itemsize
from kvfuzz.model.fill import ByteFill, Fill, GroupFill, IntegerFill
from kvfuzz.model.layout import Axis, Field, Term
from kvfuzz.model.ops.latent import LatentScene, page_fields
from kvfuzz.model.ops.latent_axes import (
    COMPUTED,
    CONCAT,
    GATHER_INDEX,
    GATHER_MLA,
    INDEX,
    INDEXER,
    INSERT_V4,
    WRITES,
)
from kvfuzz.model.ops.metadata import Metadata, stale, table, vector
from kvfuzz.model.parts import Parts, Setting, activation_fill
from kvfuzz.model.plan import CACHE
from kvfuzz.model.vocabulary import LARGEST

SCALE_WIDTH = 4
"""Bytes of a scale."""
TABLE_GAP = 3
"""Columns behind those of a block table that are handed over, where rows have gaps."""


def parts(scene: LatentScene) -> Parts:
    """What a possible scene adds up to."""
    own, others = page_fields(scene, scene.layer), other_layers(scene)
    tensors = (*_rows_of(scene), *_metadata(scene))
    if scene.op not in COMPUTED:
        tensors = (*tensors, given_scale("scale", scene.scale))
    bound = {each.view.name: each.view.name for each in tensors}
    return Parts(
        (cache_buffer(scene), *(each.buffer for each in tensors)),
        (*own, *(each.field for each in tensors), *others),
        (cache_view(scene), *(each.view for each in tensors)),
        Step(
            scene.op,
            {CACHE: CACHE} | bound,
            {field.name: field.name for field in own} | bound,
            _scalars(scene),
        ),
    )


def cache_buffer(scene: LatentScene) -> Buffer:
    """The pages of all layers."""
    return Buffer(CACHE, scene.num_blocks * scene.block_stride, ByteFill(scene.fill_seed))


def other_layers(scene: LatentScene) -> list[Field]:
    """The pages of the layers that the op does not work on."""
    layers = (layer for layer in range(scene.layers) if layer != scene.layer)
    return [field for layer in layers for field in page_fields(scene, layer)]


def _rows_of(scene: LatentScene) -> tuple[Metadata, ...]:
    """What a write reads beside its metadata, or what a gather makes."""
    if scene.op == CONCAT:
        return _mla_rows(scene)
    if scene.op == GATHER_MLA:
        return _out(scene)
    return _key_out(scene) if scene.op == GATHER_INDEX else _key(scene)


def cache_view(scene: LatentScene) -> TensorView:
    """`[num_blocks, block_size, row]`: elements where a page is made of those, else bytes; of
    DeepSeek V4, whose tokens lie in two places, `[num_blocks, bytes]`."""
    dtype = scene.cache_dtype if scene.form == "mla" else "u8"
    row, offset = scene.token_bytes, scene.layer * scene.page_pitch
    if scene.op == INSERT_V4:
        flat = (scene.num_blocks, scene.block_size * row)
        return TensorView(CACHE, CACHE, dtype, flat, (scene.block_stride, 1), offset)
    shape = (scene.num_blocks, scene.block_size, row // itemsize(dtype))
    strides = (scene.block_stride, row, itemsize(dtype))
    return TensorView(CACHE, CACHE, dtype, shape, strides, offset)


def _scalars(scene: LatentScene) -> dict[str, int | str]:
    scalars: dict[str, int | str] = {"cache_dtype": scene.cache_dtype}
    if scene.op == INSERT_V4:
        return scalars | {"block_size": scene.block_size, "scale_fmt": "ue8m0"}
    if scene.op in INDEXER:
        scalars["block_tile_size"] = scene.tile
    else:
        scalars["kv_cache_dtype"] = kv_cache_dtype(scene)
    if scene.op == INDEX:
        scalars["quant_block_size"] = scene.group
        scalars["scale_fmt"] = "ue8m0" if scene.ue8m0 else ""
    return scalars


def kv_cache_dtype(scene: LatentScene) -> str:
    """vLLM's word for what a page holds."""
    if scene.form != "mla":
        return scene.form
    return engine_spelling(scene.cache_dtype)


def _metadata(scene: LatentScene) -> tuple[Metadata, ...]:
    batch = scene.batch
    if scene.op in WRITES:
        slots = slot_mapping(batch, scene.block_size)
        return (vector("slot_mapping", "i64", slots, len(slots)),)
    told, width = gathered(batch, scene.num_blocks, scene.fill_seed), batch.table_width
    ids = told.block_table
    gap = TABLE_GAP if scene.row_gap else 0
    behind = stale(scene.fill_seed, "block_table behind", gap, scene.num_blocks)
    rows = tuple((*ids[at : at + width], *behind) for at in range(0, len(ids), width))
    vectors = [
        vector(name, "i32", getattr(told, name), len(getattr(told, name)))
        for name in ("seq_starts", "cu_seqlens_kv", "token_to_batch")
        if name != "seq_starts" or scene.op == GATHER_MLA
    ]
    return (table("block_table", "i32", rows, len(rows), width), *vectors)


def given_scale(name: str, bits: int) -> Metadata:
    """The one scale of a page that has one for all; others ignore it."""
    return Metadata(
        Buffer(name, SCALE_WIDTH, IntegerFill("fp32", (bits,))),
        Field(name, name, "fp32", 0, (), {}),
        TensorView(name, name, "fp32", (1,), (SCALE_WIDTH,)),
    )


def _rows(name: str, dtype: str, shape: tuple[int, int], gap: int, fill: Fill) -> Metadata:
    """Rows `[T, width]` that are `gap` elements apart."""
    (count, width), element = shape, itemsize(dtype)
    row = (width + gap) * element
    extents: dict[Axis, int] = {"token": count, "dim": width}
    terms = (Term("token", row), Term("dim", element))
    return Metadata(
        Buffer(name, count * row, fill),
        Field(name, name, dtype, 0, terms, extents),
        TensorView(name, name, dtype, shape, (row, element)),
    )


def _mla_rows(scene: LatentScene) -> tuple[Metadata, ...]:
    """kv_c and k_pe, each a slice of a wider projection where rows have gaps."""
    count, gap, dtype = scene.batch.num_rows, scene.row_gap, scene.model_dtype
    plain = ByteFill(scene.fill_seed)
    fill = _group_fill(scene) if scene.group else _plain_fill(scene)
    return (
        _rows("kv_c", dtype, (count, scene.latent_size), gap, fill),
        _rows("k_pe", dtype, (count, scene.rope_size), gap, plain if scene.group else fill),
    )


def _key(scene: LatentScene) -> tuple[Metadata, ...]:
    shape = (scene.batch.num_rows, scene.latent_size + scene.rope_size)
    return (_rows("k", scene.model_dtype, shape, scene.row_gap, _group_fill(scene)),)


def _out(scene: LatentScene) -> tuple[Metadata, ...]:
    shape = (scene.batch.num_tokens, scene.latent_size + scene.rope_size)
    return (_rows("out", scene.model_dtype, shape, scene.row_gap, ByteFill(scene.fill_seed)),)


def _key_out(scene: LatentScene) -> tuple[Metadata, ...]:
    count, fill = scene.batch.num_tokens, ByteFill(scene.fill_seed)
    terms: tuple[Term, ...] = (Term("token", SCALE_WIDTH),)
    scales = Metadata(
        Buffer("k_scale", count * SCALE_WIDTH, fill),
        Field("k_scale", "k_scale", "fp32", 0, terms, {"token": count}),
        TensorView("k_scale", "k_scale", "fp32", (count,), (SCALE_WIDTH,)),
    )
    shape = (count, scene.latent_size)
    return (_rows("k", scene.cache_dtype, shape, scene.row_gap, fill), scales)


def _plain_fill(scene: LatentScene) -> Fill:
    cache, model = scene.cache_dtype, scene.model_dtype
    setting = Setting(scene.geometry, cache, model, "", scene.fill_seed)
    return activation_fill(setting, scene.scale, scene.values)


def _group_fill(scene: LatentScene) -> Fill:
    return GroupFill(
        scene.fill_seed,
        scene.model_dtype,
        scene.cache_dtype,
        scene.group,
        LARGEST[scene.cache_dtype],
        scene.values == "ties",
    )
