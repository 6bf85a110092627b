"""How kernels are launched and specialised, as Triton does it for HIP."""

# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import mmap
import re

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

MAP_NORESERVE = 0x4000


@triton.jit
def touch(a, n, out):
    tl.store(out, tl.load(a) + n)


@triton.jit
def offset_first(a, n, out):
    tl.store(out, tl.load(a + n.to(tl.int64) * 1024))


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 8, "TWICE": True}, num_warps=1, num_stages=3),
        triton.Config({"BLOCK": 32, "TWICE": False}, num_warps=8),
    ],
    key=["length"],
    reset_to_zero=["out"],
)
@triton.heuristics({"EVEN": lambda arguments: arguments["length"] % arguments["BLOCK"] == 0})
@triton.jit
def tuned_and_guessed(out, length, BLOCK: tl.constexpr, TWICE: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, (2 if TWICE else 1) + EVEN * 100, mask=at < length)


@triton.jit
def scaled(x, factor):
    return x * factor


@triton.jit
def tuples(out, places, SIZES: tl.constexpr, function: tl.constexpr, pair):
    tl.store(out + places[0], SIZES[0] + SIZES[1][1])
    tl.store(out + places[1], function(pair[1], SIZES[0]))
    tl.store(out + 3, tl.load(pair[0]) + len(SIZES))


def attributes(kernel):
    """The attributes of each argument in the compiled kernel."""
    text = kernel.asm["ttir"]
    text = text if isinstance(text, str) else str(text)
    header = next(line for line in text.splitlines() if "tt.func public" in line)
    found = re.findall(r"%(\w+): ([^\s{,)]+)(?: \{([^}]*)\})?", header)
    return {name: set(re.findall(r"tt\.(\w+ = \d+)", marks)) for name, _, marks in found}


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_integers_are_specialised_on_one_and_on_multiples_of_sixteen(buffer):
    a, out = buffer("a", ints(5)), buffer("out", ints(0))
    seen = {}
    for n in (1, 2, 16, 48, 17):
        seen[n] = attributes(touch[(1,)](a, n, out))
        assert out.item() == 5 + n
    assert "n" not in seen[1]  # a constant now
    assert seen[2]["n"] == seen[17]["n"] == set()
    assert seen[16]["n"] == seen[48]["n"] == {"divisibility = 16"}


def test_pointers_are_specialised_on_alignment(buffer):
    a, out = buffer("a", ints(*range(16))), buffer("out", ints(0))
    assert "divisibility = 16" in attributes(touch[(1,)](a, 2, out))["a"]
    assert "divisibility = 16" in attributes(touch[(1,)](a[4:], 2, out))["a"]
    assert "divisibility = 16" not in attributes(touch[(1,)](a[3:], 2, out))["a"]
    assert out.item() == 5


@pytest.mark.parametrize(("gib", "small"), [(1, True), (3, False)])
def test_a_pointer_has_a_range_of_32_bits_only_up_to_two_gib_of_storage(buffer, gib, small):
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    with mmap.mmap(-1, gib << 30, flags=flags) as memory:
        a = torch.frombuffer(memory, dtype=torch.int32)
        last = (gib << 28) - 1024
        a[0], a[last] = 7, 9
        out = buffer("out", ints(0))
        # A view of a few bytes counts by the storage that it lies in.
        kernel = touch[(1,)](a[:16], 2, out)
        assert ("pointer_range = 32" in attributes(kernel)["a"]) is small
        assert "pointer_range = 32" in attributes(kernel)["out"]
        assert out.item() == 9
        offset_first[(1,)](a, last // 1024, out)
        assert out.item() == 9
        del a


def test_autotuning_and_heuristics_together_are_pinned_and_recorded(lane, buffer):
    out = buffer("out", torch.zeros(24, dtype=torch.int32))
    for length, even in ((24, 1), (20, 0)):
        out.fill_(-1)
        with lane.observe() as access:
            tuned_and_guessed[lambda meta: (triton.cdiv(24, meta["BLOCK"]),)](out, length)
        launch = access.launches[-1]
        assert launch.constexprs == {"BLOCK": 8, "TWICE": True, "EVEN": bool(even)}
        assert (launch.options["num_warps"], launch.options["num_stages"]) == (1, 3)
        assert out.tolist()[:length] == [2 + 100 * even] * length


def test_a_warmup_compiles_and_runs_nothing(lane, buffer):
    out = buffer("out", ints(0))
    with lane.observe() as access:
        kernel = touch.warmup(torch.int32, 3, torch.int32, grid=(1,))
        touch.warmup(buffer("a", ints(4)), 3, out, grid=(1,))
    assert kernel.name == "touch"
    assert access.launches == []
    assert out.item() == 0


def test_tuples_and_functions_are_arguments(lane, buffer):
    out = buffer("out", ints(0, 0, 0, 0))
    given = buffer("given", ints(40))
    with lane.observe() as access:
        tuples[(1,)](out, (2, 1), (3, (4, 5)), scaled, (given, 6))
    assert out.tolist() == [0, 18, 8, 42]
    assert access.launches[0].kernel == "tuples"


def test_keywords_and_order_of_arguments_do_not_matter(buffer):
    a, out = buffer("a", ints(5)), buffer("out", ints(0))
    touch[(1, 1, 1)](out=out, n=3, a=a)
    assert out.item() == 8
    touch.run(a, 4, out, grid=(1,), warmup=False)
    assert out.item() == 9


def test_launch_hooks_are_called_around_the_launch(lane, buffer):
    a, out = buffer("a", ints(5)), buffer("out", ints(0))
    seen = []
    enter, leave = (
        lambda metadata: seen.append(("enter", metadata.get()["name"], out.item())),
        lambda metadata: seen.append(("exit", metadata.get()["name"], out.item())),
    )
    knobs.runtime.launch_enter_hook.add(enter)
    knobs.runtime.launch_exit_hook.add(leave)
    try:
        touch[(1,)](a, 2, out)
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
        knobs.runtime.launch_exit_hook.remove(leave)
    assert seen == [("enter", "touch", 0), ("exit", "touch", 7)]
    touch[(1,)](a, 3, out)
    assert len(seen) == 2
