"""What each op's step must bind, and the ranges of its metadata.

A seed may have been edited by hand: whatever passes here can be executed and judged, and nothing
that a kernel is then blamed for was the seed's own fault.
"""

from collections.abc import Iterable

from kvfuzz.errors import UsageError
from kvfuzz.model.case import Program, Step
from kvfuzz.model.layout import Field
from kvfuzz.model.placement import SCALE_AXES
from kvfuzz.model.scales import SCALES, least_scale
from kvfuzz.model.views import RANKS

PAD_SLOT_ID = -1
CACHES = ("key_cache", "value_cache")
INFINITY = 0x7F800000
"""The bit pattern of an fp32; positive numbers are below."""
INLINE = set(SCALE_AXES["token_head_inline"])
ACTIVATIONS = ("key", "value")
SCALARS = {"kv_cache_layout", "cache_dtype"}


PAGE_OPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "copy_blocks": ("block_mapping", CACHES),
    "swap_blocks": ("block_mapping", (*CACHES, "key_target", "value_target")),
    "zero_blocks": ("block_ids", CACHES),
}
"""By op on whole pages, its metadata and its caches. `block_mapping` is `[n, 2]` pairs (from, to),
`block_ids` `[n]`; a swap is into the caches that are its targets."""

METADATA: dict[str, dict[str, int]] = {
    "reshape_and_cache": {"slot_mapping": 1},
    "gather_cache": {"block_table": 2, "seq_starts": 1, "cu_seqlens_kv": 1, "token_to_batch": 1},
    "per_token_head_quant": {"slot_mapping": 1},
}
"""By op, the metadata tensors that a step binds beside the rest, with their ranks."""

OUTPUTS: dict[str, tuple[str, ...]] = {
    "reshape_and_cache": CACHES,
    "gather_cache": ACTIVATIONS,
    "per_token_head_quant": (*CACHES, *SCALES),
}
"""By op, the parameters that it writes."""


def is_write(step: Step) -> bool:
    """Whether a step writes rows of activations into slots."""
    return "slot_mapping" in step.tensors


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UsageError(f"impossible case: {what}")


def check_steps(case: Program) -> None:
    """Raise UsageError with the first step that cannot be executed or judged."""
    _require(bool(case.steps), "no steps")
    for step in case.steps:
        if step.op in PAGE_OPS:
            _check_pages(case, step)
            continue
        _require(step.op in METADATA, f"op={step.op!r}, expected one of {', '.join(METADATA)}")
        _require(case.steps[0].by == "target", "the first step is not by the target")
        _check_bindings(case, step)
        for name in SCALES if SCALES[0] not in OUTPUTS[step.op] else ():
            bits = least_scale(case, step, name)
            _require(0 < bits < INFINITY, f"step {step.op}: {name}=0x{bits:08x}, not positive")
        if is_write(step):
            _check_write(case, step)
        else:
            _check_gather(case, step)


def _check_pages(case: Program, step: Step) -> None:
    """A step on whole pages: its caches are alike, and no block is written twice, or read too."""
    metadata, caches = PAGE_OPS[step.op]
    for kind, bound, needed in (
        ("tensors", step.tensors.keys(), {*caches, metadata}),
        ("fields", step.fields.keys(), {*caches, metadata}),
        ("scalars", step.scalars.keys(), set[str]()),
    ):
        _require(bound == needed, f"step {step.op}: {kind} {sorted(bound)}")
    tensors = {tensor.name: tensor for tensor in case.tensors}
    fields = {field.name: field for field in case.fields}
    for name in (*step.tensors.values(), *step.fields.values()):
        _require(name in tensors or name in fields, f"step {step.op}: there is no {name!r}")
    extents = {name: fields[step.fields[name]].extents for name in caches}
    for name in caches:
        field, tensor = fields[step.fields[name]], tensors[step.tensors[name]]
        source = CACHES[0] if name.startswith("key") else CACHES[1]
        _require(
            (field.buffer, field.dtype) == (tensor.buffer, tensor.dtype)
            and len(tensor.shape) == len(extents[name]) == 4
            and all(extents[name][a] == extents[source][a] for a in ("token", "head", "dim"))
            and extents[name]["block"] == extents[_pair(name)]["block"],
            f"step {step.op}: {name} {extents[name]} does not fit {source} {extents[source]}",
        )
    ids = case.integers(step, metadata)
    pairs = metadata == "block_mapping"
    shape = tensors[step.tensors[metadata]].shape
    _require(
        shape == ((len(ids) // 2, 2) if pairs else (len(ids),)),
        f"step {step.op}: {metadata} is {shape} with {len(ids)} numbers",
    )
    sources, targets = (ids[::2], ids[1::2]) if pairs else ((), ids)
    there = extents["key_target" if "key_target" in extents else "key_cache"]["block"]
    _check_within(f"step {step.op}: {metadata}", sources, 0, extents["key_cache"]["block"])
    _check_within(f"step {step.op}: {metadata}", targets, 0, there)
    _require(len(set(targets)) == len(targets), f"step {step.op}: a block is written twice")
    if step.op == "copy_blocks":
        _require(not set(sources) & set(targets), f"step {step.op}: a block is read and written")


def _pair(name: str) -> str:
    """The cache of the other side: of K that of V, and of V that of K."""
    return name.replace("key", "value") if name.startswith("key") else name.replace("value", "key")


def _check_bindings(case: Program, step: Step) -> None:
    _check_names(step)
    tensors = {tensor.name: tensor for tensor in case.tensors}
    fields = {field.name: field for field in case.fields}
    ranks = _ranks(step)
    for parameter, name in step.tensors.items():
        _require(name in tensors, f"step {step.op}: {parameter} is bound to no tensor: {name!r}")
        rank = len(tensors[name].shape)
        _require(rank in ranks[parameter], f"step {step.op}: {parameter} has rank {rank}")
    for parameter, name in step.fields.items():
        _require(name in fields, f"step {step.op}: {parameter} is bound to no field: {name!r}")
        field, tensor = fields[name], tensors[step.tensors[parameter]]
        _require(
            field.extents.keys() == {term.axis for term in field.terms}
            and (field.buffer, field.dtype) == (tensor.buffer, tensor.dtype),
            f"step {step.op}: field {name} does not fit tensor {tensor.name}",
        )
    _check_axes(step, {name: fields[bound] for name, bound in step.fields.items()})


def _check_names(step: Step) -> None:
    for kind, bound, needed in (
        ("tensors", step.tensors.keys(), {*CACHES, *SCALES, *ACTIVATIONS, *METADATA[step.op]}),
        ("fields", step.fields.keys(), {*CACHES, *SCALES, *ACTIVATIONS}),
        ("scalars", step.scalars.keys(), SCALARS),
    ):
        _require(bound == needed, f"step {step.op}: {kind} {sorted(bound)}")
    spelt = step.scalars["kv_cache_layout"]
    _require(
        spelt in RANKS, f"step {step.op}: kv_cache_layout={spelt!r}, expected one of {list(RANKS)}"
    )


def _ranks(step: Step) -> dict[str, tuple[int, ...]]:
    """The ranks that each tensor of a step may have."""
    caches = RANKS[str(step.scalars["kv_cache_layout"])]
    exact = dict(zip(CACHES, caches, strict=True)) | dict.fromkeys(ACTIVATIONS, 3)
    ranks: dict[str, tuple[int, ...]] = dict.fromkeys(SCALES, (1, 2, 3))
    return ranks | {name: (rank,) for name, rank in (exact | METADATA[step.op]).items()}


def _check_axes(step: Step, bound: dict[str, Field]) -> None:
    """Caches, scales and activations are about the same blocks, tokens, heads and dims."""
    key_cache = bound["key_cache"]
    sizes = {name: field.extents for name, field in bound.items()}
    for cache, activation in zip(CACHES, ACTIVATIONS, strict=True):
        _require(
            sizes[cache].keys() == {"block", "token", "head", "dim"}
            and sizes[activation].keys() == {"token", "head", "dim"}
            and all(sizes[cache][a] == sizes[activation][a] for a in ("head", "dim"))
            and all(sizes[cache][a] == key_cache.extents[a] for a in ("block", "token", "head")),
            f"step {step.op}: {cache} {sizes[cache]} does not fit {activation} {sizes[activation]}",
        )
    for name in SCALES:
        axes = INLINE if bound[name].buffer == key_cache.buffer else sizes[name].keys()
        _require(
            sizes[name].keys() == axes
            and axes in [set(axes) for axes in SCALE_AXES.values()]
            and all(extent == key_cache.extents[axis] for axis, extent in sizes[name].items())
            and bound[name].dtype == "fp32",
            f"step {step.op}: {name} {sizes[name]} does not fit key_cache {key_cache.extents}",
        )
    _require(
        sizes["k_scale"].keys() == sizes["v_scale"].keys(),
        f"step {step.op}: k_scale {sizes['k_scale']} and v_scale {sizes['v_scale']} differ in axes",
    )
    dtype = key_cache.dtype
    _require(
        step.scalars["cache_dtype"] == dtype == bound["value_cache"].dtype,
        f"step {step.op}: cache_dtype={step.scalars['cache_dtype']!r} over elements of {dtype}",
    )


def _check_within(what: str, values: Iterable[int], low: int, high: int) -> None:
    for value in values:
        _require(low <= value < high, f"{what}={value}, expected {low} to {high - 1}")


def _check_write(case: Program, step: Step) -> None:
    cache = case.bound_field(step, "key_cache").extents
    slots = case.integers(step, "slot_mapping")
    stored = [slot for slot in slots if slot != PAD_SLOT_ID]
    _check_within("slot_mapping", stored, 0, cache["block"] * cache["token"])
    _require(len(set(stored)) == len(stored), "slot_mapping stores a slot twice")
    for name in ACTIVATIONS:
        rows = case.bound_field(step, name).extents["token"]
        _require(rows >= len(slots), f"{name} has {rows} rows for {len(slots)} slots")


def _check_gather(case: Program, step: Step) -> None:
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
