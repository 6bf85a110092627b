"""Cache plans as their rows say: layers of each group, then who lies where."""

import math
from collections.abc import Sequence

import msgspec

from kvfuzz.model import planning
from kvfuzz.model.cache_plan import CacheLayer, CachePlan, State
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.strategies.choices import Choices, chance, number, pick
from kvfuzz.strategies.rows import Row, Space

DTYPES = {"1": ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"), "2": ("bf16", "fp16"), "4": ("fp32",)}
"""Cache dtypes by element size."""
HEAD_SIZES = (8, 16, 32, 64)
LATENTS = (72, 576, 132)
"""Elements of an MLA row: a small one, DeepSeek's, and its indexer's."""
MOST_BLOCKS, MANY_BLOCKS, SELDOM = 6, 130, 8
"""Blocks of most plans, and of one in so many."""
MANY = {"1": (1, 1), "2": (2, 2), "3": (3, 3), "3+": (3, 4), "4+": (4, 12)}
"""The bounds of a number by how it is shown."""


def drawn_plan_case(choices: Choices, within: Space) -> PlanCase:
    """The plan case that `choices` make; the first of them are its row."""
    plan = drawn_plan(choices, within.drawn_row(choices))
    if within.op != "expand_block_table":
        return PlanCase(within.op, plan)
    count = number(choices, 1, 8)
    ids = tuple(number(choices, 0, plan.num_blocks - 1) for _ in range(count))
    return PlanCase(within.op, plan, ids)


def _between(choices: Choices, shown: str) -> int:
    return number(choices, *MANY[shown])


def drawn_plan(
    choices: Choices,
    row: Row,
    *,
    num_blocks: int = 0,
    cache_dtype: str = "",
    last_dtype: str = "",
) -> CachePlan:
    """A plan that shows `row`, with so many blocks and this dtype where they are given; the last
    group of attention layers has another dtype, of the same size, where that is."""
    first = _first_layer(choices, row, cache_dtype)
    kinds = _kinds_of_groups(choices, row)
    shortest = _shortest(choices, row, len(kinds))
    widest = _between(choices, row["layers"])
    layers = [_of_kind(choices, row, first, kind) for kind in kinds]
    if last_dtype:
        last = max(at for at, layer in enumerate(layers) if layer.is_attention)
        layers[last] = msgspec.structs.replace(layers[last], cache_dtype=last_dtype)
    padded = _paged(choices, row, layers)
    groups = [
        [
            msgspec.structs.replace(layer, name=f"layers.{at * len(kinds) + group}.{layer.kind}")
            for at in range(widest if group != shortest else number(choices, 1, widest - 1))
        ]
        for group, layer in enumerate(padded)
    ]
    _share(choices, row, groups)
    if not num_blocks:
        shown = row["num_blocks"]
        many = shown == "3+" and chance(choices, SELDOM)
        most = MANY_BLOCKS if many else MOST_BLOCKS
        num_blocks = number(choices, 3, most) if shown == "3+" else int(shown)
    if row["placement"] == "one_buffer":
        return planning.one_buffer(groups, num_blocks, row["kv_layout"])
    place = planning.packed if row["placement"] == "packed" else planning.separate
    return place(groups, num_blocks)


def _first_layer(choices: Choices, row: Row, cache_dtype: str) -> CacheLayer:
    """The layer of the first group, as yet without a name."""
    kernel = int(row["tokens"])
    ratio = _between(choices, row["kernel_blocks"])
    is_mla = "mla" in row["kinds"]
    head_size = pick(choices, LATENTS if is_mla else HEAD_SIZES)
    value = head_size + (8 * number(choices, 1, 3) if row["value_heads"] == "other" else 0)
    form = row["form"]
    return CacheLayer(
        name="",
        kind="mla" if is_mla else "sliding" if row["kinds"] == "sliding" else "full",
        form="kv_first" if form == "mixed" else form,
        block_size=kernel * ratio,
        kernel_block_size=kernel,
        cache_dtype=cache_dtype or pick(choices, DTYPES[row["element"]]),
        num_kv_heads=int(row["heads"]),
        head_size=head_size,
        head_size_v=0 if is_mla else value,
        order=row["page_order"],
    )


def _kinds_of_groups(choices: Choices, row: Row) -> list[str]:
    """The kind of each group: as many as the row says, those after the first in any number."""
    kinds = row["kinds"].split("+")
    count = _between(choices, row["groups"])
    rest = kinds[1:] or kinds
    more = [pick(choices, rest) for _ in range(count - len(kinds))]
    return [*kinds, *more]


def _shortest(choices: Choices, row: Row, groups: int) -> int:
    """The group that has fewer layers than the others; -1 where all have as many."""
    return -1 if row["group_sizes"] == "even" else number(choices, 0, groups - 1)


def _of_kind(choices: Choices, row: Row, first: CacheLayer, kind: str) -> CacheLayer:
    """A layer of `kind` beside the first one, its page not yet as large as the others'."""
    if kind == "mamba":
        return msgspec.structs.replace(
            first,
            kind="mamba",
            form="states",
            cache_dtype="",
            num_kv_heads=1,
            head_size=0,
            head_size_v=0,
            order="nhd",
            kernel_block_size=first.block_size,
        )
    changed = msgspec.structs.replace(first, kind=kind)
    if row["form"] == "mixed" and kind == "cross":
        return msgspec.structs.replace(changed, form="blocks_first", order="nhd")
    if row["geometry"] == "differs" and kind != first.kind:
        # Half the heads, twice the tokens: pages of one size, as page unification makes them.
        return msgspec.structs.replace(
            changed,
            num_kv_heads=first.num_kv_heads // 2,
            block_size=first.block_size * 2,
            kernel_block_size=first.kernel_block_size * 2,
        )
    return changed


def _paged(choices: Choices, row: Row, layers: Sequence[CacheLayer]) -> list[CacheLayer]:
    """The layers with pages of one size: states fill theirs, or are padded, or make others be."""
    page = max(layer.page_bytes for layer in layers if layer.is_attention)
    padded = 0
    if row["page_padding"] == "attention":
        padded = page + 64 * number(choices, 1, 4)
    states = _states(choices, row, padded or page) if row["states"] != "none" else ()
    return [
        msgspec.structs.replace(layer, page_padded=padded)
        if layer.is_attention
        else _with_states(layer, states, padded or page)
        for layer in layers
    ]


def _with_states(layer: CacheLayer, states: tuple[State, ...], page: int) -> CacheLayer:
    used = sum(state.nbytes for state in states)
    return msgspec.structs.replace(layer, states=states, page_padded=page if used < page else 0)


def _states(choices: Choices, row: Row, page: int) -> tuple[State, ...]:
    """One or two states of a page of `page` bytes, a multiple of 16; some are left where the row
    pads them."""
    spare = 16 * number(choices, 1, max(1, page // 64)) if row["page_padding"] == "state" else 0
    left = page - spare
    if row["states"] == "1":
        return (State("bf16", _shape(choices, left // 2)),)
    conv = 16 * number(choices, 1, max(1, left // 64))
    dtype = pick(choices, ("fp32", "bf16"))
    return (
        State("bf16", _shape(choices, conv // 2)),
        State(dtype, _shape(choices, (left - conv) // itemsize(dtype))),
    )


def _shape(choices: Choices, elements: int) -> tuple[int, ...]:
    """A shape of two axes with so many elements."""
    divisors = [each for each in range(1, math.isqrt(elements) + 1) if elements % each == 0]
    rows = pick(choices, divisors[:4])
    return (rows, elements // rows)


def _share(choices: Choices, row: Row, groups: list[list[CacheLayer]]) -> None:
    """Append the layers that share a cache of an attention group to that group."""
    count = number(choices, 2, 4) if row["sharers"] == "several" else int(row["sharers"] == "one")
    able = [group for group in groups if group[0].is_attention]
    for index in range(count):
        group = pick(choices, able)
        owners = [layer for layer in group if not layer.shares]
        target = owners[-1 - number(choices, 0, len(owners) - 1)]
        group.append(
            msgspec.structs.replace(
                target, name=f"layers.{1000 + index}.{target.kind}", shares=target.name
            )
        )
