"""Which levels of the axes of cache plans go together, and what says so."""

from kvfuzz.model.rules import Rule

COMPACT = ("none", "LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""Where a page lies in one piece."""
DENSE = ("none", "LBHNC", "LBNHC")
"""Where block follows block without another layer's page between them."""


def _groups_fit(kinds: str, groups: str) -> bool:
    """Uniform models have one group, others at least one of each kind."""
    count = kinds.count("+") + 1
    if count == 1:
        return groups == "1"
    return groups == "3+" if count == 3 else groups != "1"


def _form_fits(kinds: str, form: str) -> bool:
    if "mla" in kinds:
        return form == "latent"
    # Two backends in one model: decoder self-attention and cross-attention (#47035, #47685).
    return form != "latent" and (form != "mixed" or kinds == "full+cross")


def _form_is_placed(placement: str, form: str) -> bool:
    """Two head slots came with the one buffer, and K/V-first pages went with it; K and V in one
    content dimension were there before (#44455). A packed page lies in one piece."""
    if form in ("latent", "content_packed"):
        return True
    if placement == "one_buffer":
        return form == "head_slots"
    return form == "blocks_first" if placement == "packed" else form in BEFORE


BEFORE = ("kv_first", "blocks_first", "mixed")

PLAN_RULES: tuple[Rule, ...] = (
    Rule(("placement", "kv_layout"), lambda p, layout: (p == "one_buffer") == (layout != "none")),
    Rule(("kinds", "form"), _form_fits),
    Rule(("placement", "form"), _form_is_placed),
    # A KVCacheLayout says the order itself.
    Rule(
        ("placement", "form", "page_order"),
        lambda placement, form, order: (
            order == "nhd"
            or form == "blocks_first"
            or (form == "content_packed" and placement != "one_buffer")
        ),
    ),
    # With one head, or one token a block, the orders are the same, but tokens begin at 4.
    Rule(("kinds", "groups"), _groups_fit),
    Rule(
        ("groups", "layers", "group_sizes"),
        lambda groups, layers, sizes: sizes == "even" or (groups != "1" and layers != "1"),
    ),
    # Pages of one size and several shapes: heads and blocks of attention groups (Gemma-4).
    Rule(
        ("kinds", "geometry"),
        lambda kinds, g: g == "same" or kinds in ("full+sliding", "full+chunked"),
    ),
    Rule(("form", "geometry"), lambda form, g: g == "same" or form != "latent"),
    # Heads outside of a page say the same of all groups where their pages have one shape
    # (specs with several (num_heads, num_states, page) need a compact one, 0.33.0).
    Rule(
        ("kv_layout", "kinds", "geometry"),
        lambda layout, kinds, g: layout in COMPACT or (g == "same" and "mamba" not in kinds),
    ),
    Rule(("kv_layout", "kernel_blocks"), lambda layout, r: r == "1" or layout in DENSE),
    Rule(("placement", "kernel_blocks"), lambda p, r: r == "1" or p != "packed"),
    Rule(("page_padding", "kernel_blocks"), lambda pad, r: r == "1" or pad != "attention"),
    Rule(("kinds", "page_padding"), lambda kinds, pad: pad != "state" or "mamba" in kinds),
    # A padded page is one that its block stride skips: K/V-first has no such stride.
    Rule(
        ("form", "page_padding"),
        lambda form, pad: pad != "attention" or form not in ("kv_first", "mixed"),
    ),
    Rule(("kv_layout", "page_padding"), lambda layout, pad: pad == "none" or layout in COMPACT),
    # vLLM cuts a packed page to its shape before it looks at its padding.
    Rule(("placement", "page_padding"), lambda p, pad: pad != "attention" or p != "packed"),
    Rule(("kinds", "states"), lambda kinds, states: (states != "none") == ("mamba" in kinds)),
    Rule(("form", "value_heads"), lambda form, v: v == "same" or form == "content_packed"),
    Rule(("kinds", "heads"), lambda kinds, heads: heads == "1" or "mla" not in kinds),
    Rule(("geometry", "heads"), lambda g, heads: g == "same" or heads in ("2", "4")),
    Rule(("geometry", "value_heads"), lambda g, v: g == "same" or v == "same"),
    Rule(("geometry", "kernel_blocks"), lambda g, r: g == "same" or r in ("1", "2")),
    Rule(("geometry", "page_padding"), lambda g, pad: g == "same" or pad == "none"),
)
"""Every rule."""
