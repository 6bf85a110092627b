"""Lower a scene to a case: the cache with its fields and views, and what the op adds.

A write case stores a batch of new tokens into the cache; a gather case copies runs of cached
tokens into a dense workspace. Both fill the cache with hash bytes first, so that every byte that
is not named must survive.
"""

from kvfuzz.model.case import Buffer, Case, TensorView
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.fill import ByteFill, word
from kvfuzz.model.layout import Axis, Field, Geometry, Term, cache_fields
from kvfuzz.model.parts import (
    Parts,
    Setting,
    activation_fill,
    gather_parts,
    integers,
    vector,
    write_parts,
)
from kvfuzz.model.plan import StateLayer
from kvfuzz.model.scene import Scene, check
from kvfuzz.model.steps import PAD_SLOT_ID


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
    nbytes = max(k.last_byte(), v.last_byte()) + 1
    page = nbytes // layer.geometry.num_blocks
    # States first, so that a byte of their blocks is theirs: K and V are defined over all blocks.
    states = [_state(each, scene, page) for each in scene.plan.states(layer.allocation)]
    parts = OPS[scene.op](scene)
    return Case(
        buffers=(
            Buffer(layer.allocation, nbytes, ByteFill(scene.fill_seed)),
            integers("k_scale", (scene.k_scale,), "fp32"),
            integers("v_scale", (scene.v_scale,), "fp32"),
            *parts.buffers,
        ),
        fields=(*states, k, v, *parts.fields),
        tensors=(
            _cache_view("key_cache", k, layer.geometry, layer.order),
            _cache_view("value_cache", v, layer.geometry, layer.order),
            vector("k_scale", 1, "fp32"),
            vector("v_scale", 1, "fp32"),
            *parts.tensors,
        ),
        steps=(parts.step,),
        scene=scene,
    )


def _state(layer: StateLayer, scene: Scene, page: int) -> Field:
    terms = (Term("block", page), Term("dim", 1))
    extents: dict[Axis, int] = {"block": scene.attention.geometry.num_blocks, "dim": page}
    return Field("state", layer.allocation, "u8", 0, terms, extents, layer.name, layer.blocks)


def _cache_view(name: str, field: Field, g: Geometry, order: str) -> TensorView:
    """The `[num_blocks, block_size, num_kv_heads, head_size]` view that engines pass.

    A SHUFFLE cache is passed under the same shape and only reinterpreted inside a block, so its
    inner strides are those of a dense NHD page (callers of reshape_and_cache_shuffle_triton in
    vllm/v1/attention/backends/rocm_aiter_fa.py).
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


def _setting(scene: Scene) -> Setting:
    layer = scene.attention
    layout = layer.order.upper()
    return Setting(layer.geometry, layer.cache_dtype, scene.model_dtype, layout, scene.fill_seed)


def _write(scene: Scene) -> Parts:
    n, batch = scene.attention.geometry.block_size, scene.batch
    slots = iter(
        sequence.block_ids[p // n] * n + p % n
        for sequence in batch.sequences
        for p in range(sequence.start, sequence.start + sequence.length)
    )
    padded = set(batch.padding)
    mapping = tuple(PAD_SLOT_ID if row in padded else next(slots) for row in range(batch.num_rows))
    setting = _setting(scene)
    fills = (
        activation_fill(setting, scene.k_scale, scene.values),
        activation_fill(setting, scene.v_scale, scene.values),
    )
    return write_parts(setting, mapping, fills, scene.row_gap)


def _gather(scene: Scene) -> Parts:
    table, starts, ends, owners = [], [], [0], []
    width, num_blocks = scene.batch.table_width, scene.attention.geometry.num_blocks
    for row, sequence in enumerate(scene.batch.sequences):
        # Past a sequence's blocks the table is stale: whatever ids an earlier request left.
        stale = (
            word(scene.fill_seed, "block_table", row * width + column) % num_blocks
            for column in range(len(sequence.block_ids), width)
        )
        table += [*sequence.block_ids, *stale]
        starts.append(sequence.start)
        ends.append(ends[-1] + sequence.length)
        owners += [row] * sequence.length
    return gather_parts(_setting(scene), tuple(table), tuple(starts), tuple(ends), tuple(owners))


OPS = {"reshape_and_cache": _write, "gather_cache": _gather}
"""By op, what it adds."""
