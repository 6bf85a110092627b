"""Live bytes and other dead bytes, beside a walk over every element of small cases."""

import math

import pytest
import torch

from kvfuzz.engine.worker.fill import before_the_first_launch
from kvfuzz.model.axes import Domain
from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.lower import lower
from kvfuzz.model.round_trip import touched
from kvfuzz.model.target import DeadBytes, Quantise, TargetInfo
from kvfuzz.oracles.dead_bytes import FINITE, dead_byte_variants
from kvfuzz.oracles.liveness import live_bytes, used_entries
from kvfuzz.oracles.observation import Run

LAYOUTS = [
    ("kv_first", "nhd"),
    ("content_packed", "hnd"),
    ("hybrid", "nhd"),
    ("kv_first", "shuffle"),
]


def _images(case):
    return {
        each.name: before_the_first_launch(case, each, torch.device("cpu")) for each in case.buffers
    }


@pytest.fixture(params=LAYOUTS, ids="-".join)
def changes(request):
    layout, order = request.param
    return {"layout": layout, "order": order, "state_blocks": (0,) if layout == "hybrid" else ()}


def _bytes(field, coordinate):
    start = field.byte(coordinate)
    return range(start, start + itemsize(field.dtype))


def _inner(field, **fixed):
    for head in range(field.extents["head"]):
        for dim in range(field.extents["dim"]):
            yield {**fixed, "head": head, "dim": dim}


def test_a_gather_depends_on_the_slots_that_it_names_and_on_nothing_else(
    gather_scene, scene_with, changes
):
    case = lower(scene_with(gather_scene, **changes))
    step = case.steps[0]
    live = live_bytes(case, _images(case))
    expected = {
        byte
        for slot in touched(case, step)
        for name in ("key_cache", "value_cache")
        for at in _inner(case.bound_field(step, name), block=slot // 16, token=slot % 16)
        for byte in _bytes(case.bound_field(step, name), at)
    }
    assert set(torch.nonzero(live["kv_cache"]).flatten().tolist()) == expected
    assert not live["key_out"].any()
    assert not live["value_out"].any()
    assert live.keys() == {"kv_cache", "key_out", "value_out", "block_table"}


def test_a_write_depends_on_the_rows_that_have_a_slot(write_scene, scene_with, changes):
    case = lower(scene_with(write_scene, **changes))
    step = case.steps[0]
    live = live_bytes(case, _images(case))
    rows = [row for row, slot in enumerate(case.integers(step, "slot_mapping")) if slot >= 0]
    for name in ("key", "value"):
        field = case.bound_field(step, name)
        expected = {b for row in rows for at in _inner(field, token=row) for b in _bytes(field, at)}
        assert set(torch.nonzero(live[name]).flatten().tolist()) == expected
    assert len(rows) < case.bound_field(step, "key").extents["token"]
    assert not live["kv_cache"].any()
    assert live.keys() == {"kv_cache", "key", "value"}


def test_entries_of_a_block_table_count_where_a_token_of_their_sequence_needs_them(gather_scene):
    """Tokens 13 to 18 of blocks of 16, and 0 to 1; three columns."""
    case = lower(gather_scene)
    used = used_entries(case, case.steps[0])
    assert used == [[True, True, False], [True, False, False]]
    live = live_bytes(case, _images(case))["block_table"]
    assert live.view(2, 3, 4).all(-1).tolist() == used
    assert live.view(2, 3, 4).any(-1).tolist() == used


def _run(case, dead=None):
    info = TargetInfo("x", case.steps[0].op, Domain(), Quantise(), "", "", dead or DeadBytes())
    images = _images(case)
    return Run(case, info, Quantise(), Domain(), images, images)


@pytest.mark.parametrize("cache_dtype", ["bf16", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"])
@pytest.mark.parametrize("op", ["gather_cache", "reshape_and_cache"])
def test_variants_keep_live_bytes_and_fill_dead_elements_with_finite_numbers_and_nans(
    gather_scene, scene_with, changes, cache_dtype, op
):
    changes = {**changes, "op": op, "cache_dtype": cache_dtype}
    if op == "reshape_and_cache":
        changes |= {"padding": (0, 4), "row_gap": 32}
    run = _run(lower(scene_with(gather_scene, **changes)))
    variants = dead_byte_variants(run)
    assert variants.keys() == {*FINITE, "dead_nan"}
    for name, variant in variants.items():
        assert variant.images.keys() == run.live.keys()
        for buffer, live in run.live.items():
            assert torch.equal(variant.images[buffer][live], run.before[buffer][live])
        for parameter in ("key_cache", "value_cache", "key", "value"):
            field = run.case.bound_field(run.case.steps[0], parameter)
            dtype, image = DTYPES[field.dtype], variant.images[field.buffer]
            at = field.byte(dict.fromkeys(field.extents, 0))
            if not run.live[field.buffer][at]:
                code = int.from_bytes(bytes(image[at : at + dtype.itemsize].tolist()), "little")
                value = dtype.decode(code)
                assert math.isnan(value) if name == "dead_nan" else math.isfinite(value)


def test_stale_entries_name_other_blocks_that_exist(gather_scene):
    case = lower(gather_scene)
    run = _run(case)
    blocks = case.geometry.num_blocks
    before = run.before["block_table"].view(torch.int32)
    stale = ~run.live["block_table"].view(-1, 4)[:, 0]
    for variant in dead_byte_variants(run).values():
        ids = variant.images["block_table"].view(torch.int32)
        assert bool((ids[stale] != before[stale]).all())
        assert 0 <= int(ids.min()) <= int(ids.max()) < blocks


def test_a_target_that_relies_on_finite_bytes_gets_no_nan(gather_scene):
    run = _run(lower(gather_scene), DeadBytes("finite", "its source"))
    assert dead_byte_variants(run).keys() == FINITE.keys()
