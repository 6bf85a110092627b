"""vLLM's decode attention over MLA's latent, called as its Triton MLA backend does.

What the function takes is read off its parameters, and how it is called off the backend beside it:
into how many parts a sequence is split, which scales are handed over, and what caches hold. The
stride between pages is no page where those of several layers lie side by side in each block, or are
padded: the cross-layer caches of MLA (`get_kv_cache_stride_order`), which vLLM had, gave up because
of what this kernel made of them (#37032), and has again (#45111).
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.adapter import Adapter
from kvfuzz.kernels.contract import Scalars, Tensors
from kvfuzz.kernels.fp8 import dialect_of
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.vllm_backends import LEAST_DOT, content_of_module, function_of, returned
from kvfuzz.model.axes import Domain
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.model.ops.attended import softmax_scale
from kvfuzz.model.ops.latent_axes import SIZES_OF
from kvfuzz.model.ops.mla import MLA_OP
from kvfuzz.model.ops.mla_axes import MLA_LATENT_SIZES, QUERY_HEADS
from kvfuzz.model.target import DeadBytes, Precision, Quantise, TargetInfo
from kvfuzz.model.vocabulary import BLOCK_SIZES, Levels

DECODE = (
    "vllm/v1/attention/ops/triton_decode_attention.py",
    "vllm/attention/ops/triton_decode_attention.py",
)
BACKEND = "vllm/v1/attention/backends/mla/triton_mla.py"

V_OF_K = 2.0
"""What V's scale of a layer is of K's where vLLM computes both of the same rows: it divides by
K_SCALE_CONSTANT = 200 and V_SCALE_CONSTANT = 100 (vllm/envs.py; calc_kv_scales of MLAAttention)."""

Splits = Callable[[int], int]
"""From the longest sequence that the host knows of to the parts that each is split into."""


def decode(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:decode_attention. Raises NotCheckedError where a tree lacks the function
    or the backend, or the backend does not say how it splits sequences."""
    module = tree.load(*DECODE)
    # The platform stands for ROCm, whatever the arch.
    module.is_hip_ = arch.startswith("gfx")  # type: ignore[attr-defined]
    function = function_of(module, "decode_attention_fwd")
    backend = tree.find(BACKEND).read_text()
    taken = inspect.signature(function).parameters
    splits, fixed = _splits(backend)
    takes_scales = "k_scale" in taken
    v_of_k = V_OF_K if "v_scale=layer._v_scale" in backend else 1.0
    options = {"is_mla": True} if "is_mla" in taken and "is_mla=True" in backend else {}

    def call(tensors: Tensors, scalars: Scalars) -> None:
        query, output, scale = (tensors[name] for name in ("query", "output", "k_scale"))
        rows, latent = tensors["kv_cache"].unsqueeze(2), output.shape[-1]
        parts = splits(int(scalars["max_seq_len"]))
        shape = (*query.shape[:2], parts, latent + 1)
        # A scale of one is no computed one.
        is_one = scale.view(torch.int32).item() == FP32_ONE
        scales = {"k_scale": scale, "v_scale": scale if is_one else scale * v_of_k}
        function(
            query,
            rows,
            rows[..., :latent],
            output,
            tensors["lse"],
            tensors["block_table"],
            tensors["seq_lens"],
            torch.empty(shape, dtype=torch.float32, device=query.device),
            parts,
            softmax_scale(scalars),
            rows.shape[1],
            logit_cap=float(scalars["cap"]),
            **(scales if takes_scales else {}),
            **options,
        )

    where = Path(str(module.__file__)).relative_to(tree.root)
    info = TargetInfo(
        "vllm:decode_attention",
        MLA_OP,
        _domain(backend, str(where), arch, takes_scales=takes_scales),
        Quantise(),
        "",
        content_of_module(module),
        dead=DeadBytes(source=f"{where}: loads of tokens behind split_kv_end are masked"),
        precision=Precision(
            weights="model",
            dequantised="model",
            scaled_query=None,
            partial="fp32",
            merged="lse",
            fp32_dot="tf32",
            # A part may be one token.
            tile=1,
            source=f"{where}: p.to(v.dtype), (k.to(tl.float32) * ks).to(q.dtype), and "
            "e_max + tl.log(e_sum), which _fwd_kernel_stage2 merges by",
        ),
        batch_invariant=fixed,
    )
    return Adapter(info, call, (AssertionError,))


def _splits(backend: str) -> tuple[Splits, bool]:
    """How a backend splits sequences, and whether into as many parts whatever the batch."""
    if found := re.search(r"num_kv_splits = 1 if [\w.()]+ else (\d+)", backend):
        count = int(found[1])
        return lambda longest: count, True
    if found := re.search(r"(?:min_work_per_split|_MIN_WORK_PER_SPLIT) = (\d+)", backend):
        work = int(found[1])
        # No device has so few compute units that what is drawn here reaches their number.
        return lambda longest: triton.next_power_of_2(max(1, longest // work)), False
    raise NotCheckedError(f"{BACKEND} does not say how many num_kv_splits there are")


def _domain(backend: str, where: str, arch: str, *, takes_scales: bool) -> Domain:
    held = re.search(r"supported_kv_cache_dtypes[^=]*= \[(.*?)\]", backend, re.DOTALL)
    fp8 = takes_scales and held is not None and "fp8" in held[1]
    latents, ropes = _sizes(backend)
    # Both parts of a row are sides of dots of their own.
    least = 1 if arch.startswith("gfx") else LEAST_DOT
    return Domain(
        allowed={
            "cache_dtype": ("bf16", "fp16", *((dialect_of(arch),) if fp8 else ())),
            "model_dtype": ("bf16", "fp16"),
            "block_size": _block_sizes(backend),
            "latent_size": latents,
            "rope_size": tuple(size for size in ropes if int(size) >= least),
            # A head alone goes to the kernel for one query head a KV head, which adds products up
            # in the query's dtype: of those sums there is no bound.
            "query_heads": tuple(heads for heads in QUERY_HEADS if heads != "1"),
            "lse_dtype": ("model",) if "dtype=q.dtype" in _line(backend, "lse = ") else ("fp32",),
            # As many rows of queries as there are sequences: a batch is padded with lengths.
            "row_count": ("exact",),
        },
        source=f"{where}: decode_attention_fwd; {BACKEND}: supported_dtypes, "
        "supported_kv_cache_dtypes, get_supported_head_sizes, get_supported_kernel_block_sizes",
    )


def _line(source: str, start: str) -> str:
    """The line that starts so, after blanks; empty where there is none."""
    found = re.search(rf"^ *{re.escape(start)}.*$", source, re.MULTILINE)
    return found[0] if found else ""


def _sizes(backend: str) -> tuple[Levels, Levels]:
    """The sizes of both parts of a row: a backend that does not say takes MLA's 576 alone, as its
    base class does (MLACommonBackend)."""
    if returned(backend, "get_supported_head_sizes") == "[]":
        return MLA_LATENT_SIZES, SIZES_OF["mla"][1]
    return ("512",), ("64",)


def _block_sizes(backend: str) -> Levels:
    """Those of get_supported_kernel_block_sizes; any, where the backend has none."""
    unit = re.search(r"return \[MultipleOf\((\d+)\)\]", backend)
    return tuple(str(size) for size in BLOCK_SIZES if size % (int(unit[1]) if unit else 1) == 0)
