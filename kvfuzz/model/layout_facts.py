"""How a cache is laid out, read off a case: the answers of `kvfuzz.model.vocabulary`, from bytes.

Fields alone decide, by where V begins and by how the steps from token to head, layer and block
compare, so that a case cannot claim a layout that its bytes do not have. Where two layouts are the
same bytes, the plainer one is told; shuffle and x_packed_v, which are, differ in the view that the
target is handed.
"""

from kvfuzz.model.case import Program
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layout import Field
from kvfuzz.model.placement import SCALE_AXES, occupied


def key_cache(case: Program) -> Field:
    """K of the layer that the first step works on."""
    return case.bound_field(case.steps[0], "key_cache")


def value_cache(case: Program) -> Field:
    """V of the layer that the first step works on."""
    return case.bound_field(case.steps[0], "value_cache")


def steps(field: Field) -> dict[str, int]:
    """By axis, the bytes from one to the next; of a split axis, within a part."""
    return {term.axis: term.stride for term in field.terms}


def order(case: Program) -> str:
    """Whether K and V are taken apart, and if not, whether heads or tokens are farther apart."""
    k, v = key_cache(case), value_cache(case)
    if len(k.terms) == 4:
        step = steps(k)
        return "hnd" if step["head"] > step["token"] else "nhd"
    if len(v.terms) == 4:
        return "x_packed"
    view = case.tensor(case.steps[0].tensors["value_cache"])
    return "x_packed_v" if len(view.shape) == 5 else "shuffle"


def layout(case: Program) -> str:
    """Where V begins: within a row of K, behind all blocks of K, or behind K's part of a block."""
    if any(field.name == "state" for field in case.fields):
        return "hybrid"
    k, step = key_cache(case), steps(key_cache(case))
    apart = value_cache(case).base - k.base
    if len(k.terms) == 4 and min(step["head"], step["token"]) > apart:
        return "content_packed"
    return "kv_first" if apart >= step["block"] else "blocks_first"


def nesting(case: Program) -> str:
    """How wide the step from layer to layer is, between those to the next head and block.

    With one layer, one head or one block several nestings are the same bytes.
    """
    k = key_cache(case)
    head, block = steps(k)["head"], steps(k)["block"]
    if head >= block and k.extents["head"] > 1:
        return "head_first"
    layer = min((abs(other.base - k.base) for other in _k_of_others(case)), default=block)
    if layer < head:
        return "block_head_first"
    return "block_first" if layer < block else "layer_first"


def _k_of_others(case: Program) -> list[Field]:
    """K of the other attention layers in the allocation."""
    k = key_cache(case)
    return [
        field
        for field in case.fields
        if field.buffer == k.buffer and field.name == f"{field.layer}.k"
    ]


def page(case: Program) -> str:
    """Whether the allocation has bytes that are no element's."""
    buffer = case.buffer(key_cache(case).buffer)
    pages = [f for f in case.fields if f.buffer == buffer.name and "token" in f.extents]
    return "padded" if occupied(pages) < buffer.nbytes else "exact"


def value_size(case: Program) -> str:
    """How the head sizes of V and K compare."""
    k, v = key_cache(case).extents["dim"], value_cache(case).extents["dim"]
    return "same" if k == v else "narrower" if v < k else "wider"


def granularity(case: Program) -> str:
    """The axes that the scales of K depend on, and whether they lie in its pages."""
    field = case.bound_field(case.steps[0], "k_scale")
    if field.buffer == key_cache(case).buffer:
        return "token_head_inline"
    axes = {term.axis for term in field.terms}
    return next(name for name, depends in SCALE_AXES.items() if set(depends) == axes)


def strides(case: Program) -> str:
    """Whether the tensor of K has the strides of a dense one."""
    view = case.tensor(case.steps[0].tensors["key_cache"])
    expected = itemsize(view.dtype)
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if stride != expected:
            return "not_dense"
        expected *= size
    return "dense"
