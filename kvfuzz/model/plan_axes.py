"""The axes of cache plans, read off a plan case, and which of their levels go together.

Names begin where those of kernels' axes would clash; `kvfuzz.model.cache_plan` has the words.
"""

from kvfuzz.model.axis import COUNTS, Axis, count_level
from kvfuzz.model.cache_plan import KV_LAYOUTS, CacheLayer, CachePlan
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.plan_case import PLAN_OPS, PlanCase
from kvfuzz.model.vocabulary import Levels

PLACEMENTS: Levels = ("separate", "packed", "one_buffer")
"""As `CachePlan.placed` tells them apart."""

KIND_SETS: Levels = (
    "full",
    "sliding",
    "mla",
    "full+sliding",
    "full+chunked",
    "full+cross",
    "full+mamba",
    "mla+mamba",
    "full+sliding+mamba",
)
"""The kinds of layers of real models: Llama; Mistral; DeepSeek; Gemma and gpt-oss; Llama-4;
Whisper and Nemotron Parse; Qwen3-Next, Jamba and Nemotron-H; Kimi-Linear; hybrids with a window."""

PLAN_FORMS: Levels = (
    "kv_first",
    "blocks_first",
    "mixed",
    "content_packed",
    "head_slots",
    "latent",
)
"""How attention layers are read; mixed: some kv_first, some blocks_first, over one allocation."""

OTHER = "other"
"""What reduced plans may show and no row draws."""

TOKENS: Levels = ("4", "16", "32", "48")
MORE_TOKENS = "16n"
"""Other multiples of 16, which no row draws."""


def _owners(case: PlanCase) -> list[CacheLayer]:
    return list(case.plan.owners)


def _attention(case: PlanCase) -> list[CacheLayer]:
    return [layer for layer in case.plan.owners if layer.is_attention]


def kinds_of(plan: CachePlan) -> str:
    """The kinds of a plan's layers, attention first, as KIND_SETS has them."""
    order = ("mla", "full", "sliding", "chunked", "cross", "mamba")
    kinds = {layer.kind for layer in plan.layers}
    shown = "+".join(kind for kind in order if kind in kinds)
    return shown if shown in KIND_SETS else OTHER


def _form(case: PlanCase) -> str:
    forms = {layer.form for layer in _attention(case)}
    if forms == {"kv_first", "blocks_first"}:
        return "mixed"
    return next(iter(forms)) if len(forms) == 1 and forms <= {*PLAN_FORMS} else OTHER


def _page_order(case: PlanCase) -> str:
    """Of layers whose backend is told the order; a KVCacheLayout says it itself."""
    ordered = [
        layer
        for layer in _attention(case)
        if layer.form == "blocks_first"
        or (layer.form == "content_packed" and not case.plan.kv_layout)
    ]
    return "hnd" if any(layer.order == "hnd" for layer in ordered) else "nhd"


def _group_sizes(case: PlanCase) -> list[int]:
    group_of = case.plan.group_of
    owners = [group_of[layer.name] for layer in case.plan.owners]
    return [owners.count(number) for number in range(len(case.plan.groups))]


def _geometry(case: PlanCase) -> str:
    """Whether attention groups have pages of one shape, or of several block sizes or heads."""
    shapes = {(layer.block_size, layer.num_kv_heads, layer.head_size) for layer in _attention(case)}
    return "same" if len(shapes) < 2 else "differs"


def _split(case: PlanCase) -> str:
    ratio = max((layer.ratio for layer in _attention(case)), default=1)
    return str(ratio) if ratio < 4 else "4+"


def _padding(case: PlanCase) -> str:
    if any(layer.page_padded for layer in _attention(case)):
        return "attention"
    return "state" if any(layer.page_padded for layer in _owners(case)) else "none"


def _sharers(case: PlanCase) -> str:
    targets = [layer.shares for layer in case.plan.sharers]
    return "none" if not targets else "one" if len(targets) == 1 else "several"


def _states(case: PlanCase) -> str:
    most = max((len(layer.states) for layer in case.plan.layers), default=0)
    return "none" if not most else count_level(most)


def _value_heads(case: PlanCase) -> str:
    different = any(layer.head_size_v not in (0, layer.head_size) for layer in _attention(case))
    return "other" if different else "same"


def _first(case: PlanCase) -> CacheLayer:
    return (_attention(case) or _owners(case))[0]


def _tokens(case: PlanCase) -> str:
    shown = str(_first(case).kernel_block_size)
    if shown in TOKENS:
        return shown
    return MORE_TOKENS if int(shown) % 16 == 0 else OTHER


def _heads(case: PlanCase) -> str:
    shown = str(_first(case).num_kv_heads)
    return shown if shown in ("1", "2", "3", "4") else OTHER


def _element(case: PlanCase) -> str:
    return str(itemsize(_first(case).cache_dtype or "bf16"))


def _drawn(*levels: str) -> dict[str, Levels]:
    """The levels that rows draw, where reduced plans may show others."""
    return dict.fromkeys(PLAN_OPS, levels)


PLAN_AXES: tuple[Axis, ...] = (
    Axis("placement", PLACEMENTS, lambda case: case.plan.placed),
    Axis("kv_layout", ("none", *KV_LAYOUTS), lambda case: case.plan.kv_layout or "none"),
    Axis("kinds", (*KIND_SETS, OTHER), lambda case: kinds_of(case.plan), _drawn(*KIND_SETS)),
    Axis("form", (*PLAN_FORMS, OTHER), _form, _drawn(*PLAN_FORMS)),
    Axis("page_order", ("nhd", "hnd"), _page_order),
    Axis("groups", COUNTS, lambda case: count_level(len(case.plan.groups))),
    Axis("layers", COUNTS, lambda case: count_level(max(_group_sizes(case)))),
    Axis(
        "group_sizes",
        ("even", "uneven"),
        lambda case: "even" if len(set(_group_sizes(case))) == 1 else "uneven",
    ),
    Axis("geometry", ("same", "differs"), _geometry),
    Axis("kernel_blocks", ("1", "2", "3", "4+"), _split),
    Axis("page_padding", ("none", "state", "attention"), _padding),
    Axis("sharers", ("none", "one", "several"), _sharers),
    Axis("states", ("none", *COUNTS), _states, _drawn("none", "1", "2")),
    Axis("value_heads", ("same", "other"), _value_heads),
    Axis("num_blocks", COUNTS, lambda case: count_level(case.plan.num_blocks)),
    Axis("tokens", (*TOKENS, MORE_TOKENS, OTHER), _tokens, _drawn(*TOKENS)),
    Axis("heads", ("1", "2", "3", "4", OTHER), _heads, _drawn("1", "2", "3", "4")),
    Axis("element", ("1", "2", "4"), _element),
)
