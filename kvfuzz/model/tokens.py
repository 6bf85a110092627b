"""What a batch looks like, read off a lowered case: the levels of the axes that are about tokens.

All of them start from the slots that the first step touches, in the order of its rows.
"""

import itertools

from kvfuzz.model.case import Program
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layout import Field
from kvfuzz.model.round_trip import paged, runs, touched, touched_blocks
from kvfuzz.model.steps import is_write

REACH = 1 << 31
REACHES = ("near", "past_2g_bytes", "past_2g_elements")
"""How far from the start of K the batch's blocks lie: a signed 32-bit byte offset reaches them, a
32-bit element index does, or neither does."""

SPLITS = (2, 4, 12)
"""Kernel blocks that a manager block is split into (vLLM: 1 for most models; 784 = 49 * 16)."""

BLOCK_IDS = ("identity", "adjacent", "shuffled", *(f"split_{ratio}" for ratio in SPLITS))
"""How the ids of touched blocks follow each other: 0, 1, 2, …; consecutive; in no such way; or, in
groups of `ratio` that begin at its multiples, as the kernel blocks of manager blocks do."""


def _block_size(case: Program) -> int:
    return paged(case, case.steps[0]).extents["token"]


def _offsets(case: Program) -> list[int]:
    n = _block_size(case)
    return [slot % n for slot in touched(case, case.steps[0])]


def blocks_used(case: Program) -> str:
    """Level of `blocks_used`."""
    return "1" if len(touched_blocks(case, case.steps[0])) < 2 else "2+"


def block_ids(case: Program) -> str:
    """Level of `block_ids`."""
    return id_pattern(touched_blocks(case, case.steps[0]))


def id_pattern(order: list[int]) -> str:
    """Which of BLOCK_IDS the ids of touched blocks show, in the order of the rows."""
    if order == list(range(len(order))):
        return "identity"
    steps = list(itertools.pairwise(order))
    if all(after == before + 1 for before, after in steps):
        return "adjacent"
    for ratio in reversed(SPLITS):
        inside = [(before, after) for before, after in steps if after % ratio]
        if inside and all(after == before + 1 for before, after in inside):
            return f"split_{ratio}"
    return "shuffled"


def reach(case: Program) -> str:
    """Level of `reach`."""
    step = case.steps[0]
    return reach_of(paged(case, step), touched_blocks(case, step))


def reach_of(field: Field, blocks: list[int]) -> str:
    """How far from the start of `field` the farthest of its `blocks` lies."""
    stride = next(term.stride for term in field.terms if term.axis == "block")
    # Where heads lie outside of blocks, the last one is the farthest.
    outside = [term for term in field.terms if term.axis != "block" and term.stride > stride]
    far = max(blocks, default=0) * stride
    far += sum(term.stride * (term.digits(field.extents[term.axis]) - 1) for term in outside)
    if far < REACH:
        return "near"
    return "past_2g_bytes" if far // itemsize(field.dtype) < REACH else "past_2g_elements"


def first_offset(case: Program) -> str:
    """Level of `first_offset`: whether the first row is at the edge of its block."""
    offsets = _offsets(case)
    return "inside" if offsets and offsets[0] else "edge"


def last_offset(case: Program) -> str:
    """Level of `last_offset`: whether the last row fills its block, begins it, or neither."""
    offsets = _offsets(case)
    if not offsets or offsets[-1] == _block_size(case) - 1:
        return "edge"
    return "inside" if offsets[-1] else "first"


def sequences(case: Program) -> str:
    """Level of `sequences`; a write sees rows, and no sequences."""
    step = case.steps[0]
    if "block_table" not in step.tensors:
        return "1"
    return str(min(len(runs(case, step)), 3))


def start_block(case: Program) -> str:
    """Level of `start_block`: whether the first run begins in its sequence's first block."""
    step = case.steps[0]
    if "block_table" not in step.tensors:
        return "first"
    return "later" if runs(case, step)[0].start >= _block_size(case) else "first"


def table(case: Program) -> str:
    """Level of `table`: whether the block table is wider than the longest sequence."""
    step = case.steps[0]
    if "block_table" not in step.tensors:
        return "tight"
    width = case.tensor(step.tensors["block_table"]).shape[1]
    longest = max(run.stop for run in runs(case, step))
    return "wide" if width > -(-longest // _block_size(case)) else "tight"


def padding(case: Program) -> str:
    """Level of `padding`: whether a write has rows whose slot is negative."""
    step = case.steps[0]
    if not is_write(step):
        return "none"
    return "some" if min(case.integers(step, "slot_mapping")) < 0 else "none"
