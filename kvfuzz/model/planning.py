"""From the layers of each group to a cache plan: who lies where, by era of vLLM.

`separate` and `packed` are what vLLM planned until 0.29.0 (get_kv_cache_config_from_groups and
_get_kv_cache_config_packed in vllm/v1/core/kv_cache_utils.py of 0.24.0), `one_buffer` what it plans
since (vllm/v1/core/kv_cache_planning.py of 0.33.0): all layers in one buffer by a KVCacheLayout.
"""

from collections.abc import Sequence
from itertools import zip_longest

from kvfuzz.errors import UsageError
from kvfuzz.model.cache_plan import Allocation, CacheLayer, CachePlan, Placement

Groups = Sequence[Sequence[CacheLayer]]
"""The layers of each group, those that share another's cache included."""

BUFFER = "kv_buffer"


def separate(groups: Groups, num_blocks: int) -> CachePlan:
    """Allocation i is shared by the i-th layers of all groups; their pages are equally large.

    Raises UsageError where they are not.
    """
    allocations, placements = [], []
    for number, row in enumerate(zip_longest(*map(_owners, groups))):
        shared_by = [layer for layer in row if layer is not None]
        page = _common_page(shared_by)
        name = f"kv.{number}"
        allocations.append(Allocation(name, page * num_blocks))
        placements.append(Placement(name, tuple(layer.name for layer in shared_by), page))
    return _plan(groups, num_blocks, allocations, placements)


def packed(groups: Groups, num_blocks: int) -> CachePlan:
    """One buffer with the pages of all slots side by side in each block.

    A slot is a page size and a number: the layers of several groups that have both in common lie
    at the same place.
    """
    slots: dict[tuple[int, int], list[str]] = {}
    for group in groups:
        seen: dict[int, int] = {}
        for layer in _owners(group):
            number = seen[layer.page_stride] = seen.get(layer.page_stride, -1) + 1
            slots.setdefault((layer.page_stride, number), []).append(layer.name)
    order = sorted(slots, key=lambda slot: [*slots].index(slot))
    pages = list(dict.fromkeys(page for page, _ in order))
    order.sort(key=lambda slot: (pages.index(slot[0]), slot[1]))
    block = sum(page for page, _ in order)
    placements, offset = [], 0
    for page, number in order:
        layers = tuple(slots[page, number])
        placements.append(Placement(BUFFER, layers, block, offset=offset, packed=True))
        offset += page
    return _plan(groups, num_blocks, [Allocation(BUFFER, block * num_blocks)], placements)


def one_buffer(groups: Groups, num_blocks: int, kv_layout: str) -> CachePlan:
    """All groups over one buffer, from byte 0 of it, each by `kv_layout`.

    Where the block is the outermost axis, blocks are as far apart as the widest group is wide.
    Raises UsageError for pages that `kv_layout` cannot place: where heads lie outside of a page,
    padded ones, or those of several shapes, since a block id would name other bytes in each group.
    """
    owners = [layer for group in groups for layer in _owners(group)]
    shapes = {(slots_of(layer), layer.page_stride) for layer in owners}
    if kv_layout in ("LHBNC", "BHLNC") and len(shapes) > 1:
        raise UsageError(
            f"kv_layout={kv_layout} with pages of several (heads, bytes): {sorted(shapes)}; a page "
            "must lie in one piece: LBHNC, LBNHC, BLHNC or BLNHC"
        )
    if not kv_layout.startswith("B") and len({page for _, page in shapes}) > 1 < len(groups):
        raise UsageError(
            f"kv_layout={kv_layout} with several groups and pages of {sorted(shapes)} (heads, "
            "bytes): blocks must be the outermost axis"
        )
    widest = max(sum(layer.page_stride for layer in _owners(group)) for group in groups)
    placements: list[Placement] = []
    for group in groups:
        offset = 0
        for alike in _runs_of_one_format(_owners(group)):
            each = _placed(alike, num_blocks, kv_layout, widest, offset)
            placements.append(each)
            page = alike[0].page_stride
            outermost = kv_layout.startswith("B")
            offset += len(alike) * (page if outermost else page * num_blocks)
    return _plan(
        groups, num_blocks, [Allocation(BUFFER, widest * num_blocks)], placements, kv_layout
    )


def _placed(
    alike: Sequence[CacheLayer], num_blocks: int, kv_layout: str, widest: int, offset: int
) -> Placement:
    layer, names = alike[0], tuple(each.name for each in alike)
    page, heads = layer.page_stride, slots_of(layer)
    compact = kv_layout.index("B") < 2 and kv_layout.index("L") < 2
    if layer.page_padded and not compact and heads > 1:
        raise UsageError(f"kv_layout={kv_layout} cannot pad the pages of {layer.name}")
    cell = page // heads
    strides = {
        "LBHNC": (num_blocks * page, page),
        "LBNHC": (num_blocks * page, page),
        "LHBNC": (num_blocks * page, cell),
        "BLHNC": (page, widest),
        "BLNHC": (page, widest),
        "BHLNC": (cell, widest),
    }
    layer_stride, block_stride = strides[kv_layout]
    return Placement(BUFFER, names, block_stride, layer_stride, offset)


def slots_of(layer: CacheLayer) -> int:
    """The head axis of a page under a KVCacheLayout: heads, or K and V as two slots."""
    if layer.form == "head_slots":
        return 2
    return layer.num_kv_heads if layer.form == "content_packed" else 1


def _runs_of_one_format(layers: Sequence[CacheLayer]) -> list[list[CacheLayer]]:
    """Layers that differ in nothing but their names, together; in order of the first of each."""
    runs: dict[tuple[object, ...], list[CacheLayer]] = {}
    for layer in layers:
        key = (
            layer.form,
            layer.block_size,
            layer.cache_dtype,
            layer.num_kv_heads,
            layer.head_size,
            layer.head_size_v,
            layer.states,
            layer.page_padded,
        )
        runs.setdefault(key, []).append(layer)
    return list(runs.values())


def _owners(group: Sequence[CacheLayer]) -> list[CacheLayer]:
    return [layer for layer in group if not layer.shares]


def _common_page(layers: Sequence[CacheLayer]) -> int:
    pages = {layer.name: layer.page_stride for layer in layers}
    if len(set(pages.values())) > 1:
        raise UsageError(
            f"layers of one allocation have pages of several sizes: {pages}; pad the smaller ones"
        )
    return next(iter(pages.values()))


def _plan(
    groups: Groups,
    num_blocks: int,
    allocations: list[Allocation],
    placements: list[Placement],
    kv_layout: str = "",
) -> CachePlan:
    return CachePlan(
        num_blocks=num_blocks,
        layers=tuple(layer for group in groups for layer in group),
        groups=tuple(tuple(layer.name for layer in group) for group in groups),
        allocations=tuple(allocations),
        placements=tuple(placements),
        kv_layout=kv_layout,
    )
