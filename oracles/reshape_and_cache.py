"""The reference of `reshape_and_cache`: row t of key and value goes to slot_mapping[t].

slot = block * block_size + token; a negative slot is a padding row and stores nothing.
"""

import torch

from kvfuzz.model.case import Step
from kvfuzz.model.target import Quantise
from kvfuzz.oracles.memory import Memory
from kvfuzz.oracles.writes import SIDES, Stored, quantised, rows_heads_dims, scales_at


def reshape_and_cache(memory: Memory, step: Step, quantise: Quantise) -> list[Stored]:
    """What the step must store: elements `[stored rows, num_kv_heads, head_size]` of K and of V."""
    case, device = memory.case, memory.device
    slots = torch.tensor(case.integers(step, "slot_mapping"), dtype=torch.int64, device=device)
    rows = torch.nonzero(slots >= 0).flatten()
    stored = []
    for source_name, cache_name, scale_name in SIDES:
        source = case.bound_field(step, source_name)
        cache = case.bound_field(step, cache_name)
        block_size = cache.extents["token"]
        row, head, dim = rows_heads_dims(cache, rows)
        slot = slots[rows][:, None, None]
        block, token = slot // block_size, slot % block_size
        codes = memory.read(step, source_name, token=row, head=head, dim=dim)
        scale = scales_at(memory, step, scale_name, block=block, token=token, head=head)
        _, at = memory.at(step, cache_name, block=block, token=token, head=head, dim=dim)
        converted = source.dtype != cache.dtype
        codes = quantised(codes, source.dtype, cache.dtype, scale, quantise)
        stored.append(Stored(cache, at, codes, converted))
    return stored
