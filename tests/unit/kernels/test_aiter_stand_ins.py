"""AITER's functions as torch computes them, against sums written out token by token."""

import math

import pytest
import torch

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.aiter_stand_ins import Aiter
from kvfuzz.kernels.torch_attention import as_dense, attend
from kvfuzz.kernels.vllm_shared_kv import as_allocated, one_view

HEADS, KV_HEADS, SIZE, BLOCK_SIZE, X = 4, 2, 8, 4, 2


def _normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _one(query, keys, values, scale):
    """One head of one query over keys that it sees."""
    weights = [math.exp(scale * float(query @ key)) for key in keys]
    parts = [weight * value for weight, value in zip(weights, values, strict=True)]
    return sum(parts) / sum(weights), math.log(sum(weights))


@pytest.mark.parametrize("window", [-1, 0, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_the_last_tokens(causal, window):
    query, keys = _normal(3, HEADS, SIZE), _normal(5, KV_HEADS, SIZE, seed=1)
    values = _normal(5, KV_HEADS, SIZE, seed=2)
    made, sums = attend(query, keys, values, scale=0.5, causal=causal, window=(window, -1))
    for t in range(3):
        position = 2 + t
        seen = [
            j
            for j in range(5)
            if (j <= position or not causal) and (window < 0 or j >= position - window)
        ]
        for head in range(HEADS):
            of = head // 2
            row, total = _one(query[t, head], keys[seen, of], values[seen, of], 0.5)
            assert torch.allclose(made[t, head], row)
            assert math.isclose(sums[head, t], total)


def test_over_no_keys_the_result_is_zeros_and_the_sum_minus_infinity():
    made, sums = attend(
        _normal(2, HEADS, SIZE),
        _normal(0, KV_HEADS, SIZE),
        _normal(0, KV_HEADS, SIZE),
        scale=1.0,
        causal=False,
    )
    assert (made == 0).all()
    assert (sums == -math.inf).all()


def _pages(layout):
    """K and V of three blocks, as a function of each layout takes them, and as tokens."""
    keys, values = (_normal(3, BLOCK_SIZE, KV_HEADS, SIZE, seed=seed) for seed in (3, 4))
    tokens = [each[[2, 0]].flatten(0, 1) for each in (keys, values)]
    if layout == "strided":
        return keys, values, *tokens
    packed_k = keys.unflatten(3, (SIZE // X, X)).permute(0, 2, 3, 1, 4).contiguous()
    packed_v = values.unflatten(1, (BLOCK_SIZE // X, X)).permute(0, 3, 1, 4, 2).contiguous()
    return packed_k, packed_v, *tokens


def _decode(layout, keys, values, lengths, out, **changes):
    aiter, query = Aiter(), _normal(len(lengths), HEADS, SIZE)
    table, lens = torch.tensor([[2, 0, 99]] * len(lengths)), torch.tensor(lengths)
    scale, size = torch.tensor([1.0]), out.numel() * 64
    if layout == "strided":
        arguments = {
            "out": out,
            "workspace_buffer": torch.empty(size, dtype=torch.uint8),
            "query": query,
            "key_cache": keys,
            "value_cache": values,
            "scale": 0.5,
            "block_tables": table,
            "cu_query_lens": None,
            "context_lens": lens,
            "max_context_len": max(lengths),
            "alibi_slopes": None,
            "kv_cache_dtype": "auto",
            "kv_cache_layout": "NHD",
            "logits_soft_cap": 0.0,
            "k_scale": scale,
            "v_scale": scale,
            "fp8_out_scale": None,
            "partition_size": 256,
            "mtp": 1,
            "sliding_window": 0,
        }
        aiter.paged_attention_v1(**arguments | changes)
    else:
        arguments = dict.fromkeys(("tmp_out", "max_logits", "exp_sums"))
        arguments |= {"Q": query, "K": keys, "V": values, "scale": 0.5, "out_": out}
        arguments |= {"max_seq_len": max(lengths), "block_tables": table, "context_lens": lens}
        arguments |= {"block_tables_stride0": 3, "kv_cache_dtype": "auto"}
        arguments |= {f"{side}_QScale_hip": scale for side in "KV"}
        arguments |= {f"{side}_QScale_asm": None for side in "KV"}
        aiter.paged_attention_common(**arguments | changes)
    return query


@pytest.mark.parametrize("layout", ["strided", "packed"])
def test_a_decode_reads_the_tokens_of_its_sequence_and_no_others(layout):
    keys, values, k_tokens, v_tokens = _pages(layout)
    # The second block of the table has two tokens; nobody owns block 1.
    keys[1] = values[1] = math.nan
    if layout == "strided":
        keys[0, 2:] = values[0, 2:] = math.nan
    else:
        keys[0, :, :, 2:] = values[0, :, 1:] = math.nan
    out = torch.zeros(2, HEADS, SIZE, dtype=torch.float64)
    query = _decode(layout, keys, values, [6, 3], out)
    for i, length in enumerate([6, 3]):
        expected, _ = attend(
            query[i : i + 1], k_tokens[:length], v_tokens[:length], scale=0.5, causal=True
        )
        assert torch.allclose(out[i], expected[0])


def test_a_broken_promise_is_an_error_and_what_has_no_stand_in_is_not_checked():
    keys, values, *_ = _pages("strided")
    out = torch.zeros(1, HEADS, SIZE, dtype=torch.float64)
    with pytest.raises(ValueError, match="lengths"):
        _decode("strided", keys, values, [6], out, max_context_len=5)
    with pytest.raises(ValueError, match="workspace"):
        _decode("strided", keys, values, [6], out, workspace_buffer=torch.empty(8))
    with pytest.raises(NotCheckedError, match="cap"):
        _decode("strided", keys, values, [6], out, logits_soft_cap=30.0)


def test_a_prompt_leaves_rows_alone_that_its_grid_does_not_cover():
    query, keys, values = (_normal(4, KV_HEADS, SIZE, seed=seed) for seed in range(3))
    out, starts = torch.zeros_like(query), torch.tensor([0, 1, 4])
    options = {"softmax_scale": 0.5, "causal": True, "window_size": (-1, -1), "alibi_slopes": None}
    Aiter().flash_attn_varlen_func(query, keys, values, starts, starts, 2, 3, out=out, **options)
    assert (out[:3] != 0).all()
    assert (out[3] == 0).all()
    with pytest.raises(ValueError, match="max_seqlen_k"):
        Aiter().flash_attn_varlen_func(query, keys, values, starts, starts, 2, 2, **options)


def test_the_engines_view_is_over_the_memory_of_k_and_v():
    blocks, size = 3, SIZE
    memory = torch.arange(blocks * KV_HEADS * BLOCK_SIZE * 2 * size)
    packed = memory.view(blocks, KV_HEADS, BLOCK_SIZE, 2 * size)
    key, value = packed.transpose(1, 2).split(size, dim=-1)
    view = one_view(key, value, is_shuffle=False)
    assert view.data_ptr() == memory.data_ptr()
    assert torch.equal(view, packed)
    with pytest.raises(NotCheckedError, match="V begins 1 elements behind K"):
        one_view(key, key[..., 1:], is_shuffle=False)
    planes = memory.view(2, blocks, BLOCK_SIZE, KV_HEADS, size)
    view = one_view(planes[0], planes[1], is_shuffle=True)
    assert torch.equal(view, planes.flatten(3).transpose(0, 1))


def test_strides_that_nothing_depends_on_are_those_of_an_allocation():
    odd = torch.empty(64).as_strided((2, 1, 8), (8, 24, 1))
    assert as_allocated(odd).stride() == (8, 8, 1)
    assert as_dense(odd).stride() == (8, 8, 1)
