import json

import pytest

from kvfuzz.cpu.decode import TERMINATORS, decode_module
from kvfuzz.cpu.inventory import supported
from kvfuzz.cpu.parse import parse_module

# What the lane is meant to run, written down apart from the code that runs it.
REQUIRED = {
    "arith ops": """addf addi andi bitcast ceildivsi cmpf cmpi constant divf divsi divui extf extsi
        extui fptosi fptoui maximumf maxnumf maxsi maxui minimumf minnumf minsi minui mulf muli negf
        ori remf remsi remui select shli shrsi shrui sitofp subf subi truncf trunci uitofp xori""",
    "math ops": "absf ceil cos erf exp exp2 floor fma log log2 rsqrt sin sqrt",
    "tt ops": """addptr assert atomic_cas atomic_rmw atomic_load atomic_store atomic_poll bitcast
        broadcast call cat clampf dot dot_scaled elementwise_inline_asm expand_dims
        extern_elementwise fp_to_fp gather get_num_programs get_program_id histogram int_to_ptr join
        load make_range map_elementwise mulhiui precise_divf precise_sqrt print ptr_to_int reduce
        reshape return scan split splat store trans""",
    "scf ops": "for if while yield condition",
    "cf ops": "br cond_br",
    "ub ops": "poison",
    "ttg ops": "barrier",
    "gpu ops": "barrier",
}


@pytest.mark.parametrize("family", sorted(REQUIRED))
def test_every_required_op_is_in_the_inventory(family):
    prefix = family.split()[0]
    wanted = {f"{prefix}.{name}" for name in REQUIRED[family].split()}
    assert wanted - set(supported()[family]) == set()


def test_the_inventory_is_plain_sorted_data():
    found = supported()
    assert json.loads(json.dumps(found)).keys() == found.keys()
    assert all(list(names) == sorted(set(names)) for names in found.values())
    assert "fadd bf16" in found["atomic kinds"]
    assert "__ocml_exp_f32" in found["extern symbols"]
    assert "v_mov_b32" in found["inline assembly"]


def test_an_op_outside_the_inventory_is_refused_and_none_inside_for_its_name():
    text = """
#loc = loc("/src/kernel.py":10:0)
module {{
  tt.func public @kernel(%p: !tt.ptr<i32> loc("p"(#loc))) attributes {{noinline = false}} {{
    %0 = {name} %p : !tt.ptr<i32> loc(#loc)
    tt.return loc(#loc)
  }} loc(#loc)
}} loc(#loc)
"""
    families = supported()
    names = [name for family, members in families.items() if family.endswith(" ops")
             for name in members]  # fmt: skip
    for name in [*set(names) - TERMINATORS, "tt.dance", "arith.dance"]:
        refusal = ""
        try:
            decode_module(parse_module(text.format(name=name)))
        except Exception as error:
            refusal = str(error)
        assert (f"op='{name}' at" in refusal) == name.endswith("dance"), (name, refusal)
