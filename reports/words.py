"""What properties and outcomes are called in reports, in words."""

from collections.abc import Mapping
from typing import NamedTuple

from kvfuzz.model.plan_case import PLAN_OPS


class PropertyWords(NamedTuple):
    """How a finding of one property reads."""

    meaning: str
    """What must hold."""
    judged: str = "bytes compared"
    """Which bytes `Violation.judged` counts."""
    expected: str = "expected"
    got: str = "got"


_WORDS: dict[str, PropertyWords] = {
    "crash": PropertyWords(
        "the target returns, or refuses the input before its first launch by an exception that it "
        "declares"
    ),
    "oracle": PropertyWords(
        "each byte that the op writes equals what arithmetic alone says, bit for bit",
        "bytes that must be written",
    ),
    "complete": PropertyWords(
        "each byte that the op must write is written",
        "bytes that must be written",
        got="still holds",
    ),
    "frame": PropertyWords(
        "no other byte of an allocation that the op writes changes",
        "bytes that must not change",
        expected="before",
        got="after",
    ),
    "immutable": PropertyWords(
        "no byte of an allocation that the op only reads changes",
        "bytes that are only read",
        expected="before",
        got="after",
    ),
    "bounds": PropertyWords(
        "no access outside an allocation writes, or reads what reaches a result"
    ),
    "no_overflow": PropertyWords(
        "no integer that loses bits decides the address, mask, branch or loop bound of an access"
    ),
    "no_race": PropertyWords(
        "no byte is written differently, or read and changed, by two programs of one launch"
    ),
    "dead_bytes": PropertyWords(
        "no result depends on bytes that nothing may depend on: slots that are not read, padding, "
        "gaps, stale block ids, what an output held before",
        "bytes of results",
        expected="with others",
        got="with these",
    ),
    "shape": PropertyWords("each view has the shape and the type that kernels index it by"),
    "aliasing": PropertyWords(
        "layers of different groups agree on whose bytes a block id names: a block belongs to one "
        "group at a time"
    ),
    "disjoint": PropertyWords("no byte is two elements of one group's layers"),
    "page_bytes": PropertyWords(
        "the bytes of a block are those of its page: all of them, and no padding"
    ),
    "sharing": PropertyWords("a layer that shares a cache has the views of the layer that owns it"),
    "roundtrip": PropertyWords(
        "what is written to the cache and gathered back is what went in",
        "bytes gathered back",
        expected="went in",
        got="came out",
    ),
    "determinism": PropertyWords(
        "two runs of one case leave the same bytes",
        "bytes of all buffers",
        expected="second run",
        got="first run",
    ),
    "size1_stride": PropertyWords(
        "the stride of a dimension of size 1, which PyTorch lets be anything, changes no byte",
        "bytes of written buffers",
        expected="with others",
        got="with these",
    ),
    "scale_homogeneity": PropertyWords(
        "2**n times the scale gives 2**n times what is read, and with 2**n times x the same code",
        "bytes of results",
        expected="must be",
        got="is",
    ),
    "layout_equivariance": PropertyWords(
        "the same logical cache in a plainer layout gives the same results",
        "bytes of results",
        expected="plainer",
        got="here",
    ),
    "block_permutation": PropertyWords(
        "the same blocks under other ids give the same results",
        "bytes of results",
        expected="renamed",
        got="here",
    ),
    "batch_invariance": PropertyWords(
        "a token alone, or in a batch of the opposite order, gets the same bytes",
        "bytes of results",
        expected="then",
        got="here",
    ),
    "partition": PropertyWords(
        "over all ranks of context parallelism every token has one owner, and a slot of its own",
    ),
    "prefix_split": PropertyWords(
        "a batch that is written in chunks leaves the same bytes as one write",
        "bytes of the cache",
        expected="in chunks",
        got="here",
    ),
}


_PLAN_WORDS: dict[str, PropertyWords] = {
    "crash": PropertyWords("the target returns every part of every layer, or refuses the plan"),
    "oracle": PropertyWords(
        "what is made is what the formula of each layer's form says, by one storage of each "
        "allocation"
    ),
    "bounds": PropertyWords("every byte of every block lies in its allocation"),
}
"""Where a property says another thing of a cache plan."""


def words(name: str, op: str = "") -> PropertyWords:
    """The words of a property, of the cases of `op`."""
    return _PLAN_WORDS.get(name, _WORDS[name]) if op in PLAN_OPS else _WORDS[name]


ENDED_BY: dict[str, str] = {
    "finding": "stopped at the first finding",
    "max_cases": "the number of cases is reached",
    "budget": "the budget is spent",
    "coverage": "every combination was drawn for",
    "interrupted": "interrupted",
    "error": "stopped by an error",
    "rejected": "no draw lies inside --where",
}

HAZARDS: dict[str, str] = {
    "rewrite": "bytes outside the target's own were rewritten with the values they had",
    "stray_read": "reads outside an allocation",
    "dead_read": "reads of bytes that no result may depend on",
    "read_race": "reads of bytes that another program of the launch changes",
    "write_race": "bytes of its own memory, or numbers within a bound, that programs write apart",
}


def where_words(where: Mapping[str, tuple[str, ...]]) -> str:
    """`order=nhd|hnd, cache_dtype=bf16`, as --where takes it; empty without an axis."""
    return ", ".join(f"{axis}={'|'.join(levels)}" for axis, levels in where.items())
