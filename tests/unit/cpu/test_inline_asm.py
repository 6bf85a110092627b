# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.hip import utils

from kvfuzz.cpu import UnsupportedOp
from kvfuzz.cpu.inline_asm import INSTRUCTIONS

LOW = 0xFFFFFFFF


@triton.jit
def assembled(a, b, c, out, TEXT: tl.constexpr, SOURCES: tl.constexpr):
    at = tl.program_id(0) * 16 + tl.arange(0, 16)
    x, y, z = tl.load(a + at), tl.load(b + at), tl.load(c + at)
    if SOURCES == 1:
        result = tl.inline_asm_elementwise(TEXT, "=v,v", [x], tl.int32, True, 1)
    elif SOURCES == 2:
        result = tl.inline_asm_elementwise(TEXT, "=v,v,v", [x, y], tl.int32, True, 1)
    else:
        result = tl.inline_asm_elementwise(TEXT, "=v,v,v,v", [x, y, z], tl.int32, True, 1)
    tl.store(out + at, result)


@triton.jit
def bits_of(a, out):
    at = tl.arange(0, 16)
    x = tl.inline_asm_elementwise("v_mov_b32 $0, $1", "=v,v", [tl.load(a + at)], tl.int32, True, 1)
    tl.store(out + at, x)


@triton.jit
def packed(a, out):
    at = tl.arange(0, 16)
    x = tl.inline_asm_elementwise("v_mov_b32 $0, $1", "=v,v", [tl.load(a + at)], tl.int16, True, 2)
    tl.store(out + at, x)


@triton.jit
def timed(out, turns):
    before = utils.memrealtime()
    total = tl.load(out) * 0
    while total < turns:
        total += 1
        tl.store(out, total)
    tl.store(out, utils.memrealtime() - before)


def as_signed(value):
    return value - (1 << 32) if value >> 31 else value


# By opcode, on Python's integers: a, b and c are 0..2**32-1.
MEANINGS = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: LOW - a,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_u32_u24": lambda a, b: (a % 2**24) * (b % 2**24),
    "v_min_u32": lambda a, b: min(a, b),
    "v_max_u32": lambda a, b: max(a, b),
    "v_min_i32": lambda a, b: min(a, b, key=as_signed),
    "v_max_i32": lambda a, b: max(a, b, key=as_signed),
    "v_lshlrev_b32": lambda a, b: b << (a % 32),
    "v_lshrrev_b32": lambda a, b: b >> (a % 32),
    "v_ashrrev_i32": lambda a, b: as_signed(b) >> (a % 32),
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b % 32)) + c,
    "v_lshl_or_b32": lambda a, b, c: (a << (b % 32)) % 2**32 | c,
    "v_bfi_b32": lambda a, b, c: a & b | (LOW - a) & c,
    "v_bfe_u32": lambda a, b, c: (a >> (b % 32)) % (1 << (c % 32)),
    "v_alignbit_b32": lambda a, b, c: (a * 2**32 + b) >> (c % 32),
}


@pytest.fixture
def registers(buffer):
    rng = np.random.default_rng(4)
    rows = rng.integers(0, 1 << 32, (3, 32), np.uint32)
    rows[:, :4] = [[0, LOW, 1 << 31, 5], [31, 33, LOW, 0], [0, 1, 31, LOW]]
    views = [
        buffer(name, torch.from_numpy(row.view(np.int32)))
        for name, row in zip("abc", rows, strict=True)
    ]
    return views, rows.tolist()


def test_known_instructions_do_what_the_manual_says(registers, buffer):
    assert MEANINGS.keys() == INSTRUCTIONS.keys()
    views, rows = registers
    for opcode, meaning in MEANINGS.items():
        sources = meaning.__code__.co_argcount
        text = f"{opcode} $0, " + ", ".join(f"${i + 1}" for i in range(sources))
        out = buffer(f"out {opcode}", torch.zeros(32, dtype=torch.int32))
        assembled[(2,)](*views, out, TEXT=text, SOURCES=sources)
        expected = [meaning(*values) % 2**32 for values in zip(*rows[:sources], strict=True)]
        assert out.numpy().view(np.uint32).tolist() == expected, opcode


def test_operands_are_taken_by_their_numbers(registers, buffer):
    views, rows = registers
    out = buffer("out", torch.zeros(32, dtype=torch.int32))
    assembled[(2,)](*views, out, TEXT="v_sub_u32_e32 $0, $2, $1;", SOURCES=2)
    expected = [(b - a) % 2**32 for a, b in zip(*rows[:2], strict=True)]
    assert out.numpy().view(np.uint32).tolist() == expected


def test_floats_are_seen_as_bits(buffer):
    values = torch.linspace(-2, 2, 16)
    out = buffer("out", torch.zeros(16, dtype=torch.int32))
    bits_of[(1,)](buffer("a", values), out)
    assert torch.equal(out, values.view(torch.int32))


@pytest.mark.parametrize(
    "text",
    ["v_dance_b32 $0, $1, $2", "v_add_u32 $0, $1, $1", "v_mov_b32 $0, $1\nv_not_b32 $0, $2"],
)
def test_text_that_is_not_known_is_refused_and_quoted(registers, buffer, text):
    out = buffer("out", torch.zeros(32, dtype=torch.int32))
    with pytest.raises(UnsupportedOp) as refusal:
        assembled[(2,)](*registers[0], out, TEXT=text, SOURCES=2)
    assert refusal.value.op.startswith('tt.elementwise_inline_asm "' + text.split("\n")[0])
    assert refusal.value.file == "test_inline_asm.py"


@triton.jit
def address(a, out):
    x = tl.inline_asm_elementwise("v_mov_b32 $0, $1", "=v,v", [a], tl.int32, True, 1)
    tl.store(out, x)


@pytest.mark.parametrize(("kernel", "dtype"), [(packed, torch.int16), (address, torch.int32)])
def test_registers_that_hold_no_single_32_bit_number_are_refused(buffer, kernel, dtype):
    a, out = (buffer(name, torch.zeros(16, dtype=dtype)) for name in ("a", "out"))
    with pytest.raises(UnsupportedOp, match=r"tt\.elementwise_inline_asm"):
        kernel[(1,)](a, out)


def test_the_clock_of_tritons_library_advances_while_a_kernel_loops(buffer):
    out = buffer("out", torch.zeros(1, dtype=torch.int64))
    timed[(1,)](out, 100)
    first = out.item()
    assert first >= 100
    timed[(1,)](out, 100)
    assert out.item() == first
