import importlib
import math
import textwrap

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.language.extra.hip import libdevice

from kvfuzz.cpu import UnsupportedOp
from kvfuzz.cpu.inventory import supported
from kvfuzz.cpu.ops_extern import SYMBOLS

VALUES = np.array(
    [0.0, -0.0, 0.3, -0.7, 0.5, -0.5, 1.0, -1.5, 2.5, 3.0, -20.25, 88.5, 1e-30, 7e8, np.inf,
     -np.inf, np.nan]
)  # fmt: skip


@pytest.fixture(scope="module")
def mapped(tmp_path_factory):
    """Make a kernel that applies one function of libdevice to every element."""
    kernels = {}

    def make(name, arity):
        if name not in kernels:
            arguments = ", ".join(f"tl.load(a{i} + at)" for i in range(arity))
            path = tmp_path_factory.mktemp("kernels") / f"lib_{name}.py"
            path.write_text(
                textwrap.dedent(
                    f"""
                    import triton
                    import triton.language as tl
                    from triton.language.extra import libdevice

                    @triton.jit
                    def kernel({", ".join(f"a{i}" for i in range(arity))}, out, B: tl.constexpr):
                        at = tl.program_id(0) * B + tl.arange(0, B)
                        tl.store(out + at, libdevice.{name}({arguments}))
                    """
                )
            )
            spec = importlib.util.spec_from_file_location(f"lib_{name}", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            kernels[name] = module.kernel
        return kernels[name]

    return make


def apply(buffer, kernel, arrays, out_dtype, label=""):
    padded = [np.resize(array, 32) for array in arrays]
    given = [buffer(f"a{i}{label}", torch.from_numpy(array)) for i, array in enumerate(padded)]
    out = buffer(f"out{label}", torch.zeros(32, dtype=out_dtype))
    kernel[(2,)](*given, out, B=16)
    return padded, out.numpy()


def pointwise(function, *arrays):
    """The function of Python's `math`, with what C gives where Python raises."""

    def one(*values):
        try:
            return function(*values)
        except ValueError:
            return math.nan
        except OverflowError:
            return math.inf

    return np.array([one(*values) for values in zip(*[a.tolist() for a in arrays], strict=True)])


ONE = {
    "exp": math.exp, "exp2": math.exp2, "expm1": math.expm1, "log1p": math.log1p,
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "asin": math.asin, "acos": math.acos,
    "atan": math.atan, "sinh": math.sinh, "cosh": math.cosh, "tanh": math.tanh,
    "asinh": math.asinh, "acosh": math.acosh, "atanh": math.atanh, "erf": math.erf,
    "erfc": math.erfc,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", sorted(ONE))
def test_transcendental_functions_are_within_an_ulp(buffer, mapped, name, dtype):
    if not hasattr(libdevice, name):
        pytest.skip(f"this Triton's libdevice has no {name}")
    values = VALUES.astype(dtype)
    if name in ("atanh", "sinh"):  # poles, where Python raises without saying which infinity
        values = values[np.abs(values) != 1]
        values = values[(np.abs(values) < 80) | ~np.isfinite(values)]
    given = torch.float32 if dtype == np.float32 else torch.float64
    (x,), found = apply(buffer, mapped(name, 1), [values], given)
    expected = pointwise(ONE[name], x.astype(np.float64)).astype(dtype)
    np.testing.assert_allclose(found, expected, rtol=2 * np.finfo(dtype).eps, atol=0)


EXACT = {
    "rint": np.rint, "nearbyint": np.rint, "trunc": np.trunc, "floor": np.floor, "ceil": np.ceil,
    "sqrt": np.sqrt, "abs": np.abs,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", sorted(EXACT))
def test_rounding_functions_are_exact_to_the_sign_of_zero(buffer, mapped, name, dtype):
    if not hasattr(libdevice, name):
        pytest.skip(f"this Triton's libdevice has no {name}")
    given = torch.float32 if dtype == np.float32 else torch.float64
    (x,), found = apply(buffer, mapped(name, 1), [VALUES.astype(dtype)], given)
    with np.errstate(invalid="ignore"):
        expected = EXACT[name](x)
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(found)
    np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(expected)[numbers])


def test_rounding_half_goes_away_from_zero(buffer, mapped):
    values = np.array([0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, 8388609.0], np.float32)
    _, found = apply(buffer, mapped("round", 1), [values], torch.float32)
    assert found[:7].tolist() == [1, -1, 2, 3, -3, 0, 8388609]


def test_classes_and_exponents_are_int32(buffer, mapped):
    classes = {
        "isnan": lambda v: int(v != v),
        "isinf": lambda v: int(abs(v) == math.inf),
        "finitef": lambda v: int(math.isfinite(v)),
        "signbit": lambda v: int(math.copysign(1, v) < 0),
        "ilogb": lambda v: (
            -(2**31) if v == 0 else 2**31 - 1 if not math.isfinite(v) else math.frexp(v)[1] - 1
        ),
    }
    values = np.array([*VALUES[:-1], abs(VALUES[-1]), 1e-42], np.float32)
    for name, expected in classes.items():
        if not hasattr(libdevice, name):
            continue
        (x,), found = apply(buffer, mapped(name, 1), [values], torch.int32, name)
        assert found.tolist() == [expected(value) for value in x.tolist()], name


def test_functions_of_two_arguments(buffer, mapped):
    a = np.array([5.5, -5.5, 1.0, -0.0, 3.0, 1e-40, np.inf, 2.0] * 2, np.float32)
    b = np.array([2.0, 2.0, -0.0, 3.0, -np.inf, 1.0, 2.0, 0.5] * 2, np.float32)[::-1].copy()
    with np.errstate(all="ignore"):
        expected = {
            "fmod": np.fmod(a, b),
            "copysign": np.copysign(a, b),
            "nextafter": np.nextafter(a, b),
            "atan2": np.arctan2(a.astype(np.float64), b).astype(np.float32),
            "hypot": np.hypot(a.astype(np.float64), b).astype(np.float32),
            "pow": np.power(a.astype(np.float64), b).astype(np.float32),
        }
    for name, wanted in expected.items():
        if hasattr(libdevice, name):
            _, found = apply(buffer, mapped(name, 2), [a, b], torch.float32, name)
            np.testing.assert_array_equal(found[:16], wanted, err_msg=name)


def test_powers_and_scalings_by_an_integer(buffer, mapped):
    a = np.array([2.0, -2.0, 3.0, 0.5, 1e-3, 1.0, -1.5, 7.0], np.float32)
    n = np.array([3, 3, -2, 140, 2, -5, 4, 0], np.int32)
    _, found = apply(buffer, mapped("pow", 2), [a, n], torch.float32, "pow")
    wanted = [float(np.float32(float(x) ** int(y))) for x, y in zip(a, n, strict=True)]
    assert found[:8].tolist() == wanted
    _, found = apply(buffer, mapped("ldexp", 2), [a, n], torch.float32, "ldexp")
    with np.errstate(over="ignore"):
        wanted = np.ldexp(a.astype(np.float64), n).astype(np.float32)[:8].tolist()
    assert found[:8].tolist() == wanted


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_leading_zeros_bits_and_magnitudes_of_integers(buffer, mapped, dtype):
    info = np.iinfo(dtype)
    values = np.array([0, 1, 2, 255, 256, -1, info.min, info.max, 12345, 1 << 20], dtype)
    if not hasattr(libdevice, "clz"):
        pytest.skip("this Triton's libdevice has no functions of integers")
    (x,), zeros = apply(buffer, mapped("clz", 1), [values], torch.int32, "clz")
    unsigned = [value % (1 << info.bits) for value in x.tolist()]
    assert zeros.tolist() == [info.bits - value.bit_length() for value in unsigned]
    _, ones = apply(buffer, mapped("popc", 1), [values], torch.int32, "popc")
    assert ones.tolist() == [value.bit_count() for value in unsigned]
    _, magnitudes = apply(
        buffer, mapped("abs", 1), [values], torch.int32 if info.bits == 32 else torch.int64, "abs"
    )
    assert magnitudes.tolist() == [abs(v) if v != info.min else v for v in x.tolist()]


def test_rounding_to_int64_saturates(buffer, mapped):
    values = np.array([0.5, 1.5, -2.5, 1e30, -1e30, np.nan, 2.0**62, -(2.0**63)], np.float64)
    _, found = apply(buffer, mapped("llrint", 1), [values], torch.int64)
    top, bottom = 2**63 - 1, -(2**63)
    assert found[:8].tolist() == [0, 2, -2, top, bottom, 0, 2**62, bottom]


def test_fast_functions_are_their_short_formulas(buffer, mapped):
    x = np.linspace(-9, 9, 32, dtype=np.float32)
    _, found = apply(buffer, mapped("fast_expf", 1), [x], torch.float32, "e")
    np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=2e-6)
    _, found = apply(buffer, mapped("fast_dividef", 2), [x, x[::-1].copy()], torch.float32, "d")
    np.testing.assert_allclose(found, x / x[::-1], rtol=2.0**-22)
    if hasattr(libdevice, "fast_tanhf"):
        _, found = apply(buffer, mapped("fast_tanhf", 1), [x], torch.float32, "t")
        np.testing.assert_allclose(found, np.tanh(x), rtol=1e-5, atol=1e-6)


@core.extern
def half(arg0, _semantic=None):
    return core.extern_elementwise(
        "", "", [arg0],
        {
            (core.dtype("fp16"),): ("__ocml_exp2_f16", core.dtype("fp16")),
            (core.dtype("fp32"),): ("__ocml_exp2_f16", core.dtype("fp32")),
            (core.dtype("fp64"),): ("__ocml_frobnicate_f64", core.dtype("fp64")),
        },
        is_pure=True, _semantic=_semantic,
    )  # fmt: skip


@triton.jit
def half_kernel(a, out):
    at = tl.arange(0, 16)
    tl.store(out + at, half(tl.load(a + at)))


def test_half_precision_symbols_round_once(buffer):
    a = np.linspace(-20, 18, 16).astype(np.float16)
    out = buffer("out", torch.zeros(16, dtype=torch.float16))
    half_kernel[(1,)](buffer("a", torch.from_numpy(a)), out)
    with np.errstate(over="ignore"):
        expected = np.exp2(a.astype(np.float64)).astype(np.float16)
    np.testing.assert_array_equal(out.numpy(), expected)


def test_a_symbol_that_is_unknown_or_of_another_width_is_refused(buffer):
    for dtype, name in ((torch.float64, "frobnicate_f64"), (torch.float32, "exp2_f16 on f32")):
        a, out = (buffer(f"{n}{name}", torch.zeros(16, dtype=dtype)) for n in ("a", "out"))
        with pytest.raises(UnsupportedOp, match=f"tt.extern_elementwise __ocml_{name}") as refusal:
            half_kernel[(1,)](a, out)
        assert refusal.value.file == "test_extern.py"


def test_every_symbol_can_be_computed():
    for symbol, compute in SYMBOLS.items():
        width = symbol.rsplit("_", 1)[1]
        dtype = {
            "f16": np.uint16, "f64": np.float64, "u32": np.int32, "u64": np.int64, "iabs": np.int32,
        }.get(width, np.float32)  # fmt: skip
        one = np.ones((2, 3), dtype)
        second = one.astype(np.int32) if "ldexp" in symbol or "pown" in symbol else one
        arity = 3 if "fma_" in symbol else 2 if any(
            f"_{name}_" in symbol
            for name in ("copysign", "fmod", "fmax", "fmin", "atan2", "hypot", "pow", "pown",
                         "nextafter", "ldexp")
        ) or symbol.endswith("fdividef") else 1  # fmt: skip
        with np.errstate(divide="ignore", invalid="ignore"):
            result = compute(*(one, second, one)[:arity])
        assert result.shape == (2, 3), symbol
    assert supported()["extern symbols"] == tuple(sorted(SYMBOLS))


@triton.jit
def every_special(a, out):
    at = tl.arange(0, 16)
    x = tl.load(a + at)
    tl.store(out + at, libdevice.erfinv(x))
    tl.store(out + 16 + at, libdevice.erfcx(x))
    tl.store(out + 32 + at, libdevice.cyl_bessel_i0(x))
    tl.store(out + 48 + at, libdevice.j0(x))
    tl.store(out + 64 + at, libdevice.lgamma(x))


def test_special_functions_satisfy_what_defines_them(buffer):
    x = np.linspace(-0.9, 0.95, 16).astype(np.float32)
    out = buffer("out", torch.zeros(5, 16))
    every_special[(1,)](buffer("a", torch.from_numpy(x)), out)
    inverse, scaled, i0, j0, lgamma = out.numpy().astype(np.float64)
    np.testing.assert_allclose([math.erf(v) for v in inverse], x, rtol=1e-6)
    expected = [math.exp(float(v) ** 2) * math.erfc(v) for v in x]
    np.testing.assert_allclose(scaled, expected, rtol=1e-6)
    series = [sum((float(v) ** 2 / 4) ** k / math.factorial(k) ** 2 for k in range(20)) for v in x]
    np.testing.assert_allclose(i0, series, rtol=1e-6)
    series = [
        sum((-(float(v) ** 2) / 4) ** k / math.factorial(k) ** 2 for k in range(20)) for v in x
    ]
    np.testing.assert_allclose(j0, series, rtol=1e-6)
    np.testing.assert_allclose(lgamma, [math.lgamma(v) for v in x], rtol=1e-6)
