"""Which elements an op reads and writes by its contract alone, and so which bytes may matter.

Of a cache a gather reads the slots that its metadata name and a write none; of key and value a
write reads the rows that have a slot and a gather none; a scale inside a page is read with its
slot. Of a block table the entries count that some token of their sequence needs, of other metadata
those of the batch. Every other byte of these buffers is *dead*: unused blocks, Mamba state, the
padding of pages, gaps between rows, stale entries, whatever an output held before. All bytes of
other buffers are live.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kvfuzz.model.case import Program, Step
from kvfuzz.model.layout import Field
from kvfuzz.model.round_trip import touched, touched_blocks
from kvfuzz.model.steps import ACTIVATIONS, CACHES, METADATA, OUTPUTS, is_write
from kvfuzz.oracles import image
from kvfuzz.oracles.memory import Elements


def slots_of(case: Program, step: Step, device: torch.device) -> Tensor:
    """The slots that a step reads or stores, in the order of its rows; int64 `[tokens]`."""
    return torch.tensor(touched(case, step), dtype=torch.int64, device=device)


def rows_of(case: Program, step: Step, device: torch.device) -> Tensor:
    """The rows of key and value that have a token, beside `slots_of`; int64 `[tokens]`."""
    if is_write(step):
        slots = torch.tensor(case.integers(step, "slot_mapping"), device=device)
        return torch.nonzero(slots >= 0).flatten()
    return torch.arange(len(case.integers(step, "token_to_batch")), device=device)


def read_elements(case: Program, step: Step, device: torch.device) -> list[Elements]:
    """What a step reads of the buffers that have dead bytes, token by token."""
    written = OUTPUTS[step.op]
    paged = [each for each in step.fields if each not in (*written, *ACTIVATIONS)]
    found = cache_elements(case, step, device, paged)
    return (
        found + row_elements(case, step, rows_of(case, step, device)) if is_write(step) else found
    )


def written_elements(case: Program, step: Step, device: torch.device) -> list[Elements]:
    """What a step writes, token by token: of K, or key, of V, or value, and of scales it makes."""
    if is_write(step):
        return cache_elements(case, step, device, OUTPUTS[step.op])
    return row_elements(case, step, rows_of(case, step, device))


def cache_elements(
    case: Program, step: Step, device: torch.device, parameters: Sequence[str]
) -> list[Elements]:
    """The elements of a step's slots in those of K, V, and what else is found by the slot."""
    slots, found = slots_of(case, step, device), []
    for parameter in parameters:
        field = case.bound_field(step, parameter)
        if "block" in field.extents:
            n = case.bound_field(step, CACHES[0]).extents["token"]
            found.append(_elements(case, parameter, field, slots % n, slots // n))
    return found


def row_elements(case: Program, step: Step, rows: Tensor) -> list[Elements]:
    """The elements of `rows` in key and in value."""
    return [
        _elements(case, parameter, case.bound_field(step, parameter), rows)
        for parameter in ACTIVATIONS
    ]


def _elements(
    case: Program, parameter: str, field: Field, token: Tensor, block: Tensor | None = None
) -> Elements:
    device, extents = token.device, field.extents
    coordinates = {
        "token": token[:, None, None],
        "head": torch.arange(extents.get("head", 1), device=device)[None, :, None],
        "dim": torch.arange(extents.get("dim", 1), device=device),
    }
    if block is not None:
        coordinates["block"] = block[:, None, None]
    known = {axis: coordinates[axis] for axis in extents}
    return Elements(parameter, field, image.positions(case, field, **known))


def near_elements(case: Program, field: Field, device: torch.device) -> Tensor:
    """The positions of all elements of `field`, of a cache in the blocks that its steps name."""
    along = {axis: torch.arange(extent, device=device) for axis, extent in field.extents.items()}
    if "block" in along:
        named = sorted({b for step in case.steps for b in touched_blocks(case, step, field.buffer)})
        along["block"] = torch.tensor(named, dtype=torch.int64, device=device)
    shaped = {
        axis: each.view([-1 if other == axis else 1 for other in along])
        for axis, each in along.items()
    }
    return image.positions(case, field, **shaped).to(device)


def used_metadata(case: Program, step: Step) -> dict[str, list[bool]]:
    """Which entries count, of the metadata of a gather of which some do not: of a block table those
    that its tokens need, of others those of the batch.

    Behind the slots of a write lies padding, which a target may read and leave alone.
    """
    if is_write(step):
        return {}
    found = {"block_table": [entry for row in used_entries(case, step) for entry in row]}
    for name in METADATA[step.op]:
        used = found.get(name, [True] * len(case.integers(step, name)))
        if behind := len(case.written_out(step, name)) - len(used):
            found[name] = used + [False] * behind
    return found


def used_entries(case: Program, step: Step) -> list[list[bool]]:
    """Which entries of a gather's block table its tokens need; by sequence and column."""
    n = case.bound_field(step, CACHES[0]).extents["token"]
    starts, ends = case.integers(step, "seq_starts"), case.integers(step, "cu_seqlens_kv")
    width = len(case.integers(step, "block_table")) // len(starts)
    lengths = [end - begin for begin, end in itertools.pairwise(ends)]
    needed = [
        range(start // n, (start + length - 1) // n + 1) if length else ()
        for start, length in zip(starts, lengths, strict=True)
    ]
    return [[column in columns for column in range(width)] for columns in needed]


def live_bytes(case: Program, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By buffer that has dead bytes, the live ones; bool per held byte, as in `images`."""
    every = {name: torch.ones_like(each, dtype=torch.bool) for name, each in images.items()}
    device = next(iter(images.values())).device
    reads = [each for step in case.steps for each in read_elements(case, step, device)]
    return {name: ~dead for name, dead in dead_among(case, every, reads).items()}


def loaded_bytes(images: Mapping[str, Tensor], loaded: Iterable[Elements]) -> dict[str, Tensor]:
    """By buffer, the bytes of the elements that were loaded; bool per held byte."""
    live = {name: torch.zeros_like(each, dtype=torch.bool) for name, each in images.items()}
    for each in loaded:
        image.mark(live[each.field.buffer], each.at, each.field.dtype)
    return live


def dead_among(
    case: Program, marked: Mapping[str, Tensor], reads: Iterable[Elements]
) -> dict[str, Tensor]:
    """By buffer that has dead bytes, those of them that are `marked`; bool per held byte. `reads`
    is what the steps read of such buffers."""
    fields = {
        case.bound_field(step, parameter).buffer
        for step in case.steps
        for parameter in {*CACHES, *ACTIVATIONS, *OUTPUTS[step.op]}
    }
    metadata = {
        case.bound_buffer(step, name): used
        for step in case.steps
        for name, used in used_metadata(case, step).items()
    }
    dead = {n: each.clone() for n, each in marked.items() if n in fields or n in metadata}
    for elements in reads:
        if elements.field.buffer in dead:
            image.mark(dead[elements.field.buffer], elements.at, elements.field.dtype, to=False)
    for name in dead.keys() & metadata.keys():
        used = torch.tensor(metadata[name], device=dead[name].device)
        dead[name] &= ~used.repeat_interleave(dead[name].numel() // len(used))
    return dead
