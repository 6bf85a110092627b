"""Kernels that choose a scale themselves and store codes and scales: every byte."""

import ml_dtypes
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.thirdparty

FLASH = "vllm/v1/attention/ops/triton_reshape_and_cache_flash.py"
INT4 = "vllm/v1/attention/ops/int4_per_token_head.py"
SPARSE = "vllm/v1/attention/ops/rocm_aiter_mla_sparse.py"
B, N, H = 5, 16, 2
SLOTS = (3 * N + 15, -1, 1 * N + 0, 4 * N + 7, 1 * N + 1, -1, 0 * N + 15)
PLACES = [(t, slot // N, slot % N) for t, slot in enumerate(SLOTS) if slot >= 0]

FP8 = {
    "e4m3fnuz": ("gfx942", torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3fnuz, 224.0),
    "e4m3fn": ("gfx950", torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, 448.0),
}
ONE = np.float32(1)


def inputs(surface, head_sizes, dtype=torch.bfloat16):
    """Keys and values with a gap between rows, and the slots; and the rows as float32."""
    tensors, rows = {}, []
    for name, head_size in zip(("key", "value"), head_sizes, strict=True):
        tensors[name], kept = surface.rows(name, (len(SLOTS) + 2, H, head_size), dtype, gap=24)
        rows.append(kept.astype(np.float32))
    tensors["slot_mapping"] = surface.tensor("slot_mapping", torch.tensor(SLOTS))
    return tensors, rows


class Slots:
    """One run of bytes per block, head and token: codes and a float32 scale, for K, then for V."""

    def __init__(self, surface, sizes):
        self.sizes = sizes
        self.content = sum(size + 4 for size in sizes)
        self.block = H * N * self.content + 32
        self.buffer = surface.bytes("cache", 16 + B * self.block)

    def at(self, side, b, s, h):
        """The byte where a side's codes start; its scale lies behind them."""
        before = side * (self.sizes[0] + 4)
        return 16 + b * self.block + (h * N + s) * self.content + before

    def views(self, dtype):
        """Codes `[B, N, H, size]` and scales `[B, N, H]` of K and of V."""
        codes, scales = [], []
        strides = (self.block, self.content, N * self.content)
        for side, size in enumerate(self.sizes):
            start = self.at(side, 0, 0, 0)
            codes.append(self.buffer.view(dtype, (B, N, H, size), (*strides, 1), start))
            words = tuple(stride // 4 for stride in strides)
            scales.append(self.buffer.view(torch.float32, (B, N, H), words, (start + size) // 4))
        return {
            "key_cache": codes[0],
            "value_cache": codes[1],
            "k_scale_cache": scales[0],
            "v_scale_cache": scales[1],
        }


def half_away(numbers):
    """Rounded to the nearest integer, halves away from zero."""
    return np.copysign(np.floor(np.abs(numbers) + np.float32(0.5)), numbers)


@pytest.mark.parametrize("release", ["0.24.0", "0.33.0"])
@pytest.mark.parametrize("form", ["int8", *FP8], ids="per_token_head-{}".format)
def test_per_token_head(surface, release, form):
    arch, dtype, number, largest = FP8.get(form, ("gfx942", torch.int8, np.int8, 127.0))
    module = surface.load(release, FLASH, arch=arch)
    slots = Slots(surface, (40, 24))
    tensors, rows = inputs(surface, slots.sizes)
    # INT8_PER_TOKEN_HEAD and FP8_PER_TOKEN_HEAD differ in the dtype of the cache only.
    mode = {"kv_quant_mode": 2 if form == "int8" else 3} if release >= "0.33" else {}
    if mode:
        module.KVQuantMode = type("KVQuantMode", (), {"INT4_PER_TOKEN_HEAD": 4})
    module.triton_reshape_and_cache_flash_per_token_head_quant(
        **slots.views(dtype), **mode, **tensors
    )
    for t, b, s in PLACES:
        for h in range(H):
            for side, row in enumerate(rows):
                scale = max(np.abs(row[t, h]).max() / np.float32(largest), np.float32(1e-6))
                codes = row[t, h] * (ONE / scale)
                if form == "int8":
                    codes = half_away(codes)
                at = slots.at(side, b, s, h)
                slots.buffer.expect(at, np.clip(codes, -largest, largest).astype(number))
                slots.buffer.expect(at + slots.sizes[side], np.float32(scale))
    surface.check()


@pytest.mark.parametrize("release", ["0.33.0"], ids="int4_per_token_head-store-{}".format)
def test_int4_store(surface, release):
    module = surface.load(release, INT4)
    sizes = (48, 32)
    slots = Slots(surface, (24, 16))
    tensors, rows = inputs(surface, sizes)
    module._run_reshape_kernel(
        module._reshape_cache_int4_kernel,
        packing_factor=2,
        **slots.views(torch.uint8),
        **tensors,
    )
    for t, b, s in PLACES:
        for h in range(H):
            for side, row in enumerate(rows):
                codes, scale, zero = int4(row[t, h])
                at = slots.at(side, b, s, h)
                slots.buffer.expect(at, (codes[0::2] + 16 * codes[1::2]).astype(np.uint8))
                # The zero point replaces the lowest four bits of the scale.
                word = np.float32(scale).view(np.uint32) // 16 * 16 + zero
                slots.buffer.expect(at + slots.sizes[side], np.uint32(word))
    surface.check()


def int4(row):
    """Codes 0..15, scale and zero point of a row whose range holds zero."""
    assert row.min() < 0 < row.max()
    scale = max((row.max() - row.min()) / np.float32(15), np.float32(1e-6))
    zero = np.clip(half_away(-row.min() / scale), 0, 15)
    return np.clip(half_away(row * (ONE / scale) + zero), 0, 15), scale, int(zero)


@pytest.mark.parametrize("release", ["0.33.0"], ids="int4_per_token_head-hadamard-{}".format)
def test_hadamard(surface, release):
    """Integers, so that the product is exact: 21 rows are a tile and a part of one."""
    module = surface.load(release, INT4)
    n_rows, d = 21, 32
    numbers = surface.random.integers(-4, 5, (n_rows, d)).astype(np.float32)
    signs = np.ones((1, 1), np.float32)
    while len(signs) < d:
        signs = np.block([[signs, signs], [signs, -signs]])
    x, matrix = (
        surface.tensor(name, torch.from_numpy(values).to(torch.bfloat16))
        for name, values in (("x", numbers), ("h", signs))
    )
    out = surface.bytes("out", 2 * (n_rows + 1) * d)
    module._hadamard_mma_kernel[(2,)](
        x, matrix, out.view(torch.bfloat16, (n_rows, d)), n_rows, d, 1, d, 1, BLOCK_M=16, D=d
    )
    out.expect(0, (numbers @ signs).astype(ml_dtypes.bfloat16))
    surface.check()


def indexer_pages(surface, block_size, head_dim, dtype, without=()):
    """A cache of pages `[codes | float32 scales | padding]`, and the formulas of a token's bytes.

    In the layout SHUFFLE a tile of 16 tokens is stored as runs of 16 bytes, token by token.
    """
    page = block_size * (head_dim + 4) + 64
    buffer = surface.bytes("cache", B * page, without)
    view = buffer.view(dtype, (B, block_size, head_dim + 4), (page, head_dim + 4, 1))

    def code(b, s, d, tiled):
        if not tiled:
            return b * page + s * head_dim + d
        return b * page + (s // 16) * 16 * head_dim + (s % 16) * 16 + (d // 16) * 256 + d % 16

    def scale(b, s):
        return b * page + block_size * head_dim + 4 * s

    return buffer, view, code, scale


@pytest.mark.parametrize("release", ["0.18.0", "0.19.0", "0.24.0", "0.33.0"])
@pytest.mark.parametrize("dialect", FP8, ids="indexer_k_quant_and_cache-{}".format)
def test_indexer_writer(surface, release, dialect):
    arch, dtype, number, largest = FP8[dialect]
    module = surface.load(release, SPARSE, arch=arch)
    head_dim = 64
    for scale_fmt in ("ue8m0", None):
        for block_size in (32, 1):
            blocks = [slot // N for slot in SLOTS]
            slots = [
                -1 if slot < 0 else b * block_size + slot % block_size
                for slot, b in zip(SLOTS, blocks, strict=True)
            ]
            if block_size == 1:
                slots = [3, -1, 1, 4, 0, -1, 2]
            # Before 0.24 the codes of a uint8 cache would be stored as integers.
            own = torch.uint8 if release >= "0.24" else dtype
            buffer, view, code, scale_at = indexer_pages(surface, block_size, head_dim, own)
            numbers = surface.random.normal(size=(len(slots), head_dim)).astype(np.float32)
            k = torch.from_numpy(numbers).to(torch.bfloat16)
            module.indexer_k_quant_and_cache_triton(
                surface.tensor("k", k),
                view,
                surface.tensor("slot_mapping", torch.tensor(slots)),
                head_dim,
                scale_fmt,
            )
            for slot, row in zip(slots, k.float().numpy(), strict=True):
                if slot < 0:
                    continue
                b, s = slot // block_size, slot % block_size
                scale = max(np.float32(1e-4), np.abs(row).max()) / np.float32(largest)
                if scale_fmt:
                    scale = np.float32(2.0) ** np.ceil(np.log2(np.float64(scale)))
                tiled = block_size > 1 and release >= "0.24"
                for d, value in enumerate(row / np.float32(scale)):
                    buffer.expect(code(b, s, d, tiled), value.astype(number))
                buffer.expect(scale_at(b, s), np.float32(scale))
            surface.check()
            surface.release()


@pytest.mark.parametrize("release", ["0.18.0", "0.19.0", "0.24.0", "0.33.0"])
@pytest.mark.parametrize(
    "arch", ["gfx942", "gfx950"], ids="cp_gather_indexer_k_quant_cache-{}".format
)
def test_indexer_gather(surface, release, arch):
    module = surface.load(release, SPARSE, arch=arch)
    dtype = FP8["e4m3fnuz" if arch == "gfx942" else "e4m3fn"][1]
    head_dim, lengths = 64, (37, 0, 20)
    for block_size in (32, 16):
        tables = ((3, 1, 0), (0, 0, 0), (4, 2, 0))
        buffer, view, code, scale_at = indexer_pages(surface, block_size, head_dim, torch.uint8)
        total = sum(lengths)
        out, scales = (
            surface.bytes("k_fp8", (total + 1) * head_dim),
            surface.bytes("k_scale", 4 * total + 4),
        )
        starts = np.cumsum((0, *lengths))
        of_token = [i for i, length in enumerate(lengths) for _ in range(length)]
        int32 = {"dtype": torch.int32}
        module.cp_gather_indexer_k_quant_cache_triton(
            view,
            out.view(dtype, (total, head_dim)),
            scales.view(torch.uint8, (total, 4)),
            surface.tensor("block_table", torch.tensor(tables, **int32)),
            surface.tensor("cu_seqlen", torch.tensor(starts, **int32)),
            token_to_seq=surface.tensor("token_to_seq", torch.tensor(of_token, **int32)),
        )
        for t, i in enumerate(of_token):
            position = t - starts[i]
            b, s = tables[i][position // block_size], position % block_size
            for d in range(head_dim):
                at = code(b, s, d, release >= "0.24")
                out.expect(t * head_dim + d, buffer.mirror[at : at + 1])
            at = scale_at(b, s)
            scales.expect(4 * t, buffer.mirror[at : at + 4])
        surface.check()
        surface.release()
