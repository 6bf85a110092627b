"""Kernels that read a paged cache into dense tensors: every byte against the address formulas."""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.thirdparty

AITER_FA = "vllm/v1/attention/backends/rocm_aiter_fa.py"
B, N, H, D = 5, 16, 2, 32
SHAPE = (B, N, H, D)

# Two sequences: 21 tokens from position 5 on, over blocks 3, 1, and 9 tokens of block 4.
STARTS, LENGTHS, BLOCKS = (5, 0), (21, 9), ((3, 1, 0), (4, 2, 0))
POSITIONS = [
    (BLOCKS[i][pos // N], pos % N)
    for i in range(2)
    for pos in range(STARTS[i], STARTS[i] + LENGTHS[i])
]
T = len(POSITIONS)

NAN_CODES = {"e4m3fnuz": (0x80,), "e4m3fn": (0x7F, 0xFF)}
ARCH = {"e4m3fnuz": "gfx942", "e4m3fn": "gfx950"}
TORCH = {"e4m3fnuz": torch.float8_e4m3fnuz, "e4m3fn": torch.float8_e4m3fn}

# Before 0.19 no stride is read (#37228), so only a dense cache is read right.
NHD_LAYOUTS = {"0.13.0": ("kv_first",), "0.18.0": ("kv_first",)}
STRIDED = ("kv_first", "hybrid", "padded_page", "content_packed_nhd", "content_packed_hnd")


def batch(surface):
    """The batch of a gather, in the order of its parameters."""
    int32 = {"dtype": torch.int32}
    return {
        "block_tables": surface.tensor("block_tables", torch.tensor(BLOCKS, **int32)),
        "cu_seqlens_kv": surface.tensor("cu_seqlens_kv", torch.tensor([0, 21, 30], **int32)),
        "token_to_batch": surface.tensor(
            "token_to_batch", torch.tensor([0] * 21 + [1] * 9, **int32)
        ),
        "seq_starts": surface.tensor("seq_starts", torch.tensor(STARTS, **int32)),
        "total_tokens": T,
    }


def gather(surface, module, key_cache, value_cache, out_dtype, scales, layout):
    """Run the gather into buffers of T + 1 rows; returns both buffers."""
    out = [surface.bytes(name, (T + 1) * H * D * out_dtype.itemsize) for name in ("key", "value")]
    k_scale, v_scale = (
        surface.tensor(name, torch.tensor([scale]))
        for name, scale in zip(("k_scale", "v_scale"), scales or (1.0, 1.0), strict=True)
    )
    module.cp_mha_gather_cache(
        key_cache=key_cache,
        value_cache=value_cache,
        key=out[0].view(out_dtype, (T + 1, H, D)),
        value=out[1].view(out_dtype, (T + 1, H, D)),
        k_scales=k_scale,
        v_scales=v_scale,
        dequant=scales is not None,
        kv_cache_layout=layout,
        **batch(surface),
    )
    return out


@pytest.mark.parametrize(
    "release",
    ["0.13.0", "0.18.0", "0.19.0", "0.24.0", "0.33.0"],
    ids=lambda release: f"cp_mha_gather_cache-nhd-{release}",
)
def test_gather_nhd(surface, release):
    module = surface.load(release, AITER_FA)
    for layout in NHD_LAYOUTS.get(release, STRIDED):
        cache = surface.cache(f"cache.{layout}", layout, torch.bfloat16, SHAPE)
        out = gather(surface, module, cache.key, cache.value, torch.bfloat16, None, "NHD")
        for t, (b, s) in enumerate(POSITIONS):
            for h in range(H):
                for side, start in zip(out, (cache.k(b, s, h), cache.v(b, s, h)), strict=True):
                    head = cache.buffer.mirror[start : start + 2 * D]
                    side.expect(2 * (t * H + h) * D, head)
        surface.check()
        surface.release()


@pytest.mark.parametrize("release", ["0.13.0", "0.18.0", "0.19.0", "0.24.0", "0.33.0"])
@pytest.mark.parametrize(
    "dialect", ["e4m3fnuz", "e4m3fn"], ids=lambda dialect: f"cp_mha_gather_cache-nhd-{dialect}"
)
def test_gather_nhd_dequantises(surface, release, dialect):
    module = surface.load(release, AITER_FA, arch=ARCH[dialect])
    # Until #39122 a value went back through fp8, which only a scale of one survives.
    scales = (1.0, 1.0) if release < "0.24" else (0.37, 1.75)
    dtype = TORCH[dialect]
    layout = NHD_LAYOUTS.get(release, ("hybrid",))[0]
    cache = surface.cache("cache", layout, dtype, SHAPE, NAN_CODES[dialect])
    out = gather(surface, module, cache.key, cache.value, torch.bfloat16, scales, "NHD")
    stored = cache.buffer.typed(dtype)
    for t, (b, s) in enumerate(POSITIONS):
        for h in range(H):
            starts = (cache.k(b, s, h), cache.v(b, s, h))
            for side, start, scale in zip(out, starts, scales, strict=True):
                numbers = stored[start : start + D].astype(np.float32) * np.float32(scale)
                side.expect(2 * (t * H + h) * D, bf16(numbers))
    surface.check()


def shuffled(base, page, x):
    """The elements of K and V in AITER's SHUFFLE format, block after block `page` apart."""

    def k(b, s, h, d):
        return base[0] + b * page + h * D * N + (d // x) * N * x + s * x + d % x

    def v(b, s, h, d):
        return base[1] + b * page + h * D * N + (s // x) * D * x + d * x + s % x

    return k, v


# The gather's block stride is hard-coded until 0.29 (#43660): only separate planes are read right.
@pytest.mark.parametrize("release", ["0.18.0", "0.19.0", "0.24.0", "0.33.0"])
@pytest.mark.parametrize(
    "dialect",
    [None, "e4m3fnuz", "e4m3fn"],
    ids=lambda d: f"cp_mha_gather_cache-shuffle-{d or 'bf16'}",
)
def test_gather_shuffle(surface, release, dialect):
    module = surface.load(release, AITER_FA, arch=ARCH.get(dialect, "gfx942"))
    dtype = TORCH.get(dialect, torch.bfloat16)
    dense = N * H * D
    page = dense if release < "0.33" else 2 * dense
    base = (0, B * dense) if release < "0.33" else (0, dense)
    buffer = surface.bytes("cache", 2 * B * dense * dtype.itemsize, NAN_CODES.get(dialect, ()))
    views = [buffer.view(dtype, SHAPE, (page, H * D, D, 1), start) for start in base]
    # Scales are ignored under SHUFFLE until 0.33.
    scales = None if dialect is None else (1.0, 1.0) if release < "0.33" else (0.37, 1.75)
    out = gather(surface, module, *views, torch.bfloat16, scales, "SHUFFLE")
    stored = buffer.typed(dtype)
    addresses = shuffled(base, page, 16 // dtype.itemsize)
    for t, (b, s) in enumerate(POSITIONS):
        for h in range(H):
            for side, address, scale in zip(out, addresses, scales or (1, 1), strict=True):
                head = stored[[address(b, s, h, d) for d in range(D)]]
                if dialect:
                    head = bf16(head.astype(np.float32) * np.float32(scale))
                side.expect(2 * (t * H + h) * D, head)
    surface.check()


def bf16(numbers):
    """float32 numbers rounded to bfloat16."""
    import ml_dtypes

    return numbers.astype(ml_dtypes.bfloat16)
