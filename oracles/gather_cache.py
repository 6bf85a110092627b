"""The reference of `gather_cache`: output row t is a cached token of sequence token_to_batch[t].

With b that sequence, the token's position is t - cu_seqlens_kv[b] + seq_starts[b]; it lives in
block block_table[b, position // block_size] at offset position % block_size.
"""

import torch
from torch import Tensor

from kvfuzz.model.case import Step
from kvfuzz.model.target import Quantise
from kvfuzz.oracles.memory import Memory
from kvfuzz.oracles.writes import SIDES, Stored, dequantised, rows_heads_dims, scales_at


def gather_cache(memory: Memory, step: Step, quantise: Quantise) -> list[Stored]:
    """What the step must store: elements `[num_tokens, num_kv_heads, head_size]` of K and of V."""
    del quantise
    case, device = memory.case, memory.device

    def metadata(name: str) -> Tensor:
        return torch.tensor(case.integers(step, name), dtype=torch.int64, device=device)

    owner, starts = metadata("token_to_batch"), metadata("seq_starts")
    table = metadata("block_table").reshape(len(starts), -1)
    rows = torch.arange(len(owner), device=device)
    position = rows - metadata("cu_seqlens_kv")[owner] + starts[owner]
    stored = []
    for out_name, cache_name, scale_name in SIDES:
        cache = case.bound_field(step, cache_name)
        block_size = cache.extents["token"]
        row, head, dim = rows_heads_dims(cache, rows)
        block = table[owner, position // block_size][:, None, None]
        token = (position % block_size)[:, None, None]
        codes = memory.read(step, cache_name, block=block, token=token, head=head, dim=dim)
        scale = scales_at(memory, step, scale_name, block=block, token=token, head=head)
        out, at = memory.at(step, out_name, token=row, head=head, dim=dim)
        codes = dequantised(codes, cache.dtype, out.dtype, scale)
        stored.append(Stored(out, at, codes, cache.dtype != out.dtype))
    return stored
