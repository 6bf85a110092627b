"""Lower a scene to a case: the cache with its fields and views, and what the op adds.

A write case stores a batch of new tokens into the cache; a gather case copies runs of cached
tokens into a dense workspace. Both fill the cache with hash bytes first, so that every byte that
is not named must survive.
"""

from kvfuzz.model.batch_metadata import gathered, slot_mapping
from kvfuzz.model.case import Buffer, Case
from kvfuzz.model.fill import ByteFill
from kvfuzz.model.layout import Field
from kvfuzz.model.parts import (
    Parts,
    Setting,
    activation_fill,
    gather_parts,
    write_parts,
)
from kvfuzz.model.placement import cache_fields, place, state_field
from kvfuzz.model.scales import SCALES, Scales, inline_scales, scales_of
from kvfuzz.model.scene import Scene, check
from kvfuzz.model.views import SPELT, cache_view


def lower(scene: Scene) -> Case:
    """The case of `scene`. Raises UsageError where the scene is impossible."""
    check(scene)
    layer = scene.attention
    sharing = scene.plan.sharing(layer.allocation)
    count, index = len(sharing), sharing.index(layer)
    nbytes = place(layer, count=count).nbytes
    k, v, *inline = cache_fields(layer, index=index, count=count)
    others = [
        field
        for number, other in enumerate(sharing)
        if number != index
        for field in cache_fields(other, index=number, count=count, prefix=f"{other.name}.")
    ]
    # States first, so that a byte of their blocks is theirs: K and V are defined over all blocks.
    states = [
        state_field(layer, count, name="state", owner=state.name, blocks=state.blocks)
        for state in scene.plan.states(layer.allocation)
    ]
    scales = _scales(scene, inline)
    parts = OPS[scene.op](scene)
    return Case(
        buffers=(
            Buffer(layer.allocation, nbytes, ByteFill(scene.fill_seed)),
            *(each.buffer for each in scales if each.buffer),
            *parts.buffers,
        ),
        fields=(*states, k, v, *(each.field for each in scales), *others, *parts.fields),
        tensors=(
            cache_view("key_cache", k, layer.order),
            cache_view("value_cache", v, layer.order),
            *(each.view for each in scales),
            *parts.tensors,
        ),
        steps=(parts.step,),
        scene=scene,
    )


def _scales(scene: Scene, inline: list[Field]) -> list[Scales]:
    layer, seed = scene.attention, scene.fill_seed
    least = (scene.k_scale, scene.v_scale)
    if inline:
        return [
            inline_scales(at, layer, bits, seed) for at, bits in zip(inline, least, strict=True)
        ]
    return [scales_of(name, layer, bits, seed) for name, bits in zip(SCALES, least, strict=True)]


def _setting(scene: Scene) -> Setting:
    layer = scene.attention
    return Setting(
        layer.geometry,
        layer.cache_dtype,
        scene.model_dtype,
        SPELT[layer.order],
        scene.fill_seed,
    )


def _write(scene: Scene) -> Parts:
    mapping = slot_mapping(scene.batch, scene.attention.geometry.block_size)
    setting = _setting(scene)
    fills = (
        activation_fill(setting, scene.k_scale, scene.values),
        activation_fill(setting, scene.v_scale, scene.values),
    )
    return write_parts(setting, mapping, fills, scene.row_gap)


def _gather(scene: Scene) -> Parts:
    num_blocks = scene.attention.geometry.num_blocks
    return gather_parts(_setting(scene), *gathered(scene.batch, num_blocks, scene.fill_seed))


OPS = {"reshape_and_cache": _write, "gather_cache": _gather}
"""By op, what it adds."""
