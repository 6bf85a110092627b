"""TurboQuant and UltraQuant: opaque slots of packed codes, norms and scales, stored and read."""

import ml_dtypes
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.thirdparty

OPS = "vllm/v1/attention/ops"
B, N, H = 5, 16, 2
SLOTS = (3 * N + 15, -1, 1 * N + 0, 4 * N + 7, 1 * N + 1, -1, 0 * N + 15)
PLACES = [(t, slot // N, slot % N) for t, slot in enumerate(SLOTS) if slot >= 0]
T = len(SLOTS)


def inputs(surface, head_size):
    """Keys, values and slots; and keys and values as float64."""
    tensors, rows = {}, []
    for name in ("key", "value"):
        tensors[name], kept = surface.rows(name, (T, H, head_size), torch.bfloat16)
        rows.append(kept.astype(np.float64))
    tensors["slot_mapping"] = surface.tensor("slot_mapping", torch.tensor(SLOTS))
    return tensors, rows


def hadamard(size):
    """Sylvester's matrix, normalised."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


def bits_of(codes, width):
    """Codes one behind the other, the lowest bits first, as bytes."""
    stream = [int(code) >> bit & 1 for code in codes for bit in range(width)]
    return np.packbits(stream, bitorder="little")


def levels(row, width):
    """Codes, scale and smallest value of a row over its range."""
    row = row.astype(np.float32)
    scale = max((row.max() - row.min()) / np.float32(2**width - 1), np.float32(1e-8))
    codes = np.floor((row - row.min()) / scale + np.float32(0.5))
    return np.clip(codes, 0, 2**width - 1), scale, row.min()


def nearest(numbers, middles, *, exact=False):
    """How many of `middles` lie below each number; none may be so near that rounding decides."""
    distance = np.abs(numbers[..., None] - middles)
    assert distance[distance > 0 if exact else ...].min() > 1e-6
    return (numbers[..., None] > middles).sum(-1)


# Value bits, key bits (8: fp8), head size: 96 is not a power of two.
TURBOQUANT = [(3, 8, 96), (4, 8, 96), (3, 3, 64), (4, 4, 64)]


def store_module(surface, release, folder):
    """The module of a store, told that the device has the fp8 of Hopper, as every AMD device."""
    module = surface.load(release, f"{folder}/triton_turboquant_store.py")
    module._use_fp8_e4b15 = lambda device: 0
    return module


def turboquant(surface, key_bits, value_bits, head_size):
    """Arguments of the store, and per (token, head) the key codes, norms and value parts."""
    tensors, (keys, values) = inputs(surface, head_size)
    width = 0 if key_bits == 8 else key_bits
    middles = np.sort(surface.random.normal(size=2 ** (width or 1) - 1)) / np.sqrt(head_size)
    # The rotation happens outside of the kernel.
    rotation = hadamard(head_size) if width else np.eye(head_size)
    tensors["PiT"] = surface.tensor("PiT", torch.from_numpy(rotation).float())
    middles_f32 = torch.from_numpy(middles).float()
    tensors["midpoints"] = surface.tensor("midpoints", middles_f32)
    norms = np.linalg.norm(keys, axis=-1)
    if width:
        rotated = keys / norms[..., None] @ rotation
        codes = nearest(rotated, middles_f32.double().numpy())
    else:
        codes = keys.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    key_bytes = head_size * (width or 8) // 8
    tensors |= {
        "mse_bits": width,
        "key_packed_size": key_bytes + (2 if width else 0),
        "value_quant_bits": value_bits,
        "key_fp8": not width,
    }
    return tensors, codes, norms.astype(np.float16), values, key_bytes


@pytest.mark.parametrize("release", ["0.24.0", "0.33.0"])
@pytest.mark.parametrize(
    ("value_bits", "key_bits", "head_size"),
    TURBOQUANT,
    ids=[f"turboquant_store-k{k}v{v}" for v, k, _ in TURBOQUANT],
)
def test_turboquant_store(surface, release, value_bits, key_bits, head_size):
    module = store_module(surface, release, OPS)
    tensors, codes, norms, values, key_bytes = turboquant(surface, key_bits, value_bits, head_size)
    value_bytes = head_size * value_bits // 8
    slot = tensors["key_packed_size"] + value_bytes + 4
    # 0.24 flattens the cache, so its pages lie side by side.
    page = N * H * slot + (64 if release >= "0.33" else 0)
    buffer = surface.bytes("cache", B * page)
    cache = buffer.view(torch.uint8, (B, N, H, slot), (page, H * slot, slot, 1))
    module.triton_turboquant_store(kv_cache=cache, **tensors)
    for t, b, s in PLACES:
        for h in range(H):
            at = b * page + (s * H + h) * slot
            buffer.expect(at, bits_of(codes[t, h], 8 if key_bits == 8 else key_bits))
            at += key_bytes
            if key_bits != 8:
                buffer.expect(at, norms[t, h])
                at += 2
            packed, scale, smallest = levels(values[t, h], value_bits)
            buffer.expect(at, bits_of(packed, value_bits))
            buffer.expect(at + value_bytes, np.float16(scale))
            buffer.expect(at + value_bytes + 2, np.float16(smallest))
    surface.check()


@pytest.mark.parametrize("release", ["0.33.0"])
@pytest.mark.parametrize(
    ("value_bits", "key_bits", "head_size"),
    TURBOQUANT,
    ids=[f"turboquant_soa_store-k{k}v{v}" for v, k, _ in TURBOQUANT],
)
def test_turboquant_soa_store(surface, release, value_bits, key_bits, head_size):
    """A block holds the codes of all its slots, then per head rows of norms, scales and zeros."""
    module = store_module(surface, release, f"{OPS}/turboquant_soa")
    tensors, codes, norms, values, key_bytes = turboquant(surface, key_bits, value_bits, head_size)
    value_bytes = head_size * value_bits // 8
    slot = tensors["key_packed_size"] + value_bytes + 4
    page, data = N * H * slot, key_bytes + value_bytes
    buffer = surface.bytes("cache", B * page)
    module.triton_turboquant_store(kv_cache=buffer.view(torch.uint8, (B, N, H, slot)), **tensors)
    for t, b, s in PLACES:
        for h in range(H):
            at = b * page + (s * H + h) * data
            packed, scale, smallest = levels(values[t, h], value_bits)
            buffer.expect(at, bits_of(codes[t, h], 8 if key_bits == 8 else key_bits))
            buffer.expect(at + key_bytes, bits_of(packed, value_bits))
            fields = [np.float16(scale), np.float16(smallest)]
            if key_bits != 8:
                fields.insert(0, norms[t, h])
            rows = b * page + N * H * data + h * len(fields) * N * 2
            for field, number in enumerate(fields):
                buffer.expect(rows + (field * N + s) * 2, number)
    surface.check()


FP4 = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp4(row, *, exact=False):
    """E2M1 codes and a power-of-two scale byte per 32 elements; `exact` rows may have ties."""
    codes, scales = [], []
    for group in row.reshape(-1, 32):
        largest = np.abs(group).max()
        if largest == 0:
            codes += [0] * 32
            scales.append(0)
            continue
        wanted = np.log2(0.156 * largest)
        assert abs(wanted % 1 - 0.5) > 1e-6
        exponent = int(np.floor(wanted + 0.5))
        order = nearest(group / 2.0**exponent, (FP4[1:] + FP4[:-1]) / 2, exact=exact)
        # Sign and magnitude: the seven magnitudes above zero are the codes 1 to 7.
        codes += [15 - k if k < 7 else k - 7 for k in order]
        scales.append(exponent + 127)
    return bits_of(codes, 4), np.array(scales, np.uint8)


@pytest.mark.parametrize("release", ["0.33.0"], ids="ultraquant_store-{}".format)
def test_ultraquant_store(surface, release):
    surface.load(release, f"{OPS}/ultraquant/format.py")
    module = surface.load(release, f"{OPS}/ultraquant/triton_store.py")
    head_size = 64
    tensors, (keys, values) = inputs(surface, head_size)
    tensors["value"][0, 0, :32] = 0
    values[0, 0, :32] = 0
    surface.accept(tensors["value"])
    slot = head_size + head_size // 16
    page = N * H * slot
    buffer = surface.bytes("cache", B * page)
    module.ultraquant_store(kv_cache=buffer.view(torch.uint8, (B, N, H, slot)), **tensors)
    for t, b, s in PLACES:
        for h in range(H):
            at = b * page + (s * H + h) * slot
            rotated = keys[t, h] @ hadamard(head_size)
            for part in (*fp4(rotated), *fp4(values[t, h], exact=True)):
                buffer.expect(at, part)
                at += len(part)
    surface.check()
