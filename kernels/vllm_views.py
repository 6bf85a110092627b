"""vLLM's view builders out of a source tree: who decides which bytes a layer's blocks are.

    vllm:v1_cache_views         GPUModelRunner._reshape_kv_cache_tensors, what it calls included
    vllm:v2_cache_views         _reshape_kv_cache of the V2 runner (worker/gpu/attn_utils.py)
    vllm:split_kv_cache         the V1 runner's views as RocmAiterUnifiedAttentionImpl splits them
    vllm:create_kv_cache_views  create_kv_cache_views, from 0.29.0 on
    vllm:map_to_kernel_blocks   BlockTable.map_to_kernel_blocks, an expand_block_table

Views are those that kernels are handed: what a backend takes apart, each by the way its own source
takes it apart, is taken apart here.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.plan_targets import PlanAdapter
from kvfuzz.kernels.vllm_kv_layouts import since_kv_layouts, taken_apart
from kvfuzz.kernels.vllm_specs import (
    BACKENDS,
    BLOCKS_OF_16,
    MlaBackend,
    Parts,
    Specs,
    has_method,
    method,
    plan_target,
    scope_of,
    takes,
)
from kvfuzz.model.axes import Domain
from kvfuzz.model.cache_plan import CacheLayer, CachePlan
from kvfuzz.model.plan_axes import KIND_SETS
from kvfuzz.model.target import TargetSpec
from kvfuzz.model.vocabulary import Levels

BLOCK_TABLE = "vllm/v1/worker/block_table.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
ATTN_UTILS = "vllm/v1/worker/gpu/attn_utils.py"
AITER_UNIFIED = f"{BACKENDS}/rocm_aiter_unified_attn.py"

Split = Callable[[CacheLayer, Tensor], tuple[Tensor, Tensor]]
"""K and V, `[num_blocks, block_size, num_kv_heads, head_size]`, out of a layer's whole view."""


def adapter(spec: TargetSpec, *, arch: str) -> PlanAdapter:
    """The adapter of `spec.name`, from the tree that `spec.sources` gives for vllm.

    Raises NotCheckedError without a tree, or with one that lacks what the target is about.
    """
    if "vllm" not in spec.sources:
        raise NotCheckedError(f"{spec.name} needs --source vllm=DIR, a folder that contains vllm/")
    specs = Specs(Path(spec.sources["vllm"]), arch)
    makers = {
        "vllm:v1_cache_views": _v1,
        "vllm:v2_cache_views": _v2,
        "vllm:split_kv_cache": _split_by_aiter,
        "vllm:create_kv_cache_views": since_kv_layouts,
        "vllm:map_to_kernel_blocks": _kernel_blocks,
    }
    return makers[spec.name](specs)


SHAPES: dict[tuple[int, ...], Levels] = {
    (7, 2, 16, 3, 8): ("kv_first", "blocks_first", "mixed", "latent"),
    (7, 3, 16, 16): ("kv_first", "content_packed", "latent"),
}
"""By what Triton's backend makes of 7 blocks of 16 tokens, 3 heads and 8 elements, the forms of a
tree; ROCM_ATTN is K/V-first in both."""


class Backends:
    """The tree's backends of each form, before there were KVCacheLayouts."""

    def __init__(self, specs: Specs, blocks_first: str) -> None:
        load = specs.tree.load
        self.rocm: Any = load(f"{BACKENDS}/rocm_attn.py").RocmAttentionBackend
        if not hasattr(self.rocm, "get_kv_cache_shape"):
            raise NotCheckedError(
                f"{BACKENDS}: no get_kv_cache_shape in this tree: it has vllm:create_kv_cache_views"
            )
        module = load(f"{BACKENDS}/{blocks_first}.py")
        self._module = module
        names = {
            "triton_attn": "TritonAttentionBackend",
            "rocm_aiter_unified_attn": "RocmAiterUnifiedAttentionBackend",
        }
        self.blocks_first: Any = getattr(module, names[blocks_first])
        shape = self.blocks_first.get_kv_cache_shape(7, 16, 3, 8)
        if shape not in SHAPES:
            raise NotCheckedError(f"{module.__file__}: its pages are {shape} in this tree")
        self.forms = SHAPES[shape]
        """The forms that the tree's backends take pages for."""

    def of(self, layer: CacheLayer) -> Any:
        """The backend that takes a layer's pages for its form."""
        if layer.form in ("blocks_first", "content_packed"):
            # What VLLM_KV_CACHE_LAYOUT says, which a backend asks for; a plan has one.
            self._module.__dict__["get_kv_cache_layout"] = layer.order.upper
        if layer.form == "latent":
            return MlaBackend
        return self.rocm if layer.form == "kv_first" else self.blocks_first


def _unbound(layer: CacheLayer, cache: Tensor) -> tuple[Tensor, Tensor]:
    """As the backends take their caches apart: along the axis of two, or out of the content
    dimension (rocm_attn, triton_attn)."""
    if layer.form == "content_packed":
        sizes = [layer.head_size, layer.head_size_v]
        k, v = torch.split(cache.transpose(1, 2), sizes, dim=-1)
    else:
        k, v = cache.unbind(0 if layer.form == "kv_first" else 1)
    return k, v


def _parts(plan: CachePlan, caches: Mapping[str, Any], split: Split = _unbound) -> Parts:
    made: Parts = {}
    for layer in plan.layers:
        cache = caches[layer.name]
        if layer.form == "states":
            # A list of states, or one view of the page's bytes that they are cut out of (#44456).
            states = {f"state_{number}": state for number, state in enumerate(cache)}
            made[layer.name] = taken_apart(layer, cache) if isinstance(cache, Tensor) else states
        elif layer.form == "latent":
            made[layer.name] = {"latent": cache}
        else:
            k, v = split(layer, cache)
            made[layer.name] = {"k": k, "v": v}
    return made


def _raw(allocations: Mapping[str, Tensor], plan: CachePlan) -> dict[str, Tensor]:
    """By layer, the int8 tensor that its runner allocated for it."""
    return {
        name: allocations[each.allocation].view(torch.int8)
        for each in plan.placements
        for name in each.layers
    }


def _kernel_block_sizes(plan: CachePlan) -> list[int]:
    return [plan.layer(group[0]).kernel_block_size for group in plan.groups]


def _before(forms: Levels) -> dict[str, Levels]:
    """What plans are like before there were KVCacheLayouts."""
    return {
        "placement": ("separate", "packed"),
        "kv_layout": ("none",),
        "form": forms,
        "tokens": BLOCKS_OF_16,
        # get_kv_cache_shape is asked with one head size.
        "value_heads": ("same",),
    }


_FORBIDDEN: tuple[dict[str, Levels], ...] = (
    # _restride_blocks_first_kv_cache_to_kv_first_storage says that it skips others than NHD.
    {"form": ("mixed",), "page_order": ("hnd",)},
)


def _v2(specs: Specs) -> PlanAdapter:
    utils = specs.tree.load(ATTN_UTILS)
    reshape = getattr(utils, "_reshape_kv_cache", None)
    if reshape is None:
        raise NotCheckedError(f"{ATTN_UTILS} has no _reshape_kv_cache: absent in this tree")
    backends = Backends(specs, "triton_attn")

    def views(allocations: Mapping[str, Tensor], plan: CachePlan) -> Parts:
        given = {
            "attn_groups": specs.groups(plan, backends.of),
            "kv_cache_raw_tensors": _raw(allocations, plan),
            "cache_dtype": "auto",
            "kernel_block_sizes": _kernel_block_sizes(plan),
            "shared_kv_cache_layers": {each.name: each.shares for each in plan.sharers},
            "kv_cache_config": specs.config(plan),
        }
        caches = reshape(**{name: given[name] for name in takes(reshape)})
        return _parts(plan, caches)

    # "Cannot determine layout for tensor of shape (2, 2, ...)".
    hybrid: dict[str, Levels] = {"kinds": _with("mamba"), "form": ("kv_first",)}
    two_blocks: tuple[dict[str, Levels], ...] = (
        {**hybrid, "num_blocks": ("2",), "kernel_blocks": ("1",)},
        {**hybrid, "num_blocks": ("1",), "kernel_blocks": ("2",)},
    )
    domain = Domain(
        allowed=_before(backends.forms),
        forbidden=(*_FORBIDDEN, *two_blocks),
        source=f"{ATTN_UTILS}: _reshape_kv_cache, its assertions and its warning",
    )
    return plan_target("vllm:v2_cache_views", ATTN_UTILS, specs, views, domain)


def _with(kind: str) -> Levels:
    return tuple(each for each in KIND_SETS if kind in each.split("+"))


def _v1(specs: Specs) -> PlanAdapter:
    backends = Backends(specs, "triton_attn")
    views = _v1_views(specs, backends, _unbound)
    return plan_target("vllm:v1_cache_views", RUNNER, specs, views, _v1_domain(backends.forms))


def _v1_domain(forms: Levels) -> Domain:
    return Domain(
        # Layers that share a cache are bound to it by the caller of these methods.
        allowed={**_before(forms), "sharers": ("none",)},
        forbidden=_FORBIDDEN,
        source=f"{RUNNER}: _reshape_kv_cache_tensors and what it calls",
    )


def _v1_views(specs: Specs, backends: Backends, split: Split) -> Callable[..., Parts]:
    """The runner's methods, bound to an object that has what they read of a runner."""
    path = specs.tree.find(RUNNER)
    names = (
        "_reshape_kv_cache_tensors",
        "_update_hybrid_attention_mamba_layout",
        "_kv_cache_spec_attn_group_iterator",
        "_has_mixed_attention_kv_layout",
    )
    utils = specs.tree.load(ATTN_UTILS) if (specs.tree.root / ATTN_UTILS).is_file() else None
    scope = scope_of(
        specs.interface,
        **{
            name: getattr(utils, name)
            for name in ("_reshape_attention_kv_cache",)
            if hasattr(utils, name)
        },
    )
    found = {
        name: method(path, "GPUModelRunner", name, scope)
        for name in names
        if has_method(path, "GPUModelRunner", name)
    }
    if names[0] not in found:
        raise NotCheckedError(f"{RUNNER} has no {names[0]}: absent in this tree")

    class Runner:
        """What the methods read of a GPUModelRunner."""

        runner_only_attn_layers: frozenset[str] = frozenset()
        cache_config = SimpleNamespace(cache_dtype="auto")

        def __init__(self, plan: CachePlan) -> None:
            self.kv_cache_config = specs.config(plan)
            self.attn_groups = [[group] for group in specs.groups(plan, backends.of)]

    for name, function in found.items():
        setattr(Runner, name, function)

    def views(allocations: Mapping[str, Tensor], plan: CachePlan) -> Parts:
        runner: Any = Runner(plan)
        caches = runner._reshape_kv_cache_tensors(
            _raw(allocations, plan), _kernel_block_sizes(plan)
        )
        return _parts(plan, caches, split)

    return views


def _split_by_aiter(specs: Specs) -> PlanAdapter:
    """Blocks-first layers as RocmAiterUnifiedAttentionImpl takes them apart (#43945)."""
    path = specs.tree.find(AITER_UNIFIED)
    base = specs.tree.load("vllm/v1/attention/backend.py")
    split = method(path, "RocmAiterUnifiedAttentionImpl", "_split_kv_cache", scope_of(base))
    kinds = base.AttentionType

    def by_impl(layer: CacheLayer, cache: Tensor) -> tuple[Tensor, Tensor]:
        if layer.form == "kv_first":
            return _unbound(layer, cache)
        kind = kinds.ENCODER_DECODER if layer.kind == "cross" else kinds.DECODER
        k, v = split(SimpleNamespace(attn_type=kind), cache)
        return k, v

    backends = Backends(specs, "rocm_aiter_unified_attn")
    if "blocks_first" not in backends.forms:
        raise NotCheckedError(
            f"{AITER_UNIFIED}: its pages are not (num_blocks, 2, ...) in this tree"
        )
    views = _v1_views(specs, backends, by_impl)
    domain = _v1_domain(("kv_first", "blocks_first", "mixed"))
    allowed = {
        **domain.allowed,
        "page_order": ("nhd",),
        "form": ("kv_first", "blocks_first", "mixed"),
    }
    return plan_target(
        "vllm:split_kv_cache",
        AITER_UNIFIED,
        specs,
        views,
        Domain(allowed=allowed, source=f"{AITER_UNIFIED}: _split_kv_cache; {domain.source}"),
    )


def _kernel_blocks(specs: Specs) -> PlanAdapter:
    path = specs.tree.find(BLOCK_TABLE)
    expand = method(path, "BlockTable", "map_to_kernel_blocks", {"np": np})

    def kernel_blocks(block_ids: Sequence[int], ratio: int) -> list[int]:
        ids = np.array(block_ids, np.int32)
        found: list[int] = expand(ids, ratio, np.arange(ratio).reshape(1, -1)).tolist()
        return found

    return plan_target(
        "vllm:map_to_kernel_blocks",
        BLOCK_TABLE,
        specs,
        kernel_blocks,
        Domain(source=f"{BLOCK_TABLE}: BlockTable.map_to_kernel_blocks"),
        op="expand_block_table",
    )
