"""What a worker keeps between cases."""

from pathlib import Path

import pytest
import torch

from kvfuzz.engine.worker.cpu_lane import CheckedCpuLane
from kvfuzz.model.held import whole

MIB = 1 << 20


def resident_mib():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


@pytest.fixture
def checked_lane():
    lane = CheckedCpuLane("gfx942")
    yield lane
    lane.close()


def filled_often(lane, nbytes):
    """As a case with many variants: twenty images, and one small buffer that outlives them."""
    data = torch.ones(nbytes, dtype=torch.uint8)
    images = [data.clone() for _ in range(20)]
    lane.allocate("big", data, whole(nbytes))
    last = torch.ones(1000)  # at the top of the heap, so that it cannot shrink from there
    lane.release()
    del images
    return last


def test_memory_of_a_large_case_is_given_back_when_it_is_over(checked_lane):
    before = resident_mib()
    kept = filled_often(checked_lane, 8 * MIB)
    checked_lane.rest()
    assert resident_mib() - before < 40
    del kept
