"""Which cache plans are possible: layers, groups, sharing and places that an engine could mean."""

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.cache_plan import FORMS, KINDS, KV_LAYOUTS, CacheLayer, CachePlan
from kvfuzz.model.dtypes import DTYPES, INTEGER_SIZES, itemsize

MOST_BYTES = 1 << 38


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UsageError(f"impossible plan: {what}")


def check(plan: CachePlan) -> None:
    """Raise UsageError with the first thing that no engine could mean by `plan`."""
    names = [layer.name for layer in plan.layers]
    _require(bool(names), "no layers")
    _require(len(set(names)) == len(names), f"two layers share a name among {names}")
    _require(
        1 <= plan.num_blocks <= MOST_BYTES,
        f"num_blocks={plan.num_blocks}, expected 1 to {MOST_BYTES}",
    )
    _require(
        plan.kv_layout in ("", *KV_LAYOUTS),
        f"kv_layout={plan.kv_layout!r}, expected one of {', '.join(KV_LAYOUTS)}, or nothing",
    )
    for layer in plan.layers:
        _check_layer(layer)
    _check_groups(plan)
    for layer in plan.sharers:
        _check_sharer(plan, layer)
    _check_placements(plan)


def _check_layer(layer: CacheLayer) -> None:
    where = f"layer {layer.name}"
    _require(layer.kind in KINDS, f"{where}: kind={layer.kind!r}, expected one of {KINDS}")
    _require(layer.form in FORMS, f"{where}: form={layer.form!r}, expected one of {FORMS}")
    form = {"mla": ("latent",), "mamba": ("states",)}.get(layer.kind, FORMS[:4])
    _require(
        layer.form in form, f"{where}: form={layer.form} of kind={layer.kind}, expected {form}"
    )
    n, kernel = layer.block_size, layer.kernel_block_size
    _require(
        1 <= kernel <= n and n % kernel == 0,
        f"{where}: block_size={n}, kernel_block_size={kernel}, expected a multiple of it",
    )
    if layer.is_attention:
        _require(layer.cache_dtype in DTYPES, f"{where}: cache_dtype={layer.cache_dtype!r}")
        _require(
            1 <= layer.num_kv_heads <= MOST_BYTES
            and 1 <= layer.head_size <= MOST_BYTES
            and layer.head_size_v <= MOST_BYTES
            and not layer.states,
            f"{where}: {layer.num_kv_heads} heads of {layer.head_size}, {layer.states}",
        )
        _require(
            (layer.head_size_v == 0) == (layer.kind == "mla"),
            f"{where}: head_size_v={layer.head_size_v} of kind={layer.kind}",
        )
        same = layer.form in ("content_packed", "latent") or layer.head_size_v == layer.head_size
        _require(same, f"{where}: form={layer.form} with two head sizes")
        _require(layer.order in ("nhd", "hnd"), f"{where}: order={layer.order!r}")
    else:
        known = DTYPES.keys() | INTEGER_SIZES.keys()
        _require(bool(layer.states), f"{where}: kind=mamba without states")
        _require(
            all(state.dtype in known and bool(state.shape) for state in layer.states),
            f"{where}: states {layer.states}, expected dtypes of {sorted(known)}, and shapes",
        )
        sizes = [state.nbytes for state in layer.states]
        _require(
            all(size > 0 for size in sizes)
            and all(
                sum(sizes[:index]) % itemsize(state.dtype) == 0
                and layer.page_stride % itemsize(state.dtype) == 0
                for index, state in enumerate(layer.states)
            ),
            f"{where}: states {layer.states} do not lie at multiples of their elements",
        )
    _require(
        layer.page_padded == 0 or layer.page_padded >= layer.page_bytes,
        f"{where}: page_padded={layer.page_padded}, a page has {layer.page_bytes} bytes",
    )
    _require(
        layer.page_padded == 0 or layer.ratio == 1,
        f"{where}: a padded page cannot be split into kernel blocks",
    )


def _largest_element(layer: CacheLayer) -> int:
    """Bytes of the widest element of a layer's pages."""
    if layer.is_attention:
        return itemsize(layer.cache_dtype)
    return max(itemsize(state.dtype) for state in layer.states)


def _check_groups(plan: CachePlan) -> None:
    grouped = [name for group in plan.groups for name in group]
    _require(
        sorted(grouped) == sorted(layer.name for layer in plan.layers),
        f"groups of {sorted(grouped)}, expected every layer in one group",
    )
    for group in plan.groups:
        kinds = {plan.layer(name).kind for name in group}
        _require(len(kinds) == 1, f"group {group} of several kinds: {sorted(kinds)}")


def _check_sharer(plan: CachePlan, layer: CacheLayer) -> None:
    """Cross-layer sharing: the target owns its cache, comes earlier and has the same format."""
    names = [each.name for each in plan.layers]
    where = f"layer {layer.name} shares the cache of {layer.shares!r}"
    _require(layer.shares in names, f"{where}, which does not exist")
    target = plan.layer(layer.shares)
    _require(not target.shares, f"{where}, which shares that of {target.shares}: a chain")
    _require(
        names.index(target.name) < names.index(layer.name),
        f"{where}, which comes later: nothing is in it yet",
    )
    _require(layer.kind == target.kind, f"{where}, of another kind: {layer.kind}, {target.kind}")
    alike = msgspec.structs.replace(target, name=layer.name, shares=layer.shares) == layer
    _require(alike, f"{where}, whose format is another one")
    group_of = plan.group_of
    _require(group_of[layer.name] == group_of[target.name], f"{where}, which is in another group")


def _check_placements(plan: CachePlan) -> None:
    sizes = {each.name: each.nbytes for each in plan.allocations}
    _require(len(sizes) == len(plan.allocations), "two allocations share a name")
    for name, nbytes in sizes.items():
        _require(1 <= nbytes <= MOST_BYTES, f"allocation {name}: nbytes={nbytes}")
    placed = [name for each in plan.placements for name in each.layers]
    _require(
        sorted(placed) == sorted(layer.name for layer in plan.owners),
        "each layer that owns a cache is placed once, and no other is",
    )
    for each in plan.placements:
        where = f"placement of {', '.join(each.layers)}"
        _require(each.allocation in sizes, f"{where}: no allocation {each.allocation!r}")
        _require(
            each.offset >= 0 and each.layer_stride >= 0 and each.block_stride >= 1,
            f"{where}: offset {each.offset}, strides {each.layer_stride} and {each.block_stride}",
        )
        groups = [plan.group_of[name] for name in each.layers]
        element = max(_largest_element(plan.layer(name)) for name in each.layers)
        strides = (each.offset, each.layer_stride, each.block_stride)
        _require(
            all(stride % element == 0 for stride in strides),
            f"{where}: offset and strides {strides}, expected multiples of {element}: an element",
        )
        _require(
            each.layer_stride > 0 or len(set(groups)) == len(groups),
            f"{where}: two layers of one group at the same place",
        )
        for name in each.layers:
            layer = plan.layer(name)
            _require(
                layer.ratio == 1 or each.block_stride == layer.page_bytes,
                f"{where}: blocks {each.block_stride} bytes apart cannot be split into kernel "
                f"blocks, {name} has pages of {layer.page_bytes} bytes",
            )
