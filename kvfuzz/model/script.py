"""A script: what happens to the sequences of a cache over time, and the case that it means.

Actions name their sequences, so that one can be taken out and the others mean the same. In order of
a request's life:

    allocate   blocks for `tokens` more tokens, which are not written yet
    prefill    the first `tokens` tokens of a new sequence, in one write
    extend     `tokens` more tokens of it, in one write
    decode     one more token of each of several sequences, in one write
    fork       a second sequence that shares all blocks of the first
    read       all tokens of several sequences are gathered
    rollback   the last `tokens` tokens are given up, as speculation does; their slots come again
    swap_out   the blocks go to the host, and others may have them
    swap_in    they come back, to whatever blocks are free
    zero       the blocks are cleared, and no token is left
    free       the blocks are free, with what is in them

A write to a block that several sequences hold goes to a copy of it (copy on write).
"""

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model import plan_check
from kvfuzz.model.cache_plan import CachePlan
from kvfuzz.model.case import Program
from kvfuzz.model.dtypes import DTYPES

ACTIONS: tuple[str, ...] = (
    "allocate",
    "prefill",
    "extend",
    "decode",
    "fork",
    "read",
    "rollback",
    "swap_out",
    "swap_in",
    "zero",
    "free",
)
WITH_TOKENS = ("allocate", "prefill", "extend", "rollback")
SEVERAL = ("decode", "read")
"""The actions of one or more sequences; a fork has two, every other action one."""

STATEFUL_OP = "stateful_cache"
MOST_ACTIONS = 200
MOST_HOST_BLOCKS = 1 << 16


class Action(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One thing that happens, to the sequences of these names."""

    rule: str
    sequences: tuple[str, ...]
    tokens: int = 0


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides a stateful case."""

    plan: CachePlan
    actions: tuple[Action, ...]
    model_dtype: str
    k_scale: int
    """Bit pattern of an fp32, as in a scene."""
    v_scale: int
    host_blocks: int = 8
    fill_seed: int = 0


class ScriptCase(Program, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="script"):
    """A script, lowered: the steps of each action, one for each layer that it concerns."""

    script: Script

    @property
    def op(self) -> str:
        """What the target is asked for."""
        return STATEFUL_OP

    @property
    def plan(self) -> CachePlan:
        """The cache that the script runs on."""
        return self.script.plan


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UsageError(f"impossible script: {what}")


def check(script: Script) -> None:
    """Raise UsageError with the first thing that makes a script impossible, its order apart:
    whether an action can follow the others the block manager says."""
    plan_check.check(script.plan)
    _require(
        0 < len(script.actions) <= MOST_ACTIONS,
        f"{len(script.actions)} actions, expected 1 to {MOST_ACTIONS}",
    )
    for action in script.actions:
        where = f"action {action.rule} {', '.join(action.sequences)}"
        _require(action.rule in ACTIONS, f"{where}: expected one of {', '.join(ACTIONS)}")
        names = len(action.sequences)
        right = names >= 1 if action.rule in SEVERAL else names == 1 + (action.rule == "fork")
        _require(
            right and len(set(action.sequences)) == names, f"{where}: {names} names of sequences"
        )
        _require(
            (action.tokens > 0) == (action.rule in WITH_TOKENS),
            f"{where}: tokens={action.tokens}",
        )
    _require(
        any(layer.is_attention for layer in script.plan.owners)
        and all(layer.form != "latent" for layer in script.plan.layers),
        "a plan without K and V pages, or with a latent, which no op of a script writes",
    )
    dtypes = {layer.cache_dtype for layer in script.plan.owners if layer.is_attention}
    _require(
        script.model_dtype in DTYPES
        and not DTYPES[script.model_dtype].is_quantised
        and all(DTYPES[each].is_quantised or each == script.model_dtype for each in dtypes),
        f"model_dtype={script.model_dtype!r} with caches of {sorted(dtypes)}",
    )
    _require(
        1 <= script.host_blocks <= MOST_HOST_BLOCKS,
        f"host_blocks={script.host_blocks}, expected 1 to {MOST_HOST_BLOCKS}",
    )
    for name, bits in (("k_scale", script.k_scale), ("v_scale", script.v_scale)):
        _require(0 < bits < 0x7F800000, f"{name}=0x{bits:08x}, expected a positive fp32")
