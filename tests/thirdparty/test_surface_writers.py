"""Kernels that store keys and values into a paged cache: every byte against the formulas."""

import ml_dtypes
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.thirdparty

AITER_FA = "vllm/v1/attention/backends/rocm_aiter_fa.py"
FLASH = (
    "vllm/v1/attention/ops/triton_reshape_and_cache_flash.py",
    "vllm/attention/ops/triton_reshape_and_cache_flash.py",
)
B, N, H = 5, 16, 2
SLOTS = (3 * N + 15, -1, 1 * N + 0, 4 * N + 7, 1 * N + 1, -1, 0 * N + 15)
PLACES = [(t, slot // N, slot % N) for t, slot in enumerate(SLOTS) if slot >= 0]
ROWS = len(SLOTS) + 2
"""Two rows more than slots, as when a batch is padded for a graph."""
SCALES = (0.37, 1.75)

FP8 = {
    "e4m3fnuz": ("gfx942", torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3fnuz),
    "e4m3fn": ("gfx950", torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
}


def inputs(surface, head_sizes, *, dtype=torch.bfloat16, bits=False, scales=SCALES):
    """Keys and values with a gap between rows, slots and scales; and the rows as numpy."""
    tensors, rows = {}, []
    for name, head_size in zip(("key", "value"), head_sizes, strict=True):
        tensors[name], kept = surface.rows(name, (ROWS, H, head_size), dtype, gap=24, bits=bits)
        rows.append(kept)
    tensors["slot_mapping"] = surface.tensor("slot_mapping", torch.tensor(SLOTS))
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        tensors[name] = surface.tensor(name, torch.tensor([scale]))
    return tensors, rows


def fp8(row, scale, dtype):
    """What `row / scale` is in fp8, rounded to nearest even."""
    return (row.astype(np.float32) / np.float32(scale)).astype(dtype)


@pytest.mark.parametrize("release", ["0.13.0", "0.18.0", "0.19.0", "0.24.0", "0.33.0"])
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32],
    ids=lambda dtype: f"reshape_and_cache_flash-{str(dtype)[6:]}",
)
def test_flash_writer(surface, release, dtype):
    module = surface.load(release, *FLASH)
    # Until #37940 heads lie side by side in a token.
    layouts = ["kv_first", "hybrid", "padded_page"]
    if release >= "0.24":
        layouts += ["blocks_first_hnd", "content_packed_hnd", "content_packed_nhd"]
    for layout in layouts:
        for head_size in (32, 40):
            tensors, rows = inputs(surface, (head_size, head_size), dtype=dtype, bits=True)
            cache = surface.cache("cache", layout, dtype, (B, N, H, head_size))
            module.triton_reshape_and_cache_flash(
                key_cache=cache.key, value_cache=cache.value, kv_cache_dtype="auto", **tensors
            )
            for t, b, s in PLACES:
                for h in range(H):
                    cache.buffer.expect(cache.k(b, s, h), rows[0][t, h])
                    cache.buffer.expect(cache.v(b, s, h), rows[1][t, h])
            surface.check()
            surface.release()


@pytest.mark.parametrize("release", ["0.13.0", "0.18.0", "0.19.0", "0.24.0", "0.33.0"])
@pytest.mark.parametrize("dialect", FP8, ids=lambda name: f"reshape_and_cache_flash-{name}")
def test_flash_writer_quantises(surface, release, dialect):
    arch, dtype, number = FP8[dialect]
    module = surface.load(release, *FLASH, arch=arch)
    tensors, rows = inputs(surface, (40, 40))
    layout = "hybrid" if release < "0.24" else "blocks_first_hnd"
    cache = surface.cache("cache", layout, dtype, (B, N, H, 40))
    # The cache's own dtype is uint8: the function views it.
    views = {"key_cache": cache.key, "value_cache": cache.value}
    module.triton_reshape_and_cache_flash(
        **{name: view.view(torch.uint8) for name, view in views.items()},
        kv_cache_dtype="fp8",
        **tensors,
    )
    for t, b, s in PLACES:
        for h in range(H):
            cache.buffer.expect(cache.k(b, s, h), fp8(rows[0][t, h], SCALES[0], number))
            cache.buffer.expect(cache.v(b, s, h), fp8(rows[1][t, h], SCALES[1], number))
    surface.check()


@pytest.mark.parametrize(
    ("form", "release"),
    [
        *((f, r) for f in ("bfloat16", "e4m3fnuz") for r in ("0.18.0", "0.19.0", "0.24.0")),
        *((form, "0.33.0") for form in ("bfloat16", "e4m3fnuz", "interleaved_v")),
    ],
    ids=lambda v: v if v[0] == "0" else f"reshape_and_cache_flash-x_packed-{v}",
)
def test_flash_writer_head_major(surface, release, form):
    module = surface.load(release, *FLASH)
    _, dtype, number = FP8.get(form, (None, torch.bfloat16, ml_dtypes.bfloat16))
    scales = SCALES if form == "e4m3fnuz" else (1.0, 1.0)
    x, d_size = 16 // dtype.itemsize, 64
    page = H * d_size * N
    block = 2 * page + 32  # two sides and a padding after every block
    tensors, rows = inputs(surface, (d_size, d_size), scales=scales)
    buffer = surface.bytes("cache", (B * block + 16) * dtype.itemsize)
    head = d_size * N
    key_cache = buffer.view(dtype, (B, H, d_size // x, N, x), (block, head, N * x, x, 1), 16)
    value_cache = buffer.view(dtype, (B, H, d_size, N), (block, head, N, 1), 16 + page)
    interleaved = {"interleaved_v_pack_factor": x} if form == "interleaved_v" else {}
    module.triton_reshape_and_cache_flash(
        key_cache=key_cache,
        value_cache=value_cache,
        kv_cache_dtype="fp8" if dtype.itemsize == 1 else "auto",
        **interleaved,
        **tensors,
    )
    for t, b, s in PLACES:
        for h in range(H):
            keys, values = (
                fp8(side[t, h], scale, number) for side, scale in zip(rows, scales, strict=True)
            )
            for d in range(d_size):
                k = 16 + b * block + h * head + (d // x) * N * x + s * x + d % x
                v = 16 + page + b * block + h * head
                v += (s // x) * d_size * x + d * x + s % x if interleaved else d * N + s
                buffer.expect(k * dtype.itemsize, keys[d])
                buffer.expect(v * dtype.itemsize, values[d])
    surface.check()


@pytest.mark.parametrize("release", ["0.18.0", "0.19.0", "0.24.0", "0.33.0"])
@pytest.mark.parametrize(
    "form", ["bfloat16", "e4m3fnuz"], ids=lambda form: f"reshape_and_cache_flash_diffkv-{form}"
)
def test_diffkv_writer(surface, release, form):
    module = surface.load(release, *FLASH)
    _, dtype, number = FP8.get(form, (None, torch.bfloat16, ml_dtypes.bfloat16))
    scales = SCALES if dtype.itemsize == 1 else (1.0, 1.0)
    dk, dv = 48, 32
    tensors, rows = inputs(surface, (dk, dv), scales=scales)
    content = dk + dv
    # Before #44455 heads lie side by side in a token.
    head = content if release < "0.33" else N * content
    token = H * content if release < "0.33" else content
    block = H * N * content + 24
    buffer = surface.bytes("cache", (B * block + 16) * dtype.itemsize)
    module.triton_reshape_and_cache_flash_diffkv(
        kv_cache=buffer.view(dtype, (B, N, H, content), (block, token, head, 1), 16),
        kv_cache_dtype="fp8" if dtype.itemsize == 1 else "auto",
        **tensors,
    )
    for t, b, s in PLACES:
        for h in range(H):
            at = (16 + b * block + s * token + h * head) * dtype.itemsize
            buffer.expect(at, fp8(rows[0][t, h], scales[0], number))
            buffer.expect(at + dk * dtype.itemsize, fp8(rows[1][t, h], scales[1], number))
    surface.check()


@pytest.mark.parametrize("release", ["0.18.0", "0.19.0", "0.24.0", "0.33.0"])
@pytest.mark.parametrize(
    "form",
    ["bfloat16", "e4m3fnuz", "e4m3fn"],
    ids=lambda form: f"reshape_and_cache_shuffle-{form}",
)
def test_shuffle_writer(surface, release, form):
    arch, dtype, number = FP8.get(form, ("gfx942", torch.bfloat16, ml_dtypes.bfloat16))
    module = surface.load(release, AITER_FA, arch=arch)
    d_size = 32
    x, page = 16 // dtype.itemsize, N * H * d_size
    # Scales are ignored until 0.33.
    scales = SCALES if release >= "0.33" and dtype.itemsize == 1 else (1.0, 1.0)
    tensors, rows = inputs(surface, (d_size, d_size), scales=scales)
    tensors |= {"k_scales": tensors.pop("k_scale"), "v_scales": tensors.pop("v_scale")}
    # The block stride is hard-coded until #43660.
    block, v_base = (page, B * page) if release < "0.24" else (2 * page, page)
    buffer = surface.bytes("cache", (2 * B * page + 16) * dtype.itemsize)
    strides = (block, H * d_size, d_size, 1)
    module.reshape_and_cache_shuffle_triton(
        key_cache=buffer.view(dtype, (B, N, H, d_size), strides, 16),
        value_cache=buffer.view(dtype, (B, N, H, d_size), strides, 16 + v_base),
        kv_cache_dtype="fp8" if dtype.itemsize == 1 else "auto",
        **tensors,
    )
    for t, b, s in PLACES:
        for h in range(H):
            keys, values = (
                fp8(side[t, h], scale, number) for side, scale in zip(rows, scales, strict=True)
            )
            at = 16 + b * block + h * d_size * N
            for d in range(d_size):
                k = at + (d // x) * N * x + s * x + d % x
                v = at + v_base + (s // x) * d_size * x + d * x + s % x
                buffer.expect(k * dtype.itemsize, keys[d])
                buffer.expect(v * dtype.itemsize, values[d])
    surface.check()


@pytest.mark.parametrize(
    "form",
    ["float32", "bfloat16", "float16", "e4m3fnuz", "e4m3fn"],
    ids="conch-reshape_and_cache-{}".format,
)
def test_conch_writer(surface, form):
    from conch.ops.vllm.reshape_and_cache import reshape_and_cache

    _, dtype, number = FP8.get(form, (None, getattr(torch, form, None), None))
    model = torch.bfloat16 if number else dtype
    # Powers of two: it multiplies by the reciprocal.
    scales = (0.25, 2.0)
    for head_size in (32, 40):
        tensors, rows = inputs(surface, (head_size, head_size), dtype=model, scales=scales)
        # It reads the head stride of the cache off the key: only heads side by side are right.
        cache = surface.cache("cache", "padded_page", dtype, (B, N, H, head_size))
        reshape_and_cache(
            key_cache=cache.key,
            value_cache=cache.value,
            kv_cache_dtype="fp8" if number else "auto",
            **tensors,
        )
        for t, b, s in PLACES:
            for h in range(H):
                for row, scale, byte in zip(rows, scales, (cache.k, cache.v), strict=True):
                    head = fp8(row[t, h], scale, number) if number else row[t, h]
                    cache.buffer.expect(byte(b, s, h), head)
        surface.check()
        surface.release()
