"""A cache in use on the gpu lane, step by step the same bytes as on the cpu lane. Needs a GPU."""

import pytest

from kvfuzz.engine.pool import Worker
from kvfuzz.engine.worker.entry import WorkerConfig
from kvfuzz.errors import Exit
from kvfuzz.model.target import TargetSpec
from kvfuzz.strategies import drawn_case, space
from kvfuzz.strategies.choices import Drawn

pytestmark = pytest.mark.gpu

OURS = "stateful:builtin"


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")


def test_our_kernels_keep_every_byte_on_the_gpu(campaign):
    code, found, summary = campaign(OURS, lane="gpu", max_cases=150, budget_s=240)
    assert (code, found, summary.cases) == (Exit.CLEAN, [], 150)
    unchecked = {name for name in summary.not_checked if name not in summary.passed}
    assert unchecked == {"bounds", "no_overflow", "no_race"}


@pytest.mark.parametrize("name", ["copy_on_write_forgotten", "copied_tail_is_stale"])
def test_a_broken_copy_is_found_on_the_gpu_and_its_seed_replays_on_the_cpu(campaign, name):
    from kvfuzz.engine.replay import replay

    code, (found,), _ = campaign(f"stateful:mutant:{name}", lane="gpu", max_cases=60)
    assert code == Exit.FINDING
    assert len(found.seed.case.script.actions) <= 4
    on_cpu = replay(found.seed, lane="cpu")
    assert on_cpu.exit_code == Exit.FINDING
    assert on_cpu.same_bytes


def test_both_lanes_leave_the_same_bytes_after_a_script():
    target = TargetSpec(OURS)
    gpu = Worker(WorkerConfig(target, "gpu", "gfx942"), case_timeout_s=120)
    cpu = Worker(WorkerConfig(target, "cpu", "gfx950"), case_timeout_s=120)
    with gpu, cpu:
        within = space("stateful_cache", gpu.describe().info.domain)
        for seed in range(60):
            case = drawn_case(Drawn(seed), within)
            found, expected = (each.check(case).digest for each in (gpu, cpu))
            assert found == expected != "", case.script
