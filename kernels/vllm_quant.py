"""vLLM's writer that chooses the scale of each head of a token (int8_ and fp8_per_token_head)."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.adapter import Adapter
from kvfuzz.kernels.contract import Scalars, Tensors
from kvfuzz.kernels.contract_table import CONVENTIONAL
from kvfuzz.kernels.contracts import bind
from kvfuzz.kernels.fp8 import dialect_of
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.vllm_backends import (
    BLOCKS_OF_16,
    FLASH,
    TRITON_ATTN,
    content_of_module,
    function_of,
    is_packed,
    kernel_adapter,
    kernel_source,
    layouts_of,
)
from kvfuzz.kernels.vllm_pages import pages_of
from kvfuzz.model.axes import Domain
from kvfuzz.model.scene import QUANT_OP
from kvfuzz.model.target import Quantise
from kvfuzz.model.vocabulary import VALUE_SIZES

FUNCTION = "triton_reshape_and_cache_flash_per_token_head_quant"
KERNEL = "_reshape_cache_per_token_head"
LEAST_SCALE = 1e-6
"""`tl.maximum(..., 1e-6)` in the kernel."""
MODE = "kv_quant_mode"
"""The parameter by which later releases tell int4, which has a kernel of its own, from the rest."""


class _Mode:
    """Any mode but the one with the kernel of its own."""

    INT4_PER_TOKEN_HEAD = object()


def per_token_head(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:per_token_head_quant.

    Raises NotCheckedError where a tree has no such function, and on an arch where Triton's `/` is
    no IEEE division: its scales have no exact value there.
    """
    if not arch.startswith("gfx"):
        raise NotCheckedError(
            f"vllm:per_token_head_quant on {arch}: fp32 division is approximate on CUDA, so that "
            "no scale is exact; use --lane cpu, or a ROCm device"
        )
    module = tree.load(*FLASH)
    function = function_of(module, FUNCTION)
    where = FLASH[0]
    path = tree.root / TRITON_ATTN
    backend = path.read_text() if path.is_file() else ""
    pages = pages_of(tree.root, backend)
    limits = module._PER_TOKEN_HEAD_QUANT_PARAMS
    fp8 = dialect_of(arch)
    domain = Domain(
        allowed=CONVENTIONAL
        | pages.allowed
        | {
            "order": ("nhd", "hnd"),
            "layout": layouts_of(("blocks_first", "hybrid"), is_packed(backend)),
            "block_size": BLOCKS_OF_16,
            "cache_dtype": ("int8", fp8),
            # The backend keeps each scale behind the elements that it is for.
            "granularity": ("token_head_inline",),
            "value_size": VALUE_SIZES
            if "head_size_v" in kernel_source(module, KERNEL)
            else ("same",),
        },
        forbidden=pages.forbidden,
        source=f"{where}: {FUNCTION}; {TRITON_ATTN}: _ensure_scale_caches, get_kv_cache_shape",
    )
    return kernel_adapter(
        "vllm:per_token_head_quant",
        QUANT_OP,
        _with_mode(module, function),
        domain=domain,
        quantise=Quantise(
            "x*(1/s)",
            f"{where}: {KERNEL}; integers are rounded half away from zero (#45361)",
            rounding="half_away_fp32",
            scale_floor=LEAST_SCALE,
            largest={fp8: limits[module.FP8_DTYPE][0], "int8": limits[torch.int8][0]},
        ),
        partner="",
        content=content_of_module(module),
    )


def _with_mode(module: Any, function: Callable[..., Any]) -> Callable[[Tensors, Scalars], None]:
    """The call of `function`, with a mode where it takes one."""
    if MODE not in inspect.signature(function).parameters:
        return bind(function, QUANT_OP)
    module.KVQuantMode = _Mode
    return bind(partial(function, kv_quant_mode=None), QUANT_OP)
