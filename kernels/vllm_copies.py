"""vLLM's kernels that copy, swap or clear by absolute addresses, driven as the engine drives them.

The addresses are computed by the engine's own code where that is in the same file (KVBlockZeroer,
collect_mamba_copy_meta); for swap_blocks they are those of the pages, as its caller makes them.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvfuzz.kernels import pages
from kvfuzz.kernels.adapter import Adapter
from kvfuzz.kernels.contract import Scalars, Tensors
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.vllm_backends import content_of_module, function_of
from kvfuzz.model.axes import Domain
from kvfuzz.model.target import Quantise, TargetInfo
from kvfuzz.model.vocabulary import PAGES, Levels

SWAP = "vllm/v1/kv_offload/cpu/swap_blocks_triton.py"
ZERO = "vllm/v1/worker/utils.py"
STATES = "vllm/v1/worker/mamba_utils.py"
CHUNK = 4096
"""Bytes that a program of swap_blocks moves at once; its caller chooses."""
LAYER, GROUP = "layer", 0


def swap(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:swap_blocks. Raises NotCheckedError where a tree has no such kernel."""
    del arch
    module = tree.load(SWAP)
    kernel: Any = function_of(module, "_swap_blocks_kernel")

    def call(tensors: Tensors, scalars: Scalars) -> None:
        del scalars
        here = pages.runs(tensors["key_cache"], tensors["value_cache"])
        there = pages.runs(tensors["key_target"], tensors["value_target"])
        jobs = [
            (one.address + source * one.stride, other.address + target * other.stride, one.nbytes)
            for source, target in tensors["block_mapping"].tolist()
            for one, other in zip(here, there, strict=True)
        ]
        device = tensors["key_cache"].device
        columns = [
            torch.tensor(column, dtype=torch.int64, device=device)
            for column in zip(*jobs, strict=True)
        ]
        count = len(jobs)
        kernel[(min(module.NUM_SMS, count),)](*columns, count, BYTES_PER_CHUNK=CHUNK)

    domain = Domain(
        allowed={
            "layout": (*pages.APART["layout"], "content_packed"),
            "nesting": pages.APART["nesting"],
        },
        # A page is moved in one piece, which it must be on both sides.
        forbidden=({"layout": ("content_packed",), "host": ("kv_first",)},),
        source=f"{SWAP}: _swap_blocks_kernel, swap_blocks_batch",
    )
    return _adapter("vllm:swap_blocks", "swap_blocks", call, domain, module)


def zero(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:zero_blocks. Raises NotCheckedError where a tree has no KVBlockZeroer."""
    del arch
    module = tree.load(ZERO)
    zeroer = function_of(module, "KVBlockZeroer")
    kernel: Any = function_of(module, "_zero_kv_blocks_kernel")
    asks_backend = "get_kv_cache_block_dim" in inspect.getsource(zeroer)
    for name, value in _IN_PLACE.items():
        setattr(module, name, value)
    # Before it had sizes apart from strides, it cleared all bytes up to the next block.
    clears_strides = "PAGE_SIZE_EL" in inspect.signature(kernel.fn).parameters

    def call(tensors: Tensors, scalars: Scalars) -> None:
        del scalars
        kv, block_dim = _kv(tensors["key_cache"], tensors["value_cache"], asks_backend)
        made = _zeroer_of(zeroer, kv, block_dim)
        made.zero_block_ids(tensors["block_ids"].tolist())

    domain = Domain(
        allowed={
            "nesting": NESTINGS_OF_VIEWS[: 1 if clears_strides else 2 if asks_backend else 3],
            # Padding belongs to the block that is cleared: an engine loses nothing with it.
            "page": PAGES[:1] if clears_strides else PAGES,
        },
        # K and V are one tensor: of one size, but where they share a content dimension.
        forbidden=(
            {"layout": ("kv_first", "blocks_first", "hybrid"), "value_size": ("narrower", "wider")},
        ),
        source=f"{ZERO}: KVBlockZeroer, _zero_kv_blocks_kernel",
    )
    return _adapter("vllm:zero_blocks", "zero_blocks", call, domain, module)


NESTINGS_OF_VIEWS: Levels = ("layer_first", "block_first", "head_first")
"""The last two came with packed caches, and with views that have blocks first (LHBNC). In
block_head_first a block's layers lie between its heads, and all are cleared, which an engine
means: who gets a block gets it in every layer."""


class _Spec:
    """What the zeroer asks of a layer's spec: kernels and manager have one block size."""

    block_size = num_kv_heads = head_size = 1


def _largest_power_of_2(number: int) -> int:
    return number & -number


def _tensor_of(data: list[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype, device=device)


_IN_PLACE = {
    "FullAttentionSpec": _Spec,
    "AttentionSpec": _Spec,
    "largest_power_of_2_divisor": _largest_power_of_2,
    "async_tensor_h2d": _tensor_of,
}
"""What the zeroer uses of other files."""


def _kv(k: torch.Tensor, v: torch.Tensor, by_backend: bool) -> tuple[torch.Tensor, int]:
    """K and V as the one tensor that a layer has, and its dimension of blocks: `[B, 2, N, H, D]`,
    which backends may have with the first two in the other order, or `[B, N, H, Dk + Dv]`."""
    apart = (v.data_ptr() - k.data_ptr()) // k.element_size()
    block, token, head, dim = k.stride()
    content = k.shape[3] + v.shape[3]
    if apart == k.shape[3] and min(token, head) >= content:
        shape = (*k.shape[:3], content)
        return k.as_strided(shape, (block, token, head, dim), k.storage_offset()), 0
    shape5, strides = (len(k), 2, *k.shape[1:]), (block, apart, token, head, dim)
    kv = k.as_strided(shape5, strides, k.storage_offset())
    return (kv.transpose(0, 1), 1) if by_backend else (kv, 0)


def _zeroer_of(zeroer: Any, kv: torch.Tensor, block_dim: int) -> Any:
    """The zeroer of one layer; it is told what its release asks for."""
    backend = SimpleNamespace(get_kv_cache_block_dim=lambda *sizes, **more: block_dim)
    wraps = "kv_cache[0]" in inspect.getsource(zeroer)
    told: dict[str, Any] = {
        "device": kv.device,
        "pin_memory": False,
        "attn_groups_iter": [_group(backend)],
        "kernel_block_sizes": [_Spec.block_size],
        "cache_dtype": "auto",
        "runner_only_attn_layers": set(),
        "static_forward_context": {LAYER: SimpleNamespace(kv_cache=[kv] if wraps else kv)},
        "num_blocks": kv.shape[block_dim],
    }

    def asked(function: Any) -> dict[str, Any]:
        names = inspect.signature(function).parameters
        return {name: value for name, value in told.items() if name in names}

    made = zeroer(**asked(zeroer))
    if hasattr(made, "init_meta"):
        made.init_meta(**asked(made.init_meta))
    return made


def _group(backend: Any) -> SimpleNamespace:
    return SimpleNamespace(
        kv_cache_spec=_Spec(),
        kv_cache_group_id=GROUP,
        backend=backend,
        layer_names=[LAYER],
        kernel_block_stride=0,
    )


def states(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:copy_states. Raises NotCheckedError where a tree has no such copy."""
    del arch
    module = tree.load(STATES)
    collect: Any = function_of(module, "collect_mamba_copy_meta")
    launch: Any = function_of(module, "do_mamba_copy_block")
    wraps = "kv_cache[0]" in inspect.getsource(collect)
    by_type = "mamba_type" in inspect.getsource(collect)
    if by_type:
        kind = SimpleNamespace(mamba_type=LAYER)
        setattr(module, "_get_mamba_spec_for_layer", lambda group, layer: kind)  # noqa: B010

    def call(tensors: Tensors, scalars: Scalars) -> None:
        del scalars
        caches = [tensors[name] for name in sorted(tensors) if name.startswith("state_")]
        pairs = tensors["block_mapping"].tolist()
        functions: Any = (_whole_state,) * len(caches)
        buffers = SimpleNamespace(offset=0)
        for name, dtype in (("src_ptrs", np.int64), ("dst_ptrs", np.int64), ("sizes", np.int32)):
            setattr(buffers, name, _Buffer(len(pairs) * len(caches), dtype, caches[0].device))
        config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[LAYER])])
        context = {LAYER: SimpleNamespace(kv_cache=[caches] if wraps else caches)}
        for pair in pairs:
            # Each is the running state of a request that goes on in its next block.
            request = SimpleNamespace(block_ids=[pair])
            told = {LAYER: functions} if by_type else functions
            collect(buffers, config, told, [GROUP], 0, 1, 0, request, context)
        launch(buffers)

    domain = Domain(source=f"{STATES}: collect_mamba_copy_meta, batch_memcpy")
    return _adapter("vllm:copy_states", "copy_states", call, domain, module)


def _whole_state(
    state: torch.Tensor, block_ids: list[int], index: int, accepted: int
) -> SimpleNamespace:
    """What is copied of a state when a request has accepted one token: the whole of its block."""
    block = state[block_ids[index + accepted - 1]]
    return SimpleNamespace(start_addr=block.data_ptr(), num_elements=block.numel())


class _Buffer:
    """What the engine's CpuGpuBuffer is to a copy."""

    def __init__(self, count: int, dtype: Any, device: torch.device) -> None:
        self.np = np.zeros(count, dtype)
        self._device = device

    def copy_to_gpu(self, count: int) -> torch.Tensor:
        """The first `count` numbers, on the device of the caches."""
        return torch.from_numpy(self.np[:count].copy()).to(self._device)


def _adapter(name: str, op: str, call: Any, domain: Domain, module: Any) -> Adapter:
    info = TargetInfo(name, op, domain, Quantise(), "", content_of_module(module))
    return Adapter(info, call, (AssertionError,))
