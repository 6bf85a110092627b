"""The argument contract of each op, and how a function that fulfils it is bound.

A function is bound by the names of its parameters. Each op has canonical names (those of
`kvfuzz.model.lower`), the aliases under which engines spell them, and values that are derived
from the others. Parameters with a default that no contract knows keep their default.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvfuzz.errors import UsageError
from kvfuzz.kernels.adapter import Call
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.vocabulary import Levels

Tensors = Mapping[str, torch.Tensor]
Scalars = Mapping[str, int | str]
Derivation = Callable[[Tensors, Scalars], Any]


def _is_quantised(tensors: Tensors, scalars: Scalars) -> bool:
    return DTYPES[str(scalars["cache_dtype"])].is_quantised


def _kv_cache_dtype(tensors: Tensors, scalars: Scalars) -> str:
    """vLLM's spelling; fn or fnuz is not part of it, the platform decides that."""
    if not _is_quantised(tensors, scalars):
        return "auto"
    return "fp8_e5m2" if "e5m2" in str(scalars["cache_dtype"]) else "fp8_e4m3"


def _size(tensor: str, axis: int) -> Derivation:
    return lambda tensors, scalars: tensors[tensor].shape[axis]


@dataclass(frozen=True, slots=True)
class Contract:
    """The parameters of one op: `required` must be taken, `optional` may be."""

    op: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    aliases: Mapping[str, str]
    """From another spelling to the canonical or derived name."""
    derived: Mapping[str, Derivation] = field(default_factory=dict)

    @property
    def known(self) -> tuple[str, ...]:
        """Every parameter name that can be bound."""
        return (*self.required, *self.optional, *self.derived, *self.aliases)

    def value(self, name: str, tensors: Tensors, scalars: Scalars) -> Any:
        """The argument of a step that has the canonical or derived `name`."""
        if name in self.derived:
            return self.derived[name](tensors, scalars)
        return tensors[name] if name in tensors else scalars[name]

    def canonical(self, name: str) -> str | None:
        """The canonical or derived name that a parameter called `name` stands for."""
        name = self.aliases.get(name, name)
        return name if name in self.known else None


_SCALES = {"k_scales": "k_scale", "v_scales": "v_scale"}
_CACHES = {"k_cache": "key_cache", "v_cache": "value_cache"}


def _block_size(tensors: Tensors, scalars: Scalars) -> int:
    """Tokens of a block: an x-packed K has five axes, `[..., block_size, x]`."""
    key_cache = tensors["key_cache"]
    return key_cache.shape[1 if key_cache.dim() == 4 else 3]


_DERIVED: dict[str, Derivation] = {
    "kv_cache_dtype": _kv_cache_dtype,
    "block_size": _block_size,
    "num_kv_heads": _size("key", 1),
    "head_size": _size("key", 2),
    "head_size_v": _size("value", 2),
}
_SIZES = {"page_size": "block_size", "num_heads": "num_kv_heads", "head_dim": "head_size"}

_GATHERED = {
    "block_tables": "block_table",
    "cu_seqlens": "cu_seqlens_kv",
    "cu_seqlen": "cu_seqlens_kv",
    "cu_seq_lens": "cu_seqlens_kv",
    "token_to_seq": "token_to_batch",
}

CONVENTIONAL: dict[str, Levels] = {
    "order": ("nhd", "hnd", "shuffle"),
    "value_size": ("same",),
    "granularity": ("tensor",),
    "values": ("bytes", "spread", "ties"),
}
"""What a function takes that says nothing of it: K and V of one size, with one scale each, and no
quotient beyond the range of the cache."""

CONTRACTS: dict[str, Contract] = {
    contract.op: contract
    for contract in (
        Contract(
            op="reshape_and_cache",
            required=("key", "value", "key_cache", "value_cache", "slot_mapping"),
            optional=("k_scale", "v_scale", "kv_cache_layout", "cache_dtype"),
            aliases={**_SCALES, **_CACHES, **_SIZES, "slots": "slot_mapping"},
            derived={**_DERIVED, "quant": _is_quantised, "num_tokens": _size("slot_mapping", 0)},
        ),
        Contract(
            op="gather_cache",
            required=("key_cache", "value_cache", "key", "value", "block_table", "cu_seqlens_kv"),
            optional=(
                "seq_starts",
                "token_to_batch",
                "k_scale",
                "v_scale",
                "kv_cache_layout",
                "cache_dtype",
            ),
            aliases={
                **_SCALES,
                **_CACHES,
                **_SIZES,
                "block_tables": "block_table",
                "cu_seqlens": "cu_seqlens_kv",
                "cu_seq_lens": "cu_seqlens_kv",
                "token_to_seq": "token_to_batch",
                "key_out": "key",
                "value_out": "value",
                "num_tokens": "total_tokens",
            },
            derived={
                **_DERIVED,
                "dequant": _is_quantised,
                "total_tokens": _size("token_to_batch", 0),
            },
        ),
        Contract(
            op="per_token_head_quant",
            required=(
                "key",
                "value",
                "key_cache",
                "value_cache",
                # Spelt as what is written, so that no writer that reads scales is taken for one.
                "k_scale_cache",
                "v_scale_cache",
                "slot_mapping",
            ),
            optional=("kv_cache_layout", "cache_dtype"),
            aliases={**_CACHES, **_SIZES, "slots": "slot_mapping"},
            derived={
                **_DERIVED,
                "k_scale_cache": lambda tensors, scalars: tensors["k_scale"],
                "v_scale_cache": lambda tensors, scalars: tensors["v_scale"],
                "num_tokens": _size("slot_mapping", 0),
            },
        ),
        Contract(
            op="slot_mapping",
            required=("query_start_loc", "positions", "block_table", "slot_mapping", "block_size"),
            optional=(
                "idx_mapping",
                "manager_block_size",
                "num_tokens",
                "cp_rank",
                "cp_size",
                "cp_interleave",
            ),
            aliases={
                "pos": "positions",
                "kernel_block_size": "block_size",
                "block_tables": "block_table",
                "slot_mappings": "slot_mapping",
                "cp_kv_cache_interleave_size": "cp_interleave",
                "interleave": "cp_interleave",
            },
            derived={
                "num_reqs": _size("idx_mapping", 0),
                "max_num_tokens": _size("slot_mapping", 0),
            },
        ),
        Contract(
            op="copy_blocks",
            required=("key_cache", "value_cache", "block_mapping"),
            optional=(),
            aliases=_CACHES,
        ),
        Contract(
            op="swap_blocks",
            required=("key_cache", "value_cache", "key_target", "value_target", "block_mapping"),
            optional=(),
            aliases={**_CACHES, "k_target": "key_target", "v_target": "value_target"},
        ),
        Contract(
            op="zero_blocks",
            required=("key_cache", "value_cache", "block_ids"),
            optional=(),
            aliases=_CACHES,
        ),
        Contract(
            op="copy_states",
            required=("state_0", "block_mapping"),
            optional=("state_1", "state_2"),
            aliases={},
        ),
        Contract(
            op="concat_and_cache_mla",
            required=("kv_c", "k_pe", "kv_cache", "slot_mapping"),
            optional=("scale", "kv_cache_dtype", "cache_dtype"),
            aliases={"kv_c_normed": "kv_c", "slots": "slot_mapping"},
        ),
        Contract(
            op="gather_mla",
            required=("kv_cache", "out", "block_table", "cu_seqlens_kv"),
            optional=("seq_starts", "token_to_batch", "scale", "kv_cache_dtype", "cache_dtype"),
            aliases={**_GATHERED, "src_cache": "kv_cache", "dst": "out"},
            derived={"num_tokens": _size("token_to_batch", 0)},
        ),
        Contract(
            op="indexer_quant_and_cache",
            required=("k", "kv_cache", "slot_mapping"),
            optional=("quant_block_size", "scale_fmt", "block_tile_size", "cache_dtype"),
            aliases={"k_cache": "kv_cache"},
            derived={"head_size": _size("k", 1)},
        ),
        Contract(
            op="quantize_and_insert_k_cache",
            required=("k", "kv_cache", "slot_mapping", "block_size"),
            optional=("scale_fmt", "cache_dtype"),
            aliases={"k_cache": "kv_cache"},
            derived={
                "is_ue8m0": lambda tensors, scalars: scalars["scale_fmt"] == "ue8m0",
                "use_fnuz": lambda tensors, scalars: scalars["cache_dtype"] == "e4m3fnuz",
            },
        ),
        Contract(
            op="gather_indexer",
            required=("kv_cache", "k", "k_scale", "block_table", "cu_seqlens_kv"),
            optional=("token_to_batch", "block_tile_size", "cache_dtype"),
            aliases={
                **_GATHERED,
                "k_cache": "kv_cache",
                "k_fp8": "k",
                "k_fp8_scale": "k_scale",
            },
            derived={"num_tokens": _size("token_to_batch", 0)},
        ),
    )
}


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in inspect.signature(function).parameters.values() if p.kind not in variadic]


def objections(function: Callable[..., object], op: str) -> tuple[str, ...]:
    """Why `function` cannot be bound as `op`, one sentence each; empty where it can."""
    contract = CONTRACTS[op]
    parameters = _parameters(function)
    taken = {contract.canonical(parameter.name) for parameter in parameters}
    return (
        *(
            f"required parameter {parameter.name!r} is not known"
            for parameter in parameters
            if parameter.default is parameter.empty and not contract.canonical(parameter.name)
        ),
        *(
            f"takes no {name}"
            for name in contract.required
            if name not in taken and not _takes_keywords(function)
        ),
    )


def bind(function: Callable[..., object], op: str) -> Call:
    """The call that hands `function` a step's arguments under its own parameter names.

    Raises UsageError where a required parameter is unknown to the op or one of the op's own is
    not taken.
    """
    contract = CONTRACTS[op]
    if found := objections(function, op):
        raise UsageError(
            f"{getattr(function, '__name__', function)} as {op}: {'; '.join(found)}; "
            f"known parameters are {', '.join(contract.known)}"
        )
    plan = [
        (parameter, name)
        for parameter in _parameters(function)
        if (name := contract.canonical(parameter.name))
    ]
    forwarded = _forwarded(function, contract, {name for _, name in plan})

    def call(tensors: Tensors, scalars: Scalars) -> None:
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for parameter, name in plan:
            if name in contract.optional and name not in tensors and name not in scalars:
                continue  # the parameter has a default
            value = contract.value(name, tensors, scalars)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[parameter.name] = value
        for name in forwarded:
            named[name] = contract.value(name, tensors, scalars)
        function(*positional, **named)

    return call


def _forwarded(
    function: Callable[..., object], contract: Contract, bound: set[str]
) -> tuple[str, ...]:
    """What a function that takes `**kwargs` is handed through them, under the op's own names."""
    if not _takes_keywords(function):
        return ()
    return tuple(name for name in (*contract.required, *contract.optional) if name not in bound)


def _takes_keywords(function: Callable[..., object]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
