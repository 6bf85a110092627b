"""DeepSeek-V4's cache of 584 bytes a token: codes with powers of two for scales, and bf16."""

import ml_dtypes
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.thirdparty

CACHE_UTILS = "vllm/models/deepseek_v4/common/ops/cache_utils.py"
B, N = 5, 16
CODES, PLAIN, GROUP = 448, 64, 64
DATA = CODES + 2 * PLAIN
BLOCK = -(-N * (DATA + 8) // DATA) * DATA
"""Bytes of a block: 576 of data a token, then 8 of scales a token, up to a multiple of 576."""

FP8 = {"e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 224.0), "e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0)}
NAN_CODES = {"e4m3fnuz": (0x80,), "e4m3fn": (0x7F, 0xFF)}
CONSTANTS = {
    "fp8_dim": CODES,
    "bf16_dim": PLAIN,
    "scale_dim": 8,
    "quant_block": GROUP,
    "cache_block_size": N,
    "token_data_size": DATA,
    "block_stride": BLOCK,
}


@pytest.mark.parametrize("release", ["0.24.0", "0.33.0"])
@pytest.mark.parametrize("dialect", FP8, ids="quantize_and_insert_k_cache-{}".format)
def test_insert(surface, release, dialect):
    module = surface.load(release, CACHE_UTILS)
    number, largest = FP8[dialect]
    slots = (3 * N + 15, -1, 1 * N + 0, 4 * N + 7, 1 * N + 1, -1, 0 * N + 15)
    k, rows = surface.rows("k", (len(slots) + 2, CODES + PLAIN), torch.bfloat16)
    buffer = surface.bytes("cache", B * BLOCK)
    module.quantize_and_insert_k_cache(
        k,
        buffer.view(torch.uint8, (B, BLOCK)),
        surface.tensor("slot_mapping", torch.tensor(slots)),
        N,
        use_fnuz=dialect == "e4m3fnuz",
    )
    for slot, row in zip(slots, rows, strict=False):
        if slot < 0:
            continue
        at = slot // N * BLOCK + slot % N * DATA
        scales_at = slot // N * BLOCK + N * DATA + slot % N * 8
        numbers = row.astype(np.float64)
        exponents = np.zeros(8, np.uint8)
        for i in range(CODES // GROUP):
            group = numbers[i * GROUP : (i + 1) * GROUP]
            exponent = np.ceil(np.log2(max(np.abs(group).max(), 1e-4) / largest))
            buffer.expect(at + i * GROUP, (group / 2.0**exponent).astype(number))
            exponents[i] = exponent + 127
        buffer.expect(scales_at, exponents)
        buffer.expect(at + CODES, row[CODES:])
    surface.check()


@pytest.mark.parametrize("release", ["0.24.0", "0.33.0"])
@pytest.mark.parametrize("dialect", FP8, ids="dequantize_and_gather_k_cache-{}".format)
def test_gather(surface, release, dialect):
    module = surface.load(release, CACHE_UTILS)
    kernel = (
        module.DequantizeAndGatherKCacheKernel.kernel
        if release >= "0.33"
        else module._dequantize_and_gather_k_kernel
    )
    number, largest = FP8[dialect]
    tables, lengths, gathered, offset = ((3, 1, 4), (0, 2, 0)), (37, 20), (21, 20), 3
    buffer = surface.bytes("cache", B * BLOCK, without=NAN_CODES[dialect])
    scales = buffer.mirror.reshape(B, BLOCK)[:, N * DATA : N * (DATA + 8)]
    scales[:] = surface.random.integers(118, 136, scales.shape, np.uint8)
    buffer.memory.copy_(torch.from_numpy(buffer.mirror.copy()))
    row, longest = CODES + PLAIN, 26
    out = surface.bytes("out", 2 * 2 * longest * row)
    kernel[(2, 4)](
        out.view(torch.bfloat16, (2, longest, row)),
        longest * row,
        row,
        buffer.view(torch.uint8, (B, BLOCK)),
        surface.tensor("seq_lens", torch.tensor(lengths, dtype=torch.int32)),
        surface.tensor("block_table", torch.tensor(tables, dtype=torch.int32)),
        offset,
        surface.tensor("gather_lens", torch.tensor(gathered, dtype=torch.int32)),
        max_blocks_per_seq=3,
        output_dim=row,
        fp8_max=largest,
        n_quant_blocks=CODES // GROUP,
        use_fnuz=dialect == "e4m3fnuz",
        **CONSTANTS,
    )
    for i, (table, length, count) in enumerate(zip(tables, lengths, gathered, strict=True)):
        for t in range(count):
            position = length - count + t
            block, s = table[position // N], position % N
            at = block * BLOCK + s * DATA
            powers = np.repeat(2.0 ** (scales[block, 8 * s : 8 * s + 7] - 127.0), GROUP)
            codes = buffer.mirror[at : at + CODES].view(number).astype(np.float64)
            to = 2 * (i * longest + offset + t) * row
            out.expect(to, (codes * powers).astype(ml_dtypes.bfloat16))
            out.expect(to + 2 * CODES, buffer.mirror[at + CODES : at + DATA])
    surface.check()
