"""Fixtures of the tests that launch third-party kernels on the cpu lane themselves."""

import sys
from pathlib import Path

import pytest

pytest.register_assert_rewrite("attention_reference")

# The helper modules beside this file are no package; tests import them by their own names.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def launcher():
    """Runs a launch on the lane once, however many tests of the module ask for its outcome."""
    import torch
    from attention_launch import Launcher

    from kvfuzz.cpu import CpuLane

    # The references are many small sums, which threads only slow down.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lane = CpuLane()
    lane.activate()
    yield Launcher(lane)
    lane.deactivate()
    torch.set_num_threads(threads)


@pytest.fixture
def tree(vllm):
    """The source tree of a vLLM release, with the stubs that attention kernels need."""
    from attention_launch import attention_tree

    return lambda release: attention_tree(vllm(release)["vllm"])
