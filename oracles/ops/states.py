"""The reference of copy_states: every element of every state of a block, and nothing else."""

import torch

from kvfuzz.model.case import Step
from kvfuzz.model.target import Quantise
from kvfuzz.oracles.memory import Memory
from kvfuzz.oracles.page_ops import pairs_of
from kvfuzz.oracles.writes import Stored


def copy_states(memory: Memory, step: Step, quantise: Quantise) -> list[Stored]:
    """What the step must store: the states of whole blocks, as they were before it."""
    del quantise
    pairs = pairs_of(memory, step)
    stored = []
    for name in step.fields:
        if not name.startswith("state_"):
            continue
        extent = memory.case.bound_field(step, name).extents["dim"]
        elements = torch.arange(extent, device=memory.device)
        codes = memory.read(step, name, block=pairs[:, :1], dim=elements)
        field, at = memory.at(step, name, block=pairs[:, 1:], dim=elements)
        stored.append(Stored(field, at, codes, converted=False))
    return stored
