# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import re

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver, jit

from kvfuzz.cpu import CpuLane
from kvfuzz.kernels.builtin.gather_cache import gather_cache_kernel
from kvfuzz.kernels.builtin.reshape_and_cache import reshape_and_cache_kernel


@triton.jit
def strided(out, start, stride, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK) * stride
    tl.store(out + at, at)


@pytest.fixture
def bare():
    """A lane that leaves hints out."""
    lane = CpuLane(hints=False)
    lane.activate()
    yield lane
    lane.deactivate()


def programs(kernel):
    """The compiled programs of a kernel on the active lane, with the types of their arguments."""
    cache = kernel.device_caches[driver.active.get_current_device()][0]
    return {id(each.function): each for each in cache.values()}.values()


def test_alignment_and_size_make_no_program_of_their_own(bare):
    out = torch.zeros(4096, dtype=torch.int32)
    for start, stride in ((16, 16), (16, 3), (5, 32), (7, 2), (-8, 6)):
        for view in (out[32:], out[33:]):
            strided[(1,)](view, start, stride, BLOCK=16)
    (only,) = programs(strided)
    assert dict(only.src.signature) == {
        "out": "*i32", "start": "i32", "stride": "i32", "BLOCK": "constexpr",
    }  # fmt: skip


def test_what_changes_types_is_specialised_still(bare):
    out = torch.zeros(64, dtype=torch.int32)
    strided[(1,)](out, 4, 2, BLOCK=8)
    strided[(1,)](out, 4, 1, BLOCK=8)
    strided[(1,)](out.long(), 4, 2, BLOCK=8)
    with bare.observe() as access:
        strided[(1,)](out, 1 << 40, 2, BLOCK=8)
    assert len(access.strays) == 1
    kinds = [tuple(each.src.signature.values()) for each in programs(strided)]
    assert kinds == [
        ("*i32", "i32", "i32", "constexpr"),
        ("*i32", "i32", "constexpr", "constexpr"),
        ("*i64", "i32", "i32", "constexpr"),
        ("*i32", "i64", "i32", "constexpr"),
    ]


def test_a_lane_that_is_given_up_leaves_triton_as_it_was():
    before = jit.native_specialize_impl
    lane = CpuLane(hints=False)
    lane.activate()
    assert jit.native_specialize_impl is not before
    lane.deactivate()
    assert jit.native_specialize_impl is before


@pytest.mark.parametrize(
    "kernel", [gather_cache_kernel, reshape_and_cache_kernel], ids=lambda each: each.__name__
)
def test_hints_change_nothing_but_attributes_of_arguments(bare, kernel):
    """Every argument a multiple of 16 and below 2 GiB, or none: the same text in between."""
    sizes = {"HEAD_SIZE": 80, "PADDED_HEAD_SIZE": 128, "X": 8}
    constants = {name: sizes.get(name, False) for name in kernel.arg_names if name.isupper()}
    signature = {
        name: "constexpr"
        if name in constants
        else "*i64"
        if name == "slot_mapping_ptr"
        else "*fp16"
        if name.endswith("_ptr") and name.startswith(("k", "v"))
        else "*i32"
        if name.endswith("_ptr")
        else "i64"
        if "stride" in name
        else "i32"
        for name in kernel.arg_names
    }
    texts = []
    for hints in ([], [["tt.divisibility", 16], ["tt.pointer_range", 32]]):
        places = {(at,): hints for at, kind in enumerate(signature.values()) if kind != "constexpr"}
        source = triton.compiler.ASTSource(kernel, signature, constants, places)
        texts.append(triton.compile(source).asm["ttir"])
    plain, hinted = texts
    assert hinted.count("tt.divisibility") == len(places)
    assert "tt.divisibility" not in plain
    marks = r" \{tt\.divisibility = 16 : i32, tt\.pointer_range = 32 : i32\}"
    assert re.sub(marks, "", hinted) == plain
