"""Sparse MLA in vLLM: attention of each query token over a list of slots of its own."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from attention_launch import Launcher
from attention_reference import Computed, Rounding, Softmax, assert_right, unit, unseen_errors

pytestmark = pytest.mark.thirdparty

XPU = "vllm/v1/attention/ops/xpu_mla_sparse.py"
ROCM = "vllm/v1/attention/ops/rocm_aiter_mla_sparse.py"
COUNTS = (27, 5, 32)
"""How many slots each query token has; tables have room for twice as many."""
WIDTH, HEADS, BLOCK = 64, 20, 16
NOPE, ROPE = 448, 64
ROW, SCALES = NOPE + 2 * ROPE, 8
"""Bytes of a token in an fp8_ds_mla block, and of its scales, which follow all the rows."""


class OnDevice(torch.Tensor):
    """A CPU tensor for functions that refuse one; the lane is their device."""

    is_cpu = property(lambda self: False)


@dataclass
class Selection:
    """Query tokens `[tokens, heads, size]` with `latents` `[slots, size]` in each one's slots."""

    query: torch.Tensor
    slots: list[torch.Tensor]
    latents: list[torch.Tensor]
    value_size: int

    @property
    def blocks(self) -> list[torch.Tensor]:
        return self.slots

    @property
    def shape(self) -> SimpleNamespace:
        return SimpleNamespace(sequences=[(len(mine) - 1, 1) for mine in self.slots])

    def rows(self, sequence: int) -> slice:
        return slice(sequence, sequence + 1)

    def tokens(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        latent = self.latents[sequence].double()[:, None]
        return latent, latent[..., : self.value_size]


def _chosen(make: torch.Generator, num_slots: int, counts=COUNTS) -> list[torch.Tensor]:
    return [torch.randperm(num_slots, generator=make)[:count] for count in counts]


def _query(on: Launcher, make: torch.Generator, size: int) -> torch.Tensor:
    query = torch.randn((len(COUNTS), HEADS, size), generator=make) / size**0.25
    return on.given("query", query.bfloat16()).as_subclass(OnDevice)


def _computed(query, slots, latents, value_size, out, softmax, lse=None) -> Computed:
    batch = Selection(query.as_subclass(torch.Tensor), slots, latents, value_size)
    # fp8 times a power of two is exact in bf16.
    bf16 = unit(torch.bfloat16)
    out = out.as_subclass(torch.Tensor)
    return Computed(batch, out, softmax, Rounding(p=bf16, out=bf16), lse)


def _rows(on: Launcher, make: torch.Generator, size: int, chosen) -> torch.Tensor:
    """A bf16 cache `[slots, size]`, NaN but for the chosen."""
    cache = torch.full((96, size), torch.nan)
    used = torch.cat(chosen).unique()
    cache[used] = torch.randn((len(used), size), generator=make) / size**0.25
    return on.given("cache", cache.bfloat16()).as_subclass(OnDevice)


def _xpu(on: Launcher, module, variant: str) -> Computed:
    make = torch.Generator().manual_seed(0)
    size, softmax = 576, Softmax(1.0, causal=False)
    chosen = _chosen(make, 96)
    cache, query = _rows(on, make, size, chosen), _query(on, make, size)
    table = torch.full((len(COUNTS), 1, WIDTH), -1, dtype=torch.int32)
    for row, mine in zip(table[:, 0], chosen, strict=True):
        row[slice(-len(mine), None) if variant == "padded_before" else slice(len(mine))] = mine
    out, _, lse = module.triton_bf16_mla_sparse_interface(
        query, cache[:, None], on.given("indices", table), softmax.scale
    )
    latents = [cache[mine].as_subclass(torch.Tensor) for mine in chosen]
    return _computed(query, chosen, latents, 512, out, softmax, lse.as_subclass(torch.Tensor))


def _softmax(on: Launcher, variant: str) -> tuple[Softmax, torch.Tensor | None]:
    if "sink" not in variant:
        return Softmax(1.0, causal=False), None
    sinks = torch.linspace(-2, 2, HEADS)
    given = on.given("sinks", sinks).as_subclass(OnDevice)
    return Softmax(1.0, causal=False, sinks=sinks), given


def _prefill(on: Launcher, module, variant: str) -> Computed:
    make = torch.Generator().manual_seed(0)
    chosen, (softmax, sinks) = _chosen(make, 96), _softmax(on, variant)
    cache, query = _rows(on, make, NOPE + ROPE, chosen), _query(on, make, NOPE + ROPE)
    table = torch.full((len(COUNTS), WIDTH), -1, dtype=torch.int32)
    # Slots that a row reserves and does not fill hold -1.
    step = 1 + ("holes" in variant)
    for row, mine in zip(table, chosen, strict=True):
        row[: step * len(mine) : step] = mine
    lengths = torch.tensor([step * len(mine) for mine in chosen], dtype=torch.int32)
    indices, indptr = module.build_ragged_indices_from_dense(
        on.given("indices", table), on.given("lengths", lengths), num_rows=len(cache)
    )
    out = module._rocm_sparse_attn_prefill_ragged_triton(
        query,
        cache,
        indices.as_subclass(OnDevice),
        indptr.as_subclass(OnDevice),
        softmax.scale,
        sinks,
        NOPE,
        ROPE,
    )
    latents = [cache[mine].as_subclass(torch.Tensor) for mine in chosen]
    return _computed(query, chosen, latents, NOPE + ROPE, out, softmax)


def _ragged(on: Launcher, name: str, chosen) -> tuple[torch.Tensor, torch.Tensor]:
    ends = torch.tensor([0, *map(len, chosen)], dtype=torch.int32).cumsum(0).int()
    indices = on.given(f"{name}_indices", torch.cat(chosen).int())
    return indices.as_subclass(OnDevice), on.given(f"{name}_indptr", ends).as_subclass(OnDevice)


def _decode_bf16(on: Launcher, module, variant: str) -> Computed:
    make = torch.Generator().manual_seed(0)
    chosen, (softmax, sinks) = _chosen(make, 96), _softmax(on, variant)
    cache, query = _rows(on, make, NOPE + ROPE, chosen), _query(on, make, NOPE + ROPE)
    indices, indptr = _ragged(on, "main", chosen)
    out = module._rocm_sparse_attn_decode_ragged_bf16_triton(
        query, cache, indices, indptr, softmax.scale, sinks, NOPE, ROPE, num_splits=3
    )
    latents = [cache[mine].as_subclass(torch.Tensor) for mine in chosen]
    return _computed(query, chosen, latents, NOPE + ROPE, out, softmax)


def _ds_mla(on, make, name, chosen, dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """An fp8_ds_mla cache `[blocks, BLOCK, 584]`, 0xFF but for the chosen, and their latents."""
    cache = torch.full((6, BLOCK * (ROW + SCALES)), 0xFF, dtype=torch.uint8)
    stored: dict[int, torch.Tensor] = {}
    for slot in torch.cat(chosen).unique().tolist():
        block, at = divmod(slot, BLOCK)
        exponents = torch.randint(125, 128, (NOPE // 64,), generator=make)
        scales = 2.0 ** (exponents - 127).repeat_interleave(64)
        nope = (torch.randn(NOPE, generator=make) / 512**0.25 / scales).to(dtype)
        rope = (torch.randn(ROPE, generator=make) / 512**0.25).bfloat16()
        row = torch.cat((nope.view(torch.uint8), rope.view(torch.uint8)))
        cache[block, at * ROW : (at + 1) * ROW] = row
        first = BLOCK * ROW + at * SCALES
        cache[block, first : first + len(exponents)] = exponents.to(torch.uint8)
        stored[slot] = torch.cat((nope.double() * scales, rope.double()))
    given = on.given(name, cache).view(6, BLOCK, ROW + SCALES).as_subclass(OnDevice)
    return given, [torch.stack([stored[slot] for slot in mine.tolist()]) for mine in chosen]


def _decode(on: Launcher, module, variant: str) -> Computed:
    make = torch.Generator().manual_seed(0)
    chosen, (softmax, sinks) = _chosen(make, 96), _softmax(on, variant)
    # On gfx942 the C++ writer of the main cache makes FNUZ, the Triton one of the other OCP.
    cache, latents = _ds_mla(on, make, "main", chosen, torch.float8_e4m3fnuz)
    options = {}
    if "extra" in variant:
        more = _chosen(make, 96, (9, 30, 16))
        extra, others = _ds_mla(on, make, "extra", more, torch.float8_e4m3fn)
        latents = [torch.cat(both) for both in zip(latents, others, strict=True)]
        chosen = [torch.cat(both) for both in zip(chosen, more, strict=True)]
        indices, indptr = _ragged(on, "extra", more)
        options = {"extra_cache": extra, "extra_indices": indices, "extra_indptr": indptr}
        chosen_main = [mine[: len(mine) - len(m)] for mine, m in zip(chosen, more, strict=True)]
    else:
        chosen_main = chosen
    indices, indptr = _ragged(on, "main", chosen_main)
    query = _query(on, make, NOPE + ROPE)
    out = module._rocm_sparse_attn_decode_ragged_triton(
        query, cache, indices, indptr, softmax.scale, sinks, NOPE, ROPE, **options
    )
    return _computed(query, chosen, latents, NOPE + ROPE, out, softmax)


LAUNCHES = {
    "bf16_mla_sparse": (XPU, _xpu),
    "sparse_attn_prefill": (ROCM, _prefill),
    "sparse_attn_decode_bf16": (ROCM, _decode_bf16),
    "sparse_attn_decode": (ROCM, _decode),
}
BOTH = ("0.24.0", "0.33.0")
TABLE = {
    ("bf16_mla_sparse", "padded_after"): ("0.18.0", "0.19.0", *BOTH),
    ("bf16_mla_sparse", "padded_before"): ("0.18.0", "0.19.0", *BOTH),
    ("sparse_attn_prefill", "topk"): BOTH,
    ("sparse_attn_prefill", "topk_sink"): BOTH,
    ("sparse_attn_prefill", "topk_holes"): BOTH,
    ("sparse_attn_decode_bf16", "split"): BOTH[1:],
    ("sparse_attn_decode_bf16", "split_sink"): BOTH[1:],
    ("sparse_attn_decode", "main"): BOTH,
    ("sparse_attn_decode", "main_sink"): BOTH,
    ("sparse_attn_decode", "main_and_extra"): BOTH,
}
PADDED = "upstream: a tile of -1 alone leaves the maximum -inf, and exp2(-inf - -inf) is NaN"
CASES = [
    pytest.param(
        kernel,
        variant,
        release,
        id=f"{kernel}-{variant}-{release}",
        marks=pytest.mark.xfail(reason=PADDED)
        if variant == "padded_before" and release != "0.33.0"
        else (),
    )
    for (kernel, variant), releases in TABLE.items()
    for release in releases
]
RIGHT = [case for case in CASES if not case.marks]


@pytest.fixture
def outcome(launcher, tree):
    def make(kernel: str, variant: str, release: str):
        file, launch = LAUNCHES[kernel]
        module = tree(release).load(file)
        return launcher.once((kernel, variant, release), lambda on: launch(on, module, variant))

    return make


@pytest.mark.parametrize(("kernel", "variant", "release"), CASES)
def test_it_computes_attention_over_the_selected_slots(outcome, kernel, variant, release):
    assert_right(outcome(kernel, variant, release))


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(("kernel", "variant", "release"), RIGHT)
def test_a_token_read_from_another_slot_would_show(outcome, kernel, variant, release, side):
    assert unseen_errors(outcome(kernel, variant, release).result, side) == []
