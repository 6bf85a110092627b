"""The axes of ops on whole pages, and which of their levels go together.

How the cache is laid out is asked as of any op on K and V pages; the rest is read off the metadata.
"""

import msgspec

from kvfuzz.model import layout_facts, tokens
from kvfuzz.model.axis import COUNTS, Axis, count_level
from kvfuzz.model.case import Program
from kvfuzz.model.layout_axes import CACHE_DTYPE, LAYOUT_AXES, SIZE_AXES, STRIDES
from kvfuzz.model.named_blocks import IDS, PAIRS
from kvfuzz.model.rules import RULES, Rule
from kvfuzz.model.steps import PAGE_OPS
from kvfuzz.model.vocabulary import Levels

ORDERS_OF_PAGES: Levels = ("nhd", "hnd", "shuffle")
"""The orders that are handed over as views of four axes: what moves a page whole knows no other."""
PATTERNS: Levels = ("identity", "adjacent", "shuffled")
HOSTS: Levels = ("none", "kv_first", "like")
"""How the cache on the other side of a swap is laid out: K pages before V pages without padding, or
as the one on the device is."""
METADATA: Levels = ("exact", "wider")


def pairs_level(case: Program) -> str:
    """Level of `pairs`: how many pairs, or ids, a step has."""
    return count_level(_entries(case))


def metadata_level(case: Program) -> str:
    """Level of `metadata`: whether there are stale entries behind those of the step."""
    step = case.steps[0]
    name = _metadata(case)
    numbers = len(case.written_out(step, name))
    return "wider" if numbers > _entries(case) * (2 if name == PAIRS else 1) else "exact"


def _metadata(case: Program) -> str:
    return PAIRS if PAIRS in case.steps[0].tensors else IDS


def _entries(case: Program) -> int:
    return case.tensor(case.steps[0].tensors[_metadata(case)]).shape[0]


def _host(case: Program) -> str:
    step = case.steps[0]
    if "key_target" not in step.fields:
        return "none"
    k, v = (case.bound_field(step, name) for name in ("key_target", "value_target"))
    return "kv_first" if v.base - k.base >= layout_facts.steps(k)["block"] else "like"


def _for_pages(axis: Axis, levels: Levels) -> Axis:
    return msgspec.structs.replace(axis, by_op=dict.fromkeys(PAGE_OPS, levels))


PAGE_AXES: tuple[Axis, ...] = (
    *(_for_pages(axis, ORDERS_OF_PAGES) if axis.name == "order" else axis for axis in LAYOUT_AXES),
    CACHE_DTYPE,
    *SIZE_AXES,
    STRIDES,
    _for_pages(Axis("block_ids", tokens.BLOCK_IDS, tokens.block_ids), PATTERNS),
    Axis("reach", tokens.REACHES, tokens.reach),
    Axis("pairs", COUNTS, pairs_level),
    Axis("metadata", METADATA, metadata_level),
    Axis(
        "host",
        HOSTS,
        _host,
        {op: HOSTS[1:] if op == "swap_blocks" else HOSTS[:1] for op in PAGE_OPS},
    ),
)

_AXES = {axis.name for axis in PAGE_AXES}

PAGE_RULES: tuple[Rule, ...] = (
    *(rule for rule in RULES if {*rule.axes} <= _AXES and not rule.ops),
    # A block alone is in order; a pair has two.
    *(
        Rule(("pairs", "block_ids"), lambda pairs, ids: pairs != "1" or ids != "shuffled", (op,))
        for op in ("swap_blocks", "zero_blocks")
    ),
    # A host's cache that is like a K/V-first one is K/V-first.
    Rule(("layout", "host"), lambda layout, host: layout != "kv_first" or host != "like"),
)
"""Every rule: those of K and V pages that are about these axes, and those of the metadata."""
