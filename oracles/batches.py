"""batch_invariance: a token's bytes do not depend on who else is in the batch, or where.

One run has the rows of a write, or the sequences of a gather, in the opposite order; another has
one row alone, as a slice of the same tensors. Only for targets that promise it.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from kvfuzz.model.case import Buffer, Case, TensorView
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.fill import IntegerFill, word
from kvfuzz.model.round_trip import touched
from kvfuzz.model.steps import ACTIVATIONS, is_write
from kvfuzz.oracles.liveness import row_elements
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.properties import BASE, Judgement, NotChecked, Runs, Variant, Wanted
from kvfuzz.oracles.related import carry, ended, excluded, same_elements

REVERSED, ALONE = "reversed", "alone"
_WORDS = {REVERSED: "in a batch of the opposite order", ALONE: "alone"}


class Rebatched(NamedTuple):
    """A case of some tokens of another: token `tokens[i]` there is token `i` here."""

    case: Case
    tokens: list[int]


def rebatched(case: Case) -> dict[str, Rebatched]:
    """The other batches, by name; none of a batch of one row.

    A token is a row with a slot, counted in the order of the rows.
    """
    step = case.steps[0]
    if is_write(step):
        slots = case.integers(step, "slot_mapping")
        if len(slots) == 1:
            return {}
        tokens = len([slot for slot in slots if slot >= 0])
        found = {REVERSED: _reversed_write(case)}
        if tokens:
            found[ALONE] = _alone_in_write(case, _chosen(case, tokens))
        return found
    owners = case.integers(step, "token_to_batch")
    found = {}
    if len(case.integers(step, "seq_starts")) > 1:
        found[REVERSED] = _reversed_gather(case)
    if len(owners) > 1:
        found[ALONE] = _alone_in_gather(case, _chosen(case, len(owners)))
    return found


def _chosen(case: Case, count: int) -> int:
    return word(case.scene.fill_seed, ALONE, 0) % count


def _reversed_write(case: Case) -> Rebatched:
    """All rows in the opposite order; the images of key and value follow in `batch_variants`."""
    slots = case.integers(case.steps[0], "slot_mapping")
    tokens = list(range(len(touched(case, case.steps[0]))))
    return Rebatched(_with_metadata(case, {"slot_mapping": slots[::-1]}), tokens[::-1])


def _alone_in_write(case: Case, token: int) -> Rebatched:
    slots = case.integers(case.steps[0], "slot_mapping")
    row = [row for row, slot in enumerate(slots) if slot >= 0][token]
    alone = _with_metadata(case, {"slot_mapping": (slots[row],)})
    return Rebatched(_with_row(alone, row), [token])


def _reversed_gather(case: Case) -> Rebatched:
    step = case.steps[0]
    starts, ends = case.integers(step, "seq_starts"), case.integers(step, "cu_seqlens_kv")
    table = case.integers(step, "block_table")
    width = len(table) // len(starts)
    order = range(len(starts) - 1, -1, -1)
    lengths = [ends[each + 1] - ends[each] for each in order]
    metadata = {
        "block_table": [table[each * width + c] for each in order for c in range(width)],
        "seq_starts": starts[::-1],
        "cu_seqlens_kv": list(itertools.accumulate(lengths, initial=0)),
        "token_to_batch": [at for at, length in enumerate(lengths) for _ in range(length)],
    }
    tokens = [token for each in order for token in range(ends[each], ends[each + 1])]
    return Rebatched(_with_metadata(case, metadata), tokens)


def _alone_in_gather(case: Case, token: int) -> Rebatched:
    step = case.steps[0]
    owner = case.integers(step, "token_to_batch")[token]
    starts, ends = case.integers(step, "seq_starts"), case.integers(step, "cu_seqlens_kv")
    table = case.integers(step, "block_table")
    width = len(table) // len(starts)
    metadata = {
        "block_table": table[owner * width : (owner + 1) * width],
        "seq_starts": (starts[owner] + token - ends[owner],),
        "cu_seqlens_kv": (0, 1),
        "token_to_batch": (0,),
    }
    return Rebatched(_with_row(_with_metadata(case, metadata), token), [token])


def _with_metadata(case: Case, metadata: Mapping[str, Sequence[int]]) -> Case:
    """`case` with other written-out integers; the views keep their strides and follow in size."""
    step = case.steps[0]
    buffers = {buffer.name: buffer for buffer in case.buffers}
    tensors = {tensor.name: tensor for tensor in case.tensors}
    for parameter, values in metadata.items():
        view = case.tensor(step.tensors[parameter])
        old = case.buffer(view.buffer).fill
        if isinstance(old, IntegerFill):
            fill = msgspec.structs.replace(old, values=tuple(values))
            buffers[view.buffer] = Buffer(view.buffer, len(values) * itemsize(old.dtype), fill)
        inner = len(case.integers(step, parameter)) // view.shape[0]
        shape = (len(values) // inner, *view.shape[1:])
        tensors[view.name] = msgspec.structs.replace(view, shape=shape)
    return msgspec.structs.replace(
        case, buffers=tuple(buffers.values()), tensors=tuple(tensors.values())
    )


def _with_row(case: Case, row: int) -> Case:
    """`case` with views and fields of key and value that hold one of their rows alone."""
    step = case.steps[0]
    fields = {field.name: field for field in case.fields}
    tensors = {tensor.name: tensor for tensor in case.tensors}
    for parameter in ACTIVATIONS:
        view, field = case.tensor(step.tensors[parameter]), case.bound_field(step, parameter)
        tensors[view.name] = _sliced(view, row)
        base = field.byte(dict.fromkeys(field.extents, 0) | {"token": row})
        extents = field.extents | {"token": 1}
        fields[field.name] = msgspec.structs.replace(field, base=base, extents=extents)
    return msgspec.structs.replace(
        case, fields=tuple(fields.values()), tensors=tuple(tensors.values())
    )


def _sliced(view: TensorView, row: int) -> TensorView:
    """`view[row:row + 1]`."""
    return msgspec.structs.replace(
        view, shape=(1, *view.shape[1:]), offset=view.offset + row * view.strides[0]
    )


def batch_variants(base: Run) -> Wanted:
    """The other batches that are inside the domain."""
    if not base.target.batch_invariant:
        return NotChecked("the target does not promise it")
    variants: dict[str, Variant] = {}
    reason = NotChecked("a batch of one row")
    for name, other in rebatched(base.token_case).items():
        if found := excluded(base, other.case):
            reason = found
        else:
            variants[name] = Variant(other.case, images=_images(base, name))
    return variants or reason


def _images(base: Run, name: str) -> dict[str, Tensor]:
    """Key and value with their rows in the opposite order, where a write reads them so."""
    case, step = base.case, base.case.steps[0]
    if name != REVERSED or not is_write(step):
        return {}
    rows = torch.arange(len(case.integers(step, "slot_mapping")), device=base.device)
    images: dict[str, Tensor] = {}
    here, there = row_elements(case, step, rows), row_elements(case, step, rows.flip(0))
    for source, goal in zip(here, there, strict=True):
        buffer = goal.field.buffer
        images.setdefault(buffer, base.before[buffer].clone())
        carry(base.before[buffer], source, goal, images[buffer])
    return images


def batch_invariance(runs: Runs) -> Judgement:
    """The same tokens in other company leave the same bytes."""
    base = runs[BASE]
    for name, batch in rebatched(base.token_case).items():
        if name not in runs:
            continue
        other, words = runs[name], _WORDS[name]
        tokens = torch.tensor(batch.tokens, dtype=torch.int64, device=base.device)
        mine = [each._replace(at=each.at[tokens]) for each in base.writes]
        found = ended(other, f"{words},") or same_elements(
            base, other, mine, other.writes, f"{words}, a token gets another byte"
        )
        if found:
            return found
    return None
