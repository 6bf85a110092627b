"""vLLM's attention over caches with a scale for each token and head: int8, fp8, int4, TurboQuant.

A slot of a head is a record of bytes. The tests make records from drawn codes and scales, place
them by the layout's formula, and attend over what the codes mean.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from attention_batches import DECODE, FP8, MIXED, Batch, Shape, allocate, segments
from attention_launch import KVQuantMode, Launcher
from attention_reference import Computed, Rounding, Softmax, assert_right, unit, unseen_errors

pytestmark = pytest.mark.thirdparty

OPS = "vllm/v1/attention/ops/"
SIZE, SEGMENTS = 32, 4
SOFTMAX = Softmax(SIZE**-0.5)
Records = tuple[torch.Tensor, torch.Tensor]
"""Bytes `[tokens, heads, bytes]` of one side, and the fp64 vectors that they stand for."""


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _drawn_scales(make: torch.Generator, count: int, heads: int) -> torch.Tensor:
    return 0.5 + torch.rand((count, heads, 1), generator=make)


def int8(make: torch.Generator, count: int, heads: int) -> Records:
    """`[D codes | fp32 scale]`."""
    scales = _drawn_scales(make, count, heads) / 64
    codes = torch.randint(-127, 128, (count, heads, SIZE), generator=make).to(torch.int8)
    return torch.cat((_bytes(codes), _bytes(scales)), -1), codes.double() * scales.double()


def fp8(make: torch.Generator, count: int, heads: int) -> Records:
    """`[D codes | fp32 scale]`, in the platform's e4m3."""
    scales = _drawn_scales(make, count, heads) / 64
    codes = (60 * torch.randn((count, heads, SIZE), generator=make)).clamp(-200, 200).to(FP8)
    return torch.cat((_bytes(codes), _bytes(scales)), -1), codes.double() * scales.double()


def int4(make: torch.Generator, count: int, heads: int) -> Records:
    """`[D/2 pairs of codes, low nibble first | fp32 scale, its last four bits a zero point]`."""
    codes = torch.randint(0, 16, (count, heads, SIZE), generator=make)
    zeros = torch.randint(5, 11, (count, heads, 1), generator=make)
    bits = (_drawn_scales(make, count, heads) / 4).view(torch.int32) & -16
    scales = (bits | zeros.int()).view(torch.float32)
    pairs = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    vectors = bits.view(torch.float32).double() * (codes - zeros)
    return torch.cat((pairs, _bytes(scales)), -1), vectors


def _bit_packed(codes: torch.Tensor, width: int) -> torch.Tensor:
    bits = (codes[..., None] >> torch.arange(width)) & 1
    bits = bits.flatten(-2).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8)).sum(-1).to(torch.uint8)


def uniform(width: int) -> Callable[..., Records]:
    """TurboQuant values: `[codes of width bits, low bits first | fp16 scale | fp16 zero]`."""

    def make_records(make: torch.Generator, count: int, heads: int) -> Records:
        codes = torch.randint(0, 1 << width, (count, heads, SIZE), generator=make)
        scales = (_drawn_scales(make, count, heads) * 2**-width * 4).half()
        zeros = (-2 * _drawn_scales(make, count, heads)).half()
        parts = (_bit_packed(codes, width), _bytes(scales), _bytes(zeros))
        return torch.cat(parts, -1), codes * scales.double() + zeros.double()

    return make_records


def ocp_keys(make: torch.Generator, count: int, heads: int) -> Records:
    """TurboQuant's fp8 keys: OCP codes and no scale."""
    codes = torch.randn((count, heads, SIZE), generator=make).to(torch.float8_e4m3fn)
    return _bytes(codes), codes.double()


ROTATION = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(1)))[0]


def centroids(width: int) -> torch.Tensor:
    """A codebook of the right size; the kernel takes any."""
    return torch.linspace(-0.4, 0.5, 1 << width)


def rotated(width: int) -> Callable[..., Records]:
    """TurboQuant keys: `[centroid indices | fp16 norm]`, in a rotated basis."""

    def make_records(make: torch.Generator, count: int, heads: int) -> Records:
        codes = torch.randint(0, 1 << width, (count, heads, SIZE), generator=make)
        norms = (4 * _drawn_scales(make, count, heads)).half()
        vectors = norms.double() * centroids(width)[codes].double() @ ROTATION.double()
        return torch.cat((_bit_packed(codes, width), _bytes(norms)), -1), vectors

    return make_records


@dataclass(frozen=True)
class Variant:
    """A batch and how its keys and values are stored."""

    sequences: tuple[tuple[int, int], ...]
    key: Callable[..., Records]
    value: Callable[..., Records]
    split: bool = False
    mode: KVQuantMode = KVQuantMode.NONE
    bits: tuple[int, int] = (0, 0)
    """Of a key, 8 for fp8, and of a value, for TurboQuant."""


INT8, PER_HEAD_FP8 = KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD
UNIFIED = {
    "mixed_int8": Variant(MIXED, int8, int8, mode=INT8),
    "mixed_fp8_per_token_head": Variant(MIXED, fp8, fp8, mode=PER_HEAD_FP8),
    "decode_split_int8": Variant(DECODE, int8, int8, split=True, mode=INT8),
    "decode_split_fp8_per_token_head": Variant(DECODE, fp8, fp8, split=True, mode=PER_HEAD_FP8),
}
INT4 = {
    "mixed": Variant(MIXED, int4, int4),
    "decode_split": Variant(DECODE, int4, int4, split=True),
}
TURBO = {
    "fp8_keys_4_bit_values": Variant(DECODE, ocp_keys, uniform(4), bits=(8, 4)),
    "4_bit_keys_4_bit_values": Variant(DECODE, rotated(4), uniform(4), bits=(4, 4)),
    "3_bit_keys_4_bit_values": Variant(DECODE, rotated(3), uniform(4), bits=(3, 4)),
    "3_bit_keys_3_bit_values": Variant(DECODE, rotated(3), uniform(3), bits=(3, 3)),
}
KERNELS = {
    "unified_attention": (UNIFIED, ("0.24.0", "0.33.0")),
    "unified_attention_int4": (INT4, ("0.33.0",)),
    "turboquant_decode": (TURBO, ("0.24.0", "0.33.0")),
}
CASES = [
    pytest.param(kernel, variant, release, id=f"{kernel}-{variant}-{release}")
    for kernel, (variants, releases) in KERNELS.items()
    for variant in variants
    for release in releases
]


@pytest.fixture
def outcome(launcher, tree):
    launches = {"unified_attention": _unified, "turboquant_decode": _turbo}

    def make(kernel: str, variant: str, release: str):
        launch, described = launches.get(kernel, _int4), KERNELS[kernel][0][variant]
        source = tree(release)
        source.load(OPS + "triton_attention_helpers.py")
        return launcher.once(
            (kernel, variant, release), lambda on: launch(on, source, described, release)
        )

    return make


def _stored(on: Launcher, variant: Variant, order: str) -> tuple[Batch, torch.Tensor, int]:
    """A batch and its records `[blocks, slots, heads, bytes]`, and how many bytes are the key's.

    `order` is that of (slot, head, key or value): `nhc`, `hnc`, or `cnh`. Poison is 0xFF.
    """
    batch = allocate(on, Shape(variant.sequences))
    make = torch.Generator().manual_seed(2)
    num_blocks, slots, heads = batch.key_cache.shape[:3]
    known, records = [], []
    for context, query in variant.sequences:
        sides = [side(make, context + query, heads) for side in (variant.key, variant.value)]
        known.append((sides[0][1], sides[1][1]))
        records.append(torch.cat((sides[0][0], sides[1][0]), -1))
    key_bytes, width = sides[0][0].shape[-1], records[0].shape[-1]
    cache = torch.full((num_blocks * slots * heads * width,), 0xFF, dtype=torch.uint8)
    for mine, stored in zip(batch.blocks, records, strict=True):
        position = torch.arange(len(stored))[:, None, None]
        block, slot = torch.tensor(mine)[position // slots], position % slots
        head, byte = torch.arange(heads)[:, None], torch.arange(width)
        where = {
            "nhc": ((block * slots + slot) * heads + head) * width + byte,
            "hnc": ((block * heads + head) * slots + slot) * width + byte,
            "cnh": (((block * 2 + byte // key_bytes) * slots + slot) * heads + head) * key_bytes
            + byte % key_bytes,
        }[order]
        cache[where] = stored
    given = on.given("records", cache)
    if order == "nhc":
        view = given.view(num_blocks, slots, heads, width)
    elif order == "hnc":
        view = given.view(num_blocks, heads, slots, width).transpose(1, 2)
    else:
        view = given.view(num_blocks, 2, slots, heads, key_bytes)
    return replace(batch, known=known), view, key_bytes


def _computed(batch: Batch, out: torch.Tensor, p: float) -> Computed:
    return Computed(batch, out, SOFTMAX, Rounding(p=p, out=unit(out.dtype)))


def _call(on: Launcher, batch: Batch, variant: Variant) -> dict[str, object]:
    return {
        "q": batch.query,
        "out": on.room("out", tuple(batch.query.shape), batch.query.dtype),
        "cu_seqlens_q": batch.query_start_loc,
        "max_seqlen_q": batch.max_query_len,
        "seqused_k": batch.seq_lens,
        "softmax_scale": SOFTMAX.scale,
        "window_size": (-1, -1),
        "block_table": batch.block_table,
        "softcap": 0.0,
        **(segments(on, batch, SEGMENTS, SIZE) if variant.split else {}),
    }


def _scale_views(half: torch.Tensor) -> torch.Tensor:
    return half[..., -4:].view(torch.float32)[..., 0]


def _unified(on: Launcher, source, variant: Variant, release: str) -> Computed:
    function = source.load(OPS + "triton_unified_attention.py").unified_attention
    batch, view, key_bytes = _stored(on, variant, "hnc" if release == "0.33.0" else "cnh")
    halves = view.unbind(1) if release == "0.24.0" else view.split(key_bytes, -1)
    dtype = torch.int8 if variant.mode == INT8 else FP8
    call = _call(on, batch, variant)
    key, value = (half[..., :SIZE].view(dtype) for half in halves)
    function(
        **call,
        k=key,
        v=value,
        max_seqlen_k=batch.max_seq_len,
        causal=True,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        kv_quant_mode=variant.mode,
        k_scale_cache=_scale_views(halves[0]),
        v_scale_cache=_scale_views(halves[1]),
    )
    return _computed(batch, call["out"], unit(batch.query.dtype))


def _int4(on: Launcher, source, variant: Variant, release: str) -> Computed:
    source.load(OPS + "triton_unified_attention.py")
    # unified_attention_int4 is this between two Hadamard transforms in torch.
    launch = source.load(OPS + "int4_per_token_head.py")._launch_packed_attn
    batch, view, key_bytes = _stored(on, variant, "hnc")
    halves = view.split(key_bytes, -1)
    call = _call(on, batch, variant)
    absent = ("seq_threshold_3D", "num_par_softmax_segments", "softmax_segm_output")
    absent += ("softmax_segm_max", "softmax_segm_expsum", "sinks", "alibi_slopes", "qq_bias")
    absent += ("output_scale", "mm_prefix_range")
    launch(
        **(dict.fromkeys(absent) | call),
        k_cache=halves[0][..., : SIZE // 2],
        v_cache=halves[1][..., : SIZE // 2],
        use_alibi_sqrt=False,
        k_scale_cache=_scale_views(halves[0]),
        v_scale_cache=_scale_views(halves[1]),
        packing_factor=2,
    )
    return _computed(batch, call["out"], 0.0)


def _turbo(on: Launcher, source, variant: Variant, release: str) -> Computed:
    source.load(OPS + "triton_decode_attention.py")
    module = source.load(OPS + "triton_turboquant_decode.py")
    # It would ask torch.cuda whether the device is older than fp8.
    module._FP8_E4B15[0] = 0
    batch, view, key_bytes = _stored(on, variant, "nhc")
    key_bits, value_bits = variant.bits
    fp8_keys = key_bits == 8
    out = module.triton_turboquant_decode_attention(
        batch.query,
        view,
        batch.block_table,
        batch.seq_lens,
        ROTATION,
        on.given("centroids", centroids(4 if fp8_keys else key_bits)),
        SOFTMAX.scale,
        mse_bits=4 if fp8_keys else key_bits,
        key_packed_size=key_bytes,
        value_quant_bits=value_bits,
        key_fp8=fp8_keys,
        max_num_kv_splits=SEGMENTS,
    )
    return _computed(batch, out, 0.0)


@pytest.mark.parametrize(("kernel", "variant", "release"), CASES)
def test_it_computes_attention_over_the_cache(outcome, kernel, variant, release):
    assert_right(outcome(kernel, variant, release))


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(("kernel", "variant", "release"), CASES)
def test_a_token_read_from_another_slot_would_show(outcome, kernel, variant, release, side):
    assert unseen_errors(outcome(kernel, variant, release).result, side) == []
