import pytest

from kvfuzz.cpu import UnsupportedOp
from kvfuzz.cpu.decode import decode_module
from kvfuzz.cpu.ir import Location, Type
from kvfuzz.cpu.parse import parse_module
from kvfuzz.cpu.text import Locations, parse_type, split_top

LOCATIONS = """
#loc = loc("/src/kernel.py":10:0)
#loc1 = loc(unknown)
#loc2 = loc("/src/kernel.py":12:8)
#loc3 = loc("/src/helper.py":3:4)
#loc4 = loc("value"(#loc3))
#loc5 = loc(callsite(#loc4 at #loc2))
#loc6 = loc(callsite(#loc1 at #loc2))
#loc7 = loc(fused[#loc1, #loc2])
#loc8 = loc("name only")
#loc9 = loc("/src/kernel.py":20:1 to :20:9)
"""


def module(body, arguments="%p: !tt.ptr<i32>"):
    return f"""
#loc = loc("/src/kernel.py":10:0)
#loc1 = loc("/src/kernel.py":11:5)
module {{
  tt.func public @kernel({arguments} loc("p"(#loc))) attributes {{noinline = false}} {{
{body}
    tt.return loc(#loc)
  }} loc(#loc)
}} loc(#loc)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("i32", Type((), "i32")),
        ("tensor<4x128xbf16>", Type((4, 128), "bf16")),
        ("!tt.ptr<f8E4M3FNUZ>", Type((), "f8E4M3FNUZ", True)),
        ("!tt.ptr<f32, 1>", Type((), "f32", True)),
        ("tensor<8x!tt.ptr<i64>>", Type((8,), "i64", True)),
    ],
)
def test_types_are_read(text, expected):
    assert parse_type(text) == expected


def test_an_unknown_type_is_named():
    with pytest.raises(ValueError, match="type tensor<4xf4E2M1>"):
        parse_type("tensor<4xf4E2M1>")


def test_splitting_respects_brackets_strings_and_arrows():
    assert split_top('a, f(b, c) -> (d, e), "g, h"', ",") == ["a", "f(b, c) -> (d, e)", '"g, h"']
    assert split_top("(a) -> (b -> c)", "->") == ["(a)", "(b -> c)"]
    assert split_top("", ",") == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("#loc2", Location("/src/kernel.py", 12)),
        ("#loc4", Location("/src/helper.py", 3)),
        ("#loc5", Location("/src/helper.py", 3)),
        ("#loc6", Location("/src/kernel.py", 12)),
        ("#loc7", Location("/src/kernel.py", 12)),
        ("#loc8", Location("?", 0)),
        ("#loc1", Location("?", 0)),
        ("#loc9", Location("/src/kernel.py", 20)),
    ],
)
def test_locations_resolve_to_the_innermost_file(name, expected):
    assert Locations(LOCATIONS).find(name) == expected


@pytest.mark.parametrize(
    "policy",
    [
        "cacheModifier = cg evictionPolicy = evict_last",  # Triton 3.6
        "{cachePolicy = #tt.cache_policy<cache_modifier = cg, eviction_policy = evict_last>}",
        "{isVolatile = true}",
        "",
    ],
)
def test_a_load_is_read_with_any_cache_policy(policy):
    text = module(f"    %0 = tt.load %p {policy} : !tt.ptr<i32> loc(#loc1)")
    (function,) = parse_module(text).functions.values()
    load = function.blocks[0].ops[0]
    assert (load.name, load.operands, load.result_types) == ("tt.load", (0,), (Type((), "i32"),))
    assert load.location == Location("/src/kernel.py", 11)
    decode_module(parse_module(text))


def test_a_region_without_results_needs_no_printed_terminator():
    text = module(
        """
    %true = arith.constant true loc(#loc)
    %c1 = arith.constant 1 : i32 loc(#loc)
    scf.if %true {
      tt.store %p, %c1 : !tt.ptr<i32> loc(#loc1)
    } else {
    } loc(#loc)
    scf.for %i = %c1 to %c1 step %c1  : i32 {
      tt.store %p, %i : !tt.ptr<i32> loc(#loc1)
    } {tt.num_stages = 2 : i32} loc(#loc)"""
    )
    program = decode_module(parse_module(text))
    assert len(program.entry.blocks[0].ops) == 4


def test_blocks_may_be_printed_in_any_order():
    branches = """
    %true = arith.constant true loc(#loc)
    cf.cond_br %true, ^bb2, ^bb1 loc(#loc)
  ^bb1:  // 2 preds: ^bb0, ^bb2
    cf.br ^bb3(%true : i1) loc(#loc)
  ^bb2:  // pred: ^bb0
    cf.cond_br %true, ^bb1, ^bb1 loc(#loc1)
  ^bb3(%done: i1 loc("done"(#loc))):  // pred: ^bb1"""
    program = decode_module(parse_module(module(branches)))
    assert [[t.block for t in code.targets] for code in program.entry.blocks] == [
        [1, 2],
        [2, 2],
        [3],
        [],
    ]


@pytest.mark.parametrize(
    ("body", "op", "line"),
    [
        ("    %0 = tt.dance %p : !tt.ptr<i32> loc(#loc1)", "tt.dance", 11),
        ("    %0 = tt.load %p : !tt.ptr<f4E2M1> loc(#loc1)", "tt.load", 11),
        ("    %0 = tt.load %unknown : !tt.ptr<i32> loc(#loc1)", "tt.load", 11),
    ],
)
def test_what_cannot_be_read_or_run_is_refused_with_its_place(body, op, line):
    with pytest.raises(UnsupportedOp) as refusal:
        decode_module(parse_module(module(body)))
    assert refusal.value.op.startswith(op)
    assert (refusal.value.file, refusal.value.line) == ("kernel.py", line)
