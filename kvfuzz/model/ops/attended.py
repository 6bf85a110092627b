"""What attention reads and writes beside its cache, and the numbers that it is asked about.

Of scores and weights a reference has a bound, and no bits. The bound is small where numbers are of
a similar size, so that K, V and queries are drawn from a few binades; what else the cache holds is
hash bytes as ever. With `exact` values a query is zeros and a large power of two, K zeros and ones,
and V small integers: every score is a multiple of that power, so that the largest ones have the
weight one and all others none, and every sum is exact.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvfuzz.model.batch_metadata import gathered
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import FP32_ONE, ChoiceFill, Fill, FloatFill
from kvfuzz.model.layout import Field
from kvfuzz.model.ops import metadata
from kvfuzz.model.ops.activations import Gaps, rows_of_heads
from kvfuzz.model.ops.metadata import Metadata, stale
from kvfuzz.model.plan import Batch, Sequence
from kvfuzz.model.vocabulary import Levels

ATTENTION_VALUES: Levels = ("spread", "exact", "low", "flat")
"""What the numbers are: spread over a few binades; few enough, and such, that all weights are zero
or one and all sums exact, so that one wrong token among thousands shows; such that all scores are
about -20, which half precision cannot hold the exponential of; or with queries of zeros, so that
every token has the same weight, and none that is left out, or seen twice, goes unnoticed."""
QUERY_BINADES, CACHE_BINADES = (-3, 0), (-3, 0)
"""The binades of queries, and of what elements of a cache stand for: scores spread over a few
units, so that some tokens matter more than others and none alone."""
HOT = 12
"""The power of two that exact queries have: large enough that one step of a score is exp(-100)."""
ZEROS = 3
"""Zeros that an exact query has for each large number."""
NEAR_ONE = (0.75, 1.0, 1.25, 1.5)
LOW = 20.0
"""About what a low score is below zero."""
MOST_V = 8
"""The largest integer of an exact V: every format here has all up to it."""


def is_idle(sequence: Sequence) -> bool:
    """Whether a sequence has no tokens: a request that pads a batch."""
    return sequence.start + sequence.length == 0


def idle_rows(batch: Batch, results: Iterable[Metadata]) -> tuple[Field, ...]:
    """The rows of `results` of a decode that belong to idle sequences, a field each."""
    return tuple(
        metadata.rows_from(each.field, row, 1)
        for row, sequence in enumerate(batch.sequences)
        if is_idle(sequence)
        for each in results
    )


def softmax_scale(scalars: Mapping[str, int | str]) -> float:
    """What a step's scalars say that q . k is multiplied by."""
    return DTYPES["fp32"].decode(int(scalars["scale_bits"]))


class Rows(NamedTuple):
    """Rows of query heads as queries and outputs have them: `number` of `heads` heads each, with
    `gap` elements behind each row."""

    dtype: str
    number: int
    heads: int
    gap: int

    def tensor(self, name: str, size: int, fill: Fill) -> Metadata:
        """Rows `[number, heads, size]`."""
        shape = (self.number, self.heads, size)
        return rows_of_heads(name, self.dtype, shape, fill, Gaps(row=self.gap))


def query_fill(
    seed: int, dtype: str, values: str, factor: float, zeros: int = ZEROS, *, scale: int = FP32_ONE
) -> Fill:
    """The elements of queries, which stand for code * `scale` (a bit pattern); `factor` is the
    elements of one times the scale of scores."""
    of_one = DTYPES["fp32"].decode(scale)
    if values == "flat":
        return _choices(seed, dtype, (0.0,))
    if values == "exact":
        return _choices(seed, dtype, (*(0.0,) * zeros, 2.0**HOT / of_one))
    if values == "low":
        return _choices(seed, dtype, [LOW / factor / of_one * each for each in NEAR_ONE])
    return _spread(seed, dtype, of_one, QUERY_BINADES)


def cache_fill(
    seed: int, dtype: str, scale: int, values: str, exact: Iterable[float], *, is_key: bool
) -> Fill:
    """The elements of K or V, so that code * `scale` (a bit pattern) is of the size that it should
    be, or one of the numbers `exact`. What is only V is spread where scores are low."""
    cache, of_one = DTYPES[dtype], DTYPES["fp32"].decode(scale)
    if not cache.is_quantised:
        of_one = 1.0
    if values == "flat":
        return _choices(seed, dtype, [each / of_one for each in range(MOST_V + 1)])
    if values == "exact":
        return _choices(seed, dtype, [each / of_one for each in exact])
    if values == "low" and is_key:
        return _choices(seed, dtype, [-each / of_one for each in NEAR_ONE])
    if cache.is_integer:
        return _choices(seed, dtype, range(-MOST_V, MOST_V + 1))
    return _spread(seed, dtype, of_one, CACHE_BINADES)


def numbers_of(fill: Fill) -> str:
    """Which of ATTENTION_VALUES queries with this fill show."""
    if not isinstance(fill, ChoiceFill):
        return "spread"
    if not any(fill.codes):
        return "flat"
    return "exact" if 0 in fill.codes else "low"


def _spread(seed: int, dtype: str, of_one: float, binades: tuple[int, int]) -> FloatFill:
    """Codes whose products with `of_one` are in these binades, as far as the format has them."""
    of, top = DTYPES[dtype], (1 << DTYPES[dtype].exponent_bits) - 2
    low, high = (each - math.frexp(of_one)[1] + 1 + of.bias for each in binades)
    return FloatFill(seed, dtype, min(max(low, 1), top), min(max(high, 1), top))


def _choices(seed: int, dtype: str, numbers: Iterable[float]) -> ChoiceFill:
    return ChoiceFill(seed, dtype, tuple(DTYPES[dtype].encode(number) for number in numbers))


def ends_of(batch: Batch) -> tuple[int, ...]:
    """Where the query tokens of each sequence begin, and the last ones end."""
    return tuple(itertools.accumulate((each.length for each in batch.sequences), initial=0))


def seen_of(batch: Batch, num_blocks: int, seed: int, spare: int) -> tuple[Metadata, Metadata]:
    """block_table `[S, width]` and seq_lens `[S]`, with `spare` stale rows and entries behind."""
    ids, width = gathered(batch, num_blocks, seed).block_table, batch.table_width
    rows = [ids[at : at + width] for at in range(0, len(ids), width)]
    old = stale(seed, "block_table behind", spare * width, num_blocks)
    behind = [old[at : at + width] for at in range(0, len(old), width)]
    lens = tuple(each.start + each.length for each in batch.sequences)
    lens_behind = stale(seed, "seq_lens behind", spare, max(lens) + 1)
    return (
        metadata.table("block_table", "i32", (*rows, *behind), len(rows)),
        metadata.vector("seq_lens", "i32", (*lens, *lens_behind), len(lens)),
    )
