"""vLLM's slot mappings: the kernels of its two model runners.

V2 maps all groups of a batch at once, through tables of pointers, and knows requests that own no
blocks in later releases. V1 maps one group, whose rows are the requests in order. What each takes
is read off its source.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.adapter import Adapter
from kvfuzz.kernels.contract import Scalars, Tensors
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.stubs import Stub
from kvfuzz.kernels.vllm_backends import content_of_module, kernel_source
from kvfuzz.model.axes import Domain
from kvfuzz.model.ops.slots import SLOT_OP
from kvfuzz.model.target import Quantise, TargetInfo
from kvfuzz.model.vocabulary import Levels

V1 = "vllm/v1/worker/block_table.py"
V2 = "vllm/v1/worker/gpu/block_table.py"
BUFFERS = "vllm/v1/worker/gpu/buffer_utils.py"
"""Where the helper of V2's kernel that follows a pointer is, in later releases."""
PAD_SLOT_ID = -1

NO_CONTEXT_PARALLELISM: dict[str, Levels] = {"ranks": ("1",), "interleave": ("1",)}


def v2(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:slot_mapping_v2. Raises NotCheckedError where a tree has no such file."""
    del arch
    if (tree.root / BUFFERS).is_file():
        tree.load(BUFFERS)
    module = tree.load(V2)
    method = _member(module, "BlockTables", "compute_slot_mappings")
    kernel = kernel_source(module, "_compute_slot_mappings_kernel")
    takes_rows = "idx_mapping" in inspect.signature(method).parameters
    allowed: dict[str, Levels] = {}
    if "CP_SIZE" not in kernel:
        allowed |= NO_CONTEXT_PARALLELISM
    if not _splits_blocks(module.BlockTables):
        allowed["split"] = ("1",)
    if not takes_rows:
        allowed["state_rows"] = ("in_order",)
    if not re.search(r"req_state_idx >= 0", kernel):
        allowed["dummies"] = ("none",)

    own = type("OneBatch", (_OneBatch, module.BlockTables), {})

    def call(tensors: Tensors, scalars: Scalars) -> None:
        tables = own(tensors, scalars)
        starts, positions = tensors["query_start_loc"], tensors["positions"]
        tokens = int(scalars["num_tokens"])
        if takes_rows:
            tables.compute_slot_mappings(tensors["idx_mapping"], starts, positions, tokens)
        else:
            tables.compute_slot_mappings(starts, positions[:tokens])

    return _adapter("vllm:slot_mapping_v2", call, allowed, module, f"{V2}: BlockTables")


class _OneBatch:
    """What BlockTables is for one group; the engine's own code makes tensors of it, where it has
    a method for that."""

    def __init__(self, tensors: Tensors, scalars: Scalars) -> None:
        table, slots = tensors["block_table"], tensors["slot_mapping"]
        self.device = table.device
        self.num_kv_cache_groups = 1
        self.max_num_batched_tokens = slots.shape[0]
        self.block_sizes = [int(scalars["manager_block_size"])]
        self.kernel_block_sizes = [int(scalars["block_size"])]
        self.block_tables = [Stub("StagedWriteTensor", {"gpu": table})]
        self.input_block_tables = [table]
        self.slot_mappings = slots.view(1, -1)
        self.cp_rank, self.cp_size = int(scalars["cp_rank"]), int(scalars["cp_size"])
        self.cp_interleave = int(scalars["cp_interleave"])
        self.pin_memory = False
        self._slot_mapping_enabled = [True]
        self._sliding_window_reach = [0]
        self.dcp_sharded = torch.tensor([True], device=self.device)
        if hasattr(super(), "init_block_table_layout_tensors"):
            self.init_block_table_layout_tensors()
        else:
            self.block_table_ptrs = self.input_block_table_ptrs = self._make_ptr_tensor([table])
            self.block_table_strides = torch.tensor([table.stride(0)], device=self.device)
            self.block_sizes_tensor = torch.tensor(
                self.kernel_block_sizes, dtype=torch.int32, device=self.device
            )

    def __getattr__(self, name: str) -> Any:
        # Missing attributes are asked for here.
        raise NotCheckedError(f"{V2}: BlockTables.{name}, which kvfuzz does not know")


def v1(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:slot_mapping_v1. Raises NotCheckedError where a tree has no kernel."""
    del arch
    module = tree.load(V1)
    owner = getattr(module, "ComputeSlotMappingKernel", None)
    kernel: Any = getattr(owner, "kernel", getattr(module, "_compute_slot_mapping_kernel", None))
    if kernel is None:
        raise NotCheckedError(f"{tree.root}: {V1} has no kernel for slots, they are made by NumPy")
    sizes = _sizes_of(kernel.arg_names)
    allowed: dict[str, Levels] = {"state_rows": ("in_order",), "dummies": ("none",)}
    if not _splits_blocks(module.BlockTable):
        allowed["split"] = ("1",)

    def call(tensors: Tensors, scalars: Scalars) -> None:
        table, slots = tensors["block_table"], tensors["slot_mapping"]
        kernel[(tensors["idx_mapping"].shape[0] + 1,)](
            int(scalars["num_tokens"]),
            slots.shape[0],
            tensors["query_start_loc"],
            tensors["positions"],
            table,
            table.stride(0),
            slot_mapping_ptr=slots,
            TOTAL_CP_WORLD_SIZE=int(scalars["cp_size"]),
            TOTAL_CP_RANK=int(scalars["cp_rank"]),
            CP_KV_CACHE_INTERLEAVE_SIZE=int(scalars["cp_interleave"]),
            PAD_ID=PAD_SLOT_ID,
            BLOCK_SIZE=1024,
            **sizes(scalars),
        )

    return _adapter("vllm:slot_mapping_v1", call, allowed, module, f"{V1}: compute_slot_mapping")


def _sizes_of(names: list[str]) -> Callable[[Scalars], dict[str, int]]:
    """What a V1 kernel with parameters `names` is told of block sizes.

    One that knows that a manager block is several kernel blocks is told both.
    """
    blocks = next((name for name in names if name == "BLOCKS_PER_KV_BLOCK"), None)
    size = next(n for n in names if n.lower().endswith("block_size") and n != "BLOCK_SIZE")

    def sizes(scalars: Scalars) -> dict[str, int]:
        kernel, manager = int(scalars["block_size"]), int(scalars["manager_block_size"])
        if blocks is None:
            return {size: kernel}
        told = {"KV_CACHE_BLOCK_SIZE": manager, blocks: manager // kernel}
        return told | {name: kernel for name in names if name == "block_size"}

    return sizes


def _adapter(name: str, call: Any, allowed: dict[str, Levels], module: Any, source: str) -> Adapter:
    domain = Domain(allowed=allowed, source=source)
    info = TargetInfo(name, SLOT_OP, domain, Quantise(), "", content_of_module(module))
    return Adapter(info, call)


def _splits_blocks(owner: type) -> bool:
    """Whether a table holds kernel blocks, of which a manager block is several."""
    return any("kernel_block_size" in name for name in inspect.signature(owner).parameters)


def _member(module: Any, owner: str, name: str) -> Any:
    found = getattr(getattr(module, owner, None), name, None)
    if found is None:
        raise NotCheckedError(f"{module.__file__}: no {owner}.{name}")
    return found
