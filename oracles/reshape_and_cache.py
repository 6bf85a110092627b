"""The reference of `reshape_and_cache`: row t of key and value goes to slot_mapping[t].

slot = block * block_size + token; a negative slot is a padding row and stores nothing.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvfuzz.model.case import Program, Step
from kvfuzz.model.target import Quantise
from kvfuzz.oracles import image
from kvfuzz.oracles.writes import SIDES, Stored, quantised, rows_heads_dims, scales_at


def reshape_and_cache(
    case: Program, step: Step, images: Mapping[str, Tensor], quantise: Quantise
) -> list[Stored]:
    """What the step must store: elements `[stored rows, num_kv_heads, head_size]` of K and of V."""
    device = next(iter(images.values())).device
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
        codes = image.read(
            images[source.buffer],
            image.positions(case, source, token=row, head=head, dim=dim),
            source.dtype,
        )
        scale = scales_at(case, step, scale_name, images, block=block, token=token, head=head)
        at = image.positions(case, cache, block=block, token=token, head=head, dim=dim)
        converted = source.dtype != cache.dtype
        codes = quantised(codes, source.dtype, cache.dtype, scale, quantise)
        stored.append(Stored(cache, at, codes, converted))
    return stored
