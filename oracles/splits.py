"""prefix_split: a batch that is written in several chunks leaves the same bytes as one write.

Engines prefill a prompt at once or in chunks, by what else is scheduled. The chunks are slices of
the same tensors, in order; where they begin, the fill seed decides.
"""

import itertools

import msgspec
import torch

from kvfuzz.model.case import Buffer, Case, Step, TensorView
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.fill import IntegerFill, word
from kvfuzz.model.layout import Field
from kvfuzz.model.steps import ACTIVATIONS, CACHES
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.properties import BASE, Judgement, NotChecked, Runs, Variant, Wanted
from kvfuzz.oracles.related import ended, excluded, same_results, sided

CHUNKED = "chunked"
MOST_CHUNKS = 3


def cuts(case: Case, rows: int) -> list[int]:
    """Where chunks of a write of so many rows begin and end, the ends included."""
    seed = case.scene.fill_seed
    inner = {1 + word(seed, CHUNKED, at) % (rows - 1) for at in range(MOST_CHUNKS - 1)}
    return [0, *sorted(inner), rows]


def chunked(case: Case) -> Case | None:
    """The write in chunks; None where it is of one row."""
    step = case.steps[0]
    if len(case.integers(step, "slot_mapping")) < 2:
        return None
    ends = cuts(case, len(case.integers(step, "slot_mapping")))
    buffers, fields, tensors, steps = list(case.buffers), list(case.fields), list(case.tensors), []
    for low, high in itertools.pairwise(ends):
        slots, view = _slots(case, step, low, high)
        buffers.append(slots)
        tensors.append(view)
        bound = {"slot_mapping": view.name}
        for name in ACTIVATIONS:
            field, rows = _rows(case, step, name, low, high)
            fields.append(field)
            tensors.append(rows)
            bound[name] = rows.name
        fields_bound = {name: bound[name] for name in ACTIVATIONS}
        steps.append(
            msgspec.structs.replace(
                step, tensors={**step.tensors, **bound}, fields={**step.fields, **fields_bound}
            )
        )
    return msgspec.structs.replace(
        case,
        buffers=tuple(buffers),
        fields=tuple(fields),
        tensors=tuple(tensors),
        steps=tuple(steps),
    )


def _slots(case: Case, step: Step, low: int, high: int) -> tuple[Buffer, TensorView]:
    """Slots `low` to `high` in a buffer of their own."""
    view = case.tensor(step.tensors["slot_mapping"])
    values = case.integers(step, "slot_mapping")[low:high]
    name = f"{view.name}.{low}"
    buffer = Buffer(name, len(values) * itemsize(view.dtype), IntegerFill(view.dtype, values))
    return buffer, msgspec.structs.replace(view, name=name, buffer=name, shape=(len(values),))


def _rows(case: Case, step: Step, parameter: str, low: int, high: int) -> tuple[Field, TensorView]:
    """Rows `low` to `high` of key or value where they are."""
    field, view = case.bound_field(step, parameter), case.tensor(step.tensors[parameter])
    name = f"{view.name}.{low}"
    start = field.byte(dict.fromkeys(field.extents, 0) | {"token": low})
    part = msgspec.structs.replace(
        field, name=name, base=start, extents=field.extents | {"token": high - low}
    )
    rows = msgspec.structs.replace(
        view,
        name=name,
        shape=(high - low, *view.shape[1:]),
        offset=view.offset + low * view.strides[0],
    )
    return part, rows


def split_variants(base: Run) -> Wanted:
    """The same write in chunks."""
    if not base.target.batch_invariant:
        return NotChecked("the target does not promise it")
    case = chunked(base.token_case)
    if case is None:
        return NotChecked("a write of one row")
    return excluded(base, case) or {CHUNKED: Variant(case)}


def prefix_split(runs: Runs) -> Judgement:
    """The cache holds the same bytes, those included that nobody was to write."""
    base, other = runs[BASE], runs[CHUNKED]
    step = base.case.steps[0]
    caches = {base.case.bound_field(step, name).buffer for name in CACHES}
    whole = {name: torch.ones_like(base.after[name], dtype=torch.bool) for name in sorted(caches)}
    message = "written in chunks, a byte of the cache is another" + sided(base)
    return ended(other, "in chunks,") or same_results(base, other.after, whole, message)
