"""vLLM's unified_attention, by pointers and by tensor descriptors, and the one whose V has another
head size than K (diffkv).

What a function takes is read off its own source. Host arguments are those that the backend beside
it passes.
"""

import inspect
from typing import Any

import torch

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.adapter import Adapter
from kvfuzz.kernels.contract import Scalars, Tensors
from kvfuzz.kernels.fp8 import dialect_of
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.vllm_backends import (
    BLOCKS_OF_16,
    TRITON_ATTN,
    attention_adapter,
    function_of,
    head_sizes_of,
    is_packed,
    layouts_of,
    text_of,
)
from kvfuzz.kernels.vllm_pages import pages_of
from kvfuzz.kernels.vllm_stubs import KVQuantMode
from kvfuzz.model.axes import Domain
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.ops.attended import softmax_scale
from kvfuzz.model.ops.attention import UNIFIED
from kvfuzz.model.ops.attention_axes import QUERIES
from kvfuzz.model.target import Precision
from kvfuzz.model.vocabulary import LAYOUTS, VALUE_SIZES, Levels

FILES = (
    "vllm/v1/attention/ops/triton_unified_attention.py",
    "vllm/attention/ops/triton_unified_attention.py",
)
HELPERS = "vllm/v1/attention/ops/triton_attention_helpers.py"
DIFFKV_FILE = "vllm/v1/attention/ops/triton_unified_attention_diffkv.py"
DIFFKV_BACKEND = "vllm/v1/attention/backends/triton_attn_diffkv.py"
SEGMENTS, FEW_SEQUENCES = 16, 2
"""Parts of a sequence that are summed apart, as the backend has them; and up to how many sequences
it does so: the backend goes by the grid that a device fills, which here is small, so that decodes
of one and two sequences come by one path and those of three by the other."""
INLINE = "token_head_inline"
"""Where the backend keeps the scales of int8_ and fp8_per_token_head."""
SCALED_WEIGHTS = {"e4m3fn": 256.0, "e4m3fnuz": 128.0}


def unified(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:unified_attention. Raises NotCheckedError where a tree has none."""
    return _unified(tree, arch, "unified_attention", {})


def descriptors(tree: SourceTree, arch: str) -> Adapter:
    """The same by tensor descriptors. Raises NotCheckedError where a tree has no such path, and on
    CUDA."""
    if not arch.startswith("gfx"):
        raise NotCheckedError(
            f"{FILES[0]}: by default {TRITON_ATTN} takes descriptors on XPU alone, and the arch is "
            f"{arch}, for which Triton does not pipeline descriptors made in a loop"
        )
    made = _unified(tree, arch, "unified_attention_descriptors", {"use_td": True})
    # A block is a whole number of tiles of 32, or one.
    return made.taking(
        {"block_size": tuple(n for n in BLOCKS_OF_16 if int(n) % 32 == 0 or n == "16")}
    )


def diffkv(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:unified_attention_diffkv. Raises as `unified` does."""
    tree.load(HELPERS)
    module = tree.load(DIFFKV_FILE)
    function = function_of(module, "unified_attention_diffkv")
    parameters, source = inspect.signature(function).parameters, text_of(module)
    # Before it took scales the backend read fp8 caches as if their codes were values.
    formats = ("fp32", "bf16", "fp16", *((dialect_of(arch),) if "k_descale" in parameters else ()))

    def call(tensors: Tensors, scalars: Scalars) -> None:
        is_quantised = DTYPES[str(scalars["cache_dtype"])].is_quantised
        scales = {
            "q_descale": tensors.get("q_scale"),
            "k_descale": tensors["k_scale"],
            "v_descale": tensors["v_scale"],
        }
        function(**_common(tensors, scalars), **(scales if is_quantised else {}))

    backend = (tree.root / DIFFKV_BACKEND).read_text()
    pages = pages_of(tree.root, backend)
    takes = _queries((tree.root / TRITON_ATTN).read_text(), "q_descale" in parameters, arch)
    domain = Domain(
        allowed=pages.allowed
        | {
            "layout": ("content_packed",),
            "order": ("nhd", "hnd"),
            "value_size": VALUE_SIZES,
            "granularity": ("tensor",),
            "block_size": BLOCKS_OF_16,
            "head_size": head_sizes_of(backend),
            "cache_dtype": formats,
            "query": takes,
        },
        forbidden=pages.forbidden,
        source=f"{DIFFKV_FILE}: unified_attention_diffkv; {DIFFKV_BACKEND}: supports_head_size, "
        "supported_kv_cache_dtypes",
    )
    return attention_adapter(
        "unified_attention_diffkv", UNIFIED, call, domain, module, _precision(source, arch)
    )


def _unified(tree: SourceTree, arch: str, name: str, fixed: dict[str, Any]) -> Adapter:
    if (tree.root / HELPERS).is_file():
        tree.load(HELPERS)
    module = tree.load(*FILES)
    function = function_of(module, "unified_attention")
    parameters, source = inspect.signature(function).parameters, text_of(module)
    if missing := [each for each in fixed if each not in parameters]:
        raise NotCheckedError(f"{module.__file__}: no parameter {missing[0]}, absent in this tree")
    path = tree.root / TRITON_ATTN
    backend = path.read_text() if path.is_file() else ""
    pages = pages_of(tree.root, backend)
    has_modes, has_scales = "kv_quant_mode" in parameters, "k_scale_cache" in parameters

    def call(tensors: Tensors, scalars: Scalars) -> None:
        quantised = _scales(tensors, str(scalars["cache_dtype"]))
        if not has_modes:
            quantised.pop("kv_quant_mode")
        function(
            **_common(tensors, scalars),
            max_seqlen_k=scalars["max_seq_len"],
            **quantised,
            **fixed,
        )

    fp8 = dialect_of(arch)
    domain = Domain(
        allowed=pages.allowed
        | {
            "order": ("nhd", "hnd"),
            "value_size": ("same",),
            "granularity": ("tensor", INLINE) if has_scales else ("tensor",),
            "block_size": BLOCKS_OF_16,
            "head_size": head_sizes_of(backend),
            "cache_dtype": ("fp32", "bf16", "fp16", fp8, *(("int8",) if has_scales else ())),
            "query": _queries(backend, "Q_IS_FP8" in source, arch),
        },
        forbidden=(*pages.forbidden, *_inline_elsewhere(backend)),
        source=f"{FILES[0]}: unified_attention; {TRITON_ATTN}: get_supported_kernel_block_sizes, "
        "get_kv_cache_shape, supports_head_size, _ensure_scale_caches, supports_quant_query_input",
    )
    return attention_adapter(name, UNIFIED, call, domain, module, _precision(source, arch))


def _common(tensors: Tensors, scalars: Scalars) -> dict[str, Any]:
    """What all functions of this kind are handed."""
    rows, window = int(scalars["num_rows"]), int(scalars["window"])
    query, output = tensors["query"][:rows], tensors["output"][:rows]
    return {
        "q": query,
        "k": tensors["key_cache"],
        "v": tensors["value_cache"],
        "out": output,
        "cu_seqlens_q": tensors["query_start_loc"],
        "max_seqlen_q": scalars["max_query_len"],
        "seqused_k": tensors["seq_lens"],
        "softmax_scale": softmax_scale(scalars),
        "causal": True,
        "window_size": (window - 1, window - 1) if window else (-1, -1),
        "block_table": tensors["block_table"],
        "softcap": float(scalars["cap"]),
        "sinks": tensors.get("sinks"),
        "alibi_slopes": tensors.get("alibi_slopes"),
        **_parts(output),
    }


def _parts(output: torch.Tensor) -> dict[str, Any]:
    """Room for the parts of sequences, as the backend keeps it, full of NaN."""
    *heads, size = output.shape
    rows, padded = (*heads, SEGMENTS), 1 << (size - 1).bit_length()
    room = [torch.full(shape, torch.nan, device=output.device) for shape in ((*rows, padded), rows)]
    return {
        "seq_threshold_3D": FEW_SEQUENCES,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": room[0],
        "softmax_segm_max": room[1],
        "softmax_segm_expsum": room[1].clone(),
    }


def _scales(tensors: Tensors, cache_dtype: str) -> dict[str, Any]:
    """The scales of a cache and of queries, as the backend hands them over with their mode."""
    k_scale, v_scale = tensors["k_scale"], tensors["v_scale"]
    descales = {"q_descale": None, "k_descale": k_scale, "v_descale": v_scale}
    if not DTYPES[cache_dtype].is_quantised:
        return {"kv_quant_mode": KVQuantMode.NONE, **descales}
    if k_scale.numel() == 1:
        descales["q_descale"] = tensors.get("q_scale")
        return {"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR, **descales}
    is_int8 = DTYPES[cache_dtype].is_integer
    mode = KVQuantMode.INT8_PER_TOKEN_HEAD if is_int8 else KVQuantMode.FP8_PER_TOKEN_HEAD
    caches = {"k_scale_cache": k_scale, "v_scale_cache": v_scale}
    return {"kv_quant_mode": mode, **dict.fromkeys(descales), **caches}


def _inline_elsewhere(backend: str) -> tuple[dict[str, Levels], ...]:
    """Where the backend has no scales inside of pages, and that they are those of a token."""
    has = layouts_of(("blocks_first", "hybrid"), is_packed(backend))
    others = tuple(each for each in LAYOUTS if each not in has)
    return ({"granularity": (INLINE,), "layout": others},) if others else ()


def _queries(backend: str, takes_scale: bool, arch: str) -> Levels:
    """What queries a backend makes: quantised ones on CUDA and, from 0.33.0, where ROCm has fp8
    MFMA (supports_quant_query_input)."""
    has_fp8 = not arch.startswith(("gfx90a", "gfx11"))
    makes = has_fp8 and (not arch.startswith("gfx") or "on_gfx90a" in backend)
    return QUERIES if takes_scale and makes else QUERIES[:1]


def _precision(source: str, arch: str) -> Precision:
    return Precision(
        weights="query",
        weights_scale=SCALED_WEIGHTS if "p_scale" in source else {},
        weights_by_scale="v_token_head_scales" in source,
        dequantised="model",
        scaled_query=None,
        partial="fp32",
        merged="sums",
        fp32_dot="tf32",
        fp8_sums="fp32" if arch.startswith("gfx") else "short",
        tile=16,
        source="P.to(V.dtype), (K_load.to(tl.float32) * tl.load(k_scale)).to(Q.dtype), p_scale, "
        "P * v_token_head_scales, and tl.dot",
    )
