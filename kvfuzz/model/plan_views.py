"""Where the views of a cache plan must lie: address formulas of every form, in bytes.

Formulas are those of vLLM's backends and runners (`kvfuzz.model.cache_plan.FORMS`); #37228,
#43660, #47035, #47685 and #44455 are where they changed. An allocation has one *storage*, which
says where block b of K and of V lies, whatever shapes its layers are handed:

    kv_first      all K pages, then all V pages: block b of a side is at b * P
    blocks_first  the K page and the V page of a block side by side: at b * 2P

All layers of an allocation must be handed views of one storage. Which of the two is the engine's
choice: where backends disagree the V1 runner took blocks_first (#47035), the V2 runner kv_first
(#47685).
"""

from collections.abc import Sequence

from kvfuzz.model.cache_plan import CacheLayer, CachePlan, Placement
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layer_view import LayerView

KV_FIRST, BLOCKS_FIRST = "kv_first", "blocks_first"


def storages(plan: CachePlan, allocation: str) -> tuple[str, ...]:
    """The storages that an allocation may have, first the one that its layers' backends ask for.

    Pages of K and V lie in one piece where anything else does: Mamba state (#37228), a latent,
    padding, or the page of another slot behind them.
    """
    at = plan.placement_of
    over = [layer for layer in plan.owners if at[layer.name].allocation == allocation]
    apart = all(
        layer.form in (KV_FIRST, BLOCKS_FIRST)
        and not layer.page_padded
        and at[layer.name].block_stride == layer.page_bytes
        for layer in over
    )
    if not apart:
        return (BLOCKS_FIRST,)
    kv_first = all(layer.form == KV_FIRST for layer in over) and not plan.has_state
    return (KV_FIRST, BLOCKS_FIRST) if kv_first else (BLOCKS_FIRST, KV_FIRST)


def expected(plan: CachePlan, layer: CacheLayer, storage: str) -> tuple[LayerView, ...]:
    """The views of `layer`, or of the layer whose cache it shares, over an allocation of
    `storage`."""
    owner = layer.shares or layer.name
    at = plan.placement_of[owner]
    base = at.offset + at.layers.index(owner) * at.layer_stride
    if layer.form == "states":
        return _states(plan, layer, at, base)
    if layer.form == "latent":
        row = layer.head_size * itemsize(layer.cache_dtype)
        strides = (at.block_stride // layer.ratio, row, itemsize(layer.cache_dtype))
        shape = (plan.num_blocks * layer.ratio, layer.kernel_block_size, layer.head_size)
        return (
            LayerView(layer.name, "latent", at.allocation, layer.cache_dtype, shape, strides, base),
        )
    return _sides(plan, layer, at, base, storage)


def _sides(
    plan: CachePlan, layer: CacheLayer, at: Placement, base: int, storage: str
) -> tuple[LayerView, ...]:
    element, n, heads = itemsize(layer.cache_dtype), layer.kernel_block_size, layer.num_kv_heads
    block = at.block_stride // layer.ratio
    half = n * heads * layer.head_size * element
    if layer.form == "content_packed":
        token, head = _cell_strides(plan, layer, at)
        after = layer.head_size * element
    elif layer.form == "head_slots":
        head, slot = layer.head_size * element, heads * layer.head_size * element
        beside = plan.kv_layout in ("LBNHC", "BLNHC")
        token, after = (2 * slot, slot) if beside else (slot, _head_stride(plan, at, half))
    else:
        token, head = _page_strides(layer, element)
        after = half
        if storage == KV_FIRST:
            after, block = plan.num_blocks * layer.ratio * half, half
    return tuple(
        LayerView(
            layer.name,
            part,
            at.allocation,
            layer.cache_dtype,
            (plan.num_blocks * layer.ratio, n, heads, head_size),
            (block, token, head, element),
            base + behind,
        )
        for part, head_size, behind in (
            ("k", layer.head_size, 0),
            ("v", layer.head_size_v, after),
        )
    )


def _page_strides(layer: CacheLayer, element: int) -> tuple[int, int]:
    """The token and the head stride of one side of a page."""
    row = layer.head_size * element
    if layer.order == "hnd":
        return row, layer.kernel_block_size * row
    return layer.num_kv_heads * row, row


def _cell_strides(plan: CachePlan, layer: CacheLayer, at: Placement) -> tuple[int, int]:
    """The token and the head stride where K and V lie in one content dimension."""
    content = (layer.head_size + layer.head_size_v) * itemsize(layer.cache_dtype)
    order = plan.kv_layout or {"nhd": "LBNHC", "hnd": "LBHNC"}[layer.order]
    if order in ("LBNHC", "BLNHC"):
        return layer.num_kv_heads * content, content
    return content, _head_stride(plan, at, layer.kernel_block_size * content)


def _head_stride(plan: CachePlan, at: Placement, within: int) -> int:
    """From a head of a page, or a slot, to the next one; `within` bytes where nothing else lies
    between them."""
    return {
        "LHBNC": plan.num_blocks * at.block_stride,
        "BHLNC": len(at.layers) * at.layer_stride,
    }.get(plan.kv_layout, within)


def _states(plan: CachePlan, layer: CacheLayer, at: Placement, base: int) -> tuple[LayerView, ...]:
    views = []
    for number, state in enumerate(layer.states):
        strides = [itemsize(state.dtype)]
        for size in reversed(state.shape[1:]):
            strides.insert(0, strides[0] * size)
        views.append(
            LayerView(
                layer.name,
                f"state_{number}",
                at.allocation,
                state.dtype,
                (plan.num_blocks, *state.shape),
                (at.block_stride, *strides),
                base,
            )
        )
        base += state.nbytes
    return tuple(views)


def preferred_views(plan: CachePlan) -> list[LayerView]:
    """The views of all layers, each allocation with the storage that its backends ask for."""
    asked_for = {each.name: storages(plan, each.name)[0] for each in plan.allocations}
    at = plan.placement_of
    return [
        view
        for layer in plan.layers
        for view in expected(plan, layer, asked_for[at[layer.shares or layer.name].allocation])
    ]


def is_in_one_piece(plan: CachePlan, layer: CacheLayer) -> bool:
    """Whether the plan alone says where each page of `layer` lies, and in one piece."""
    if layer.form in ("content_packed", "head_slots"):
        return plan.kv_layout not in ("LHBNC", "BHLNC")
    return storages(plan, plan.placement_of[layer.name].allocation) == (BLOCKS_FIRST,)


def parts_of(layer: CacheLayer) -> Sequence[str]:
    """The parts that a layer must be handed."""
    if layer.form == "states":
        return [f"state_{number}" for number in range(len(layer.states))]
    return ("latent",) if layer.form == "latent" else ("k", "v")
