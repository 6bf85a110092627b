"""The reference of decode over MLA's latent: what `kvfuzz.model.ops.mla` says, in fp64.

A row is found by block table and fields, latent and rotary part each by its own; tokens behind a
sequence are not read. Keys and values are the same latent elements.
"""

import torch
from torch import Tensor

from kvfuzz.model.case import Step
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.ops.attended import softmax_scale
from kvfuzz.model.target import Precision
from kvfuzz.oracles.attention_bound import Attended, Scoring, attend
from kvfuzz.oracles.codec import decode
from kvfuzz.oracles.memory import Memory
from kvfuzz.oracles.numerics import Bounded, Numerics
from kvfuzz.oracles.ops.attention import queries
from kvfuzz.oracles.writes import Stored, stored_within


def mla_decode(memory: Memory, step: Step, precision: Precision) -> list[Stored]:
    """What the step must store: a row of the output, and of lse, for every sequence."""
    (count,) = memory.case.tensor(step.tensors["seq_lens"]).shape
    sequences = torch.arange(count, device=memory.device)
    lengths = memory.integers(step, "seq_lens", token=sequences)
    how = Scoring(softmax_scale(step.scalars), float(step.scalars["cap"]), None, None)
    cache = DTYPES[memory.case.bound_field(step, "cached_latent").dtype]
    model = DTYPES[memory.case.bound_field(step, "query").dtype]
    numerics = Numerics(precision, model, cache.is_quantised)
    scale = _scale(memory, step) if cache.is_quantised else 1.0
    # A kernel may look at the query of an idle request, of which nothing comes.
    asked = queries(memory, step, sequences)
    sequences = sequences[lengths > 0]
    found = [
        _sequence(memory, step, number, int(lengths[number]), asked[number], scale, how, numerics)
        for number in sequences.tolist()
    ]
    outputs, lses = zip(*found, strict=True)
    heads = memory.case.bound_field(step, "query").extents["head"]
    rows, head = sequences[:, None], torch.arange(heads, device=memory.device)
    dims = torch.arange(memory.case.bound_field(step, "output").extents["dim"], device=rows.device)
    whole = {"token": rows[:, :, None], "head": head[:, None], "dim": dims}
    lse_dtype = DTYPES[memory.case.bound_field(step, "lse").dtype]
    return [
        stored_within(memory, step, "output", _joined(outputs), **whole),
        stored_within(memory, step, "lse", _joined(lses).rounded(lse_dtype), token=rows, head=head),
    ]


def _joined(parts: tuple[Bounded, ...]) -> Bounded:
    return Bounded(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _scale(memory: Memory, step: Step) -> float:
    """The one scale of the cache."""
    at = torch.zeros(1, dtype=torch.int64, device=memory.device)
    return float(decode(memory.read(step, "k_scale", token=at), DTYPES["fp32"]))


def _sequence(
    memory: Memory,
    step: Step,
    number: int,
    length: int,
    asked: Tensor,
    scale: float,
    how: Scoring,
    numerics: Numerics,
) -> Attended:
    """The output `[1, Hq, R]` and the lse `[1, Hq]` of one sequence, whose query is `[Hq, D]`."""
    tokens = torch.arange(length, device=memory.device)
    latent, rope = (
        _elements(memory, step, number, tokens, part) * scale
        for part in ("cached_latent", "cached_rope")
    )
    keys = torch.cat([latent, rope], dim=-1)
    distance = (length - 1 - tokens)[None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    return attend(asked[None], keys, latent, distance.double(), seen, how, numerics)


def _elements(memory: Memory, step: Step, number: int, tokens: Tensor, part: str) -> Tensor:
    """A part of the rows of a sequence as numbers, fp64 `[tokens, 1, dims]`."""
    field = memory.case.bound_field(step, part)
    size = field.extents["token"]
    block = memory.integers(
        step, "block_table", token=torch.full_like(tokens, number), dim=tokens // size
    )
    codes = memory.read(
        step,
        part,
        block=block[:, None],
        token=(tokens % size)[:, None],
        dim=torch.arange(field.extents["dim"], device=tokens.device),
    )
    return decode(codes, DTYPES[field.dtype]).double()[:, None, :]
