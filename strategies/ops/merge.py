"""Merges: tokens with both parts, with one, or with neither, in tensors of any strides."""

from kvfuzz.model.ops.activations import Gaps
from kvfuzz.model.ops.merge import EMPTY, Lse, MergeScene
from kvfuzz.model.ops.merge_axes import tokens_needed
from kvfuzz.strategies.boundary import Boundary
from kvfuzz.strategies.choices import Choices, chance, distinct, fill_seed, number, pick, rarely
from kvfuzz.strategies.rows import Row

FEW_TOKENS, MOST_TOKENS, MOST_SPARE = 9, 80, 5
"""Tokens mostly, and at times; rows behind them, or tokens of wider log-sum-exps, at most."""
TOLD = 3
"""One in so many targets is told that all tokens have a prefix."""

BOUNDARIES: tuple[Boundary, ...] = (
    Boundary({"suffix_heads": "other"}, "a prefix that was merged before, a padded suffix, 42642"),
    Boundary({"suffix_heads": "other", "prefix_heads": "padded"}, "both are padded"),
    Boundary({"suffix_heads": "other", "with_context": "some"}, "rows that are copied"),
    Boundary({"output_heads": "padded", "row_count": "more"}, "rows behind a batch"),
    Boundary({"prefix_rows": "gapped"}, "a part of wider rows"),
    Boundary({"suffix_rows": "gapped", "output_rows": "gapped"}, "parts of wider rows"),
    Boundary({"empties": "both", "output_lse": "by_head"}, "-inf less -inf is NaN, 39148"),
    Boundary({"empties": "prefix", "infinity": "plus"}, "FlashAttention 2's empty part, 15492"),
    Boundary({"empties": "suffix"}, "a chunk of context that a request does not reach"),
    Boundary({"empties": "several", "infinity": "plus"}, "requests that end in several chunks"),
    Boundary({"difference": "far", "output_lse": "by_head"}, "exp of what was not subtracted from"),
    Boundary({"prefix_lse": "by_token", "suffix_lse": "by_head"}, "the transpose of [T, H]"),
    Boundary({"suffix_lse": "by_token", "output_lse": "by_head"}, "the transpose of [T, H]"),
    Boundary({"output_lse": "by_token", "prefix_lse": "wider"}, "a slice of all tokens"),
    Boundary({"with_context": "some", "empties": "several"}, "chunks, and tokens without context"),
    Boundary({"head_size": "80"}, "heads that are no power of two"),
    Boundary({"head_size": "192", "num_heads": "3"}, "MLA's heads before they are cut"),
    Boundary({"num_tokens": "1"}, "a token axis of size one: its stride says nothing"),
)


def drawn_scene(choices: Choices, row: Row) -> MergeScene:
    """The scene of `row`; what the row leaves open is drawn."""
    needed = tokens_needed(row["empties"], row["difference"])
    count, context = _counts(choices, row, needed)
    has_context = count if context is None else context
    empty = _empty(choices, row, has_context)
    size = int(row["head_size"])
    prefix, suffix = _parts_heads(choices, row, size)
    output = _head_gap(choices, size) if row["output_heads"] == "padded" else 0
    return MergeScene(
        empty=(*empty, *["none"] * (count - has_context)),
        num_heads=int(row["num_heads"]),
        head_size=size,
        model_dtype=row["model_dtype"],
        prefix=Gaps(prefix, _row_gap(choices, row["prefix_rows"], size)),
        suffix=Gaps(suffix, _row_gap(choices, row["suffix_rows"], size)),
        output=Gaps(output, _row_gap(choices, row["output_rows"], size)),
        prefix_lse=_lse(choices, row["prefix_lse"]),
        suffix_lse=_lse(choices, row["suffix_lse"]),
        output_lse=_lse(choices, row["output_lse"]) if row["output_lse"] != "none" else None,
        with_context=context,
        plus_infinity=row["infinity"] == "plus",
        far=row["difference"] == "far",
        spare_rows=number(choices, 1, MOST_SPARE) if row["row_count"] == "more" else 0,
        fill_seed=fill_seed(choices),
    )


def _counts(choices: Choices, row: Row, needed: int) -> tuple[int, int | None]:
    """Tokens, and how many of them a target is told to have a prefix."""
    some = row["with_context"] == "some"
    least = needed + some
    if row["num_tokens"] in ("1", "2"):
        count = int(row["num_tokens"])
    else:
        least = max(3, least)
        count = least + rarely(choices, FEW_TOKENS - least, MOST_TOKENS - least)
    if some:
        return count, number(choices, needed, count - 1)
    return count, count if chance(choices, TOLD) else None


def _empty(choices: Choices, row: Row, count: int) -> list[str]:
    """What is empty of each token with a prefix, in any order."""
    kinds = [row["empties"]] if row["empties"] in EMPTY[1:] else []
    if row["empties"] == "several":
        kinds = [EMPTY[1 + kind] for kind in distinct(choices, number(choices, 2, 3), 3)]
        kinds = kinds[: count - (row["difference"] == "far")]
    found = [*kinds, *["none"] * (row["difference"] == "far")]
    found += [pick(choices, ("none", *kinds)) for _ in range(count - len(found))]
    return [found[place] for place in distinct(choices, count, count)]


def _parts_heads(choices: Choices, row: Row, size: int) -> tuple[int, int]:
    """Elements behind the heads of prefix and suffix."""
    prefix = _head_gap(choices, size) if row["prefix_heads"] == "padded" else 0
    if row["suffix_heads"] == "same":
        return prefix, prefix
    if not prefix:
        return 0, _head_gap(choices, size)
    return prefix, 0 if chance(choices, 2) else prefix + _head_gap(choices, size)


def _head_gap(choices: Choices, size: int) -> int:
    """V that was padded to the size of K, and other paddings."""
    return pick(choices, (size // 2, 16, 64, 1))


def _row_gap(choices: Choices, level: str, size: int) -> int:
    return pick(choices, (size, 16, 3 * size, 1)) if level == "gapped" else 0


def _lse(choices: Choices, level: str) -> Lse:
    gap = number(choices, 1, MOST_SPARE) if level == "wider" else 0
    return Lse(level == "by_token", gap)
