"""The few values of vLLM that its kernel files really use, with their sources in vLLM.

Everything else is a stub that fails when used. The platform is ROCm, because that is where
`rocm_aiter_fa` defines its kernels at all; `arch` decides the fp8 dialect.
"""

import enum
import logging

import torch
import triton
import triton.language as tl

from kvfuzz.kernels.fp8 import dialect_of
from kvfuzz.kernels.source_loader import Known
from kvfuzz.kernels.stubs import Stub
from kvfuzz.model.dtypes import DTYPES

COMPUTE_UNITS = 304
"""Those of an MI300X: kernels that split a sequence ask how many programs run at once."""
LOG2E = 1.4426950408889634

TORCH_FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}


class KVQuantMode(enum.IntEnum):
    """vllm/v1/kv_cache_interface.py; attention kernels take its numbers as constexprs."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


class _Logger(logging.Logger):
    """vllm/logger.py: a logger that says some things once."""

    def warning_once(self, *message: object) -> None:
        """Nothing."""

    debug_once = info_once = warning_once


def _is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    # Exact for the two spellings that kvfuzz passes, 'auto' and 'fp8_*'.
    return kv_cache_dtype.startswith("fp8")


def known(arch: str) -> Known:
    """Real values by module name and attribute, as they are on `arch`."""
    dialect = dialect_of(arch)
    fp8 = TORCH_FP8[dialect]
    # quant_utils.get_fp8_min_max: 224, not torch's 240, on fnuz platforms.
    limit = 224.0 if dialect == "e4m3fnuz" else DTYPES[dialect].max_finite
    platform = {
        "is_rocm": lambda: True,
        "is_cuda": lambda: False,
        "is_cuda_alike": lambda: True,
        "is_xpu": lambda: False,
        "is_cpu": lambda: False,
        "fp8_dtype": lambda: fp8,
        "is_fp8_fnuz": lambda: dialect == "e4m3fnuz",
        # Every CDNA architecture reports at least (9, 0): past the 89 asked for before fp8.
        "has_device_capability": lambda capability, device_id=0: True,
        "is_device_capability_family": lambda family, device_id=0: False,
        "get_device_capability": lambda device_id=0: (9, 4),
        "num_compute_units": lambda device_id=0: COMPUTE_UNITS,
    }
    quantised = {"is_quantized_kv_cache": _is_quantized_kv_cache}
    torch_utils = {**quantised, "direct_register_custom_op": lambda **_: None}
    return {
        "vllm.triton_utils": {"triton": triton, "tl": tl, "LOG2E": LOG2E, "LOGE2": 1 / LOG2E},
        "vllm.platforms": {"current_platform": Stub("vllm.platforms.current_platform", platform)},
        "vllm.logger": {"init_logger": _Logger},
        "vllm.utils.torch_utils": torch_utils,
        "vllm.platforms.rocm": {
            "_ON_GFX942": arch == "gfx942",
            "_ON_GFX950": arch == "gfx950",
            "on_gfx942": lambda: arch == "gfx942",
            "on_gfx950": lambda: arch == "gfx950",
            # The C++ kernel is none that Triton compiles.
            "use_rocm_custom_paged_attention": lambda *arguments: False,
        },
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.model_executor.layers.batch_invariant": {"vllm_is_batch_invariant": lambda: False},
        # It marks a function, for CUDA graphs.
        "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": lambda f: f},
        "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": -1},
        "vllm.attention.backends.utils": {"PAD_SLOT_ID": -1},
        # Named in an annotation that is evaluated.
        "vllm.v1.utils": {"CpuGpuBuffer": type("CpuGpuBuffer", (), {})},
        # It wraps a launch, to compile ahead.
        "vllm.model_executor.warmup.jit_warmup": {"kernel_launcher": lambda function: function},
        "vllm.v1.kv_cache_interface": quantised | {"KVQuantMode": KVQuantMode},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "FP8_DTYPE": fp8,
            "get_fp8_min_max": lambda: (-limit, limit),
        },
        # Asked for in a class body (which pages to advertise), not by the kernels.
        "vllm._aiter_ops": {
            "rocm_aiter_ops": Stub(
                "vllm._aiter_ops.rocm_aiter_ops", {"is_shuffle_kv_cache_enabled": lambda: False}
            )
        },
    }
