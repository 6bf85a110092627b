"""Every function of `triton.language`, compared with Triton's own interpreter.

The interpreter is a second opinion where no float narrows; it runs in a process of its own. What it
gets wrong (bf16 products, fp8) is tested elsewhere against NumPy.
"""

import importlib.util
import pickle
import re
import subprocess
import sys
import textwrap

import pytest
import torch
import triton
import triton.language as tl

HEADER = """
import pickle
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def pairs(a, b, c, d):
    return a + c, tl.maximum(b, d)


def arguments():
    torch.manual_seed(0)
    x = torch.randperm(128, dtype=torch.int32) - 50
    y = torch.rand(128) * 4 - 1
    return x, y, torch.zeros(1024, dtype=torch.int32), torch.zeros(1024), 7, 2.5
"""

# One kernel each: `x` int32 `[64]`, `y` fp32 `[64]` and `x2`, `y2` `[8, 8]` are loaded per program,
# `at` counts them, `n` is 7, `s` is 2.5; results go to `o` (int32) and `f` (fp32), `[512]` each.
SNIPPETS = """
tl.store(f + at, tl.abs(y) + tl.ceil(y) + tl.floor(y) + tl.cast(x, tl.float32))
tl.store(o + at, tl.add(x, n) + tl.sub(x, n) * tl.mul(x, n) + tl.abs(x))
tl.store(o + at, tl.argmax(x, 0) + tl.argmin(x, 0) + tl.max(x, 0) - tl.min(x, 0))
tl.store(o + eight, tl.argmax(x2, 1, tie_break_left=False) + tl.argmin(x2 // 9, 0))
a, b = tl.max(y2, 1, return_indices=True); tl.store(o + eight, b); tl.store(f + eight, a)
tl.store(f + at, tl.associative_scan(y, 0, plus, reverse=True))
a, b = tl.associative_scan((y2, x2), 1, pairs); tl.store(f + at, tl.ravel(a)); tl.store(o + at, tl.ravel(b))
a, b = tl.associative_scan((y, x), 0, pairs, reverse=True); tl.store(f + at, a); tl.store(o + at, b)
a, b = tl.reduce((y2, x2), 0, pairs); tl.store(f + eight, a); tl.store(o + eight, b)
tl.store(f, tl.reduce(y, None, plus)); tl.store(f + 1, tl.sum(y2))
tl.assume(n > 0); tl.store(o, tl.sum(x, keep_dims=True).reshape(()))
tl.store(o + at, tl.atomic_add(o + 64 + at % 3, x, mask=x > 0) * 0 + 1)
tl.store(o + at, tl.atomic_xchg(o + 64 + at, x) + tl.atomic_cas(o + 128 + at, at * 0, x))
tl.atomic_max(o + at % 8, x); tl.atomic_min(o + 8 + at % 8, x); tl.atomic_or(o + 16 + at % 8, x)
tl.atomic_and(o + at % 8, x); tl.atomic_xor(o + 8 + at % 8, x)
tl.atomic_max(f + at % 8, y); tl.atomic_min(f + 8 + at % 8, y)
tl.store(o + at, tl.bitonic_merge(tl.sort(x), 0))
tl.store(o + at, tl.sum(tl.broadcast_to(x[:, None], (64, 8)), 1))
a, b = tl.broadcast(x, x + n); tl.store(o + at, a * b)
tl.store(o + tl.arange(0, 128), tl.cat(x, x + 1, can_reorder=True))
tl.store(o + at, tl.cdiv(x + 50, 3) + tl.cumsum(x, 0, reverse=True) + tl.cumprod(x % 2, 0))
tl.store(f + at, tl.clamp(y, 0.0, s))
tl.store(f + at, tl.cos(y) + tl.sin(y) + tl.erf(y) + tl.exp(y) + tl.exp2(y))
tl.debug_barrier(); tl.device_assert(n > 0); tl.static_assert(True); tl.store(o, tl.num_programs(0))
tl.store(f + at, tl.div_rn(y, s) + tl.fdiv(y, s) + tl.fma(y, s, y))
a = tl.dot(tl.reshape(tl.interleave(y, y), (4, 32)).trans(), tl.reshape(tl.interleave(y, y), (4, 32)), input_precision="ieee"); tl.store(f + tl.arange(0, 512), tl.reshape(a, (2, 512)).sum(0))
tl.store(o + at, tl.ravel(tl.expand_dims(x, 0)) + tl.unsqueeze(x, 0).reshape(64) + tl.squeeze(x[None, :], 0))
tl.store(o + at, tl.flip(x, 0) + tl.ravel(tl.flip(x2, 1)))
tl.store(f + at, tl.full([64], s, tl.float32) + tl.zeros([64], tl.float32) + tl.zeros_like(y))
tl.store(o + at, tl.gather(x, at ^ 5, 0) + tl.ravel(tl.gather(x2, (x2 + 50) % 8, 1)))
tl.store(o + tl.arange(0, 16), tl.histogram((x + 50) % 16, 16))
tl.store(o + tl.arange(0, 128), tl.interleave(x, x + 1))
a, b = tl.split(tl.join(x, x + 3)); tl.store(o + at, a * b)
tl.store(f + at, tl.log(y + 2) + tl.log2(y + 2) + tl.rsqrt(y + 2) + tl.sqrt(y + 2) + tl.sqrt_rn(y + 2))
tl.store(o + at, tl.max_contiguous(tl.multiple_of(at, 8), 8) + tl.max_constancy(at, 1))
tl.store(o + at, tl.maximum(x, n) * 100 + tl.minimum(x, n)); tl.store(f + at, tl.maximum(y, s))
tl.store(f + at, tl.pair_uniform_to_normal((y + 1) / 8, (y + 1) / 8)[0])
tl.store(o + at, tl.ravel(tl.permute(x2, (1, 0))) + tl.ravel(tl.trans(x2)) * 3)
a, b, c, d = tl.philox(3, at, at + 1, at, at); tl.store(o + at, a ^ b ^ c ^ d)
a, b, c, d = tl.randint4x(3, at); tl.store(o + at, a ^ b ^ c ^ d); tl.store(o + 64 + at, tl.randint(5, at))
a, b, c, d = tl.rand4x(3, at); tl.store(f + at, a + b + c + d); tl.store(f + 64 + at, tl.rand(5, at))
a, b, c, d = tl.randn4x(3, at); tl.store(f + at, a + b + c + d); tl.store(f + 64 + at, tl.randn(5, at))
for i in tl.range(0, n, 2): tl.store(o + i, i)
for i in tl.range(n, 0, -1): tl.store(o + i, i)
for i in tl.static_range(4): tl.store(o + i, i + tl.program_id(1))
tl.store(o, tl.reduce_or(x, 0)); tl.store(o + 1, tl.xor_sum(x, 0))
tl.store(o + at, tl.reshape(tl.reshape(x, (2, 32)), (64,)))
tl.store(f + at, tl.sigmoid(y)); tl.store(f + 64 + at, tl.softmax(y))
tl.store(o + at, tl.sort(x, descending=True)); tl.store(o + 64 + at, tl.ravel(tl.sort(x2, 1)))
tl.store(o + eight, tl.topk(x, 8))
a, b = tl.swizzle2d(n, n - 1, 8, 8, 2); tl.store(o, a); tl.store(o + 1, b)
tl.store(o + at, tl.umulhi((x + 50) * 9999999, n)); tl.store(f + at, tl.uint_to_uniform_float(x))
tl.store(o + at, tl.where(x > y, x, n))
tl.store(o + at, tl.load(xp + at, mask=at < n, other=-3), mask=at > 2)
tl.store(o + at, (x // 3) % 5 + (x ^ 7) + (x | 1) + (x & 3) + (~x) + (x << 2) + (x >> 1) + (-x))
tl.store(o + at, (x.to(tl.uint32) // 3 + (x.to(tl.uint32) >> 1)).to(tl.int32))
tl.store(o + at, (x.to(tl.uint8) * 3 + x.to(tl.int16)).to(tl.int32) + x.to(tl.int64).to(tl.int32))
tl.store(f + at, x.to(tl.uint64).to(tl.float32) + x.to(tl.uint32).to(tl.float32) + y.to(tl.int32))
tl.store(f + at, y.to(tl.float64).to(tl.float32) * n + (y > s) + (x % 7) / 3)
""".strip()  # noqa: E501

# What has no result to compare: types and hints, and what is tested in a module of its own.
ELSEWHERE = {
    "atomic_load", "atomic_store", "atomic_poll",  # test_atomics
    "dot_scaled",  # test_scaled
    "inline_asm_elementwise",  # test_inline_asm
    "map_elementwise",  # test_elementwise_functions
    "make_tensor_descriptor", "load_tensor_descriptor", "store_tensor_descriptor",
    "device_print", "static_print",  # test_watch
    "arange", "static_assert",
    "condition", "expect_zero", "philox_impl", "to_tensor", "view",  # thin names for others
    "make_block_ptr", "advance",  # gone in Triton 3.9
}  # fmt: skip


def module_text():
    text = [HEADER]
    for number, snippet in enumerate(SNIPPETS.splitlines()):
        body = "\n".join("    " + line for line in snippet.split("; "))
        text.append(
            f"\n\n@triton.jit\ndef kernel{number}(xp, yp, o, f, n, s):\n"
            "    at, eight = tl.arange(0, 64), tl.arange(0, 8)\n"
            "    pid = tl.program_id(0)\n"
            "    x, y = tl.load(xp + pid * 64 + at), tl.load(yp + pid * 64 + at)\n"
            "    x2, y2 = tl.reshape(x, (8, 8)), tl.reshape(y, (8, 8))\n"
            "    o += pid * 512\n    f += pid * 512\n"
            f"{body}\n"
        )
    text.append(
        textwrap.dedent(
            """

            def run_all():
                results = {}
                for name, kernel in list(globals().items()):
                    if name.startswith("kernel"):
                        given = arguments()
                        try:
                            kernel[(2,)](*given)
                            results[name] = given[:4]
                        except Exception as error:
                            results[name] = f"{type(error).__name__}: {error}"
                return results


            if __name__ == "__main__":
                with open(sys.argv[1], "wb") as file:
                    pickle.dump(run_all(), file)
            """
        )
    )
    return "".join(text)


@pytest.fixture(scope="module")
def outcomes(active_lane, tmp_path_factory):
    """What the lane and the interpreter make of every snippet, by its number."""
    folder = tmp_path_factory.mktemp("language")
    path, dump = folder / "snippets.py", folder / "results.pickle"
    path.write_text(module_text())
    code = (
        "import os, runpy, sys; os.environ['TRITON_INTERPRET'] = '1';"
        f"sys.argv = ['x', {str(dump)!r}]; runpy.run_path({str(path)!r}, run_name='__main__')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as child:
        spec = importlib.util.spec_from_file_location("snippets", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        ours = module.run_all()
        _, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    return ours, pickle.loads(dump.read_bytes())


@pytest.mark.parametrize("number", range(len(SNIPPETS.splitlines())))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_lane_agrees_with_the_interpreter(outcomes, number):
    ours, theirs = (each[f"kernel{number}"] for each in outcomes)
    snippet = SNIPPETS.splitlines()[number]
    if "has no attribute" in str(ours) or "has no attribute" in str(theirs):
        pytest.skip(f"Triton {triton.__version__} does not have all of: {snippet}")
    assert not isinstance(ours, str), ours
    assert any(bool(each.any()) for each in ours[2:]), "the kernel stored nothing"
    if isinstance(theirs, str):
        pytest.skip(f"the interpreter cannot run: {snippet}")
    assert torch.equal(ours[2], theirs[2])
    torch.testing.assert_close(ours[3], theirs[3], rtol=2e-6, atol=2e-6)


def test_no_function_of_the_language_is_left_out():
    functions = {
        name
        for name in tl.__all__
        if callable(getattr(tl, name, None)) and not isinstance(getattr(tl, name), type)
        and not isinstance(getattr(tl, name), tl.dtype)
    }  # fmt: skip
    used = set(re.findall(r"\btl\.(\w+)", SNIPPETS))
    assert functions - used - ELSEWHERE - {"constexpr_type"} == set()
