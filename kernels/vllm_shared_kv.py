"""vLLM's attention of a layer that shares another layer's cache, by AITER's backend.

Such a layer projects queries only: key and value are None, and what it attends over is in the cache
of its target layer. The engine's one view of that cache is made of the K and V that a step hands
over, over the same memory.
"""

import inspect

from torch import Tensor

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.adapter import Adapter
from kvfuzz.kernels.contract import Scalars, Tensors
from kvfuzz.kernels.fp8 import dialect_of
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.vllm_backends import AITER_FA, content_of_module, text_of
from kvfuzz.kernels.vllm_forward import ROUND, Backend, Layer, Requests, Step
from kvfuzz.kernels.vllm_pages import pages_of
from kvfuzz.model.axes import Domain
from kvfuzz.model.dtypes import engine_spelling
from kvfuzz.model.ops.attended import softmax_scale
from kvfuzz.model.ops.attention import SHARED
from kvfuzz.model.target import Precision, Quantise, TargetInfo
from kvfuzz.model.vocabulary import Levels

NAME = "vllm:shared_kv_attention"

PRECISION = Precision(
    weights="fp32",
    dequantised="model",
    scaled_query=None,
    partial="model",
    merged="lse",
    merged_part=ROUND,
    tile=16,
    source=f"{AITER_FA}: cp_mha_gather_cache dequantises to the workspace's dtype, extend_forward "
    "merges parts that are in the query's dtype; attention itself by stand-ins, in fp64",
)

APART: Levels = ("blocks_first", "hybrid")
"""Where K and V of a block lie side by side, so that neither is a plane of dense pages."""

FORBIDDEN: tuple[dict[str, Levels], ...] = (
    # The engine's view holds K and V in one row of content, or as two head slots (SHUFFLE).
    {"order": ("hnd",), "layout": ("kv_first", *APART)},
    {"order": ("shuffle",), "layout": ("content_packed",)},
    # paged_attention_common, which decodes SHUFFLE caches, is asserted to get dense planes; of
    # several requests some may have one query token, which is a decode.
    {"order": ("shuffle",), "layout": APART, "phase": ("decode", "mixed")},
    {"order": ("shuffle",), "layout": APART, "sequences": ("2", "3")},
    # An engine refuses a window with SHUFFLE; forward reads the cache as NHD there.
    {"order": ("shuffle",), "window": ("wide", "cuts")},
)


def shared_kv(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:shared_kv_attention. Raises NotCheckedError where a tree's backend takes
    a cache of another shape."""
    backend = Backend(tree.root, arch)
    _check_views(backend)

    steps: list[Step] = []

    def call(tensors: Tensors, scalars: Scalars) -> None:
        # The sharers of a step have one batch, whose metadata are made once.
        number, count = (int(scalars.get(*each)) for each in (("sharer", 0), ("sharers", 1)))
        if number == 0:
            layer, requests = _layer(tensors, scalars), _requests(tensors, scalars)
            steps[:] = [backend.step(layer, requests, count)]
        step = steps[0]
        if number == count - 1:
            steps.clear()  # nothing keeps a cache of many gigabytes
        step.forward(number, tensors["query"], as_allocated(tensors["output"]))

    info = TargetInfo(
        NAME,
        SHARED,
        _domain(backend, tree, arch),
        Quantise(),
        "",
        content_of_module(backend.module),
        precision=PRECISION,
    )
    return Adapter(info, call)


def _check_views(backend: Backend) -> None:
    implementation = backend.module.AiterFlashAttentionImpl
    split = getattr(implementation, "_split_kv_cache", None)
    source = "" if split is None else inspect.getsource(split)
    if "transpose(1, 2)" not in source or "unflatten" not in source:
        raise NotCheckedError(
            f"{backend.module.__file__}: its caches are not [B, H, N, 2 D] and, with SHUFFLE, "
            "[B, 2, N, H D], which is all that this adapter knows"
        )


def _domain(backend: Backend, tree: SourceTree, arch: str) -> Domain:
    pages = pages_of(tree.root, text_of(backend.module))
    claims = backend.module.AiterFlashAttentionBackend
    allowed: dict[str, Levels] = {
        "layout": ("kv_first", *APART, "content_packed"),
        "order": ("hnd", "shuffle"),
        "value_size": ("same",),
        "granularity": ("tensor",),
        "block_size": tuple(map(str, claims.get_supported_kernel_block_sizes())),
        "head_size": tuple(map(str, claims.get_supported_head_sizes())),
        "model_dtype": ("bf16", "fp16"),
        # forward views every fp8 cache, fp8_e5m2 too, as the platform's fp8_dtype().
        "cache_dtype": ("bf16", "fp16", dialect_of(arch)),
        # Prefills and extends are never told of a cap; a sink would count in every part of one.
        "softcap": ("none",),
        "sinks": ("none",),
        "alibi_slopes": ("none",),
        # Queries are the model's: the backend has q_descale=None throughout.
        "query": ("model",),
        # A scheduled request has a token, and the output is the layer's own.
        "idle": ("none",),
        "rows": ("dense",),
    }
    return Domain(
        allowed={**pages.allowed, **allowed},
        forbidden=(*pages.forbidden, *FORBIDDEN),
        source=f"{AITER_FA}: AiterFlashAttentionImpl.forward, _split_kv_cache, "
        "AiterFlashAttentionBackend; batches in the order of V1: decodes, extends, prefills; "
        f"contexts gathered {ROUND} tokens at a time",
    )


def _layer(tensors: Tensors, scalars: Scalars) -> Layer:
    key_cache, is_shuffle = tensors["key_cache"], scalars["kv_cache_layout"] == "SHUFFLE"
    _, block_size, num_kv_heads, head_size = key_cache.shape
    return Layer(
        kv_cache=one_view(key_cache, tensors["value_cache"], is_shuffle),
        k_scale=tensors["k_scale"],
        v_scale=tensors["v_scale"],
        num_heads=tensors["query"].shape[1],
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        model_dtype=tensors["query"].dtype,
        kv_cache_dtype=engine_spelling(str(scalars["cache_dtype"])),
        softmax_scale=softmax_scale(scalars),
        window=int(scalars["window"]) or None,
        is_shuffle=is_shuffle,
    )


def _requests(tensors: Tensors, scalars: Scalars) -> Requests:
    return Requests(
        tensors["query_start_loc"],
        tensors["seq_lens"],
        tensors["block_table"],
        int(scalars["max_query_len"]),
        int(scalars["max_seq_len"]),
    )


def one_view(key_cache: Tensor, value_cache: Tensor, is_shuffle: bool) -> Tensor:
    """K and V `[B, N, H, D]` as the one tensor that an engine has: `[B, H, N, 2 D]`, V behind K in
    a row, or `[B, 2, N, H D]` for SHUFFLE. Raises NotCheckedError where they do not lie so."""
    blocks, tokens, heads, size = key_cache.shape
    apart = value_cache.storage_offset() - key_cache.storage_offset()
    block, token, head, _ = key_cache.stride()
    if is_shuffle:
        row = heads * size
        return key_cache.as_strided((blocks, 2, tokens, row), (block, apart, row, 1))
    if apart != size:
        raise NotCheckedError(f"V begins {apart} elements behind K, expected {size}")
    return key_cache.as_strided((blocks, heads, tokens, 2 * size), (block, head, token, 1))


def as_allocated(output: Tensor) -> Tensor:
    """An output as an engine has it, which allocates one: with the strides of a dense tensor, of
    which those of one row or one head could be others."""
    count, heads, size = output.shape
    row = heads * size
    return output.as_strided(output.shape, (row if count == 1 else output.stride(0), size, 1))
