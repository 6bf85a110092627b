"""Whole pages: a cache as the row says, and the blocks that are copied, swapped or cleared."""

import msgspec

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.ops.page_scene import LEAST_BLOCKS, PageScene
from kvfuzz.model.placement import place
from kvfuzz.strategies.boundary import Boundary
from kvfuzz.strategies.choices import Choices, chance, distinct, fill_seed, number, pick, rarely
from kvfuzz.strategies.ids import Blocks, assigned
from kvfuzz.strategies.layers import drawn_layer, first_block, layer_of_several
from kvfuzz.strategies.rows import Row

CACHE_BYTES = 1 << 20
"""Bytes of a cache that is made larger than its step needs, about."""
FEW_ENTRIES, MOST_ENTRIES, MOST_SPARE = 6, 300, 1 << 12
"""Entries mostly, at times, and blocks that nobody names, at most."""
WORD = 8
OFTEN_TWICE = 4
"""One in so many pairs copies from a block that another pair has copied already."""

BOUNDARIES: tuple[Boundary, ...] = (
    Boundary({"layout": "hybrid", "block_ids": "shuffled"}, "block stride, 37228"),
    Boundary({"layout": "content_packed", "order": "nhd"}, "K and V interleaved, 44455"),
    Boundary({"layout": "content_packed", "nesting": "head_first"}, "heads outside, LHBNC"),
    Boundary({"nesting": "block_head_first"}, "several layers in a head, BHLNC"),
    Boundary({"nesting": "block_first", "page": "padded"}, "packed layers in padded pages"),
    Boundary({"value_size": "narrower"}, "V has other strides than K"),
    Boundary({"reach": "past_2g_elements"}, "32-bit offsets of blocks"),
    Boundary({"metadata": "wider", "pairs": "1"}, "a persistent buffer with a stale tail"),
    Boundary({"head_size": "80"}, "heads that are no power of two"),
    Boundary({"block_size": "1"}, "a token a block"),
    Boundary({"block_size": "784", "layout": "hybrid"}, "pages as large as a Mamba state"),
    Boundary({"host": "kv_first", "layout": "content_packed"}, "pages apart and together"),
    Boundary({"host": "like", "page": "padded"}, "padding on both sides"),
)


def drawn_scene(choices: Choices, row: Row, op: str) -> PageScene:
    """The scene of `row`; what the row leaves open is drawn."""
    layer = drawn_layer(choices, {**row, "granularity": "tensor"})
    index, layers = layer_of_several(choices, row)
    # Engines pad pages to the size of others, in words.
    layer = msgspec.structs.replace(layer, page_padding=-(-layer.page_padding // WORD) * WORD)
    page = layer.geometry
    side = page.block_size * page.num_kv_heads * page.head_size * itemsize(layer.cache_dtype)
    room = CACHE_BYTES // (2 * side * layers)
    count = int(row["pairs"]) if row["pairs"] != "3+" else _several(choices, room)
    twice = op == "copy_blocks"
    fresh = [True, *(not (twice and chance(choices, OFTEN_TWICE)) for _ in range(count - 1))]
    states = number(choices, 1, 2) if row["layout"] == "hybrid" else 0
    named = count + (sum(fresh) if op == "copy_blocks" else 0)
    spare = rarely(choices, 2, min(max(2, room // 2), MOST_SPARE))
    spare = max(spare, LEAST_BLOCKS - named - states)
    first = first_block(choices, row["reach"], page, side, place(layer, count=layers).k.block)
    ids = assigned(choices, Blocks(row["block_ids"], ((0, named),), states, spare))
    blocks = [first + block for block in ids.sequences[0]]
    host_blocks = 0
    entries: tuple[tuple[int, ...], ...]
    if op == "copy_blocks":
        entries = dealt_pairs(choices, blocks, fresh)
    elif op == "zero_blocks":
        entries = tuple((block,) for block in blocks)
    else:
        far = first if first and chance(choices, 2) else 0
        host_blocks = far + count + number(choices, 0, 3)
        there = [far + block for block in distinct(choices, count, host_blocks - far)]
        entries = tuple(zip(blocks, there, strict=True))
    return PageScene(
        op=op,
        layer=msgspec.structs.replace(
            layer,
            name="layer",
            geometry=msgspec.structs.replace(page, num_blocks=first + ids.num_blocks),
        ),
        entries=entries,
        layers=layers,
        index=index,
        state_blocks=tuple(first + block for block in ids.states),
        host=row["host"],
        host_blocks=host_blocks,
        spare=number(choices, 1, 4) if row["metadata"] == "wider" else 0,
        fill_seed=fill_seed(choices),
    )


def _several(choices: Choices, room: int) -> int:
    most = max(3, room // 3)
    return 3 + rarely(choices, min(FEW_ENTRIES, most) - 3, min(MOST_ENTRIES, most) - 3)


def dealt_pairs(
    choices: Choices, blocks: list[int], fresh: list[bool]
) -> tuple[tuple[int, int], ...]:
    """Pairs of `blocks`, dealt out in their order; what is not fresh is copied a second time."""
    dealt, sources, pairs = iter(blocks), list[int](), []
    for is_fresh in fresh:
        source = next(dealt) if is_fresh else pick(choices, sources)
        sources.append(source)
        pairs.append((source, next(dealt)))
    return tuple(pairs)
