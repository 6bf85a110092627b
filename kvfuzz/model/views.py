"""The tensors that an engine hands over for a cache: shapes and strides over a field's bytes.

A view is what a target believes; oracles never read it. By order, element sizes apart:

    nhd, hnd    K and V `[num_blocks, block_size, num_kv_heads, head_size]`, strided
    shuffle     the same shape, with the inner strides of a dense NHD page, which it is not: the
                kernel reinterprets a page (reshape_and_cache_shuffle_triton in
                vllm/v1/attention/backends/rocm_aiter_fa.py)
    x_packed    K `[num_blocks, num_kv_heads, head_size/x, block_size, x]`,
                V `[num_blocks, num_kv_heads, head_size, block_size]`
    x_packed_v  the same K, V `[num_blocks, num_kv_heads, block_size/x, head_size, x]`

The scalar `kv_cache_layout` of a step names the order: NHD, HND, SHUFFLE, XPACKED, XPACKED_V.
"""

from kvfuzz.model.case import TensorView
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layout import Field, Term
from kvfuzz.model.vocabulary import ORDERS, SPLIT_DIM

SPELT: dict[str, str] = {order: order.upper().replace("X_PACKED", "XPACKED") for order in ORDERS}
"""By order, what `kv_cache_layout` says."""

RANKS: dict[str, tuple[int, int]] = {
    spelt: {"XPACKED": (5, 4), "XPACKED_V": (5, 5)}.get(spelt, (4, 4)) for spelt in SPELT.values()
}
"""By `kv_cache_layout`, the ranks of key_cache and value_cache."""


def cache_view(name: str, field: Field, order: str) -> TensorView:
    """The view `name` of the pages at `field`, which is K or V of a layer in `order`."""
    sizes = field.extents
    if order in SPLIT_DIM and order != "shuffle":
        shape = tuple(term.digits(sizes[term.axis]) for term in field.terms)
        strides = tuple(term.stride for term in field.terms)
    else:
        stride = _nhd_strides(field) if order == "shuffle" else _by_axis(field.terms)
        shape = (sizes["block"], sizes["token"], sizes["head"], sizes["dim"])
        strides = (stride["block"], stride["token"], stride["head"], stride["dim"])
    return TensorView(name, field.buffer, field.dtype, shape, strides, field.base)


def _by_axis(terms: tuple[Term, ...]) -> dict[str, int]:
    return {term.axis: term.stride for term in terms}


def _nhd_strides(field: Field) -> dict[str, int]:
    element = itemsize(field.dtype)
    head = field.extents["dim"] * element
    return {
        "block": _by_axis(field.terms)["block"],
        "token": field.extents["head"] * head,
        "head": head,
        "dim": element,
    }
