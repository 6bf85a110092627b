"""Which blocks a step on whole pages or states names, by its metadata."""

from kvfuzz.model.case import Program, Step

PAIRS, IDS = "block_mapping", "block_ids"
"""The metadata of such a step: pairs (from, to) `[n, 2]`, or ids `[n]`. Engines keep them in wider
buffers, so that the entries behind the first n are stale."""


def named_pairs(case: Program, step: Step) -> list[tuple[int, int]]:
    """The pairs (from, to) of a step, in their order."""
    numbers, count = case.integers(step, PAIRS), case.tensor(step.tensors[PAIRS]).shape[0]
    return [(numbers[2 * row], numbers[2 * row + 1]) for row in range(count)]


def named_ids(case: Program, step: Step) -> list[int]:
    """The block ids of a step, in their order."""
    return list(case.integers(step, IDS)[: case.tensor(step.tensors[IDS]).shape[0]])


def names_blocks(step: Step) -> bool:
    """Whether a step names blocks as a whole."""
    return PAIRS in step.tensors or IDS in step.tensors


def named_blocks(case: Program, step: Step, buffer: str) -> list[int]:
    """The blocks of the caches in `buffer` that a step names, each once, in its order.

    A step between two allocations names blocks of one by `from`, and of the other by `to`.
    """
    if IDS in step.tensors:
        return list(dict.fromkeys(named_ids(case, step)))
    pairs = named_pairs(case, step)
    if "key_target" not in step.tensors:
        return list(dict.fromkeys(block for pair in pairs for block in pair))
    is_target = case.bound_buffer(step, "key_target") == buffer
    return list(dict.fromkeys(there if is_target else here for here, there in pairs))
