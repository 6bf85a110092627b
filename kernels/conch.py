"""conch-triton-kernels' reshape_and_cache and copy_blocks."""

import inspect
from pathlib import Path

import torch

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels import conch_attention, pages
from kvfuzz.kernels.adapter import Adapter, content_of
from kvfuzz.kernels.contract import Scalars, Tensors
from kvfuzz.kernels.contract_table import CONVENTIONAL
from kvfuzz.kernels.contracts import bind
from kvfuzz.kernels.fp8 import dialect_of, formats_of, scales_of
from kvfuzz.model.axes import Domain
from kvfuzz.model.steps import CACHES
from kvfuzz.model.target import Quantise, TargetInfo, TargetSpec

KERNEL = "conch/kernels/vllm/reshape_and_cache.py"
COPY = "conch/kernels/vllm/copy_blocks.py"


def adapter(spec: TargetSpec, *, arch: str) -> Adapter:
    """The adapter of a conch target. Raises NotCheckedError where conch is missing."""
    makers = {
        "conch:reshape_and_cache": _writer,
        "conch:copy_blocks": _copy,
        **conch_attention.MAKERS,
    }
    try:
        return makers[spec.name](spec.name, arch)
    except ImportError as error:
        raise NotCheckedError(
            f"{spec.name}: {error}; install it with: pip install 'kvfuzz[thirdparty]'"
        ) from error


def _writer(name: str, arch: str) -> Adapter:
    from conch.kernels.vllm import reshape_and_cache as kernel
    from conch.ops.vllm.reshape_and_cache import reshape_and_cache

    source = Path(str(inspect.getsourcefile(kernel))).read_bytes()
    info = TargetInfo(
        name=name,
        op="reshape_and_cache",
        domain=Domain(
            allowed=CONVENTIONAL
            | {
                "nesting": ("layer_first",),
                "page": ("exact",),
                # It takes page, block and head strides of the cache; SHUFFLE it does not know.
                "order": ("nhd", "hnd"),
                # 'auto', 'fp8' and 'fp8_e4m3' are all that _validate_kv_cache_dtype accepts.
                "cache_dtype": ("fp32", "bf16", "fp16", dialect_of(arch)),
                "scale": scales_of(arch),
            },
            source=f"{KERNEL}: reshape_and_cache_launcher; conch/ops: _validate_kv_cache_dtype",
        ),
        quantise=Quantise("x*(1/s)", f"{KERNEL}: _reshape_and_cache_kernel"),
        partner="builtin:gather_cache",
        content=content_of(source),
    )
    # Its strict mode raises ValueError or asserts; the engine's calls do not ask for it.
    return Adapter(info, bind(reshape_and_cache, "reshape_and_cache"))


def _copy(name: str, arch: str) -> Adapter:
    """Lists of one layer each: its pages as rows, their bytes under a dtype that it can name."""
    from conch.kernels.vllm import copy_blocks as kernel
    from conch.ops.vllm.copy_blocks import copy_blocks

    def call(tensors: Tensors, scalars: Scalars) -> None:
        del scalars
        sides = [pages.rows(tensors[cache]) for cache in CACHES]
        # It knows no fp8: engines hold such a cache as bytes.
        k, v = (side.view(torch.uint8) if side.element_size() == 1 else side for side in sides)
        copy_blocks([k], [v], tensors["block_mapping"])

    info = TargetInfo(
        name=name,
        op="copy_blocks",
        domain=Domain(
            allowed=pages.APART
            | {
                # K and V have one shape and one stride, which it demands.
                "value_size": ("same",),
                "cache_dtype": formats_of(arch),
            },
            source=f"{COPY}: copy_blocks_launcher; conch/ops: _validate_sizes",
        ),
        quantise=Quantise(),
        partner="",
        content=content_of(Path(str(inspect.getsourcefile(kernel))).read_bytes()),
    )
    return Adapter(info, call)
