"""A cache in use: one target for each op of a script, `stateful:TARGET+TARGET`.

What no named target does, our own kernels do: `stateful:builtin` is all of them.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.kernels.adapter import Adapter, content_of
from kvfuzz.model.axes import Domain
from kvfuzz.model.script import STATEFUL_OP
from kvfuzz.model.script_axes import CACHE_DTYPES, HEADS, MODEL_DTYPES, SCALED, TOKEN_LEVELS
from kvfuzz.model.steps import PAGE_OPS
from kvfuzz.model.target import Quantise, TargetInfo, TargetSpec
from kvfuzz.model.vocabulary import DIALECTS, Levels

PREFIX, ALL_OURS = "stateful:", "builtin"
OPS = ("reshape_and_cache", "gather_cache", *PAGE_OPS)
"""The ops of a script's steps."""


def _scripts_with(dtype: str) -> tuple[dict[str, Levels], ...]:
    """The scripts of which some layer holds `dtype`: the first ones, or the last."""
    first: dict[str, Levels] = {"stored_in": (dtype,)}
    if dtype not in DIALECTS:
        return (first,)
    return (first, {"stored_in": (DIALECTS[dtype],), "dialects": ("two",)})


MEANINGS: dict[str, dict[str, tuple[dict[str, Levels], ...]]] = {
    "layout": {
        "kv_first": ({"form": ("kv_first",)},),
        "hybrid": ({"form": ("kv_first",), "kinds": ("full+mamba", "full+sliding+mamba")},),
        "blocks_first": ({"form": ("blocks_first", "mixed", "head_slots")},),
        "content_packed": ({"form": ("content_packed",)},),
    },
    "order": {"nhd": ({"page_order": ("nhd",)},), "hnd": ({"page_order": ("hnd",)},)},
    "nesting": {
        "layer_first": (
            {"kv_layout": ("none", "LBHNC", "LBNHC"), "placement": ("separate", "one_buffer")},
        ),
        "block_first": ({"kv_layout": ("BLHNC", "BLNHC")}, {"placement": ("packed",)}),
        "head_first": ({"kv_layout": ("LHBNC",)},),
        "block_head_first": ({"kv_layout": ("BHLNC",)},),
    },
    "cache_dtype": {level: _scripts_with(level) for level in CACHE_DTYPES},
    **{
        axis: {level: ({name: (level,)},) for level in levels}
        for axis, name, levels in (
            ("model_dtype", "written_in", MODEL_DTYPES),
            ("scale", "scaled_by", SCALED),
            ("block_size", "tokens", TOKEN_LEVELS),
            ("num_kv_heads", "heads", HEADS),
        )
    },
}
"""By axis and level of a kernel's domain, the scripts that show it: any one of several."""

ALWAYS = {"page": "exact", "value_size": "same", "granularity": "tensor", "rows": "dense"}
"""The levels of a kernel's axes that every script shows."""

Resolve = Callable[[TargetSpec], Adapter]


@dataclass(frozen=True, slots=True)
class StatefulAdapter:
    """The targets of a script, by op."""

    info: TargetInfo
    parts: Mapping[str, Adapter]

    @property
    def quantise(self) -> Quantise:
        """How the writer turns x into a cache element."""
        return self.parts["reshape_and_cache"].info.quantise


def bundle(spec: TargetSpec, resolve: Resolve) -> StatefulAdapter:
    """The adapter of `spec`, whose parts `resolve` finds.

    Raises UsageError for two targets of one op, or one of an op that no script has.
    """
    names = spec.name.removeprefix(PREFIX).split("+")
    given: dict[str, Adapter] = {}
    for name in names:
        if name == ALL_OURS:
            continue
        part = resolve(msgspec.structs.replace(spec, name=name, op=""))
        if part.info.op not in OPS:
            raise UsageError(
                f"{spec.name}: {name} is a {part.info.op}, expected one of {', '.join(OPS)}"
            )
        if part.info.op in given:
            raise UsageError(f"{spec.name}: two targets are a {part.info.op}: name one")
        given[part.info.op] = part
    parts = {op: given.get(op) or resolve(TargetSpec(f"builtin:{op}", spec.sources)) for op in OPS}
    content = content_of("+".join(part.info.content for part in parts.values()).encode())
    info = TargetInfo(
        name=spec.name,
        op=STATEFUL_OP,
        domain=_domain(parts.values()),
        quantise=parts["reshape_and_cache"].info.quantise,
        partner="",
        content=content,
    )
    return StatefulAdapter(info, parts)


def _domain(parts: Iterable[Adapter]) -> Domain:
    """What all parts accept, in the words of scripts.

    A level that a part does not accept becomes a combination that no script shows, and so does
    each combination that a part forbids, if it can come up at all.
    """
    forbidden: list[dict[str, Levels]] = []
    sources = []
    for part in parts:
        domain = part.info.domain
        if domain.allowed.keys() - {"cache_dtype"} or domain.forbidden:
            sources.append(domain.source)
        for axis, meanings in MEANINGS.items():
            for level in set(meanings) - set(domain.levels(axis)):
                forbidden += meanings[level]
        for combination in domain.forbidden:
            if all(_comes_up(axis, levels) for axis, levels in combination.items()):
                forbidden += _translated(combination)
    unique = {tuple(sorted(each.items())): each for each in forbidden}
    said = "; ".join(dict.fromkeys(sources)) or "our own kernels, which take all of it"
    return Domain(forbidden=tuple(unique.values()), source=said)


def _comes_up(axis: str, levels: Levels) -> bool:
    """Whether a script can show one of these levels; of axes that nobody knows it is supposed."""
    return axis not in ALWAYS or ALWAYS[axis] in levels


def _translated(combination: Mapping[str, Levels]) -> list[dict[str, Levels]]:
    """A combination of a kernel's levels as combinations of a script's."""
    choices = [
        [meaning for level in levels for meaning in MEANINGS[axis].get(level, ())]
        for axis, levels in combination.items()
        if axis in MEANINGS
    ]
    found = []
    for meanings in itertools.product(*choices):
        joined: dict[str, Levels] = {}
        for meaning in meanings:
            for axis, levels in meaning.items():
                joined[axis] = tuple(each for each in joined.get(axis, levels) if each in levels)
        if all(joined.values()):
            found.append(joined)
    return found
