"""Which levels of the axes of scripts go together."""

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.plan_rules import PLAN_RULES
from kvfuzz.model.rules import Rule
from kvfuzz.model.script_axes import SCRIPT_AXES
from kvfuzz.model.vocabulary import DIALECTS

MOST_OF_A_TOKEN = 512
"""Layers, times tokens of a block, times heads, times bytes of an element, at most."""

_AXES = {axis.name for axis in SCRIPT_AXES}

SCRIPT_RULES: tuple[Rule, ...] = (
    *(rule for rule in PLAN_RULES if {*rule.axes} <= _AXES),
    # A cache that is not fp8 has the model's dtype, and no scale.
    Rule(("stored_in", "written_in"), lambda s, w: DTYPES[s].is_quantised or s == w),
    Rule(("stored_in", "scaled_by"), lambda s, by: DTYPES[s].is_quantised == (by != "none")),
    # The layers of a group are alike, so that two dialects take two groups of attention.
    Rule(
        ("dialects", "stored_in"), lambda dialects, stored: dialects == "one" or stored in DIALECTS
    ),
    Rule(
        ("dialects", "groups", "kinds"),
        lambda dialects, groups, kinds: (
            dialects == "one" or (groups != "1" and kinds != "full+mamba")
        ),
    ),
    # A block is copied where a second sequence holds it.
    Rule(("forks", "copies"), lambda forks, copies: copies == "none" or forks == "some"),
    Rule(("copies", "batches"), lambda copies, batches: copies != "several" or batches == "some"),
    # A script has many steps, each of which compares the whole cache.
    Rule(
        ("layers", "tokens", "heads", "stored_in"),
        lambda layers, tokens, heads, dtype: (
            int(layers) * int(tokens) * int(heads) * DTYPES[dtype].itemsize <= MOST_OF_A_TOKEN
        ),
    ),
)
"""Every rule: those of plans that are about axes of scripts, and those of what happens."""
