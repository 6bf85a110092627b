"""What the lane's speed is measured on: kernels with inputs of a chosen size, the same each time.

A workload aims at a number of programs; how many its launches really have is for the lane to say.
"""

import enum
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvfuzz.kernels.builtin.gather_cache import gather_cache
from kvfuzz.kernels.builtin.paged_attention import paged_attention
from kvfuzz.kernels.builtin.reshape_and_cache import reshape_and_cache
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.stubs import Stub

Tensors = dict[str, torch.Tensor]
Call = Callable[[Tensors], None]


@dataclass(frozen=True, slots=True)
class Workload:
    """`call` fills the tensors named in `outputs`. `exact`: no float narrows on the way.

    `in_numpy` does the same element by element with whole-batch fancy indexing, or is None.
    """

    tensors: Tensors
    outputs: tuple[str, ...]
    call: Call
    exact: bool
    in_numpy: Call | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """About how many programs, and the heads and head size of the cache."""

    programs: int
    num_kv_heads: int
    head_size: int


BLOCK_SIZE = 16
QUERIES_PER_KV = 2


class _QuantMode(enum.IntEnum):
    """Stands for vLLM's KVQuantMode in the attention kernels: nothing is quantised here."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


@cache
def _tree(root: Path) -> SourceTree:
    platform = {
        "is_rocm": lambda: True,
        "is_cuda": lambda: False,
        "is_cuda_alike": lambda: True,
        "is_xpu": lambda: False,
        "is_cpu": lambda: False,
        "is_device_capability_family": lambda family: False,
        "has_device_capability": lambda capability, device_id=0: True,
        "fp8_dtype": lambda: torch.float8_e4m3fnuz,
        "is_fp8_fnuz": lambda: True,
    }
    quantised = {"is_quantized_kv_cache": lambda name: name.startswith("fp8")}
    known = {
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.platforms": {"current_platform": Stub("vllm.platforms.current_platform", platform)},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.utils.torch_utils": quantised,
        "vllm.v1.kv_cache_interface": quantised | {"KVQuantMode": _QuantMode},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "FP8_DTYPE": torch.float8_e4m3fnuz,
            "get_fp8_min_max": lambda: (-224.0, 224.0),
        },
        "vllm._aiter_ops": {
            "rocm_aiter_ops": Stub(
                "vllm._aiter_ops.rocm_aiter_ops", {"is_shuffle_kv_cache_enabled": lambda: False}
            )
        },
    }
    return SourceTree("vllm", root, known=known, also=("aiter",))


def _from_tree(root: Path, file: str, function: str) -> Any:
    tree = _tree(root)
    path = root / "vllm/v1/attention" / file
    # Helpers of attention kernels are @triton.jit functions beside them, not stubs.
    for helper in re.findall(r"from vllm\.v1\.attention\.ops\.(triton_\w+)", path.read_text()):
        tree.load(f"vllm/v1/attention/ops/{helper}.py")
    return getattr(tree.load(f"vllm/v1/attention/{file}"), function)


def _caches(size: Size, blocks: int, dtype: torch.dtype, random: torch.Generator) -> Tensors:
    """Interleaved K and V pages, so that block strides are not what shapes would suggest."""
    shape = (blocks, 2, BLOCK_SIZE, size.num_kv_heads, size.head_size)
    both = torch.randn(shape, generator=random).to(dtype)
    return {"key_cache": both[:, 0], "value_cache": both[:, 1]}


def _paged(size: Size, tokens: int, dtype: torch.dtype) -> tuple[Tensors, torch.Generator]:
    """A cache of sequences with `tokens` tokens in all, and the metadata of one gather of them."""
    random = torch.Generator().manual_seed(7)
    length = min(tokens, 64)
    lengths = [length] * (tokens // length) + ([tokens % length] if tokens % length else [])
    width = -(-length // BLOCK_SIZE)
    blocks = len(lengths) * width + 2
    table = torch.randperm(blocks, generator=random)[: len(lengths) * width]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    rows = (tokens, size.num_kv_heads, size.head_size)
    return {
        **_caches(size, blocks, dtype, random),
        "key": torch.randn(rows, generator=random).to(dtype),
        "value": torch.randn(rows, generator=random).to(dtype),
        "block_table": table.reshape(len(lengths), width).to(torch.int32),
        "seq_starts": torch.zeros(len(lengths), dtype=torch.int32),
        "cu_seqlens_kv": ends.to(torch.int32),
        "token_to_batch": torch.repeat_interleave(torch.tensor(lengths)).to(torch.int32),
        "slot_mapping": torch.randperm(blocks * BLOCK_SIZE, generator=random)[:tokens],
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
    }, random


def _bits(tensor: torch.Tensor) -> Any:
    """The elements as integers in NumPy, with the view's strides."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()


def _flat_and_offsets(tensor: torch.Tensor) -> tuple[Any, int]:
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return _bits(whole), tensor.storage_offset()


def _element_offsets(cache: torch.Tensor, block: Any, token: Any) -> Any:
    """Element offsets `[rows, heads, dims]` of the slots; any strides, as the kernels take them."""
    _, _, heads, dims = cache.shape
    s_block, s_token, s_head, s_dim = cache.stride()
    return (
        (block * s_block + token * s_token)[:, None, None]
        + np.arange(heads)[:, None] * s_head
        + np.arange(dims) * s_dim
    )


def _gather_in_numpy(t: Tensors) -> None:
    sequence = t["token_to_batch"].numpy()
    start = t["cu_seqlens_kv"].numpy()[sequence]
    position = np.arange(len(sequence)) - start + t["seq_starts"].numpy()[sequence]
    block_size = t["key_cache"].shape[1]
    block = t["block_table"].numpy()[sequence, position // block_size].astype(np.int64)
    for cache_name, rows in (("key_cache", "key"), ("value_cache", "value")):
        flat, base = _flat_and_offsets(t[cache_name])
        at = _element_offsets(t[cache_name], block, position % block_size)
        _bits(t[rows])[...] = flat[base + at]


def _write_in_numpy(t: Tensors) -> None:
    slot = t["slot_mapping"].numpy()
    kept = slot >= 0
    block, token = np.divmod(slot[kept], t["key_cache"].shape[1])
    for cache_name, rows in (("key_cache", "key"), ("value_cache", "value")):
        flat, base = _flat_and_offsets(t[cache_name])
        at = _element_offsets(t[cache_name], block, token)
        flat[base + at] = _bits(t[rows])[kept]


def _our_gather(size: Size, _: Path | None) -> Workload:
    tensors, _random = _paged(size, max(size.programs // size.num_kv_heads, 1), torch.bfloat16)

    def call(t: Tensors) -> None:
        gather_cache(
            t["key_cache"],
            t["value_cache"],
            t["key"],
            t["value"],
            t["block_table"],
            t["seq_starts"],
            t["cu_seqlens_kv"],
            t["token_to_batch"],
            t["k_scale"],
            t["v_scale"],
            "NHD",
        )

    return Workload(tensors, ("key", "value"), call, True, _gather_in_numpy)


def _our_write(size: Size, _: Path | None) -> Workload:
    tensors, _random = _paged(size, max(size.programs // size.num_kv_heads, 1), torch.bfloat16)

    def call(t: Tensors) -> None:
        reshape_and_cache(
            t["key"],
            t["value"],
            t["key_cache"],
            t["value_cache"],
            t["slot_mapping"],
            t["k_scale"],
            t["v_scale"],
            "NHD",
        )

    return Workload(tensors, ("key_cache", "value_cache"), call, True, _write_in_numpy)


def _vllm_gather(size: Size, root: Path | None) -> Workload:
    assert root is not None
    function = _from_tree(root, "backends/rocm_aiter_fa.py", "cp_mha_gather_cache")
    tensors, _random = _paged(size, max(size.programs // size.num_kv_heads, 1), torch.bfloat16)

    def call(t: Tensors) -> None:
        function(
            key_cache=t["key_cache"],
            value_cache=t["value_cache"],
            key=t["key"],
            value=t["value"],
            block_tables=t["block_table"],
            k_scales=t["k_scale"],
            v_scales=t["v_scale"],
            cu_seqlens_kv=t["cu_seqlens_kv"],
            token_to_batch=t["token_to_batch"],
            seq_starts=t["seq_starts"],
            dequant=False,
            kv_cache_layout="NHD",
            total_tokens=len(t["token_to_batch"]),
        )

    return Workload(tensors, ("key", "value"), call, True, _gather_in_numpy)


def _vllm_write(size: Size, root: Path | None) -> Workload:
    assert root is not None
    file = "ops/triton_reshape_and_cache_flash.py"
    function = _from_tree(root, file, "triton_reshape_and_cache_flash")
    # One program stores all heads of a token that fit a tile: as a rule, all.
    tensors, _random = _paged(size, size.programs, torch.bfloat16)

    def call(t: Tensors) -> None:
        function(
            t["key"],
            t["value"],
            t["key_cache"],
            t["value_cache"],
            t["slot_mapping"],
            "auto",
            t["k_scale"],
            t["v_scale"],
        )

    return Workload(tensors, ("key_cache", "value_cache"), call, True, _write_in_numpy)


def _decode_step(size: Size, sequences: int) -> Tensors:
    """One query token for each of `sequences` sequences of 1 to 64 tokens, in fp16."""
    random = torch.Generator().manual_seed(11)
    width = 64 // BLOCK_SIZE
    blocks = sequences * width + 2
    heads = size.num_kv_heads * QUERIES_PER_KV
    query = torch.randn((sequences, heads, size.head_size), generator=random).half()
    table = torch.randperm(blocks, generator=random)[: sequences * width]
    return {
        **_caches(size, blocks, torch.float16, random),
        "query": query,
        "output": torch.zeros_like(query),
        "block_table": table.reshape(sequences, width).to(torch.int32),
        "seq_lens": torch.randint(1, 65, (sequences,), generator=random, dtype=torch.int32),
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
    }


def _our_attention(size: Size, _: Path | None) -> Workload:
    heads = size.num_kv_heads * QUERIES_PER_KV
    tensors = _decode_step(size, max(size.programs // heads, 1))

    def call(t: Tensors) -> None:
        paged_attention(
            t["query"],
            t["key_cache"],
            t["value_cache"],
            t["output"],
            t["block_table"],
            t["seq_lens"],
            t["k_scale"],
            t["v_scale"],
            size.head_size**-0.5,
        )

    return Workload(tensors, ("output",), call, False)


def _vllm_attention(size: Size, root: Path | None) -> Workload:
    assert root is not None
    function = _from_tree(root, "ops/triton_unified_attention.py", "unified_attention")
    rows_per_program = 16 // QUERIES_PER_KV
    # Its grid has one row of programs per sequence and one per full block of queries.
    sequences = int(size.programs / size.num_kv_heads / (1 + 1 / rows_per_program))
    tensors = _decode_step(size, max(sequences, 1))
    tensors["cu_seqlens_q"] = torch.arange(len(tensors["seq_lens"]) + 1, dtype=torch.int32)

    def call(t: Tensors) -> None:
        function(
            q=t["query"],
            k=t["key_cache"],
            v=t["value_cache"],
            out=t["output"],
            cu_seqlens_q=t["cu_seqlens_q"],
            max_seqlen_q=1,
            seqused_k=t["seq_lens"],
            max_seqlen_k=64,
            softmax_scale=size.head_size**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=t["block_table"],
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )

    return Workload(tensors, ("output",), call, False)


def _vllm_decode(size: Size, root: Path | None) -> Workload:
    assert root is not None
    function = _from_tree(root, "ops/triton_decode_attention.py", "decode_attention_fwd")
    splits = 2
    # Two launches: heads of the cache times splits, then query heads, for each sequence.
    per_sequence = size.num_kv_heads * (splits + QUERIES_PER_KV)
    sequences = max(size.programs // per_sequence, 1)
    tensors = _decode_step(size, sequences)
    heads = size.num_kv_heads * QUERIES_PER_KV
    tensors["lse"] = torch.zeros(sequences, heads)
    tensors["attn_logits"] = torch.zeros(sequences, heads, splits, size.head_size + 1)

    def call(t: Tensors) -> None:
        function(
            t["query"],
            t["key_cache"],
            t["value_cache"],
            t["output"],
            t["lse"],
            t["block_table"],
            t["seq_lens"],
            t["attn_logits"],
            splits,
            size.head_size**-0.5,
            BLOCK_SIZE,
        )

    return Workload(tensors, ("output", "lse"), call, False)


def _vllm_merge(size: Size, root: Path | None) -> Workload:
    assert root is not None
    function = _from_tree(root, "ops/triton_merge_attn_states.py", "merge_attn_states")
    random = torch.Generator().manual_seed(13)
    heads = size.num_kv_heads * QUERIES_PER_KV
    tokens = max(size.programs // heads, 1)

    def state(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    shape = (tokens, heads, size.head_size)
    tensors = {
        "prefix": state(*shape).half(),
        "suffix": state(*shape).half(),
        "output": torch.zeros(shape).half(),
        "prefix_lse": state(heads, tokens),
        "suffix_lse": state(heads, tokens),
    }

    def call(t: Tensors) -> None:
        function(t["output"], t["prefix"], t["prefix_lse"], t["suffix"], t["suffix_lse"])

    return Workload(tensors, ("output",), call, False)


KERNELS: dict[str, Callable[[Size, Path | None], Workload]] = {
    "builtin:gather_cache": _our_gather,
    "builtin:reshape_and_cache": _our_write,
    "builtin:paged_attention": _our_attention,
    "vllm:cp_mha_gather_cache": _vllm_gather,
    "vllm:triton_reshape_and_cache_flash": _vllm_write,
    "vllm:unified_attention": _vllm_attention,
    "vllm:decode_attention_fwd": _vllm_decode,
    "vllm:merge_attn_states": _vllm_merge,
}
