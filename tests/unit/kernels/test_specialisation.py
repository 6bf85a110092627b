"""Our kernels are compiled for types and for padded head sizes, and for nothing else."""

import itertools

import pytest
from triton.runtime.jit import JITFunction

from kvfuzz.engine.worker.execute import execute
from kvfuzz.kernels.builtin import (
    concat_and_cache_mla,
    gather_cache,
    gather_indexer,
    gather_mla,
    indexer_quant_and_cache,
    merge_attn_states,
    mla_decode,
    quantize_and_insert_k_cache,
    reshape_and_cache,
)
from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.target import Quantise, TargetSpec

GEOMETRIES = [
    Geometry(num_blocks=5, block_size=16, num_kv_heads=2, head_size=80),
    Geometry(num_blocks=9, block_size=32, num_kv_heads=1, head_size=128),
    Geometry(num_blocks=40, block_size=16, num_kv_heads=1, head_size=96, head_size_v=72),
]


ORDERS = ("nhd", "hnd", "shuffle", "x_packed", "x_packed_v")
LAYOUTS = ("kv_first", "blocks_first")


@pytest.mark.parametrize("op", ["gather_cache", "reshape_and_cache"])
def test_sizes_strides_and_orders_share_a_compilation(
    cpu_lane, monkeypatch, gather_scene, write_scene, scene_with, op
):
    compiled = []
    compile_anew = JITFunction._do_compile

    def counting(self, *values, **named):
        compiled.append(self)
        return compile_anew(self, *values, **named)

    monkeypatch.setattr(JITFunction, "_do_compile", counting)
    scene = gather_scene if op == "gather_cache" else write_scene
    adapters = {"target": resolve(TargetSpec(f"builtin:{op}"))}
    ran = 0
    for geometry, order, layout in itertools.product(GEOMETRIES, ORDERS, LAYOUTS):
        case = lower(scene_with(scene, geometry=geometry, order=order, layout=layout))
        run, _ = execute(case, adapters, cpu_lane, Quantise())
        assert not run.error
        assert not run.missed
        ran += 1
    assert ran == 30
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        (gather_cache.gather_cache_kernel, gather_cache.SIZES),
        (reshape_and_cache.reshape_and_cache_kernel, reshape_and_cache.SIZES),
        (concat_and_cache_mla.concat_and_cache_mla_kernel, concat_and_cache_mla.SIZES),
        (concat_and_cache_mla.concat_and_cache_ds_mla_kernel, concat_and_cache_mla.DS_SIZES),
        (gather_mla.gather_mla_kernel, gather_mla.SIZES),
        (indexer_quant_and_cache.indexer_quant_and_cache_kernel, indexer_quant_and_cache.SIZES),
        (gather_indexer.gather_indexer_kernel, gather_indexer.SIZES),
        (merge_attn_states.merge_attn_states_kernel, merge_attn_states.SIZES),
        (mla_decode.mla_decode_kernel, mla_decode.SIZES),
        (mla_decode.merge_parts_kernel, mla_decode.MERGE_SIZES),
        (
            quantize_and_insert_k_cache.quantize_and_insert_k_cache_kernel,
            quantize_and_insert_k_cache.SIZES,
        ),
    ],
)
def test_no_argument_is_specialised_on_but_pointers(kernel, sizes):
    plain = [
        each.name
        for each in kernel.params
        if not each.is_constexpr and not each.name.endswith("_ptr")
    ]
    assert plain == list(sizes)
    assert all(each.do_not_specialize for each in kernel.params if each.name in sizes)
