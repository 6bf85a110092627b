"""The reference of `slot_mapping`: what `kvfuzz.model.ops.slots` says, token by token.

A position's number among the tokens of its rank is that of whole rounds before it, in each of which
the rank has a run, and of what lies between the begin of the rank's run in its own round and it.
"""

import torch
from torch import Tensor

from kvfuzz.model.case import Step
from kvfuzz.model.steps import PAD_SLOT_ID
from kvfuzz.model.target import Quantise
from kvfuzz.oracles.memory import Memory
from kvfuzz.oracles.writes import Stored


def slot_mapping(memory: Memory, step: Step, quantise: Quantise) -> list[Stored]:
    """What the step must store: every element of slot_mapping."""
    del quantise
    field = memory.case.bound_field(step, "slot_mapping")
    everything = torch.arange(field.extents["token"], device=memory.device)
    slots = torch.full_like(everything, PAD_SLOT_ID)
    requests = torch.arange(_num_requests(memory, step), device=memory.device)
    rows = memory.integers(step, "idx_mapping", token=requests)
    starts = memory.integers(step, "query_start_loc", token=torch.arange(len(requests) + 1))
    for row, start, stop in zip(rows.tolist(), starts.tolist(), starts[1:].tolist(), strict=False):
        if row < 0 or start == stop:
            continue
        tokens = everything[start:stop]
        slots[tokens] = _slots(memory, step, row, memory.integers(step, "positions", token=tokens))
    _, at = memory.at(step, "slot_mapping", token=everything)
    return [Stored(field, at, slots, converted=False)]


def _num_requests(memory: Memory, step: Step) -> int:
    """A batch has as many requests as the tensor that is handed over."""
    return memory.case.tensor(step.tensors["idx_mapping"]).shape[0]


def _slots(memory: Memory, step: Step, row: int, positions: Tensor) -> Tensor:
    """The slots of tokens at `positions` of the request in `row`."""
    size, ranks, rank, run = (
        int(step.scalars[name]) for name in ("block_size", "cp_size", "cp_rank", "cp_interleave")
    )
    # In each round every rank has a run; this rank's begins behind those of the lower ranks.
    rounds = positions // (run * ranks)
    into_own = positions - (rounds * ranks + rank) * run
    is_mine = (into_own >= 0) & (into_own < run)
    before = (rounds * run + into_own)[is_mine]
    slots = torch.full_like(positions, PAD_SLOT_ID)
    if before.numel():
        block = memory.integers(
            step, "block_table", token=torch.full_like(before, row), dim=before // size
        )
        slots[is_mine] = block * size + before % size
    return slots
