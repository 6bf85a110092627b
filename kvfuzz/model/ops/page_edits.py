"""Simpler scenes of whole pages: what to try, in which order, when a failing one is made small."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product, takewhile

import msgspec

from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.ops.page_axes import HOSTS, ORDERS_OF_PAGES
from kvfuzz.model.ops.page_scene import LEAST_BLOCKS, PageScene
from kvfuzz.model.placement import place
from kvfuzz.model.search import (
    Steps,
    fewer_items,
    first_of,
    lower_number,
    plainer_value,
    smallest,
    until_stable,
)
from kvfuzz.model.tokens import REACH
from kvfuzz.model.vocabulary import BLOCK_SIZES, HEAD_COUNTS, HEAD_SIZES, LAYOUTS, NESTINGS

Search = Steps[PageScene]

VALUE_SIZES = (0, 8, 16, 24, 48, 96)
"""Head sizes of V that are tried: that of K, powers of two, others."""
LOW = 3
"""Ids below are tried in any order."""


def simpler(scene: PageScene) -> Search:
    """Candidates simpler than `scene`, pass after pass."""
    passes = (
        fewer_items("entries", least=1),
        _one_layer,
        partial(_smaller, "num_kv_heads", HEAD_COUNTS),
        partial(_smaller, "head_size", HEAD_SIZES),
        partial(_smaller, "block_size", BLOCK_SIZES),
        fewer_items("state_blocks", least=1),
        _blocks,
        partial(_plainer, "layout", LAYOUTS),
        partial(_plainer, "nesting", NESTINGS),
        partial(_plainer, "page_padding", (0, 16)),
        partial(_plainer, "order", ORDERS_OF_PAGES),
        partial(_smaller, "head_size_v", VALUE_SIZES),
        partial(_plainer, "cache_dtype", tuple(DTYPES)),
        plainer_value("host", *HOSTS[1:]) if scene.host_blocks else _nothing,
        lower_number("spare"),
        plainer_value("fill_seed", *range(8)),
    )
    return until_stable(scene, passes)


def _nothing(scene: PageScene) -> Search:
    return first_of(scene, ())


def _one_layer(scene: PageScene) -> Search:
    """As few layers as possible, the first of them where it will do."""

    def of(layers: int) -> PageScene:
        return msgspec.structs.replace(scene, layers=layers, index=min(scene.index, layers - 1))

    def at(index: int) -> PageScene:
        return msgspec.structs.replace(scene, index=index)

    scene = yield from smallest(scene, scene.layers, 1, of)
    return (yield from smallest(scene, scene.index, 0, at))


def _with_layer(scene: PageScene, **changes: object) -> PageScene:
    """Other attributes of the layers; one that is no hybrid has no states beside it."""
    layer = msgspec.structs.replace(scene.layer, **changes)
    changed = msgspec.structs.replace(scene, layer=layer)
    if changed.layer.layout != "hybrid":
        changed = msgspec.structs.replace(changed, state_blocks=())
    if changed.host == "like" and changed.layer.layout == "kv_first":
        return msgspec.structs.replace(changed, host="kv_first")
    return changed


def _plainer(name: str, values: Iterable[object], scene: PageScene) -> Search:
    now, earlier = getattr(scene.layer, name), []
    for value in values:
        if value == now:
            break
        earlier.append(_with_layer(scene, **{name: value}))
    return (yield from first_of(scene, _near_and_far(scene, earlier)))


def _smaller(name: str, sizes: tuple[int, ...], scene: PageScene) -> Search:
    geometry = scene.layer.geometry
    edited = (
        _with_layer(scene, geometry=msgspec.structs.replace(geometry, **{name: size}))
        for size in sizes
        if size < getattr(geometry, name)
    )
    return (yield from first_of(scene, _near_and_far(scene, edited)))


def _near_and_far(scene: PageScene, edited: Iterable[PageScene]) -> Iterator[PageScene]:
    """Edited scenes; where blocks of `scene` lie past 2**31, each also with its blocks moved up as
    many bytes and elements."""
    for each in edited:
        yield each
        before, after = _stride(scene), _stride(each)
        first = min(_named(scene))
        if before * first >= REACH and after != before:
            sizes = [itemsize(one.layer.cache_dtype) for one in (scene, each)]
            as_many = max(before * sizes[1], before * sizes[0]) * first
            yield _from_block(each, -(-as_many // (after * min(sizes))))


def _stride(scene: PageScene) -> int:
    return place(scene.attention, index=scene.index, count=scene.layers).k.block


def _named(scene: PageScene) -> set[int]:
    """The blocks of the device that are named or hold states."""
    targets = () if scene.host_blocks else scene.targets
    return {*scene.sources, *targets, *scene.state_blocks}


def _blocks(scene: PageScene) -> Search:
    """Low block ids without gaps, in order if that will do, and no spare block."""
    if len(scene.entries) == 1:
        scene = yield from first_of(scene, takewhile(lambda each: each != scene, _low(scene)))
    if not scene.host_blocks:
        order = (block for entry in scene.entries for block in entry)
        used = list(dict.fromkeys((*order, *scene.state_blocks)))
        in_order = dict(zip(used, range(len(used)), strict=True))
        scene = yield from first_of(scene, [_renumbered(scene, in_order)])
    named = sorted(_named(scene))
    scene = yield from first_of(
        scene, [_renumbered(scene, {block: at for at, block in enumerate(named)})]
    )
    if scene.host_blocks:
        scene = yield from first_of(scene, _low_on_host(scene))
        scene = yield from smallest(
            scene, scene.host_blocks, max(scene.targets) + 1, partial(_of_host, scene)
        )
    scene = yield from _fewest_blocks(scene)
    scene = yield from smallest(scene, min(_named(scene)), 0, partial(_from_block, scene))
    for block in sorted(_named(scene)):
        scene = yield from smallest(scene, block, 0, partial(_moved, scene, block))
    return (yield from _fewest_blocks(scene))


def _low(scene: PageScene) -> Iterator[PageScene]:
    """One entry with the lowest ids, in caches of no more blocks than these need: a wrong stride
    may relate two ids, so that neither can be lowered alone. The states keep their places."""
    if scene.state_blocks:
        return
    for ids in sorted(product(range(LOW), repeat=scene.width), key=max):
        blocks = max(LEAST_BLOCKS, max(ids[:1] if scene.host_blocks else ids) + 1)
        geometry = msgspec.structs.replace(scene.layer.geometry, num_blocks=blocks)
        low = _with_layer(scene, geometry=geometry)
        host = ids[-1] + 1 if scene.host_blocks else 0
        yield msgspec.structs.replace(low, entries=(ids,), host_blocks=host)


def _fewest_blocks(scene: PageScene) -> Search:
    def of(count: int) -> PageScene:
        geometry = msgspec.structs.replace(scene.layer.geometry, num_blocks=count)
        return _with_layer(scene, geometry=geometry)

    now = scene.layer.geometry.num_blocks
    least = max(LEAST_BLOCKS, max(_named(scene)) + 1)
    return (yield from smallest(scene, now, least, of))


def _of_host(scene: PageScene, count: int) -> PageScene:
    return msgspec.structs.replace(scene, host_blocks=count)


def _low_on_host(scene: PageScene) -> Iterator[PageScene]:
    """The blocks of the host in order, or in the order that they have, from 0 on."""
    by_size = sorted(scene.targets)
    for ids in (range(len(by_size)), [by_size.index(target) for target in scene.targets]):
        pairs = zip(scene.sources, ids, strict=True)
        yield msgspec.structs.replace(scene, entries=tuple(pairs), host_blocks=len(by_size))


def _renumbered(scene: PageScene, ids: dict[int, int], count: int = 0) -> PageScene:
    """Blocks of the device under new ids, in a cache with no more blocks than it needs."""
    change: Callable[[int], int] = ids.__getitem__
    entries = tuple(
        (change(entry[0]), *entry[1:]) if scene.host_blocks else tuple(map(change, entry))
        for entry in scene.entries
    )
    states = tuple(sorted(map(change, scene.state_blocks)))
    blocks = count or max(LEAST_BLOCKS, max(ids.values()) + 1)
    geometry = msgspec.structs.replace(scene.layer.geometry, num_blocks=blocks)
    return msgspec.structs.replace(
        scene,
        entries=entries,
        state_blocks=states,
        layer=msgspec.structs.replace(scene.layer, geometry=geometry),
    )


def _from_block(scene: PageScene, first: int) -> PageScene:
    """Every block of the device, and their number, moved by as much as the lowest is to `first`."""
    named = _named(scene)
    by = first - min(named)
    count = scene.layer.geometry.num_blocks + by
    return _renumbered(scene, {block: block + by for block in named}, count)


def _moved(scene: PageScene, block: int, to: int) -> PageScene | None:
    """`block` under the id `to`, if that is free."""
    named = _named(scene)
    if to in named:
        return None
    ids = {each: each for each in named} | {block: to}
    return _renumbered(scene, ids, scene.layer.geometry.num_blocks)
