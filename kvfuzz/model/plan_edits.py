"""Simpler plan cases: what to try, in which order, when a failing one is to be made small.

A plan is taken back to the layers of its groups and planned again, so that placements always follow
from the layers. A plan that no planning makes (it was written by hand) loses blocks at most.
"""

from collections.abc import Callable, Iterator

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model import planning
from kvfuzz.model.cache_plan import CacheLayer, CachePlan, State
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.search import Steps, fewest, first_of, smallest

Search = Steps[PlanCase]
Groups = list[list[CacheLayer]]
Replan = Callable[[Groups, int], CachePlan]

PLAIN_DTYPE = "bf16"
"""Of pages and states: what is stored is what was computed."""

PLAIN_SIZES: tuple[dict[str, int], ...] = (
    {"num_kv_heads": 1},
    {"num_kv_heads": 2},
    {"head_size": 8},
    {"kernel_block_size": 4},
    {"kernel_block_size": 16},
)
"""What is tried for all attention layers at once, so that their pages stay equally large."""


def planner_of(plan: CachePlan) -> Replan:
    """The planning that made `plan`, by how its layers are placed."""
    if plan.placed == "one_buffer":
        return lambda groups, blocks: planning.one_buffer(groups, blocks, plan.kv_layout)
    return planning.packed if plan.placed == "packed" else planning.separate


def groups_of(plan: CachePlan) -> Groups:
    """The layers of each group."""
    return [[plan.layer(name) for name in group] for group in plan.groups]


def with_num_blocks(case: PlanCase, num_blocks: int) -> PlanCase:
    """`case` planned for so many blocks; one that no planning makes stays as it is."""
    if case.plan.num_blocks == num_blocks or not is_planned(case.plan):
        return case
    return _with(case, groups_of(case.plan), num_blocks) or case


def simplifications(case: PlanCase) -> Search:
    """Candidates that are simpler than `case`, pass after pass, until a round changes nothing."""
    seen: list[PlanCase] = []
    while case not in seen:
        seen.append(case)
        case = yield from _fewer_ids(case)
        if not is_planned(case.plan):
            return case
        case = yield from _fewer_layers(case)
        case = yield from _fewer_blocks(case)
        case = yield from first_of(case, _plainer(case))
    return case


def plainer_plans(case: PlanCase) -> Search:
    """Candidates with fewer layers, then smaller pages, of the plan of `case`; as many blocks."""
    if not is_planned(case.plan):
        return case
    case = yield from _fewer_layers(case)
    return (yield from first_of(case, _plainer(case)))


def is_planned(plan: CachePlan) -> bool:
    """Whether planning the layers of `plan` again gives `plan`."""
    return _replanned(plan, groups_of(plan), plan.num_blocks) == plan


def _replanned(plan: CachePlan, groups: Groups, num_blocks: int) -> CachePlan | None:
    kept = [group for group in groups if any(not layer.shares for layer in group)]
    try:
        return planner_of(plan)(kept, num_blocks) if kept else None
    except UsageError:
        return None


def _with(case: PlanCase, groups: Groups, num_blocks: int) -> PlanCase | None:
    """`case` with other layers or blocks; None where they cannot be planned."""
    plan = _replanned(case.plan, groups, num_blocks)
    if plan is None:
        return None
    ids = tuple(min(block, num_blocks - 1) for block in case.block_ids)
    return msgspec.structs.replace(case, plan=plan, block_ids=ids)


def _fewer_ids(case: PlanCase) -> Search:
    return (
        yield from fewest(
            case,
            case.block_ids,
            lambda ids: msgspec.structs.replace(case, block_ids=ids),
            min(1, len(case.block_ids)),
        )
    )


def _fewer_layers(case: PlanCase) -> Search:
    names = tuple(layer.name for layer in case.plan.layers)

    def rebuild(kept: tuple[str, ...]) -> PlanCase | None:
        groups = [
            [
                each
                for each in group
                if each.name in kept and (not each.shares or each.shares in kept)
            ]
            for group in groups_of(case.plan)
        ]
        return _with(case, groups, case.plan.num_blocks)

    return (yield from fewest(case, names, rebuild, 1))


def _fewer_blocks(case: PlanCase) -> Search:
    groups = groups_of(case.plan)
    return (
        yield from smallest(case, case.plan.num_blocks, 1, lambda count: _with(case, groups, count))
    )


def _plainer(case: PlanCase) -> Iterator[PlanCase | None]:
    """Smaller pages, then plainer elements: the same for every attention layer, or every state."""
    layers = [layer for layer in case.plan.layers if layer.is_attention]
    for sizes in PLAIN_SIZES:
        if all(getattr(layer, name) > value for layer in layers for name, value in sizes.items()):
            yield _changed(case, **sizes)
    if any(layer.ratio > 1 for layer in layers):
        groups = [[_whole(layer) for layer in group] for group in groups_of(case.plan)]
        yield _with(case, groups, case.plan.num_blocks)
    if any(layer.cache_dtype != PLAIN_DTYPE for layer in layers):
        yield _changed(case, cache_dtype=PLAIN_DTYPE)
    if any(_plain_state(layer) != layer for layer in case.plan.layers):
        groups = [[_plain_state(layer) for layer in group] for group in groups_of(case.plan)]
        yield _with(case, groups, case.plan.num_blocks)


def _plain_state(layer: CacheLayer) -> CacheLayer:
    """A layer of states with one of them, of as many bytes as all had; others as they are."""
    size = itemsize(PLAIN_DTYPE)
    if layer.is_attention or layer.page_bytes % size:
        return layer
    return msgspec.structs.replace(
        layer, states=(State(PLAIN_DTYPE, (1, layer.page_bytes // size)),)
    )


def _whole(layer: CacheLayer) -> CacheLayer:
    return msgspec.structs.replace(layer, kernel_block_size=layer.block_size)


def _changed(case: PlanCase, **changes: int | str) -> PlanCase | None:
    """`case` with the same changes to every attention layer, and states made to fit again."""

    def changed(layer: CacheLayer) -> CacheLayer:
        if not layer.is_attention:
            return layer
        smaller = msgspec.structs.replace(layer, **changes)
        if "head_size" in changes and layer.head_size_v:
            size_v = smaller.head_size + layer.head_size_v - layer.head_size
            smaller = msgspec.structs.replace(smaller, head_size_v=size_v)
        if "kernel_block_size" in changes:
            tokens = smaller.kernel_block_size * layer.ratio
            smaller = msgspec.structs.replace(smaller, block_size=tokens)
        extra = max(0, layer.page_padded - layer.page_bytes)
        padded = smaller.page_bytes + extra if layer.page_padded else 0
        return msgspec.structs.replace(smaller, page_padded=padded)

    groups = [[changed(layer) for layer in group] for group in groups_of(case.plan)]
    page = next((each.page_stride for group in groups for each in group if each.is_attention), 0)
    groups = [[each if each.is_attention else _fitted(each, page) for each in g] for g in groups]
    return _with(case, groups, case.plan.num_blocks)


def _fitted(layer: CacheLayer, page: int) -> CacheLayer:
    """A layer of states whose last one is as large as a page of `page` bytes leaves room for."""
    *others, last = layer.states
    room = page - sum(state.nbytes for state in others)
    if page == 0 or room < itemsize(last.dtype):
        return layer
    spare = max(0, layer.page_stride - layer.page_bytes)
    count = max(1, (room - min(spare, room // 2)) // itemsize(last.dtype))
    states = (*others, State(last.dtype, (1, count)))
    used = sum(state.nbytes for state in states)
    return msgspec.structs.replace(layer, states=states, page_padded=page if used < page else 0)
