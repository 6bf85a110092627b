"""What the backends of a vLLM tree say about the caches that their kernels are handed, and how an
adapter is made of a function: shared by all adapters of cache kernels.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.adapter import Adapter, Call, content_of
from kvfuzz.model.axes import Domain
from kvfuzz.model.target import Precision, Quantise, TargetInfo
from kvfuzz.model.vocabulary import BLOCK_SIZES, HEAD_SIZES, Levels

AITER_FA = "vllm/v1/attention/backends/rocm_aiter_fa.py"
TRITON_ATTN = "vllm/v1/attention/backends/triton_attn.py"
FLASH = (
    "vllm/v1/attention/ops/triton_reshape_and_cache_flash.py",
    "vllm/attention/ops/triton_reshape_and_cache_flash.py",
)

BLOCKS_OF_16: Levels = tuple(str(n) for n in BLOCK_SIZES if n % 16 == 0)
"""Both backends refuse other block sizes (get_kv_cache_shape, get_supported_kernel_block_sizes)."""
POWERS_OF_TWO: Levels = tuple(str(d) for d in HEAD_SIZES if d & (d - 1) == 0)
"""What tl.arange(0, head_size) can be."""
MODELS_HEADS: Levels = tuple(str(d) for d in HEAD_SIZES if d <= 256)
"""Larger rows are MLA's, which have functions of their own."""
LEAST_DOT = 16
"""Elements of two bytes that tl.dot sums at least on CUDA; on ROCm one is enough (triton:
third_party/nvidia and amd, backend/compiler.py, min_dot_size)."""

REFUSALS = (AssertionError, NotImplementedError)
"""The functions assert on what they do not support."""


def kernel_adapter(
    name: str,
    op: str,
    call: Call,
    *,
    domain: Domain,
    partner: str,
    content: str,
    quantise: Quantise | None = None,
) -> Adapter:
    """The adapter of a function of a tree; `partner` executes the inverse op, if any does."""
    info = TargetInfo(name, op, domain, quantise or Quantise(), partner, content)
    return Adapter(info, call, REFUSALS)


def attention_adapter(
    name: str,
    op: str,
    call: Call,
    domain: Domain,
    module: ModuleType,
    precision: Precision,
) -> Adapter:
    """The adapter of attention by a module of a tree, which sums as its batch decides."""
    info = TargetInfo(
        f"vllm:{name}",
        op,
        domain,
        Quantise(),
        "",
        content_of_module(module),
        batch_invariant=False,
        precision=precision,
    )
    return Adapter(info, call, REFUSALS)


def function_of(module: ModuleType, name: str) -> Callable[..., Any]:
    """The function `name` of a module. Raises NotCheckedError where there is none."""
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        raise NotCheckedError(f"{module.__file__} has no function {name}: absent in this tree")
    return function


def kernel_source(module: ModuleType, name: str) -> str:
    """The source of the Triton kernel `name` of a module. Raises as `function_of` does."""
    kernel: Any = function_of(module, name)
    return str(inspect.getsource(kernel.fn))


def text_of(module: ModuleType) -> str:
    """The source of a module."""
    return Path(str(module.__file__)).read_text()


def content_of_module(module: ModuleType) -> str:
    """The hash that names the file of a module."""
    return content_of(Path(str(module.__file__)).read_bytes())


def is_packed(backend: str) -> bool:
    """Whether a backend takes K and V out of one content dimension (#44455)."""
    return re.search(r"transpose\(1, 2\)\s*\.split\(", backend) is not None


def returned(source: str, method: str) -> str:
    """What the first method of that name returns, as source; empty where there is none."""
    found = re.search(rf"def {method}\(.*?return (.*?)\n\n", source, re.DOTALL)
    return found[1] if found else ""


def head_sizes_of(backend: str) -> Levels:
    """The head sizes of models that a backend takes, by supports_head_size or
    get_supported_head_sizes: all of them, where it has neither."""
    if listed := re.findall(r"\d+", returned(backend, "get_supported_head_sizes")):
        return tuple(size for size in MODELS_HEADS if size in listed)
    least = re.fullmatch(r"head_size >= (\d+)", returned(backend, "supports_head_size"))
    return tuple(size for size in MODELS_HEADS if int(size) >= (int(least[1]) if least else 0))


def layouts_of(layouts: Levels, packed: bool) -> Levels:
    """`layouts`, and content_packed where a backend takes that."""
    return (*layouts, "content_packed") if packed else layouts
