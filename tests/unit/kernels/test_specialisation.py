"""Our kernels are compiled for types and for padded head sizes, and for nothing else."""

import pytest
from triton.runtime.jit import JITFunction

from kvfuzz.engine.worker.execute import execute
from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.target import Quantise, TargetSpec

GEOMETRIES = [
    Geometry(num_blocks=5, block_size=16, num_kv_heads=2, head_size=80),
    Geometry(num_blocks=9, block_size=32, num_kv_heads=1, head_size=128),
    Geometry(num_blocks=40, block_size=16, num_kv_heads=1, head_size=96, head_size_v=72),
]


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
    for geometry in GEOMETRIES:
        for order in ("nhd", "hnd", "shuffle", "x_packed", "x_packed_v"):
            for layout in ("kv_first", "blocks_first"):
                case = lower(scene_with(scene, geometry=geometry, order=order, layout=layout))
                run, _ = execute(case, adapters, cpu_lane, Quantise())
                assert not run.error
                assert not run.missed
                ran += 1
    assert ran == 30
    assert len(compiled) == 1
