"""The references of ops on whole pages: every element of a block, and nothing else.

copy_blocks   block t becomes block s, for each pair (s, t) of block_mapping
swap_blocks   block t of the target caches becomes block s, in another allocation
zero_blocks   every byte of each block of block_ids is 0
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvfuzz.model.case import Program, Step
from kvfuzz.model.layout import Field
from kvfuzz.model.steps import CACHES
from kvfuzz.model.target import Quantise
from kvfuzz.oracles import image
from kvfuzz.oracles.writes import Stored

TARGETS = {"key_cache": "key_target", "value_cache": "value_target"}


def copy_blocks(
    case: Program, step: Step, images: Mapping[str, Tensor], quantise: Quantise
) -> list[Stored]:
    """What the step must store: whole blocks of K and of V, as they were before it."""
    del quantise
    return [_copied(case, step, images, cache, cache) for cache in CACHES]


def swap_blocks(
    case: Program, step: Step, images: Mapping[str, Tensor], quantise: Quantise
) -> list[Stored]:
    """What the step must store: whole blocks of the target caches."""
    del quantise
    return [_copied(case, step, images, cache, TARGETS[cache]) for cache in CACHES]


def zero_blocks(
    case: Program, step: Step, images: Mapping[str, Tensor], quantise: Quantise
) -> list[Stored]:
    """What the step must store: zeros."""
    del quantise
    device = next(iter(images.values())).device
    blocks = torch.tensor(case.integers(step, "block_ids"), device=device)
    stored = []
    for cache in CACHES:
        field = case.bound_field(step, cache)
        at = image.positions(case, field, **_whole(field, blocks))
        stored.append(Stored(field, at, torch.zeros_like(at), converted=False))
    return stored


def _copied(
    case: Program, step: Step, images: Mapping[str, Tensor], source: str, target: str
) -> Stored:
    device = next(iter(images.values())).device
    pairs = torch.tensor(case.integers(step, "block_mapping"), device=device).reshape(-1, 2)
    here, there = case.bound_field(step, source), case.bound_field(step, target)
    start = image.positions(case, here, **_whole(here, pairs[:, 0]))
    codes = image.read(images[here.buffer], start, here.dtype)
    at = image.positions(case, there, **_whole(there, pairs[:, 1]))
    return Stored(there, at, codes, converted=False)


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
