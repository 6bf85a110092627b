"""vLLM's own descriptions of a cache plan: spec objects, groups and backends of a source tree.

Classes are the tree's, so that page sizes and shapes are its own; what an engine would have read
off a model's configuration comes from the plan.
"""

import ast
import inspect
import logging
import math
import textwrap
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.adapter import content_of
from kvfuzz.kernels.plan_targets import PlanAdapter, bind
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.torch_dtypes import TORCH_DTYPES
from kvfuzz.kernels.vllm_stubs import known
from kvfuzz.model.axes import Domain
from kvfuzz.model.cache_plan import CacheLayer, CachePlan
from kvfuzz.model.plan_axes import MORE_TOKENS, TOKENS
from kvfuzz.model.target import Quantise, TargetInfo
from kvfuzz.model.vocabulary import Levels

INTERFACE = "vllm/v1/kv_cache_interface.py"
BACKENDS = "vllm/v1/attention/backends"
ONE_WINDOW = 1024
"""Tokens of a window or a chunk: no page depends on it."""

LOADED_FIRST = (
    "vllm/utils/math_utils.py",
    "vllm/v1/kv_cache_spec_registry.py",
    "vllm/v1/kv_cache_layout.py",
    INTERFACE,
    "vllm/v1/attention/backend.py",
)
"""Files that the others take classes and numbers from; what a tree lacks of them is left out."""


def dtype_size(dtype: torch.dtype) -> int:
    """get_dtype_size of vllm/utils/torch_utils.py: bytes of an element."""
    return dtype.itemsize


class Specs:
    """The classes of a tree, and what they make of a layer."""

    def __init__(self, root: Path, arch: str) -> None:
        values: dict[str, dict[str, object]] = {
            name: dict(found) for name, found in known(arch).items()
        }
        values["vllm.utils.torch_utils"]["get_dtype_size"] = dtype_size
        self.tree = SourceTree("vllm", root, known=values, also=("aiter",))
        for file in LOADED_FIRST:
            if (root / file).is_file():
                self.tree.load(file)
        self.interface = self.tree.load(INTERFACE)

    def spec(self, layer: CacheLayer) -> Any:
        """The KVCacheSpec of a layer."""
        make = self.interface
        if not layer.is_attention:
            return make.MambaSpec(
                block_size=layer.block_size,
                shapes=tuple(state.shape for state in layer.states),
                dtypes=tuple(TORCH_DTYPES[state.dtype] for state in layer.states),
                page_size_padded=layer.page_padded or None,
            )
        common = {
            "block_size": layer.block_size,
            "num_kv_heads": layer.num_kv_heads,
            "head_size": layer.head_size,
            "dtype": TORCH_DTYPES[layer.cache_dtype],
            "page_size_padded": layer.page_padded or None,
        }
        if layer.head_size_v not in (0, layer.head_size):
            common["head_size_v"] = layer.head_size_v
        if layer.kind == "sliding":
            return make.SlidingWindowSpec(**common, sliding_window=ONE_WINDOW)
        if layer.kind == "chunked":
            return make.ChunkedLocalAttentionSpec(**common, attention_chunk_size=ONE_WINDOW)
        names = {"full": "FullAttentionSpec", "cross": "CrossAttentionSpec"}
        return getattr(make, names.get(layer.kind, "MLAAttentionSpec"))(**common)

    def groups(self, plan: CachePlan, backend_of: Callable[[CacheLayer], Any]) -> list[Any]:
        """The plan's groups as AttentionGroup has them: spec, backend, names of the layers."""
        return [
            SimpleNamespace(
                kv_cache_group_id=number,
                kv_cache_spec=self.spec(plan.layer(group[0])),
                backend=backend_of(plan.layer(group[0])),
                layer_names=list(group),
            )
            for number, group in enumerate(plan.groups)
        ]

    def config(self, plan: CachePlan) -> Any:
        """KVCacheConfig, as far as runners read it."""
        size = {each.name: each.nbytes for each in plan.allocations}
        return SimpleNamespace(
            num_blocks=plan.num_blocks,
            kv_cache_groups=[SimpleNamespace(layer_names=list(group)) for group in plan.groups],
            kv_cache_tensors=[
                SimpleNamespace(
                    size=size[each.allocation],
                    shared_by=list(each.layers),
                    offset=each.offset if each.packed else 0,
                    block_stride=each.block_stride if each.packed else 0,
                )
                for each in plan.placements
            ],
        )


class MlaBackend:
    """Stands for the MLA backends, which all take `[num_blocks, block_size, head_size]`
    (MLACommonBackend.get_kv_cache_shape in vllm/model_executor/layers/attention)."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, **_: object
    ) -> tuple[int, ...]:
        """The shape of one layer's cache."""
        return (num_blocks, block_size, head_size)

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        """The order of memory: as it is."""
        return (0, 1, 2)

    @staticmethod
    def get_kv_cache_block_dim(*_: object, **__: object) -> int:
        """Blocks come first."""
        return 0


REFUSALS = (AssertionError, NotImplementedError)
BLOCKS_OF_16: Levels = (*(each for each in TOKENS if int(each) % 16 == 0), MORE_TOKENS)
"""Every backend's get_kv_cache_shape raises for other sizes."""

Parts = dict[str, dict[str, Tensor]]


def plan_target(
    name: str,
    file: str,
    specs: Specs,
    function: Callable[..., Any],
    domain: Domain,
    *,
    op: str = "cache_views",
) -> PlanAdapter:
    """The adapter of a function of a tree, whose source is `file`."""
    content = content_of((specs.tree.root / file).read_bytes())
    info = TargetInfo(name, op, domain, Quantise(), "", content)
    return PlanAdapter(info, bind(function, op), REFUSALS)


def method(path: Path, owner: str, name: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """The method `name` of the class `owner` in a file that need not import, as a function.

    `namespace` holds what its body refers to. Raises NotCheckedError where the file has none.
    """
    source = path.read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == name:
                    text = textwrap.dedent(ast.get_source_segment(source, part, padded=True) or "")
                    scope = dict(namespace)
                    code = "from __future__ import annotations\n" + text
                    exec(compile(code, f"{path}:{name}", "exec"), scope)
                    found: Callable[..., Any] = scope[name]
                    return found
    raise NotCheckedError(f"{path} has no {owner}.{name}: absent in this tree")


def has_method(path: Path, owner: str, name: str) -> bool:
    """Whether a class of a file has a method."""
    if not path.is_file():
        return False
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    return any(
        isinstance(part, ast.FunctionDef) and part.name == name
        for node in classes
        if node.name == owner
        for part in node.body
    )


def scope_of(module: ModuleType, **more: object) -> dict[str, Any]:
    """What a method of a runner refers to: the classes of `module`, and torch."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return {
        **public,
        "torch": torch,
        "math": math,
        "prod": math.prod,
        "Any": typing.Any,
        "get_dtype_size": dtype_size,
        "logger": logging.getLogger("vllm"),
        **more,
    }


def takes(function: Callable[..., Any]) -> set[str]:
    """The names of a function's parameters."""
    return set(inspect.signature(function).parameters)
