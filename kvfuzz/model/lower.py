"""Lower a scene to a case: buffers, fields, views and one step.

A write case stores a batch of new tokens into the cache; a gather case copies runs of cached
tokens into a dense workspace. Both fill the cache with hash bytes first, so that every byte that
is not named must survive. `with_round_trip` appends the inverse op to a lowered case.
"""

import math

from kvfuzz.model.case import Buffer, Case, Step, TensorView
from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.fill import ByteFill, Fill, FloatFill, IntegerFill, TieFill, word
from kvfuzz.model.layout import Axis, Field, Geometry, Term, cache_fields
from kvfuzz.model.plan import StateLayer
from kvfuzz.model.scene import Scene, check
from kvfuzz.model.steps import PAD_SLOT_ID

Parts = tuple[list[Buffer], list[Field], list[TensorView], Step]
"""What an op adds to the cache: its own buffers, fields and views, and the step."""


def lower(scene: Scene) -> Case:
    """The case of `scene`. Raises UsageError where the scene is impossible."""
    check(scene)
    layer = scene.attention
    k, v = cache_fields(
        layer.layout,
        layer.order,
        layer.geometry,
        layer.cache_dtype,
        buffer=layer.allocation,
        layer=layer.name,
    )
    fields = [k, v]
    nbytes = max(k.last_byte(), v.last_byte()) + 1
    states = scene.plan.states(layer.allocation)
    if states:
        page = nbytes // layer.geometry.num_blocks
        # First, so that a byte of their blocks is theirs: K and V are defined over all blocks.
        fields = [*(_state(each, scene, page) for each in states), k, v]
    cache = Buffer(layer.allocation, nbytes, ByteFill(scene.fill_seed))
    views = [
        _cache_view("key_cache", k, layer.geometry, layer.order),
        _cache_view("value_cache", v, layer.geometry, layer.order),
    ]
    lowering = _write if scene.op == "reshape_and_cache" else _gather
    buffers, more_fields, tensors, step = lowering(scene)
    return Case(
        buffers=(cache, *_scales(scene), *buffers),
        fields=(*fields, *more_fields),
        tensors=(*views, *_scale_views(), *tensors),
        steps=(step,),
        scene=scene,
    )


def slots(scene: Scene) -> tuple[int, ...]:
    """The slot of each touched token: block_id * block_size + offset, sequences in order."""
    n = scene.attention.geometry.block_size
    return tuple(
        sequence.block_ids[p // n] * n + p % n
        for sequence in scene.batch.sequences
        for p in range(sequence.start, sequence.start + sequence.length)
    )


def _state(layer: StateLayer, scene: Scene, page: int) -> Field:
    terms = (Term("block", page), Term("dim", 1))
    extents: dict[Axis, int] = {"block": scene.attention.geometry.num_blocks, "dim": page}
    return Field("state", layer.allocation, "u8", 0, terms, extents, layer.name, layer.blocks)


def _cache_view(name: str, field: Field, g: Geometry, order: str) -> TensorView:
    """The `[num_blocks, block_size, num_kv_heads, head_size]` view that engines pass.

    A SHUFFLE cache is passed under the same shape and only reinterpreted inside a block, so its
    inner strides are those of a dense NHD page (vLLM's callers, `cache-surface` 3.2).
    """
    element = itemsize(field.dtype)
    stride = {term.axis: term.stride for term in field.terms}
    if order == "shuffle":
        stride |= {"dim": element, "head": g.head_size * element}
        stride["token"] = g.num_kv_heads * g.head_size * element
    return TensorView(
        name,
        field.buffer,
        field.dtype,
        (g.num_blocks, g.block_size, g.num_kv_heads, g.head_size),
        (stride["block"], stride["token"], stride["head"], stride["dim"]),
        field.base,
    )


def _integers(name: str, values: tuple[int, ...], dtype: str) -> Buffer:
    return Buffer(name, len(values) * itemsize(dtype), IntegerFill(dtype, values))


def _vector(name: str, length: int, dtype: str) -> TensorView:
    return TensorView(name, name, dtype, (length,), (itemsize(dtype),))


def _scales(scene: Scene) -> tuple[Buffer, ...]:
    return (
        _integers("k_scale", (scene.k_scale,), "fp32"),
        _integers("v_scale", (scene.v_scale,), "fp32"),
    )


def _scale_views() -> tuple[TensorView, ...]:
    return (_vector("k_scale", 1, "fp32"), _vector("v_scale", 1, "fp32"))


def _rows(
    name: str, scene: Scene, num_rows: int, gap: int, fill: Fill
) -> tuple[Buffer, Field, TensorView]:
    """An activation `[num_rows, num_kv_heads, head_size]` whose rows are `gap` elements apart."""
    g, dtype = scene.attention.geometry, scene.model_dtype
    element = itemsize(dtype)
    row = (g.num_kv_heads * g.head_size + gap) * element
    strides = (row, g.head_size * element, element)
    field = Field(
        name,
        name,
        dtype,
        0,
        (Term("token", strides[0]), Term("head", strides[1]), Term("dim", strides[2])),
        {"token": max(num_rows, 1), "head": g.num_kv_heads, "dim": g.head_size},
    )
    view = TensorView(name, name, dtype, (num_rows, g.num_kv_heads, g.head_size), strides)
    return Buffer(name, max(num_rows, 1) * row, fill), field, view


def activation_fill(scene: Scene, scale_bits: int) -> Fill:
    """Key or value elements of the model's dtype, to be stored as x / scale.

    A plain copy gets hash bytes, NaN payloads included. Before a conversion the magnitudes stay
    within the cache dtype's range (saturation is a property of its own): spread down through its
    subnormals to zero, or next to its rounding ties.
    """
    seed, model, cache = (
        scene.fill_seed,
        DTYPES[scene.model_dtype],
        DTYPES[scene.attention.cache_dtype],
    )
    if model.name == cache.name:
        return ByteFill(seed)
    if scene.values == "ties":
        return TieFill(seed, model.name, cache.name, scale_bits)
    scale = DTYPES["fp32"].decode(scale_bits)
    top = math.frexp(cache.max_finite * scale)[1] - 1  # 2**top <= max_finite * scale
    smallest = math.frexp(scale)[1] - cache.bias - cache.mantissa_bits  # the least subnormal's
    high = max(0, min(top - 1 + model.bias, (1 << model.exponent_bits) - 2))
    return FloatFill(seed, model.name, max(0, min(high, smallest - 3 + model.bias)), high)


def _write(scene: Scene) -> Parts:
    num_rows = scene.batch.num_rows
    remaining = iter(slots(scene))
    padded = set(scene.batch.padding)
    mapping = tuple(PAD_SLOT_ID if row in padded else next(remaining) for row in range(num_rows))
    buffers = [_integers("slot_mapping", mapping, "i64")]
    fields: list[Field] = []
    views: list[TensorView] = []
    for name, bits in (("key", scene.k_scale), ("value", scene.v_scale)):
        fill = activation_fill(scene, bits)
        buffer, field, view = _rows(name, scene, num_rows, scene.row_gap, fill)
        buffers.append(buffer)
        fields.append(field)
        views.append(view)
    return (
        buffers,
        fields,
        [*views, _vector("slot_mapping", num_rows, "i64")],
        _step(scene, "reshape_and_cache"),
    )


def _gather(scene: Scene) -> Parts:
    table, starts, ends = [], [], [0]
    for row, sequence in enumerate(scene.batch.sequences):
        for column in range(scene.batch.table_width):
            # Past a sequence's blocks the table is stale: whatever ids an earlier request left.
            stale = word(scene.fill_seed, "block_table", row * scene.batch.table_width + column)
            known = column < len(sequence.block_ids)
            table.append(
                sequence.block_ids[column] if known else stale % scene.attention.geometry.num_blocks
            )
        starts.append(sequence.start)
        ends.append(ends[-1] + sequence.length)
    owners = tuple(
        i for i, sequence in enumerate(scene.batch.sequences) for _ in range(sequence.length)
    )
    return _gather_parts(scene, tuple(table), tuple(starts), tuple(ends), owners)


def _gather_parts(
    scene: Scene,
    table: tuple[int, ...],
    starts: tuple[int, ...],
    cu_seqlens: tuple[int, ...],
    owners: tuple[int, ...],
) -> Parts:
    num_tokens, num_seqs = len(owners), len(starts)
    width = len(table) // num_seqs
    buffers = [
        _integers("block_table", table, "i32"),
        _integers("seq_starts", starts, "i32"),
        _integers("cu_seqlens_kv", cu_seqlens, "i32"),
        _integers("token_to_batch", owners, "i32"),
    ]
    views = [
        TensorView("block_table", "block_table", "i32", (num_seqs, width), (4 * width, 4)),
        _vector("seq_starts", num_seqs, "i32"),
        _vector("cu_seqlens_kv", num_seqs + 1, "i32"),
        _vector("token_to_batch", num_tokens, "i32"),
    ]
    fields = []
    for name in ("key_out", "value_out"):
        buffer, field, view = _rows(name, scene, num_tokens, 0, ByteFill(scene.fill_seed))
        buffers.append(buffer)
        fields.append(field)
        views.append(view)
    return buffers, fields, views, _step(scene, "gather_cache")


def _step(scene: Scene, op: str) -> Step:
    shared = {name: name for name in ("key_cache", "value_cache", "k_scale", "v_scale")}
    scalars: dict[str, int | str] = {
        "kv_cache_layout": scene.attention.order.upper(),
        "cache_dtype": scene.attention.cache_dtype,
    }
    if op == "reshape_and_cache":
        mine = {name: name for name in ("key", "value", "slot_mapping")}
        activations = {"key": "key", "value": "value"}
    else:
        activations = {"key": "key_out", "value": "value_out"}
        metadata = ("block_table", "seq_starts", "cu_seqlens_kv", "token_to_batch")
        mine = activations | {name: name for name in metadata}
    fields = {"key_cache": "k", "value_cache": "v"} | activations
    return Step(op, shared | mine, fields, scalars)


def with_round_trip(case: Case) -> Case:
    """`case` followed or preceded by its inverse op, executed by the target's partner.

    After a write, each stored token is gathered back as a sequence of its own. Before a gather,
    the tokens that it will read are written. Either way what comes out must be what went in.
    """
    scene, step = case.scene, case.steps[0]
    if step.op == "reshape_and_cache":
        n = case.geometry.block_size
        stored = [slot for slot in case.integers(step, "slot_mapping") if slot >= 0]
        count = len(stored)
        parts = _gather_parts(
            scene,
            tuple(slot // n for slot in stored),
            tuple(slot % n for slot in stored),
            tuple(range(count + 1)),
            tuple(range(count)),
        )
    else:
        parts = _write(scene)
    buffers, fields, views, inverse = parts
    inverse = Step(inverse.op, inverse.tensors, inverse.fields, inverse.scalars, by="partner")
    ordered = (step, inverse) if step.op == "reshape_and_cache" else (inverse, step)
    return Case(
        buffers=(*case.buffers, *buffers),
        fields=(*case.fields, *fields),
        tensors=(*case.tensors, *views),
        steps=ordered,
        scene=scene,
    )
