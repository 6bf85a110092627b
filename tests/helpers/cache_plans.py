"""Cache plans for tests, and the bytes of views counted out one by one, without NumPy or strides
in one formula: what the oracles' byte maps and proofs are compared with."""

import itertools
from collections import Counter

from msgspec.structs import replace

from kvfuzz.model.axes import Domain
from kvfuzz.model.cache_plan import CacheLayer, State
from kvfuzz.model.dtypes import itemsize
from kvfuzz.strategies import drawn_case, space
from kvfuzz.strategies.choices import Drawn


def attention(name, **changes):
    """A full attention layer with pages of 256 bytes: 4 tokens, 2 heads of 8 bf16 elements."""
    layer = CacheLayer(
        name,
        "full",
        "blocks_first",
        block_size=4,
        kernel_block_size=4,
        cache_dtype="bf16",
        num_kv_heads=2,
        head_size=8,
        head_size_v=8,
    )
    return replace(layer, **changes)


def latent(name, **changes):
    """An MLA layer with rows of 72 bf16 elements."""
    layer = attention(name, kind="mla", form="latent", num_kv_heads=1, head_size=72, head_size_v=0)
    return replace(layer, **changes)


TWO_STATES = (State("bf16", (8, 8)), State("fp32", (4, 8)))


def state(name, *, page=0, states=TWO_STATES, **changes):
    """A layer of two states, 256 bytes together, in pages of `page` bytes."""
    layer = CacheLayer(name, "mamba", "states", 4, 4, states=states, page_padded=page)
    return replace(layer, **changes)


def drawn_plan_cases(op, count, *, seed=0, domain=None, where=None):
    """`count` cases of an op on plans, of its whole domain or of part of it."""
    within = space(op, (domain or Domain()).narrowed(op, where))
    return [drawn_case(Drawn((seed << 32) + n), within) for n in range(count)]


def elements_of(view, num_blocks):
    """(manager block, first byte) of every element of a view, one by one."""
    ratio = view.shape[0] // num_blocks
    return [
        (index[0] // ratio, view.offset + sum(map(int.__mul__, index, view.strides)))
        for index in itertools.product(*map(range, view.shape))
    ]


def bytes_of_view(view, num_blocks):
    """How often each (byte, manager block) is part of an element of a view."""
    size = itemsize(view.dtype)
    return Counter(
        (first + byte, block)
        for block, first in elements_of(view, num_blocks)
        for byte in range(size)
    )


def bytes_of_piece(piece, num_blocks):
    """How often each (byte, manager block) is part of a piece of `kvfuzz.oracles.pieces`."""
    inside = [
        sum(map(int.__mul__, index, [stride for _, stride in piece.axes]))
        for index in itertools.product(*(range(count) for count, _ in piece.axes))
    ]
    base = piece.base.at(num_blocks)
    return Counter(
        (base + kernel_block * piece.stride + start + byte, kernel_block // piece.ratio)
        for kernel_block in range(num_blocks * piece.ratio)
        for start in inside
        for byte in range(piece.run)
    )
