"""Buffers, views and guard zones of an execution."""

import pytest
import torch

from kvfuzz.engine.worker.execute import broken_guard, execute, view
from kvfuzz.engine.worker.lanes import GUARD_BYTES, GuardedBuffers, Seen
from kvfuzz.kernels.adapter import Adapter
from kvfuzz.model.axes import Domain
from kvfuzz.model.case import TensorView
from kvfuzz.model.held import whole
from kvfuzz.model.lower import lower
from kvfuzz.model.target import Quantise, TargetInfo


class PlainLane:
    """A lane that records nothing, like the gpu lane, on the CPU."""

    name, arch, device = "plain", "gfx942", torch.device("cpu")

    def __init__(self):
        buffers = GuardedBuffers(self.device)
        self.allocate, self.guard, self.release = buffers.allocate, buffers.guard, buffers.release
        self.written_outside = buffers.written_outside

    def observe(self, call, manner):
        call()
        return Seen()


def _adapter(call):
    info = TargetInfo("test:x", "gather_cache", Domain(), Quantise(), "", "")
    return {"target": Adapter(info, call)}


def test_a_view_is_strided_in_bytes_over_its_buffer():
    buffer = torch.arange(64, dtype=torch.uint8)[8:]
    of = TensorView("v", "b", "i32", (2, 3), (16, 4), offset=4)
    expected = buffer[4:].clone()
    seen = view(buffer, of)
    assert seen.shape == (2, 3)
    assert int(seen[1, 2]) == int.from_bytes(bytes(expected[24:28].tolist()), "little")


@pytest.mark.parametrize(("offset", "expected"), [(-1, -1), (-40, -40), (0, None), (320, 320)])
def test_a_write_around_an_allocation_is_placed_relative_to_it(offset, expected):
    buffers = GuardedBuffers(torch.device("cpu"))
    inner = buffers.allocate("b", torch.zeros(320, dtype=torch.uint8), whole(320))
    raw = inner.as_strided((320 + 2 * GUARD_BYTES,), (1,), 0)
    raw[GUARD_BYTES + offset] = 1
    assert broken_guard(buffers.guard("b"), 320) == expected


def test_the_run_keeps_the_bytes_before_and_names_a_broken_guard(gather_scene):
    case = lower(gather_scene)

    def spills(tensors, scalars):
        key = tensors["key"]
        past = key.numel() + key.storage_offset()
        key.as_strided((1,), (1,), past).fill_(1.0)

    run, _ = execute(case, _adapter(spills), PlainLane(), Quantise())
    assert torch.equal(run.before["key_out"], run.after["key_out"])
    assert run.guards_broken == {"key_out": case.buffer("key_out").nbytes}


def test_a_kernel_that_spills_into_the_guard_zone_fails_frame_where_nothing_is_recorded(
    gather_scene,
):
    from kvfuzz.oracles.properties import BASE
    from kvfuzz.oracles.stored_bytes import complete, frame, immutable, oracle

    case = lower(gather_scene)

    def spills(tensors, scalars):
        key = tensors["key"]
        key.as_strided((1,), (1,), key.numel() + key.storage_offset()).fill_(1.0)

    run, _ = execute(case, _adapter(spills), PlainLane(), Quantise())
    runs = {BASE: run}
    assert frame(runs).place.byte == case.buffer("key_out").nbytes
    assert complete(runs) is not None
    assert oracle(runs) is None
    assert immutable(runs) is None
