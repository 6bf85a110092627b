"""A cache in use: one target for each op of a script, `stateful:TARGET+TARGET`.

What no named target does, our own kernels do: `stateful:builtin` is all of them. A target of an op
on whole pages is tested in no other way, so that its own name means the same.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.kernels.adapter import Adapter
from kvfuzz.model.axes import Domain
from kvfuzz.model.script import STATEFUL_OP
from kvfuzz.model.script_axes import CACHE_DTYPES, HEADS, TOKEN_LEVELS
from kvfuzz.model.steps import PAGE_OPS
from kvfuzz.model.target import Quantise, TargetInfo, TargetSpec
from kvfuzz.model.vocabulary import Levels

PREFIX, ALL_OURS = "stateful:", "builtin"
OPS = ("reshape_and_cache", "gather_cache", *PAGE_OPS)
"""The ops of a script's steps."""

LAYOUT_OF_FORM: dict[str, Levels] = {
    "kv_first": ("kv_first", "hybrid"),
    "blocks_first": ("blocks_first",),
    "mixed": ("blocks_first",),
    "content_packed": ("content_packed",),
    "head_slots": ("blocks_first",),
}
"""By form of a plan's layers, the layouts of the same pages in the words of a kernel's domain."""

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
    content = "+".join(part.info.content for part in given.values()) or "builtin"
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
    """What all parts accept, in the words of scripts: their domains are in those of kernels."""
    domains = [part.info.domain for part in parts]

    def all_have(axis: str, levels: Levels) -> bool:
        return all(set(levels) & set(domain.levels(axis)) for domain in domains)

    orders: dict[str, Levels] = {"nhd": ("nhd",), "hnd": ("hnd",)}
    allowed: dict[str, Levels] = {
        "stored_in": tuple(each for each in CACHE_DTYPES if all_have("cache_dtype", (each,))),
        "tokens": tuple(each for each in TOKEN_LEVELS if all_have("block_size", (each,))),
        "heads": tuple(each for each in HEADS if all_have("num_kv_heads", (each,))),
        "form": tuple(form for form, each in LAYOUT_OF_FORM.items() if all_have("layout", each)),
        "page_order": tuple(order for order, each in orders.items() if all_have("order", each)),
    }
    sources = [domain.source for domain in domains if domain.allowed.keys() - {"cache_dtype"}]
    return Domain(allowed=allowed, source="; ".join(dict.fromkeys(sources)) or "our own kernels")
