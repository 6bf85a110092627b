import pytest


@pytest.fixture(scope="module")
def active_lane():
    """A lane that Triton uses while one module's tests run, and gives back afterwards."""
    from kvfuzz.cpu import CpuLane

    lane = CpuLane()
    lane.activate()
    yield lane
    lane.deactivate()


@pytest.fixture
def lane(active_lane):
    """The active lane with no allocations and its default settings."""
    fresh = type(active_lane)()
    yield active_lane
    active_lane.release_all()
    active_lane.poison = fresh.poison
    active_lane.fuel = fresh.fuel
    active_lane.chunk_bytes = fresh.chunk_bytes


@pytest.fixture
def buffer(lane):
    """Make a named allocation from a tensor and return the view that kernels are given."""

    def make(name, tensor):
        allocated = lane.allocate(name, tensor.numel() * tensor.element_size())
        view = allocated.view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        return view

    return make
