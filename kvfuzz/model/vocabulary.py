"""The words for how a cache is laid out: questions, their answers, and which exclude each other.

Each answer is a level of the axis of the same name. `CONFLICTS` says which answers no cache can
give together; it is data, so that strategies, covering arrays and checks share it.
"""

from collections.abc import Mapping

from kvfuzz.model.dtypes import DTYPES

Levels = tuple[str, ...]

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 128, 544, 784)
"""544 and 784 are what vLLM chooses for Qwen3-Next and Qwen3.5 (page-size unification)."""
HEAD_SIZES = (8, 16, 32, 64, 80, 96, 128, 192, 256, 576)
HEAD_COUNTS = (1, 2, 3, 4, 8)

LAYOUTS: Levels = ("kv_first", "blocks_first", "hybrid", "content_packed")
"""How K and V share the allocation (formulas: vLLM, by release).

kv_first        (2, B, N, H, D): all K pages, then all V pages; #43660 moved AITER away from it
blocks_first    (B, 2, N, H, D): K page and V page of a block side by side
hybrid          the interleave [K0][V0][K1][V1] of attention beside Mamba pages (#37228)
content_packed  (B, H, N, Dk + Dv): K and V of one token and head side by side (#44455)
"""

ORDERS: Levels = ("nhd", "hnd", "shuffle", "x_packed", "x_packed_v")
"""The order of (token, head, dim) inside a page. With x = 16 bytes of elements and N = block_size:

shuffle     K (H, D/x, N, x), V (H, N/x, D, x), handed over as if it were (N, H, D): AITER's
x_packed    K (H, D/x, N, x), V (H, D, N), handed over as they are: ROCM_ATTN's
x_packed_v  the same bytes as shuffle, handed over as they are: V is interleaved, too
"""

SPLIT_DIM: Levels = ("shuffle", "x_packed", "x_packed_v")
"""The orders that take a head of K apart into chunks of x elements."""
SPLIT_TOKEN: Levels = ("shuffle", "x_packed_v")
"""The orders that take a block of V apart into runs of x tokens."""

NESTINGS: Levels = ("layer_first", "block_first", "head_first", "block_head_first")
"""How the attention layers of one allocation, and their heads, nest with its blocks.

layer_first       L regions, one after the other          LBHNC, LBNHC
block_first       the layers side by side in each block   BLHNC, BLNHC
head_first        all blocks of one head, then the next   LHBNC
block_head_first  the layers side by side in each head    BHLNC

The names on the right are those of vLLM's KVCacheLayout, outermost axis first, for a cache that is
content_packed: L layers, B blocks, H heads, N tokens, C content.
"""

HEADS_OUTSIDE: Levels = ("head_first", "block_head_first")
"""The nestings in which a page does not lie in one piece."""

PAGES: Levels = ("exact", "padded")
"""Whether bytes that hold nothing lie between a page and the next (page_size_padded)."""

VALUE_SIZES: Levels = ("same", "narrower", "wider")
"""How the head size of V compares with that of K."""

GRANULARITIES: Levels = ("tensor", "head", "block_head", "token_head", "token_head_inline")
"""What shares one scale: the tensor `[1]`, a head `[H]`, a head of a block `[B, H]`, or a head of a
token `[B, N, H]`; inline, that fp32 follows the elements it is for, in the page."""

DIALECTS: dict[str, str] = {
    "e4m3fn": "e4m3fnuz",
    "e4m3fnuz": "e4m3fn",
    "e5m2": "e5m2fnuz",
    "e5m2fnuz": "e5m2",
}
"""By fp8 format, the same one in the other dialect: one model may hold caches of both."""

LARGEST = {"e4m3fn": 448.0, "e4m3fnuz": 224.0, "int8": 127.0}
"""By format of a cache whose kernel chooses the scales: what engines map the largest magnitude of a
group to (vLLM: get_fp8_min_max is 224 on FNUZ)."""

SCALE_BYTES = 4
"""A scale is an fp32."""


def x_of(dtype: str) -> int:
    """The elements that SHUFFLE and the x-packed orders keep together: 16 bytes of them."""
    return 16 // DTYPES[dtype].itemsize


def code_path(order: str) -> str:
    """The path of a kernel that pages of `order` take: one for strides, one per split order."""
    return order if order in SPLIT_DIM else "strided"


def _but(levels: Levels, *excluded: str) -> Levels:
    return tuple(level for level in levels if level not in excluded)


_NOT_FP8 = tuple(name for name, dtype in DTYPES.items() if not dtype.is_quantised)

CONFLICTS: tuple[tuple[dict[str, Levels], str], ...] = (
    (
        {"layout": ("content_packed",), "order": SPLIT_DIM},
        "K and V tiles would overlap (#44455)",
    ),
    (
        {"layout": ("kv_first",), "page": ("padded",)},
        "vLLM asserts that a padded page holds K and V",
    ),
    (
        {"layout": ("kv_first",), "nesting": _but(NESTINGS, "layer_first")},
        "K and V of a block are not side by side",
    ),
    (
        {"layout": _but(LAYOUTS, "content_packed"), "nesting": HEADS_OUTSIDE},
        "a head outside its block holds K and V of its tokens",
    ),
    (
        {"order": _but(ORDERS, "hnd"), "nesting": HEADS_OUTSIDE},
        "the tokens of a head lie side by side",
    ),
    (
        {"page": ("padded",), "nesting": HEADS_OUTSIDE},
        "vLLM pads pages that lie in one piece only (is_block_compact)",
    ),
    (
        {"granularity": _but(GRANULARITIES, "tensor"), "cache_dtype": _NOT_FP8},
        "only fp8 caches have scales",
    ),
    (
        {"granularity": ("token_head_inline",), "order": SPLIT_DIM},
        "a head of a token does not lie in one piece",
    ),
    (
        {"granularity": ("token_head_inline",), "layout": ("kv_first",)},
        "pages with scales inside came after K/V-first ones",
    ),
)
"""Levels that exclude each other, and why: whatever shows all of an entry's axes is impossible."""


def conflict(shown: Mapping[str, str]) -> str | None:
    """Why no cache has the levels `shown` (of all or some axes) together, or None."""
    for combination, why in CONFLICTS:
        if all(shown.get(axis) in levels for axis, levels in combination.items()):
            return " with ".join(f"{axis}={shown[axis]}" for axis in combination) + f": {why}"
    return None
