"""The rules by which vLLM makes the pages of different layers equally large, as pure functions.

They are those of vLLM 0.32.0, from its `vllm/platforms/interface.py` (how many tokens a block has),
`vllm/v1/core/kv_cache_planning.py` (one size of page, groups) and `vllm/v1/worker/utils.py` (the
smaller blocks that kernels index). Sizes of blocks are tokens, sizes of pages are bytes.
"""

import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.cache_plan import CacheLayer

MLA_ALIGNMENT = 128
"""Tokens that the block of a model with MLA and Mamba-like layers is at least a multiple of."""


class MultipleOf(msgspec.Struct, frozen=True):
    """The kernel block sizes of a backend that takes any multiple of `base` tokens."""

    base: int


KernelSize = int | MultipleOf
"""One entry of what a backend lists as its kernel block sizes."""


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise UsageError(f"{name}={value}, expected at least {least}: give a larger {name}")


def hybrid_block_size(
    mamba_page: int,
    token_bytes: int,
    *,
    block_size: int = 16,
    kernel_sizes: Sequence[int] = (16,),
    checkpoint_grid: int = 0,
    mla: bool = False,
) -> tuple[int, int]:
    """The tokens of a block so that attention pages hold a state, and the padded page of the state.

    `mamba_page` are the bytes of a state (the largest, where there are several; with 0 nothing
    changes), `token_bytes` those of a token in one attention layer, `kernel_sizes` the smallest
    kernel block of each attention backend, the first backend's first. In the mode "align"
    `checkpoint_grid` are the tokens between two states that the layers can keep; 0 where not all
    of them declare one. The block is never smaller than `block_size`. Attention pages are never
    padded here, and the second value is 0 where the state fills a page exactly.

    Raises UsageError for sizes that are not positive. Source: `_align_hybrid_block_size` in
    `vllm/platforms/interface.py`, vLLM 0.32.0.
    """
    _at_least(0, mamba_page=mamba_page, checkpoint_grid=checkpoint_grid)
    _at_least(1, token_bytes=token_bytes, block_size=block_size)
    if not kernel_sizes or min(kernel_sizes) < 1:
        raise UsageError(
            f"kernel_sizes={tuple(kernel_sizes)}, expected a positive size for each backend: give "
            f"the smallest kernel block of each"
        )
    if not mamba_page:
        return block_size, 0
    alignment = max(kernel_sizes[0], block_size, MLA_ALIGNMENT if mla else 1)
    alignment = math.lcm(alignment, checkpoint_grid or 1)
    tokens = _up(_up(-(-mamba_page // token_bytes), alignment), math.lcm(*kernel_sizes))
    page = tokens * token_bytes
    return tokens, 0 if page == mamba_page else page


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def mixed_block_size(
    token_bytes: int,
    unquantized: int,
    *,
    block_size: int = 16,
    kernel_size: int = 16,
    mamba_page: int = 0,
) -> tuple[int, int]:
    """The tokens of a block, and the page that all layers share, where some stay unquantized.

    A token has `token_bytes` in a quantized layer and `unquantized` in the others
    (kv_cache_dtype_skip_layers); `kernel_size` is the smallest kernel block of any backend and
    `mamba_page` the padded page of a state, or 0. Where the two are equal there is no such step,
    and the page is 0.

    Raises UsageError where a token would be smaller unquantized. Source:
    `_align_heterogeneous_kv_block_size` in `vllm/platforms/interface.py`, vLLM 0.32.0.
    """
    _at_least(1, token_bytes=token_bytes, block_size=block_size, kernel_size=kernel_size)
    _at_least(0, mamba_page=mamba_page)
    _at_least(token_bytes, unquantized=unquantized)
    if unquantized == token_bytes:
        return block_size, 0
    required = max(unquantized * kernel_size, mamba_page)
    tokens = _up(-(-required // token_bytes), max(kernel_size, block_size))
    return tokens, tokens * token_bytes


def common_page(layers: Iterable[CacheLayer]) -> tuple[CacheLayer, ...]:
    """The layers with pages as large as the largest one's, by larger blocks or by padding.

    A state is padded. Attention gets a block of as many times the tokens as its page goes into the
    largest one, and is padded where that is no whole number. A block that kernels take whole stays
    whole.

    Raises UsageError for an MLA page that does not divide the largest one: there is no padding for
    MLA. Source: `unify_kv_cache_spec_page_size` in `vllm/v1/core/kv_cache_planning.py`, vLLM
    0.32.0.
    """
    layers = tuple(layers)
    page = max((layer.page_stride for layer in layers), default=0)
    return tuple(_with_page(layer, page) for layer in layers)


def _with_page(layer: CacheLayer, page: int) -> CacheLayer:
    if layer.page_stride == page:
        return layer
    times, rest = divmod(page, layer.page_stride)
    if layer.is_attention and not rest and not layer.page_padded:
        return msgspec.structs.replace(
            layer,
            block_size=layer.block_size * times,
            kernel_block_size=layer.kernel_block_size * (times if layer.ratio == 1 else 1),
        )
    if layer.kind == "mla":
        raise UsageError(
            f"layer {layer.name}: page of {layer.page_stride} bytes, expected one that divides the "
            f"largest, {page}: MLA pages are not padded, choose another block_size or cache_dtype"
        )
    return msgspec.structs.replace(layer, page_padded=page)


def is_uniform(layers: Iterable[CacheLayer]) -> bool:
    """Whether the layers make one group as they are: of one kind, with blocks of as many tokens.

    Their pages may differ, which is why vLLM asks this before it looks for a common page.
    Source: `vllm/v1/core/kv_cache_planning.py`, vLLM 0.32.0.
    """
    return len({(layer.kind, layer.block_size) for layer in layers}) <= 1


def group_layers(layers: Iterable[CacheLayer]) -> tuple[tuple[str, ...], ...]:
    """The names of the layers that get a block id together, group by group.

    Uniform layers are one group. Others fall into one bucket for each format. A group has as many
    layers as the smallest bucket, or as the largest where that is less than 1.5 times the smallest;
    a bucket is dealt out in turns to as many groups as it needs, and the last ones may be short
    of a layer (memory that nothing uses). A layer that shares a cache follows its target, behind
    the layers that own one.

    Windows are not part of a CacheLayer: layers of one kind count as having the same. What vLLM
    does before with layers that it offloads (hisparse), and with pages of several sizes in layouts
    whose outermost axis is the block, is not in here.

    Raises UsageError where a layer shares a cache that no other layer of them owns. Source:
    `vllm/v1/core/kv_cache_planning.py` and, for sharing,
    `add_kv_sharing_layers_to_kv_cache_groups` in `vllm/v1/worker/utils.py`, vLLM 0.32.0.
    """
    layers = tuple(layers)
    owners = [layer for layer in layers if not layer.shares]
    buckets: dict[CacheLayer | None, list[str]] = {}
    uniform = is_uniform(owners)
    for layer in owners:
        form = None if uniform else msgspec.structs.replace(layer, name="")
        buckets.setdefault(form, []).append(layer.name)
    sizes = [len(bucket) for bucket in buckets.values()]
    size = min(sizes, default=0)
    if 2 * max(sizes, default=0) < 3 * size:
        size = max(sizes)
    groups: list[list[str]] = []
    for bucket in buckets.values():
        count = -(-len(bucket) // size)
        groups.extend(bucket[first::count] for first in range(count))
    group_of = {name: group for group in groups for name in group}
    for layer in layers:
        if layer.shares:
            if layer.shares not in group_of:
                raise UsageError(
                    f"layer {layer.name}: shares={layer.shares!r}, expected a layer that owns a "
                    f"cache: name one of the others"
                )
            group_of[layer.shares].append(layer.name)
    return tuple(map(tuple, groups))


def kernel_block_size(block_size: int, backends: Sequence[Sequence[KernelSize]]) -> int:
    """The tokens of the blocks that kernels index, where a group's manager block has `block_size`.

    The whole block, where each of `backends` takes it: lists it, or what it is a multiple of. Else
    the largest listed size that divides it and that all of them take.

    Raises UsageError where there is none. Source: `select_common_block_size` in
    `vllm/v1/worker/utils.py`, vLLM 0.32.0.
    """
    _at_least(1, block_size=block_size)
    for size in itertools.chain.from_iterable(backends):
        _at_least(1, kernel_size=size if isinstance(size, int) else size.base)
    listed = {size for sizes in backends for size in sizes if isinstance(size, int)}
    for candidate in (block_size, *sorted(listed, reverse=True)):
        if block_size % candidate == 0 and all(_takes(sizes, candidate) for sizes in backends):
            return candidate
    raise UsageError(
        f"block_size={block_size}: no kernel block size divides it that every backend takes, "
        f"expected a multiple of one of {sorted(listed)}: choose another block_size"
    )


def _takes(sizes: Sequence[KernelSize], candidate: int) -> bool:
    return any(
        candidate == size if isinstance(size, int) else candidate % size.base == 0 for size in sizes
    )
