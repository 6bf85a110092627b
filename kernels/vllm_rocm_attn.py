"""vLLM's two kernels of ROCM_ATTN, over x-packed pages: one for decodes, one for prompts behind a
context.

What a function takes is read off its own source. Host arguments are those that the backend beside
it passes.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from kvfuzz.kernels.adapter import Adapter
from kvfuzz.kernels.contract import Scalars, Tensors
from kvfuzz.kernels.fp8 import dialect_of
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.vllm_backends import (
    BLOCKS_OF_16,
    POWERS_OF_TWO,
    attention_adapter,
    function_of,
    head_sizes_of,
    text_of,
)
from kvfuzz.model.axes import Domain
from kvfuzz.model.dtypes import engine_spelling
from kvfuzz.model.ops.attended import softmax_scale
from kvfuzz.model.ops.attention import PAGED, UNIFIED
from kvfuzz.model.target import Precision

PREFIX_FILES = (
    "vllm/v1/attention/ops/prefix_prefill.py",
    "vllm/attention/ops/prefix_prefill.py",
)
CHUNKED_FILES = (
    "vllm/v1/attention/ops/chunked_prefill_paged_decode.py",
    "vllm/attention/ops/chunked_prefill_paged_decode.py",
)
BACKEND = "vllm/v1/attention/backends/rocm_attn.py"
PRECISION = Precision(
    weights="model",
    dequantised="model",
    scaled_query=None,
    partial="fp32",
    merged="sums",
    fp32_dot="tf32",
    tile=16,
    source="P.to(V.dtype), (K_load.to(tl.float32) * tl.load(k_scale)).to(Q.dtype), and tl.dot",
)


def paged(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:kernel_paged_attention_2d, which decodes for ROCM_ATTN. Raises
    NotCheckedError where a tree has none."""
    tree.load(*PREFIX_FILES)
    module = tree.load(*CHUNKED_FILES)
    function = function_of(module, "chunked_prefill_paged_decode")

    def call(tensors: Tensors, scalars: Scalars) -> None:
        # With one query token a sequence it launches nothing else, and does not read new K and V,
        # whose shape it asks for: some tensor of that shape stands for them.
        query = tensors["query"]
        count, heads = tensors["seq_lens"].shape[0], tensors["key_cache"].shape[1]
        starts = torch.arange(count + 1, dtype=torch.int32, device=query.device)
        new = query[:count, :heads]
        _chunked(function, tensors, scalars, starts, (new, new))

    domain = _x_packed(tree, module, function, arch)
    return attention_adapter("paged_attention_2d", PAGED, call, domain, module, PRECISION)


def chunked(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:chunked_prefill_paged_decode: prompts and what extends a context by
    context_attention_fwd, decodes by the other. Raises as `paged` does."""
    tree.load(*PREFIX_FILES)
    module = tree.load(*CHUNKED_FILES)
    function = function_of(module, "chunked_prefill_paged_decode")

    def call(tensors: Tensors, scalars: Scalars) -> None:
        starts = tensors["query_start_loc"]
        _chunked(function, tensors, scalars, starts, _new_tokens(tensors, scalars))

    domain = _x_packed(tree, module, function, arch)
    name = "chunked_prefill_paged_decode"
    made = attention_adapter(name, UNIFIED, call, domain, module, PRECISION)
    # A request without tokens would write the row behind the batch, which an engine pads away.
    return made.taking({"idle": ("none",)})


def _chunked(
    function: Callable[..., Any],
    tensors: Tensors,
    scalars: Scalars,
    query_start_loc: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
) -> None:
    options = {"use_interleaved_v_cache": True} if _is_interleaved(scalars) else {}
    rows = int(scalars["num_rows"])
    function(
        query=tensors["query"][:rows],
        key=new[0],
        value=new[1],
        output=tensors["output"][:rows],
        kv_cache_dtype=engine_spelling(str(scalars["cache_dtype"])),
        key_cache=tensors["key_cache"],
        value_cache=_as_transposed(tensors["value_cache"]),
        block_table=tensors["block_table"],
        query_start_loc=query_start_loc,
        seq_lens=tensors["seq_lens"],
        max_seq_len=scalars["max_seq_len"],
        max_query_len=scalars["max_query_len"],
        k_scale=tensors["k_scale"],
        v_scale=tensors["v_scale"],
        alibi_slopes=tensors.get("alibi_slopes"),
        sliding_window=scalars["window"] or None,
        sm_scale=softmax_scale(scalars),
        sinks=tensors.get("sinks"),
        **options,
    )


def _as_transposed(value_cache: torch.Tensor) -> torch.Tensor:
    """V as the function gets it, `[num_blocks, num_kv_heads, head_size, block_size]`; an
    interleaved one is reinterpreted."""
    if value_cache.dim() == 4:
        return value_cache
    blocks, heads, runs, size, run = value_cache.shape
    tokens = runs * run
    strides = (*value_cache.stride()[:2], tokens, 1)
    return value_cache.as_strided((blocks, heads, size, tokens), strides)


def _is_interleaved(scalars: Scalars) -> bool:
    return scalars["kv_cache_layout"] == "XPACKED_V"


def _new_tokens(tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the query tokens `[T, H, D]`, which an engine has beside the cache, out of it."""
    key_cache, value_cache = tensors["key_cache"], tensors["value_cache"]
    size = key_cache.shape[3]
    starts, lens = tensors["query_start_loc"].tolist(), tensors["seq_lens"].tolist()
    rows: list[int] = []
    positions: list[int] = []
    for number, length in enumerate(lens):
        count = starts[number + 1] - starts[number]
        rows += [number] * count
        positions += range(length - count, length)
    device = key_cache.device
    row, position = (torch.tensor(each, device=device) for each in (rows, positions))
    block = tensors["block_table"][row, position // size].long()
    slot = position % size
    key = _elements(key_cache)[block, :, :, slot, :].flatten(2)
    if _is_interleaved(scalars):
        run = value_cache.shape[4]
        value = _elements(value_cache)[block, :, slot // run, :, slot % run]
    else:
        value = _elements(value_cache)[block, :, :, slot]
    dtype = tensors["query"].dtype
    if key_cache.element_size() > 1:
        return key, value
    key, value = (each.view(key_cache.dtype).float() for each in (key, value))
    return (key * tensors["k_scale"]).to(dtype), (value * tensors["v_scale"]).to(dtype)


def _elements(cache: torch.Tensor) -> torch.Tensor:
    """A cache in a dtype that torch can index: an fp8 one as bytes."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def _x_packed(
    tree: SourceTree, module: ModuleType, function: Callable[..., Any], arch: str
) -> Domain:
    """What ROCM_ATTN hands the function: K in chunks of 16 bytes and V by its dims, or both in
    chunks; K pages before V pages, or what the hybrid interleave makes of them."""
    interleaves = "use_interleaved_v_cache" in inspect.signature(function).parameters
    # Before a kernel had tiles of its own it took a whole block, by tl.arange.
    any_block = "PHYSICAL_BLOCK_SIZE" in text_of(module)
    return Domain(
        allowed={
            "layout": ("kv_first", "hybrid"),
            "order": ("x_packed", "x_packed_v") if interleaves else ("x_packed",),
            "nesting": ("layer_first",),
            "page": ("exact",),
            "value_size": ("same",),
            "granularity": ("tensor",),
            "head_size": head_sizes_of(tree.find(BACKEND).read_text()),
            "block_size": BLOCKS_OF_16
            if any_block
            else tuple(n for n in BLOCKS_OF_16 if n in POWERS_OF_TWO),
            "model_dtype": ("bf16", "fp16"),
            "cache_dtype": ("bf16", "fp16", dialect_of(arch)),
            "softcap": ("none",),
            "query": ("model",),
        },
        # No model with ALiBi has a window; its function refuses ALiBi with sinks.
        forbidden=({"alibi_slopes": ("some",), "window": ("wide", "cuts")},),
        source=f"{CHUNKED_FILES[0]}: chunked_prefill_paged_decode; {BACKEND}: split_kv_cache, "
        "get_supported_head_sizes",
    )
