# ruff: noqa: N803, N806 (constexpr names of Triton kernels are upper case)
import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvfuzz.cpu import UnsupportedOp

M, N, K = 16, 8, 64


@triton.jit
def scaled_product(
    a, a_scale, b, b_scale, out, A: tl.constexpr, B: tl.constexpr, AK: tl.constexpr,
    BK: tl.constexpr, K_PACK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = 16
    N: tl.constexpr = 8
    K: tl.constexpr = 64
    AM: tl.constexpr = M * K // (2 if A == "e2m1" else 1) // AK
    BN: tl.constexpr = N * K // (2 if B == "e2m1" else 1) // BK
    pid = tl.program_id(0)
    x = tl.load(a + pid * AM * AK + tl.arange(0, AM)[:, None] * AK + tl.arange(0, AK)[None, :])
    y = tl.load(b + tl.arange(0, BK)[:, None] * BN + tl.arange(0, BN)[None, :])
    runs = tl.arange(0, K // 32)
    x_scale = None
    y_scale = None
    if a_scale is not None:
        x_scale = tl.load(a_scale + tl.arange(0, M)[:, None] * (K // 32) + runs[None, :])
    if b_scale is not None:
        y_scale = tl.load(b_scale + tl.arange(0, N)[:, None] * (K // 32) + runs[None, :])
    acc = tl.full([M, N], 0.5, tl.float32)
    product = tl.dot_scaled(
        x, x_scale, A, y, y_scale, B, acc, fast_math=FAST, lhs_k_pack=K_PACK, rhs_k_pack=K_PACK
    )
    at = pid * M * N + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, product)


FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def operand(rng, format_, shape, packed_axis):
    """Codes as the kernel loads them, and the values they stand for."""
    if format_ == "e2m1":
        codes = rng.integers(0, 16, shape, np.uint8)
        values = np.array(FP4 + [-value for value in FP4])[codes]
        low, high = (
            codes.take(range(start, shape[packed_axis], 2), packed_axis) for start in (0, 1)
        )
        return torch.from_numpy(low | high << 4), values
    dtype = {
        "e4m3": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
        "bf16": ml_dtypes.bfloat16,
        "fp16": np.float16,
    }[format_]
    numbers = rng.standard_normal(shape).astype(dtype)
    kind = np.uint8 if numbers.itemsize == 1 else np.int16
    codes = torch.from_numpy(numbers.view(kind))
    if format_ in ("bf16", "fp16"):
        codes = codes.view({"bf16": torch.bfloat16, "fp16": torch.float16}[format_])
    return codes, numbers.astype(np.float64)


@pytest.mark.parametrize(
    ("left", "right", "k_pack"),
    [
        ("e2m1", "e2m1", True),
        ("e2m1", "e2m1", False),
        ("e4m3", "e2m1", True),
        ("e5m2", "e4m3", True),
        ("bf16", "e2m1", True),
        ("fp16", "e4m3", True),
    ],
)
def test_scaled_products_are_those_of_the_scaled_elements(buffer, left, right, k_pack):
    rng = np.random.default_rng(3)
    a, a_values = operand(rng, left, (2 * M, K), 1 if k_pack else 0)
    b, b_values = operand(rng, right, (K, N), 0 if k_pack else 1)
    scales = {side: rng.integers(122, 132, (size, K // 32), np.uint8)
              for side, size in (("a", M), ("b", N))}  # fmt: skip
    a_scale = None if left in ("bf16", "fp16") else buffer("as", torch.from_numpy(scales["a"]))
    b_scale = buffer("bs", torch.from_numpy(scales["b"]))
    out = buffer("out", torch.zeros(2, M, N))
    given = [a, a_scale, b, b_scale]
    given[0], given[2] = buffer("a", a.contiguous()), buffer("b", b.contiguous())
    ak = K // 2 if left == "e2m1" and k_pack else K
    bk = K // 2 if right == "e2m1" and k_pack else K
    scaled_product[(2,)](*given, out, left, right, ak, bk, k_pack, FAST=False)
    factor = {side: np.exp2(scale.astype(int) - 127.0) for side, scale in scales.items()}
    a_full = a_values.reshape(2, M, K) * (1 if a_scale is None else factor["a"].repeat(32, 1))
    b_full = b_values * factor["b"].repeat(32, 1).T
    exact = a_full @ b_full + 0.5
    np.testing.assert_allclose(out.numpy(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fast", [False, True])
def test_a_scale_of_0xff_makes_its_run_nan_unless_math_is_fast(buffer, fast):
    a = buffer("a", torch.full((M, K // 2), 0x22, dtype=torch.uint8))  # all 1.0
    b = buffer("b", torch.full((K // 2, N), 0x22, dtype=torch.uint8))
    scale = torch.full((M, 2), 127, dtype=torch.uint8)
    scale[3, 1] = 0xFF
    out = buffer("out", torch.zeros(M, N))
    b_scale = buffer("bs", torch.full((N, 2), 128, dtype=torch.uint8))
    args = (a, buffer("as", scale), b, b_scale, out, "e2m1", "e2m1", K // 2, K // 2, True)
    scaled_product[(1,)](*args, FAST=fast)
    expected = torch.full((M, N), 2.0 * K + 0.5)
    expected[3] = torch.inf if fast else torch.nan
    assert torch.equal(out.nan_to_num(nan=-1), expected.nan_to_num(nan=-1))


def test_scaled_elements_beyond_the_range_of_fp16_overflow_there(buffer):
    a = buffer("a", torch.ones(M, K, dtype=torch.float16))
    b = buffer("b", torch.full((K // 2, N), 0x22, dtype=torch.uint8))
    scale = torch.tensor([[127 + 15, 127]] * N, dtype=torch.uint8)
    scale[1, 0], scale[2, 0], scale[3, 0] = 127 + 16, 127 - 25, 127 + 16
    b[:, 3], b[:, 4] = 0x11, 0x66  # 0.5 stays in range with a scale beyond it, 4.0 leaves it
    out = buffer("out", torch.zeros(M, N))
    b_scale = buffer("bs", scale)
    scaled_product[(1,)](a, None, b, b_scale, out, "fp16", "e2m1", K, K // 2, True, FAST=False)
    infinite = float("inf")
    assert out[0, :5].tolist() == [
        2.0**15 * 32 + 32.5, infinite, 32.5, 2.0**15 * 32 + 16.5, infinite,
    ]  # fmt: skip


def test_scaled_elements_below_the_range_of_bf16_are_cut_off(buffer):
    # Code 7 is 7 * 2**-9; times 2**-126 it is 1.75 times bf16's least number, 2**-133.
    a = buffer("a", torch.full((M, K), 2.0**120, dtype=torch.bfloat16))
    b = buffer("b", torch.full((K, N), 7, dtype=torch.uint8))
    b_scale = buffer("bs", torch.full((N, 2), 1, dtype=torch.uint8))
    out = buffer("out", torch.zeros(M, N))
    scaled_product[(1,)](a, None, b, b_scale, out, "bf16", "e4m3", K, K, True, FAST=False)
    assert out[0, 0].item() == 0.5 + K * 2.0**120 * 2.0**-133


def test_a_scale_of_zero_counts_as_zero(buffer):
    a = buffer("a", torch.full((M, K), 2.0**120, dtype=torch.bfloat16))
    b = buffer("b", torch.full((K // 2, N), 0x22, dtype=torch.uint8))
    scale = torch.tensor([[0, 0]] * N, dtype=torch.uint8)
    scale[1] = 1
    out = buffer("out", torch.zeros(M, N))
    b_scale = buffer("bs", scale)
    scaled_product[(1,)](a, None, b, b_scale, out, "bf16", "e2m1", K, K // 2, True, FAST=False)
    assert out[0, :2].tolist() == [0.5, 0.5 + K * 2.0**-6]


@triton.jit
def fp8_product(a, out):
    at = tl.arange(0, 16)
    x = tl.load(a + at)
    tl.store(out + at, (x * x).to(tl.float32))


@triton.jit
def fp8_magnitude(a, out):
    at = tl.arange(0, 256)
    tl.store(out + at, tl.abs(tl.load(a + at)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2])
def test_fp8_has_an_absolute_value_that_clears_the_sign_bit_and_no_arithmetic(buffer, dtype):
    codes = buffer("codes", torch.arange(256).to(torch.uint8)).view(dtype)
    out = buffer("out", torch.zeros(256, dtype=torch.uint8)).view(dtype)
    fp8_magnitude[(1,)](codes, out)
    assert out.view(torch.uint8).tolist() == [code & 0x7F for code in range(256)]
    with pytest.raises(UnsupportedOp, match=r"arith\.mulf on f8E"):
        fp8_product[(1,)](codes, buffer("sums", torch.zeros(16)))
