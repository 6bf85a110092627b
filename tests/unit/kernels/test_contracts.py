import pytest
import torch

from kvfuzz.errors import UsageError
from kvfuzz.kernels.contract_table import CONTRACTS
from kvfuzz.kernels.contracts import bind, objections
from kvfuzz.model.lower import lower
from kvfuzz.model.scene import OPS, QUANT_OP

TENSORS = {
    "key_cache": torch.zeros(5, 16, 2, 32),
    "value_cache": torch.ones(5, 16, 2, 32),
    "key": torch.zeros(3, 2, 32),
    "value": torch.ones(3, 2, 32),
    "k_scale": torch.ones(1),
    "v_scale": torch.ones(1),
    "slot_mapping": torch.arange(3),
    "block_table": torch.zeros(1, 4, dtype=torch.int32),
    "seq_starts": torch.zeros(1, dtype=torch.int32),
    "cu_seqlens_kv": torch.tensor([0, 3], dtype=torch.int32),
    "token_to_batch": torch.zeros(3, dtype=torch.int32),
}


def scalars(cache_dtype="bf16", layout="NHD"):
    return {"kv_cache_layout": layout, "cache_dtype": cache_dtype}


@pytest.mark.parametrize("op", OPS)
def test_a_contract_names_exactly_what_lowering_produces(op, scene_with, gather_scene):
    made = {"cache_dtype": "int8", "granularity": "token_head"} if op == QUANT_OP else {}
    step = lower(scene_with(gather_scene, op=op, **made)).steps[0]
    contract = CONTRACTS[op]
    renamed = {"k_scale": "k_scale_cache", "v_scale": "v_scale_cache"} if made else {}
    handed = {renamed.get(name, name) for name in (*step.tensors, *step.scalars)}
    assert handed == {*contract.required, *contract.optional}


def test_arguments_arrive_under_the_names_that_a_function_uses():
    seen = {}

    def gather(
        k_cache, v_cache, key_out, value_out, block_tables, cu_seq_lens, k_scales, total_tokens
    ):
        seen.update(locals())

    bind(gather, "gather_cache")(TENSORS, scalars())
    assert seen["k_cache"] is TENSORS["key_cache"]
    assert seen["v_cache"] is TENSORS["value_cache"]
    assert seen["key_out"] is TENSORS["key"]
    assert seen["value_out"] is TENSORS["value"]
    assert seen["block_tables"] is TENSORS["block_table"]
    assert seen["cu_seq_lens"] is TENSORS["cu_seqlens_kv"]
    assert seen["k_scales"] is TENSORS["k_scale"]
    assert seen["total_tokens"] == 3


@pytest.mark.parametrize(
    ("cache_dtype", "spelling", "quantised"),
    [
        ("bf16", "auto", False),
        ("fp32", "auto", False),
        ("e4m3fn", "fp8_e4m3", True),
        ("e4m3fnuz", "fp8_e4m3", True),
        ("e5m2", "fp8_e5m2", True),
        ("e5m2fnuz", "fp8_e5m2", True),
    ],
)
def test_the_cache_dtype_is_spelt_as_vllm_does(cache_dtype, spelling, quantised):
    seen = []

    def write(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, quant):
        seen.append((kv_cache_dtype, quant))

    bind(write, "reshape_and_cache")(TENSORS, scalars(cache_dtype))
    assert seen == [(spelling, quantised)]


def test_sizes_are_read_off_the_cache_view():
    seen = []

    def write(key, value, key_cache, value_cache, slots, page_size, num_heads, head_dim):
        seen.append((page_size, num_heads, head_dim))

    bind(write, "reshape_and_cache")(TENSORS, scalars())
    assert seen == [(16, 2, 32)]


def test_sizes_of_an_x_packed_cache_are_read_where_they_are():
    seen = []

    def write(key, value, key_cache, value_cache, slots, block_size, num_heads, head_dim):
        seen.append((block_size, num_heads, head_dim))

    def write_v(key, value, key_cache, value_cache, slots, head_size_v):
        seen.append(head_size_v)

    packed = {
        "key_cache": torch.zeros(5, 2, 4, 16, 8),
        "value_cache": torch.zeros(5, 2, 48, 16),
        "value": torch.ones(3, 2, 48),
    }
    for function in (write, write_v):
        bind(function, "reshape_and_cache")(TENSORS | packed, scalars(layout="XPACKED"))
    assert seen == [(16, 2, 32), 48]


def test_an_unknown_parameter_with_a_default_keeps_it():
    seen = []

    def write(key, value, key_cache, value_cache, slot_mapping, pack_factor=7):
        seen.append(pack_factor)

    bind(write, "reshape_and_cache")(TENSORS, scalars())
    assert seen == [7]


def test_positional_only_parameters_are_passed_by_position():
    seen = []

    def write(key, value, key_cache, value_cache, slot_mapping, /):
        seen.append(slot_mapping)

    bind(write, "reshape_and_cache")(TENSORS, scalars())
    assert seen == [TENSORS["slot_mapping"]]


def test_an_unknown_required_parameter_is_named_with_the_known_ones():
    def write(key, value, key_cache, value_cache, slot_mapping, cos_sin_cache):
        pass

    with pytest.raises(
        UsageError,
        match=r"write as reshape_and_cache: required parameter 'cos_sin_cache' is not known; "
        r"known parameters are key, value, .*k_scale",
    ):
        bind(write, "reshape_and_cache")


def test_a_function_that_does_not_take_what_the_op_needs_is_refused():
    def write(key, value, key_cache, value_cache):
        pass

    assert objections(write, "reshape_and_cache") == ("takes no slot_mapping",)
    with pytest.raises(UsageError, match="takes no slot_mapping"):
        bind(write, "reshape_and_cache")


def test_a_function_that_forwards_its_keywords_gets_every_argument_of_the_op():
    seen = {}

    def gather(key_cache, **more):
        seen.update(more, key_cache=key_cache)

    bind(gather, "gather_cache")(TENSORS, scalars())
    contract = CONTRACTS["gather_cache"]
    assert seen.keys() == {*contract.required, *contract.optional}


def test_a_function_of_keywords_is_handed_no_argument_that_a_case_lacks():
    seen = {}

    def attention(**arguments):
        seen.update(arguments)

    handed = {name: torch.zeros(1) for name in CONTRACTS["unified_attention"].required}
    bind(attention, "unified_attention")({**handed, "k_scale": torch.ones(1)}, {"window": 3})
    assert set(seen) == {*handed, "k_scale", "window"}


def test_a_function_that_needs_what_a_case_lacks_is_handed_none():
    seen = {}

    def attention(
        query,
        key_cache,
        value_cache,
        output,
        block_table,
        seq_lens,
        query_start_loc,
        sinks,
        softmax_scale,
    ):
        seen.update(locals())

    handed = {name: torch.zeros(1) for name in CONTRACTS["unified_attention"].required}
    bind(attention, "unified_attention")(handed, {"scale_bits": 0x3F800000})
    assert seen["sinks"] is None
    assert seen["softmax_scale"] == 1.0


def test_what_has_no_signature_is_refused():
    with pytest.raises(UsageError, match="cannot be bound"):
        bind(int, "unified_attention")
