"""The sizes of a cache: block size, head count, head size, within a budget of elements.

Each is drawn from the axis' levels that the domain allows. The budget keeps a case small enough
for hundreds a second; a level that exceeds it with every other choice at its least is dropped.
"""

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvfuzz.errors import UsageError
from kvfuzz.model.axes import Domain
from kvfuzz.model.layout import Geometry
from kvfuzz.model.vocabulary import SPLIT_DIM, SPLIT_TOKEN, x_of
from kvfuzz.strategies.formats import Format

BLOCK_ELEMENTS = 1 << 16
"""Most elements of one side of one block; six blocks of fp32 K and V are then 3 MiB."""
SMALL_BLOCK_ELEMENTS = 1 << 12
"""Most elements where they fit: three cases of four stay this small, since cases a second count."""


def _levels(domain: Domain, axis: str) -> list[int]:
    return [int(level) for level in domain.levels(axis)]


def page_geometries(domain: Domain, format: Format) -> SearchStrategy[Geometry]:
    """Geometries of one block that `domain` accepts for `format`.

    The orders that split a head, or a block, into parts of x need sizes divisible by x. Raises
    UsageError where nothing fits.
    """
    x = x_of(format.cache_dtype) if format.order in SPLIT_DIM else 1
    run = x_of(format.cache_dtype) if format.order in SPLIT_TOKEN else 1
    least = 2 if format.order == "hnd" else 1  # with one token a block, HND is NHD
    head_counts = _levels(domain, "num_kv_heads")
    head_sizes = [size for size in _levels(domain, "head_size") if size % x == 0]
    block_sizes = [
        size
        for size in _levels(domain, "block_size")
        if size % run == 0
        and size >= least
        and any(size * d * min(head_counts) <= BLOCK_ELEMENTS for d in head_sizes)
    ]
    if not block_sizes:
        raise UsageError(
            f"nothing to draw: order={format.order} with cache_dtype={format.cache_dtype} needs "
            f"block_size divisible by {run}, head_size by {x}, block_size at least {least}, one "
            f"side of a block at most {BLOCK_ELEMENTS} elements"
        )

    @st.composite
    def draw_geometry(draw: DrawFn) -> Geometry:
        block_size = draw(st.sampled_from(block_sizes))
        budget = draw(st.sampled_from((SMALL_BLOCK_ELEMENTS,) * 3 + (BLOCK_ELEMENTS,)))
        budget = max(budget, block_size * min(head_sizes) * min(head_counts))
        fitting = [d for d in head_sizes if block_size * d * min(head_counts) <= budget]
        head_size = draw(st.sampled_from(fitting))
        counts = [h for h in head_counts if block_size * head_size * h <= budget]
        return Geometry(1, block_size, draw(st.sampled_from(counts)), head_size)

    return draw_geometry()
