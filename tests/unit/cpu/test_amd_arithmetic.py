# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
"""Where AMD's instructions differ from what the types would lead one to expect."""

from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvfuzz.cpu import CpuLane, UnsupportedOp

NAN, INF = float("nan"), float("inf")


@triton.jit
def cast(x, y, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at).to(TYPE))


@triton.jit
def fused(x, y, z, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.fma(tl.load(x + at), tl.load(y + at), tl.load(z + at)))


@triton.jit
def square(x, codes, out, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    if TYPE is not None:
        tl.store(codes + at, a.to(TYPE))
    tl.store(out + at, a * a)
    tl.store(out + BLOCK + at, 1 / a)
    tl.store(out + 2 * BLOCK + at, (a.to(tl.float32) * 70).to(tl.float16))


@triton.jit
def read_square(codes, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(codes + at).to(tl.float16)
    tl.store(out + at, a * a)


@triton.jit
def functions(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    tl.store(out + at, tl.exp2(a))
    tl.store(out + BLOCK + at, tl.sqrt(a))
    tl.store(out + 2 * BLOCK + at, tl.rsqrt(a))
    tl.store(out + 3 * BLOCK + at, tl.sqrt_rn(a))


@triton.jit
def shift(x, by, out, LEFT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, distance = tl.load(x + at), tl.load(by + at)
    tl.store(out + at, a << distance if LEFT else a >> distance)


@triton.jit
def clamp(x, low, high, out, ALL: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, b, c = tl.load(x + at), tl.load(low + at), tl.load(high + at)
    if ALL:
        tl.store(out + at, tl.clamp(a, b, c, propagate_nan=tl.PropagateNan.ALL))
    else:
        tl.store(out + at, tl.clamp(a, b, c))


@triton.jit
def product(x, y, z, PRECISION: tl.constexpr):
    at = tl.arange(0, 16)
    at = at[:, None] * 16 + at[None, :]
    tl.store(z + at, tl.dot(tl.load(x + at), tl.load(y + at), input_precision=PRECISION))


@triton.jit
def count(x, out, BLOCK: tl.constexpr, BINS: tl.constexpr):
    counts = tl.histogram(tl.load(x + tl.arange(0, BLOCK)), BINS)
    tl.store(out + tl.arange(0, BINS), counts)


@triton.jit
def shows(x):
    tl.device_print("at @home: %1 ", tl.load(x))


@contextmanager
def lane_of(lane, arch):
    lane.deactivate()
    other = CpuLane(arch=arch)
    other.activate()
    try:
        yield other
    finally:
        other.deactivate()
        lane.activate()


def cast_to(x, dtype, kind):
    y = torch.zeros(len(x), dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)
    cast[(1,)](x, y, TYPE=kind, BLOCK=len(x))
    return y


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64])
def test_integers_become_bf16_by_way_of_fp32(lane, dtype):
    rng = np.random.default_rng(3)
    numpy_type = np.dtype(str(dtype).removeprefix("torch."))
    info = np.iinfo(numpy_type)
    x = rng.integers(info.min, info.max, 1 << 12, dtype=numpy_type, endpoint=True)
    x >>= rng.integers(0, 30, len(x)).astype(numpy_type)
    x[:3] = 16842753, 16842752, info.max  # the first is 2**24 + 2**16 + 1: twice rounded, 2**24
    with_fp32 = x.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.int16)
    result = cast_to(torch.from_numpy(x), torch.bfloat16, tl.bfloat16)
    assert np.array_equal(result.view(torch.int16).numpy(), with_fp32)
    assert result[0].item() == 16777216


def test_fma_of_fp16_is_rounded_once(lane):
    """x*y + z lies just below a tie of fp16, which is where rounding to fp32 first puts it."""
    x, y, z = (1 + 2**-10) * 2**-6, (1 - 2**-10) * 2**-5, 1 + 2**-10
    given = [torch.full((4,), value, dtype=torch.float16) for value in (x, y, z)]
    out = torch.zeros(4, dtype=torch.float16)
    fused[(1,)](*given, out, BLOCK=4)
    assert out.tolist() == [z] * 4


@pytest.mark.parametrize("kind", [tl.float8e4nv, tl.float8e5, tl.float8e4b8, tl.float8e5b16])
def test_a_kernel_that_converts_to_fp8_clamps_fp16_results_of_finite_inputs(lane, kind):
    x = torch.tensor([1000.0, -2000.0, INF, 0.0], dtype=torch.float16)
    out, codes = torch.zeros(3, 4, dtype=torch.float16), torch.zeros(4, dtype=torch.uint8)
    dtypes = {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.float8e4b8: torch.float8_e4m3fnuz,
        tl.float8e5b16: torch.float8_e5m2fnuz,
    }
    square[(1,)](x, codes.view(dtypes[kind]), out, TYPE=kind, BLOCK=4)
    assert out[0].tolist() == [65504, 65504, INF, 0]
    assert out[1, 3].item() == INF  # a division by zero
    assert out[2].tolist() == [65504, -65504, INF, 0]
    square[(1,)](x, codes, out, TYPE=None, BLOCK=4)
    assert out[0].tolist() == [INF, INF, INF, 0]
    assert out[2].tolist() == [INF, -INF, INF, 0]


def test_a_kernel_that_only_reads_fp8_does_not_clamp(lane):
    codes = torch.tensor([448.0, 1, 2, 3]).to(torch.float8_e4m3fn)
    out = torch.zeros(4, dtype=torch.float16)
    read_square[(1,)](codes, out, BLOCK=4)
    assert out.tolist() == [INF, 1, 4, 9]


def test_the_arch_of_the_lane_decides_how_a_kernel_converts(lane):
    x = torch.tensor([465.0, 479, 480, -465], dtype=torch.float16)
    codes = cast_to(x, torch.float8_e4m3fn, tl.float8e4nv).view(torch.uint8).tolist()
    assert codes == [0x7F, 0x7F, 0x7E, 0xFF]
    with lane_of(lane, "gfx950"):
        codes = cast_to(x, torch.float8_e4m3fn, tl.float8e4nv).view(torch.uint8).tolist()
    assert codes == [0x7E, 0x7E, 0x7E, 0xFE]


def test_fp64_to_fp8_is_refused_as_amds_compiler_refuses_it(lane):
    x = torch.ones(4, dtype=torch.float64)
    with pytest.raises(UnsupportedOp, match=r"tt\.fp_to_fp f64 to f8E4M3FNUZ"):
        cast_to(x, torch.float8_e4m3fnuz, tl.float8e4b8)


@pytest.mark.parametrize("precision", ["bf16x3", "bf16x6"])
def test_a_dot_that_splits_fp32_is_refused_by_name_and_line(lane, precision):
    x, z = torch.eye(16), torch.zeros(16, 16)
    with pytest.raises(UnsupportedOp, match=f"tt.dot {precision}") as refusal:
        product[(1,)](x, x, z, PRECISION=precision)
    assert refusal.value.file == "test_amd_arithmetic.py"
    assert not z.any()
    half = x.half()  # for which a precision means nothing
    product[(1,)](half, half, z, PRECISION=precision)
    assert torch.equal(z, x)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_dot_without_a_precision_is_computed_in_fp32(lane, arch):
    """On gfx942 Triton makes that `tf32`."""
    x, z = torch.eye(16) * (1 + 2**-20), torch.zeros(16, 16)
    with lane_of(lane, arch):
        product[(1,)](x, torch.eye(16), z, PRECISION=None)
    assert torch.equal(z, x)


SPECIALS = [1e30, -1e30, INF, -INF, NAN, 2.0**63, -1.0, 300.0]
TOP = (1 << 32) - 1


@pytest.mark.parametrize(
    ("source", "target", "kind", "expected"),
    [
        # v_cvt_i32, low bits
        (torch.float32, torch.uint8, tl.uint8, [255, 0, 255, 0, 0, 255, 255, 44]),
        (torch.float32, torch.int8, tl.int8, [-1, 0, -1, 0, 0, -1, -1, 44]),
        (torch.bfloat16, torch.uint8, tl.uint8, [255, 0, 255, 0, 0, 255, 255, 44]),
        (torch.float64, torch.uint8, tl.uint8, [255, 0, 255, 0, 0, 255, 255, 44]),
        (torch.float32, torch.int16, tl.int16, [-1, 0, -1, 0, 0, -1, -1, 300]),
        # v_cvt_u32, low bits
        (torch.float32, torch.uint16, tl.uint16, [65535, 0, 65535, 0, 0, 65535, 0, 300]),
        # two halves that do not saturate as one
        (
            torch.float32, torch.int64, tl.int64,
            [-(1 << 32), 1 << 32, -(1 << 32), 1 << 32, 0, -(1 << 63), -1, 300],
        ),
        (
            torch.float32, torch.uint64, tl.uint64,
            [TOP << 32, 0, TOP << 32, 0, 0, 1 << 63, TOP, 300],
        ),
        (
            torch.float64, torch.int64, tl.int64,
            [(1 << 63) - (1 << 32), -(1 << 63), (1 << 63) - (1 << 32), -(1 << 63), 0,
             (1 << 63) - (1 << 32), -1, 300],
        ),
        # fp16: v_cvt_i16 or v_cvt_u16 for narrow integers, v_cvt_i32 for wide ones
        (torch.float16, torch.int16, tl.int16, [32767, -32768, 32767, -32768, 0, 32767, -1, 300]),
        (torch.float16, torch.uint16, tl.uint16, [65535, 0, 65535, 0, 0, 65535, 0, 300]),
        (torch.float16, torch.uint8, tl.uint8, [255, 0, 255, 0, 0, 255, 255, 44]),
        (
            torch.float16, torch.int64, tl.int64,
            [2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0, 2**31 - 1, -1, 300],
        ),
    ],
)  # fmt: skip
def test_floats_beyond_an_integer_convert_as_the_instructions_do(
    lane, source, target, kind, expected
):
    x = torch.tensor(SPECIALS, dtype=torch.float64).to(source)
    assert cast_to(x, target, kind).tolist() == expected


@pytest.mark.parametrize("target", [torch.int8, torch.uint8, torch.int16, torch.uint16])
def test_all_fp16_convert_to_narrow_integers_through_16_bits(lane, target):
    codes = np.arange(1 << 16).astype(np.uint16)
    values = codes.view(np.float16).astype(np.float64)
    wide = np.uint16 if target == torch.uint16 else np.int16
    limits = np.iinfo(wide)
    with np.errstate(invalid="ignore"):
        saturated = np.clip(np.nan_to_num(np.trunc(values), nan=0), limits.min, limits.max)
    name = str(target).removeprefix("torch.")
    x = torch.from_numpy(codes.view(np.int16)).view(torch.float16)
    result = cast_to(x, target, getattr(tl, name))
    assert np.array_equal(result.numpy(), saturated.astype(wide).astype(name))


@pytest.mark.parametrize(("source", "target"), [("float32", "int64"), ("float64", "uint64")])
def test_floats_within_a_64_bit_integer_are_exact(lane, source, target):
    rng = np.random.default_rng(4)
    sign = rng.choice([1, -1] if target == "int64" else [1], 1 << 12)
    values = (sign * np.exp2(rng.uniform(-2, 62.9, 1 << 12))).astype(source)
    result = cast_to(torch.from_numpy(values), getattr(torch, target), getattr(tl, target))
    assert result.tolist() == [int(value) for value in values.tolist()]


def test_bare_instructions_take_fp32_subnormals_for_zero(lane):
    tiny, normal = 1e-40, 2.0**-126
    x = torch.tensor([-130.0, tiny, -tiny, normal])
    out = torch.zeros(4, 4)
    functions[(1,)](x, out, BLOCK=4)
    assert out[0].tolist() == [0, 1, 1, 1]
    assert out[1, 1:].tolist() == [0, 0, 2.0**-63]
    assert str(out[1, 2].item()) == "-0.0"
    assert out[2, 1:].tolist() == [INF, -INF, 2.0**63]
    assert out[3, 1].item() == np.sqrt(np.float32(tiny))


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize(
    ("dtype", "looks_at"),
    [("int8", 4), ("uint8", 4), ("int16", 4), ("int32", 5), ("uint32", 5), ("int64", 6)],
)
def test_shifts_look_at_the_low_bits_of_the_distance(lane, buffer, dtype, looks_at, left):
    distances = list(range(128))
    number = 100 if dtype[0] == "u" else -100
    x = torch.full((128,), number, dtype=getattr(torch, dtype))
    by = torch.tensor(distances, dtype=getattr(torch, dtype))
    out = torch.zeros(128, dtype=getattr(torch, dtype))
    small = [each % (1 << looks_at) for each in distances]
    exact = [number << each if left else number >> each for each in small]
    bits = 8 * out.element_size()
    expected = np.array([each % (1 << bits) for each in exact], f"u{bits // 8}")
    buffers = [buffer(name, data) for name, data in (("x", x), ("by", by), ("out", out))]
    shift[(1,)](*buffers, LEFT=left, BLOCK=128)
    assert np.array_equal(buffers[2].numpy().view(expected.dtype), expected)
    buffers[2].zero_()
    with lane.observe():
        shift[(1,)](*buffers, LEFT=left, BLOCK=128)
    assert np.array_equal(buffers[2].numpy().view(expected.dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("x", "low", "high", "expected"),
    [
        (0.5, NAN, 1.0, 0.5),
        (2.0, NAN, 1.0, 1.0),
        (2.0, 0.0, NAN, (0.0, 2.0)),
        (0.5, NAN, NAN, 0.5),
        (3.0, 2.0, 1.0, (2.0, 1.0)),
    ],
)
def test_clamp_is_the_median_and_a_nan_leaves_the_minimum(lane, dtype, x, low, high, expected):
    """bf16 has no median, nor has Triton 3.6: the maximum is taken, then the minimum."""
    if isinstance(expected, tuple):
        has_none = dtype == torch.bfloat16 or triton.__version__.startswith("3.6.")
        expected = expected[has_none]
    given = [torch.full((4,), value, dtype=dtype) for value in (x, low, high)]
    out = torch.zeros(4, dtype=dtype)
    for every in (False, True):
        clamp[(1,)](*given, out, ALL=every, BLOCK=4)
        assert out.tolist() == [expected] * 4


def test_clamp_propagates_a_nan_of_its_first_operand_only_if_asked(lane):
    given = [torch.full((4,), value) for value in (NAN, 0.0, 1.0)]
    out = torch.zeros(4)
    clamp[(1,)](*given, out, ALL=True, BLOCK=4)
    assert out.isnan().all()
    clamp[(1,)](*given, out, ALL=False, BLOCK=4)
    assert out.tolist() == [0.0] * 4


def test_clamp_orders_zeros_by_their_sign(lane):
    given = [torch.tensor(each) for each in ([-0.0, 0.0], [0.0, -0.0], [1.0, 1.0])]
    out = torch.zeros(2)
    clamp[(1,)](*given, out, ALL=False, BLOCK=2)
    assert [str(each) for each in out.tolist()] == ["0.0", "0.0"]


@pytest.mark.parametrize(("arch", "lanes"), [("gfx942", 64), ("gfx1100", 32)])
def test_the_size_of_a_wavefront_follows_the_arch(lane, arch, lanes):
    with lane_of(lane, arch):
        driver = triton.runtime.driver.active
        assert driver.get_current_target().warp_size == lanes
        assert driver.utils.get_device_properties(0)["warpSize"] == lanes
        out = torch.zeros(4, dtype=torch.int32)
        count[(1,)](torch.tensor([0, 1, 33, 34], dtype=torch.int32), out, BLOCK=4, BINS=4)
        assert out.tolist() == ([1, 1, 0, 0] if lanes == 64 else [1, 2, 1, 0])


def test_a_printed_text_keeps_what_looks_like_a_symbol(buffer, capsys):
    shows[(1,)](buffer("x", torch.tensor([7], dtype=torch.int32)))
    assert "at @home: %1" in capsys.readouterr().err
