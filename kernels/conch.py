"""conch-triton-kernels' reshape_and_cache."""

import inspect
from pathlib import Path

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.adapter import Adapter, content_of
from kvfuzz.kernels.contracts import CONVENTIONAL, bind
from kvfuzz.kernels.fp8 import dialect_of, scales_of
from kvfuzz.model.axes import Domain
from kvfuzz.model.target import Quantise, TargetInfo, TargetSpec

KERNEL = "conch/kernels/vllm/reshape_and_cache.py"


def adapter(spec: TargetSpec, *, arch: str) -> Adapter:
    """The adapter of conch:reshape_and_cache. Raises NotCheckedError where conch is missing."""
    try:
        from conch.kernels.vllm import reshape_and_cache as kernel
        from conch.ops.vllm.reshape_and_cache import reshape_and_cache
    except ImportError as error:
        raise NotCheckedError(
            f"{spec.name}: {error}; install it with: pip install 'kvfuzz[thirdparty]'"
        ) from error
    source = Path(str(inspect.getsourcefile(kernel))).read_bytes()
    info = TargetInfo(
        name=spec.name,
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
