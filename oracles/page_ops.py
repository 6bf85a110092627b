"""The references of ops on whole pages: every element of a block, and nothing else.

copy_blocks   block t becomes block s, for each pair (s, t) of block_mapping
swap_blocks   block t of the target caches becomes block s, in another allocation
zero_blocks   every byte of each block of block_ids is 0
"""

import torch
from torch import Tensor

from kvfuzz.model.case import Step
from kvfuzz.model.layout import Field
from kvfuzz.model.steps import CACHES
from kvfuzz.model.target import Quantise
from kvfuzz.oracles.memory import Memory
from kvfuzz.oracles.writes import Stored

TARGETS = {"key_cache": "key_target", "value_cache": "value_target"}


def copy_blocks(memory: Memory, step: Step, quantise: Quantise) -> list[Stored]:
    """What the step must store: whole blocks of K and of V, as they were before it."""
    del quantise
    return [_copied(memory, step, cache, cache) for cache in CACHES]


def swap_blocks(memory: Memory, step: Step, quantise: Quantise) -> list[Stored]:
    """What the step must store: whole blocks of the target caches."""
    del quantise
    return [_copied(memory, step, cache, TARGETS[cache]) for cache in CACHES]


def zero_blocks(memory: Memory, step: Step, quantise: Quantise) -> list[Stored]:
    """What the step must store: zeros."""
    del quantise
    rows = torch.arange(_entries(memory, step, "block_ids"), device=memory.device)
    blocks = memory.integers(step, "block_ids", token=rows)
    stored = []
    for cache in CACHES:
        whole = _whole(memory.case.bound_field(step, cache), blocks)
        field, at = memory.at(step, cache, **whole)
        stored.append(Stored(field, at, torch.zeros_like(at), converted=False))
    return stored


def _copied(memory: Memory, step: Step, source: str, target: str) -> Stored:
    pairs = pairs_of(memory, step)
    here, there = (memory.case.bound_field(step, name) for name in (source, target))
    codes = memory.read(step, source, **_whole(here, pairs[:, 0]))
    _, at = memory.at(step, target, **_whole(there, pairs[:, 1]))
    return Stored(there, at, codes, converted=False)


def pairs_of(memory: Memory, step: Step) -> Tensor:
    """The pairs (from, to) of a step; int64 `[n, 2]`."""
    rows = torch.arange(_entries(memory, step, "block_mapping"), device=memory.device)
    sides = torch.arange(2, device=memory.device)
    return memory.integers(step, "block_mapping", token=rows[:, None], dim=sides)


def _entries(memory: Memory, step: Step, name: str) -> int:
    """A step has as many entries as the tensor that is handed over."""
    return memory.case.tensor(step.tensors[name]).shape[0]


def _whole(field: Field, blocks: Tensor) -> dict[str, Tensor]:
    """Coordinates of every element of `blocks`: they broadcast to `[blocks, tokens, heads, dims]`.

    The other axes are counted out in full.
    """
    sizes = [field.extents[axis] for axis in ("token", "head", "dim")]
    token, head, dim = (torch.arange(size, device=blocks.device) for size in sizes)
    return {
        "block": blocks[:, None, None, None],
        "token": token[None, :, None, None],
        "head": head[None, None, :, None],
        "dim": dim[None, None, None, :],
    }
