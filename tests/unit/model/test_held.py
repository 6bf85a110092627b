"""Which bytes of a large buffer an image holds."""

from itertools import pairwise

import pytest
import torch

from kvfuzz.engine.worker.fill import filled
from kvfuzz.model.fill import ByteFill, byte_at
from kvfuzz.model.held import Held, held, whole
from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import Sequence
from kvfuzz.oracles import image

BLOCKS = 1 << 20
NAMED = (BLOCKS - 7, 12)


@pytest.fixture(params=["kv_first", "blocks_first", "hybrid", "content_packed"])
def case(request, gather_scene, scene_with):
    """A gather of two blocks of a cache of 4 GiB."""
    scene = scene_with(
        gather_scene,
        layout=request.param,
        state_blocks=(500,) if request.param == "hybrid" else (),
        geometry=Geometry(num_blocks=BLOCKS, block_size=16, num_kv_heads=2, head_size=32),
        sequences=(Sequence(NAMED, 13, 6),),
    )
    return lower(scene)


def test_a_small_buffer_is_held_whole(gather_scene):
    case = lower(gather_scene)
    kept = held(case, "kv_cache")
    assert kept == whole(case.buffer("kv_cache").nbytes)
    assert kept.is_whole


def test_spans_are_ascending_disjoint_and_few(case):
    kept = held(case, "kv_cache")
    assert not kept.is_whole
    assert all(a[1] < b[0] for a, b in pairwise(kept.spans))
    assert kept.spans[0][0] >= 0
    assert kept.spans[-1][1] == kept.nbytes
    assert kept.size < 1 << 20


@pytest.mark.parametrize("name", ["k", "v"])
def test_every_byte_of_the_blocks_that_a_step_names_and_their_neighbours_is_held(case, name):
    kept, field = held(case, "kv_cache"), case.field(name)
    for block in (*NAMED, NAMED[0] - 1, NAMED[1] + 1, 0, BLOCKS - 1):
        for token, head, dim in ((0, 0, 0), (15, 1, 31), (7, 0, 31)):
            byte = field.byte({"block": block, "token": token, "head": head, "dim": dim})
            assert kept.address(kept.position(byte)) == byte


def test_the_state_of_a_hybrid_is_held(case):
    for field in (each for each in case.fields if each.name == "state"):
        kept = held(case, "kv_cache")
        first = field.byte({"block": 500, "dim": 0})
        last = field.byte({"block": 500, "dim": field.extents["dim"] - 1})
        assert kept.position(last) - kept.position(first) == last - first


def test_positions_and_addresses_are_inverse_and_what_is_not_held_is_refused():
    kept = Held(1000, ((0, 64), (128, 256), (960, 1000)))
    assert [kept.address(kept.position(at)) for at in (0, 63, 128, 255, 960, 999)] == [
        0, 63, 128, 255, 960, 999,
    ]  # fmt: skip
    assert kept.size == 64 + 128 + 40
    for at in (64, 127, 256, 959, 1000):
        with pytest.raises(ValueError, match="not held"):
            kept.position(at)


def test_the_fill_of_a_span_is_the_fill_of_those_addresses(case):
    buffer, kept = case.buffer("kv_cache"), held(case, "kv_cache")
    data = filled(buffer.fill, "kv_cache", kept, torch.device("cpu"))
    assert isinstance(buffer.fill, ByteFill)
    for position in (0, 1, kept.size // 2, kept.size - 1):
        assert int(data[position]) == byte_at(buffer.fill, "kv_cache", kept.address(position))


def test_positions_of_a_field_are_those_of_its_addresses(case):
    kept, field = held(case, "kv_cache"), case.field("v")
    rest = {"token": 3, "head": 1, "dim": 5}
    coordinates = {axis: torch.tensor([value]) for axis, value in rest.items()}
    at = image.positions(case, field, block=torch.tensor(NAMED), **coordinates)
    assert at.tolist() == [kept.position(field.byte({"block": each, **rest})) for each in NAMED]


def test_what_is_held_in_part_is_reserved_and_not_committed():
    from kvfuzz.cpu import reserve
    from kvfuzz.model.fill import LARGE

    assert LARGE >= reserve.LARGE


def test_of_heads_outside_of_blocks_each_head_is_held_where_the_batch_is(gather_scene, scene_with):
    scene = scene_with(
        gather_scene,
        layout="content_packed",
        order="hnd",
        nesting="head_first",
        geometry=Geometry(num_blocks=BLOCKS, block_size=16, num_kv_heads=2, head_size=32),
        sequences=(Sequence(NAMED, 13, 6),),
    )
    large = lower(scene)
    kept = held(large, "kv_cache")
    assert kept.size < 1 << 20
    for name in ("k", "v"):
        for head in (0, 1):
            field = large.field(name)
            byte = field.byte({"block": NAMED[0], "token": 15, "head": head, "dim": 31})
            assert kept.address(kept.position(byte)) == byte
