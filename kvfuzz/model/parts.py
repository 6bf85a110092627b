"""What an op adds to a cache, as data: its buffers, fields and views, and the step that binds them.

Lowering a scene and completing a round trip both build from here, from sizes and metadata alone.
"""

import math

import msgspec

from kvfuzz.model.case import Buffer, Step, TensorView
from kvfuzz.model.dtypes import DTYPES, highest_inside, itemsize
from kvfuzz.model.fill import ByteFill, Fill, FloatFill, GroupFill, IntegerFill, TieFill, word
from kvfuzz.model.layout import Field, Geometry, Term
from kvfuzz.model.named_blocks import PAIRS
from kvfuzz.model.ops import metadata
from kvfuzz.model.scales import SCALES
from kvfuzz.model.steps import PAD_SLOT_ID, PAGE_OPS
from kvfuzz.model.vocabulary import LARGEST

BEYOND = 6
"""Powers of two by which magnitudes leave the range, where they do."""


class Setting(msgspec.Struct, frozen=True):
    """What an op's parts depend on beside its metadata."""

    geometry: Geometry
    cache_dtype: str
    model_dtype: str
    kv_cache_layout: str
    fill_seed: int
    spare_rows: int = 0
    spare_entries: int = 0


class Parts(msgspec.Struct, frozen=True):
    """An op's own buffers, fields and views, its step, the steps that follow, and what they may
    leave anything in."""

    buffers: tuple[Buffer, ...]
    fields: tuple[Field, ...]
    tensors: tuple[TensorView, ...]
    step: Step
    following: tuple[Step, ...] = ()
    unused: tuple[Field, ...] = ()


def integers(name: str, values: tuple[int, ...], dtype: str) -> Buffer:
    """A buffer with written-out elements."""
    return Buffer(name, len(values) * itemsize(dtype), IntegerFill(dtype, values))


def vector(name: str, length: int, dtype: str) -> TensorView:
    """A dense view `[length]` of the buffer of the same name."""
    return TensorView(name, name, dtype, (length,), (itemsize(dtype),))


def activation_fill(setting: Setting, scale_bits: int, values: str) -> Fill:
    """Key or value elements of the model's dtype, to be stored through the cache dtype.

    A plain copy gets hash bytes, NaN payloads included. Before a conversion the magnitudes stay
    within the cache dtype's range, unless `values` says that some are `beyond` it: else it says
    whether they spread down through its subnormals to zero, or lie next to its rounding ties.
    `scale_bits` is the least of the scales.
    """
    seed = setting.fill_seed
    model, cache = DTYPES[setting.model_dtype], DTYPES[setting.cache_dtype]
    if model.name == cache.name:
        return ByteFill(seed)
    if values == "ties":
        return TieFill(seed, model.name, cache.name, scale_bits)
    scale = DTYPES["fp32"].decode(scale_bits)
    smallest = math.frexp(scale)[1] - cache.bias - cache.mantissa_bits  # the least subnormal's
    more = BEYOND if values == "beyond" else 0
    high = min(highest_inside(model, cache, scale) + more, (1 << model.exponent_bits) - 2)
    return FloatFill(seed, model.name, max(0, min(high, smallest - 3 + model.bias)), high)


def group_fill(setting: Setting, head_size: int, values: str) -> Fill:
    """Key or value elements for an op that computes a scale for each head of a token."""
    largest = LARGEST[setting.cache_dtype]
    return GroupFill(
        setting.fill_seed,
        setting.model_dtype,
        setting.cache_dtype,
        head_size,
        largest,
        ties=values == "ties",
    )


def write_parts(
    setting: Setting,
    slot_mapping: tuple[int, ...],
    fills: tuple[Fill, Fill],
    row_gap: int,
    op: str = "reshape_and_cache",
) -> Parts:
    """A write of as many rows as `slot_mapping` has; `fills` are those of key and value."""
    num_rows = len(slot_mapping)
    key = _rows("key", setting, num_rows, row_gap, fills[0])
    value = _rows("value", setting, num_rows, row_gap, fills[1])
    # Behind a batch an engine keeps padding, for as many rows as there are of key and value.
    behind = (PAD_SLOT_ID,) * max(setting.spare_rows, setting.spare_entries)
    return Parts(
        (integers("slot_mapping", slot_mapping + behind, "i64"), key[0], value[0]),
        (key[1], value[1]),
        (key[2], value[2], vector("slot_mapping", num_rows, "i64")),
        _step(setting, op, ("slot_mapping",), {"key": "key", "value": "value"}),
    )


def gather_parts(
    setting: Setting,
    block_table: tuple[int, ...],
    seq_starts: tuple[int, ...],
    cu_seqlens_kv: tuple[int, ...],
    token_to_batch: tuple[int, ...],
) -> Parts:
    """A gather of the given runs; `block_table` is `[num_sequences, width]`, row by row.

    Behind each lies what an earlier batch may have left there: ids of blocks, numbers of tokens and
    of sequences.
    """
    metadata = {
        "block_table": block_table,
        "seq_starts": seq_starts,
        "cu_seqlens_kv": cu_seqlens_kv,
        "token_to_batch": token_to_batch,
    }
    num_seqs, num_tokens = len(seq_starts), len(token_to_batch)
    width = len(block_table) // num_seqs
    table = TensorView("block_table", "block_table", "i32", (num_seqs, width), (4 * width, 4))
    key = _rows("key_out", setting, num_tokens, 0, ByteFill(setting.fill_seed))
    value = _rows("value_out", setting, num_tokens, 0, ByteFill(setting.fill_seed))
    vectors = [vector(n, len(v), "i32") for n, v in metadata.items() if n != "block_table"]
    return Parts(
        (
            *(integers(n, v + _stale(setting, n, v, width), "i32") for n, v in metadata.items()),
            key[0],
            value[0],
        ),
        (key[1], value[1]),
        (table, *vectors, key[2], value[2]),
        _step(setting, "gather_cache", tuple(metadata), {"key": "key_out", "value": "value_out"}),
    )


def _stale(setting: Setting, name: str, values: tuple[int, ...], width: int) -> tuple[int, ...]:
    """What lies behind the metadata `name`: rows of a block table, entries of others."""
    is_table = name == "block_table"
    below = setting.geometry.num_blocks if is_table else max(values) + 1
    count = setting.spare_entries * (width if is_table else 1)
    behind = f"{name} behind"
    return tuple(word(setting.fill_seed, behind, index) % below for index in range(count))


def page_parts(op: str, numbers: tuple[int, ...]) -> Parts:
    """A step on whole pages of K and V, which `numbers` name: ids, or pairs of them one after the
    other, as `PAGE_OPS` says. It binds that and its caches alone."""
    name, caches = PAGE_OPS[op]
    rows = tuple(zip(numbers[::2], numbers[1::2], strict=False))
    made = (
        metadata.table(name, "i64", rows, len(rows))
        if name == PAIRS
        else metadata.vector(name, "i64", numbers, len(numbers))
    )
    same = {each: each for each in (*caches, name)}
    return Parts((made.buffer,), (made.field,), (made.view,), Step(op, same, same, {}))


def _rows(
    name: str, setting: Setting, num_rows: int, gap: int, fill: Fill
) -> tuple[Buffer, Field, TensorView]:
    """An activation `[num_rows, num_kv_heads, head_size]` whose rows are `gap` elements apart.

    The head size is that of the side: values have `value_size` elements.
    """
    g, dtype = setting.geometry, setting.model_dtype
    head_size = g.value_size if name.startswith("value") else g.head_size
    element = itemsize(dtype)
    row = (g.num_kv_heads * head_size + gap) * element
    strides = (row, head_size * element, element)
    terms = (Term("token", strides[0]), Term("head", strides[1]), Term("dim", strides[2]))
    num_rows += setting.spare_rows
    extents = {"token": num_rows, "head": g.num_kv_heads, "dim": head_size}
    field = Field(name, name, dtype, 0, terms, extents)  # type: ignore[arg-type]
    view = TensorView(name, name, dtype, (num_rows, g.num_kv_heads, head_size), strides)
    return Buffer(name, num_rows * row, fill), field, view


def _step(
    setting: Setting, op: str, metadata: tuple[str, ...], activations: dict[str, str]
) -> Step:
    same = ("key_cache", "value_cache", *SCALES, *metadata)
    return Step(
        op,
        {name: name for name in same} | activations,
        {"key_cache": "k", "value_cache": "v"}
        | dict(zip(SCALES, SCALES, strict=True))
        | activations,
        {"kv_cache_layout": setting.kv_cache_layout, "cache_dtype": setting.cache_dtype},
    )
