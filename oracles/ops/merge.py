"""The reference of merge_attn_states: what `kvfuzz.model.ops.merge` says, in fp64.

Elements are found by fields. Results of an empty part are not read, nor is anything of the prefix
of a token that has none, nor what nobody asks for.
"""

import math

import torch
from torch import Tensor

from kvfuzz.model.case import Step
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.ops.merge import PREFIX, SUFFIX, WITH_CONTEXT
from kvfuzz.model.target import Precision
from kvfuzz.oracles.codec import decode
from kvfuzz.oracles.memory import Memory
from kvfuzz.oracles.merge_bound import Part, merged, merged_lse
from kvfuzz.oracles.writes import Stored, rows_heads_dims, stored_within


def merge_attn_states(memory: Memory, step: Step, precision: Precision) -> list[Stored]:
    """What the step must store: every head of every token, and its log-sum-exp if it is asked
    for."""
    tokens, heads, _ = memory.case.tensor(step.tensors["output"]).shape
    context = int(step.scalars.get(WITH_CONTEXT, tokens))
    every = torch.arange(tokens, device=memory.device)
    found = []
    if context:
        token = every[:context].repeat_interleave(heads)
        head = torch.arange(heads, device=memory.device).repeat(context)
        found += _merged(memory, step, token, head, precision)
    if context < tokens:
        found += _copied(memory, step, every[context:])
    return found


def _merged(
    memory: Memory, step: Step, token: Tensor, head: Tensor, precision: Precision
) -> list[Stored]:
    prefix, suffix = (_part(memory, step, each, token, head) for each in (PREFIX, SUFFIX))
    model = DTYPES[memory.case.bound_field(step, "output").dtype]
    results = merged(prefix, suffix, precision, model)
    at = _elements(memory, step, "output", token, head)
    found = [stored_within(memory, step, "output", results, **at)]
    if "output_lse" in step.fields:
        lse = merged_lse(prefix.lse, suffix.lse)
        found.append(stored_within(memory, step, "output_lse", lse, token=token, head=head))
    return found


def _part(memory: Memory, step: Step, part: str, token: Tensor, head: Tensor) -> Part:
    """A part of some heads of some tokens, `[n, D]` and `[n]`."""
    codes = memory.read(step, f"{part}_lse", token=token, head=head)
    lse = decode(codes, DTYPES["fp32"]).double()
    there = lse.abs() < math.inf
    name = f"{part}_output"
    field = memory.case.bound_field(step, name)
    output = torch.zeros(len(token), field.extents["dim"], dtype=torch.float64, device=lse.device)
    if bool(there.any()):
        at = _elements(memory, step, name, token[there], head[there])
        output[there] = decode(memory.read(step, name, **at), DTYPES[field.dtype]).double()
    return Part(output, torch.where(there, lse, -math.inf))


def _elements(
    memory: Memory, step: Step, parameter: str, token: Tensor, head: Tensor
) -> dict[str, Tensor]:
    """Coordinates `[n, D]` of whole heads."""
    size = memory.case.bound_field(step, parameter).extents["dim"]
    dim = torch.arange(size, device=memory.device)
    return {"token": token[:, None], "head": head[:, None], "dim": dim}


def _copied(memory: Memory, step: Step, rows: Tensor) -> list[Stored]:
    """Tokens without a prefix: the bits of the suffix."""
    token, head, dim = rows_heads_dims(memory.case.bound_field(step, "output"), rows)
    found = [_copy(memory, step, f"{SUFFIX}_output", "output", token=token, head=head, dim=dim)]
    if "output_lse" in step.fields:
        at = {"token": rows[:, None], "head": head[0, :, 0]}
        found.append(_copy(memory, step, f"{SUFFIX}_lse", "output_lse", **at))
    return found


def _copy(memory: Memory, step: Step, source: str, goal: str, **at: Tensor) -> Stored:
    codes = memory.read(step, source, **at)
    field, positions = memory.at(step, goal, **at)
    return Stored(field, positions, codes, converted=False)
