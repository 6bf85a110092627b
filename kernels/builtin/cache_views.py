"""The views of a cache plan, one layer after the other: what an engine does once, at its start.

Written for clarity: the axes of a page are named in the order in which they lie in memory, strides
follow from the sizes further in, and the engine's own strides of layers and blocks replace those.
Where the layers of an allocation were made for different storages, all get K and V side by side.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvfuzz.kernels.torch_dtypes import TORCH_DTYPES
from kvfuzz.model.cache_plan import CacheLayer, CachePlan

PAGE_AXES = {"L": "layer", "B": "block", "H": "head", "N": "token", "C": "content"}


def cache_views(allocations: Mapping[str, Tensor], plan: CachePlan) -> dict[str, dict[str, Tensor]]:
    """By layer and part, a view over the uint8 buffers `allocations` (each `[nbytes]`).

    Parts and their shapes are those of `kvfuzz.model.layer_view`. A layer that shares a cache gets
    the views of the layer that owns it.
    """
    made = {layer.name: _views(allocations, plan, layer) for layer in plan.owners}
    return {layer.name: made[layer.shares or layer.name] for layer in plan.layers}


def _views(
    allocations: Mapping[str, Tensor], plan: CachePlan, layer: CacheLayer
) -> dict[str, Tensor]:
    at = plan.placement_of[layer.name]
    everything = allocations[at.allocation][at.offset :]
    page = everything[at.layers.index(layer.name) * at.layer_stride :]
    blocks, pitch = plan.num_blocks * layer.ratio, at.block_stride // layer.ratio
    if layer.form == "states":
        return _states(page, plan.num_blocks, layer, at.block_stride)
    dtype = TORCH_DTYPES[layer.cache_dtype]
    if layer.form == "latent":
        axes = {"block": blocks, "token": layer.kernel_block_size, "dim": layer.head_size}
        return {"latent": _in_memory_order(page, axes, dtype, {"block": pitch})}
    if layer.form == "content_packed":
        return _packed(everything, plan, layer, pitch)
    if layer.form == "head_slots":
        return _slots(everything, plan, layer, pitch)
    tokens, heads = {"token": layer.kernel_block_size}, {"head": layer.num_kv_heads}
    inside = (heads | tokens if layer.order == "hnd" else tokens | heads) | {"dim": layer.head_size}
    if _is_kv_first(plan, at.allocation):
        sides = _in_memory_order(page, {"side": 2, "block": blocks} | inside, dtype, {})
    else:
        axes = {"block": blocks, "side": 2} | inside
        sides = _in_memory_order(page, axes, dtype, {"block": pitch}).transpose(0, 1)
    if layer.order == "hnd":
        sides = sides.transpose(2, 3)
    return {"k": sides[0], "v": sides[1]}


def _is_kv_first(plan: CachePlan, allocation: str) -> bool:
    """Whether every layer over `allocation` was made for K pages before all V pages."""
    over = [
        plan.layer(name)
        for each in plan.placements
        if each.allocation == allocation
        for name in each.layers
    ]
    return all(layer.form == "kv_first" for layer in over) and not plan.has_state


def _packed(
    everything: Tensor, plan: CachePlan, layer: CacheLayer, pitch: int
) -> dict[str, Tensor]:
    content = layer.head_size + layer.head_size_v
    cells = _by_kv_layout(everything, plan, layer, layer.num_kv_heads, content, pitch)
    k, v = torch.split(cells, [layer.head_size, layer.head_size_v], dim=-1)
    return {"k": k, "v": v}


def _slots(everything: Tensor, plan: CachePlan, layer: CacheLayer, pitch: int) -> dict[str, Tensor]:
    content = layer.num_kv_heads * layer.head_size
    cells = _by_kv_layout(everything, plan, layer, 2, content, pitch)
    heads = torch.unflatten(cells, -1, (layer.num_kv_heads, layer.head_size))
    return {"k": heads[:, :, 0], "v": heads[:, :, 1]}


def _by_kv_layout(
    everything: Tensor, plan: CachePlan, layer: CacheLayer, heads: int, content: int, pitch: int
) -> Tensor:
    """`[block, token, head, content]` of one layer in the order of the plan's KVCacheLayout."""
    at = plan.placement_of[layer.name]
    sizes = {
        "layer": len(at.layers) if at.layer_stride else 1,
        "block": plan.num_blocks * layer.ratio,
        "head": heads,
        "token": layer.kernel_block_size,
        "content": content,
    }
    order = plan.kv_layout or {"nhd": "LBNHC", "hnd": "LBHNC"}[layer.order]
    names = [PAGE_AXES[letter] for letter in order]
    given = {"block": pitch} | ({"layer": at.layer_stride} if at.layer_stride else {})
    dtype = TORCH_DTYPES[layer.cache_dtype]
    whole = _in_memory_order(everything, {name: sizes[name] for name in names}, dtype, given)
    index = at.layers.index(layer.name) if at.layer_stride else 0
    one = whole.select(names.index("layer"), index)
    names.remove("layer")
    return one.permute([names.index(name) for name in ("block", "token", "head", "content")])


def _states(page: Tensor, num_blocks: int, layer: CacheLayer, pitch: int) -> dict[str, Tensor]:
    made = {}
    for number, state in enumerate(layer.states):
        axes = {"block": num_blocks} | {f"{at}": size for at, size in enumerate(state.shape)}
        dtype = TORCH_DTYPES[state.dtype]
        made[f"state_{number}"] = _in_memory_order(page, axes, dtype, {"block": pitch})
        page = page[state.nbytes :]
    return made


def _in_memory_order(
    page: Tensor, axes: Mapping[str, int], dtype: torch.dtype, given: Mapping[str, int]
) -> Tensor:
    """A view of `dtype` from the start of the bytes `page`, its axes outermost first.

    `given` are strides in bytes that the engine sets; the others follow from what is further in.
    """
    stride, strides = dtype.itemsize, list[int]()
    for name, size in reversed([*axes.items()]):
        stride = given.get(name, stride)
        strides.insert(0, stride // dtype.itemsize)
        stride *= size
    rest = page.numel() % dtype.itemsize
    whole = (page[:-rest] if rest else page).view(dtype)
    return whole.as_strided(list(axes.values()), strides, whole.storage_offset())
