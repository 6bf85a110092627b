"""vLLM's Triton merge of two parts of attention, as its backends call it.

The function is the one that runs where the CUDA kernel does not: on ROCm, for head sizes that are
no multiple of 16 bytes, in every release. What its tensors may be is read off its own source, and
off the dispatcher and the MLA prefill backend beside it.
"""

import inspect
import re
from pathlib import Path
from types import ModuleType

from kvfuzz.kernels.adapter import Adapter
from kvfuzz.kernels.contracts import bind
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.vllm_backends import (
    REFUSALS,
    content_of_module,
    function_of,
    kernel_source,
)
from kvfuzz.model.axes import Domain
from kvfuzz.model.ops.merge import MERGE_OP, WITH_CONTEXT
from kvfuzz.model.target import DeadBytes, Precision, Quantise, TargetInfo
from kvfuzz.model.vocabulary import Levels

MERGE = (
    "vllm/v1/attention/ops/triton_merge_attn_states.py",
    "vllm/attention/ops/triton_merge_attn_states.py",
)
DISPATCHER = "merge_attn_states.py"
"""Beside it, what chooses between the CUDA kernel and this one."""
MLA_PREFILL = "vllm/v1/attention/backends/mla/prefill/flash_attn.py"
FUNCTION, KERNEL = MERGE_OP, "merge_attn_states_kernel"


def merge(tree: SourceTree, arch: str) -> Adapter:
    """The adapter of vllm:merge_attn_states. Raises NotCheckedError where a tree has none."""
    del arch
    module = tree.load(*MERGE)
    function = function_of(module, FUNCTION)
    where = Path(str(module.__file__)).relative_to(tree.root)
    domain = Domain(
        allowed=_allowed(tree.root, module),
        source=f"{where}: {FUNCTION}, {KERNEL}; {DISPATCHER} beside it; {MLA_PREFILL}",
    )
    info = TargetInfo(
        "vllm:merge_attn_states",
        MERGE_OP,
        domain,
        Quantise(),
        "",
        content_of_module(module),
        dead=DeadBytes(
            "finite",
            f"{where}: {KERNEL} multiplies the output of an empty part by zero; FlashAttention "
            "gives zeros there, and backends of which it is undefined clear it",
        ),
        precision=Precision(weights="fp32", source=f"{where}: {KERNEL}, all in fp32"),
    )
    return Adapter(info, bind(function, MERGE_OP), REFUSALS)


def _allowed(root: Path, module: ModuleType) -> dict[str, Levels]:
    function, kernel = (
        inspect.getsource(function_of(module, FUNCTION)),
        kernel_source(module, KERNEL),
    )
    allowed: dict[str, Levels] = {}
    if re.search(r"token_idx \* num_heads \*", kernel):
        # A row is its heads: no backend hands over a slice of wider rows.
        allowed |= {f"{name}_rows": ("dense",) for name in ("prefix", "suffix", "output")}
    if "lse.stride" not in function:
        # Backends make them contiguous before the call.
        allowed |= {f"{name}_lse": ("by_head",) for name in ("prefix", "suffix")}
        allowed["output_lse"] = ("none", "by_head")
    if WITH_CONTEXT not in inspect.signature(function_of(module, FUNCTION)).parameters:
        allowed["with_context"] = ("all",)
    if not _cuts_heads(root) or _asserts_same_heads(module):
        allowed["suffix_heads"] = ("same",)
    return allowed


def _cuts_heads(root: Path) -> bool:
    """Whether the MLA prefill backend of a tree hands over heads that it cuts off padded ones, next
    to what was merged before, which is dense."""
    path = root / MLA_PREFILL
    return path.is_file() and "attn_out[..., : v.shape[-1]]" in path.read_text()


def _asserts_same_heads(module: ModuleType) -> bool:
    """Whether the dispatcher refuses parts with different head strides."""
    path = Path(str(module.__file__)).with_name(DISPATCHER)
    asserted = r"assert prefix_output\.stride\(1\) == suffix_output\.stride\(1\)"
    return path.is_file() and re.search(asserted, path.read_text()) is not None
