"""A case with its inverse op: what is written is gathered back, what is gathered was written.

Built from the lowered case alone, so that it is about the bytes of that case and no others.
"""

import msgspec

from kvfuzz.model.case import Case, Program, Step
from kvfuzz.model.fill import IntegerFill
from kvfuzz.model.layout import Field
from kvfuzz.model.named_blocks import named_blocks, names_blocks
from kvfuzz.model.parts import Setting, activation_fill, gather_parts, write_parts
from kvfuzz.model.scales import SCALES, least_scale
from kvfuzz.model.steps import is_write


def paged(case: Program, step: Step) -> Field:
    """The field whose blocks a step's metadata name: K, or the first one that has blocks."""
    if "key_cache" in step.fields:
        return case.bound_field(step, "key_cache")
    bound = (case.field(name) for name in step.fields.values())
    return next(field for field in bound if "block" in field.extents)


def seq_starts(case: Program, step: Step) -> tuple[int, ...]:
    """The position of the first token of each sequence that a gather reads: the first of all,
    where the step does not say."""
    if "seq_starts" in step.tensors:
        return case.integers(step, "seq_starts")
    return (0,) * (len(case.integers(step, "cu_seqlens_kv")) - 1)


def runs(case: Program, step: Step) -> list[range]:
    """The positions of each sequence that a step reads: what a gather copies, or all that attention
    may look at."""
    if "seq_lens" in step.tensors:
        return [range(length) for length in case.integers(step, "seq_lens")]
    starts, ends = seq_starts(case, step), case.integers(step, "cu_seqlens_kv")
    return [
        range(start, start + stop - first)
        for start, first, stop in zip(starts, ends, ends[1:], strict=False)
    ]


def touched(case: Program, step: Step) -> list[int]:
    """The slots that a step stores to or reads from, in the order of its rows."""
    n = paged(case, step).extents["token"]
    if is_write(step):
        return [slot for slot in case.integers(step, "slot_mapping") if slot >= 0]
    table, positions = case.integers(step, "block_table"), runs(case, step)
    width = len(table) // len(positions)
    return [
        table[row * width + p // n] * n + p % n for row, run in enumerate(positions) for p in run
    ]


def touched_blocks(case: Program, step: Step, buffer: str = "") -> list[int]:
    """The blocks of the touched slots, each once, in the order of its rows; of a step on whole
    blocks, those that it names of the caches in `buffer`, or else of those that it starts from."""
    if names_blocks(step):
        return named_blocks(case, step, buffer)
    n = paged(case, step).extents["token"]
    return list(dict.fromkeys(slot // n for slot in touched(case, step)))


def with_round_trip(case: Case) -> Case:
    """`case` followed or preceded by its inverse op, executed by the target's partner.

    After a write, each stored token is gathered back as a sequence of its own. Before a gather,
    the tokens that it will read are written. Either way what comes out must be what went in.
    """
    step, setting = case.steps[0], _setting(case)
    slots = touched(case, step)
    if step.op == "reshape_and_cache":
        n, count = setting.geometry.block_size, len(slots)
        parts = gather_parts(
            setting,
            tuple(slot // n for slot in slots),
            tuple(slot % n for slot in slots),
            tuple(range(count + 1)),
            tuple(range(count)),
        )
    else:
        scales = [least_scale(case, step, name) for name in SCALES]
        fills = [activation_fill(setting, scale, "spread") for scale in scales]
        parts = write_parts(setting, tuple(slots), (fills[0], fills[1]), 0)
    inverse = msgspec.structs.replace(parts.step, by="partner")
    return Case(
        buffers=(*case.buffers, *parts.buffers),
        fields=(*case.fields, *parts.fields),
        tensors=(*case.tensors, *parts.tensors),
        steps=(step, inverse) if step.op == "reshape_and_cache" else (inverse, step),
        scene=case.scene,
    )


def _setting(case: Case) -> Setting:
    step = case.steps[0]
    cache = case.bound_field(step, "key_cache")
    fill = case.buffer(cache.buffer).fill
    return Setting(
        case.geometry,
        cache.dtype,
        case.bound_field(step, "key").dtype,
        str(step.scalars["kv_cache_layout"]),
        0 if isinstance(fill, IntegerFill) else fill.seed,
    )
