"""Adapters of the kernels in `builtin/`, whole (builtin:NAME) and broken (mutant:NAME)."""

import linecache
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.kernels import plan_targets
from kvfuzz.kernels.adapter import Adapter, content_of
from kvfuzz.kernels.builtin.cache_views import cache_views
from kvfuzz.kernels.builtin.concat_and_cache_mla import concat_and_cache_mla
from kvfuzz.kernels.builtin.copy_blocks import copy_blocks
from kvfuzz.kernels.builtin.copy_states import copy_states
from kvfuzz.kernels.builtin.expand_block_table import expand_block_table
from kvfuzz.kernels.builtin.gather_cache import gather_cache
from kvfuzz.kernels.builtin.gather_indexer import gather_indexer
from kvfuzz.kernels.builtin.gather_mla import gather_mla
from kvfuzz.kernels.builtin.indexer_quant_and_cache import indexer_quant_and_cache
from kvfuzz.kernels.builtin.merge_attn_states import merge_attn_states
from kvfuzz.kernels.builtin.mla_decode import mla_decode
from kvfuzz.kernels.builtin.paged_attention import paged_attention
from kvfuzz.kernels.builtin.per_token_head_quant import per_token_head_quant
from kvfuzz.kernels.builtin.quantize_and_insert_k_cache import quantize_and_insert_k_cache
from kvfuzz.kernels.builtin.reshape_and_cache import reshape_and_cache
from kvfuzz.kernels.builtin.shared_kv_attention import shared_kv_attention
from kvfuzz.kernels.builtin.slot_mapping import slot_mapping
from kvfuzz.kernels.builtin.swap_blocks import swap_blocks
from kvfuzz.kernels.builtin.transfer_regions import transfer_regions
from kvfuzz.kernels.builtin.unified_attention import unified_attention
from kvfuzz.kernels.builtin.zero_blocks import zero_blocks
from kvfuzz.kernels.contracts import bind
from kvfuzz.kernels.fp8 import formats_of
from kvfuzz.kernels.mutants.patches import BUILTIN, Mutant, mutants
from kvfuzz.kernels.plan_targets import PlanAdapter
from kvfuzz.model.axes import Domain, nearest
from kvfuzz.model.ops.attention import ATTENTION_OPS
from kvfuzz.model.ops.merge import MERGE_OP
from kvfuzz.model.ops.mla import MLA_OP
from kvfuzz.model.target import IN_FP32, Precision, Quantise, TargetInfo, TargetSpec

FUNCTIONS: dict[str, Callable[..., None]] = {
    "gather_cache": gather_cache,
    "reshape_and_cache": reshape_and_cache,
    "copy_blocks": copy_blocks,
    "swap_blocks": swap_blocks,
    "zero_blocks": zero_blocks,
    "slot_mapping": slot_mapping,
    "per_token_head_quant": per_token_head_quant,
    "copy_states": copy_states,
    "concat_and_cache_mla": concat_and_cache_mla,
    "gather_mla": gather_mla,
    "indexer_quant_and_cache": indexer_quant_and_cache,
    "gather_indexer": gather_indexer,
    "quantize_and_insert_k_cache": quantize_and_insert_k_cache,
    "mla_decode": mla_decode,
    "paged_attention": paged_attention,
    "unified_attention": unified_attention,
    "merge_attn_states": merge_attn_states,
    "shared_kv_attention": shared_kv_attention,
}

PLAN_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "cache_views": cache_views,
    "transfer_regions": transfer_regions,
    "expand_block_table": expand_block_table,
}

INVERSE = {
    "gather_cache": "builtin:reshape_and_cache",
    "reshape_and_cache": "builtin:gather_cache",
}
"""By op that can be undone, who does it."""

QUANTISE = Quantise("x/s", "kernels/builtin/reshape_and_cache.py: quantised")

QUANTISES: dict[str, Quantise] = {
    "per_token_head_quant": Quantise(
        "x/s",
        "kernels/builtin/per_token_head_quant.py: scale_of, quantised",
        rounding="half_away_fp32",
        scale_floor=1e-6,
        largest={"e4m3fnuz": 224.0},
    ),
    "concat_and_cache_mla": Quantise(
        source="kernels/builtin/concat_and_cache_mla.py: concat_and_cache_ds_mla_kernel",
        scale_floor=2.0**-126,
        largest={"e4m3fnuz": 224.0},
    ),
    "indexer_quant_and_cache": Quantise(
        source="kernels/builtin/indexer_quant_and_cache.py: indexer_quant_and_cache_kernel",
        scale_floor=0.0,
        absmax_floor=1e-4,
        largest={"e4m3fnuz": 224.0},
    ),
    "quantize_and_insert_k_cache": Quantise(
        source="kernels/builtin/quantize_and_insert_k_cache.py: the kernel of the same name",
        scale_floor=0.0,
        absmax_floor=1e-4,
        largest={"e4m3fnuz": 224.0},
    ),
}
"""By op that computes scales, how; the others do as QUANTISE says."""

PRECISION = msgspec.structs.replace(
    IN_FP32,
    tile=16,
    source="kernels/builtin, each file: all in fp32, dots of ieee precision",
)

PRECISIONS: dict[str, Precision] = {
    **dict.fromkeys((*ATTENTION_OPS, MLA_OP), PRECISION),
    MERGE_OP: Precision(weights="fp32", source="kernels/builtin/merge_attn_states.py: all in fp32"),
}
"""By op that computes numbers, what our own kernel holds in fewer bits than fp32: nothing."""

REFUSALS = (NotImplementedError,)


def quantise_of(op: str) -> Quantise:
    """How our own kernel of `op` quantises."""
    return QUANTISES.get(op, QUANTISE)


def precision_of(op: str) -> Precision:
    """What our own kernel of `op` holds in fewer bits than fp32."""
    return PRECISIONS.get(op, Precision())


def builtin(spec: TargetSpec, *, arch: str) -> Adapter | PlanAdapter:
    """The adapter of builtin:OP, which accepts all that Triton can compile for `arch`."""
    op = spec.name.partition(":")[2]
    source = (BUILTIN / f"{op}.py").read_bytes()
    if op in PLAN_FUNCTIONS:
        return _plan_adapter(spec.name, op, PLAN_FUNCTIONS[op], source)
    return _adapter(spec.name, op, FUNCTIONS[op], source, arch)


def mutant(spec: TargetSpec, *, arch: str) -> Adapter | PlanAdapter:
    """The adapter of mutant:NAME, which claims all that the kernel it breaks claims.

    Raises UsageError for a name that the catalogue lacks.
    """
    name = spec.name.partition(":")[2]
    known = {each.name: each for each in mutants()}
    if name not in known:
        raise UsageError(f"no mutant {name!r}; {nearest(name, known)}")
    source = known[name].source()
    function = load(known[name], source)
    if known[name].patches in PLAN_FUNCTIONS:
        return _plan_adapter(spec.name, known[name].patches, function, source.encode())
    return _adapter(spec.name, known[name].patches, function, source.encode(), arch)


def load(broken: Mutant, source: str) -> Callable[..., Any]:
    """The patched function. Its source is left in linecache, where triton.jit reads it."""
    file = f"<kvfuzz mutant {broken.name}>"
    # No time stamp: linecache never drops such an entry as stale.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = ModuleType(f"kvfuzz_mutant_{broken.name}")
    exec(compile(source, file, "exec"), module.__dict__)
    function: Callable[..., Any] = getattr(module, broken.patches)
    return function


def _adapter(name: str, op: str, function: Callable[..., Any], source: bytes, arch: str) -> Adapter:
    domain = Domain(
        allowed={"cache_dtype": formats_of(arch)},
        source=f"kernels/builtin/{op}.py: every stride and size, the formats of {arch} in Triton",
    )
    info = TargetInfo(
        name,
        op,
        domain,
        quantise_of(op),
        INVERSE.get(op, ""),
        content_of(source),
        precision=precision_of(op),
    )
    return Adapter(info, bind(function, op), REFUSALS)


def _plan_adapter(name: str, op: str, function: Callable[..., Any], source: bytes) -> PlanAdapter:
    domain = Domain(source=f"kernels/builtin/{op}.py: every plan")
    info = TargetInfo(name, op, domain, Quantise(), "", content_of(source))
    return PlanAdapter(info, plan_targets.bind(function, op))
