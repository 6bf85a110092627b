"""copy_blocks, swap_blocks, zero_blocks: whole pages of K and V of one attention layer.

    copy_blocks   block t becomes block s of the same cache, for each pair (s, t)
    swap_blocks   block t of another cache, in an allocation of its own, becomes block s
    zero_blocks   every byte of each block becomes 0

The pages of the other layers in the allocation, Mamba states, padding and every other block must
survive; what is copied is bytes, whatever numbers they would be. No block is written twice, and a
copy reads no block that it writes (vLLM: a block that is copied into was just allocated).

The step binds key_cache and value_cache, a swap key_target and value_target as well, all of them
`[num_blocks, block_size, num_kv_heads, D]`, and block_mapping `[n, 2]` i64 or block_ids `[n]` i64.
"""

import msgspec

from kvfuzz.model.cache_parts import CacheParts, cache_parts
from kvfuzz.model.case import Step
from kvfuzz.model.layout import Field
from kvfuzz.model.named_blocks import PAIRS
from kvfuzz.model.ops import metadata
from kvfuzz.model.ops.family import OpFamily
from kvfuzz.model.ops.page_axes import HOSTS, ORDERS_OF_PAGES, PAGE_AXES, PAGE_RULES
from kvfuzz.model.ops.page_edits import simpler
from kvfuzz.model.ops.page_scene import HOST, LEAST_BLOCKS, PageScene
from kvfuzz.model.parts import Parts
from kvfuzz.model.plan import check_layer, require
from kvfuzz.model.steps import CACHES, PAGE_OPS

MOST_LAYERS = 64
MOST_ENTRIES = 1 << 16


def check(scene: PageScene) -> None:
    """Raise UsageError with the first thing that makes `scene` impossible."""
    layer, states = scene.layer, set(scene.state_blocks)
    require(scene.op in PAGE_OPS, f"op={scene.op!r}, expected one of {', '.join(PAGE_OPS)}")
    check_layer(layer)
    require(
        layer.order in ORDERS_OF_PAGES and layer.granularity == "tensor",
        f"order={layer.order} with granularity={layer.granularity}, expected pages that are moved "
        f"whole: {', '.join(ORDERS_OF_PAGES)} with tensor",
    )
    require(
        0 <= scene.index < scene.layers <= MOST_LAYERS,
        f"layer {scene.index} of {scene.layers}, expected at most {MOST_LAYERS} layers",
    )
    require(
        (layer.layout == "hybrid") == bool(states),
        f"layout={layer.layout} with state_blocks={scene.state_blocks}: "
        "a hybrid allocation has blocks of Mamba state, and no other has",
    )
    require(
        list(scene.state_blocks) == sorted(states),
        f"state_blocks={scene.state_blocks}, expected each once, in order",
    )
    require(
        layer.geometry.num_blocks >= LEAST_BLOCKS,
        f"num_blocks={layer.geometry.num_blocks}, expected the null block and at least one more",
    )
    swaps = scene.op == "swap_blocks"
    require(
        scene.host in (HOSTS[1:] if swaps else HOSTS[:1]) and (scene.host_blocks > 0) == swaps,
        f"host={scene.host!r} of {scene.host_blocks} blocks in {scene.op}",
    )
    require(
        0 < len(scene.entries) <= MOST_ENTRIES and 0 <= scene.spare <= MOST_ENTRIES,
        f"{len(scene.entries)} entries and spare={scene.spare}, expected 1 to {MOST_ENTRIES}",
    )
    _check_entries(scene)


def _check_entries(scene: PageScene) -> None:
    width, blocks = scene.width, scene.layer.geometry.num_blocks
    require(
        all(len(entry) == width for entry in scene.entries),
        f"entries {scene.entries}, expected {width} numbers each in {scene.op}",
    )
    sources, targets = scene.sources, scene.targets
    there = scene.host_blocks or blocks
    mine = {*sources, *(() if scene.host_blocks else targets)}
    require(
        all(0 <= block < there for block in targets)
        and all(0 <= block < blocks for block in (*mine, *scene.state_blocks)),
        f"blocks {scene.entries} and states {scene.state_blocks} outside {blocks} blocks"
        + (f" and {there} of the host" if scene.host_blocks else ""),
    )
    require(not mine & {*scene.state_blocks}, "a block of Mamba state is named as one of K and V")
    require(len(set(targets)) == len(targets), f"a block is written twice: {targets}")
    require(
        scene.op != "copy_blocks" or not {*sources} & {*targets},
        f"a block is read and written: {scene.entries}",
    )


def parts(scene: PageScene) -> Parts:
    """What a scene adds up to."""
    caches = cache_parts(scene.plan, scene.attention, scene.fill_seed)
    host = _host(scene) if scene.host_blocks else None
    name = PAGE_OPS[scene.op][0]
    numbers = _numbers(scene, name)
    tensors = {each: each for each in PAGE_OPS[scene.op][1]}
    fields = {tensor: field for tensor, field in _FIELDS.items() if tensor in tensors}
    return Parts(
        (caches.buffer, *((host.buffer,) if host else ()), numbers.buffer),
        (
            *caches.states,
            caches.k,
            caches.v,
            *caches.others,
            *((host.k, host.v, *host.others) if host else ()),
            numbers.field,
        ),
        (*caches.views, *(host.views if host else ()), numbers.view),
        Step(scene.op, tensors | {name: name}, fields | {name: name}, {}),
    )


_FIELDS = {
    "key_cache": "k",
    "value_cache": "v",
    "key_target": "k_target",
    "value_target": "v_target",
}
"""By parameter, the field that it is bound to."""


def _host(scene: PageScene) -> CacheParts:
    """The cache on the host, under names of its own."""
    made = cache_parts(scene.host_plan, scene.host_attention, scene.fill_seed)
    k, v = (_renamed(field, f"{field.name}_target") for field in (made.k, made.v))
    views = [
        msgspec.structs.replace(view, name=parameter.replace("cache", "target"))
        for parameter, view in zip(CACHES, made.views, strict=True)
    ]
    others = tuple(_renamed(field, f"{HOST}.{field.name}") for field in made.others)
    return made._replace(k=k, v=v, others=others, views=(views[0], views[1]))


def _renamed(field: Field, name: str) -> Field:
    return msgspec.structs.replace(field, name=name)


def _numbers(scene: PageScene, name: str) -> metadata.Metadata:
    """The entries, and those that an earlier step left behind them."""
    count, blocks = len(scene.entries), scene.layer.geometry.num_blocks
    old = metadata.stale(scene.fill_seed, name, scene.spare * scene.width, blocks)
    if name == PAIRS:
        rows = (*scene.entries, *zip(old[::2], old[1::2], strict=True))
        return metadata.table(name, "i64", rows, count)
    return metadata.vector(name, "i64", (*scene.targets, *old), count)


def _size(scene: PageScene) -> tuple[int, ...]:
    g = scene.layer.geometry
    blocks, page = g.num_blocks + scene.host_blocks, g.block_size * (g.head_size + g.value_size)
    encoded = len(msgspec.json.encode(scene))
    return (len(scene.entries), blocks, g.num_kv_heads, page, scene.layers, encoded)


FAMILY = OpFamily(
    ops=tuple(PAGE_OPS),
    axes=PAGE_AXES,
    rules=PAGE_RULES,
    op=lambda scene: scene.op,
    check=check,
    parts=parts,
    simpler=simpler,
    size=_size,
    path=lambda scene: "pages",
)
