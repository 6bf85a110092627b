"""What AITER's compiled attention functions compute, in torch: vLLM's backend calls them.

They compute in fp64 and round once, to the output's dtype, and write nothing but their output. An
argument that breaks what a function asks for raises ValueError, as a bug of its caller; one that
has no stand-in raises NotCheckedError.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.torch_attention import (
    as_dense,
    attend,
    attend_paged,
    first_of,
    packed_k_tokens,
    packed_v_tokens,
    strided_tokens,
)

ASSEMBLY_HEAD_SIZE, ASSEMBLY_HEADS = 128, 2 * 304
"""Where heads have this size and are more than these over all sequences, two for each compute unit
of an MI300X, paged_attention_common takes a kernel in assembly, which reads other scales."""


class Aiter:
    """`vllm._aiter_ops.rocm_aiter_ops`, `torch.ops.aiter` and functions of `aiter` itself."""

    shuffle = False
    """Whether caches are in SHUFFLE: VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT."""

    def is_shuffle_kv_cache_enabled(self) -> bool:
        """What backends ask."""
        return self.shuffle

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        alibi_slopes: Tensor | None,
        return_lse: bool = False,
        out: Tensor | None = None,
        sink_ptr: Tensor | None = None,
        min_seqlen_q: int = 0,
        dropout_p: float = 0.0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of each sequence over its own keys, rows `cu_seqlens_k` of `k` and `v`.

        Masks are aligned at the last query and the last key. Rows past `max_seqlen_q` of a
        sequence, which its grid would not cover, stay as they are. Returns `out`, of q's dtype and
        new where none is given, and the log-sum-exp `[Hq, T]` in fp32 if asked for. Not read:
        min_seqlen_q, which only picks a kernel.
        """
        _without(alibi_slopes=alibi_slopes, sink_ptr=sink_ptr, dropout_p=dropout_p or None)
        made = q.new_full(q.shape, math.nan) if out is None else out
        lse = torch.full((q.shape[1], len(q)), math.nan, dtype=torch.float32, device=q.device)
        starts = list(zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True))
        for (q0, k0), (q1, k1) in itertools.pairwise(starts):
            _ask(k1 - k0 <= max_seqlen_k, "flash_attn_varlen_func: keys past max_seqlen_k")
            _ask(k1 <= len(k) and q1 <= len(q), "flash_attn_varlen_func: rows past the end")
            rows = slice(q0, min(q1, q0 + max_seqlen_q))
            result, sums = attend(
                q[q0:q1],
                k[k0:k1],
                v[k0:k1],
                scale=softmax_scale,
                causal=causal,
                window=window_size,
            )
            made[rows] = result[: rows.stop - q0].to(made.dtype)
            lse[:, rows] = sums[:, : rows.stop - q0].float()
        return (made, lse) if return_lse else made

    def unified_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        seqused_k: Tensor,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        block_table: Tensor,
        softcap: float,
        q_descale: Tensor | None,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Attention over strided caches `[B, N, H, D]`, by block table; the queries of a sequence
        are its last tokens. Descales `[sequences, H]` are one number, and multiply K and V of fp8
        caches only."""
        _without(q_descale=q_descale, alibi_slopes=alibi_slopes, sinks=sinks, cap=softcap or None)
        _ask(causal and int(seqused_k.max()) <= max_seqlen_k, "unified_attention: lengths")
        quantised = k.element_size() == 1
        scales = (first_of(k_descale), first_of(v_descale)) if quantised else (1.0, 1.0)
        attend_paged(
            out,
            q,
            seqused_k,
            cu_seqlens_q.tolist(),
            lambda i, n: (
                strided_tokens(k, block_table[i], n) * scales[0],
                strided_tokens(v, block_table[i], n) * scales[1],
            ),
            scale=softmax_scale,
            window=window_size,
        )

    def paged_attention_v1(
        self,
        out: Tensor,
        workspace_buffer: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        block_tables: Tensor,
        cu_query_lens: Tensor,
        context_lens: Tensor,
        max_context_len: int,
        alibi_slopes: Tensor | None,
        kv_cache_dtype: str,
        kv_cache_layout: str,
        logits_soft_cap: float,
        k_scale: Tensor,
        v_scale: Tensor,
        fp8_out_scale: Tensor | None,
        partition_size: int,
        mtp: int,
        sliding_window: int,
    ) -> None:
        """Attention of one query token a sequence over strided caches `[B, N, H, D]`.

        `sliding_window` keys are seen, 0 is all. Per-tensor scales multiply K and V where
        kv_cache_dtype is not "auto". Not read: cu_query_lens, and of the workspace only its size.
        """
        _without(alibi_slopes=alibi_slopes, out_scale=fp8_out_scale, cap=logits_soft_cap or None)
        _without(layout=None if kv_cache_layout == "NHD" else kv_cache_layout)
        _ask(mtp == 1 and int(context_lens.max()) <= max_context_len, "paged_attention_v1: lengths")
        _, heads, size = query.shape
        parts = -(-max_context_len // partition_size) * len(context_lens) * heads
        needed = parts * (size * query.element_size() + 8)
        _ask(workspace_buffer.numel() >= needed, "paged_attention_v1: a workspace too small")
        quantised = kv_cache_dtype != "auto"
        scales = (first_of(k_scale), first_of(v_scale)) if quantised else (1.0, 1.0)
        attend_paged(
            out,
            query,
            context_lens,
            range(len(query) + 1),
            lambda i, n: (
                strided_tokens(key_cache, block_tables[i], n) * scales[0],
                strided_tokens(value_cache, block_tables[i], n) * scales[1],
            ),
            scale=scale,
            window=(sliding_window - 1, -1),
        )

    def paged_attention_common(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        tmp_out: Tensor,
        max_logits: Tensor,
        exp_sums: Tensor,
        max_seq_len: int,
        block_tables: Tensor,
        context_lens: Tensor,
        block_tables_stride0: int,
        scale: float,
        K_QScale_hip: Tensor,
        V_QScale_hip: Tensor,
        K_QScale_asm: Tensor | None,
        V_QScale_asm: Tensor | None,
        out_: Tensor,
        kv_cache_dtype: str,
    ) -> None:
        """Attention of one query token a sequence over K `[B, H, D/x, N, x]` and V
        `[B, H, N/x, D, x]`.

        Blocks are found by the shape, not by strides. The first number of each scale multiplies an
        fp8 cache. Not read: the temporaries, and the scales of the kernel in assembly.
        """
        count, heads, size = Q.shape
        assembly = size == ASSEMBLY_HEAD_SIZE and count * heads > ASSEMBLY_HEADS
        _without(assembly=assembly or None)
        _ask(block_tables_stride0 == block_tables.stride(0), "paged_attention_common: a stride")
        _ask(int(context_lens.max()) <= max_seq_len, "paged_attention_common: lengths")
        quantised = kv_cache_dtype != "auto"
        scales = (first_of(K_QScale_hip), first_of(V_QScale_hip)) if quantised else (1.0, 1.0)
        attend_paged(
            out_,
            Q,
            context_lens,
            range(count + 1),
            lambda i, n: (
                packed_k_tokens(as_dense(K), block_tables[i], n) * scales[0],
                packed_v_tokens(as_dense(V), block_tables[i], n) * scales[1],
            ),
            scale=scale,
        )

    def pa_decode_gluon(
        self,
        *,
        output: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        context_lengths: Tensor,
        block_tables: Tensor,
        softmax_scale: float,
        query_length: int,
        key_scale: Tensor | None,
        value_scale: Tensor | None,
        sliding_window: int,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        **_unread: Any,
    ) -> None:
        """As paged_attention_common, by strides, for the last `query_length` tokens of each
        sequence, of which each sees `sliding_window` keys, 0 is all."""
        _without(alibi_slopes=alibi_slopes, sinks=sinks)
        attend_paged(
            output,
            query,
            context_lengths,
            range(0, len(query) + 1, query_length),
            lambda i, n: (
                packed_k_tokens(key_cache, block_tables[i], n) * first_of(key_scale),
                packed_v_tokens(value_cache, block_tables[i], n) * first_of(value_scale),
            ),
            scale=softmax_scale,
            window=(sliding_window - 1, -1),
        )


def _ask(kept: bool, what: str) -> None:
    """Raise ValueError where a caller breaks what a function asks for."""
    if not kept:
        raise ValueError(f"aiter: {what}")


def _without(**options: object) -> None:
    """Raise NotCheckedError where an option without a stand-in is used."""
    if used := [name for name, value in options.items() if value is not None]:
        raise NotCheckedError(f"aiter: {', '.join(used)} has no stand-in here")
