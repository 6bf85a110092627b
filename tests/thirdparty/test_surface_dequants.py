"""Kernels that read packed or quantised pages back into dense tensors: every byte."""

import ml_dtypes
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.thirdparty

OPS = "vllm/v1/attention/ops"
FLASHINFER = "vllm/v1/attention/backends/flashinfer.py"
B, N, H = 5, 16, 2
# Two sequences of 37 positions over blocks in no order.
TABLES, POSITIONS = ((3, 1, 4), (0, 2, 1)), 37


def codes_of(data, count, width):
    """`count` codes of `width` bits, the lowest bits first."""
    bits = np.unpackbits(data, bitorder="little")[: count * width].reshape(count, width)
    return (bits * (1 << np.arange(width))).sum(1)


class Out:
    """K and V `[2, H, POSITIONS, size]` with gaps between heads."""

    def __init__(self, surface, dtype, size):
        self.size, self.stride = dtype.itemsize, (POSITIONS + 1) * size
        self.row = size
        nbytes = 2 * H * self.stride * self.size + 32
        self.sides = [surface.bytes(name, nbytes) for name in ("k_out", "v_out")]
        strides = (H * self.stride, self.stride, size, 1)
        shape = (2, H, POSITIONS, size)
        self.views = [side.view(dtype, shape, strides) for side in self.sides]
        self.strides = strides[:3] * 2

    def expect(self, side, sequence, head, position, numbers):
        at = ((sequence * H + head) * self.stride + position * self.row) * self.size
        self.sides[side].expect(at, numbers)


def places():
    """Sequence, position, block and place in it of every position."""
    for sequence, table in enumerate(TABLES):
        for position in range(POSITIONS):
            yield sequence, position, table[position // N], position % N


def halves(surface, buffer, places_of_halves):
    """Small positive fp16 numbers where a format stores a norm, a scale or a zero."""
    for at in places_of_halves:
        number = np.float16(surface.random.uniform(0.01, 2))
        buffer.expect(at, number)
    buffer.memory.copy_(torch.from_numpy(buffer.mirror.copy()))


TURBOQUANT = [(3, 8, 96), (4, 8, 96), (3, 3, 64), (4, 4, 64)]


@pytest.mark.parametrize(
    ("form", "release"),
    [("aos", "0.24.0"), ("aos", "0.33.0"), ("soa", "0.33.0")],
)
@pytest.mark.parametrize(
    ("value_bits", "key_bits", "head_size"),
    TURBOQUANT,
    ids=[f"turboquant_dequant-k{k}v{v}" for v, k, _ in TURBOQUANT],
)
def test_turboquant(surface, release, form, value_bits, key_bits, head_size):
    folder = f"{OPS}/turboquant_soa" if form == "soa" else OPS
    module = surface.load(release, f"{folder}/triton_turboquant_decode.py")
    width = 0 if key_bits == 8 else key_bits
    key_bytes, value_bytes = head_size * (width or 8) // 8, head_size * value_bits // 8
    key_slot = key_bytes + (2 if width else 0)
    slot = key_slot + value_bytes + 4
    page = N * H * slot
    buffer = surface.bytes("cache", B * page, without=(0x7F, 0xFF) if not width else ())

    def parts(b, s, h):
        """Where key codes, value codes, norm, scale and zero of a slot start."""
        if form == "aos":
            at = b * page + (s * H + h) * slot
            values = at + key_slot
            return at, values, at + key_bytes, values + value_bytes, values + value_bytes + 2
        data = key_bytes + value_bytes
        at = b * page + (s * H + h) * data
        fields = 3 if width else 2
        rows = b * page + N * H * data + h * fields * N * 2 + 2 * s
        scale = rows + (fields - 2) * N * 2
        return at, at + key_bytes, rows, scale, scale + N * 2

    numbers = [
        at
        for b in range(B)
        for s in range(N)
        for h in range(H)
        for at in parts(b, s, h)[2 if width else 3 :]
    ]
    halves(surface, buffer, numbers)
    centroids = surface.random.normal(size=2 ** (width or 1)).astype(np.float32)
    out = Out(surface, torch.float16, head_size)
    table = surface.tensor("block_table", torch.tensor(TABLES, dtype=torch.int32))
    given = surface.tensor("centroids", torch.from_numpy(centroids))
    cache = buffer.view(torch.uint8, (B, N, H, slot))
    common = {
        "HEAD_DIM": head_size,
        "BLOCK_SIZE": N,
        "NUM_KV_HEADS": H,
        "MSE_BYTES": key_bytes if width else head_size,
        "VQB": value_bits,
        "VAL_DATA_BYTES": value_bytes,
        "MSE_BITS": width,
        "KEY_FP8": 0 if width else 1,
        "BLOCK_D": 128 if head_size == 96 else 64,
    }
    kernel = module._tq_full_dequant_kv[(POSITIONS, 2 * H)]
    if form == "aos":
        strides = (page, H * slot, slot, 3)
        kernel(cache, table, given, *out.views, *out.strides, *strides, KPS=key_slot, **common)
    else:
        kernel(
            cache.view(-1), cache.view(-1).view(torch.uint16), table, given, *out.views,
            *out.strides, page, 3,
            KEY_DATA_BYTES=key_bytes,
            META_REGION_OFFSET=N * H * (key_bytes + value_bytes),
            NUM_SOA_FIELDS=3 if width else 2,
            SOA_K_NORM=0,
            SOA_V_SCALE=1 if width else 0,
            SOA_V_ZERO=2 if width else 1,
            **common,
        )  # fmt: skip
    for sequence, position, b, s in places():
        for h in range(H):
            keys, values, *words = parts(b, s, h)
            norm, scale, zero = (
                np.float32(buffer.mirror[at : at + 2].view(np.float16)[0]) for at in words
            )
            stored = buffer.mirror[keys : keys + key_bytes]
            if width:
                key = norm * centroids[codes_of(stored, head_size, width)]
            else:
                key = stored.view(ml_dtypes.float8_e4m3fn)
            codes = codes_of(buffer.mirror[values : values + value_bytes], head_size, value_bits)
            value = codes.astype(np.float32) * scale + zero
            out.expect(0, sequence, h, position, key.astype(np.float16))
            out.expect(1, sequence, h, position, value.astype(np.float16))
    surface.check()


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.mark.parametrize("release", ["0.33.0"], ids="ultraquant_dequant-{}".format)
def test_ultraquant(surface, release):
    surface.load(release, f"{OPS}/ultraquant/format.py")
    surface.load(release, f"{OPS}/ultraquant/triton_store.py")
    module = surface.load(release, f"{OPS}/ultraquant/triton_dequant.py")
    size, groups = 64, 2
    slot = size + 2 * groups
    page = N * H * slot
    buffer = surface.bytes("cache", B * page)
    # Scales of moderate size, and a zero group: byte 0 is no power of two.
    for at in range(0, B * page, slot):
        for side in (0, 1):
            scales = surface.random.integers(120, 134, groups).astype(np.uint8)
            scales[0] *= surface.random.integers(0, 2, dtype=np.uint8)
            buffer.expect(at + side * (size // 2 + groups) + size // 2, scales)
    buffer.memory.copy_(torch.from_numpy(buffer.mirror.copy()))
    out = Out(surface, torch.bfloat16, size)
    table = surface.tensor("block_table", torch.tensor(TABLES, dtype=torch.int32))
    cache = buffer.view(torch.uint8, (B, N, H, slot))
    module.ultraquant_full_dequant_kv(cache, table, *out.views, POSITIONS)
    for sequence, position, b, s in places():
        for h in range(H):
            for side in (0, 1):
                at = b * page + (s * H + h) * slot + side * (size // 2 + groups)
                codes = codes_of(buffer.mirror[at : at + size // 2], size, 4)
                scales = buffer.mirror[at + size // 2 : at + size // 2 + groups].astype(np.float64)
                powers = np.where(scales > 0, 2.0 ** (scales - 127), 0.0)
                numbers = FP4[codes] * np.repeat(powers, 32)
                out.expect(side, sequence, h, position, numbers.astype(ml_dtypes.bfloat16))
    surface.check()


@pytest.mark.parametrize(
    "release",
    ["0.13.0", "0.18.0", "0.19.0", "0.24.0", "0.33.0"],
    ids="trtllm_prefill_attn_kvfp8_dequant-{}".format,
)
def test_flashinfer_pages(surface, release):
    """Pages `[2, H, N, D]` of a prefill become pages one behind the other; page 0 is nobody's."""
    module = surface.load(release, FLASHINFER)
    size, scales, tables = 32, (0.37, 1.75), ((3, 1, 0), (4, 0, 0))
    side = H * N * size
    # Pages, sides and heads have strides of their own from 0.19 on, slots and elements from 0.33.
    strides = (2 * side, side, N * size, size, 1)
    if release >= "0.19":
        strides = (2 * side + 32, N * size, 2 * N * size, size, 1)
    if release >= "0.33":
        strides = (2 * side + 32, size, 2 * N * size, 2 * size, 1)
    buffer = surface.bytes("cache", B * strides[0], without=(0x7F, 0xFF))
    mock = surface.bytes("mock", 2 * (7 * 2 * side + 16))
    k_scale, v_scale = (
        surface.tensor(name, torch.tensor([scale]))
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=True)
    )
    table = surface.tensor("tables", torch.tensor(tables, dtype=torch.int32))
    shape = (B, 2, H, N, size)
    arguments = (
        buffer.view(torch.float8_e4m3fn, shape, strides),
        table,
        3,
        mock.view(torch.bfloat16, (7, 2, H, N, size)),
        k_scale,
        v_scale,
    )
    kernel = module._trtllm_prefill_attn_kvfp8_dequant[(2, 3)]
    if release >= "0.33":
        kernel(*arguments, *strides, side, 2 * side, N * size, size, H)
    elif release >= "0.19":
        kernel(*arguments, *strides[:3], side, 2 * side, N * size, H)
    else:
        kernel(*arguments, side, 2 * side)
    stored = buffer.typed(torch.float8_e4m3fn)
    for i, page in enumerate(page for row in tables for page in row):
        if page == 0:
            continue
        for kv, scale in enumerate(scales):
            for h in range(H):
                for s in range(N):
                    at = sum(x * y for x, y in zip((page, kv, h, s), strides, strict=False))
                    numbers = stored[at : at + size].astype(np.float32) * np.float32(scale)
                    to = (((i + 1) * 2 + kv) * H + h) * N + s
                    mock.expect(2 * to * size, numbers.astype(ml_dtypes.bfloat16))
    surface.check()
