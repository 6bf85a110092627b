"""What each op's step must bind, and the ranges of its metadata.

A seed may have been edited by hand: whatever passes here can be executed and judged, and nothing
that a kernel is then blamed for was the seed's own fault.
"""

from collections.abc import Iterable

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.case import Case, Step

PAD_SLOT_ID = -1
CACHES, SCALES = ("key_cache", "value_cache"), ("k_scale", "v_scale")
ACTIVATIONS = ("key", "value")
SCALARS = {"kv_cache_layout", "cache_dtype"}


class Binding(msgspec.Struct, frozen=True):
    """The rank of every tensor that a step binds; its fields are the caches and activations."""

    ranks: dict[str, int]


_SHARED = dict.fromkeys(CACHES, 4) | dict.fromkeys(ACTIVATIONS, 3) | dict.fromkeys(SCALES, 1)
BINDINGS: dict[str, Binding] = {
    "reshape_and_cache": Binding(_SHARED | {"slot_mapping": 1}),
    "gather_cache": Binding(
        _SHARED | {"block_table": 2, "seq_starts": 1, "cu_seqlens_kv": 1, "token_to_batch": 1}
    ),
}


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UsageError(f"impossible case: {what}")


def check_steps(case: Case) -> None:
    """Raise UsageError with the first step that cannot be executed or judged."""
    _require(bool(case.steps), "no steps")
    for step in case.steps:
        _require(step.op in BINDINGS, f"op={step.op!r}, expected one of {', '.join(BINDINGS)}")
        _require(case.steps[0].by == "target", "the first step is not by the target")
        _check_bindings(case, step)
        if step.op == "reshape_and_cache":
            _check_write(case, step)
        else:
            _check_gather(case, step)


def _check_bindings(case: Case, step: Step) -> None:
    ranks = BINDINGS[step.op].ranks
    for kind, bound, needed in (
        ("tensors", step.tensors.keys(), ranks.keys()),
        ("fields", step.fields.keys(), {*CACHES, *ACTIVATIONS}),
        ("scalars", step.scalars.keys(), SCALARS),
    ):
        _require(bound == set(needed), f"step {step.op}: {kind} {sorted(bound)}")
    tensors = {tensor.name: tensor for tensor in case.tensors}
    fields = {field.name: field for field in case.fields}
    for parameter, name in step.tensors.items():
        _require(name in tensors, f"step {step.op}: {parameter} is bound to no tensor: {name!r}")
        rank = len(tensors[name].shape)
        _require(rank == ranks[parameter], f"step {step.op}: {parameter} has rank {rank}")
    for parameter, name in step.fields.items():
        _require(name in fields, f"step {step.op}: {parameter} is bound to no field: {name!r}")
        field, tensor = fields[name], tensors[step.tensors[parameter]]
        axes = {"token", "head", "dim"} | ({"block"} if parameter in CACHES else set())
        _require(
            field.extents.keys() == axes
            and {term.axis for term in field.terms} == axes
            and (field.buffer, field.dtype) == (tensor.buffer, tensor.dtype),
            f"step {step.op}: field {name} does not fit tensor {tensor.name}",
        )
    dtype = fields[step.fields["key_cache"]].dtype
    _require(
        step.scalars["cache_dtype"] == dtype == fields[step.fields["value_cache"]].dtype,
        f"step {step.op}: cache_dtype={step.scalars['cache_dtype']!r} over elements of {dtype}",
    )


def _check_within(what: str, values: Iterable[int], low: int, high: int) -> None:
    for value in values:
        _require(low <= value < high, f"{what}={value}, expected {low} to {high - 1}")


def _check_write(case: Case, step: Step) -> None:
    cache = case.bound_field(step, "key_cache").extents
    slots = case.integers(step, "slot_mapping")
    stored = [slot for slot in slots if slot != PAD_SLOT_ID]
    _check_within("slot_mapping", stored, 0, cache["block"] * cache["token"])
    _require(len(set(stored)) == len(stored), "slot_mapping stores a slot twice")
    for name in ACTIVATIONS:
        rows = case.bound_field(step, name).extents["token"]
        _require(rows >= len(slots), f"{name} has {rows} rows for {len(slots)} slots")


def _check_gather(case: Case, step: Step) -> None:
    cache = case.bound_field(step, "key_cache").extents
    starts, ends = case.integers(step, "seq_starts"), case.integers(step, "cu_seqlens_kv")
    owners, table = case.integers(step, "token_to_batch"), case.integers(step, "block_table")
    shape = case.tensor(step.tensors["block_table"]).shape
    _check_within("block_table", table, 0, cache["block"])
    _require(
        len(table) == shape[0] * shape[1] and len(starts) == shape[0] == len(ends) - 1,
        f"block_table {shape} with {len(starts)} starts and {len(ends)} ends",
    )
    expected = [row for row in range(len(starts)) for _ in range(ends[row + 1] - ends[row])]
    _require(
        ends[0] == 0 and list(owners) == expected,
        f"token_to_batch={owners} does not follow cu_seqlens_kv={ends}",
    )
    for row, start in enumerate(starts):
        last = start + ends[row + 1] - ends[row]
        room = shape[1] * cache["token"]
        _require(0 <= start <= last <= room, f"tokens {start}..{last} in a table of {room} tokens")
    for name in ACTIVATIONS:
        rows = case.bound_field(step, name).extents["token"]
        _require(rows >= len(owners), f"{name} has {rows} rows for {len(owners)} tokens")
