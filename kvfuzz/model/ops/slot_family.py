"""Slot mappings as the engine asks about them: their axes, and how they become simpler."""

import itertools
from functools import partial

import msgspec

from kvfuzz.model.ops.family import OpFamily
from kvfuzz.model.ops.slot_axes import SLOT_AXES, SLOT_RULES
from kvfuzz.model.ops.slots import SLOT_OP, Request, SlotScene, check, parts
from kvfuzz.model.search import (
    Steps,
    fewest,
    first_of,
    lower_number,
    plainer_value,
    smallest,
    until_stable,
)
from kvfuzz.model.vocabulary import BLOCK_SIZES

RANKS = (1, 2, 3, 4)
"""Fewer ranks that are tried, the fewest first."""


def _requests(scene: SlotScene) -> Steps[SlotScene]:
    def with_requests(kept: tuple[Request, ...]) -> SlotScene:
        return msgspec.structs.replace(scene, requests=kept)

    return fewest(scene, scene.requests, with_requests, least=1)


def _each_request(scene: SlotScene) -> Steps[SlotScene]:
    """The last token of each request alone, or fewer tokens; then earlier ones, in earlier rows."""
    for index, request in enumerate(scene.requests):
        last = request.start + request.length - 1
        if request.length > 1:
            alone = msgspec.structs.replace(request, start=last, length=1)
            scene = yield from first_of(scene, [_with_request(scene, index, alone)])
        for name in ("length", "start", "row"):
            value = getattr(scene.requests[index], name)
            scene = yield from smallest(scene, value, 0, partial(_with_value, scene, index, name))
    return scene


def _with_value(scene: SlotScene, index: int, name: str, value: int) -> SlotScene:
    return _with_request(
        scene, index, msgspec.structs.replace(scene.requests[index], **{name: value})
    )


def _with_request(scene: SlotScene, index: int, request: Request) -> SlotScene:
    """The scene with another request, which keeps the blocks that its tokens need."""
    needed = -(-(request.start + request.length) // scene.virtual_block)
    changed = msgspec.structs.replace(request, block_ids=request.block_ids[:needed])
    requests = (*scene.requests[:index], changed, *scene.requests[index + 1 :])
    return msgspec.structs.replace(scene, requests=requests)


def _fewer_ranks(scene: SlotScene) -> Steps[SlotScene]:
    """Fewer ranks, each with more blocks of every request."""

    def with_ranks(count: int) -> SlotScene:
        changed = msgspec.structs.replace(
            scene,
            cp_size=count,
            cp_rank=min(scene.cp_rank, count - 1),
            interleave=scene.interleave if count > 1 else 1,
        )
        return _refitted(changed)

    counts = [count for count in RANKS if count < scene.cp_size]
    return first_of(scene, [with_ranks(count) for count in counts])


def _refitted(scene: SlotScene) -> SlotScene:
    """The scene with as many blocks for each request as its tokens need, new ones where it has too
    few of them, and a cache and a table that hold them."""
    fresh = itertools.count(max(max(each.block_ids, default=0) for each in scene.requests) + 1)
    requests = []
    for each in scene.requests:
        needed = -(-(each.start + each.length) // scene.virtual_block) if each.row >= 0 else 0
        more = itertools.islice(fresh, max(0, needed - len(each.block_ids)))
        ids = (*each.block_ids[:needed], *more)
        requests.append(msgspec.structs.replace(each, block_ids=ids))
    most = max((block for each in requests for block in each.block_ids), default=0)
    widest = max(len(each.block_ids) for each in requests) * scene.split
    return msgspec.structs.replace(
        scene,
        requests=tuple(requests),
        num_blocks=max(scene.num_blocks, most + 1),
        table_width=max(scene.table_width, widest),
    )


def _lowest_ids(scene: SlotScene) -> Steps[SlotScene]:
    """The blocks in use under the lowest ids, in the order of their ids."""
    ids = sorted(block for each in scene.requests for block in each.block_ids)
    lower = dict(zip(ids, range(len(ids)), strict=True))
    renumbered = tuple(
        msgspec.structs.replace(each, block_ids=tuple(lower[block] for block in each.block_ids))
        for each in scene.requests
    )
    return first_of(scene, [msgspec.structs.replace(scene, requests=renumbered)])


def _smaller_blocks(scene: SlotScene) -> Steps[SlotScene]:
    """Smaller kernel blocks, everything that counts tokens in proportion."""

    def scaled(size: int) -> SlotScene:
        requests = tuple(
            msgspec.structs.replace(each, start=each.start * size // scene.block_size)
            for each in scene.requests
        )
        interleave = max(1, scene.interleave * size // scene.block_size)
        return msgspec.structs.replace(
            scene, requests=requests, block_size=size, interleave=interleave
        )

    return first_of(scene, [scaled(size) for size in BLOCK_SIZES if size < scene.block_size])


def simpler(scene: SlotScene) -> Steps[SlotScene]:
    """Candidates simpler than `scene`, pass after pass."""
    passes = (
        _requests,
        _each_request,
        _lowest_ids,
        _smaller_blocks,
        _fewer_ranks,
        plainer_value("cp_rank", 0, 1),
        plainer_value("split", 1, 2),
        lower_number("interleave", 1),
        lower_number("spare"),
        lower_number("max_num_tokens", 1),
        lower_number("table_width", 1),
        lower_number("num_rows", 1),
        lower_number("num_blocks", 1),
        plainer_value("fill_seed", 0, 1, 2),
    )
    return until_stable(scene, passes)


def _size(scene: SlotScene) -> tuple[int, ...]:
    encoded = len(msgspec.json.encode(scene))
    return (len(scene.requests), scene.num_tokens, scene.cp_size, scene.max_num_tokens, encoded)


FAMILY = OpFamily(
    ops=(SLOT_OP,),
    axes=SLOT_AXES,
    rules=SLOT_RULES,
    op=lambda scene: SLOT_OP,
    check=check,
    parts=parts,
    simpler=simpler,
    size=_size,
    path=lambda scene: "one rank" if scene.cp_size == 1 else "ranks",
)
