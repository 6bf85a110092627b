"""conch-triton-kernels' attention: paged decode, varlen, and the unified attention that it carries.

conch keeps scores, weights and sums in the dtype of the output, so that little can be asked of it
in half precision, and all in fp32.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvfuzz.kernels.adapter import Adapter, Call, content_of
from kvfuzz.kernels.contract import Scalars, Tensors
from kvfuzz.kernels.contract_table import CONTRACTS
from kvfuzz.kernels.fp8 import dialect_of
from kvfuzz.model.axes import Domain
from kvfuzz.model.dtypes import engine_spelling
from kvfuzz.model.ops.attention import PAGED, UNIFIED
from kvfuzz.model.target import Precision, Quantise, TargetInfo
from kvfuzz.model.vocabulary import BLOCK_SIZES, HEAD_SIZES, Levels

KEPT_NARROW = Precision(
    weights="model",
    dequantised="model",
    scaled_query=None,
    partial="model",
    merged="sums",
    sums="model",
    fp32_dot="tf32",
    source="conch/kernels/attention: what is kept between tiles has the dtype of the output",
)
AS_VLLM = Precision(
    weights="model",
    dequantised="model",
    scaled_query=None,
    partial="fp32",
    merged="sums",
    fp32_dot="tf32",
    source="conch/third_party/vllm/unified_attention.py: P.to(V.dtype), tl.dot",
)
BLOCKS: Levels = tuple(str(n) for n in BLOCK_SIZES if n & (n - 1) == 0 and n >= 16)
"""A block is one side of a dot, which Triton gives 16 rows at least, and a power of two."""
HEADS: Levels = tuple(str(n) for n in HEAD_SIZES if n >= 16)
"""A head, padded to a power of two, is one side of a dot."""
PLAIN: dict[str, Levels] = {
    "window": ("none",),
    "sinks": ("none",),
    "alibi_slopes": ("none",),
    "query": ("model",),
}


def paged(name: str, arch: str) -> Adapter:
    """The adapter of conch:paged_attention."""
    from conch.kernels.attention import paged_attention as kernel
    from conch.ops.attention.paged_attention import paged_attention

    def call(tensors: Tensors, scalars: Scalars) -> None:
        count = tensors["seq_lens"].shape[0]
        paged_attention(
            tensors["query"][:count],
            tensors["key_cache"],
            tensors["value_cache"],
            tensors["block_table"],
            tensors["seq_lens"],
            output=tensors["output"][:count],
            **_numbers(PAGED, tensors, scalars),
        )

    return _adapter(name, PAGED, call, kernel, arch, KEPT_NARROW)


def varlen(name: str, arch: str) -> Adapter:
    """The adapter of conch:varlen_attention."""
    from conch.kernels.attention import varlen_attention as kernel
    from conch.ops.attention.varlen_attention import varlen_attention

    def call(tensors: Tensors, scalars: Scalars) -> None:
        rows = int(scalars["num_rows"])
        varlen_attention(
            tensors["query"][:rows],
            tensors["key_cache"],
            tensors["value_cache"],
            tensors["query_start_loc"],
            scalars["max_query_len"],
            tensors["seq_lens"],
            scalars["max_seq_len"],
            tensors["block_table"],
            output=tensors["output"][:rows],
            causal=True,
            q_scale=torch.ones(1, device=tensors["query"].device),
            **_numbers(UNIFIED, tensors, scalars),
        )

    made = _adapter(name, UNIFIED, call, kernel, arch, KEPT_NARROW)
    # Where long sequences are split, the merge takes the number of a sequence for its row: a
    # request without tokens would write the row behind the batch, which an engine pads away.
    return made.taking({"idle": ("none",)})


def unified(name: str, arch: str) -> Adapter:
    """The adapter of conch:unified_attention, which is vLLM's of some earlier day."""
    from conch.third_party.vllm import unified_attention as kernel

    def call(tensors: Tensors, scalars: Scalars) -> None:
        rows, window = int(scalars["num_rows"]), int(scalars["window"])
        numbers = _numbers(UNIFIED, tensors, scalars)
        kernel.unified_attention(
            q=tensors["query"][:rows],
            k=tensors["key_cache"],
            v=tensors["value_cache"],
            out=tensors["output"][:rows],
            cu_seqlens_q=tensors["query_start_loc"],
            max_seqlen_q=scalars["max_query_len"],
            seqused_k=tensors["seq_lens"],
            max_seqlen_k=scalars["max_seq_len"],
            softmax_scale=numbers["scale"],
            causal=True,
            window_size=(window - 1, window - 1) if window else (-1, -1),
            block_table=tensors["block_table"],
            softcap=numbers["softcap"],
            q_descale=None,
            k_descale=tensors["k_scale"],
            v_descale=tensors["v_scale"],
        )

    made = _adapter(name, UNIFIED, call, kernel, arch, AS_VLLM)
    # Rows of a tile are query tokens times query heads, in a power of two.
    return made.taking({"window": ("none", "wide", "cuts"), "queries_per_kv": ("1", "2", "4", "8")})


def _numbers(op: str, tensors: Tensors, scalars: Scalars) -> dict[str, Any]:
    contract = CONTRACTS[op]
    return {
        "scale": contract.value("softmax_scale", tensors, scalars),
        "softcap": contract.value("softcap", tensors, scalars),
        "kv_cache_dtype": engine_spelling(str(scalars["cache_dtype"])),
        "k_scale": tensors["k_scale"],
        "v_scale": tensors["v_scale"],
    }


def _adapter(
    name: str, op: str, call: Call, kernel: Any, arch: str, precision: Precision
) -> Adapter:
    _on_amd(arch)
    file = Path(str(inspect.getsourcefile(kernel)))
    domain = Domain(
        allowed=PLAIN
        | {
            "order": ("nhd", "hnd"),
            "value_size": ("same",),
            "granularity": ("tensor",),
            "block_size": BLOCKS,
            "head_size": HEADS,
            "cache_dtype": ("fp32", "bf16", "fp16", dialect_of(arch)),
        },
        source=f"conch/{file.parent.name}/{file.name}: what its launcher asserts",
    )
    info = TargetInfo(
        name,
        op,
        domain,
        Quantise(),
        "",
        content_of(file.read_bytes()),
        batch_invariant=False,
        precision=precision,
    )
    return Adapter(info, call, (AssertionError,))


def _on_amd(arch: str) -> None:
    """conch asks torch which GPU there is; the cpu lane stands for an AMD one."""
    if not arch.startswith("gfx"):
        return
    from conch.platforms import current_platform
    from conch.platforms.platform import PlatformEnum

    current_platform.platform_enum = PlatformEnum.AMD


MAKERS: dict[str, Callable[[str, str], Adapter]] = {
    "conch:paged_attention": paged,
    "conch:varlen_attention": varlen,
    "conch:unified_attention": unified,
}
