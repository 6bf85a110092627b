"""The argument contract of each op: canonical names, the spellings of engines, derived values.

The canonical names are those that a step binds (`kvfuzz.model`).
"""

from collections.abc import Callable

from kvfuzz.kernels.contract import Contract, Derivation, Scalars, Tensors
from kvfuzz.model.dtypes import DTYPES, engine_spelling
from kvfuzz.model.ops.attended import softmax_scale
from kvfuzz.model.ops.attention import ATTENTION_OPS, PAGED, SHARED
from kvfuzz.model.ops.mla import MLA_OP
from kvfuzz.model.scene import QUANT_OP
from kvfuzz.model.vocabulary import Levels


def _is_quantised(tensors: Tensors, scalars: Scalars) -> bool:
    return DTYPES[str(scalars["cache_dtype"])].is_quantised


def _kv_cache_dtype(tensors: Tensors, scalars: Scalars) -> str:
    return engine_spelling(str(scalars["cache_dtype"]))


def _size(tensor: str, axis: int) -> Derivation:
    return lambda tensors, scalars: tensors[tensor].shape[axis]


_SCALES = {"k_scales": "k_scale", "v_scales": "v_scale"}
_CACHES = {"k_cache": "key_cache", "v_cache": "value_cache"}


def _block_size(tensors: Tensors, scalars: Scalars) -> int:
    """Tokens of a block: an x-packed K has five axes, `[..., block_size, x]`."""
    key_cache = tensors["key_cache"]
    return key_cache.shape[1 if key_cache.dim() == 4 else 3]


_DERIVED: dict[str, Derivation] = {
    "kv_cache_dtype": _kv_cache_dtype,
    "block_size": _block_size,
    "num_kv_heads": _size("key", 1),
    "head_size": _size("key", 2),
    "head_size_v": _size("value", 2),
}
_SIZES = {"page_size": "block_size", "num_heads": "num_kv_heads", "head_dim": "head_size"}

_GATHERED = {
    "block_tables": "block_table",
    "cu_seqlens": "cu_seqlens_kv",
    "cu_seq_lens": "cu_seqlens_kv",
    "token_to_seq": "token_to_batch",
}
_GATHERED_ROWS = {**_GATHERED, "cu_seqlen": "cu_seqlens_kv"}

CONVENTIONAL: dict[str, Levels] = {
    "order": ("nhd", "hnd", "shuffle"),
    "value_size": ("same",),
    "granularity": ("tensor",),
    "values": ("bytes", "spread", "ties"),
    "query": ("model",),
}
"""What a function takes that says nothing of it: K and V of one size, with one scale each, no
quotient beyond the range of the cache, and queries that are not quantised."""


def conventional(op: str) -> dict[str, Levels]:
    """What a function that is an `op` takes, where it says nothing of it."""
    if op == QUANT_OP:
        return {axis: levels for axis, levels in CONVENTIONAL.items() if axis != "granularity"}
    return CONVENTIONAL


def _of_scalar(name: str, meaning: Callable[[int], float]) -> Derivation:
    return lambda tensors, scalars: meaning(int(scalars[name]))


_ATTENDED: dict[str, Derivation] = {
    "kv_cache_dtype": _kv_cache_dtype,
    "block_size": _block_size,
    "softmax_scale": lambda tensors, scalars: softmax_scale(scalars),
    "softcap": _of_scalar("cap", float),
    "num_seqs": _size("seq_lens", 0),
    "num_query_heads": _size("query", 1),
    "head_size": _size("query", 2),
}
_NONE: dict[str, Derivation] = {name: lambda tensors, scalars: None for name in ("key", "value")}
"""What a layer that shares another layer's cache is handed of its own."""
_ATTENTION_SPELT = {
    **_SCALES,
    **_CACHES,
    "q": "query",
    "out": "output",
    "o": "output",
    "block_tables": "block_table",
    "page_table": "block_table",
    "cu_seqlens_q": "query_start_loc",
    "seqused_k": "seq_lens",
    "context_lens": "seq_lens",
    "cache_seqlens": "seq_lens",
    "max_seqlen_q": "max_query_len",
    "max_seqlen_k": "max_seq_len",
    "scale": "softmax_scale",
    "sm_scale": "softmax_scale",
    "logit_cap": "softcap",
    "sliding_window": "window",
    "q_descale": "q_scale",
    "k_descale": "k_scale",
    "v_descale": "v_scale",
}
_LATENT_SPELT = {
    "kv_c_and_k_pe_cache": "kv_cache",
    "req_to_token": "block_table",
    "b_seq_len": "seq_lens",
}
_ATTENTION_OPTIONAL = (
    "q_scale",
    "k_scale",
    "v_scale",
    "window",
    "max_query_len",
    "max_seq_len",
    "sinks",
    "alibi_slopes",
    "kv_cache_layout",
    "cache_dtype",
)

CONTRACTS: dict[str, Contract] = {
    contract.op: contract
    for contract in (
        Contract(
            op="reshape_and_cache",
            required=("key", "value", "key_cache", "value_cache", "slot_mapping"),
            optional=("k_scale", "v_scale", "kv_cache_layout", "cache_dtype"),
            aliases={**_SCALES, **_CACHES, **_SIZES, "slots": "slot_mapping"},
            derived={**_DERIVED, "quant": _is_quantised, "num_tokens": _size("slot_mapping", 0)},
        ),
        Contract(
            op="gather_cache",
            required=("key_cache", "value_cache", "key", "value", "block_table", "cu_seqlens_kv"),
            optional=(
                "seq_starts",
                "token_to_batch",
                "k_scale",
                "v_scale",
                "kv_cache_layout",
                "cache_dtype",
            ),
            aliases={
                **_SCALES,
                **_CACHES,
                **_SIZES,
                **_GATHERED,
                "key_out": "key",
                "value_out": "value",
                "num_tokens": "total_tokens",
            },
            derived={
                **_DERIVED,
                "dequant": _is_quantised,
                "total_tokens": _size("token_to_batch", 0),
            },
        ),
        Contract(
            op="per_token_head_quant",
            required=(
                "key",
                "value",
                "key_cache",
                "value_cache",
                # Spelt as what is written, so that no writer that reads scales is taken for one.
                "k_scale_cache",
                "v_scale_cache",
                "slot_mapping",
            ),
            optional=("kv_cache_layout", "cache_dtype"),
            aliases={**_CACHES, **_SIZES, "slots": "slot_mapping"},
            derived={
                **_DERIVED,
                "k_scale_cache": lambda tensors, scalars: tensors["k_scale"],
                "v_scale_cache": lambda tensors, scalars: tensors["v_scale"],
                "num_tokens": _size("slot_mapping", 0),
            },
        ),
        *(
            Contract(
                op=op,
                required=(
                    "query",
                    "key_cache",
                    "value_cache",
                    "output",
                    "block_table",
                    "seq_lens",
                    *(() if op == PAGED else ("query_start_loc",)),
                    *(_NONE if op == SHARED else ()),
                ),
                optional=_ATTENTION_OPTIONAL,
                aliases=_ATTENTION_SPELT,
                derived={**_ATTENDED, **_NONE} if op == SHARED else _ATTENDED,
            )
            for op in ATTENTION_OPS
        ),
        Contract(
            op=MLA_OP,
            required=("query", "kv_cache", "output", "lse", "block_table", "seq_lens"),
            optional=("k_scale", "max_seq_len", "kv_cache_dtype", "cache_dtype"),
            aliases={**_ATTENTION_SPELT, **_LATENT_SPELT},
            derived={**_ATTENDED, "block_size": _size("kv_cache", 1)},
        ),
        Contract(
            op="slot_mapping",
            required=("query_start_loc", "positions", "block_table", "slot_mapping", "block_size"),
            optional=(
                "idx_mapping",
                "manager_block_size",
                "num_tokens",
                "cp_rank",
                "cp_size",
                "cp_interleave",
            ),
            aliases={
                "pos": "positions",
                "kernel_block_size": "block_size",
                "block_tables": "block_table",
                "slot_mappings": "slot_mapping",
                "cp_kv_cache_interleave_size": "cp_interleave",
                "interleave": "cp_interleave",
            },
            derived={
                "num_reqs": _size("idx_mapping", 0),
                "max_num_tokens": _size("slot_mapping", 0),
            },
        ),
        Contract(
            op="copy_blocks",
            required=("key_cache", "value_cache", "block_mapping"),
            optional=(),
            aliases=_CACHES,
        ),
        Contract(
            op="swap_blocks",
            required=("key_cache", "value_cache", "key_target", "value_target", "block_mapping"),
            optional=(),
            aliases={**_CACHES, "k_target": "key_target", "v_target": "value_target"},
        ),
        Contract(
            op="zero_blocks",
            required=("key_cache", "value_cache", "block_ids"),
            optional=(),
            aliases=_CACHES,
        ),
        Contract(
            op="merge_attn_states",
            required=("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse"),
            optional=("output_lse", "prefill_tokens_with_context"),
            aliases={"out": "output", "out_lse": "output_lse"},
            derived={
                "num_tokens": _size("output", 0),
                "num_heads": _size("output", 1),
                "head_size": _size("output", 2),
            },
        ),
        Contract(
            op="copy_states",
            required=("state_0", "block_mapping"),
            optional=("state_1", "state_2"),
            aliases={},
        ),
        Contract(
            op="concat_and_cache_mla",
            required=("kv_c", "k_pe", "kv_cache", "slot_mapping"),
            optional=("scale", "kv_cache_dtype", "cache_dtype"),
            aliases={"kv_c_normed": "kv_c", "slots": "slot_mapping"},
        ),
        Contract(
            op="gather_mla",
            required=("kv_cache", "out", "block_table", "cu_seqlens_kv"),
            optional=("seq_starts", "token_to_batch", "scale", "kv_cache_dtype", "cache_dtype"),
            aliases={**_GATHERED_ROWS, "src_cache": "kv_cache", "dst": "out"},
            derived={"num_tokens": _size("token_to_batch", 0)},
        ),
        Contract(
            op="indexer_quant_and_cache",
            required=("k", "kv_cache", "slot_mapping"),
            optional=("quant_block_size", "scale_fmt", "block_tile_size", "cache_dtype"),
            aliases={"k_cache": "kv_cache"},
            derived={"head_size": _size("k", 1)},
        ),
        Contract(
            op="quantize_and_insert_k_cache",
            required=("k", "kv_cache", "slot_mapping", "block_size"),
            optional=("scale_fmt", "cache_dtype"),
            aliases={"k_cache": "kv_cache"},
            derived={
                "is_ue8m0": lambda tensors, scalars: scalars["scale_fmt"] == "ue8m0",
                "use_fnuz": lambda tensors, scalars: scalars["cache_dtype"] == "e4m3fnuz",
            },
        ),
        Contract(
            op="gather_indexer",
            required=("kv_cache", "k", "k_scale", "block_table", "cu_seqlens_kv"),
            optional=("token_to_batch", "block_tile_size", "cache_dtype"),
            aliases={
                **_GATHERED_ROWS,
                "k_cache": "kv_cache",
                "k_fp8": "k",
                "k_fp8_scale": "k_scale",
            },
            derived={"num_tokens": _size("token_to_batch", 0)},
        ),
    )
}
