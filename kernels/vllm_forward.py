"""AITER's backend of a vLLM tree as a whole: metadata by its own builder, then its own forward.

`AiterFlashAttentionImpl.forward` is called for a layer that shares another layer's cache. Its
Triton kernels are those of the tree; AITER's compiled functions have stand-ins in torch. Around
both stands as little of an engine as they read: layers, a config, a batch.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.aiter_stand_ins import Aiter
from kvfuzz.kernels.source_loader import Known, SourceTree
from kvfuzz.kernels.vllm_backends import AITER_FA, function_of
from kvfuzz.kernels.vllm_stubs import known

MERGE = "vllm/v1/attention/ops/triton_merge_attn_states.py"
BASES = "vllm/v1/attention/backend.py"
LOADED_FIRST = (
    "vllm/utils/math_utils.py",
    "vllm/v1/kv_cache_layout.py",
    BASES,
    "vllm/v1/attention/backends/utils.py",
    MERGE,
    "vllm/v1/attention/ops/merge_attn_states.py",
)
"""Files whose own code takes part, each before the first that imports it."""
TOKENS_PER_ROUND = "_CP_TOKENS_PER_ITER_ROCM"
"""What the backend calls the tokens of context that it gathers at a time, of all requests."""
ROUND = 32
"""Those of a request here. vLLM has 32 Ki for all requests, which no context of a case fills."""
CDNA_GENERATIONS = {"gfx90a": 2, "gfx942": 3}
"""Later ones are 4."""
TARGET = "target"


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer that attends over another one's cache, as its backend reads it."""

    kv_cache: Tensor
    k_scale: Tensor
    v_scale: Tensor
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    model_dtype: torch.dtype
    kv_cache_dtype: str
    softmax_scale: float
    window: int | None
    is_shuffle: bool


@dataclasses.dataclass(frozen=True)
class Requests:
    """A batch as an engine describes it to the builder of metadata."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int
    max_seq_len: int


@dataclasses.dataclass(frozen=True)
class Step:
    """What the layers that share a cache have in common in one step of an engine."""

    sharers: Sequence[Any]
    kv_cache: Tensor
    metadata: Any

    def forward(self, number: int, query: Tensor, output: Tensor) -> None:
        """Attend as sharer `number` does, which has no K and V, into the first rows of `output`."""
        layer = self.sharers[number]
        layer.impl.forward(layer, query, None, None, self.kv_cache, self.metadata, output)


class Backend:
    """AITER's backend out of the tree at `root`, as on `arch`.

    Raises NotCheckedError where the tree has none, or one of another shape.
    """

    def __init__(self, root: Path, arch: str) -> None:
        self.aiter = Aiter()
        self._tree = SourceTree("vllm", root, known=self._known(arch), also=("aiter",))
        for file in LOADED_FIRST:
            self._tree.load(file)
        self.module: ModuleType = self._tree.load(AITER_FA)
        if not hasattr(self.module, TOKENS_PER_ROUND):
            raise NotCheckedError(f"{self.module.__file__} has no {TOKENS_PER_ROUND}")
        # A class body asks what stands for AITER at import, methods ask the module's own name.
        vars(self.module).update(rocm_aiter_ops=self.aiter, torch=_Torch(self.aiter))
        self._common: Any = function_of(self._tree.load(BASES), "CommonAttentionMetadata")

    def step(self, layer: Layer, requests: Requests, sharers: int) -> Step:
        """One step of an engine: a batch's metadata, and layers that share the cache of `layer`."""
        self.aiter.shuffle = layer.is_shuffle
        vars(self.module)[TOKENS_PER_ROUND] = ROUND * len(requests.seq_lens)
        names = [f"sharer.{number}" for number in range(sharers)]
        layers = {name: self._layer(layer, name) for name in (TARGET, *names)}
        common = self._metadata(layer, requests)
        builder = self.module.AiterFlashAttentionMetadataBuilder(
            SimpleNamespace(block_size=layer.block_size),
            list(layers),
            _config(layer, layers, requests, common.num_actual_tokens),
            layer.kv_cache.device,
        )
        for workspace in ("extend_workspace", "kv_sharing_workspace"):
            if (memory := getattr(builder, workspace, None)) is not None:
                memory.fill_(math.nan)
        return Step([layers[name] for name in names], layer.kv_cache, builder.build(0, common))

    def _layer(self, layer: Layer, name: str) -> Any:
        shares = None if name == TARGET else TARGET
        k_scale, v_scale = layer.k_scale.reshape(()), layer.v_scale.reshape(())
        return SimpleNamespace(
            layer_name=name,
            impl=self.module.AiterFlashAttentionImpl(
                num_heads=layer.num_heads,
                head_size=layer.head_size,
                scale=layer.softmax_scale,
                num_kv_heads=layer.num_kv_heads,
                alibi_slopes=None,
                sliding_window=layer.window,
                kv_cache_dtype=layer.kv_cache_dtype,
                kv_sharing_target_layer_name=shares,
            ),
            kv_cache=layer.kv_cache,
            kv_sharing_target_layer_name=shares,
            kv_cache_update_bypass=False,
            _k_scale=k_scale,
            _v_scale=v_scale,
            _k_scale_float=float(k_scale),
            _v_scale_float=float(v_scale),
        )

    def _metadata(self, layer: Layer, requests: Requests) -> Any:
        """CommonAttentionMetadata, as far as the tree knows its fields."""
        starts, lengths = requests.query_start_loc.cpu(), requests.seq_lens.cpu()
        given = {
            "query_start_loc": requests.query_start_loc,
            "query_start_loc_cpu": starts,
            "seq_lens": requests.seq_lens,
            "seq_lens_cpu_upper_bound": lengths,
            "num_reqs": len(lengths),
            "num_actual_tokens": int(starts[-1]),
            "max_query_len": requests.max_query_len,
            "max_seq_len": requests.max_seq_len,
            "block_table_tensor": requests.block_table,
            "slot_mapping": _slots(requests, layer.block_size),
            "causal": True,
        }
        fields = {field.name for field in dataclasses.fields(self._common)}
        return self._common(**{name: value for name, value in given.items() if name in fields})

    def _known(self, arch: str) -> Known:
        """What the backend and the files around it use, beyond what single kernels do."""
        values = {name: dict(each) for name, each in known(arch).items()}
        alone = SimpleNamespace(world_size=1, rank_in_group=0)
        generation = CDNA_GENERATIONS.get(arch, 4)
        more: dict[str, dict[str, object]] = {
            "vllm.config": {
                "get_layers_from_vllm_config": _layers_of,
                "get_current_vllm_config_or_none": lambda: None,
            },
            "vllm.distributed.parallel_state": {
                "get_dcp_group": lambda: alone,
                "get_pcp_group": lambda: alone,
                "get_dcp_world_size_and_rank": lambda enabled: (1, 0),
            },
            "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
            "vllm.utils.torch_utils": {
                "async_tensor_h2d": _to_device,
                "get_dtype_size": lambda dtype: dtype.itemsize,
            },
            "vllm.platforms.rocm": {"get_cdna_version": lambda: generation},
            "vllm._custom_ops": {"merge_attn_states": self._merge},
            "aiter.ops.triton.unified_attention": {
                "unified_attention": self.aiter.unified_attention
            },
            "aiter.ops.triton.gluon.pa_decode_gluon": {
                "get_recommended_splits": lambda sequences, heads: 1,
                "pa_decode_gluon": self.aiter.pa_decode_gluon,
            },
        }
        for name, each in more.items():
            values[name] = {**values.get(name, {}), **each}
        return values

    def _merge(self, *arguments: Any) -> None:
        """The compiled op has the arguments, and the meaning, of the tree's Triton kernel."""
        merge: Callable[..., None] = function_of(self._tree.load(MERGE), "merge_attn_states")
        merge(*arguments)


class _Torch:
    """torch for the backend's module: AITER's ops in torch.ops, and no pinned memory."""

    def __init__(self, aiter: Aiter) -> None:
        self.ops = SimpleNamespace(aiter=aiter)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        """torch.zeros."""
        return torch.zeros(*shape, **options)


def _config(
    layer: Layer, layers: Mapping[str, object], requests: Requests, num_tokens: int
) -> object:
    """VllmConfig, as far as the builder reads it; workspaces hold one batch, and no more."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: layer.num_heads,
            get_num_kv_heads=lambda parallel: layer.num_kv_heads,
            get_head_size=lambda: layer.head_size,
            dtype=layer.model_dtype,
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype=layer.kv_cache_dtype),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=num_tokens, max_num_seqs=len(requests.seq_lens)
        ),
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


def _slots(requests: Requests, block_size: int) -> Tensor:
    """Where the target layer wrote K and V of each query token; int64."""
    starts, lengths = requests.query_start_loc.long(), requests.seq_lens.long()
    new = starts[1:] - starts[:-1]
    request = torch.repeat_interleave(torch.arange(len(new), device=new.device), new)
    position = torch.arange(len(request), device=new.device) + (lengths - starts[1:])[request]
    block = requests.block_table[request, position // block_size].long()
    return block * block_size + position % block_size


def _to_device(
    data: Tensor, device: torch.device | str, dtype: torch.dtype | None = None
) -> Tensor:
    # vllm/utils/torch_utils.py: async_tensor_h2d, whose copy is another tensor.
    return data.to(device=device, dtype=dtype, copy=True)


def _layers_of(config: Any, _type: object, names: Sequence[str] | None = None) -> dict[str, Any]:
    # vllm/config: get_layers_from_vllm_config, where all layers are attention.
    layers: dict[str, Any] = config.compilation_config.static_forward_context
    return {name: each for name, each in layers.items() if names is None or name in names}
