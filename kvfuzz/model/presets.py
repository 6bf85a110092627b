"""The caches of real models: presets.toml as data, and the layers that vLLM would make of each.

A preset is what a checkpoint says, on one rank without tensor parallelism; how many tokens a block
has follows from it and from the formats that are asked for, by `kvfuzz.model.page_rules`.
"""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.axes import nearest
from kvfuzz.model.cache_plan import FORMS, CacheLayer, Kind, State
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.page_rules import common_page, hybrid_block_size, is_uniform

CATALOGUE = Path(__file__).with_name("presets.toml")

StateKind = Literal["", "gated_delta_net", "mamba1", "mamba2", "short_conv"]

CHECKPOINT_GRID: dict[str, int] = {"gated_delta_net": 64}
"""Tokens between the states that layers of a kind can keep, with the prefill of FlashInfer
(`vllm/v1/attention/backends/gdn_attn.py`, vLLM 0.32.0)."""

SPECULATIVE: tuple[StateKind, ...] = ("gated_delta_net", "mamba2")
"""The kinds whose conv state has a row more for each speculated token
(`vllm/model_executor/layers/mamba/mamba_utils.py`)."""

INDEXER_DTYPE = "e4m3fn"
"""The indexer's rows are opaque bytes: any format of one byte is as wide."""

_ROLES: dict[str, tuple[str, Kind, str]] = {
    "f": ("full", "full", "self_attn"),
    "s": ("sliding", "sliding", "self_attn"),
    "c": ("chunked", "chunked", "self_attn"),
    "x": ("cross", "cross", "cross_attn"),
    "l": ("mla", "mla", "self_attn"),
    "i": ("indexer", "mla", "indexer"),
    "m": ("mamba", "mamba", "mamba"),
}
"""By letter of a pattern: the key in `heads`, the layer's kind, the last part of its name."""

_RUN = re.compile(rf"(?:(\d+)\*)?((?:[{''.join(_ROLES)}-]|\([{''.join(_ROLES)}]+\))+)")
_ONE = re.compile(r"\((\w+)\)|(.)")


class Heads(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The heads of one layer's cache; those of V are as wide as those of K."""

    num_kv_heads: int
    head_size: int


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cache of one model; the head of presets.toml says what the fields mean."""

    model: str
    pattern: str
    num_attention_heads: int
    sources: tuple[str, ...]
    heads: dict[str, Heads]
    dtype: Literal["", "bf16", "fp16"] = ""
    block_size: int = 16
    window: int = 0
    chunk: int = 0
    shared: int = 0
    state: StateKind = ""
    conv: tuple[int, ...] = ()
    temporal: tuple[int, ...] = ()
    state_dtype: str = ""
    incomplete: str = ""

    @property
    def layers(self) -> tuple[str, ...]:
        """By layer of the model, the letters of the caches that it keeps.

        Raises UsageError for a pattern that is none.
        """
        layers: list[str] = []
        for run in self.pattern.split():
            match = _RUN.fullmatch(run)
            if match is None:
                raise UsageError(
                    f"{self.model}: pattern={run!r}, expected letters of {''.join(_ROLES)}- with "
                    f"an N* before them: see the head of {CATALOGUE.name}"
                )
            once = [several or one.strip("-") for several, one in _ONE.findall(match[2])]
            layers.extend(once * int(match[1] or 1))
        return tuple(layers)

    def states(self, state_dtype: str = "", num_spec: int = 0) -> tuple[State, ...]:
        """What a Mamba-like layer keeps: the conv state, and the temporal one where there is one.

        `state_dtype` is the format of the temporal one (mamba_ssm_cache_dtype), the checkpoint's
        where it is empty; the conv state has the model's, bf16 where that is unknown.
        """
        if not self.conv:
            return ()
        dtype = self.dtype or "bf16"
        rows = self.conv[0] + (num_spec if self.state in SPECULATIVE else 0)
        conv = State(dtype, (rows, *self.conv[1:]))
        if not self.temporal:
            return (conv,)
        return conv, State(state_dtype or self.state_dtype or dtype, self.temporal)


@cache
def presets() -> dict[str, Preset]:
    """Every preset by its key, in the catalogue's order."""
    return msgspec.convert(tomllib.loads(CATALOGUE.read_text()), dict[str, Preset])


def preset_named(key: str) -> Preset:
    """The preset with the key `key`. Raises UsageError, with a hint, where there is none."""
    known = presets()
    if key not in known:
        raise UsageError(f"no preset {key!r}; {nearest(key, known)}")
    return known[key]


def cache_layers(
    preset: Preset,
    *,
    cache_dtype: str = "bf16",
    state_dtype: str = "",
    form: str = "blocks_first",
    block_size: int = 0,
    align: bool = False,
    num_spec: int = 0,
) -> tuple[CacheLayer, ...]:
    """The layers of the model's cache in its order, as vLLM would make them for one rank.

    `cache_dtype` is the format of keys and values, `form` that of the pages of attention other
    than MLA. `block_size` are the tokens of a block before pages get one size, 0 for the preset's.
    `align` says that states are kept at the checkpoints that the layers declare (Gated DeltaNet
    with the prefill of FlashInfer), `num_spec` how many tokens are speculated; those two and
    `state_dtype` change nothing in a model without the states that they are about. Blocks are
    whole, none is split for a kernel. A layer that shares a cache reads that of the last layer of
    its kind with one of its own, which is what both rules of vLLM 0.32.0 give for the models here
    (`vllm/model_executor/models/gemma3n.py` and `gemma4.py`).

    Raises UsageError for a preset that is not complete, unknown formats, and blocks or pages that
    cannot be.
    """
    if preset.incomplete:
        raise UsageError(
            f"{preset.model} is incomplete: {preset.incomplete}; expected a preset whose layers "
            f"are known: choose another one"
        )
    for name, dtype in (("cache_dtype", cache_dtype), ("state_dtype", state_dtype or "bf16")):
        if dtype not in DTYPES:
            raise UsageError(f"{name}={dtype!r}; {nearest(dtype, DTYPES)}")
    if form not in FORMS[:4]:
        raise UsageError(f"form={form!r}; {nearest(form, FORMS[:4])}")
    if num_spec < 0 or block_size < 0:
        raise UsageError(
            f"num_spec={num_spec}, block_size={block_size}, expected at least 0: leave out what "
            f"is not meant"
        )
    states = preset.states(state_dtype, num_spec)
    layers: list[CacheLayer] = []
    owner: dict[str, str] = {}
    roles = preset.layers
    tokens = block_size or preset.block_size
    for index, letters in enumerate(roles):
        for letter in letters:
            role, kind, last = _ROLES[letter]
            name = f"layers.{index}.{last}"
            shares = owner[role] if index >= len(roles) - preset.shared else ""
            if not shares:
                owner[role] = name
            layer = CacheLayer(name, kind, form, tokens, tokens, shares=shares)
            layers.append(_filled(layer, role, preset, cache_dtype, states))
    return _with_one_page(layers, preset, align)


def _filled(
    layer: CacheLayer, role: str, preset: Preset, cache_dtype: str, states: tuple[State, ...]
) -> CacheLayer:
    """The layer with what it keeps of a block."""
    if layer.kind == "mamba":
        return msgspec.structs.replace(layer, form="states", states=states)
    heads = preset.heads[role]
    latent = layer.kind == "mla"
    return msgspec.structs.replace(
        layer,
        form="latent" if latent else layer.form,
        cache_dtype=INDEXER_DTYPE if role == "indexer" else cache_dtype,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        head_size_v=0 if latent else heads.head_size,
    )


def _with_one_page(layers: list[CacheLayer], preset: Preset, align: bool) -> tuple[CacheLayer, ...]:
    """The layers with the block size that their states ask for, and pages of one size."""
    mamba_page = max((each.page_bytes for each in layers if not each.is_attention), default=0)
    if mamba_page:
        attention = next(each for each in layers if each.is_attention)
        tokens, padded = hybrid_block_size(
            mamba_page,
            attention.page_bytes // attention.block_size,
            block_size=attention.block_size,
            checkpoint_grid=CHECKPOINT_GRID.get(preset.state, 0) if align else 0,
            mla=attention.kind == "mla",
        )
        layers = [
            msgspec.structs.replace(
                each,
                block_size=tokens,
                kernel_block_size=tokens,
                page_padded=0 if each.is_attention else padded,
            )
            for each in layers
        ]
    return tuple(layers) if is_uniform(layers) else common_page(layers)
