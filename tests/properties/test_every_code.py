"""Every 16-bit number through each op that quantises, every 8-bit code back: exact, bit for bit."""

import pytest
import torch

from kvfuzz.engine.worker.execute import execute
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import AttentionLayer, Batch, Plan, Sequence
from kvfuzz.model.scene import Scene
from kvfuzz.oracles.codec import is_nan

FP8 = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
BLOCKS, TOKENS, HEADS, DIMS = 16, 16, 4, 64
COUNT = BLOCKS * TOKENS * HEADS * DIMS
SCALES = {
    "one": 0x3F800000,
    "power": 0x3B000000,
    "tenth": 0x3DCCCCCD,
    "tiny": 0x00800003,
    "huge": 0x7E967699,
    "three": 0x40400000,
}


def _scene(op, model, cache, scale, granularity="tensor"):
    layout = "blocks_first" if granularity == "token_head_inline" else "kv_first"
    geometry = Geometry(BLOCKS, TOKENS, HEADS, DIMS)
    layer = AttentionLayer(
        "layer.0", "kv_cache", layout, "nhd", geometry, cache, granularity=granularity
    )
    run = Sequence(tuple(range(BLOCKS)), 0, BLOCKS * TOKENS)
    return Scene(
        op=op,
        layer="layer.0",
        plan=Plan((layer,)),
        batch=Batch((run,), table_width=BLOCKS),
        model_dtype=model,
        k_scale=scale,
        v_scale=scale,
    )


def _run(judged, case, images):
    run, _ = execute(
        case,
        {"target": judged.target},
        judged.lane,
        judged.target.info.quantise,
        filled_before=images,
    )
    assert not run.error, run.error
    return run


def _every_code(order=1):
    """All 65,536 codes in rows of key or value, in steps of `order`, which is odd."""
    codes = torch.arange(COUNT, dtype=torch.int64) * order % COUNT
    return codes.to(torch.int32).to(torch.int16).view(torch.uint8)


def _wrong(run):
    """Which bytes that had to be written are not what arithmetic says."""
    return {
        name: int((run.expectation.wrong(name, run.after[name])).sum())
        for name in run.expectation.written
    }


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("cache", FP8)
@pytest.mark.parametrize("model", ["fp16", "bf16"])
def test_each_number_is_quantised_exactly(judge, model, cache, scale):
    judged = judge("builtin:reshape_and_cache")
    case = lower(_scene("reshape_and_cache", model, cache, SCALES[scale]))
    run = _run(judged, case, {"key": _every_code(), "value": _every_code(40503)})
    assert _wrong(run) == {"kv_cache": 0}
    dtype, source = DTYPES[cache], DTYPES[model]
    stored = run.after["kv_cache"].to(torch.int64)
    kept = set(stored[:COUNT].tolist())
    # Nothing but the NaNs became one, and, by a scale that spares the range, every code occurs.
    nans = int(is_nan(torch.arange(COUNT), source).sum())
    assert int(is_nan(stored[:COUNT], dtype).sum()) == nans
    if scale == "one":
        finite = {code for code in range(256) if abs(dtype.decode(code)) <= dtype.max_finite}
        assert len(finite - kept) <= 1, "of all codes that of minus zero alone may be missing"


@pytest.mark.parametrize("cache", ["int8", "e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("model", ["fp16", "bf16"])
@pytest.mark.parametrize("order", [1, 40503])
def test_each_finite_number_is_quantised_exactly_by_a_scale_of_its_head(judge, model, cache, order):
    """In order, a head holds 64 neighbours; in the other order, magnitudes of all kinds."""
    judged = judge("builtin:per_token_head_quant")
    case = lower(_scene("per_token_head_quant", model, cache, SCALES["one"], "token_head"))
    codes = _every_code(order).view(torch.int16)
    top = DTYPES[model].max_code
    finite = torch.where((codes & 0x7FFF) > top, codes & 0x7FF, codes)
    images = {"key": finite, "value": finite.flip(0).contiguous()}
    run = _run(judged, case, {name: each.view(torch.uint8) for name, each in images.items()})
    assert _wrong(run) == {"kv_cache": 0, "k_scale": 0, "v_scale": 0}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("cache", FP8)
@pytest.mark.parametrize("model", ["fp16", "bf16", "fp32"])
def test_each_code_is_read_exactly(judge, model, cache, scale):
    judged = judge("builtin:gather_cache")
    case = lower(_scene("gather_cache", model, cache, SCALES[scale]))
    codes = torch.arange(2 * COUNT, dtype=torch.int64).to(torch.uint8)
    run = _run(judged, case, {"kv_cache": codes})
    assert _wrong(run) == {"key_out": 0, "value_out": 0}
    assert torch.equal(run.after["kv_cache"], codes)


@pytest.mark.parametrize("op", ["reshape_and_cache", "gather_cache"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_each_pattern_is_copied_as_it_is(judge, op, dtype):
    """NaN payloads among them: 0x7F81 stays 0x7F81."""
    judged = judge(f"builtin:{op}")
    case = lower(_scene(op, dtype, dtype, SCALES["one"]))
    both = torch.cat([_every_code(), _every_code(40503)])
    images = {"kv_cache": both}
    if op == "reshape_and_cache":
        images = {"key": _every_code(), "value": _every_code(40503)}
    run = _run(judged, case, images)
    if op == "reshape_and_cache":
        assert torch.equal(run.after["kv_cache"], both)
    else:
        assert torch.equal(torch.cat([run.after["key_out"], run.after["value_out"]]), both)
