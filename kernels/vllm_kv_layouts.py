"""vLLM's views from 0.29.0 on: one buffer by a KVCacheLayout, `create_kv_cache_views`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.plan_targets import PlanAdapter
from kvfuzz.kernels.torch_dtypes import TORCH_DTYPES
from kvfuzz.kernels.vllm_specs import BACKENDS, BLOCKS_OF_16, INTERFACE, Parts, Specs, plan_target
from kvfuzz.model.axes import Domain
from kvfuzz.model.cache_plan import CacheLayer, CachePlan


def since_kv_layouts(specs: Specs) -> PlanAdapter:
    """vllm:create_kv_cache_views. Raises NotCheckedError for a tree of before."""
    make = getattr(specs.interface, "create_kv_cache_views", None)
    if make is None:
        raise NotCheckedError(f"{INTERFACE} has no create_kv_cache_views: absent in this tree")
    interface, rocm = specs.interface, specs.tree.load(f"{BACKENDS}/rocm_attn.py")
    layouts = specs.tree.load("vllm/v1/kv_cache_layout.py").KVCacheLayout

    def views(allocations: Mapping[str, Tensor], plan: CachePlan) -> Parts:
        caches: dict[str, Tensor] = {}
        for each in plan.placements:
            layer = plan.layer(each.layers[0])
            spec = specs.spec(layer)
            if layer.form == "head_slots":
                spec = rocm.RocmAttentionBackend.customize_spec(spec)
            tensor = interface.KVCacheTensor(
                size=allocations[each.allocation].numel(),
                layers=list(each.layers),
                layer_stride=each.layer_stride,
                block_stride=each.block_stride,
                offset=each.offset,
            )
            made = make(
                allocations[each.allocation].view(torch.int8),
                spec,
                plan.num_blocks,
                layouts[plan.kv_layout],
                tensor,
                kernel_block_size=layer.kernel_block_size if layer.is_attention else None,
            )
            caches.update(zip(each.layers, made, strict=True))
        caches |= {each.name: caches[each.shares] for each in plan.sharers}
        return {layer.name: taken_apart(layer, caches[layer.name]) for layer in plan.layers}

    domain = Domain(
        allowed={"placement": ("one_buffer",), "tokens": BLOCKS_OF_16},
        source=f"{INTERFACE}: create_kv_cache_views, its assertions",
    )
    return plan_target("vllm:create_kv_cache_views", INTERFACE, specs, views, domain)


def taken_apart(layer: CacheLayer, cache: Tensor) -> dict[str, Tensor]:
    """The parts of one `[num_blocks, heads, tokens, content]` view."""
    if layer.form == "content_packed":
        k, v = torch.split(cache.transpose(1, 2), [layer.head_size, layer.head_size_v], dim=-1)
        return {"k": k, "v": v}
    if layer.form == "head_slots":
        heads = torch.unflatten(cache, -1, (layer.num_kv_heads, layer.head_size))
        return {"k": heads[:, 0], "v": heads[:, 1]}
    if layer.form == "latent":
        return {"latent": cache[:, 0]}
    parts, start = {}, 0
    for number, state in enumerate(layer.states):
        piece = cache[:, 0, 0, start : start + state.nbytes].view(TORCH_DTYPES[state.dtype])
        parts[f"state_{number}"] = torch.unflatten(piece, -1, state.shape)
        start += state.nbytes
    return parts
