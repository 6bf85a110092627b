"""The reference of `per_token_head_quant`: a write that chooses the scale of each head of a token.

Row t of key and value goes to slot_mapping[t], as in `reshape_and_cache`; the scale of a head maps
its largest magnitude to the largest number of the cache, and is stored as fp32 for that slot.
"""

import torch

from kvfuzz.model.case import Step
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.target import Quantise
from kvfuzz.oracles.codec import decode
from kvfuzz.oracles.groups import group_codes, group_scales
from kvfuzz.oracles.memory import Memory
from kvfuzz.oracles.writes import SIDES, Stored, rows_heads_dims


def per_token_head_quant(memory: Memory, step: Step, quantise: Quantise) -> list[Stored]:
    """What the step must store: codes `[stored rows, num_kv_heads, head_size]` of K and of V, and
    their scales `[stored rows, num_kv_heads, 1]`."""
    case = memory.case
    slots = torch.tensor(case.integers(step, "slot_mapping"), device=memory.device)
    rows = torch.nonzero(slots >= 0).flatten()
    stored = []
    for source_name, cache_name, scale_name in SIDES:
        source, cache = (case.bound_field(step, name) for name in (source_name, cache_name))
        row, head, dim = rows_heads_dims(cache, rows)
        slot = slots[rows][:, None, None]
        place = {
            "block": slot // cache.extents["token"],
            "token": slot % cache.extents["token"],
            "head": head,
        }
        codes = memory.read(step, source_name, token=row, head=head, dim=dim)
        values = decode(codes, DTYPES[source.dtype])
        scale = group_scales(values.abs().amax(-1, keepdim=True), cache.dtype, quantise)
        _, at = memory.at(step, cache_name, **place, dim=dim)
        found = group_codes(values, scale, cache.dtype, quantise)
        stored.append(Stored(cache, at, found, converted=True))
        scales, at = memory.at(step, scale_name, **place)
        bits = scale.view(torch.int32).to(torch.int64)
        stored.append(Stored(scales, at.expand(bits.shape), bits, converted=False))
    return stored
