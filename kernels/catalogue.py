"""The names of all targets, for lists and messages.

Nothing here imports torch or triton: the parent process lists targets, the worker loads them.
"""

from importlib.metadata import entry_points
from typing import NamedTuple

from kvfuzz.kernels.mutants.patches import Mutant, mutants

ENTRY_POINTS = "kvfuzz.targets"
"""Group of entry points, each a function from a TargetSpec to an Adapter."""


class Listed(NamedTuple):
    """A target that can be named without a path."""

    name: str
    op: str
    description: str


SHIPPED: tuple[Listed, ...] = (
    Listed(
        "builtin:gather_cache", "gather_cache", "kvfuzz's own gather, written to be read and copied"
    ),
    Listed(
        "builtin:reshape_and_cache",
        "reshape_and_cache",
        "kvfuzz's own writer, written to be read and copied",
    ),
    Listed("builtin:cache_views", "cache_views", "kvfuzz's own views of a whole model's cache"),
    Listed(
        "builtin:transfer_regions",
        "transfer_regions",
        "kvfuzz's own list of what a connector moves of each block",
    ),
    Listed(
        "builtin:expand_block_table",
        "expand_block_table",
        "kvfuzz's own table of kernel blocks",
    ),
    Listed(
        "stateful:builtin",
        "stateful_cache",
        "a cache in use, by our own kernels; stateful:TARGET+TARGET puts others in their place",
    ),
    Listed("builtin:copy_blocks", "copy_blocks", "kvfuzz's own copy of whole blocks"),
    Listed("builtin:swap_blocks", "swap_blocks", "kvfuzz's own swap to and from a host cache"),
    Listed("builtin:zero_blocks", "zero_blocks", "kvfuzz's own clearing of whole blocks"),
    Listed(
        "builtin:per_token_head_quant",
        "per_token_head_quant",
        "kvfuzz's own writer that chooses a scale for each head of a token",
    ),
    Listed(
        "builtin:slot_mapping",
        "slot_mapping",
        "kvfuzz's own mapping of new tokens to slots, with context parallelism",
    ),
    Listed("builtin:copy_states", "copy_states", "kvfuzz's own copy of Mamba states"),
    Listed(
        "builtin:concat_and_cache_mla",
        "concat_and_cache_mla",
        "kvfuzz's own writer of MLA's cache, plain, fp8 and fp8_ds_mla",
    ),
    Listed("builtin:gather_mla", "gather_mla", "kvfuzz's own gather of MLA's cache"),
    Listed(
        "builtin:indexer_quant_and_cache",
        "indexer_quant_and_cache",
        "kvfuzz's own writer of the sparse indexer's keys, with their scales",
    ),
    Listed(
        "builtin:gather_indexer",
        "gather_indexer",
        "kvfuzz's own gather of the sparse indexer's keys and scales",
    ),
    Listed(
        "builtin:quantize_and_insert_k_cache",
        "quantize_and_insert_k_cache",
        "kvfuzz's own writer of DeepSeek V4's cache",
    ),
    Listed(
        "builtin:mla_decode",
        "mla_decode",
        "kvfuzz's own decode attention over MLA's pages, with its log-sum-exp",
    ),
    Listed(
        "builtin:paged_attention",
        "paged_attention",
        "kvfuzz's own decode attention over pages, in parts that are merged",
    ),
    Listed(
        "builtin:unified_attention",
        "unified_attention",
        "kvfuzz's own attention of any number of query tokens over pages",
    ),
    Listed(
        "builtin:merge_attn_states",
        "merge_attn_states",
        "kvfuzz's own merge of attention over two parts of a sequence",
    ),
    Listed(
        "builtin:shared_kv_attention",
        "shared_kv_attention",
        "kvfuzz's own attention of a layer without K and V, over another layer's cache",
    ),
    Listed(
        "conch:reshape_and_cache",
        "reshape_and_cache",
        "conch-triton-kernels' writer; needs kvfuzz[thirdparty]",
    ),
    Listed(
        "conch:copy_blocks",
        "copy_blocks",
        "conch-triton-kernels' copy of whole blocks; needs kvfuzz[thirdparty]",
    ),
    Listed(
        "conch:paged_attention",
        "paged_attention",
        "conch-triton-kernels' decode attention over pages; needs kvfuzz[thirdparty]",
    ),
    Listed(
        "conch:varlen_attention",
        "unified_attention",
        "conch-triton-kernels' attention of any number of query tokens; needs kvfuzz[thirdparty]",
    ),
    Listed(
        "conch:unified_attention",
        "unified_attention",
        "the unified_attention of vLLM that conch carries; needs kvfuzz[thirdparty]",
    ),
    Listed(
        "vllm:create_kv_cache_views",
        "cache_views",
        "vLLM's views by KVCacheLayout, from 0.29.0 on; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:map_to_kernel_blocks",
        "expand_block_table",
        "vLLM's table of kernel blocks; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:v1_cache_views",
        "cache_views",
        "vLLM's views by its V1 runner, until 0.28.0; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:v2_cache_views",
        "cache_views",
        "vLLM's views by its V2 runner, until 0.28.0; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:split_kv_cache",
        "cache_views",
        "V1's views as AITER's unified attention splits them; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:cp_mha_gather_cache",
        "gather_cache",
        "vLLM's AITER gather, NHD and SHUFFLE; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:per_token_head_quant",
        "per_token_head_quant",
        "vLLM's writer with a scale for each head of a token; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:slot_mapping_v1",
        "slot_mapping",
        "vLLM's slots of its V1 runner, from 0.19 on; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:slot_mapping_v2",
        "slot_mapping",
        "vLLM's slots of its V2 runner; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:swap_blocks",
        "swap_blocks",
        "vLLM's swap to and from the host, from 0.23 on; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:zero_blocks",
        "zero_blocks",
        "vLLM's KVBlockZeroer; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:copy_states",
        "copy_states",
        "vLLM's batched copy of Mamba states; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:merge_attn_states",
        "merge_attn_states",
        "vLLM's Triton merge of two parts of attention; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:indexer_quant_and_cache",
        "indexer_quant_and_cache",
        "vLLM's Triton writer of the sparse indexer's keys; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:gather_indexer",
        "gather_indexer",
        "vLLM's Triton gather of the sparse indexer's keys; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:unified_attention",
        "unified_attention",
        "vLLM's Triton attention of any number of query tokens; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:unified_attention_descriptors",
        "unified_attention",
        "the same by tensor descriptors, where a tree has that path; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:unified_attention_diffkv",
        "unified_attention",
        "vLLM's Triton attention with V of another size than K; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:paged_attention_2d",
        "paged_attention",
        "vLLM's Triton decode of ROCM_ATTN over x-packed pages; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:chunked_prefill_paged_decode",
        "unified_attention",
        "vLLM's Triton attention of ROCM_ATTN over x-packed pages; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:quantize_and_insert_k_cache",
        "quantize_and_insert_k_cache",
        "vLLM's Triton writer of DeepSeek V4's cache; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:shared_kv_attention",
        "shared_kv_attention",
        "vLLM's AITER attention over another layer's cache, from 0.29 on; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:decode_attention",
        "mla_decode",
        "vLLM's Triton decode attention as its MLA backend calls it; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:reshape_and_cache",
        "reshape_and_cache",
        "vLLM's writer for the format at hand, one of the next two; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:reshape_and_cache_flash",
        "reshape_and_cache",
        "vLLM's Triton writer, NHD and HND; needs --source vllm=DIR",
    ),
    Listed(
        "vllm:reshape_and_cache_shuffle",
        "reshape_and_cache",
        "vLLM's AITER writer, SHUFFLE; needs --source vllm=DIR",
    ),
)


def list_targets() -> tuple[Listed, ...]:
    """Every target that has a name: shipped, mutants, then entry points of installed packages."""
    return (
        *SHIPPED,
        *(Listed(f"mutant:{each.name}", each.patches, _described(each)) for each in mutants()),
        # What an entry point's op is, only loading it would tell.
        *(Listed(each.name, "", each.value) for each in entry_points(group=ENTRY_POINTS)),
    )


def _described(mutant: Mutant) -> str:
    return (
        f"{mutant.models}; not caught yet: {mutant.survives}" if mutant.survives else mutant.models
    )
