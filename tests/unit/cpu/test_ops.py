# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvfuzz.cpu import UnsupportedOp

BLOCK = 64


@triton.jit
def integers(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, x + y)
    tl.store(out + BLOCK + at, x - y)
    tl.store(out + 2 * BLOCK + at, x * y)
    tl.store(out + 3 * BLOCK + at, x // y)
    tl.store(out + 4 * BLOCK + at, x % y)
    tl.store(out + 5 * BLOCK + at, (x & y) | (x ^ 3))
    tl.store(out + 6 * BLOCK + at, x >> 2)
    tl.store(out + 7 * BLOCK + at, x << 3)
    tl.store(out + 8 * BLOCK + at, tl.minimum(x, y))
    tl.store(out + 9 * BLOCK + at, tl.where(x < y, x, y + 1))


@triton.jit
def widths(a, out8, out64, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(a + at)
    tl.store(out8 + at, x.to(tl.int8))
    tl.store(out64 + at, x.to(tl.uint8).to(tl.int64) + x.to(tl.int64))


@triton.jit
def unsigned(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, x // y)
    tl.store(out + BLOCK + at, x % y)
    tl.store(out + 2 * BLOCK + at, x >> 3)
    tl.store(out + 3 * BLOCK + at, tl.maximum(x, y))
    tl.store(out + 4 * BLOCK + at, tl.where(x < y, x, y))
    tl.store(out + 5 * BLOCK + at, x * y - x)


@triton.jit
def truths(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, x & y)
    tl.store(out + BLOCK + at, x | y)
    tl.store(out + 2 * BLOCK + at, x ^ y)
    tl.store(out + 3 * BLOCK + at, ~x)
    tl.store(out + 4 * BLOCK + at, (x.to(tl.int32) + y) > 1)


@triton.jit
def comparisons(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, x < y)
    tl.store(out + BLOCK + at, x <= y)
    tl.store(out + 2 * BLOCK + at, x > y)
    tl.store(out + 3 * BLOCK + at, x >= y)
    tl.store(out + 4 * BLOCK + at, x == y)
    tl.store(out + 5 * BLOCK + at, x != y)
    tl.store(out + 6 * BLOCK + at, not (x < y))


@triton.jit
def extremes(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, tl.maximum(x, y))
    tl.store(out + BLOCK + at, tl.minimum(x, y))
    tl.store(out + 2 * BLOCK + at, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 3 * BLOCK + at, tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def arithmetic(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, x + y)
    tl.store(out + BLOCK + at, x * y)
    tl.store(out + 2 * BLOCK + at, x - y)


@triton.jit
def divide(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, x / y)
    tl.store(out + BLOCK + at, tl.sqrt_rn(tl.abs(x)))
    tl.store(out + 2 * BLOCK + at, tl.clamp(x, -1.0, 1.0))
    tl.store(out + 3 * BLOCK + at, tl.floor(x) + tl.ceil(y))


@triton.jit
def requantize(a, scale, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(a + at).to(tl.float32) / tl.load(scale)
    tl.store(out + at, x.to(out.dtype.element_ty))


@triton.jit
def to_integers(a, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(a + at).to(tl.int32))


@triton.jit
def shapes(a, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.reshape(tl.load(a + at), (BLOCK // 2, 2))
    left, right = tl.split(x)
    both = tl.join(right, left)
    tl.store(out + at, tl.reshape(tl.trans(both), (BLOCK,)))
    outer = left[:, None] * 100 + tl.arange(0, 2)[None, :]
    tl.store(out + BLOCK + at, tl.reshape(outer, (BLOCK,)))


@triton.jit
def reductions(a, out, BLOCK: tl.constexpr):
    x = tl.reshape(tl.load(a + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), (4, BLOCK // 4))
    rows = tl.arange(0, 4)
    out += tl.program_id(0) * 20
    tl.store(out + rows, tl.sum(x, 1))
    tl.store(out + 4 + rows, tl.max(x, 1))
    tl.store(out + 8 + rows, tl.argmax(x, 1))
    tl.store(out + 12 + rows, tl.argmin(x, 1))
    tl.store(out + 16 + rows, tl.cumsum(rows + 1, 0))


@triton.jit
def product(a, b, out):
    rows, inner, cols = tl.arange(0, 16), tl.arange(0, 32), tl.arange(0, 8)
    x = tl.load(a + rows[:, None] * 32 + inner[None, :])
    y = tl.load(b + inner[:, None] * 8 + cols[None, :])
    tl.store(out + rows[:, None] * 8 + cols[None, :], tl.dot(x, y, out_dtype=tl.float32))


@triton.jit
def opaque(a, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out, 1)
    x = tl.inline_asm_elementwise("v_dance $0, $1", "=v,v", [tl.load(a + at)], tl.int32, True, 1)
    tl.store(out + at, x)


@triton.jit
def high_products(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, tl.umulhi(x, y))


def mixed_integers(dtype, seed):
    info = np.iinfo(dtype)
    rng = np.random.default_rng(seed)
    special = [info.min, info.max, -1, 1, 2, -2, 7, -7, info.min + 1, info.max - 1]
    values = rng.integers(info.min, info.max, BLOCK, dtype, endpoint=True)
    values[: len(special)] = np.roll(special, seed)
    values[values == 0] = 3
    return values


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_integers_wrap_at_their_width_and_division_truncates(buffer, dtype):
    a, b = mixed_integers(dtype, 0), mixed_integers(dtype, 3)
    out = buffer("out", torch.from_numpy(np.zeros((10, BLOCK), dtype)))
    integers[(1,)](
        buffer("a", torch.from_numpy(a)), buffer("b", torch.from_numpy(b)), out, BLOCK=BLOCK
    )
    bits = 8 * a.itemsize

    def wrapped(values):
        return [(value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) for value in values]

    def quotient(x, y):
        return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    expected = [
        [x + y for x, y in pairs],
        [x - y for x, y in pairs],
        [x * y for x, y in pairs],
        [quotient(x, y) for x, y in pairs],
        [x - y * quotient(x, y) for x, y in pairs],
        [x & y | x ^ 3 for x, y in pairs],
        [x >> 2 for x, _ in pairs],
        [x << 3 for x, _ in pairs],
        [min(x, y) for x, y in pairs],
        [x if x < y else y + 1 for x, y in pairs],
    ]
    assert out.tolist() == [wrapped(row) for row in expected]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_unsigned_integers_are_compared_divided_and_shifted_as_such(buffer, dtype):
    size = np.dtype(dtype).itemsize
    a, b = (mixed_integers(f"i{size}", seed).view(dtype) for seed in (0, 3))
    out = buffer("out", torch.from_numpy(np.zeros((6, BLOCK), dtype)))
    unsigned[(1,)](
        buffer("a", torch.from_numpy(a)), buffer("b", torch.from_numpy(b)), out, BLOCK=BLOCK
    )
    expected = [a // b, a % b, a >> 3, np.maximum(a, b), np.minimum(a, b), a * b - a]
    np.testing.assert_array_equal(out.numpy(), np.array(expected))


def test_truth_values_are_stored_as_one_byte_and_computed_on_one_bit(buffer):
    a, b = torch.tensor([[False, False, True, True], [False, True, False, True]])
    out = buffer("out", torch.zeros(5, 4, dtype=torch.bool))
    truths[(1,)](buffer("a", a), buffer("b", b), out, BLOCK=4)
    assert out.tolist() == [(row).tolist() for row in (a & b, a | b, a ^ b, ~a, a & b)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_comparisons_with_nan_are_false_except_unequal(buffer, dtype):
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 0.5])
    a = special.repeat_interleave(8).to(dtype)
    b = special.repeat(8).to(dtype)
    out = buffer("out", torch.zeros(7, BLOCK, dtype=torch.bool))
    comparisons[(1,)](buffer("a", a), buffer("b", b), out, BLOCK=BLOCK)
    expected = [a < b, a <= b, a > b, a >= b, a == b, a != b, ~(a < b)]
    assert torch.equal(out, torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extremes_order_zeros_by_sign_and_propagate_nan_only_when_asked(buffer, dtype):
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 0.5])
    a, b = special.repeat_interleave(8), special.repeat(8)
    out = buffer("out", torch.zeros(4, BLOCK, dtype=dtype))
    inputs = [buffer(name, value.to(dtype)) for name, value in (("a", a), ("b", b))]
    extremes[(1,)](*inputs, out, BLOCK=BLOCK)

    def key(value):
        return value, torch.signbit(torch.tensor(value)).logical_not().item()

    for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        numbers = [value for value in (x, y) if value == value] or [float("nan")]
        largest, smallest = max(numbers, key=key), min(numbers, key=key)
        nan = float("nan") if x != x or y != y else None
        expected = [largest, smallest, nan or largest, nan or smallest]
        assert [str(value) for value in out[:, i].tolist()] == [str(value) for value in expected]


def test_narrowing_keeps_low_bits_and_widening_keeps_the_sign_or_not(buffer):
    a = mixed_integers(np.int32, 1)
    out8 = buffer("out8", torch.zeros(BLOCK, dtype=torch.int8))
    out64 = buffer("out64", torch.zeros(BLOCK, dtype=torch.int64))
    widths[(1,)](buffer("a", torch.from_numpy(a)), out8, out64, BLOCK=BLOCK)
    np.testing.assert_array_equal(out8.numpy(), a.astype(np.int8))
    np.testing.assert_array_equal(out64.numpy(), a.astype(np.uint8).astype(np.int64) + a)


def test_high_products_are_those_of_unsigned_integers(buffer):
    for dtype in (np.int32, np.int64):
        a, b = mixed_integers(dtype, 0), mixed_integers(dtype, 5)
        name = np.dtype(dtype).name
        out = buffer(f"out{name}", torch.zeros(BLOCK, dtype=getattr(torch, name)))
        inputs = [buffer(f"{n}{name}", torch.from_numpy(v)) for n, v in (("a", a), ("b", b))]
        high_products[(1,)](*inputs, out, BLOCK=BLOCK)
        bits, unsigned = 8 * a.itemsize, f"u{a.itemsize}"
        pairs = zip(a.view(unsigned).tolist(), b.view(unsigned).tolist(), strict=True)
        assert out.numpy().view(unsigned).tolist() == [x * y >> bits for x, y in pairs]


@pytest.mark.parametrize(
    ("dtype", "reference"),
    [
        (torch.bfloat16, ml_dtypes.bfloat16),
        (torch.float16, np.float16),
        (torch.float32, np.float32),
    ],
)
def test_arithmetic_rounds_once_to_its_own_type(buffer, dtype, reference):
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal((2, BLOCK)) * np.exp2(rng.integers(-9, 9, (2, BLOCK)))).astype(
        reference
    )
    integer = {2: np.int16, 4: np.int32}[a.itemsize]
    inputs = [
        buffer(name, torch.from_numpy(values.view(integer)).view(dtype))
        for name, values in (("a", a), ("b", b))
    ]
    out = buffer("out", torch.zeros(3 * BLOCK, dtype=dtype))
    arithmetic[(1,)](*inputs, out, BLOCK=BLOCK)
    x, y = a.astype(np.float64), b.astype(np.float64)
    expected = np.concatenate([x + y, x * y, x - y])
    exact = expected.astype(reference)  # fp64 results of inputs this close in size are exact
    np.testing.assert_array_equal(
        out.view(torch.int16 if a.itemsize == 2 else torch.int32).numpy(), exact.view(integer)
    )


def test_fp32_division_and_roots_are_ieee(buffer):
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((2, BLOCK)).astype(np.float32)
    b[0], a[1], b[2] = 0, np.nan, np.inf
    out = buffer("out", torch.zeros(4, BLOCK))
    divide[(1,)](
        buffer("a", torch.from_numpy(a)), buffer("b", torch.from_numpy(b)), out, BLOCK=BLOCK
    )
    with np.errstate(all="ignore"):
        expected = [a / b, np.sqrt(np.abs(a)), np.fmin(np.fmax(a, np.float32(-1)), 1)]
        expected.append(np.floor(a) + np.ceil(b))
    np.testing.assert_array_equal(out.numpy(), np.array(expected))


@pytest.mark.parametrize(
    ("dtype", "reference"),
    [
        (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
        (torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3fnuz),
        (torch.float8_e5m2, ml_dtypes.float8_e5m2),
        (torch.float8_e5m2fnuz, ml_dtypes.float8_e5m2fnuz),
    ],
)
def test_a_kernel_that_quantizes_stores_what_the_reference_rounds_to(buffer, dtype, reference):
    count = 1 << 12
    rng = np.random.default_rng(8)
    values = (rng.standard_normal(count) * np.exp2(rng.integers(-14, 6, count))).astype(np.float16)
    out = buffer("out", torch.zeros(count, dtype=torch.uint8).view(dtype))
    requantize[(1,)](
        buffer("a", torch.from_numpy(values)), buffer("scale", torch.tensor([0.75])), out,
        BLOCK=count,
    )  # fmt: skip
    scaled = values.astype(np.float32) / np.float32(0.75)
    np.testing.assert_array_equal(
        out.view(torch.uint8).numpy(), scaled.astype(reference).view(np.uint8)
    )


def test_float_to_integer_truncates_and_saturates_as_amd_does(buffer):
    values = [1.9, -1.9, 3e9, -3e9, float("nan"), float("inf"), 2.0**31 - 128, 0.0]
    out = buffer("out", torch.zeros(8, dtype=torch.int32))
    to_integers[(1,)](buffer("a", torch.tensor(values)), out, BLOCK=8)
    top, bottom = 2**31 - 1, -(2**31)
    assert out.tolist() == [1, -1, top, bottom, 0, top, 2**31 - 128, 0]


def test_reshape_split_join_and_broadcast_move_elements_as_torch_does(buffer):
    a = torch.arange(BLOCK, dtype=torch.int32)
    out = buffer("out", torch.zeros(2, BLOCK, dtype=torch.int32))
    shapes[(1,)](buffer("a", a), out, BLOCK=BLOCK)
    left, right = a.view(-1, 2).unbind(1)
    assert torch.equal(out[0], torch.cat([right, left]))
    assert torch.equal(out[1], (left[:, None] * 100 + torch.arange(2)).flatten().int())


def test_reductions_evaluate_their_region_and_break_ties_to_the_left(buffer):
    a = torch.randint(-9, 9, (3, 4, BLOCK // 4), dtype=torch.int32)
    out = buffer("out", torch.zeros(3, 5, 4, dtype=torch.int32))
    reductions[(3,)](buffer("a", a), out, BLOCK=BLOCK)
    assert torch.equal(out[:, 0], a.sum(2).int())
    assert torch.equal(out[:, 1], a.amax(2))
    np.testing.assert_array_equal(out[:, 2].numpy(), a.numpy().argmax(2))
    np.testing.assert_array_equal(out[:, 3].numpy(), a.numpy().argmin(2))
    assert out[:, 4].tolist() == [[1, 3, 6, 10]] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fnuz])
def test_dot_multiplies_in_fp32(buffer, dtype):
    a = torch.randint(-8, 8, (16, 32)).float().to(dtype)
    b = torch.randint(-8, 8, (32, 8)).float().to(dtype)
    out = buffer("out", torch.zeros(16, 8))
    inputs = [
        buffer(name, value.view(torch.uint8)).view(dtype) for name, value in (("a", a), ("b", b))
    ]
    product[(1,)](*inputs, out)
    assert torch.equal(out, a.float() @ b.float())


def test_an_op_the_lane_does_not_know_is_refused_before_anything_runs(buffer):
    out = buffer("out", torch.zeros(BLOCK, dtype=torch.int32))
    a = buffer("a", torch.zeros(BLOCK, dtype=torch.int32))
    for _ in range(2):  # the second launch finds the kernel compiled
        with pytest.raises(UnsupportedOp) as refusal:
            opaque[(1,)](a, out, BLOCK=BLOCK)
        assert refusal.value.op == 'tt.elementwise_inline_asm "v_dance $0, $1"'
        assert refusal.value.file == "test_ops.py"
        assert refusal.value.line == opaque.fn.__code__.co_firstlineno + 4
        assert 'tt.elementwise_inline_asm "v_dance $0, $1"\' at test_ops.py:' in str(refusal.value)
    assert not out.any()
