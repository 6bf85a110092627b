"""The reference of attention: what `kvfuzz.model.ops.attention` says, in fp64, by sequence.

Elements are found by fields and metadata; those of K and V that no query sees are not read.
"""

import torch
from torch import Tensor

from kvfuzz.model.case import Step
from kvfuzz.model.dtypes import DTYPES, CacheDtype
from kvfuzz.model.ops.attended import softmax_scale
from kvfuzz.model.target import Precision
from kvfuzz.oracles.attention_bound import Scoring, attend
from kvfuzz.oracles.codec import decode
from kvfuzz.oracles.memory import Memory
from kvfuzz.oracles.numerics import Bounded, Numerics
from kvfuzz.oracles.writes import Stored, stored_within

SIDES = (("key_cache", "k_scale"), ("value_cache", "v_scale"))


def attention(memory: Memory, step: Step, precision: Precision) -> list[Stored]:
    """What the step must store: a row of the output for every query token of every sequence."""
    lengths = _numbers(memory, step, "seq_lens")
    if "query_start_loc" in step.fields:
        starts = _numbers(memory, step, "query_start_loc")
    else:
        starts = torch.arange(len(lengths) + 1, device=memory.device)
    numerics = Numerics(
        precision,
        _dtype(memory, step, "output"),
        _dtype(memory, step, "key_cache").is_quantised,
        _dtype(memory, step, "query") if "q_scale" in step.fields else None,
    )
    how = _scoring(memory, step)
    found: list[tuple[Tensor, Bounded]] = []
    for number, length in enumerate(lengths.tolist()):
        rows = torch.arange(int(starts[number]), int(starts[number + 1]), device=memory.device)
        # A kernel may look at the query of an idle request, of which nothing comes.
        query = queries(memory, step, rows)
        if len(rows) and length:
            found.append((rows, _sequence(memory, step, number, length, query, how, numerics)))
    rows = torch.cat([each for each, _ in found])
    within = Bounded(*(torch.cat(each) for each in zip(*(one for _, one in found), strict=True)))
    output = memory.case.bound_field(step, "output").extents
    whole = _whole(rows, output["head"], output["dim"])
    return [stored_within(memory, step, "output", within, **whole)]


def _dtype(memory: Memory, step: Step, parameter: str) -> CacheDtype:
    return DTYPES[memory.case.bound_field(step, parameter).dtype]


def _scoring(memory: Memory, step: Step) -> Scoring:
    heads = memory.case.bound_field(step, "query").extents["head"]

    def of_heads(parameter: str) -> Tensor | None:
        if parameter not in step.fields:
            return None
        codes = memory.read(step, parameter, head=torch.arange(heads, device=memory.device))
        return decode(codes, DTYPES["fp32"]).double()

    cap, slopes, sinks = float(step.scalars["cap"]), of_heads("alibi_slopes"), of_heads("sinks")
    return Scoring(softmax_scale(step.scalars), cap, slopes, sinks)


def _numbers(memory: Memory, step: Step, parameter: str) -> Tensor:
    """All elements of a vector that a target is handed."""
    (count,) = memory.case.tensor(step.tensors[parameter]).shape
    return memory.integers(step, parameter, token=torch.arange(count, device=memory.device))


def _whole(tokens: Tensor, heads: int, dims: int) -> dict[str, Tensor]:
    """Coordinates `[tokens, heads, dims]` of whole tokens."""
    return {
        "token": tokens[:, None, None],
        "head": torch.arange(heads, device=tokens.device)[:, None],
        "dim": torch.arange(dims, device=tokens.device),
    }


def _sequence(
    memory: Memory,
    step: Step,
    number: int,
    length: int,
    query: Tensor,
    how: Scoring,
    numerics: Numerics,
) -> Bounded:
    """The output rows of one sequence `[T, Hq, Dv]`."""
    positions = torch.arange(length - len(query), length, device=memory.device)
    window = int(step.scalars["window"]) or length
    # The first query sees the earliest tokens.
    first = max(0, length - len(query) + 1 - window)
    tokens = torch.arange(first, length, device=memory.device)
    (keys, _), (values, v_scales) = (
        _elements(memory, step, number, tokens, cache, scale) for cache, scale in SIDES
    )
    if first:
        _written_before(memory, step, number, first)
    distance = positions[:, None] - tokens
    seen = (distance >= 0) & (distance < window)
    numerics = numerics._replace(v_scale=float(v_scales.min()))
    how = how._replace(reach=length)
    return attend(query, keys, values, distance.double(), seen, how, numerics).output


def queries(memory: Memory, step: Step, rows: Tensor) -> Tensor:
    """Queries in fp64, `[rows, heads, dims]`, code * scale exactly."""
    field = memory.case.bound_field(step, "query")
    at = _whole(rows, field.extents["head"], field.extents["dim"])
    found = decode(memory.read(step, "query", **at), DTYPES[field.dtype]).double()
    if "q_scale" not in step.fields:
        return found
    codes = memory.read(step, "q_scale", head=torch.zeros(1, dtype=torch.int64, device=rows.device))
    return found * decode(codes, DTYPES["fp32"]).double()


def _written_before(memory: Memory, step: Step, number: int, count: int) -> None:
    """The first `count` tokens of a sequence, which no query sees, were written all the same."""
    ids = memory.case.integers(step, "block_table")
    width = memory.case.tensor(step.tensors["block_table"]).shape[1]
    row = torch.tensor(ids[number * width : (number + 1) * width], device=memory.device)
    tokens = torch.arange(count, device=memory.device)
    for cache, scale in SIDES:
        field = memory.case.bound_field(step, cache)
        columns = tokens // field.extents["token"]
        at = _whole(tokens % field.extents["token"], field.extents["head"], field.extents["dim"])
        at["block"] = row[columns][:, None, None]
        memory.holds_numbers(step, cache, **at)
        if DTYPES[field.dtype].is_quantised:
            memory.holds_numbers(step, scale, **{axis: at[axis] for axis in at if axis != "dim"})
    # An engine may have put the null block in their place, which holds numbers, too.
    memory.holds_numbers(step, "block_table", token=torch.full_like(columns, number), dim=columns)


def _elements(
    memory: Memory, step: Step, number: int, tokens: Tensor, cache: str, scale: str
) -> tuple[Tensor, Tensor]:
    """K or V of tokens of a sequence in fp64: `[tokens, heads, dims]`, code * scale exactly; and
    its scales."""
    field = memory.case.bound_field(step, cache)
    size, dtype = field.extents["token"], DTYPES[field.dtype]
    columns = tokens // size
    block = memory.integers(
        step, "block_table", token=torch.full_like(tokens, number), dim=columns
    )[:, None, None]
    at = _whole(tokens % size, field.extents["head"], field.extents["dim"])
    found = decode(memory.read(step, cache, block=block, **at), dtype).double()
    if not dtype.is_quantised:
        return found, torch.ones(1)
    along = {axis: each for axis, each in (at | {"block": block}).items() if axis != "dim"}
    scales = decode(memory.read(step, scale, **along), DTYPES["fp32"]).double()
    return found * scales, scales
